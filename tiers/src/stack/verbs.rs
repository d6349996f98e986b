//! The small verbs: touch, describe, prefetch; and the accounts.

use std::sync::{Arc, atomic::Ordering};

use super::{Shared, Stack};
use crate::{
    block::{BlockHash, Hashes},
    description::Description,
    dram::Payload,
    error::{Error, Result},
    evict::EntryId,
    limits::NAMESPACE_FIELD_BYTES_MAX,
    map::{Described, Hashed, Shard},
    metrics::EvictReason,
    namespace::Namespace,
    tier::Tier,
};

/// Blocks that follow one another, and what is known of them.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    /// Their hashes, in order.
    pub hashes: Hashes<'a>,
    /// The block before the first one; `None` at the root.
    pub parent: Option<BlockHash>,
    /// Index of the first block in its chain.
    pub position: u32,
    /// Token ids of all blocks, or none. Kept only if the namespace opted in.
    pub tokens: &'a [u32],
    /// Name of the LoRA adapter; empty for none.
    pub lora_name: &'a str,
}

/// What a prefetch found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Prefetch {
    /// Blocks that are in dram.
    pub in_dram: u32,
    /// Blocks that a colder tier has: get them to load them.
    pub cold: Vec<BlockHash>,
}

/// What a stack holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of the arena.
    pub dram_capacity_bytes: u64,
    /// Bytes of slots in use, whatever for.
    pub dram_used_bytes: u64,
    /// Readable blocks in dram.
    pub dram_blocks: u64,
    /// Bytes of slots being written, or removed but still read by somebody.
    pub staging_bytes: u64,
    /// Blocks that have left dram since the start, for whatever reason.
    pub evicted_blocks: u64,
    /// Entries of the map.
    pub index_blocks: u64,
    /// Bytes that the map has allocated for entries and places; the eviction orders add about 24
    /// bytes for each block in dram.
    pub index_bytes: u64,
    /// Offers of a block that was here with other bytes, since the start.
    pub duplicate_differs: u64,
    /// Blocks that failed verification since the start.
    pub corrupt: u64,
    /// Blocks that wait to be copied to nvme.
    pub demote_queue_blocks: u64,
    /// Extents that went from one slot size to another since the start.
    pub reclaimed_extents: u64,
}

impl Stack {
    /// Marks blocks as used now, tail first; returns how many are in dram.
    pub fn touch(&self, namespace: &Namespace, hashes: Hashes<'_>) -> u32 {
        self.shared.touch(namespace, hashes)
    }

    /// Attaches a chain's parent, positions and tokens to blocks that are present; returns how many.
    ///
    /// # Errors
    /// `Invalid` if the number of tokens is neither 0 nor blocks times tokens per block, if the
    /// positions go beyond 32 bits, or for a name of more than 1024 bytes.
    pub fn describe(&self, namespace: &Namespace, chain: Chain<'_>) -> Result<u32> {
        self.shared.describe(namespace, chain)
    }

    /// What was described of a block.
    #[must_use]
    pub fn description(&self, namespace: &Namespace, hash: BlockHash) -> Option<Description> {
        self.shared.description(namespace, hash)
    }

    /// Says which blocks are in dram and which would have to be loaded; the caller loads them.
    #[must_use]
    pub fn prefetch(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Prefetch {
        self.shared.prefetch(namespace, hashes)
    }

    /// Whether a block can be read, from whatever tier. Nobody's lookup, and no use of the block.
    #[must_use]
    pub fn is_readable(&self, namespace: &Namespace, hash: BlockHash) -> bool {
        let at = self.shared.map.hashed(namespace.index(), hash);
        let has_copy = |shard: &mut Shard| shard.entry(at).is_some_and(|e| e.hottest().is_some());
        self.shared.map.with(at, has_copy)
    }
}

impl Shared {
    pub(super) fn keys(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Vec<Hashed> {
        hashes.iter().map(|hash| self.map.hashed(namespace.index(), hash)).collect()
    }

    pub(super) fn touch(&self, namespace: &Namespace, hashes: Hashes<'_>) -> u32 {
        self.touch_keys(&self.keys(namespace, hashes))
    }

    pub(super) fn describe(&self, namespace: &Namespace, chain: Chain<'_>) -> Result<u32> {
        let per_block = usize::try_from(namespace.block_tokens()).unwrap_or(usize::MAX);
        let expected = chain.hashes.len().saturating_mul(per_block);
        if !chain.tokens.is_empty() && chain.tokens.len() != expected {
            return Err(Error::invalid(format!(
                "tokens: {} given, 0 or {expected} required (blocks times block_tokens)",
                chain.tokens.len()
            )));
        }
        if chain.lora_name.len() > NAMESPACE_FIELD_BYTES_MAX {
            return Err(Error::invalid(format!(
                "lora_name: {} bytes given, 0 to {NAMESPACE_FIELD_BYTES_MAX} allowed",
                chain.lora_name.len()
            )));
        }
        let lora_name: Arc<str> = chain.lora_name.into();
        let blocks = u32::try_from(chain.hashes.len()).unwrap_or(u32::MAX);
        let position_max = u32::MAX.saturating_sub(blocks.saturating_sub(1));
        if chain.position > position_max {
            return Err(Error::invalid(format!(
                "position: {} given, 0 to {position_max} allowed for {blocks} blocks",
                chain.position
            )));
        }
        let mut parent = chain.parent;
        let mut described = 0;
        let mut news = Vec::new();
        let mut tokens = chain.tokens.chunks(per_block.max(1));
        for (hash, position) in chain.hashes.iter().zip(chain.position..=u32::MAX) {
            let at = self.map.hashed(namespace.index(), hash);
            let own = tokens.next().filter(|_| namespace.keeps_tokens()).unwrap_or_default();
            let described_block = Described {
                parent,
                position,
                tokens: own.into(),
                lora_name: Arc::clone(&lora_name),
            };
            let outcome = self.map.with(at, |shard| self.attach(shard, at, described_block));
            described += u32::from(outcome.is_some());
            news.extend(outcome.filter(|is_kept| *is_kept).map(|_| hash));
            parent = Some(hash);
        }
        if let Some(nvme) = self.store(Tier::Nvme).filter(|_| !news.is_empty()) {
            nvme.described(*namespace.id(), &news);
        }
        Ok(described)
    }

    /// Describes a block, if it is there; whether nvme is to be told.
    fn attach(&self, shard: &mut Shard, at: Hashed, described: Described) -> Option<bool> {
        let id = shard.find(at)?;
        let is_new = shard.describe(id, described);
        let is_on_nvme = shard.get(id)?.cold(Tier::Nvme).is_some()
            || self.is_being_copied(shard, at, Tier::Nvme);
        Some(is_new && is_on_nvme)
    }

    pub(super) fn description(
        &self,
        namespace: &Namespace,
        hash: BlockHash,
    ) -> Option<Description> {
        let at = self.map.hashed(namespace.index(), hash);
        self.map.with(at, |shard| {
            let described = shard.described(shard.find(at)?)?;
            Some(described.to_description(namespace.keeps_tokens()))
        })
    }

    /// What a tier kept of a block that it has found; false if the map does not have it there.
    pub(super) fn restore_description(
        &self,
        tier: Tier,
        namespace: &Namespace,
        hash: BlockHash,
        description: Description,
    ) -> bool {
        let at = self.map.hashed(namespace.index(), hash);
        let tokens = Some(description.tokens).filter(|_| namespace.keeps_tokens());
        let described = Described {
            parent: description.parent,
            position: description.position,
            tokens: tokens.unwrap_or_default().into(),
            lora_name: description.lora_name.into(),
        };
        self.map.with(at, |shard| {
            let there = |id: &EntryId| shard.get(*id).is_some_and(|e| e.cold(tier).is_some());
            let Some(id) = shard.find(at).filter(there) else { return false };
            // What was said since the start is newer.
            if shard.described(id).is_none() {
                shard.describe(id, described);
            }
            true
        })
    }

    pub(super) fn prefetch(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Prefetch {
        let mut prefetch = Prefetch::default();
        for at in self.keys(namespace, hashes) {
            match self.map.with(at, |shard| shard.entry(at)?.hottest()) {
                Some(Tier::Dram) => prefetch.in_dram += 1,
                Some(Tier::Nvme | Tier::Object) => prefetch.cold.push(at.key.hash),
                None => {}
            }
        }
        prefetch
    }

    pub(super) fn usage(&self) -> Usage {
        let used = self.pool.used_bytes();
        Usage {
            dram_capacity_bytes: self.pool.capacity_bytes(),
            dram_used_bytes: used,
            dram_blocks: self.dram_blocks.load(Ordering::Relaxed),
            staging_bytes: used.saturating_sub(self.resident_bytes.load(Ordering::Relaxed)),
            evicted_blocks: self.evicted_blocks.load(Ordering::Relaxed),
            index_blocks: u64::try_from(self.map.len()).unwrap_or(u64::MAX),
            index_bytes: u64::try_from(self.map.allocated_bytes()).unwrap_or(u64::MAX),
            duplicate_differs: self.metrics.duplicate_differs.get(),
            corrupt: self.corrupt_blocks.load(Ordering::Relaxed),
            demote_queue_blocks: u64::try_from(self.cleaner.len()).unwrap_or(u64::MAX),
            reclaimed_extents: self.pool.reclaimed_extents(),
        }
    }

    /// A block of a put has become readable.
    pub(super) fn count_readable(&self, namespace: &Namespace, payload: &Payload) {
        self.count_resident(payload);
        let len = u64::try_from(payload.as_ref().len()).unwrap_or(0);
        let counters = namespace.counters();
        counters.blocks.fetch_add(1, Ordering::Relaxed);
        counters.bytes.fetch_add(len, Ordering::Relaxed);
        counters.put_blocks.fetch_add(1, Ordering::Relaxed);
    }

    /// A block has become resident in dram.
    pub(super) fn count_resident(&self, payload: &Payload) {
        self.metrics.stored(Tier::Dram).inc();
        self.dram_blocks.fetch_add(1, Ordering::Relaxed);
        self.resident_bytes.fetch_add(slot_bytes_of(payload), Ordering::Relaxed);
    }

    /// A resident block has left dram.
    pub(super) fn count_evicted(&self, payload: &Payload, reason: EvictReason) {
        self.metrics.evicted(reason).inc();
        self.evicted_blocks.fetch_add(1, Ordering::Relaxed);
        self.dram_blocks.fetch_sub(1, Ordering::Relaxed);
        self.resident_bytes.fetch_sub(slot_bytes_of(payload), Ordering::Relaxed);
    }

    /// A colder tier has a copy more or less.
    pub(super) fn count_copies(&self, tier: Tier, added: bool) {
        let [nvme, object] = &self.copies;
        let copies = match tier {
            Tier::Dram => return,
            Tier::Nvme => nvme,
            Tier::Object => object,
        };
        // Relaxed: an estimate.
        if added {
            copies.fetch_add(1, Ordering::Relaxed);
        } else {
            copies.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Copies that a colder tier has.
    pub(super) fn copies(&self, tier: Tier) -> u64 {
        let [nvme, object] = self.copies.each_ref().map(|copies| copies.load(Ordering::Relaxed));
        match tier {
            Tier::Dram => 0,
            Tier::Nvme => nvme,
            Tier::Object => object,
        }
    }

    /// The last readable copy of a block has gone.
    pub(super) fn count_gone(&self, namespace: u32, len: u32) {
        if let Some(namespace) = self.namespaces.by_index(namespace) {
            let counters = namespace.counters();
            counters.blocks.fetch_sub(1, Ordering::Relaxed);
            counters.bytes.fetch_sub(u64::from(len), Ordering::Relaxed);
        }
    }
}

/// Bytes of memory that a block occupies.
pub(super) fn slot_bytes_of(payload: &Payload) -> u64 {
    u64::try_from(payload.slot_bytes()).unwrap_or(0)
}
