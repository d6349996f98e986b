//! Which resident block leaves next.
//!
//! A policy orders ids; it owns no blocks and does no I/O. The caller decides when to evict, removes
//! what the policy returns, and must tell the policy of every arrival, use and departure. The live
//! map runs one policy for each (shard, slot size), `plan` runs one for a whole simulated tier: the
//! code is the same.
//!
//! Order of use: a request's blocks are inserted and touched **tail first** (*reverse touch*), so
//! that leaves leave before their parents. The policies rely on the caller for that.

use std::fmt::Debug;

/// The caller's name of a resident block; may be used again after the block has left.
pub type EntryId = u32;

/// An eviction policy.
///
/// The caller guarantees: `insert` only for an id that is not resident, `touch` and `remove` only
/// for one that is. `tag` names the block across evictions (ghost lists); two blocks with equal tags
/// may only cost accuracy, never correctness.
pub trait Eviction: Debug + Send {
    /// `id` has become resident and is the most recent.
    fn insert(&mut self, id: EntryId, tag: u64);

    /// `id` was used.
    fn touch(&mut self, id: EntryId);

    /// `id` has left for a reason other than [`evict`](Self::evict).
    fn remove(&mut self, id: EntryId);

    /// Takes out and returns the next block to leave among those for which `evictable` says yes, to
    /// make room for the block named `incoming_tag`. `None`: nothing evictable is resident.
    fn evict(
        &mut self,
        incoming_tag: u64,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId>;

    /// The id that would leave next if everything were evictable; used to compare ages.
    fn coldest(&self) -> Option<EntryId>;

    /// How many ids are resident.
    fn len(&self) -> usize;

    /// Whether nothing is resident.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
