//! Simulated tiers: a policy, and which blocks are resident.
//!
//! Tiers are **inclusive**: a block that is used is copied up into every hotter tier and is kept in
//! every colder one, and every tier that holds it learns of the use. An eviction drops one tier's
//! copy. A hit counts for the hottest tier that holds the block when the request arrives.

use kvstrata_tiers::evict::Eviction;

use super::{Outcome, Policy};
use crate::trace::{Request, Trace};

/// In `slots`: not resident.
const ABSENT: u32 = u32::MAX;

/// One tier of a simulated hierarchy.
#[derive(Debug)]
pub(super) struct Tier {
    eviction: Box<dyn Eviction>,
    capacity: usize,
    /// By block: its slot, or [`ABSENT`]. Slots are the ids that the policy sees, so that its
    /// memory follows the capacity and not the trace.
    slots: Vec<u32>,
    /// By slot: its block.
    blocks: Vec<u32>,
    insertions: u64,
}

impl Tier {
    pub(super) fn new(trace: &Trace, eviction: Box<dyn Eviction>, capacity: u32) -> Self {
        Self {
            eviction,
            capacity: capacity as usize,
            slots: vec![ABSENT; trace.blocks_unique() as usize],
            blocks: Vec::new(),
            insertions: 0,
        }
    }

    fn slot(&self, block: u32) -> Option<u32> {
        self.slots.get(block as usize).copied().filter(|slot| *slot != ABSENT)
    }

    fn place(&mut self, block: u32, slot: u32) {
        if let Some(place) = self.slots.get_mut(block as usize) {
            *place = slot;
        }
    }

    /// Touches or inserts `block`.
    fn use_block(&mut self, block: u32) {
        if let Some(slot) = self.slot(block) {
            self.eviction.touch(slot);
            return;
        }
        if let Some(slot) = self.free_slot(block) {
            self.place(block, slot);
            self.eviction.insert(slot, u64::from(block));
        }
    }

    /// Counts what the request will write: its blocks that are not resident when it arrives. A
    /// block that its own tail pushes out and that is put back at once is not written again.
    fn count_insertions(&mut self, request: &Request<'_>) {
        if self.capacity > 0 {
            let absent = request.blocks().filter(|block| self.slot(*block).is_none()).count();
            self.insertions = self.insertions.saturating_add(absent as u64);
        }
    }

    /// A slot for `block`, after an eviction if all are taken; `None` if there are none at all.
    fn free_slot(&mut self, block: u32) -> Option<u32> {
        if self.blocks.len() < self.capacity {
            let slot = u32::try_from(self.blocks.len()).ok()?;
            self.blocks.push(block);
            return Some(slot);
        }
        let slot = self.eviction.evict(u64::from(block), &mut |_| true)?;
        let held = self.blocks.get_mut(slot as usize)?;
        let evicted = std::mem::replace(held, block);
        self.place(evicted, ABSENT);
        Some(slot)
    }
}

/// What a simulated hierarchy did; the tiers are ordered hot to cold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TiersOutcome {
    /// Block references of the trace: all hits and the misses.
    pub references: u64,
    /// For each tier, the references in a resident prefix whose hottest copy it held.
    pub hits: Vec<u64>,
    /// For each tier, its stretches of such references that follow one another within a request.
    pub stretches: Vec<u64>,
    /// For each tier, the blocks that were not in it when a request used them.
    pub insertions: Vec<u64>,
}

impl TiersOutcome {
    /// References that no tier served.
    #[must_use]
    pub fn misses(&self) -> u64 {
        self.references.saturating_sub(self.hits.iter().sum())
    }

    /// The outcome of all tiers seen as one.
    pub(super) fn single(&self) -> Outcome {
        Outcome {
            references: self.references,
            hits: self.hits.iter().sum(),
            insertions: self.insertions.iter().sum(),
        }
    }
}

/// Runs LRU in an inclusive hierarchy of `capacities_blocks`, ordered hot to cold.
#[must_use]
pub fn simulate_tiers(trace: &Trace, capacities_blocks: &[u32]) -> TiersOutcome {
    let tiers = capacities_blocks.iter().filter_map(|capacity| {
        Policy::Lru.eviction(*capacity).map(|eviction| Tier::new(trace, eviction, *capacity))
    });
    run(trace, tiers.collect(), &mut |_| {})
}

/// Requests between two calls of `progress`.
const PROGRESS_EVERY: usize = 64;

/// Drives the trace through `tiers`.
pub(super) fn run(
    trace: &Trace,
    mut tiers: Vec<Tier>,
    progress: &mut dyn FnMut(u64),
) -> TiersOutcome {
    let mut counts = Counts { hits: vec![0; tiers.len()], stretches: vec![0; tiers.len()] };
    let mut unreported = 0;
    for (position, request) in trace.requests().enumerate() {
        counts.add_prefix(&request, &tiers);
        for tier in &mut tiers {
            tier.count_insertions(&request);
            request.blocks().rev().for_each(|block| tier.use_block(block));
        }
        unreported += u64::from(request.blocks_count());
        if position.is_multiple_of(PROGRESS_EVERY) {
            progress(std::mem::take(&mut unreported));
        }
    }
    progress(unreported);
    TiersOutcome {
        references: trace.references(),
        hits: counts.hits,
        stretches: counts.stretches,
        insertions: tiers.iter().map(|tier| tier.insertions).collect(),
    }
}

/// What each tier has served.
struct Counts {
    hits: Vec<u64>,
    stretches: Vec<u64>,
}

impl Counts {
    /// Adds the request's resident prefix, each block to the hottest tier that holds it.
    fn add_prefix(&mut self, request: &Request<'_>, tiers: &[Tier]) {
        let mut before = None;
        for block in request.blocks() {
            let hottest = tiers.iter().position(|tier| tier.slot(block).is_some());
            let Some(number) = hottest else { return };
            if let Some(hits) = self.hits.get_mut(number) {
                *hits += 1;
            }
            if let Some(stretches) = self.stretches.get_mut(number)
                && before != hottest
            {
                *stretches += 1;
            }
            before = hottest;
        }
    }
}
