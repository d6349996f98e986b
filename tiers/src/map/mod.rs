//! The one in-memory map: for each block of this node, where its copies are.
//!
//! Sharded by a keyed hash of the block key; each shard is one short critical section. No lock is
//! held across I/O or an await, and no two shards are locked at once. Lock order: shard, then the
//! dram pool (dropping a payload gives its slot back), then the put contexts.
//!
//! Ages: one clock counts touches. Eviction compares the coldest ages of the shards, so that the
//! order over all shards is the one that a single list would have, up to races between callers.

mod entry;
mod shard;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

#[cfg(test)]
pub(crate) use entry::NO_CLASS;
pub(crate) use entry::{BatchId, Entry, Guest, StagedPart, Staging};
pub use entry::{Checksums, Location};
pub(crate) use shard::{Described, Evicted, Leavers, Shard};

use crate::{
    block::{BlockHash, BlockKey},
    event::{Drained, TierEvent},
    limits::SHARDS,
    tier::Tier,
};

/// How many hashes are sorted by shard at once: large enough that each shard is locked for a run of
/// them, small enough that a short prefix does not cost a long list.
const CHUNK_MAX: usize = 4096;
/// The first chunk of a list; later ones grow to [`CHUNK_MAX`].
const CHUNK_MIN: usize = 256;

/// A key and its place: computed once for each call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Hashed {
    pub(crate) key: BlockKey,
    pub(crate) code: u64,
}

impl Hashed {
    fn shard(&self) -> usize {
        // The table uses the low and the top bits of the code; these are in between.
        usize::try_from((self.code >> 32) % SHARDS as u64).unwrap_or(0)
    }
}

/// The map.
#[derive(Debug)]
pub(crate) struct Map {
    shards: Box<[Mutex<Shard>]>,
    /// Makes table places unpredictable to whoever picks hashes.
    seed: u64,
    clock: AtomicU64,
    blocks: AtomicUsize,
    /// Feeds of events that there were.
    feeds: AtomicU64,
}

impl Map {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new(seed))).collect(),
            seed,
            clock: AtomicU64::new(1),
            blocks: AtomicUsize::new(0),
            feeds: AtomicU64::new(0),
        }
    }

    /// Places a key.
    pub(crate) fn hashed(&self, namespace: u32, hash: BlockHash) -> Hashed {
        let key = BlockKey { namespace, hash };
        Hashed { key, code: code_of(self.seed, &key) }
    }

    /// Runs `act` under the lock of the shard of `at`.
    pub(crate) fn with<T>(&self, at: Hashed, act: impl FnOnce(&mut Shard) -> T) -> T {
        match self.shards.get(at.shard()) {
            Some(shard) => act(&mut shard.lock()),
            None => act(&mut Shard::new(self.seed)),
        }
    }

    /// Reserves `count` ages; the first one is returned. One more stays unused: the ages of two lists never stand
    /// beside each other, so that lists can be told apart by them.
    pub(crate) fn ages(&self, count: usize) -> u64 {
        // Relaxed: ages order uses, nothing is published by them.
        self.clock.fetch_add(
            u64::try_from(count).unwrap_or(u64::MAX).saturating_add(1),
            Ordering::Relaxed,
        )
    }

    /// The age that comes next.
    pub(crate) fn clock(&self) -> u64 {
        // Relaxed: as above.
        self.clock.load(Ordering::Relaxed)
    }

    /// Counts entries in and out.
    pub(crate) fn count(&self, added: bool) {
        // Relaxed: a statistic and a bound that may be off by those in flight.
        if added {
            self.blocks.fetch_add(1, Ordering::Relaxed);
        } else {
            self.blocks.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Entries in the map, of whatever state.
    pub(crate) fn len(&self) -> usize {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Visits `keys` shard by shard, in descending position within each shard, and tells the
    /// position. Each shard is locked once.
    pub(crate) fn visit(&self, keys: &[Hashed], mut act: impl FnMut(&mut Shard, usize, Hashed)) {
        self.visit_by(keys, Hashed::shard, |shard, position, key| act(shard, position, *key));
    }

    /// As [`visit`](Self::visit), for anything that knows its shard.
    pub(crate) fn visit_by<T>(
        &self,
        items: &[T],
        shard_of: impl Fn(&T) -> usize,
        mut act: impl FnMut(&mut Shard, usize, &T),
    ) {
        let (order, ends) = by_shard(items, shard_of);
        let mut start = 0;
        for (shard, end) in self.shards.iter().zip(ends) {
            let positions = order.get(start..end).unwrap_or_default();
            start = end;
            if positions.is_empty() {
                continue;
            }
            let mut shard = shard.lock();
            for position in positions {
                let position = usize::try_from(*position).unwrap_or(usize::MAX);
                if let Some(item) = items.get(position) {
                    act(&mut shard, position, item);
                }
            }
        }
    }

    /// The coldest age among evictable blocks that may leave, and its shard.
    pub(crate) fn coldest(&self, leavers: Leavers<'_>) -> Option<(u64, usize)> {
        let now = self.ages(1);
        let ages = self.shards.iter().enumerate().filter_map(|(number, shard)| {
            shard.lock().coldest(leavers, now).map(|age| (age, number))
        });
        ages.min()
    }

    /// Moves entries to the lanes of their namespaces. Each shard is locked once.
    pub(crate) fn change_lanes(&self, lane_of: &dyn Fn(u32) -> u16) {
        self.shards.iter().for_each(|shard| shard.lock().change_lanes(lane_of));
    }

    /// Runs `act` under the lock of shard `number`.
    pub(crate) fn with_shard<T>(
        &self,
        number: usize,
        act: impl FnOnce(&mut Shard) -> T,
    ) -> Option<T> {
        self.shards.get(number).map(|shard| act(&mut shard.lock()))
    }

    /// Names an entry for the owner table of the arena.
    pub(crate) fn owner(at: Hashed, id: u32) -> u64 {
        (u64::try_from(at.shard()).unwrap_or(0) << 32) | u64::from(id)
    }

    /// The shard and the entry that [`owner`](Self::owner) named.
    pub(crate) fn of_owner(owner: u64) -> (usize, u32) {
        let number = usize::try_from(owner >> 32).unwrap_or(usize::MAX);
        (number, u32::try_from(owner & u64::from(u32::MAX)).unwrap_or(u32::MAX))
    }

    /// Bytes of memory that the map has allocated.
    pub(crate) fn allocated_bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().allocated_bytes()).sum()
    }

    /// Switches events on in all shards, for a new feed whose number is returned.
    pub(crate) fn start_events(&self) -> u64 {
        // Relaxed: only uniqueness matters.
        let feed = self.feeds.fetch_add(1, Ordering::Relaxed) + 1;
        for shard in &self.shards {
            shard.lock().events.switch_on(feed);
        }
        feed
    }

    /// Switches events off where they are still on for `feed`.
    pub(crate) fn stop_events(&self, feed: u64) {
        for shard in &self.shards {
            shard.lock().events.switch_off(feed);
        }
    }

    /// Takes what one shard has to tell `feed`.
    pub(crate) fn drain_events(&self, number: usize, feed: u64) -> Drained {
        let drained = self.with_shard(number, |shard| shard.drain_events(feed));
        drained.unwrap_or(Drained::Events(Vec::new()))
    }

    /// The same, with all that the shard holds then.
    pub(crate) fn drain_whole(&self, number: usize, feed: u64) -> (Drained, Vec<(BlockKey, Tier)>) {
        let drained = self.with_shard(number, |shard| (shard.drain_events(feed), shard.readable()));
        drained.unwrap_or((Drained::Events(Vec::new()), Vec::new()))
    }
}

/// Splits a list into chunks that start small and grow.
pub(crate) fn chunks(len: usize) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut start = 0;
    let mut size = CHUNK_MIN;
    std::iter::from_fn(move || {
        (start < len).then(|| {
            let range = start..len.min(start + size);
            start = range.end;
            size = (size * 4).min(CHUNK_MAX);
            range
        })
    })
}

/// The positions of `items` sorted by shard, descending within each, and where each shard's end.
/// A counting sort: the blocks of a long prefix are many, the shards are few.
fn by_shard<T>(items: &[T], shard_of: impl Fn(&T) -> usize) -> (Vec<u32>, [usize; SHARDS]) {
    let mut ends = [0_usize; SHARDS];
    for item in items {
        if let Some(count) = ends.get_mut(shard_of(item)) {
            *count += 1;
        }
    }
    let mut end = 0;
    for count in &mut ends {
        end += *count;
        *count = end;
    }
    let mut next = ends;
    let mut order = vec![0; items.len()];
    // Ascending positions filled in from the end of each shard's range: descending within it.
    for (position, item) in (0..).zip(items) {
        if let Some(next) = next.get_mut(shard_of(item)) {
            *next = next.saturating_sub(1);
            if let Some(place) = order.get_mut(*next) {
                *place = position;
            }
        }
    }
    (order, ends)
}

fn code_of(seed: u64, key: &BlockKey) -> u64 {
    // The namespace is mixed into the seed: equal hashes in two namespaces get places apart.
    let namespace = u64::from(key.namespace).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    xxh3_64_with_seed(key.hash.as_bytes(), seed ^ namespace)
}

/// A removal from a tier.
pub(crate) fn removed(key: BlockKey, tier: Tier) -> TierEvent {
    TierEvent::Removed { key, tier }
}

/// An arrival on a tier.
pub(crate) fn stored(key: BlockKey, tier: Tier) -> TierEvent {
    TierEvent::Stored { key, tier }
}
