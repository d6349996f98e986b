//! The object tier: blocks in a bucket of any object store, in packs of 16 to 64 MiB.
//!
//! [`names`] says what lies where in the bucket, [`format`](mod@format) what its bytes mean, and
//! [`codec`] how a block becomes fewer of them.
//!
//! [`bucket`] is the only door to the store: everything above it asks by name and gets exact bytes,
//! an error that says what to do, or `Busy`.
//!
//! [`owner`] says who may write in the name of an ordinal, [`manifest_log`] what packs there are, and
//! [`rebuild`] finds out from the bucket alone; [`local`] keeps a copy of the log.

pub mod bucket;
pub mod codec;
pub mod format;
pub mod local;
pub mod manifest_log;
mod metrics;
pub mod names;
pub mod owner;
pub mod rebuild;
#[cfg(test)]
mod rig_tests;

pub use metrics::{ObjectMetrics, OpLabel, OutcomeLabel, UnsentLabel};
