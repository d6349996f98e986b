//! S3-FIFO: three first-in-first-out queues.
//!
//! After Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction", SOSP
//! 2023, algorithm 1. New blocks enter a *small* queue of a tenth of the capacity. A block that
//! reaches its end used at least twice moves to the *main* queue, else it leaves and its tag is
//! remembered in a *ghost* queue; a block that comes back while its tag is there enters main at
//! once. The end of main gives a used block another round with one use less. A use only counts (up
//! to three): nothing moves.
//!
//! Where the paper leaves freedom: uses start again at zero when a block moves to main, and the
//! ghost queue remembers as many tags as main may hold blocks. Ids that may not leave are passed
//! over and keep their place.

use std::fmt;

use ::lru::LruCache;

use super::{CheapHash, EntryId, Eviction, queues::Queues};

const SMALL: u8 = 0;
const MAIN: u8 = 1;

/// The small queue is this part of the capacity: the paper's choice, robust over its 6,594 traces.
const SMALL_DIVISOR: usize = 10;
/// Uses are counted up to here: two bits.
const USES_MAX: u8 = 3;
/// Uses that let a block move from small to main.
const USES_TO_MAIN: u8 = 2;

/// Blocks seen once leave quickly, blocks seen often take more rounds.
pub struct S3Fifo {
    queues: Queues<2>,
    ghosts: LruCache<u64, (), CheapHash>,
    small_max: usize,
    ghosts_max: usize,
}

impl S3Fifo {
    /// An empty order for a cache of `capacity` ids. The caller still decides when to evict; the
    /// capacity only sets the shares of the queues.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let small_max = (capacity / SMALL_DIVISOR).max(1);
        Self {
            queues: Queues::new(),
            ghosts: LruCache::unbounded_with_hasher(CheapHash::default()),
            small_max,
            ghosts_max: capacity.saturating_sub(small_max).max(1),
        }
    }

    fn evict_small(&mut self, evictable: &mut dyn FnMut(EntryId) -> bool) -> Option<EntryId> {
        let mut next = self.queues.back(SMALL);
        while let Some(id) = next {
            next = self.queues.warmer(id);
            if !evictable(id) {
                continue;
            }
            if self.queues.uses(id) < USES_TO_MAIN {
                self.remember(self.queues.tag(id));
                self.queues.unlink(id);
                return Some(id);
            }
            self.queues.set_uses(id, 0);
            self.queues.move_to_front(MAIN, id);
        }
        None
    }

    fn evict_main(&mut self, evictable: &mut dyn FnMut(EntryId) -> bool) -> Option<EntryId> {
        // Each round takes one use from every block that stays for being used: USES_MAX rounds
        // bring all to zero, and one more finds the block.
        for _ in 0..=USES_MAX {
            let mut left = self.queues.len(MAIN);
            let mut next = self.queues.back(MAIN);
            while let Some(id) = next.filter(|_| left > 0) {
                left = left.saturating_sub(1);
                next = self.queues.warmer(id);
                if !evictable(id) {
                    continue;
                }
                let uses = self.queues.uses(id);
                if uses == 0 {
                    self.queues.unlink(id);
                    return Some(id);
                }
                self.queues.set_uses(id, uses.saturating_sub(1));
                self.queues.move_to_front(MAIN, id);
            }
        }
        None
    }

    fn remember(&mut self, tag: u64) {
        self.ghosts.put(tag, ());
        while self.ghosts.len() > self.ghosts_max {
            self.ghosts.pop_lru();
        }
    }

    fn small_is_full(&self) -> bool {
        self.queues.len(SMALL) >= self.small_max
    }
}

impl fmt::Debug for S3Fifo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Fifo")
            .field("small", &self.queues.len(SMALL))
            .field("main", &self.queues.len(MAIN))
            .field("ghosts", &self.ghosts.len())
            .finish_non_exhaustive()
    }
}

impl Eviction for S3Fifo {
    fn insert(&mut self, id: EntryId, tag: u64) {
        let seen_before = self.ghosts.pop(&tag).is_some();
        self.queues.insert(if seen_before { MAIN } else { SMALL }, id, tag);
    }

    fn touch(&mut self, id: EntryId) {
        self.queues.set_uses(id, self.queues.uses(id).saturating_add(1).min(USES_MAX));
    }

    fn remove(&mut self, id: EntryId) {
        self.queues.unlink(id);
    }

    fn evict(
        &mut self,
        _incoming_tag: u64,
        evictable: &mut dyn FnMut(EntryId) -> bool,
    ) -> Option<EntryId> {
        if self.small_is_full()
            && let Some(id) = self.evict_small(evictable)
        {
            return Some(id);
        }
        self.evict_main(evictable).or_else(|| self.evict_small(evictable))
    }

    fn coldest(&mut self) -> Option<EntryId> {
        let (first, second) = if self.small_is_full() { (SMALL, MAIN) } else { (MAIN, SMALL) };
        self.queues.back(first).or_else(|| self.queues.back(second))
    }

    fn len(&self) -> usize {
        self.queues.len(SMALL).saturating_add(self.queues.len(MAIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn any(_: EntryId) -> bool {
        true
    }

    #[test]
    fn a_block_seen_once_leaves_before_one_used_twice() {
        let mut policy = S3Fifo::new(4);
        for id in 0..4 {
            policy.insert(id, u64::from(id));
        }
        policy.touch(0);
        policy.touch(0);
        policy.touch(1);
        assert_eq!(policy.evict(9, &mut any), Some(1), "one use is not enough for main");
        assert_eq!(policy.evict(9, &mut any), Some(2));
        assert_eq!(policy.evict(9, &mut any), Some(3));
        assert_eq!(policy.evict(9, &mut any), Some(0));
        assert_eq!(policy.evict(9, &mut any), None);
    }

    #[test]
    fn a_block_that_comes_back_soon_enters_main() {
        let mut policy = S3Fifo::new(20);
        policy.insert(0, 100);
        assert_eq!(policy.evict(9, &mut any), Some(0));
        policy.insert(3, 100);
        for id in 4..7 {
            policy.insert(id, u64::from(id));
        }
        assert_eq!(
            policy.evict(9, &mut any),
            Some(4),
            "3 is in main while small is over its share"
        );
    }

    #[test]
    fn used_main_blocks_take_another_round() {
        let mut policy = S3Fifo::new(10);
        for id in 0..3 {
            policy.insert(id, u64::from(id));
            policy.evict(9, &mut any);
            policy.insert(id, u64::from(id));
        }
        policy.touch(0);
        policy.touch(1);
        policy.touch(1);
        let order: Vec<_> = std::iter::from_fn(|| policy.evict(9, &mut any)).collect();
        assert_eq!(order, [2, 0, 1]);
    }

    #[test]
    fn ids_that_may_not_leave_are_passed_over() {
        let mut policy = S3Fifo::new(2);
        policy.insert(0, 0);
        policy.insert(1, 1);
        assert_eq!(policy.evict(9, &mut |id| id != 0), Some(1));
        assert_eq!(policy.evict(9, &mut |id| id != 0), None);
        assert_eq!(policy.len(), 1);
    }
}
