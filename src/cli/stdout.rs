//! Writing results to standard output.

use std::io::{self, Write};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use serde::Serialize;

/// Writes `text` to standard output in one go. A reader that has gone (`| head`) is no error.
///
/// # Errors
/// `Unavailable` if the output cannot be written for another reason, such as a full disk.
///
/// # Blocking
/// As long as the reader takes.
pub(super) fn print(text: &str) -> Result<()> {
    write(text.as_bytes())
}

/// Writes a report as JSON for programs.
///
/// # Errors
/// As [`print`]; `Internal` if it cannot be written as JSON.
///
/// # Blocking
/// As long as the reader takes.
pub(super) fn print_json(report: &impl Serialize) -> Result<()> {
    let failed = |error| Error::new(ErrorKind::Internal, "write JSON").because(error);
    let text = serde_json::to_string_pretty(report).map_err(failed)?;
    print(&format!("{text}\n"))
}

/// Writes `bytes` to standard output in one go. A reader that has gone is no error.
///
/// # Errors
/// As [`print`].
///
/// # Blocking
/// As long as the reader takes.
pub(super) fn write(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorKind::Unavailable, "write to standard output").because(source))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
