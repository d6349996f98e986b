//! The object tier: blocks in packs in an object store.
//!
//! [`bucket`] is the only door to the store: everything above it asks by name and gets exact bytes,
//! an error that says what to do, or `Busy`.

pub mod bucket;
mod metrics;

pub use metrics::{ObjectMetrics, OpLabel, OutcomeLabel, UnsentLabel};
