//! Charts of a report, as SVG.

use std::path::Path;

use kvstrata_tiers::error::Result;

use super::report::Report;

pub(super) fn write(_report: &Report, _folder: &Path) -> Result<()> {
    Ok(())
}
