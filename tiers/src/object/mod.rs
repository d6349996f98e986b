//! The object tier: blocks in a bucket of any object store, in packs of 16 to 64 MiB.
//!
//! [`names`] says what lies where in the bucket, [`format`](mod@format) what its bytes mean, and
//! [`codec`] how a block becomes fewer of them.

pub mod codec;
pub mod format;
pub mod names;
