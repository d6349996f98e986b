//! The memory that blocks lie in: memfd regions, cut into extents, carved into slots.
//!
//! All `unsafe` of the dram tier is here, behind types whose *ownership* makes it sound:
//!
//! ```text
//! Region --> Extent (owned, one per piece of a region)
//!              | carve(slot_bytes)
//!              v
//!            FreeSlot (owned, one per slot)  <----------------------------+
//!              | take(lengths)                                            |
//!              v                                                          | last reference
//!            BlockWriter (owned, one per part: exclusive, writable)  ---->| dropped
//!              | seal(all parts of the slot)                              |
//!              v                                                          |
//!            Payload (shared, immutable; clones are pins)  -------------->+
//! ```
//!
//! - None of the owned types can be cloned, and each is only made from its predecessor, so two
//!   writers never share a byte and a byte that a [`Payload`] shows is never written.
//! - A slot goes back to its home only when the last writer or payload of it is dropped: evicting a
//!   block that somebody still reads is harmless, the memory stays until the reader lets go.
//! - An extent can be carved anew only when every slot has come home: [`rejoin`] takes the slots and
//!   returns the extent, whose next carving is the next generation.
//!
//! Why memfd and not plain anonymous memory: a region can be shown to clients on the same host by
//! passing its descriptor. Why not one allocation per block: the tier would fragment, and its
//! size could not be bounded to the byte.

mod region;
mod slot;

pub(crate) use region::{Extent, Region, map_extents};
pub use slot::{BlockWriter, Payload};
pub(crate) use slot::{CarveView, FreeSlot, Home, rejoin, seal};

#[cfg(test)]
mod tests;
