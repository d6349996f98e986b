//! Puts blocks that follow one another on a tier into one event, and those that are withdrawn from it.

use kvstrata_tiers::tier::Tier;

use super::{
    announce::{Described, Terms},
    encode::{Event, Stored},
    shadow::{TierSet, index},
};

/// Blocks of one event.
pub(super) const RUN_BLOCKS_MAX: usize = 256;
/// Hashes of one event of what was removed.
const REMOVED_MAX: usize = 1024;

/// One block of a chain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Link<'a> {
    pub(super) hash: u64,
    pub(super) parent: Option<u64>,
    pub(super) described: &'a Described,
    pub(super) terms: &'a Terms,
}

/// Events in the making, each with the place of its first block. A block comes behind its parent, and an
/// event goes where its first block came: so that what each stands on is said before it.
#[derive(Debug, Default)]
pub(super) struct Runs {
    closed: Vec<(usize, Stored)>,
    open: [Option<(usize, Stored)>; 3],
}

impl Runs {
    /// Takes a block, which came as the `place`th.
    pub(super) fn push(&mut self, place: usize, tier: Tier, link: &Link<'_>) {
        let Link { hash, parent, described, terms } = *link;
        let Some(open) = self.open.get_mut(index(tier)) else { return };
        let goes_on = open.as_ref().is_some_and(|(_, run)| {
            run.hashes.last().copied() == parent
                && run.hashes.len() < RUN_BLOCKS_MAX
                && run.lora_name == described.lora_name
        });
        if !goes_on {
            self.closed.extend(open.take());
        }
        let begin = || (place, Stored::begin(tier, parent, &described.lora_name, terms));
        let (_, run) = open.get_or_insert_with(begin);
        run.hashes.push(hash);
        run.tokens.extend(&described.tokens);
    }

    /// All events, in order.
    pub(super) fn into_events(self) -> impl Iterator<Item = Event> {
        let mut all = self.closed;
        all.extend(self.open.into_iter().flatten());
        all.sort_by_key(|(place, _)| *place);
        all.into_iter().map(|(_, run)| Event::Stored(run))
    }
}

/// What is withdrawn, by tier.
#[derive(Default)]
pub(super) struct Removed {
    pub(super) hashes: [Vec<u64>; 3],
    pub(super) count: usize,
}

impl Removed {
    pub(super) fn push(&mut self, hash: u64, tiers: TierSet) {
        self.count += 1;
        for tier in tiers.iter() {
            if let Some(hashes) = self.hashes.get_mut(index(tier)) {
                hashes.push(hash);
            }
        }
    }

    pub(super) fn into_events(self) -> Vec<Event> {
        let mut events = Vec::new();
        for (tier, hashes) in Tier::ALL.into_iter().zip(&self.hashes) {
            let of_tier = hashes.chunks(REMOVED_MAX);
            events.extend(of_tier.map(|hashes| Event::Removed { tier, hashes: hashes.to_vec() }));
        }
        events
    }
}
