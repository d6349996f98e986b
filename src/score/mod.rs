//! What a hit is worth to a router: pure functions, no I/O, no clock, no randomness of their own.
//!
//! ```text
//! saved(k)  = prefill(d .. d+k) - load(k)            milliseconds, for the k blocks behind the device
//! k*        = the k that saves most, the smallest of equals; saved(0) = 0, so a loss is never counted
//! credit    = saved(k*) / mean prefill time of a missing block                          blocks
//! cost      = overlap_score_weight x max(0, N - device_credit x d - credit) + decode_blocks
//! ```
//! `N` is the prompt in blocks, `d` the prefix that the engine's device has. Without tiers the cost is
//! `overlap_score_weight x prefill_blocks + decode_blocks`, the published formula. [`Mode::Constants`]
//! is what routers do that know tiers by weights only.
//!
//! Loading from a tier takes `queue + setup + k x block` milliseconds, queue and setup once for each
//! [`Segment::source`]. `load` has that, [`assess()`] the credit and the cost, [`pick()`] the choice.
//! The worked example and the properties are in the tests.

mod assess;
mod load;
mod pick;

pub use self::{
    assess::{Assessment, Candidate, Mode, Settings, Weights, assess},
    load::{LoadCost, Prefill, Segment, break_even_blocks, constant_weight},
    pick::{pick, probabilities},
};

#[cfg(test)]
mod tests;
