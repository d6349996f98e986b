//! ARC: the adaptive replacement cache.
//!
//! After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003, figure
//! 4. *Recent* (the paper's T1) holds blocks seen once, *frequent* (T2) those seen again; for each
//! there is a list of tags that left it lately (B1, B2). A block that comes back from such a list
//! says that its side was too small, and moves the target size of `recent` (the paper's p).
//!
//! Invariants for a capacity c: recent + its tags <= c, all four lists together <= 2 c. They hold
//! as long as the caller evicts before the insert that would pass c; a cache that is over its
//! capacity for a while is trimmed at the next insert.
//!
//! The paper replaces and inserts in one step. Here they are two calls that carry the same tag, so
//! the target moves at the first of them, and only once. Ids that may not leave are passed over; if
//! a side has no other, the other side gives the block.

use std::fmt;

use ::lru::LruCache;

use super::{CheapHash, EntryId, Eviction, queues::Queues};

const RECENT: u8 = 0;
const FREQUENT: u8 = 1;

/// The target moves by fractions of an id, as in the paper; whole steps cost up to 1 % of the hits.
const PARTS: u64 = 1 << 16;

type Tags = LruCache<u64, (), CheapHash>;

/// Balances blocks seen once against blocks seen often by watching which of them come back.
pub struct ArcPolicy {
    queues: Queues<2>,
    recent_gone: Tags,
    frequent_gone: Tags,
    capacity: usize,
    /// How many ids `recent` should hold, in [`PARTS`] of one, 0 to those of `capacity`.
    recent_target: u64,
    /// The tag for which the target has moved already.
    adapted_to: Option<u64>,
}

impl ArcPolicy {
    /// An empty order for a cache of `capacity` ids. The caller still decides when to evict; the
    /// capacity bounds the tags remembered and the target.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let tags = || LruCache::unbounded_with_hasher(CheapHash::default());
        Self {
            queues: Queues::new(),
            recent_gone: tags(),
            frequent_gone: tags(),
            capacity: capacity.max(1),
            recent_target: 0,
            adapted_to: None,
        }
    }

    /// Moves the target if `tag` left lately; once for each arrival.
    fn adapt(&mut self, tag: u64) {
        if self.adapted_to == Some(tag) {
            return;
        }
        let (recent, frequent) = (self.recent_gone.len(), self.frequent_gone.len());
        if self.recent_gone.contains(&tag) {
            let target = self.recent_target.saturating_add(step(frequent, recent));
            self.recent_target = target.min(parts(self.capacity));
            self.adapted_to = Some(tag);
        } else if self.frequent_gone.contains(&tag) {
            self.recent_target = self.recent_target.saturating_sub(step(recent, frequent));
            self.adapted_to = Some(tag);
        }
    }

    /// The side from which the paper's REPLACE takes a block.
    fn side_to_shrink(&self, incoming_tag: u64) -> u8 {
        let recent = parts(self.queues.len(RECENT));
        let over = recent > self.recent_target
            || (recent == self.recent_target && self.frequent_gone.contains(&incoming_tag));
        if recent > 0 && over { RECENT } else { FREQUENT }
    }

    /// Whether `recent` alone fills the capacity: its coldest then leaves without a trace.
    fn recent_fills_all(&self, incoming_tag: u64) -> bool {
        self.queues.len(RECENT) >= self.capacity
            && !self.recent_gone.contains(&incoming_tag)
            && !self.frequent_gone.contains(&incoming_tag)
    }

    /// Forgets the oldest tags until the two invariants hold.
    fn trim(&mut self) {
        let (recent, frequent) = (self.queues.len(RECENT), self.queues.len(FREQUENT));
        while recent.saturating_add(self.recent_gone.len()) > self.capacity
            && self.recent_gone.pop_lru().is_some()
        {}
        let rest = recent.saturating_add(self.recent_gone.len()).saturating_add(frequent);
        while rest.saturating_add(self.frequent_gone.len()) > self.capacity.saturating_mul(2)
            && self.frequent_gone.pop_lru().is_some()
        {}
    }
}

/// A number of ids in [`PARTS`].
fn parts(ids: usize) -> u64 {
    (ids as u64).saturating_mul(PARTS)
}

/// How far one return moves the target: by the ratio of the other list to the one it came from, and
/// by at least one id.
fn step(other: usize, own: usize) -> u64 {
    parts(other).checked_div(own as u64).unwrap_or(0).max(PARTS)
}

impl fmt::Debug for ArcPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArcPolicy")
            .field("recent", &self.queues.len(RECENT))
            .field("frequent", &self.queues.len(FREQUENT))
            .field("recent_target", &self.recent_target)
            .finish_non_exhaustive()
    }
}

impl Eviction for ArcPolicy {
    fn insert(&mut self, id: EntryId, tag: u64) {
        self.adapt(tag);
        self.adapted_to = None;
        let left_recent = self.recent_gone.pop(&tag).is_some();
        let left_frequent = self.frequent_gone.pop(&tag).is_some();
        let queue = if left_recent || left_frequent { FREQUENT } else { RECENT };
        self.queues.insert(queue, id, tag);
        self.trim();
    }

    fn touch(&mut self, id: EntryId) {
        self.queues.move_to_front(FREQUENT, id);
    }

    fn remove(&mut self, id: EntryId) {
        self.queues.unlink(id);
    }

    fn evict(
        &mut self,
        incoming_tag: u64,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId> {
        self.adapt(incoming_tag);
        let leave_no_tag = self.recent_fills_all(incoming_tag);
        let first = self.side_to_shrink(incoming_tag);
        let second = if first == RECENT { FREQUENT } else { RECENT };
        let id = self
            .queues
            .coldest(first, evictable)
            .or_else(|| self.queues.coldest(second, evictable))?;
        let tag = self.queues.tag(id);
        let from_recent = self.queues.queue_of(id) == Some(RECENT);
        self.queues.unlink(id);
        if from_recent && !leave_no_tag {
            self.recent_gone.put(tag, ());
        } else if !from_recent {
            self.frequent_gone.put(tag, ());
        }
        Some(id)
    }

    fn coldest(&mut self) -> Option<EntryId> {
        let over = parts(self.queues.len(RECENT)) > self.recent_target;
        let (first, second) = if over { (RECENT, FREQUENT) } else { (FREQUENT, RECENT) };
        self.queues.back(first).or_else(|| self.queues.back(second))
    }

    fn len(&self) -> usize {
        self.queues.len(RECENT).saturating_add(self.queues.len(FREQUENT))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any(_: EntryId) -> bool {
        true
    }

    #[test]
    fn a_scan_does_not_push_out_blocks_seen_twice() {
        let mut policy = ArcPolicy::new(4);
        policy.insert(0, 0);
        policy.insert(1, 1);
        policy.touch(0);
        policy.touch(1);
        policy.insert(2, 2);
        policy.insert(3, 3);
        for tag in 10..60 {
            let id = policy.evict(tag, &mut any).unwrap();
            assert!(id >= 2, "{id} was seen twice");
            policy.insert(id, tag);
        }
        assert_eq!(policy.len(), 4);
    }

    #[test]
    fn a_block_that_comes_back_grows_its_side_once() {
        let mut policy = ArcPolicy::new(4);
        for id in 0..3 {
            policy.insert(id, u64::from(id));
        }
        policy.touch(2);
        assert_eq!(policy.evict(9, &mut any), Some(0));
        assert_eq!(policy.recent_target, 0);
        policy.evict(0, &mut any);
        policy.evict(0, &mut any);
        assert_eq!(policy.recent_target, PARTS);
        policy.insert(7, 0);
        assert_eq!(policy.recent_target, PARTS);
        assert_eq!(policy.queues.queue_of(7), Some(FREQUENT));
    }

    proptest! {
        #[test]
        fn the_lists_stay_within_their_bounds(tags in prop::collection::vec(0_u64..40, 1..400)) {
            const CAPACITY: usize = 8;
            let mut policy = ArcPolicy::new(CAPACITY);
            let mut resident: Vec<u64> = Vec::new(); // index = id
            for tag in tags {
                if let Some(id) = resident.iter().position(|other| *other == tag) {
                    policy.touch(u32::try_from(id).unwrap());
                } else if resident.len() < CAPACITY {
                    policy.insert(u32::try_from(resident.len()).unwrap(), tag);
                    resident.push(tag);
                } else {
                    let id = policy.evict(tag, &mut any).unwrap();
                    resident[id as usize] = tag;
                    policy.insert(id, tag);
                }
                let recent = policy.queues.len(RECENT) + policy.recent_gone.len();
                let all = recent + policy.queues.len(FREQUENT) + policy.frequent_gone.len();
                prop_assert_eq!(policy.len(), resident.len());
                prop_assert!(recent <= CAPACITY && all <= 2 * CAPACITY);
                prop_assert!(policy.recent_target <= parts(CAPACITY));
            }
        }
    }
}
