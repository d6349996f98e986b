//! The kvstrata store: blocks at rest, in tiers.
//!
//! This crate knows no wire, no cluster and no router. It promises one thing above all: *a get
//! returns exactly the bytes that were put under that key, or nothing.*
//!
//! Read in this order: [`stack`] (the flows), [`tier`] and [`store`] (the words and the seam for
//! colder tiers), [`namespace`] and [`block`] (identity), then `map` (the one in-memory map),
//! [`dram`] (the memory) and [`evict`] (who leaves). [`gpu`] copies blocks between the memory and a GPU.

pub mod account;
pub mod admission;
pub mod block;
pub mod checksum;
mod description;
pub mod dram;
pub mod error;
pub mod event;
pub mod evict;
mod fields;
pub mod gpu;
mod key;
pub mod labels;
pub mod limits;
mod map;
pub mod metrics;
pub mod namespace;
pub mod nvme;
pub mod object;
pub mod rate;
mod seldom;
pub mod shared;
pub mod stack;
pub mod store;
pub mod tier;

#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use fields::Damage;
pub use key::IndexKey;
pub use map::{Checksums, Location};
