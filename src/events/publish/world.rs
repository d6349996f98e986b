//! Where all blocks of the node are, as its changes tell it.

use std::collections::HashMap;

use kvstrata_tiers::{block::BlockKey, event::TierEvent, tier::Tier};

use super::shadow::TierSet;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct World {
    places: HashMap<BlockKey, Place>,
    /// Blocks of each shard.
    counts: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    tiers: TierSet,
    shard: u16,
}

impl World {
    pub(super) fn tiers(&self, key: &BlockKey) -> TierSet {
        self.places.get(key).map_or(TierSet::NONE, |place| place.tiers)
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = BlockKey> {
        self.places.keys().copied()
    }

    /// Takes what has happened in a shard; `changed` is told of every block that it was about.
    pub(super) fn apply(
        &mut self,
        shard: usize,
        events: &[TierEvent],
        mut changed: impl FnMut(BlockKey),
    ) {
        for event in events {
            let (TierEvent::Stored { key, .. }
            | TierEvent::Removed { key, .. }
            | TierEvent::Described { key }) = *event;
            match *event {
                TierEvent::Stored { tier, .. } => self.add(shard, key, TierSet::of(tier)),
                TierEvent::Removed { tier, .. } => self.remove(&key, TierSet::of(tier)),
                TierEvent::Described { .. } => {}
            }
            changed(key);
        }
    }

    /// Takes all that a shard has; `changed` is told of every block of it: more may be known of those, too, that
    /// are where they were.
    pub(super) fn replace(
        &mut self,
        shard: usize,
        all: &[(BlockKey, Tier)],
        mut changed: impl FnMut(BlockKey),
    ) {
        let mut tiers: HashMap<BlockKey, TierSet> = HashMap::new();
        for (key, tier) in all {
            let known = tiers.entry(*key).or_default();
            *known = known.with(TierSet::of(*tier));
        }
        if self.counts.get(shard).is_some_and(|count| *count > 0) {
            let of_shard =
                self.places.iter().filter(|(_, place)| usize::from(place.shard) == shard);
            let gone = of_shard.filter(|(key, _)| !tiers.contains_key(key));
            let gone: Vec<_> = gone.map(|(key, place)| (*key, place.tiers)).collect();
            for (key, tiers) in gone {
                self.remove(&key, tiers);
                changed(key);
            }
        }
        for (key, tiers) in tiers {
            let before = self.tiers(&key);
            if before != tiers {
                self.remove(&key, before);
                self.add(shard, key, tiers);
            }
            changed(key);
        }
    }

    fn add(&mut self, shard: usize, key: BlockKey, tiers: TierSet) {
        let short = u16::try_from(shard).unwrap_or(u16::MAX);
        let place = self.places.entry(key).or_insert_with(|| {
            if self.counts.len() <= shard {
                self.counts.resize(shard + 1, 0);
            }
            if let Some(count) = self.counts.get_mut(shard) {
                *count += 1;
            }
            Place { tiers: TierSet::NONE, shard: short }
        });
        place.tiers = place.tiers.with(tiers);
    }

    fn remove(&mut self, key: &BlockKey, tiers: TierSet) {
        let Some(place) = self.places.get_mut(key) else { return };
        place.tiers = place.tiers.without(tiers);
        if place.tiers.is_empty() {
            let shard = usize::from(place.shard);
            self.places.remove(key);
            if let Some(count) = self.counts.get_mut(shard) {
                *count -= 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::block::BlockHash;

    use super::*;

    fn key(number: u8) -> BlockKey {
        BlockKey { namespace: 0, hash: BlockHash::from_array([number; 32]) }
    }

    #[test]
    fn changes_and_whole_shards_are_taken() {
        let mut world = World::default();
        let (dram, nvme) = (Tier::Dram, Tier::Nvme);
        let stored = |number, tier| TierEvent::Stored { key: key(number), tier };
        let mut changed = Vec::new();
        world.replace(3, &[(key(1), dram), (key(1), nvme), (key(2), nvme)], |_| {});
        world.apply(4, &[stored(9, dram)], |_| {});
        let events = [
            stored(3, dram),
            TierEvent::Removed { key: key(1), tier: dram },
            TierEvent::Described { key: key(2) },
            TierEvent::Removed { key: key(2), tier: nvme },
        ];
        world.apply(3, &events, |key| changed.push(key));
        assert_eq!(changed, [key(3), key(1), key(2), key(2)]);
        assert_eq!(world.tiers(&key(1)), TierSet::of(nvme));
        assert_eq!((world.tiers(&key(2)), world.keys().count()), (TierSet::NONE, 3));
        let mut changed = Vec::new();
        world.replace(3, &[(key(1), nvme), (key(4), dram)], |key| changed.push(key));
        changed.sort();
        assert_eq!(changed, [key(1), key(3), key(4)]);
        assert_eq!(world.keys().count(), 3);
        world.replace(3, &[], |_| {});
        assert_eq!(world.keys().collect::<Vec<_>>(), [key(9)]);
    }
}
