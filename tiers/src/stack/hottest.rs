//! What is hottest in dram, for whoever hands it on before this node goes: chains, the head before what
//! follows it.
//!
//! No order is kept for this: ages are one clock, and requests touch their blocks tail first, so that of all
//! blocks sorted by age, the youngest first, those of one request stand in the order of their chain, and what
//! chains share stands before what they do not. One walk over the map finds them; each shard is locked once.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::{Shared, Stack};
use crate::{
    block::{BlockHash, BlockKey},
    limits::{HOTTEST_BLOCKS_MAX, SHARDS},
    map::Shard,
};

/// Blocks of one namespace in dram that follow one another, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HotChain {
    /// Index of the namespace.
    pub namespace: u32,
    /// The block before the first one; `None` at the root, and where it is not known.
    pub parent: Option<BlockHash>,
    /// The blocks, in order; never empty.
    pub hashes: Vec<BlockHash>,
    /// Payload of them, in bytes.
    pub bytes: u64,
}

/// One block: the coldest of all that were chosen is the least.
type Hot = Reverse<(u64, BlockKey, u32)>;

impl Stack {
    /// The readable blocks in dram that were used last: as many as fit into `bytes_max` of payload, and at most
    /// [`HOTTEST_BLOCKS_MAX`]. Hottest first; a block comes before those that follow it. It counts as no use, and
    /// what it names may have left when it is asked for.
    ///
    /// # Blocking
    /// Visits every entry of the map: about 10 ms for a million.
    #[must_use]
    pub fn hottest(&self, bytes_max: u64) -> Vec<HotChain> {
        self.shared.chains(self.shared.used_last(bytes_max))
    }
}

impl Shared {
    /// The blocks that were used last, youngest first, with their ages and lengths.
    fn used_last(&self, bytes_max: u64) -> Vec<(u64, BlockKey, u32)> {
        let mut chosen: BinaryHeap<Hot> = BinaryHeap::new();
        let mut bytes = 0_u64;
        for number in 0..SHARDS {
            self.map.with_shard(number, |shard| {
                shard.in_dram(&mut |key, len, age| {
                    let is_full = bytes.saturating_add(u64::from(len)) > bytes_max
                        || chosen.len() >= HOTTEST_BLOCKS_MAX;
                    let is_colder = chosen.peek().is_some_and(|Reverse(least)| age < least.0);
                    if is_full && is_colder {
                        return;
                    }
                    bytes = bytes.saturating_add(u64::from(len));
                    chosen.push(Reverse((age, key, len)));
                    while bytes > bytes_max || chosen.len() > HOTTEST_BLOCKS_MAX {
                        let Some(Reverse((_, _, len))) = chosen.pop() else { return };
                        bytes = bytes.saturating_sub(u64::from(len));
                    }
                });
            });
        }
        chosen.into_sorted_vec().into_iter().map(|Reverse(block)| block).collect()
    }

    /// Cuts blocks, youngest first, into chains.
    pub(super) fn chains(&self, blocks: Vec<(u64, BlockKey, u32)>) -> Vec<HotChain> {
        let mut chains: Vec<HotChain> = Vec::new();
        let mut before: Option<(u64, BlockKey)> = None;
        for (age, key, len) in blocks {
            let parent = self.parent_of(key);
            let follows = before.is_some_and(|(younger, last)| {
                last.namespace == key.namespace
                    && match parent {
                        Some(parent) => parent == Some(last.hash),
                        // Nothing is known of it: what was touched with it stands beside it.
                        None => younger == age.saturating_add(1),
                    }
            });
            before = Some((age, key));
            match chains.last_mut().filter(|_| follows) {
                Some(chain) => {
                    chain.hashes.push(key.hash);
                    chain.bytes += u64::from(len);
                }
                None => chains.push(HotChain {
                    namespace: key.namespace,
                    parent: parent.flatten(),
                    hashes: vec![key.hash],
                    bytes: u64::from(len),
                }),
            }
        }
        chains
    }

    /// The block before one, none at the root; nothing if that is not known.
    fn parent_of(&self, key: BlockKey) -> Option<Option<BlockHash>> {
        let at = self.map.hashed(key.namespace, key.hash);
        let parent = |shard: &mut Shard| Some(shard.described(shard.find(at)?)?.parent);
        self.map.with(at, parent)
    }
}
