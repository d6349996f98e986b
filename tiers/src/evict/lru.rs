//! Least recently used, exactly, with touches that cost one store.
//!
//! A touch only notes the time; the order is made when somebody has to leave. A heap holds, for each
//! resident id, a node with a time at which it was used, not necessarily the last one. The node at
//! the top is the coldest id if its time is that id's last use; if not, it goes back into the heap
//! with the right time and the next one is looked at. As times only grow, what is found is exactly
//! the head of the list that a linked LRU would keep.
//!
//! With reverse touch this keeps chains whole: the deepest block of the request used longest ago
//! leaves first. It is the live default because around the knee of real traces it beats S3-FIFO and
//! ARC (benches hold the table).
//!
//! Cost for each resident id: 8 bytes of time and a 16-byte node. The times are an array by id, or a table
//! where an order holds few of the ids that there are ([`Lru::sparse`]). Why not the linked list of the
//! `lru` crate: it costs 68 bytes, and each touch of a prefix of 32,768 blocks misses the processor's
//! caches some six times (docs/decisions/0003-lazy-lru.md).

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fmt,
};

use super::{CheapHash, EntryId, Eviction};

/// A time at which an id was used. Times are unique: each insert and touch gets its own.
type Node = Reverse<(u64, EntryId)>;

/// The heap is rebuilt when it has so many nodes more than twice the resident ids: removed ids leave
/// their nodes behind.
const STALE_NODES_MIN: usize = 64;

/// When ids were used last; 0 for those that are not resident.
enum Uses {
    ById(Vec<u64>),
    Some(HashMap<EntryId, u64, CheapHash>),
}

impl Default for Uses {
    fn default() -> Self {
        Self::ById(Vec::new())
    }
}

impl Uses {
    fn get(&self, id: EntryId) -> u64 {
        match self {
            Self::ById(used) => used.get(index(id)).copied().unwrap_or(0),
            Self::Some(used) => used.get(&id).copied().unwrap_or(0),
        }
    }

    fn insert(&mut self, id: EntryId, time: u64) {
        match self {
            Self::ById(used) => {
                if used.len() <= index(id) {
                    used.resize(index(id) + 1, 0);
                }
                if let Some(used) = used.get_mut(index(id)) {
                    *used = time;
                }
            }
            Self::Some(used) => {
                used.insert(id, time);
            }
        }
    }

    /// Changes the time of an id that has one.
    fn touch(&mut self, id: EntryId, time: u64) {
        let used = match self {
            Self::ById(used) => used.get_mut(index(id)).filter(|used| **used != 0),
            Self::Some(used) => used.get_mut(&id),
        };
        if let Some(used) = used {
            *used = time;
        }
    }

    /// Takes an id out; false if it was not resident.
    fn remove(&mut self, id: EntryId) -> bool {
        match self {
            Self::ById(used) => {
                used.get_mut(index(id)).is_some_and(|used| std::mem::take(used) != 0)
            }
            Self::Some(used) => used.remove(&id).is_some(),
        }
    }

    fn nodes(&self) -> BinaryHeap<Node> {
        match self {
            Self::ById(used) => {
                let resident = (0..).zip(used).filter(|(_, used)| **used != 0);
                resident.map(|(id, used)| Reverse((*used, id))).collect()
            }
            Self::Some(used) => used.iter().map(|(id, used)| Reverse((*used, *id))).collect(),
        }
    }
}

/// The least recently used id leaves first.
#[derive(Default)]
pub struct Lru {
    clock: u64,
    used: Uses,
    heap: BinaryHeap<Node>,
    resident: usize,
}

impl Lru {
    /// An empty order. It has no capacity of its own: the caller decides when to evict.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same for an order that holds few of the ids that the caller has: each costs some 20 to 40 bytes
    /// more, and those that it does not hold cost nothing.
    #[must_use]
    pub fn sparse() -> Self {
        Self { used: Uses::Some(HashMap::default()), ..Self::default() }
    }

    fn last_use(&self, id: EntryId) -> u64 {
        self.used.get(id)
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Puts the coldest resident id on top of the heap and returns it.
    fn settle_top(&mut self) -> Option<EntryId> {
        loop {
            let Reverse((time, id)) = *self.heap.peek()?;
            let last = self.last_use(id);
            if last == time {
                return Some(id);
            }
            self.heap.pop();
            if last != 0 {
                self.heap.push(Reverse((last, id)));
            }
        }
    }

    fn forget(&mut self, id: EntryId) {
        self.resident -= usize::from(self.used.remove(id));
    }

    fn drop_stale_nodes(&mut self) {
        if self.heap.len() > 2 * self.resident + STALE_NODES_MIN {
            self.heap = self.used.nodes();
        }
    }
}

fn index(id: EntryId) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

impl fmt::Debug for Lru {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lru").field("len", &self.resident).finish_non_exhaustive()
    }
}

impl Eviction for Lru {
    fn insert(&mut self, id: EntryId, _tag: u64) {
        if self.last_use(id) != 0 {
            return;
        }
        let now = self.tick();
        self.used.insert(id, now);
        self.resident += 1;
        self.heap.push(Reverse((now, id)));
    }

    fn touch(&mut self, id: EntryId) {
        let now = self.tick();
        self.used.touch(id, now);
    }

    fn remove(&mut self, id: EntryId) {
        self.forget(id);
        self.drop_stale_nodes();
    }

    fn evict(
        &mut self,
        _incoming_tag: u64,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId> {
        let mut passed_over = Vec::new();
        let evicted = loop {
            let Some(id) = self.settle_top() else { break None };
            if evictable(id) {
                self.heap.pop();
                break Some(id);
            }
            passed_over.extend(self.heap.pop());
        };
        self.heap.extend(passed_over);
        if let Some(id) = evicted {
            self.forget(id);
        }
        evicted
    }

    fn coldest(&mut self) -> Option<EntryId> {
        self.settle_top()
    }

    fn len(&self) -> usize {
        self.resident
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
        fn the_order_is_that_of_a_linked_list(
            steps in prop::collection::vec(step(), 0..300),
            sparse: bool,
        ) {
            let mut lru = if sparse { Lru::sparse() } else { Lru::new() };
            let mut model = ::lru::LruCache::<EntryId, ()>::unbounded();
            for step in steps {
                match step {
                    Step::Use(id) => {
                        if model.contains(&id) { lru.touch(id) } else { lru.insert(id, 7) }
                        model.put(id, ());
                    }
                    Step::Remove(id) => {
                        lru.remove(id);
                        model.pop(&id);
                    }
                    Step::Evict { pinned } => {
                        let coldest_first = model.iter().rev().map(|(id, ())| *id);
                        let expected = { coldest_first }.find(|id| *id != pinned);
                        prop_assert_eq!(lru.evict(0, &mut |id| id != pinned), expected);
                        expected.map(|id| model.pop(&id));
                    }
                }
                prop_assert_eq!(lru.coldest(), model.peek_lru().map(|(id, ())| *id));
                prop_assert_eq!(lru.len(), model.len());
            }
        }
    }
}
