//! The nvme tier: blocks in log-structured segments on local flash.
//!
//! ```text
//! put     -> queue -> writer: pages into the open segment -> sync -> index -> readable, answered
//!            (one group of puts is written while the one before it is synced)
//! get     -> the record's header and its bytes, straight into the arena; the header vouches for them
//! remove  -> queue -> writer: tombstones into the log -> sync -> index -> answered
//! reclaim    the oldest segments: hot blocks are appended again, the others leave
//! runs       what the writer is done with, for whoever copies it to a colder tier
//! start      index -> map; then what the segments hold beyond the index; then serve
//! ```
//! Invariants
//! - Segments are the truth. The index ([`index`]) says which records are current; lost, it is made
//!   again from them. A segment is written once, front to back, by one writer, and then only read.
//! - Order of a write: data, sync, index, answer. Of an eviction: event, index, data.
//! - What was removed does not come back: its tombstone stays in the log for as long as any segment
//!   that is older.
//! - A number of a segment is never used twice, and every record names the generation of its segment:
//!   a place that has become another's is a miss.
//! - Reads never wait for writes: a full, failing or read-only tier goes on serving.
//! - A buffer belongs to its operation until the disk is done with it, whoever has given up waiting.
//!
//! Why not one file per block, or blocks inside RocksDB: blocks are large and leave together; a log
//! writes them once, in the order of their prefix, with direct I/O, and one `unlink` frees thousands.

pub mod aligned;
mod append;
mod chunks;
mod describe;
pub mod device;
pub mod directory;
pub mod format;
pub mod gather;
pub mod index;
mod item;
mod land;
mod metrics;
mod noted;
mod owed;
mod pipeline;
mod posix;
mod pread;
mod reader;
mod reclaim;
mod recover;
mod replay;
mod runs;
mod scan;
mod seal;
mod segments;
mod state;
mod survey;
mod turn;
mod uring;
pub mod verify;
mod victim;
mod writer;

use std::{
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use self::{
    device::Device,
    format::SEGMENT_BYTES_MAX,
    index::{Change, Index, IndexKey},
    noted::Noted,
    reader::Reads,
    runs::Feed,
    segments::Segments,
    state::WriteState,
    writer::Op,
};
pub use self::{
    metrics::{DamageLabel, NvmeMetrics, OpLabel, RejectLabel, StateLabel},
    recover::Recovered,
    writer::Writer,
};
use crate::{
    block::BlockHash,
    error::{Error, ErrorKind, Result},
    limits::MIB,
    map::Location,
    namespace::{NamespaceId, NamespaceTable},
    store::{
        Above, Ailment, BlockStore, BlockWriter, BoxFuture, Load, Outgoing, StoreUsage, Wanted,
    },
    tier::Tier,
};

/// The smallest segment, in bytes: one must hold some blocks beside its table. Real ones are far
/// larger, because writes should be.
pub const SEGMENT_BYTES_MIN: u64 = MIB / 4;
/// Segments that the capacity should hold at least, so that reclaiming one is not losing a large part.
pub const SEGMENTS_MIN: u64 = 4;
/// Operations that wait for the writer. Blocks in them are pinned in dram, which whoever demotes
/// bounds in bytes.
const QUEUE_OPS_MAX: usize = 1024;
/// Blocks noted as lost at most; what is beyond is found again.
const LOST_MAX: usize = 4096;
/// Tombstones in one record: a write of at most 288 KiB.
const TOMBSTONES_MAX: usize = 4096;

/// Sizes of the tier.
#[derive(Debug, Clone, Copy)]
pub struct NvmeConfig {
    /// Bytes of segment files that it may have, at least [`SEGMENTS_MIN`] segments.
    pub capacity_bytes: u64,
    /// Bytes of a segment: a multiple of 4 KiB, 1 MiB to 1 GiB.
    pub segment_bytes: u64,
    /// Blocks that it may have, so that the map has room for them and for new ones.
    pub blocks_max: u64,
    /// Bytes that may be written in a day, and at once that of one capacity; 0 for no limit.
    pub daily_write_bytes: u64,
    /// The store's own id, from its directory: segments of others are not taken.
    pub store: [u8; 16],
    /// Makes generations unpredictable; random in a server, fixed in a test.
    pub seed: u64,
}

impl NvmeConfig {
    fn check(&self) -> Result<()> {
        let segment = self.segment_bytes;
        if !(SEGMENT_BYTES_MIN..=SEGMENT_BYTES_MAX).contains(&segment)
            || !segment.is_multiple_of(aligned::PAGE)
        {
            return Err(Error::invalid(format!(
                "nvme.segment_bytes: {segment} given, {SEGMENT_BYTES_MIN} to {SEGMENT_BYTES_MAX} in \
                 whole pages of {} allowed",
                aligned::PAGE_BYTES
            )));
        }
        let least = segment.saturating_mul(SEGMENTS_MIN);
        if self.capacity_bytes < least {
            return Err(Error::invalid(format!(
                "nvme.capacity: {} given, at least {least} required ({SEGMENTS_MIN} segments)",
                self.capacity_bytes
            )));
        }
        Ok(())
    }
}

/// What the tier is made of.
#[derive(Debug)]
pub struct NvmeParts {
    /// Where segments lie.
    pub device: Arc<dyn Device>,
    /// What finds blocks in them.
    pub index: Arc<dyn Index>,
    /// Where the namespaces found on the disk go.
    pub namespaces: Arc<NamespaceTable>,
    /// What it counts.
    pub metrics: NvmeMetrics,
}

/// What the store and its writer share.
#[derive(Debug)]
struct Core {
    config: NvmeConfig,
    device: Arc<dyn Device>,
    index: Arc<dyn Index>,
    namespaces: Arc<NamespaceTable>,
    metrics: NvmeMetrics,
    segments: Segments,
    state: WriteState,
    reads: Arc<Reads>,
    /// Blocks that readers found not to be where the index says.
    lost: Noted<Wanted>,
    /// Blocks that were described while they were here.
    described: Noted<IndexKey>,
    feed: Feed,
    above: OnceLock<Weak<dyn Above>>,
    shed: Notify,
}

impl Core {
    fn above(&self) -> Option<Arc<dyn Above>> {
        self.above.get()?.upgrade()
    }
}

/// The nvme tier.
#[derive(Debug)]
pub struct NvmeStore {
    core: Arc<Core>,
    /// None once closed.
    ops: Mutex<Option<mpsc::Sender<Op>>>,
    recovered: watch::Receiver<Option<Recovered>>,
}

impl NvmeStore {
    /// Makes the tier and its writer, which does nothing before it is [run](Writer::run).
    ///
    /// # Errors
    /// `Invalid` for a size out of its range.
    pub fn new(config: NvmeConfig, parts: NvmeParts) -> Result<(Arc<Self>, Writer)> {
        config.check()?;
        let NvmeParts { device, index, namespaces, metrics } = parts;
        let core = Arc::new(Core {
            config,
            device,
            index,
            namespaces,
            segments: Segments::default(),
            state: WriteState::new(metrics.clone()),
            reads: Arc::default(),
            lost: Noted::new(LOST_MAX),
            described: Noted::new(describe::DESCRIBED_MAX),
            feed: Feed::default(),
            metrics,
            above: OnceLock::new(),
            shed: Notify::new(),
        });
        let (ops, queue) = mpsc::channel(QUEUE_OPS_MAX);
        let (tell, recovered) = watch::channel(None);
        let writer = Writer::new(Arc::clone(&core), queue, tell);
        Ok((Arc::new(Self { core, ops: Mutex::new(Some(ops)), recovered }), writer))
    }

    /// Waits until the writer has found what is on the disk; `None` if it has ended before.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn recovered(&self) -> Option<Recovered> {
        let mut recovered = self.recovered.clone();
        let found = recovered.wait_for(Option::is_some).await.ok()?;
        *found
    }

    /// What it counts.
    #[must_use]
    pub fn metrics(&self) -> &NvmeMetrics {
        &self.core.metrics
    }

    fn queue(&self) -> Result<mpsc::Sender<Op>> {
        let closed = || Error::new(ErrorKind::Unavailable, "use the closed nvme tier");
        self.ops.lock().clone().ok_or_else(closed)
    }

    /// Hands an operation to the writer and waits for its answer, for as long as a disk may need.
    async fn ask<T>(&self, op: impl FnOnce(oneshot::Sender<Result<T>>) -> Op) -> Result<T> {
        let gone = |what: &'static str| Error::new(ErrorKind::Unavailable, what);
        let (done, answer) = oneshot::channel();
        let queue = self.queue()?;
        let asked = async {
            let queued = queue.send(op(done)).await;
            queued.map_err(|_op| gone("write to nvme: its writer has ended"))?;
            answer.await.map_err(|_dropped| gone("write to nvme: its writer ended meanwhile"))?
        };
        let answered = tokio::time::timeout(ANSWER_DEADLINE, asked).await;
        answered.map_err(|_elapsed| {
            Error::new(ErrorKind::Timeout, "write to nvme: the disk does not answer")
        })?
    }
}

impl BlockStore for NvmeStore {
    fn tier(&self) -> Tier {
        Tier::Nvme
    }

    fn attach(&self, above: Weak<dyn Above>) {
        let second = self.core.above.set(above).is_err();
        debug_assert!(!second, "one stack is above a tier");
    }

    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, Result<Location>> {
        Box::pin(async move {
            if let Err(refused) = self.core.state.check() {
                self.core.metrics.rejected(RejectLabel::State).inc();
                return Err(refused);
            }
            self.ask(|done| Op::Put { block, done }).await
        })
    }

    fn get<'a>(&'a self, wanted: Wanted, into: BlockWriter) -> BoxFuture<'a, Result<Load>> {
        Box::pin(self.core.get(wanted, into))
    }

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            // Unreadable from now on, also while the tombstones are on their way.
            for block in blocks {
                self.core.segments.forbid(format::Place::of(block.location));
            }
            if self.ops.lock().is_none() {
                return self.core.remove_closed(blocks);
            }
            let fit = Writer::tombstones_max(self.core.config.segment_bytes);
            let asked = blocks.chunks(fit).map(<[Wanted]>::to_vec);
            let asked = asked.map(|blocks| self.ask(|done| Op::Remove { blocks, done }));
            join_all(asked).await.into_iter().collect()
        })
    }

    fn described(&self, namespace: NamespaceId, hashes: &[BlockHash]) {
        self.core.note_described(hashes.iter().map(|hash| IndexKey { namespace, hash: *hash }));
    }

    fn shed(&self) {
        self.core.shed.notify_one();
    }

    fn usage(&self) -> StoreUsage {
        let totals = self.core.segments.totals();
        StoreUsage {
            capacity_bytes: self.core.config.capacity_bytes,
            used_bytes: totals.data_bytes,
            blocks: totals.live_blocks,
            evicted_blocks: self.core.metrics.reclaimed_blocks.get(),
        }
    }

    fn ailment(&self) -> Option<Ailment> {
        self.core.state.ailment()
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            let Some(ops) = self.ops.lock().take() else { return Ok(()) };
            self.core.feed.hold(false);
            let (done, closed) = oneshot::channel();
            let ended = || Error::new(ErrorKind::Unavailable, "close nvme: its writer has ended");
            let closing = async move {
                // Behind a disk that hangs there may be no place in the queue.
                ops.send(Op::Close { done }).await.map_err(|_op| ended())?;
                drop(ops);
                closed.await.map_err(|_dropped| ended())
            };
            let closed = tokio::time::timeout(CLOSE_DEADLINE, closing).await;
            closed.map_err(|_elapsed| {
                Error::new(ErrorKind::Timeout, "close nvme: the disk does not answer")
            })?
        })
    }
}

impl Core {
    /// Takes blocks out of the index when no tombstone can be written any more: unless the index is
    /// lost, they stay removed.
    fn remove_closed(&self, blocks: &[Wanted]) -> Result<()> {
        let there = |block: &&Wanted| {
            let key = IndexKey::of(block);
            let entry = self.index.get(&key).ok().flatten();
            entry.is_some_and(|entry| entry.location == block.location)
        };
        let removed = blocks.iter().filter(there).map(|block| Change::Remove(IndexKey::of(block)));
        if let Err(error) = self.index.apply(&removed.collect::<Vec<_>>()) {
            tracing::warn!(%error, "removed nvme blocks may come back with a restart");
        }
        Err(Error::new(ErrorKind::Unavailable, "write tombstones to the closed nvme tier"))
    }
}

/// How long a put or a removal waits for the disk: far longer than one that works needs for a full
/// queue and some reclaiming. What is written later all the same is removed again.
const ANSWER_DEADLINE: Duration = Duration::from_secs(30);
/// How long closing waits for the disk: what is accepted is written in less, or never.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod engine_tests;
#[cfg(test)]
mod tests;
