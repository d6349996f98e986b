//! The upper bound: Belady's choice with bypass, over whole requests.
//!
//! After each request the cache may hold any of what it held and of what the request named (a block
//! may also be let go at once: *bypass*). It keeps the blocks used again soonest; among those due
//! at the same request the deepest leaves first. No policy can hit more.
//!
//! **Why this is fast.** Only the next request that names a block matters, so the resident blocks
//! are counted in groups, one for each future request. Blocks due at one request are one chain, and
//! the deepest leaves first, so at any time what is left of a group is told by its size alone; when
//! its request arrives, that size is its hits. Along a request the next use only grows with depth
//! (a later request that names a block names its whole prefix), so a request adds a handful of
//! (next request, count) pairs. One backward pass finds them, one forward pass with a heap of
//! groups counts: no work for each block and capacity, and no next-use array of 340 MB.
//!
//! In a trace whose ids are not chained the groups still hold the blocks Belady would keep, and
//! their number is still an upper bound on the prefix hits; the insertions are then approximate.

use std::collections::BinaryHeap;

use super::Outcome;
use crate::trace::Trace;

/// In place of a request: no further use.
const NEVER: u32 = u32::MAX;

/// Neighbouring blocks of one request that are next used by the same request.
#[derive(Debug, Clone, Copy)]
struct Due {
    at: u32,
    count: u32,
}

/// The next uses of a trace; computed once, good for every capacity.
#[derive(Debug)]
pub struct Opt {
    references: u64,
    dues: Vec<Due>,
    /// By request: the end of its part of `dues`, which are in chain order.
    ends: Vec<usize>,
}

impl Opt {
    /// Finds the next use of every reference. Keeps four bytes for each distinct block meanwhile.
    #[must_use]
    pub fn new(trace: &Trace) -> Self {
        let mut next_use = vec![NEVER; trace.blocks_unique() as usize];
        // Backward over requests and blocks, so everything is reversed at the end.
        let mut dues: Vec<Due> = Vec::new();
        let mut counts = Vec::with_capacity(trace.len());
        for (position, request) in (0_u32..).zip(trace.requests()).collect::<Vec<_>>().iter().rev()
        {
            let start = dues.len();
            for run in request.runs().iter().rev() {
                let ids = run.first as usize..run.end() as usize;
                for next in next_use.get_mut(ids).into_iter().flatten().rev() {
                    let at = std::mem::replace(next, *position);
                    match dues.get_mut(start..).and_then(<[Due]>::last_mut) {
                        Some(due) if due.at == at => due.count += 1,
                        _ => dues.push(Due { at, count: 1 }),
                    }
                }
            }
            counts.push(dues.len().saturating_sub(start));
        }
        dues.reverse();
        let ends = counts.iter().rev().scan(0_usize, |end, count| {
            *end = end.saturating_add(*count);
            Some(*end)
        });
        Self { references: trace.references(), ends: ends.collect(), dues }
    }

    /// What the best policy reaches with `capacity_blocks`.
    #[must_use]
    pub fn outcome(&self, capacity_blocks: u32) -> Outcome {
        let mut kept = Kept::new(self.ends.len(), u64::from(capacity_blocks));
        let (mut hits, mut insertions, mut start) = (0, 0, 0);
        for (position, end) in self.ends.iter().enumerate() {
            let dues = self.dues.get(start..*end).unwrap_or_default();
            let hit = kept.take(position);
            hits += hit;
            for due in dues {
                kept.add(*due);
            }
            kept.trim();
            insertions += kept.new_among(dues, hit);
            start = *end;
        }
        Outcome { references: self.references, hits, insertions }
    }
}

/// The hits of the best policy with `capacity_blocks`. For several capacities use [`Opt`].
#[must_use]
pub fn opt_hits(trace: &Trace, capacity_blocks: u32) -> u64 {
    Opt::new(trace).outcome(capacity_blocks).hits
}

/// The resident blocks, counted by the request that uses them next.
struct Kept {
    capacity: u64,
    total: u64,
    /// By request: resident blocks due at it.
    due: Vec<u64>,
    /// Requests with blocks due, some twice and some with none left; the latest on top.
    latest: BinaryHeap<u32>,
}

impl Kept {
    fn new(requests: usize, capacity: u64) -> Self {
        Self { capacity, total: 0, due: vec![0; requests], latest: BinaryHeap::new() }
    }

    fn due(&self, at: u32) -> u64 {
        self.due.get(at as usize).copied().unwrap_or(0)
    }

    /// Ends the group of the request that has arrived; its size is the hits.
    fn take(&mut self, position: usize) -> u64 {
        let hits = self.due.get_mut(position).map(std::mem::take).unwrap_or(0);
        self.total = self.total.saturating_sub(hits);
        hits
    }

    fn add(&mut self, due: Due) {
        // A block without a further use has no group: it is bypassed.
        if let Some(group) = self.due.get_mut(due.at as usize) {
            if *group == 0 {
                self.latest.push(due.at);
            }
            *group = group.saturating_add(u64::from(due.count));
            self.total = self.total.saturating_add(u64::from(due.count));
        }
    }

    /// Lets the blocks go that are used last, until the rest fits.
    fn trim(&mut self) {
        while let Some(excess) = self.total.checked_sub(self.capacity).filter(|excess| *excess > 0)
            && let Some(at) = self.latest.peek()
        {
            let Some(group) = self.due.get_mut(*at as usize) else {
                return;
            };
            let gone = excess.min(*group);
            *group = group.saturating_sub(gone);
            self.total = self.total.saturating_sub(gone);
            if *group == 0 {
                self.latest.pop();
            }
        }
    }

    /// Of the blocks just added and still kept, those that were not among the first `hit` of the
    /// request, that is, not resident before.
    fn new_among(&self, dues: &[Due], hit: u64) -> u64 {
        let (mut depth, mut new) = (0_u64, 0_u64);
        for due in dues {
            // What was in the group before lies deeper and was trimmed first.
            let kept = u64::from(due.count).min(self.due(due.at));
            new = new.saturating_add(depth.saturating_add(kept).saturating_sub(depth.max(hit)));
            depth = depth.saturating_add(u64::from(due.count));
        }
        new
    }
}
