//! The pollution bound: what one put context may take from others before it is read.
//!
//! A *context* is a chain of put batches: a batch whose parent block is unread belongs to the context
//! that stored the parent, and one that goes on where a batch ended, stored or refused, to the
//! context of that batch; any other batch starts a new one. Free memory is anybody's; but to evict
//! blocks of others, a context has an allowance of a share of dram. What it took counts until its own
//! blocks are read or evicted. Past the allowance its blocks are refused: the head of a context that
//! is longer than the allowance stays, and so does everybody else's working set.
//!
//! Why not per client: most blocks of one client are never read again, so a bound on its unread bytes
//! would replace the eviction policy instead of guarding it.
//!
//! A context also says how long its chain was put: that is remembered of long ones when their blocks have
//! left dram, for who decides what is worth a copy on the object tier.

use std::{collections::HashMap, num::NonZeroUsize};

use lru::LruCache;
use parking_lot::Mutex;

use crate::{
    block::BlockKey,
    limits::{LONG_CHAIN_TOKENS, LONG_CHAINS_MAX},
};

/// How many batches are remembered by their last block: far more than clients put at one time.
const BATCH_TAILS_MAX: NonZeroUsize = match NonZeroUsize::new(4096) {
    Some(tails) => tails,
    None => NonZeroUsize::MIN,
};

const LONG_MAX: NonZeroUsize = match NonZeroUsize::new(LONG_CHAINS_MAX) {
    Some(chains) => chains,
    None => NonZeroUsize::MIN,
};

/// Names a context; 0 is none.
pub(crate) type ContextId = u32;

/// What is known of the block before a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Parent {
    /// The batch starts a chain, or does not say.
    None,
    /// It is in the map, unread in this context (0: read).
    Present(ContextId),
    /// It is not in the map.
    Absent(BlockKey),
}

#[derive(Debug, Default)]
struct Context {
    taken_bytes: u64,
    /// Batches that are open plus blocks that are unread.
    holders: u64,
    /// Tokens of all blocks that it has stored.
    tokens: u64,
}

impl Context {
    fn is_long(&self) -> bool {
        self.tokens >= LONG_CHAIN_TOKENS
    }
}

#[derive(Debug)]
struct Table {
    last: ContextId,
    open: HashMap<ContextId, Context>,
    /// The contexts of the latest batches, by the last block of each.
    by_tail: LruCache<BlockKey, ContextId>,
    /// Those of long chains that have ended.
    long: LruCache<ContextId, ()>,
}

/// All contexts that have an open batch or an unread block.
#[derive(Debug)]
pub(crate) struct Contexts {
    table: Mutex<Table>,
    allowance_bytes: u64,
}

impl Contexts {
    pub(crate) fn new(allowance_bytes: u64) -> Self {
        let table = Table {
            last: 0,
            open: HashMap::new(),
            by_tail: LruCache::new(BATCH_TAILS_MAX),
            long: LruCache::new(LONG_MAX),
        };
        Self { table: Mutex::new(table), allowance_bytes }
    }

    /// Opens a batch that ends with `tail`, in the context of its parent or in a new one.
    pub(crate) fn join(&self, parent: Parent, tail: Option<BlockKey>) -> ContextId {
        let mut table = self.table.lock();
        let known = match parent {
            Parent::None => None,
            Parent::Present(context) => Some(context),
            // Stays there: each rank goes on behind the same block with a batch of its own.
            Parent::Absent(key) => table.by_tail.get(&key).copied(),
        };
        let known = known.filter(|id| table.open.contains_key(id));
        let id = known.unwrap_or_else(|| table.next_id());
        table.open.entry(id).or_default().holders += 1;
        if let Some(tail) = tail {
            table.by_tail.put(tail, id);
        }
        id
    }

    /// A block of the context with so many tokens is stored and unread.
    pub(crate) fn hold(&self, id: ContextId, tokens: u32) {
        if id != 0 {
            let mut table = self.table.lock();
            let context = table.open.entry(id).or_default();
            context.holders += 1;
            context.tokens += u64::from(tokens);
        }
    }

    /// Whether its chain is long by now, also when none of its blocks are in dram any more.
    pub(crate) fn is_long(&self, id: ContextId) -> bool {
        let table = self.table.lock();
        table.open.get(&id).map_or_else(|| table.long.contains(&id), Context::is_long)
    }

    /// A batch of the context has ended (`bytes` 0), or `bytes` of it were read or evicted.
    pub(crate) fn let_go(&self, id: ContextId, bytes: u64) {
        let mut table = self.table.lock();
        let Some(context) = table.open.get_mut(&id) else { return };
        context.taken_bytes = context.taken_bytes.saturating_sub(bytes);
        context.holders = context.holders.saturating_sub(1);
        if context.holders == 0
            && let Some(ended) = table.open.remove(&id)
            && ended.is_long()
        {
            table.long.put(id, ());
        }
    }

    /// Whether the context may evict `bytes` more of others: within the allowance, and one block in
    /// any case, or an arena with few places would keep its first blocks for ever.
    pub(crate) fn may_take(&self, id: ContextId, bytes: u64) -> bool {
        self.may_take_of(id, bytes, u64::MAX)
    }

    /// The same where not all of dram is there to take from, but only so much that its share is `share`.
    pub(crate) fn may_take_of(&self, id: ContextId, bytes: u64, share: u64) -> bool {
        let table = self.table.lock();
        let allowance = self.allowance_bytes.min(share);
        let taken = table.open.get(&id).map_or(0, |context| context.taken_bytes);
        id == 0 || taken == 0 || taken.saturating_add(bytes) <= allowance
    }

    /// The context has evicted `bytes` of others.
    pub(crate) fn took(&self, id: ContextId, bytes: u64) {
        if let Some(context) = self.table.lock().open.get_mut(&id) {
            context.taken_bytes += bytes;
        }
    }

    /// Contexts that are open.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.table.lock().open.len()
    }
}

impl Table {
    fn next_id(&mut self) -> ContextId {
        loop {
            self.last = self.last.wrapping_add(1);
            let is_used = self.open.contains_key(&self.last) || self.long.contains(&self.last);
            if self.last != 0 && !is_used {
                return self.last;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> BlockKey {
        BlockKey { namespace: 0, hash: crate::block::BlockHash::from_array([byte; 32]) }
    }

    #[test]
    fn batches_of_one_chain_share_an_allowance() {
        let contexts = Contexts::new(100);
        let first = contexts.join(Parent::None, Some(key(1)));
        contexts.took(first, 90);
        contexts.hold(first, 16);
        contexts.let_go(first, 0);
        let stored_parent = contexts.join(Parent::Present(first), Some(key(2)));
        let refused_parent = contexts.join(Parent::Absent(key(2)), Some(key(3)));
        assert_eq!((stored_parent, refused_parent), (first, first));
        assert!(contexts.may_take(first, 10) && !contexts.may_take(first, 11));
        for parent in [Parent::None, Parent::Present(0), Parent::Absent(key(4))] {
            let other = contexts.join(parent, None);
            assert!(other != first && contexts.may_take(other, 100), "{parent:?}");
        }
    }

    #[test]
    fn reading_gives_the_allowance_back_and_nothing_is_left() {
        let contexts = Contexts::new(100);
        let id = contexts.join(Parent::None, Some(key(1)));
        contexts.took(id, 100);
        contexts.hold(id, 16);
        contexts.let_go(id, 40);
        assert!(contexts.may_take(id, 40) && !contexts.may_take(id, 41));
        contexts.let_go(id, 0);
        assert_eq!(contexts.len(), 0);
        assert_ne!(contexts.join(Parent::Absent(key(1)), None), id, "an ended context is over");
        assert!(contexts.may_take(0, u64::MAX), "no context, no bound");
    }

    #[test]
    fn long_chains_are_remembered_and_short_ones_are_not() {
        let contexts = Contexts::new(100);
        let tokens = u32::try_from(LONG_CHAIN_TOKENS / 2).unwrap();
        let long = contexts.join(Parent::None, Some(key(1)));
        contexts.hold(long, tokens);
        assert!(!contexts.is_long(long));
        contexts.let_go(long, 0);
        // Goes on behind a block that has left dram.
        assert_eq!(contexts.join(Parent::Absent(key(1)), None), long);
        contexts.hold(long, tokens);
        assert!(contexts.is_long(long));
        let short = contexts.join(Parent::None, None);
        contexts.hold(short, tokens);
        for id in [long, long, long, short, short] {
            contexts.let_go(id, 0);
        }
        assert_eq!(contexts.len(), 0);
        assert!(contexts.is_long(long) && !contexts.is_long(short) && !contexts.is_long(0));
    }
}
