//! What colder tiers tell the stack: blocks found at start, blocks that leave, blocks that moved.
//!
//! A tier speaks of a copy by its location. What the map has elsewhere by then is another copy, so
//! every call compares the location under the shard's lock and does nothing if it is not the one.
//!
//! A tier may speak of a copy that it has made and whose demotion has not told the map yet. What it
//! says is kept for that demotion, which takes the place from there; until then the copy counts as
//! one that the map has.

use std::{collections::HashMap, sync::atomic::Ordering};

use parking_lot::Mutex;

use super::Shared;
use crate::{
    block::{BlockHash, BlockKey},
    description::Description,
    limits::SHARDS,
    map::{Checksums, Entry, Hashed, Location, Shard, removed, stored},
    namespace::NamespaceId,
    store::{Above, Found, Uncopied, Wanted},
    tier::Tier,
};

/// The part of the map that blocks found on a medium leave to new ones: 1 / this.
const FOUND_FREE_DIVISOR: usize = 8;
/// Ages that a sample has at most: an error of two percent in the share of the coldest.
const SAMPLE_AGES_MAX: usize = 4096;
/// Places of one shard that are looked at for it: tens of microseconds under the lock.
const SAMPLE_PLACES: usize = 1024;

/// Blocks that are being copied, with what the tier said of the copy before the map knew it.
#[derive(Debug, Default)]
pub(crate) struct Early(Mutex<HashMap<BlockKey, UnderWay>>);

/// A block is being copied, until this is dropped.
pub(super) struct Copying<'a> {
    early: &'a Early,
    key: BlockKey,
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.early.0.lock().remove(&self.key);
    }
}

#[derive(Debug)]
struct UnderWay {
    to: Tier,
    said: Option<Said>,
}

#[derive(Debug, Clone, Copy)]
struct Said {
    from: Location,
    /// Where it is now; none if it has left.
    to: Option<Location>,
}

impl Early {
    /// A copy of the block is about to be made; there is one at a time.
    pub(super) fn begin(&self, key: BlockKey, to: Tier) -> Copying<'_> {
        self.0.lock().insert(key, UnderWay { to, said: None });
        Copying { early: self, key }
    }

    fn has(&self, key: BlockKey, to: Tier) -> bool {
        self.0.lock().get(&key).is_some_and(|copy| copy.to == to)
    }

    /// Notes what the tier that the block is being copied to says of the copy.
    fn say(&self, key: BlockKey, said: Said) {
        let mut early = self.0.lock();
        let Some(copy) = early.get_mut(&key) else { return };
        match &mut copy.said {
            Some(known) if known.to == Some(said.from) => known.to = said.to,
            Some(_) | None => copy.said = Some(said),
        }
    }

    /// Where a copy made at `made` is by now; none if it has left. From now on the map knows.
    pub(super) fn take(&self, key: BlockKey, made: Location) -> Option<Location> {
        match self.0.lock().remove(&key).and_then(|copy| copy.said) {
            Some(said) if said.from == made => said.to,
            Some(_) | None => Some(made),
        }
    }
}

/// How a block that was found changed the map.
enum Change {
    /// It is readable because of it.
    New,
    /// It is readable on one more tier.
    Copy,
    /// It is at another place, with so many bytes instead of those.
    Newer { before: u32, after: u32 },
    /// The map does not want it.
    None,
}

impl Above for Shared {
    fn found(&self, tier: Tier, block: Found) -> bool {
        let at = self.map.hashed(block.namespace.index(), block.hash);
        let free = self.index_blocks_max / FOUND_FREE_DIVISOR;
        let may_add = self.map.len() < self.index_blocks_max.saturating_sub(free);
        let counters = block.namespace.counters();
        let len = u64::from(block.len);
        match self.map.with(at, |shard| self.place(shard, at, (tier, &block), may_add)) {
            Change::None => return false,
            Change::Newer { before, after } => {
                // Relaxed: statistics.
                counters.bytes.fetch_add(u64::from(after), Ordering::Relaxed);
                counters.bytes.fetch_sub(u64::from(before), Ordering::Relaxed);
                block.namespace.account().count(tier, u64::from(after), true);
                block.namespace.account().count(tier, u64::from(before), false);
                return true;
            }
            Change::Copy => {}
            Change::New => {
                counters.blocks.fetch_add(1, Ordering::Relaxed);
                counters.bytes.fetch_add(len, Ordering::Relaxed);
            }
        }
        self.metrics.stored(tier).inc();
        true
    }

    fn leaving(&self, tier: Tier, blocks: &[Wanted]) {
        for block in blocks {
            let Some(at) = self.at(block) else { continue };
            self.map.with(at, |shard| {
                if self.is_being_copied(shard, at, tier) {
                    self.early.say(at.key, Said { from: block.location, to: None });
                }
            });
            self.drop_location(tier, at, block.location);
        }
    }

    fn moved(&self, tier: Tier, block: &Wanted, to: Location) -> bool {
        let Some(at) = self.at(block) else { return false };
        self.map.with(at, |shard| {
            if self.is_being_copied(shard, at, tier) {
                self.early.say(at.key, Said { from: block.location, to: Some(to) });
                return true;
            }
            let entry = shard.find(at).and_then(|id| shard.get_mut(id));
            match entry.and_then(|entry| entry.cold_mut(tier)) {
                Some(place) if *place == Some(block.location) => {
                    *place = Some(to);
                    true
                }
                Some(_) | None => false,
            }
        })
    }

    fn clock(&self) -> u64 {
        self.map.clock()
    }

    fn ages(&self, tier: Tier, blocks: &[Wanted]) -> Vec<Option<u64>> {
        let age = |block: &Wanted| {
            let at = self.at(block)?;
            let (age, len) = self.map.with(at, |shard| {
                let entry = shard.entry(at)?;
                let is_here = entry.cold(tier) == Some(block.location);
                let is_here = is_here || self.is_being_copied(shard, at, tier);
                is_here.then_some((entry.age, entry.len))
            })?;
            Some((at.key.namespace, len, age))
        };
        let mut known: Vec<Option<(u32, u32, u64)>> = blocks.iter().map(age).collect();
        if tier == Tier::Nvme {
            self.protect_on_nvme(&mut known);
        }
        known.into_iter().map(|known| known.map(|(_, _, age)| age)).collect()
    }

    fn cold_age(&self, tier: Tier, share: f64) -> u64 {
        // Relaxed: only that samples differ matters.
        let turn = self.samples.fetch_add(1, Ordering::Relaxed);
        let mut ages = Vec::with_capacity(SAMPLE_AGES_MAX);
        for shard in (0..SHARDS).map(|number| (number + turn) % SHARDS) {
            let places = SAMPLE_PLACES.min(SAMPLE_AGES_MAX - ages.len());
            let from = turn.wrapping_mul(SAMPLE_PLACES);
            let sample = |shard: &mut Shard| shard.ages_on(tier, from, places, &mut ages);
            self.map.with_shard(shard, sample).unwrap_or_default();
            if ages.len() >= SAMPLE_AGES_MAX {
                break;
            }
        }
        quantile(&mut ages, share)
    }

    fn survey(&self, tier: Tier, visit: &mut dyn FnMut(Location, u32, u64)) {
        let mut is_kept = self.all_kept_on_nvme();
        let now = self.map.clock();
        let mut visit = |namespace: u32, location: Location, len: u32, age: u64| {
            let is_kept = tier == Tier::Nvme && is_kept(namespace);
            visit(location, len, if is_kept { now } else { age });
        };
        for number in 0..SHARDS {
            // A number below the count of shards has a shard.
            self.map.with_shard(number, |shard| shard.survey(tier, &mut visit)).unwrap_or_default();
        }
    }

    fn uncopied(&self, from: Tier, to: Tier, blocks: &[Wanted]) -> Vec<Option<Uncopied>> {
        // Those that are about to be copied, by namespace: they are not there yet.
        let mut asked: HashMap<u32, u64> = HashMap::new();
        let mut uncopied = |block: &Wanted| {
            let at = self.at(block)?;
            let (uncopied, len) = self.map.with(at, |shard| {
                let entry = shard.entry(at)?;
                let is_here = entry.cold(from) == Some(block.location)
                    || self.is_being_copied(shard, at, from);
                let uncopied = (is_here && entry.cold(to).is_none()).then(|| Uncopied {
                    age: entry.age,
                    reused: entry.was_read(),
                    in_long_chain: self.contexts.is_long(entry.context),
                })?;
                Some((uncopied, u64::from(entry.len)))
            })?;
            let asked = asked.entry(at.key.namespace).or_default();
            *asked += len;
            let account = self.account(at.key.namespace)?;
            (to != Tier::Object || account.admits_to_object(*asked)).then_some(uncopied)
        };
        blocks.iter().map(&mut uncopied).collect()
    }

    fn gone(&self, tier: Tier, is_gone: &mut dyn FnMut(Location) -> bool) -> u64 {
        let mut dropped = 0;
        for number in 0..SHARDS {
            let mut found = Vec::new();
            let look = |shard: &mut Shard| shard.copies_on(tier, is_gone, &mut found);
            // A number below the count of shards has a shard.
            self.map.with_shard(number, look).unwrap_or_default();
            for (key, location) in found {
                dropped += 1;
                self.drop_location(tier, self.map.hashed(key.namespace, key.hash), location);
            }
        }
        dropped
    }

    fn description(&self, namespace: NamespaceId, hash: BlockHash) -> Option<Description> {
        let namespace = self.namespaces.get(namespace.as_bytes()).ok()?;
        self.description(&namespace, hash)
    }

    fn found_described(
        &self,
        tier: Tier,
        namespace: NamespaceId,
        hash: BlockHash,
        description: Description,
    ) -> bool {
        let Ok(namespace) = self.namespaces.get(namespace.as_bytes()) else { return false };
        self.restore_description(tier, &namespace, hash, description)
    }

    fn copied(&self, from: &Wanted, to: Tier, location: Location, checksums: &Checksums) -> bool {
        let Some(at) = self.at(from) else { return false };
        let is_kept = self.map.with(at, |shard| {
            let Some(entry) = shard.find(at).and_then(|id| shard.get_mut(id)) else { return false };
            // What is being put may have other bytes.
            if entry.hottest().is_none() || entry.checksums != *checksums {
                return false;
            }
            match entry.cold_mut(to) {
                Some(place) if place.is_none() => *place = Some(location),
                Some(_) | None => return false,
            }
            let len = entry.len;
            shard.push(stored(at.key, to));
            self.count_copy(to, (at.key.namespace, len), true);
            true
        });
        if is_kept {
            self.metrics.stored(to).inc();
        }
        is_kept
    }
}

impl Shared {
    /// The place of a block that a tier names; none in a namespace that is not open here.
    fn at(&self, block: &Wanted) -> Option<Hashed> {
        let namespace = self.namespaces.get(block.namespace.as_bytes()).ok()?;
        Some(self.map.hashed(namespace.index(), block.hash))
    }

    /// A copy may be on the tier that the map is about to be told of.
    pub(super) fn is_being_copied(&self, shard: &Shard, at: Hashed, tier: Tier) -> bool {
        let unknown = |entry: &Entry| entry.payload.is_some() && entry.cold(tier).is_none();
        shard.entry(at).is_some_and(unknown) && self.early.has(at.key, tier)
    }

    /// Puts a block that was found into the map, if that has room for it and nothing better.
    fn place(
        &self,
        shard: &mut Shard,
        at: Hashed,
        (tier, block): (Tier, &Found),
        may_add: bool,
    ) -> Change {
        let Some(entry) = shard.find(at).and_then(|id| shard.get_mut(id)) else {
            let mut entry = Entry::new(at.key, block.len);
            entry.checksums = block.checksums.clone();
            return match entry.cold_mut(tier) {
                Some(place) if may_add => {
                    *place = Some(block.location);
                    shard.insert(at, entry);
                    shard.push(stored(at.key, tier));
                    self.map.count(true);
                    self.count_copy(tier, (at.key.namespace, block.len), true);
                    Change::New
                }
                Some(_) | None => Change::None,
            };
        };
        // What is being put is newer than what was found.
        if entry.staging.is_some() {
            return Change::None;
        }
        let is_same = entry.len == block.len && entry.checksums == block.checksums;
        if !is_same && entry.tiers().any(|other| other != tier) {
            return Change::None;
        }
        let Some(place) = entry.cold_mut(tier).filter(|place| block.replaces || place.is_none())
        else {
            return Change::None;
        };
        if place.replace(block.location).is_none() {
            shard.push(stored(at.key, tier));
            self.count_copy(tier, (at.key.namespace, block.len), true);
            return Change::Copy;
        }
        let before = std::mem::replace(&mut entry.len, block.len);
        entry.checksums = block.checksums.clone();
        Change::Newer { before, after: block.len }
    }

    /// Drops the copy that a colder tier no longer has.
    pub(super) fn drop_location(&self, tier: Tier, at: Hashed, location: Location) {
        let gone = self.map.with(at, |shard| {
            let id = shard.find(at)?;
            let place = shard.get_mut(id)?.cold_mut(tier)?;
            if *place != Some(location) {
                return None;
            }
            shard.push(removed(at.key, tier));
            let entry = shard.get_mut(id)?;
            *entry.cold_mut(tier)? = None;
            self.count_copy(tier, (at.key.namespace, entry.len), false);
            if entry.hottest().is_some() || entry.staging.is_some() {
                None
            } else {
                shard.remove(at)
            }
        });
        if let Some(entry) = gone {
            self.map.count(false);
            self.count_gone(at.key.namespace, entry.len);
        }
    }
}

/// The age below which `share` of `ages` lie; 0 without any.
fn quantile(ages: &mut [u64], share: f64) -> u64 {
    let per_mille = (share.clamp(0.0, 1.0) * 1000.0).round();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and 1000"
    )]
    let at = ages.len() * per_mille as usize / 1000;
    let at = at.min(ages.len().saturating_sub(1));
    if ages.is_empty() {
        return 0;
    }
    *ages.select_nth_unstable(at).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quantile_is_of_any_share() {
        let mut ages: Vec<u64> = (0..1000).rev().collect();
        let cases = [(-1.0, 0), (0.0, 0), (0.25, 250), (0.999, 999), (1.0, 999), (7.0, 999)];
        for (share, expected) in cases {
            assert_eq!(quantile(&mut ages, share), expected, "{share}");
        }
        assert_eq!((quantile(&mut [], 0.5), quantile(&mut [7], f64::NAN)), (0, 7));
    }
}
