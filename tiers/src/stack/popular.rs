//! Blocks that are read often, for whoever gives them a second holder.
//!
//! Every so many uses ([`POPULAR_USES`]) a block is noted, in the order of the get that used it, so that what one
//! prompt shares with others stands there as a chain. While nobody asks nothing is noted, and when too many wait
//! what comes is not: it comes again with its next uses.

use std::{
    collections::VecDeque,
    sync::atomic::{AtomicBool, Ordering},
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{Block, HotChain, Shared, Stack};
use crate::{
    block::{BlockHash, BlockKey},
    limits::{POPULAR_MAX, POPULAR_USES},
    map::Shard,
    namespace::Namespace,
    tier::Tier,
};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Popular {
    is_asked: AtomicBool,
    waiting: Mutex<VecDeque<BlockKey>>,
    some: Notify,
}

impl Popular {
    /// A block has been used so many times.
    pub(super) fn note(&self, key: BlockKey, uses: u8) {
        // Relaxed: one that is missed is noted again.
        if !uses.is_multiple_of(POPULAR_USES) || !self.is_asked.load(Ordering::Relaxed) {
            return;
        }
        let mut waiting = self.waiting.lock();
        if waiting.len() < POPULAR_MAX {
            waiting.push_back(key);
            self.some.notify_one();
        }
    }

    fn take(&self, blocks_max: usize) -> Vec<BlockKey> {
        let mut waiting = self.waiting.lock();
        let count = waiting.len().min(blocks_max);
        waiting.drain(..count).collect()
    }
}

impl Stack {
    /// Waits for blocks that are read often and are in dram, and takes up to `blocks_max` of those noted. They are
    /// noted from the first call on.
    ///
    /// # Cancel safety
    /// Safe: what was not returned is returned by the next call.
    pub async fn popular(&self, blocks_max: usize) -> Vec<HotChain> {
        let popular = &self.shared.popular;
        popular.is_asked.store(true, Ordering::Relaxed);
        loop {
            let noted = popular.take(blocks_max);
            if noted.is_empty() {
                popular.some.notified().await;
                continue;
            }
            let chains = self.shared.chains(self.shared.as_one_use(&noted));
            if !chains.is_empty() {
                return chains;
            }
        }
    }

    /// The copy of a block that dram has, without using it: it is not verified.
    #[must_use]
    pub fn copy_in_dram(
        &self,
        namespace: &std::sync::Arc<Namespace>,
        hash: BlockHash,
    ) -> Option<Block> {
        let at = self.shared.map.hashed(namespace.index(), hash);
        self.shared.map.with(at, |shard| {
            let entry = shard.entry(at)?;
            Some(Block {
                namespace: std::sync::Arc::clone(namespace),
                hash,
                payload: entry.payload.clone()?,
                checksums: entry.checksums.clone(),
                tier: Tier::Dram,
                is_guest: false,
                is_verified: false,
            })
        })
    }
}

impl Shared {
    /// Those that are in dram, with the ages that one use of all of them would give.
    fn as_one_use(&self, noted: &[BlockKey]) -> Vec<(u64, BlockKey, u32)> {
        let ages = (1..=u64::try_from(noted.len()).unwrap_or(u64::MAX)).rev();
        let found = ages.zip(noted).filter_map(|(age, key)| {
            let at = self.map.hashed(key.namespace, key.hash);
            let len = |shard: &mut Shard| {
                shard.entry(at).filter(|entry| entry.payload.is_some()).map(|entry| entry.len)
            };
            Some((age, *key, self.map.with(at, len)?))
        });
        found.collect()
    }
}
