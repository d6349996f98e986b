//! What the devices of engines hold, by what they publish.
//!
//! ```text
//! chain link -> engines that have it         prefixes of a prompt in all engines by one walk
//! engine: its hash of a block -> chain link  what names parents and what is removed
//! ```
//! Tokens make the chain ([`chain`](super::chain)), so engines need not hash alike. What is told of a place
//! that is no device, or of windows that slide, is passed over. A removal removes, however often a block was told of: if the engine
//! has a copy of it left, the prompt is taken for longer than it is, until the block is stored again; the
//! reverse would be believed for ever. A block behind one that is not known cannot be placed, and is passed
//! over too.
//!
//! What an engine told is forgotten when it is not listened to, or something was missed: blocks that were
//! removed meanwhile would stay for ever.

use std::collections::HashMap;

use parking_lot::RwLock;

use super::chain::{link, root};
use crate::events::subscribe::batch::{Batch, Event, Extras, Published, Removed, Stored};

/// Blocks of one engine that are remembered: 64 M tokens at 16 to a block, more than a node of eight
/// devices has. They take 400 MB.
const DEVICE_BLOCKS_MAX: usize = 4 << 20;

/// What all engines hold.
#[derive(Debug, Default)]
pub(super) struct Devices(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Who has a block: a bit for each engine.
    holders: HashMap<u64, u128>,
    engines: Vec<Device>,
}

#[derive(Debug, Default)]
struct Device {
    /// The chain link of each block, by 64 bits of the engine's hash.
    links: HashMap<u64, u64>,
    /// Tokens in a block, as the engine said last.
    block_tokens: usize,
}

/// What became of a batch.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Took {
    /// Blocks that were told of.
    pub(super) told: u64,
    /// Blocks that were placed in a chain.
    pub(super) placed: u64,
}

impl Devices {
    /// So many engines, of which nothing is known.
    pub(super) fn new(engines: usize) -> Self {
        let known = Known { holders: HashMap::new(), engines: Vec::new() };
        let devices = Self(RwLock::new(known));
        devices.0.write().engines.resize_with(engines, Device::default);
        devices
    }

    /// Takes what an engine says.
    pub(super) fn take(&self, engine: usize, batch: &Batch) -> Took {
        let mut known = self.0.write();
        let mut took = Took::default();
        for event in &batch.events {
            match event {
                Event::Stored(stored) if stored.place.is_device() && stored.place.is_whole() => {
                    took.told += u64::try_from(stored.hashes.len()).unwrap_or(u64::MAX);
                    took.placed += known.store(engine, stored);
                }
                Event::Removed(removed) if removed.place.is_device() => {
                    known.remove(engine, removed);
                }
                Event::Stored(_) | Event::Removed(_) => {}
                Event::Cleared => known.clear(engine),
            }
        }
        took
    }

    /// Nothing is known of an engine any more.
    pub(super) fn forget(&self, engine: usize) {
        self.0.write().clear(engine);
    }

    /// How many leading links of a chain each engine has; 0 for those beyond the last one asked for.
    pub(super) fn prefixes(&self, chain: &[u64], engines: usize) -> Vec<u32> {
        let known = self.0.read();
        let mut prefixes = vec![0; engines];
        let mut left = u128::MAX;
        for (depth, link) in (1..).zip(chain) {
            left &= known.holders.get(link).copied().unwrap_or(0);
            if left == 0 {
                break;
            }
            let mut rest = left;
            while rest != 0 {
                let engine = rest.trailing_zeros();
                rest &= rest - 1;
                let at = usize::try_from(engine).unwrap_or(usize::MAX);
                prefixes.get_mut(at).into_iter().for_each(|prefix| *prefix = depth);
            }
        }
        prefixes
    }

    /// Tokens in a block of each engine; 0 while that is not known.
    pub(super) fn block_tokens(&self) -> Vec<usize> {
        self.0.read().engines.iter().map(|device| device.block_tokens).collect()
    }

    /// Blocks that each engine has.
    pub(super) fn blocks(&self) -> Vec<usize> {
        self.0.read().engines.iter().map(|device| device.links.len()).collect()
    }
}

impl Known {
    fn store(&mut self, engine: usize, stored: &Stored) -> u64 {
        let size = stored.block_size;
        let complete = size > 0 && stored.tokens.len() == stored.hashes.len().saturating_mul(size);
        let (Some(device), true) = (self.engines.get_mut(engine), complete) else { return 0 };
        device.block_tokens = size;
        let mut parent = match stored.parent.as_ref().map(short_of) {
            None | Some(0) => root(size, &stored.lora_name),
            Some(parent) => match device.links.get(&parent) {
                Some(link) => *link,
                None => return 0,
            },
        };
        let is_root = stored.parent.as_ref().is_none_or(|parent| short_of(parent) == 0);
        let mut salt = Some(&stored.salt).filter(|salt| is_root && !salt.is_empty());
        let mut extras = stored.extras.iter();
        let mut placed = 0;
        for (hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size)) {
            let mut extras: Extras = extras.next().cloned().unwrap_or_default();
            extras.texts.extend(salt.take().cloned());
            parent = link(parent, tokens, &stored.lora_name, &extras);
            if device.links.len() >= DEVICE_BLOCKS_MAX {
                break;
            }
            if let Some(before) = device.links.insert(short_of(hash), parent)
                && before != parent
            {
                withdraw(&mut self.holders, engine, before);
            }
            *self.holders.entry(parent).or_default() |= bit(engine);
            placed += 1;
        }
        placed
    }

    fn remove(&mut self, engine: usize, removed: &Removed) {
        let Some(device) = self.engines.get_mut(engine) else { return };
        for hash in &removed.hashes {
            if let Some(link) = device.links.remove(&short_of(hash)) {
                withdraw(&mut self.holders, engine, link);
            }
        }
    }

    fn clear(&mut self, engine: usize) {
        let Some(device) = self.engines.get_mut(engine) else { return };
        for link in std::mem::take(&mut device.links).into_values() {
            withdraw(&mut self.holders, engine, link);
        }
    }
}

fn bit(engine: usize) -> u128 {
    u32::try_from(engine).ok().and_then(|engine| 1_u128.checked_shl(engine)).unwrap_or(0)
}

fn withdraw(holders: &mut HashMap<u64, u128>, engine: usize, link: u64) {
    if let Some(who) = holders.get_mut(&link) {
        *who &= !bit(engine);
        if *who == 0 {
            holders.remove(&link);
        }
    }
}

/// 64 bits of a hash: an engine names a block the same way whenever it does.
fn short_of(hash: &Published) -> u64 {
    match hash {
        Published::Short(short) => *short,
        Published::Whole(bytes) => bytes.last_chunk().map_or(0, |bits| u64::from_be_bytes(*bits)),
    }
}

#[cfg(test)]
#[path = "devices_tests.rs"]
mod tests;
