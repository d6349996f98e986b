//! Least recently used, on the `lru` crate.
//!
//! The order is exactly the order of the last insert or touch. With reverse touch this keeps chains
//! whole: the deepest block of the request used longest ago leaves first. It is the live default
//! because around the knee of real traces it beats S3-FIFO and ARC (benches hold the table).
//!
//! Cost for each resident id: a 32-byte list node and about 19 bytes of table. `evict` walks over
//! ids that may not leave from the cold end, and leaves them where they are: a pinned block that is
//! released is as old as it ever was.

use std::fmt;

use ::lru::LruCache;

use super::{CheapHash, EntryId, Eviction};

/// The least recently used id leaves first.
pub struct Lru {
    ids: LruCache<EntryId, (), CheapHash>,
}

impl Lru {
    /// An empty order. It has no capacity of its own: the caller decides when to evict.
    #[must_use]
    pub fn new() -> Self {
        Self { ids: LruCache::unbounded_with_hasher(CheapHash::default()) }
    }
}

impl Default for Lru {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Lru {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lru").field("len", &self.ids.len()).finish_non_exhaustive()
    }
}

impl Eviction for Lru {
    fn insert(&mut self, id: EntryId, _tag: u64) {
        self.ids.put(id, ());
    }

    fn touch(&mut self, id: EntryId) {
        self.ids.promote(&id);
    }

    fn remove(&mut self, id: EntryId) {
        self.ids.pop(&id);
    }

    fn evict(
        &mut self,
        _incoming_tag: u64,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId> {
        let id = self.ids.iter().rev().map(|(id, ())| *id).find(|id| evictable(*id))?;
        self.ids.pop(&id);
        Some(id)
    }

    fn coldest(&self) -> Option<EntryId> {
        self.ids.peek_lru().map(|(id, ())| *id)
    }

    fn len(&self) -> usize {
        self.ids.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ids_that_may_not_leave_keep_their_place() {
        let mut lru = Lru::new();
        for id in 0..4 {
            lru.insert(id, 0);
        }
        assert_eq!(lru.evict(0, &mut |id| id >= 2), Some(2));
        assert_eq!(lru.coldest(), Some(0));
        assert_eq!(lru.evict(0, &mut |_| false), None);
        assert_eq!(lru.evict(0, &mut |_| true), Some(0));
        assert_eq!(lru.evict(0, &mut |_| true), Some(1));
        assert_eq!(lru.len(), 1);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Use(EntryId),
        Remove(EntryId),
        Evict { pinned: EntryId },
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0_u32..24).prop_map(Step::Use),
            1 => (0_u32..24).prop_map(Step::Remove),
            2 => (0_u32..24).prop_map(|pinned| Step::Evict { pinned }),
        ]
    }

    proptest! {
        #[test]
        fn the_order_is_that_of_a_plain_list(steps in prop::collection::vec(step(), 0..300)) {
            let mut lru = Lru::new();
            let mut model: Vec<EntryId> = Vec::new(); // coldest first
            for step in steps {
                match step {
                    Step::Use(id) => {
                        if model.contains(&id) { lru.touch(id) } else { lru.insert(id, 7) }
                        model.retain(|other| *other != id);
                        model.push(id);
                    }
                    Step::Remove(id) => {
                        lru.remove(id);
                        model.retain(|other| *other != id);
                    }
                    Step::Evict { pinned } => {
                        let expected = model.iter().copied().find(|id| *id != pinned);
                        prop_assert_eq!(lru.evict(0, &mut |id| id != pinned), expected);
                        model.retain(|other| Some(*other) != expected);
                    }
                }
                prop_assert_eq!(lru.coldest(), model.first().copied());
                prop_assert_eq!(lru.len(), model.len());
            }
        }
    }
}
