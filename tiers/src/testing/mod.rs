//! Doubles of colder tiers and the contract that all tiers pass. Feature `testing`.
//!
//! [`MemoryStore`] is a colder tier in memory: it is what the stack is tested against until, and
//! beside, the real ones. [`Faulty`] wraps any tier and makes it fail on demand. [`suite`] is the
//! contract of [`crate::store::BlockStore`]: every implementation and every wrapper calls it.
//! [`MemoryIndex`] and [`index_suite`] are the same for [`crate::nvme::index::Index`].

mod faulty;
mod fixture;
pub mod index_suite;
mod memory;
mod memory_index;
pub mod suite;

pub use self::{
    faulty::{Fault, Faulty},
    fixture::{Fixture, block_bytes, hash_of, pack},
    memory::MemoryStore,
    memory_index::MemoryIndex,
};
