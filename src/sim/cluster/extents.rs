//! A cache that knows its blocks by extents: least recently used, tail first, exactly.
//!
//! A request uses its blocks tail first, so the blocks of a run leave in one order: the last of the run
//! before the first. A run that was used at one time is therefore one extent, cut from its end by
//! evictions and anywhere by later uses of a part of it; which blocks are held and which leaves next is
//! what [`Lru`](kvstrata_tiers::evict::Lru) says block by block, and a test compares them. What a use costs is one
//! look-up in a sorted map for each extent that it touches: a context of a thousand blocks that a
//! session sends again and again is one.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    ops::Range,
};

use crate::trace::Run;

/// Consecutive blocks that were used at the same time.
#[derive(Debug, Clone, Copy)]
struct Extent {
    count: u32,
    /// When: unique for each use of a run.
    used: u64,
}

/// A least recently used cache over runs of blocks.
#[derive(Debug)]
pub(super) struct Extents {
    capacity_blocks: u32,
    held_blocks: u32,
    /// By first block; extents do not overlap.
    extents: BTreeMap<u32, Extent>,
    /// Coldest first. Parts of one run share its time: the last one leaves first.
    order: BTreeSet<(u64, Reverse<u32>)>,
    clock: u64,
}

impl Extents {
    /// An empty cache for `capacity_blocks`.
    pub(super) fn new(capacity_blocks: u32) -> Self {
        Self {
            capacity_blocks,
            held_blocks: 0,
            extents: BTreeMap::new(),
            order: BTreeSet::new(),
            clock: 0,
        }
    }

    /// Blocks that are held.
    #[cfg(test)]
    pub(super) fn held_blocks(&self) -> u32 {
        self.held_blocks
    }

    /// Touches or inserts the blocks of `runs`, tail first, and drops what is over.
    pub(super) fn use_runs(&mut self, runs: &[Run]) {
        if self.capacity_blocks == 0 {
            return;
        }
        for run in runs.iter().rev() {
            self.use_run(*run);
        }
        self.shrink();
    }

    fn use_run(&mut self, run: Run) {
        self.cut_out(run);
        self.clock += 1;
        self.put(run, self.clock);
    }

    fn put(&mut self, run: Run, used: u64) {
        if run.count > 0 {
            self.extents.insert(run.first, Extent { count: run.count, used });
            self.order.insert((used, Reverse(run.first)));
            self.held_blocks = self.held_blocks.saturating_add(run.count);
        }
    }

    fn take(&mut self, first: u32) -> Option<Extent> {
        let extent = self.extents.remove(&first)?;
        self.order.remove(&(extent.used, Reverse(first)));
        self.held_blocks = self.held_blocks.saturating_sub(extent.count);
        Some(extent)
    }

    /// Removes the blocks of `run`; what overlaps it at either end stays as it was.
    fn cut_out(&mut self, run: Run) {
        while let Some((first, end)) = self.overlapping(run) {
            let Some(extent) = self.take(first) else { return };
            let before = run.first.saturating_sub(first);
            self.put(Run { first, count: before }, extent.used);
            let behind = end.saturating_sub(run.end());
            self.put(Run { first: run.end(), count: behind }, extent.used);
        }
    }

    /// The first extent that shares blocks with `run`, as `first..end`.
    fn overlapping(&self, run: Run) -> Option<(u32, u32)> {
        self.held(run.first).or_else(|| {
            let (first, extent) = self.extents.range(run.ids()).next()?;
            Some((*first, first.saturating_add(extent.count)))
        })
    }

    /// The extent that holds `block`, as `first..end`.
    fn held(&self, block: u32) -> Option<(u32, u32)> {
        let (first, extent) = self.extents.range(..=block).next_back()?;
        let end = first.saturating_add(extent.count);
        (block < end).then_some((*first, end))
    }

    /// Evicts, coldest first, until no more is held than fits.
    fn shrink(&mut self) {
        while self.held_blocks > self.capacity_blocks {
            let over = self.held_blocks - self.capacity_blocks;
            let Some((_, Reverse(first))) = self.order.first().copied() else { return };
            let Some(extent) = self.take(first) else { return };
            let count = extent.count.saturating_sub(over);
            self.put(Run { first, count }, extent.used);
        }
    }

    /// How many blocks of `runs` are held before the first one that is not.
    pub(super) fn prefix_blocks(&self, runs: &[Run]) -> u32 {
        let mut prefix = 0_u32;
        for run in runs {
            let held = self.held_from(*run);
            prefix = prefix.saturating_add(held);
            if held < run.count {
                break;
            }
        }
        prefix
    }

    /// How many blocks at the beginning of `run` are held.
    fn held_from(&self, run: Run) -> u32 {
        let mut next = run.first;
        while next < run.end() {
            let Some((_, end)) = self.held(next) else { break };
            next = end.min(run.end());
        }
        next - run.first
    }

    /// The positions in `runs` whose blocks are held: ascending, joined where they meet.
    pub(super) fn positions(&self, runs: &[Run]) -> Vec<Range<u32>> {
        let mut positions: Vec<Range<u32>> = Vec::new();
        let mut start = 0_u32;
        for run in runs {
            let mut next = run.first;
            while next < run.end() {
                let rest = Run { first: next, count: run.end() - next };
                let Some((first, end)) = self.overlapping(rest) else { break };
                let from = start + (first.max(next) - run.first);
                let to = start + (end.min(run.end()) - run.first);
                match positions.last_mut() {
                    Some(last) if last.end == from => last.end = to,
                    _ => positions.push(from..to),
                }
                next = end.min(run.end());
            }
            start = start.saturating_add(run.count);
        }
        positions
    }
}

/// The runs of the positions `range` in `runs`.
pub(super) fn part(runs: &[Run], range: Range<u32>) -> Vec<Run> {
    let mut part = Vec::new();
    let mut start = 0_u32;
    for run in runs {
        let end = start.saturating_add(run.count);
        let (from, to) = (range.start.max(start), range.end.min(end));
        if from < to {
            part.push(Run { first: run.first + (from - start), count: to - from });
        }
        start = end;
    }
    part
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::evict::{Eviction, Lru};
    use proptest::prelude::*;

    use super::*;

    /// Blocks below this number.
    const BLOCKS: u32 = 60;

    /// The tiers' own policy, a block at a time; ids are block numbers.
    struct Model {
        lru: Lru,
        held: [bool; BLOCKS as usize],
    }

    impl Model {
        fn use_runs(&mut self, runs: &[Run], capacity: usize) {
            let blocks: Vec<u32> = runs.iter().flat_map(|run| run.ids()).collect();
            for block in blocks.into_iter().rev() {
                if std::mem::replace(&mut self.held[block as usize], true) {
                    self.lru.touch(block);
                    continue;
                }
                self.lru.insert(block, 0);
                if self.lru.len() > capacity {
                    let evicted = self.lru.evict(0, &mut |_| true).unwrap();
                    self.held[evicted as usize] = false;
                }
            }
        }
    }

    /// Runs that do not overlap, in any order.
    fn request() -> impl Strategy<Value = Vec<Run>> {
        prop::collection::vec((0..BLOCKS, 1_u32..20), 1..5).prop_map(|wanted| {
            let mut taken = [false; BLOCKS as usize];
            let mut runs = Vec::new();
            for (first, count) in wanted {
                let count = (first..BLOCKS.min(first + count))
                    .take_while(|block| !std::mem::replace(&mut taken[*block as usize], true))
                    .fold(0, |count, _| count + 1);
                if count > 0 {
                    runs.push(Run { first, count });
                }
            }
            runs
        })
    }

    fn expand(runs: &[Run]) -> Vec<u32> {
        runs.iter().flat_map(|run| run.ids()).collect()
    }

    proptest! {
        #[test]
        fn extents_hold_what_the_tiers_own_policy_holds(
            requests in prop::collection::vec(request(), 1..40),
            capacity in 1_u32..70,
        ) {
            let mut extents = Extents::new(capacity);
            let mut model = Model { lru: Lru::new(), held: [false; BLOCKS as usize] };
            for runs in requests {
                let blocks = expand(&runs);
                let known = blocks.iter().map(|block| model.held[*block as usize]);
                let prefix = known.clone().take_while(|held| *held).count();
                prop_assert_eq!(extents.prefix_blocks(&runs) as usize, prefix);
                let positions: Vec<u32> = extents.positions(&runs).into_iter().flatten().collect();
                let expected: Vec<u32> =
                    (0..).zip(known).filter(|(_, held)| *held).map(|(at, _)| at).collect();
                prop_assert_eq!(positions, expected);
                extents.use_runs(&runs);
                model.use_runs(&runs, capacity as usize);
                prop_assert_eq!(extents.held_blocks() as usize, model.lru.len());
                for block in 0..BLOCKS {
                    let held = extents.held(block).is_some();
                    prop_assert_eq!(held, model.held[block as usize], "block {}", block);
                }
            }
        }

        #[test]
        fn a_part_has_the_blocks_at_its_positions(runs in request(), from in 0_u32..60, to in 0_u32..60) {
            let blocks = expand(&runs);
            let (from, to) = (from.min(to), from.max(to));
            let at = |position: u32| (position as usize).min(blocks.len());
            prop_assert_eq!(expand(&part(&runs, from..to)), &blocks[at(from)..at(to)]);
        }
    }
}
