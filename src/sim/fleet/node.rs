//! One node of a fleet: what it has, and what the others know of that.

use lru::LruCache;

use crate::{
    cluster::{
        feed::{is_worn, keys_for},
        filter::Filter,
    },
    limits::FILTER_KEYS_MAX,
};

/// The digest of a block: as even as those of hashes, and another one for each.
pub(super) fn digest(block: u32) -> u64 {
    // The finalizer of MurmurHash3, which is a bijection.
    let mut mixed = u64::from(block) ^ 0x9e37_79b9_7f4a_7c15;
    for multiplier in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53_u64] {
        mixed ^= mixed >> 33;
        mixed = mixed.wrapping_mul(multiplier);
    }
    mixed ^ (mixed >> 33)
}

pub(super) struct Node {
    cache: LruCache<u32, ()>,
    room: usize,
    /// As the others know it.
    filter: Filter,
    /// Stored since they were told.
    stored: Vec<u32>,
    keys: u32,
    gone: u32,
    /// Requests of the engines whose home it is.
    pub(super) requests: u64,
    /// Keys that others were told of one by one.
    pub(super) additions: u64,
    /// Filters that they were told as a whole, and the bytes of these.
    pub(super) generations: u64,
    pub(super) generation_bytes: u64,
}

impl Node {
    pub(super) fn new(blocks_max: u32) -> Self {
        Self {
            // One with a bound would take all of its memory at once.
            cache: LruCache::unbounded(),
            room: blocks_max as usize,
            filter: Filter::new(keys_for(0, FILTER_KEYS_MAX)),
            stored: Vec::new(),
            keys: 0,
            gone: 0,
            requests: 0,
            additions: 0,
            generations: 0,
            generation_bytes: 0,
        }
    }

    pub(super) fn has(&self, block: u32) -> bool {
        self.cache.contains(&block)
    }

    pub(super) fn blocks(&self) -> u64 {
        self.cache.len() as u64
    }

    pub(super) fn filter(&self) -> &Filter {
        &self.filter
    }

    /// Uses a block that is here, if it still is.
    pub(super) fn touch(&mut self, block: u32) {
        self.cache.promote(&block);
    }

    /// Stores or uses a block.
    pub(super) fn put(&mut self, block: u32) {
        if self.cache.put(block, ()).is_some() {
            return;
        }
        self.stored.push(block);
        if self.cache.len() > self.room {
            self.cache.pop_lru();
            self.gone += 1;
        }
    }

    /// Tells the others what is new.
    pub(super) fn tell(&mut self) {
        for block in self.stored.drain(..) {
            if self.filter.add(digest(block)) {
                self.keys += 1;
                self.additions += 1;
            }
        }
        if is_worn(self.keys, self.gone, &self.filter, FILTER_KEYS_MAX) {
            self.filter = Filter::new(keys_for(self.blocks(), FILTER_KEYS_MAX));
            (self.keys, self.gone) = (0, 0);
            for (block, ()) in &self.cache {
                self.keys += u32::from(self.filter.add(digest(*block)));
            }
            self.generations += 1;
            self.generation_bytes += self.filter.bytes() as u64;
        }
    }

    /// Loses all that it has; the others do not know yet.
    pub(super) fn lose(&mut self) {
        self.cache.clear();
        self.stored.clear();
    }
}
