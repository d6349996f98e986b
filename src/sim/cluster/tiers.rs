//! The tiers of all nodes: who holds what, and who waits for whom.
//!
//! Each node has its dram and its nvme, all share the object store. What a prompt was computed or loaded
//! for is used in all tiers of its worker's node, as [`sim`](crate::sim) has it: inclusive, LRU, tail first.
//! A tier of a node serves loads in the order in which they come, whoever asks; the object store has no
//! queue of its own, the link of each node to it has one. Setup is waited for by whoever loads, it does
//! not keep the device busy.

use std::ops::Range;

use kvstrata_tiers::tier::Tier;

use super::{
    extents::{Extents, part},
    setup::{Rate, Setup},
};
use crate::{
    score::{LoadCost, Segment},
    trace::Run,
};

/// A tier of a node; of the object store, the node's link to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Source {
    pub(super) node: u32,
    pub(super) tier: Tier,
}

/// Sources of each node.
const SOURCES: u32 = 3;

impl Source {
    fn number(self) -> u32 {
        let tier = match self.tier {
            Tier::Dram => 0,
            Tier::Nvme => 1,
            Tier::Object => 2,
        };
        self.node * SOURCES + tier
    }

    /// The source that a segment names.
    pub(super) fn of(segment: &Segment) -> Self {
        Self { node: segment.source / SOURCES, tier: segment.tier }
    }

    fn index(self) -> usize {
        self.number() as usize
    }
}

/// Where a prompt's blocks are: positions of the prompt, for each cache that has some.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Holder and positions; the object store's holder is no node.
    caches: Vec<(Option<u32>, Tier, Vec<Range<u32>>)>,
}

/// Milliseconds of loads that wait for each source.
#[derive(Debug, Clone, Default)]
pub(super) struct Queues {
    ms: Vec<f64>,
}

impl Queues {
    fn of(&self, source: Source) -> f64 {
        self.ms.get(source.index()).copied().unwrap_or(0.0)
    }

    /// Adds the loads of the first `blocks` blocks of `segments`.
    pub(super) fn reserve(&mut self, segments: &[Segment], blocks: u32) {
        for (segment, blocks) in first(segments, blocks) {
            if let Some(ms) = self.ms.get_mut(segment.source as usize) {
                *ms += f64::from(blocks) * segment.cost.block_ms;
            }
        }
    }
}

/// The segments that the first `blocks` blocks are in, and how many are in each.
pub(super) fn first(segments: &[Segment], blocks: u32) -> impl Iterator<Item = (&Segment, u32)> {
    segments.iter().scan(blocks, |left, segment| {
        let count = segment.blocks.min(*left);
        *left -= count;
        (count > 0).then_some((segment, count))
    })
}

/// The tiers of a cluster.
#[derive(Debug)]
pub(super) struct Tiers<'a> {
    setup: &'a Setup,
    /// Dram and nvme of each node.
    nodes: Vec<[Extents; 2]>,
    object: Extents,
    /// When each source has served all that it was asked for, in ms.
    free_ms: Vec<f64>,
}

impl<'a> Tiers<'a> {
    pub(super) fn new(setup: &'a Setup) -> Self {
        let cache = |tier| Extents::new(setup.tier(tier).capacity_blocks);
        let nodes = setup.nodes();
        Self {
            setup,
            nodes: (0..nodes).map(|_| [cache(Tier::Dram), cache(Tier::Nvme)]).collect(),
            object: cache(Tier::Object),
            free_ms: vec![0.0; (nodes * SOURCES) as usize],
        }
    }

    /// What waits for each source at `now_ms`, if nothing was asked for since.
    pub(super) fn queues(&self, now_ms: f64) -> Queues {
        Queues { ms: self.free_ms.iter().map(|free| (free - now_ms).max(0.0)).collect() }
    }

    /// Where the blocks of `runs` are.
    pub(super) fn find(&self, runs: &[Run]) -> Found {
        let mut found = Found::default();
        let mut add = |holder, tier, cache: &Extents| {
            let positions = cache.positions(runs);
            if !positions.is_empty() {
                found.caches.push((holder, tier, positions));
            }
        };
        for (node, [dram, nvme]) in (0..).zip(&self.nodes) {
            add(Some(node), Tier::Dram, dram);
            add(Some(node), Tier::Nvme, nvme);
        }
        add(None, Tier::Object, &self.object);
        found
    }

    /// From where a worker of `node` would load, from position `device` on and without gaps: at each
    /// position from the source that takes least time for each block that it has there.
    pub(super) fn plan(
        &self,
        found: &Found,
        node: u32,
        device: u32,
        queues: &Queues,
    ) -> Vec<Segment> {
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = device;
        loop {
            let candidates = found.caches.iter().filter_map(|(holder, tier, positions)| {
                let held = positions.get(positions.partition_point(|held| held.end <= at))?;
                let blocks = held.contains(&at).then(|| held.end - at)?;
                let source = Source { node: holder.unwrap_or(node), tier: *tier };
                let Rate { setup_ms, block_ms } = self.rate(source, node);
                let cost = LoadCost { queue_ms: queues.of(source), setup_ms, block_ms };
                Some(Segment { blocks, tier: *tier, source: source.number(), cost })
            });
            let mean_ms = |segment: &Segment| {
                let begun = segments.iter().any(|before| before.source == segment.source);
                let begin_ms =
                    if begun { 0.0 } else { segment.cost.queue_ms + segment.cost.setup_ms };
                begin_ms / f64::from(segment.blocks) + segment.cost.block_ms
            };
            let best = candidates.min_by(|left, right| mean_ms(left).total_cmp(&mean_ms(right)));
            let Some(best) = best else { return segments };
            at = at.saturating_add(best.blocks);
            segments.push(best);
        }
    }

    fn rate(&self, source: Source, reader: u32) -> Rate {
        let tier = self.setup.tier(source.tier);
        if source.node == reader { tier.local } else { tier.remote }
    }

    /// Loads the first `blocks` blocks of `segments`, which begin at position `device` of `runs`, all
    /// sources at once. Returns when all of it has come.
    pub(super) fn load(
        &mut self,
        now_ms: f64,
        runs: &[Run],
        device: u32,
        (segments, blocks): (&[Segment], u32),
    ) -> f64 {
        let mut done_ms = now_ms;
        let mut at = device;
        for (segment, blocks) in first(segments, blocks) {
            let source = Source::of(segment);
            if let Some(free_ms) = self.free_ms.get_mut(source.index()) {
                *free_ms = free_ms.max(now_ms) + f64::from(blocks) * segment.cost.block_ms;
                done_ms = done_ms.max(*free_ms + segment.cost.setup_ms);
            }
            let read = part(runs, at..at.saturating_add(blocks));
            if let Some(cache) = self.cache(source) {
                cache.use_runs(&read);
            }
            at = at.saturating_add(blocks);
        }
        done_ms
    }

    fn cache(&mut self, source: Source) -> Option<&mut Extents> {
        let [dram, nvme] = self.nodes.get_mut(source.node as usize)?;
        Some(match source.tier {
            Tier::Dram => dram,
            Tier::Nvme => nvme,
            Tier::Object => &mut self.object,
        })
    }

    /// A worker of `node` has the blocks of `runs`: they are used in all tiers of its node.
    pub(super) fn store(&mut self, node: u32, runs: &[Run]) {
        for tier in Tier::ALL {
            if let Some(cache) = self.cache(Source { node, tier }) {
                cache.use_runs(runs);
            }
        }
    }
}
