//! What each engine is busy with, by what this router has sent it: requests that wait for their first
//! token, and the blocks of those that are under way.
//!
//! A block that several requests of one engine share counts once, as it takes its memory once: otherwise
//! conversations with one long system prompt would drive each other away from the engine that has it.
//! Requests that others send are not known.

use std::{collections::HashMap, sync::Arc};

use parking_lot::Mutex;

/// The requests of one engine; clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct Slots(Arc<Mutex<Busy>>);

#[derive(Debug, Default)]
struct Busy {
    /// How many requests have a block, by its chain link.
    blocks: HashMap<u64, u32>,
    requests: u32,
    /// Blocks to be computed before the first tokens of requests that wait for them.
    prefill_blocks: f64,
    /// What that takes.
    prefill_ms: f64,
    prefills: u32,
    /// Blocks of requests whose tokens are not known.
    unknown_blocks: f64,
}

/// How busy an engine is, and would be with a prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Load {
    /// Requests under way.
    pub(super) requests: u32,
    /// Of these, how many wait for their first token.
    pub(super) prefills: u32,
    /// Blocks to be computed before these come.
    pub(super) prefill_blocks: f64,
    /// Milliseconds that takes.
    pub(super) queue_ms: f64,
    /// Blocks of all requests, those of the prompt included.
    pub(super) blocks: f64,
}

/// A request that an engine works on; its end, however it ends, is when this is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    busy: Arc<Mutex<Busy>>,
    chain: Arc<[u64]>,
    unknown_blocks: f64,
    /// Until its first token came.
    prefill: Option<(f64, f64)>,
}

impl Slots {
    /// How busy the engine is, and would be with the prompt of `chain`.
    pub(super) fn load(&self, chain: &[u64]) -> Load {
        let busy = self.0.lock();
        // Whoever has a link has all those before it.
        let shared = chain.partition_point(|link| busy.blocks.contains_key(link));
        let blocks = busy.blocks.len().saturating_add(chain.len()).saturating_sub(shared);
        Load {
            requests: busy.requests,
            prefills: busy.prefills,
            prefill_blocks: busy.prefill_blocks,
            queue_ms: busy.prefill_ms,
            blocks: as_blocks(blocks) + busy.unknown_blocks,
        }
    }

    /// A request goes to the engine, of which so many blocks are to be computed, in so many milliseconds.
    /// Without a chain they are all that is known of it.
    pub(super) fn enter(&self, chain: Arc<[u64]>, prefill_blocks: f64, prefill_ms: f64) -> Slot {
        let mut busy = self.0.lock();
        for link in &*chain {
            *busy.blocks.entry(*link).or_default() += 1;
        }
        let unknown_blocks = if chain.is_empty() { prefill_blocks } else { 0.0 };
        busy.requests += 1;
        busy.prefills += 1;
        busy.prefill_blocks += prefill_blocks;
        busy.prefill_ms += prefill_ms;
        busy.unknown_blocks += unknown_blocks;
        let prefill = Some((prefill_blocks, prefill_ms));
        Slot { busy: Arc::clone(&self.0), chain, unknown_blocks, prefill }
    }
}

impl Slot {
    /// The first token has come: the rest is decoding.
    pub(super) fn first_token(&mut self) {
        if let Some(prefill) = self.prefill.take() {
            self.busy.lock().end_prefill(prefill);
        }
    }
}

impl Busy {
    fn end_prefill(&mut self, (blocks, ms): (f64, f64)) {
        self.prefills -= 1;
        // With nobody left the sums are 0, not what rounding has left of them.
        (self.prefill_blocks, self.prefill_ms) = match self.prefills {
            0 => (0.0, 0.0),
            _ => (self.prefill_blocks - blocks, self.prefill_ms - ms),
        };
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut busy = self.busy.lock();
        if let Some(prefill) = self.prefill.take() {
            busy.end_prefill(prefill);
        }
        for link in &*self.chain {
            if let Some(count) = busy.blocks.get_mut(link) {
                *count -= 1;
                if *count == 0 {
                    busy.blocks.remove(link);
                }
            }
        }
        busy.requests -= 1;
        busy.unknown_blocks = match busy.requests {
            0 => 0.0,
            _ => busy.unknown_blocks - self.unknown_blocks,
        };
    }
}

/// A count of blocks as scores have it.
pub(super) fn as_blocks(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::from(u32::MAX), f64::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(links: std::ops::Range<u64>) -> Arc<[u64]> {
        links.collect()
    }

    #[test]
    fn shared_blocks_count_once_and_an_end_leaves_nothing() {
        let slots = Slots::default();
        let mut first = slots.enter(chain(0..10), 10.0, 20.0);
        let forked: Arc<[u64]> = (0..6).chain(100..104).collect();
        let second = slots.enter(forked, 4.0, 8.0);
        let load = slots.load(&chain(0..12));
        assert_eq!((load.requests, load.prefills), (2, 2));
        assert_eq!((load.prefill_blocks, load.queue_ms, load.blocks), (14.0, 28.0, 16.0));
        first.first_token();
        first.first_token();
        let load = slots.load(&[]);
        assert_eq!((load.prefills, load.prefill_blocks, load.blocks), (1, 4.0, 14.0));
        drop(first);
        assert_eq!(slots.load(&chain(0..6)).blocks, 10.0);
        let blind = slots.enter(Arc::from([]), 7.0, 14.0);
        assert_eq!(slots.load(&[]).blocks, 17.0);
        drop(second);
        drop(blind);
        assert_eq!(slots.load(&[]), Load::default());
        assert!(slots.0.lock().blocks.is_empty());
    }
}
