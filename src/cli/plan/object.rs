//! The month of an object tier: the load of the trace, as often as it fits, at the prices given.

use std::time::Duration;

use kvstrata_tiers::error::{Error, Result};

use super::{Args, Hierarchy};
use crate::{
    config,
    sim::{Bill, ObjectLoad},
    trace::Trace,
};

/// What the tier named `object` costs in a month in which the trace goes on as it is.
///
/// # Errors
/// `Invalid` if there is no such tier, the bytes of a block are not known, or the trace has no length.
pub(super) fn bill(
    (args, settings): (&Args, &config::Object),
    trace: &Trace,
    hierarchy: &Hierarchy,
    block_bytes: Option<u64>,
) -> Result<Bill> {
    let number = args.tiers.iter().position(|tier| tier.name == "object").ok_or_else(|| {
        Error::invalid("object: it is not among the tiers; add object=CAPACITY to --tiers")
    })?;
    let block_bytes = block_bytes.ok_or_else(|| {
        Error::invalid(
            "object: what blocks cost depends on their bytes; give --model or --block-bytes",
        )
    })?;
    let elapsed = duration(trace);
    if elapsed.is_zero() {
        return Err(Error::invalid("object: all requests of the trace are at the same time"));
    }
    let of = |counts: &[u64]| counts.get(number).copied().unwrap_or(0);
    let capacity = hierarchy.blocks.get(number).copied().unwrap_or(0);
    let load = ObjectLoad {
        elapsed,
        block_bytes,
        pack_bytes: settings.pack_bytes.0,
        written_blocks: of(&hierarchy.outcome.insertions),
        read_blocks: of(&hierarchy.outcome.hits),
        stretches: of(&hierarchy.outcome.stretches),
        stored_blocks: u64::from(capacity.min(trace.blocks_unique())),
    };
    Ok(load.bill(&settings.prices))
}

fn duration(trace: &Trace) -> Duration {
    let mut times = trace.requests().map(|request| request.timestamp_ms);
    let (first, last) = (times.next().unwrap_or(0), times.next_back().unwrap_or(0));
    Duration::from_millis(last.saturating_sub(first))
}
