//! Which resident block leaves next.
//!
//! A policy orders ids; it owns no blocks and does no I/O. The caller decides when to evict,
//! removes what the policy returns, and must tell the policy of every arrival, use and departure.
//! The live map runs one policy for each (shard, slot size), `plan` runs one for a whole simulated
//! tier: the code is the same.
//!
//! Order of use: a request's blocks are inserted and touched **tail first** (*reverse touch*), so
//! that leaves leave before their parents. The policies rely on the caller for that.
//!
//! Ids are small dense numbers that the caller hands out again (slots, not hashes): [`S3Fifo`] and
//! [`ArcPolicy`] index arrays by them and hold 24 bytes for each id up to the largest one seen. A
//! map from hash to list node inside the policy would repeat the map that the caller has anyway.

use std::{
    fmt::Debug,
    hash::{BuildHasherDefault, Hasher},
};

mod arc;
mod lru;
mod queues;
mod s3fifo;

pub use self::{arc::ArcPolicy, lru::Lru, s3fifo::S3Fifo};

/// The caller's name of a resident block; may be used again after the block has left.
pub type EntryId = u32;

/// An eviction policy.
///
/// The caller guarantees: `insert` only for an id that is not resident, `touch` and `remove` only
/// for one that is. `tag` names the block across evictions (ghost lists); two blocks with equal
/// tags may only cost accuracy, never correctness. A call that breaks the guarantee (a touch of an
/// id that is not resident, say) changes nothing.
pub trait Eviction: Debug + Send {
    /// `id` has become resident and is the most recent.
    fn insert(&mut self, id: EntryId, tag: u64);

    /// `id` was used.
    fn touch(&mut self, id: EntryId);

    /// `id` has left for a reason other than [`evict`](Self::evict).
    fn remove(&mut self, id: EntryId);

    /// Takes out and returns the next block to leave among those for which `evictable` says yes, to
    /// make room for the block named `incoming_tag`. `None`: nothing evictable is resident.
    ///
    /// Ids that are not evictable keep their place. Constant time on average, plus one step for
    /// each id that `evictable` turns down on the way.
    fn evict(
        &mut self,
        incoming_tag: u64,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId>;

    /// The id that would leave next if everything were evictable; used to compare ages.
    fn coldest(&mut self) -> Option<EntryId>;

    /// How many ids are resident.
    fn len(&self) -> usize;

    /// Whether nothing is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Hashes ids and tags, which are already spread or dense: one multiplication.
///
/// Not for keys that a stranger picks: it resists no deliberate collisions.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CheapHasher(u64);

/// Makes [`CheapHasher`]s.
pub(crate) type CheapHash = BuildHasherDefault<CheapHasher>;

/// 2^64 divided by the golden ratio, made odd: spreads consecutive numbers over all high bits.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for CheapHasher {
    fn finish(&self) -> u64 {
        // The table takes its index from the low bits and its tag from the top: the best bits of a
        // product are high, so bring some of them down.
        self.0.rotate_left(26)
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(SPREAD);
    }
}
