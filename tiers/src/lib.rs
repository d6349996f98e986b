//! The kvstrata store: blocks at rest.

pub mod block;
pub mod checksum;
pub mod dram;
pub mod error;
pub mod limits;
pub mod namespace;
pub mod tier;
