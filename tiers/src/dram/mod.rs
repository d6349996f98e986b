//! The dram tier's memory: an arena of memfd regions, lent out in extents to slot sizes.
//!
//! This module hands out memory and takes it back. Which block lies in it is the map's business,
//! which block leaves is the stack's.

mod arena;
mod pool;

pub(crate) use arena::seal;
pub use arena::{BlockWriter, Payload};
pub(crate) use pool::{Candidate, NoRoom, Pool, slot_bytes};
