//! Gets and puts, whichever way their bytes travel: what a path decides, it decides here, once.
//!
//! A path reads requests and writes answers in its own form; the flows check what was asked, load
//! ahead, count, touch, watch over claims and wait for nvme. Neither knows the other's bytes.

mod ahead;
mod delivered;
mod durable;
mod get;
mod prefetch;
mod put;

use std::time::Duration;

pub(crate) use delivered::Delivered;
pub(crate) use get::{GetAsk, GetFlow, Ready, Step};
pub(crate) use prefetch::Prefetched;
pub(crate) use put::{GivenUp, PutAsk, PutFlow, Results, parent};

use kvstrata_tiers::error::{Error, Result};

/// A count on the wire; counts are bounded far below.
#[must_use]
pub(crate) fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// A duration on the wire.
#[must_use]
pub(crate) fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// A time given in milliseconds, 0 taking the default.
pub(crate) fn period(
    field: &str,
    given_ms: u32,
    default: Duration,
    max: Duration,
) -> Result<Duration> {
    let given = Duration::from_millis(u64::from(given_ms));
    if given.is_zero() {
        return Ok(default);
    }
    if given > max {
        return Err(Error::invalid(format!(
            "{field}: {given_ms} given, 0 to {} allowed, 0 takes {}",
            max.as_millis(),
            default.as_millis()
        )));
    }
    Ok(given)
}
