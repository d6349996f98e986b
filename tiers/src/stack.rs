//! The tier stack: put, lookup and get over all tiers of one node. **Read this first.**
//!
//! ```text
//! put      claim what is absent -> bytes into arena slots -> verify -> seal: readable, event
//! lookup   one pass over the in-memory map -> longest prefix as runs -> optionally pinned
//! get      hottest copy: dram as it is; colder ones are loaded into dram first, once -> verify
//! clean    what was put -> copied to nvme in chain order, ahead of its eviction
//! durable  a put that is acknowledged when its blocks are on nvme: the same copies, awaited
//! evict    event -> index -> memory; never a pinned block
//! ```
//!
//! Invariants
//! - A block is readable only when all its parts are there and verified, and then never changes.
//! - First put wins; the same key with other bytes is counted, not stored.
//! - A pin (lease, get in flight) keeps a block from being evicted, and keeps its memory in any case.
//! - Copies are inclusive: dram may evict what a colder tier has; the entry stays and says where.
//! - What fails verification is quarantined: removed, reported, counted; the read is a miss.
//! - A copy that a tier is making is completed and known to the map, whoever stops waiting for it.
//! - What a tier says of its copies (found, moved, leaving) holds only where the map has them still.
//! - Any failure of a colder tier is a miss for that block, never an error of the call.
//!
//! Synchronous but for what reads, writes or removes copies on colder tiers. No lock is held across I/O.

mod above;
mod block;
mod claim;
mod clean;
mod context;
mod cost;
mod demote;
mod hottest;
mod load;
mod lookup;
mod mood;
mod piece;
mod popular;
mod promotions;
mod put;
mod quotas;
mod remove;
mod room;
mod settled;
mod verbs;

use std::{
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use tokio::time::Instant;

pub(crate) use self::context::ContextId;
use self::{
    above::Early, clean::Cleaner, context::Contexts, cost::Costs, load::SingleFlight,
    popular::Popular, room::Cadence, settled::Settled,
};
pub use self::{
    block::{Block, PartBytes},
    claim::{Claim, Offer},
    cost::{DevicePace, DeviceState},
    hottest::HotChain,
    load::Fetch,
    lookup::{Answer, Ask, Pin},
    piece::{Filled, Piece, PutOutcome, Span},
    promotions::Promotions,
    put::PutBatch,
    verbs::{Chain, Prefetch, Usage},
};
pub use crate::description::Description;
use crate::{
    block::{BlockHash, Hashes},
    dram::Pool,
    error::{Error, Result},
    event::EventFeed,
    gpu::HostMemory,
    limits::CONTEXT_SHARE_DIVISOR,
    map::{Hashed, Map},
    metrics::TierMetrics,
    namespace::{Namespace, NamespaceTable},
    seldom::Seldom,
    store::{Ailment, BlockStore, StoreUsage},
    tier::Tier,
};

/// Sizes of a stack.
#[derive(Debug, Clone, Copy)]
pub struct StackConfig {
    /// Bytes of the dram arena, at least 1 MiB; rounded down to whole extents.
    pub dram_bytes: u64,
    /// Entries of the map, at least 1; the coldest block leaves when it is full.
    pub index_blocks_max: u64,
    /// Makes places in the map unpredictable; random in a server, fixed in a test.
    pub seed: u64,
}

/// All tiers of one node. Clones are handles to the same stack.
#[derive(Clone)]
pub struct Stack {
    shared: Arc<Shared>,
}

/// What the handles share.
pub(crate) struct Shared {
    map: Arc<Map>,
    pool: Arc<Pool>,
    namespaces: Arc<NamespaceTable>,
    cold: Vec<Arc<dyn BlockStore>>,
    contexts: Contexts,
    cadence: Cadence,
    cleaner: Cleaner,
    costs: Costs,
    flights: SingleFlight,
    demotions: SingleFlight,
    settled: Settled,
    early: Early,
    popular: Popular,
    metrics: TierMetrics,
    failed_reads: Seldom,
    index_blocks_max: usize,
    batches: AtomicU64,
    /// Samples of ages that were taken.
    samples: AtomicUsize,
    dram_blocks: AtomicU64,
    resident_bytes: AtomicU64,
    evicted_blocks: AtomicU64,
    corrupt_blocks: AtomicU64,
    /// Copies on nvme and on object.
    copies: [AtomicU64; 2],
}

impl Stack {
    /// Maps the arena and starts with an empty map. `cold` are the colder tiers, hot to cold.
    ///
    /// # Errors
    /// `Invalid` for a size below its minimum, `Unavailable` without memory.
    pub fn open(
        config: StackConfig,
        namespaces: Arc<NamespaceTable>,
        cold: Vec<Arc<dyn BlockStore>>,
        metrics: TierMetrics,
    ) -> Result<Self> {
        let index_blocks_max = usize::try_from(config.index_blocks_max).unwrap_or(usize::MAX);
        if index_blocks_max == 0 {
            return Err(Error::invalid("index_blocks_max: 0 given, at least 1 required"));
        }
        let pool = Pool::new(config.dram_bytes, Arc::clone(namespaces.accounts()))?;
        let allowance = pool.capacity_bytes() / CONTEXT_SHARE_DIVISOR;
        let shared = Shared {
            map: Arc::new(Map::new(config.seed)),
            pool,
            namespaces,
            cold,
            contexts: Contexts::new(allowance),
            cadence: Cadence::default(),
            cleaner: Cleaner::default(),
            costs: Costs::default(),
            flights: SingleFlight::default(),
            demotions: SingleFlight::default(),
            settled: Settled::default(),
            early: Early::default(),
            popular: Popular::default(),
            metrics,
            failed_reads: Seldom::default(),
            index_blocks_max,
            batches: AtomicU64::new(1),
            samples: AtomicUsize::new(0),
            dram_blocks: AtomicU64::new(0),
            resident_bytes: AtomicU64::new(0),
            evicted_blocks: AtomicU64::new(0),
            corrupt_blocks: AtomicU64::new(0),
            copies: Default::default(),
        };
        let shared = Arc::new(shared);
        for store in &shared.cold {
            let above: Weak<Shared> = Arc::downgrade(&shared);
            store.attach(above);
        }
        Ok(Self { shared })
    }

    /// All memory of the dram tier, for who pins it for a GPU ([`Device::pin`](crate::gpu::Device::pin)).
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<dyn HostMemory>> {
        self.shared.pool.regions()
    }

    /// Descriptors of the same memory, region by region, for processes on this host that read it. They can be
    /// mapped to be read and for nothing else, and show every block there is.
    ///
    /// # Errors
    /// `Unavailable` if the kernel cannot seal them against writers.
    pub fn share(&self) -> Result<Vec<OwnedFd>> {
        self.shared.pool.share()
    }

    /// Backs one more extent with memory; false when all are. Run it in a loop on its own thread.
    ///
    /// # Blocking
    /// Clears up to 64 MiB: tens of milliseconds.
    #[must_use]
    pub fn pre_touch_step(&self) -> bool {
        self.shared.pool.pre_touch_step()
    }

    /// Finds the longest prefix of `hashes` that is present or pending, and counts as a lookup of the
    /// namespace. Reads the map only.
    ///
    /// With `ask.pin_bytes_max` the first k readable dram blocks are pinned and touched, tail first;
    /// without it nobody's protection changes.
    #[must_use]
    pub fn lookup(&self, namespace: &Namespace, hashes: Hashes<'_>, ask: Ask) -> Answer {
        let answer = self.find(namespace, hashes, ask);
        namespace.counters().count_lookup(answer.counts);
        answer
    }

    /// As [`lookup`](Self::lookup), for whoever counts himself: there may be more elsewhere.
    #[must_use]
    pub fn find(&self, namespace: &Namespace, hashes: Hashes<'_>, ask: Ask) -> Answer {
        self.shared.lookup(namespace, hashes, ask)
    }

    /// Ends the protection of `pins` and touches their blocks tail first.
    pub fn unpin(&self, pins: Vec<Pin>) {
        self.shared.unpin(pins);
    }

    /// Claims what is absent of a batch in chain order, and says for each block whether its bytes
    /// are wanted. Dropping the batch gives up every claim that was not completed.
    ///
    /// # Errors
    /// `Invalid` naming the field, the value and the range.
    pub fn put(&self, namespace: &Arc<Namespace>, offer: Offer<'_>) -> Result<PutBatch> {
        PutBatch::open(&self.shared, namespace, offer)
    }

    /// Begins a get: what it loads from colder tiers takes a bounded share of dram from others.
    #[must_use]
    pub fn promotions(&self) -> Promotions {
        Promotions::new(&self.shared)
    }

    /// As [`promotions`](Self::promotions), for what is loaded ahead of its use.
    #[must_use]
    pub fn promotions_ahead(&self) -> Promotions {
        Promotions::ahead(&self.shared)
    }

    /// As [`get`](Self::get), for a get of many blocks that began with [`promotions`](Self::promotions).
    ///
    /// # Errors
    /// Those of [`get`](Self::get).
    ///
    /// # Cancel safety
    /// Safe, as [`get`](Self::get).
    pub async fn get_within(
        &self,
        promotions: &Promotions,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        parts: &[u32],
        deadline: Instant,
    ) -> Result<Fetch> {
        self.read(namespace, hash, parts, (Some(promotions), deadline)).await
    }

    /// Reads a block: from dram, or from the hottest colder tier through dram. The parts named (all
    /// if empty) are verified. It does not count as a use: [`touch`](Self::touch) the whole request
    /// when it is done, so that its leaves leave before their parents.
    ///
    /// # Errors
    /// `Invalid` for a part that the namespace does not declare. Everything else is a [`Fetch`].
    ///
    /// # Cancel safety
    /// Safe. A load from a colder tier that others wait for is then started anew by one of them.
    pub async fn get(
        &self,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        parts: &[u32],
        deadline: Instant,
    ) -> Result<Fetch> {
        self.read(namespace, hash, parts, (None, deadline)).await
    }

    async fn read(
        &self,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        parts: &[u32],
        limits: load::Limits<'_>,
    ) -> Result<Fetch> {
        claim::check_parts(namespace, parts)?;
        let at = self.shared.map.hashed(namespace.index(), hash);
        let is_use = limits.0.is_none_or(|promotions| !promotions.is_ahead());
        let fetch = match self.shared.read(namespace, at) {
            load::Read::Dram(block) => self.shared.verified(at, block, parts),
            load::Read::Cold => self.shared.load(namespace, at, limits).await,
            load::Read::Pending => Fetch::Pending,
            load::Read::Absent => Fetch::Miss,
        };
        if is_use {
            self.use_of(&fetch, at, parts);
        }
        Ok(fetch)
    }

    /// What dram says of a block at once, as [`get_within`](Self::get_within) would; none if a colder
    /// tier has to be asked. A hit is not verified yet, so that whoever sends it can do so piece by
    /// piece, just before the piece leaves; what is wrong is to be [quarantined](Self::quarantine).
    ///
    /// # Errors
    /// Those of [`get`](Self::get).
    pub fn get_dram(
        &self,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        parts: &[u32],
    ) -> Result<Option<Fetch>> {
        claim::check_parts(namespace, parts)?;
        let at = self.shared.map.hashed(namespace.index(), hash);
        let fetch = match self.shared.read(namespace, at) {
            load::Read::Dram(block) => Fetch::Hit(block),
            load::Read::Cold => return Ok(None),
            load::Read::Pending => Fetch::Pending,
            load::Read::Absent => Fetch::Miss,
        };
        self.use_of(&fetch, at, parts);
        Ok(Some(fetch))
    }

    /// Takes a dram copy that failed verification out of use; the read of it is a miss.
    pub fn quarantine(&self, block: &Block) {
        self.shared.quarantine(self.shared.map.hashed(block.namespace.index(), block.hash), block);
    }

    /// Each rank reads its part of a block: together they use it once.
    fn use_of(&self, fetch: &Fetch, at: Hashed, parts: &[u32]) {
        if let Fetch::Hit(block) = fetch
            && (parts.is_empty() || parts.contains(&0))
        {
            self.shared.used(at, block);
        }
    }

    /// Whether there is such a tier.
    #[must_use]
    pub fn has_tier(&self, tier: Tier) -> bool {
        self.shared.has_tier(tier)
    }

    /// Makes sure that a colder tier has a block, before all that is copied in the background. True
    /// when it does: for nvme, synced and indexed; or when dram has not and a still colder tier does.
    /// False if the block is not in dram (any more), or
    /// there is no such tier.
    ///
    /// # Errors
    /// Those of the colder tier; `Unavailable` while the stack ends.
    ///
    /// # Cancel safety
    /// Safe: while [`clean`](Self::clean) runs, a copy that has begun is completed all the same.
    /// Without it, a copy may stay on the tier that the map does not know.
    pub async fn demote(
        &self,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        tier: Tier,
    ) -> Result<bool> {
        self.shared.demote(namespace, hash, tier).await
    }

    /// Copies what puts have stored to nvme, ahead of its eviction, until `stop`; then completes what
    /// it has begun. Run it once, for as long as the stack is used. Without an nvme tier it does
    /// nothing but the work of [`demote`](Self::demote).
    ///
    /// # Cancel safety
    /// Not safe: copies that have begun may stay on their tier, unknown to the map. Use `stop`.
    pub async fn clean(&self, stop: impl Future<Output = ()>) {
        self.shared.clean(stop).await;
    }

    /// Waits until [`clean`](Self::clean) has copied all that puts have stored, or nvme takes no more
    /// now, or the deadline; returns how many blocks still wait to be copied. For the end of a stack
    /// that is not used any more: what is put meanwhile may or may not be waited for.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn flush(&self, deadline: Instant) -> u64 {
        self.shared.flush(deadline).await
    }

    /// Removes blocks from every tier; returns how many were there. A put in flight is given up.
    ///
    /// Locations on colder tiers are forgotten in memory now; the removal from the tiers themselves
    /// is awaited, also that of copies that were being made.
    ///
    /// # Errors
    /// `Unavailable` if a tier has not noted the removal. No block can be read any more all the same.
    ///
    /// # Cancel safety
    /// Safe once it was polled: removals have begun by then, but for those of blocks that were being
    /// copied or removed already, and complete by themselves.
    pub async fn remove(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Result<u32> {
        self.shared.remove(namespace, hashes).await
    }

    /// Follows what becomes readable and what stops being so. One reader at a time:
    /// the one before, if there still is one, is told nothing any more.
    #[must_use]
    pub fn subscribe(&self) -> EventFeed {
        EventFeed::new(Arc::clone(&self.shared.map))
    }

    /// What the device of a colder tier does now; none of dram, and of a tier that is not there.
    pub fn pace(&self, tier: Tier) -> Option<DevicePace> {
        self.has_tier(tier).then(|| self.shared.costs.pace(tier))?
    }

    /// Bytes of those of `hashes` that are readable, by the hottest tier that has them, hot to cold.
    #[must_use]
    pub fn bytes_by_tier(&self, namespace: &Namespace, hashes: Hashes<'_>) -> [u64; 3] {
        self.shared.bytes_by_tier(namespace, hashes)
    }

    /// What the stack holds now.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.shared.usage()
    }

    /// What the colder tiers hold now, hot to cold.
    #[must_use]
    pub fn colder_usage(&self) -> Vec<(Tier, StoreUsage)> {
        self.shared.cold.iter().map(|store| (store.tier(), store.usage())).collect()
    }

    /// What is wrong with the colder tiers now.
    #[must_use]
    pub fn ailments(&self) -> Vec<(Tier, Ailment)> {
        let ailment = |store: &Arc<dyn BlockStore>| Some((store.tier(), store.ailment()?));
        self.shared.cold.iter().filter_map(ailment).collect()
    }

    /// The tiers that have a block, hot to cold, for tests.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn tiers_of(&self, namespace: &Namespace, hash: BlockHash) -> Vec<Tier> {
        let at = self.shared.map.hashed(namespace.index(), hash);
        let tiers = |shard: &mut crate::map::Shard| Some(shard.entry(at)?.tiers().collect());
        self.shared.map.with(at, tiers).unwrap_or_default()
    }

    /// The stack as its tiers see it, for tests of what lies below.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn above(&self) -> Weak<dyn crate::store::Above> {
        let above: Weak<Shared> = Arc::downgrade(&self.shared);
        above
    }

    /// The longest block that this stack can hold, in bytes.
    #[must_use]
    pub fn block_bytes_max(&self) -> u64 {
        self.shared.pool.block_bytes_max()
    }
}

impl Shared {
    fn next_batch(&self) -> u64 {
        // Relaxed: only uniqueness matters.
        self.batches.fetch_add(1, Ordering::Relaxed)
    }
}

impl fmt::Debug for Stack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack")
            .field("pool", &self.pool)
            .field("blocks", &self.map.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
