//! A node's own filter: kept from what changes in its tiers, and told to the other nodes.
//!
//! What is stored is added as soon as [`Changes`] tells of it. Nothing can be taken out, so what has left counts, and
//! when a quarter of all keys have, or there are more than the filter is made for, another one is made of all that
//! the tiers hold: a new *generation*, which the others ask for as a whole. Until it is there the old one goes on.
//!
//! Within a generation the *version* counts the additions, and the latest are kept as digests: who has an earlier
//! version is told these alone. What did not change the filter, because all its bits were set, is no addition. Memory
//! is bounded by the blocks that the index has room for: two filters for so many keys, and the additions.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    sync::Arc,
};

use bytes::Bytes;
use kvstrata_tiers::{
    block::BlockKey, event::TierEvent, limits::SHARDS, namespace::NamespaceTable, stack::Stack,
};
use parking_lot::RwLock;
use tokio::task::yield_now;

use super::{
    filter::{Digester, Filter},
    mirror::Update,
};
use crate::{
    changes::{Change, Changed, Changes},
    limits::{FILTER_ADDITIONS_KEPT, FILTER_KEYS_MAX, FILTER_KEYS_MIN, FILTER_PIECE_BYTES},
};

/// A new generation is made when 1 / this of the keys have left: then at most a third more keys than blocks set bits.
const GONE_DIVISOR: u32 = 4;
/// A new generation has room for 1 / this more keys than there are blocks.
const SPARE_DIVISOR: u64 = 2;
/// Blocks that are looked at before others have their turn: a tenth of a millisecond.
const TURN_KEYS: usize = 1024;

/// Keys that the filter of so many blocks is made for, at most `keys_max`.
#[must_use]
pub fn keys_for(blocks: u64, keys_max: u32) -> u32 {
    let keys = blocks.saturating_add(blocks / SPARE_DIVISOR);
    let keys = u32::try_from(keys).unwrap_or(u32::MAX);
    keys.clamp(FILTER_KEYS_MIN, keys_max.max(FILTER_KEYS_MIN))
}

/// Whether another one is due in place of a filter that so many keys were added to, of which so many have left; one
/// for `keys_max` keys is as large as it can be.
#[must_use]
pub fn is_worn(keys: u32, gone: u32, filter: &Filter, keys_max: u32) -> bool {
    let many_gone = gone >= FILTER_KEYS_MIN / GONE_DIVISOR;
    let is_stale = many_gone && gone >= keys / GONE_DIVISOR;
    is_stale || (keys > filter.keys() && filter.keys() < keys_max)
}

/// One generation of a node's own filter.
#[derive(Debug)]
struct Own {
    generation: u64,
    version: u64,
    filter: Filter,
    /// The latest additions, that of `version` last.
    latest: VecDeque<u64>,
    /// Keys that have set bits, and those of them that have left.
    keys: u32,
    gone: u32,
}

impl Own {
    fn new(generation: u64, keys: u32) -> Self {
        let filter = Filter::new(keys);
        Self { generation, version: 0, filter, latest: VecDeque::new(), keys: 0, gone: 0 }
    }

    fn add(&mut self, digest: u64) {
        if !self.filter.add(digest) {
            return;
        }
        self.keys = self.keys.saturating_add(1);
        self.version += 1;
        if self.latest.len() >= FILTER_ADDITIONS_KEPT {
            self.latest.pop_front();
        }
        self.latest.push_back(digest);
    }

    fn is_worn(&self, keys_max: u32) -> bool {
        is_worn(self.keys, self.gone, &self.filter, keys_max)
    }

    /// How to tell whoever knows this version of this generation.
    fn telling(&self, generation: u64, version: u64) -> Telling {
        let behind = self.version.checked_sub(version).map(usize::try_from);
        let next = match behind {
            Some(Ok(behind)) if generation == self.generation && behind <= self.latest.len() => {
                Next::Added(version)
            }
            _ => Next::Piece { offset: 0, version: self.version },
        };
        Telling { generation: self.generation, next: Some(next) }
    }

    /// The additions after `version`, as many as fit into a piece.
    fn added(&self, version: u64) -> (Update, Option<Next>) {
        let behind = self.version.saturating_sub(version);
        let behind = usize::try_from(behind).unwrap_or(usize::MAX);
        let first = self.latest.len().saturating_sub(behind);
        let told = self.latest.iter().skip(first).take(FILTER_PIECE_BYTES / 8);
        let added: Bytes = told.flat_map(|digest| digest.to_le_bytes()).collect();
        let to = version.saturating_add(added.len() as u64 / 8);
        let next = (to < self.version).then_some(Next::Added(to));
        let complete = next.is_none();
        let generation = self.generation;
        (Update { generation, version: to, added, complete, ..Update::default() }, next)
    }

    /// The piece from `offset` on. What is added meanwhile may be in it, too, and is told again as an addition to
    /// `version`, which was that of the first piece.
    fn piece(&self, offset: usize, version: u64) -> (Update, Option<Next>) {
        let words = Bytes::from(self.filter.piece(offset, FILTER_PIECE_BYTES));
        let end = offset + words.len();
        let next = (end < self.filter.bytes()).then_some(Next::Piece { offset: end, version });
        let update = Update {
            generation: self.generation,
            version,
            keys: self.filter.keys(),
            offset: offset as u64,
            words,
            added: Bytes::new(),
            complete: next.is_none(),
        };
        (update, next)
    }
}

/// What is left to be told to one asker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Telling {
    generation: u64,
    next: Option<Next>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Next {
    /// The additions after this version.
    Added(u64),
    /// The bytes from here on, of the filter as it was at a version or is later.
    Piece { offset: usize, version: u64 },
}

/// See the module; clones share it.
#[derive(Clone)]
pub struct Feed {
    own: Arc<RwLock<Option<Own>>>,
    keys_max: u32,
}

impl Feed {
    /// One for at most so many blocks, of which nothing is known until it is [followed](Self::follow).
    #[must_use]
    pub fn new(blocks_max: u64) -> Self {
        let keys_max = u32::try_from(blocks_max).unwrap_or(u32::MAX);
        let keys_max = keys_max.clamp(FILTER_KEYS_MIN, FILTER_KEYS_MAX);
        Self { own: Arc::default(), keys_max }
    }

    /// Bytes that all of it takes at most.
    #[must_use]
    pub fn bytes_max(&self) -> usize {
        2 * (Filter::bytes_for(self.keys_max) + FILTER_ADDITIONS_KEPT * 8)
    }

    /// Bytes of the filter now; 0 before there is one.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.own.read().as_ref().map_or(0, |own| own.filter.bytes())
    }

    /// How to tell an asker who knows this version of this generation; there is nothing to tell before there is a
    /// filter.
    #[must_use]
    pub fn telling(&self, generation: u64, version: u64) -> Telling {
        let own = self.own.read();
        let nothing = Telling { generation, next: None };
        own.as_ref().map_or(nothing, |own| own.telling(generation, version))
    }

    /// The next step, at most a piece; none at the end, which comes early if there is another generation now.
    pub fn next(&self, telling: &mut Telling) -> Option<Update> {
        let own = self.own.read();
        let own = own.as_ref().filter(|own| own.generation == telling.generation)?;
        let (update, next) = match telling.next? {
            Next::Added(version) => own.added(version),
            Next::Piece { offset, version } => own.piece(offset, version),
        };
        telling.next = next;
        Some(update)
    }

    /// Keeps it as the tiers change, for ever; the first generation has this number, 1 or more.
    ///
    /// # Cancel safety
    /// Safe: what it knows goes on being told.
    pub async fn follow(
        &self,
        first: u64,
        stack: &Stack,
        changes: &Changes,
        namespaces: &NamespaceTable,
    ) {
        let mut generation = first;
        let mut digesters = Digesters::new(namespaces);
        loop {
            self.follow_once(generation, stack, changes, &mut digesters).await;
            generation = generation.wrapping_add(1).max(1);
        }
    }

    /// Makes a generation of all that there is and keeps it until another one is due.
    async fn follow_once(
        &self,
        generation: u64,
        stack: &Stack,
        changes: &Changes,
        digesters: &mut Digesters<'_>,
    ) {
        let keys = keys_for(stack.usage().index_blocks, self.keys_max);
        let mut follower = changes.follow();
        let mut coming = Some(Own::new(generation, keys));
        let (mut told, mut is_stale) = ([false; SHARDS], false);
        loop {
            let Change { shard, what } = follower.next().await;
            for news in News::of(&what).chunks(TURN_KEYS) {
                self.take(news, stack, digesters, coming.as_mut());
                yield_now().await;
            }
            if let (Changed::Resync(_), Some(told)) = (&what, told.get_mut(shard)) {
                // What has left meanwhile is not known.
                is_stale |= std::mem::replace(told, true);
            }
            if told.iter().all(|told| *told) {
                if let Some(own) = coming.take() {
                    *self.own.write() = Some(own);
                }
                let own = self.own.read();
                if is_stale || own.as_ref().is_some_and(|own| own.is_worn(self.keys_max)) {
                    return;
                }
            }
        }
    }

    /// Takes news into the filter there is, and into the next one.
    fn take(
        &self,
        news: &[News],
        stack: &Stack,
        digesters: &mut Digesters<'_>,
        coming: Option<&mut Own>,
    ) {
        let (mut added, mut gone) = (Vec::with_capacity(news.len()), Vec::new());
        for news in news {
            match news {
                News::Stored(key) => added.extend(digesters.digest(key)),
                News::Removed(key) if stack.presence(*key) == [false; 3] => gone.push(*key),
                News::Removed(_) => {}
            }
        }
        // A block that leaves all tiers at once is told of by each.
        gone.sort_unstable();
        gone.dedup();
        let gone = u32::try_from(gone.len()).unwrap_or(u32::MAX);
        if let Some(coming) = coming {
            added.iter().for_each(|digest| coming.add(*digest));
            coming.gone = coming.gone.saturating_add(gone);
        }
        if let Some(own) = self.own.write().as_mut() {
            added.iter().for_each(|digest| own.add(*digest));
            own.gone = own.gone.saturating_add(gone);
        }
    }
}

impl fmt::Debug for Feed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Feed").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

/// What concerns a filter.
#[derive(Debug, Clone, Copy)]
enum News {
    Stored(BlockKey),
    Removed(BlockKey),
}

impl News {
    fn of(what: &Changed) -> Vec<Self> {
        match what {
            Changed::Resync(held) => held.iter().map(|(key, _)| Self::Stored(*key)).collect(),
            Changed::Events(events) => events
                .iter()
                .filter_map(|event| match event {
                    TierEvent::Stored { key, .. } => Some(Self::Stored(*key)),
                    TierEvent::Removed { key, .. } => Some(Self::Removed(*key)),
                    TierEvent::Described { .. } => None,
                })
                .collect(),
        }
    }
}

/// The digesters of the namespaces of this process.
struct Digesters<'a> {
    namespaces: &'a NamespaceTable,
    known: HashMap<u32, Digester>,
}

impl<'a> Digesters<'a> {
    fn new(namespaces: &'a NamespaceTable) -> Self {
        Self { namespaces, known: HashMap::new() }
    }

    fn digest(&mut self, key: &BlockKey) -> Option<u64> {
        if let Some(digester) = self.known.get(&key.namespace) {
            return Some(digester.digest(&key.hash));
        }
        let namespace = self.namespaces.by_index(key.namespace)?;
        let digester = Digester::new(namespace.id());
        self.known.insert(key.namespace, digester);
        Some(digester.digest(&key.hash))
    }
}

#[cfg(test)]
mod tests;
