//! Doubles of colder tiers and the contract that all tiers pass. Feature `testing`.
//!
//! [`MemoryStore`] is a colder tier in memory: it is what the stack is tested against until, and
//! beside, the real ones. [`Faulty`] wraps any tier and makes it fail on demand, [`Throttled`] makes it as
//! slow as a device. [`suite`] is the
//! contract of [`crate::store::BlockStore`]: every implementation and every wrapper calls it.
//! [`MemoryRuns`] cuts what a [`MemoryStore`] has into runs, for tests of what copies them.
//! [`MemoryIndex`] and [`index_suite`] are the same for [`crate::nvme::index::Index`].
//!
//! The same for the disk under the nvme tier: [`VolatileDevice`] forgets what was not synced,
//! [`FaultyDevice`] fails on demand, and [`device_suite`] is the contract of
//! [`crate::nvme::device::Device`].
//!
//! [`device_copy_suite`] is the contract of [`crate::gpu::DeviceCopy`].
//!
//! [`Mutator`] damages the inputs of decoders.
//! Under the object tier, [`FaultyObjectStore`] is a store in memory that fails on demand.

mod arena;
pub mod device_copy_suite;
pub mod device_suite;
mod faulty;
mod faulty_device;
mod faulty_object_store;
mod fixture;
pub mod index_suite;
mod memory;
mod memory_index;
mod memory_runs;
mod mutator;
mod random;
pub mod suite;
mod throttled;
mod volatile;

pub use self::{
    arena::Arena,
    faulty::{Fault, Faulty},
    faulty_device::{Call, DeviceFault, FaultyDevice, Flip},
    faulty_object_store::{FaultyObjectStore, Trouble},
    fixture::{Fixture, block_bytes, hash_of, pack},
    memory::MemoryStore,
    memory_index::MemoryIndex,
    memory_runs::MemoryRuns,
    mutator::Mutator,
    random::Draws,
    throttled::Throttled,
    volatile::{SECTOR_BYTES, VolatileDevice},
};
