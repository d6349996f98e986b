//! The tier as the stack sees it.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout, timeout_at},
};

use super::{
    Core, bucket::BucketErrorKind, catalog::Stored, codec, keeper::Keep, reader::Request,
    seats::Seat,
};
use crate::{
    block::BlockHash,
    error::{Error, ErrorKind, Result},
    key::IndexKey,
    map::Location,
    namespace::NamespaceId,
    store::{
        Above, Ailment, BlockStore, BlockWriter, BoxFuture, Load, Outgoing, StoreUsage, Wanted,
    },
    tier::Tier,
};

/// How long a read may take: an object store that needs longer is no cache.
const READ_DEADLINE: Duration = Duration::from_secs(10);
/// When to ask again if too many ask at once.
const BUSY_RETRY: Duration = Duration::from_millis(100);
/// Blocks from so many bytes on are decoded on a thread for blocking work.
const DECODE_INLINE_MAX: usize = 256 << 10;
/// How long a removal waits until the bucket knows of it.
const REMOVE_DEADLINE: Duration = Duration::from_secs(30);
/// How long closing waits until the bucket knows all that this node does.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);
/// Removed blocks that are remembered until those in the bucket are found: 16 MiB of memory.
const UNFOUND_MAX: usize = 262_144;
/// A block whose bytes were wrong so often, for so long, is given up: before that the way to the store
/// may be at fault, which ends.
const WRONG_MAX: u32 = 3;
/// See [`WRONG_MAX`].
const WRONG_FOR: Duration = Duration::from_secs(60);
/// Blocks with wrong bytes that are remembered.
const SUSPECTS_MAX: usize = 4096;

/// How often a block was wrong, and since when.
#[derive(Debug, Clone, Copy)]
struct Suspicion {
    times: u32,
    since: Instant,
}

/// The object tier. Everything but reads goes through its keepers, see the module.
#[derive(Debug)]
pub struct ObjectStore {
    core: Arc<Core>,
    /// None once closed.
    reads: Mutex<Option<mpsc::Sender<Request>>>,
    suspects: Mutex<HashMap<Location, Suspicion>>,
}

/// How one try to read has ended.
enum Tried {
    Hit(BlockWriter),
    /// The bytes are not those of the block; the writer comes back for another try.
    Wrong(BlockWriter),
    Not(Result<Load>),
}

impl ObjectStore {
    pub(super) fn new(core: Arc<Core>, reads: mpsc::Sender<Request>) -> Self {
        Self { core, reads: Mutex::new(Some(reads)), suspects: Mutex::default() }
    }

    /// Waits until all that this node has in the bucket is in the map.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn found(&self) {
        self.core.wait_filled().await;
    }

    async fn read(&self, wanted: Wanted, mut into: BlockWriter) -> Result<Load> {
        let deadline = Instant::now() + READ_DEADLINE;
        // Once more: the bytes may have been cut or mixed up on their way.
        for _ in 0..2 {
            let Some(stored) = self.core.catalog.resolve(wanted.location) else {
                return Ok(Load::Miss);
            };
            if usize::try_from(stored.slot.len) != Ok(into.len()) {
                return Ok(Load::Miss);
            }
            match self.try_read(stored, into, deadline).await {
                // Removed while it was read: the promise to the remover comes first.
                Tried::Hit(_) if self.core.catalog.resolve(wanted.location).is_none() => {
                    return Ok(Load::Miss);
                }
                Tried::Hit(writer) => return Ok(Load::Hit(writer)),
                Tried::Wrong(writer) => into = writer,
                Tried::Not(answer) => return answer,
            }
        }
        if self.is_damaged(&wanted) {
            self.core.catalog.kill(wanted.location);
            return Ok(Load::Miss);
        }
        Err(Error::new(ErrorKind::Unavailable, "read from the object store: wrong bytes"))
    }

    async fn try_read(&self, stored: Stored, into: BlockWriter, deadline: Instant) -> Tried {
        let closed = || Error::new(ErrorKind::Unavailable, "read from the closed object tier");
        let Some(reads) = self.reads.lock().clone() else { return Tried::Not(Err(closed())) };
        let (done, answer) = oneshot::channel();
        let request = Request { stored: stored.clone(), deadline, done };
        match reads.try_send(request) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.core.metrics.reads_refused.inc();
                return Tried::Not(Ok(Load::Busy(BUSY_RETRY)));
            }
            Err(mpsc::error::TrySendError::Closed(_)) => return Tried::Not(Err(closed())),
        }
        drop(reads);
        let bytes = match timeout_at(deadline, answer).await {
            Ok(Ok(Ok(bytes))) => bytes,
            Ok(Ok(Err(refusal))) => return self.refused(refusal, &stored, into),
            Ok(Err(_dropped)) => return Tried::Not(Err(closed())),
            Err(_elapsed) => {
                self.core.metrics.read_timeouts.inc();
                return Tried::Not(Ok(Load::Busy(BUSY_RETRY)));
            }
        };
        decode(stored, bytes, into).await
    }

    /// Asks keepers to write removals down, and waits until they are written.
    fn note_removals<'a>(
        &'a self,
        asks: Vec<(Arc<Seat>, Vec<IndexKey>)>,
        op: fn(Vec<IndexKey>, oneshot::Sender<Result<()>>) -> Keep,
    ) -> BoxFuture<'a, Result<()>> {
        let asked = asks.into_iter().map(|(seat, keys)| {
            let (done, noted) = oneshot::channel();
            seat.try_keep(op(keys, done)).map(|()| noted)
        });
        let asked: Vec<_> = asked.collect();
        Box::pin(async move {
            let deadline = Instant::now() + REMOVE_DEADLINE;
            let ended =
                |_dropped| Error::new(ErrorKind::Unavailable, "remove: the object tier has ended");
            for noted in asked {
                let noted = timeout_at(deadline, noted?).await.map_err(|_elapsed| {
                    Error::new(ErrorKind::Timeout, "remove: the object store does not answer")
                })?;
                noted.map_err(ended)??;
            }
            Ok(())
        })
    }

    /// What it means that the bucket does not deliver.
    fn refused(&self, refusal: BucketErrorKind, stored: &Stored, into: BlockWriter) -> Tried {
        let what = match refusal {
            BucketErrorKind::NotFound => {
                // If there is no room to tell the keeper, the next read of the pack does.
                let seat = self.core.seats.of(stored.pack.id.ordinal);
                drop(seat.map(|seat| seat.try_keep(Keep::Lost(stored.number))));
                return Tried::Not(Ok(Load::Miss));
            }
            BucketErrorKind::Busy(after) => return Tried::Not(Ok(Load::Busy(after))),
            BucketErrorKind::Timeout => {
                self.core.metrics.read_timeouts.inc();
                return Tried::Not(Ok(Load::Busy(BUSY_RETRY)));
            }
            BucketErrorKind::Damaged => return Tried::Wrong(into),
            BucketErrorKind::Refused => "read from the object store: permission denied",
            BucketErrorKind::Unsupported => "read from the object store: not supported",
            BucketErrorKind::Failed => "read from the object store",
        };
        Tried::Not(Err(Error::new(ErrorKind::Unavailable, what)))
    }

    fn is_given_up(&self, location: Location) -> bool {
        let mut suspects = self.suspects.lock();
        if suspects.len() >= SUSPECTS_MAX {
            suspects.clear();
        }
        let now = Instant::now();
        let suspicion = suspects.entry(location).or_insert(Suspicion { times: 0, since: now });
        suspicion.times += 1;
        suspicion.times >= WRONG_MAX && now - suspicion.since >= WRONG_FOR
    }
}

/// Decodes a block where it does not hold others up.
async fn decode(stored: Stored, bytes: Bytes, mut into: BlockWriter) -> Tried {
    let len = into.len();
    let work = move || {
        let slot = stored.slot;
        match codec::decode(slot.coding, &bytes, into.bytes_mut()) {
            Ok(()) => Tried::Hit(into),
            Err(_damage) => Tried::Wrong(into),
        }
    };
    if len <= DECODE_INLINE_MAX {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(tried) => tried,
        Err(error) => {
            let error = Error::new(ErrorKind::Internal, "decode a block").because(error);
            Tried::Not(Err(error))
        }
    }
}

impl BlockStore for ObjectStore {
    fn tier(&self) -> Tier {
        Tier::Object
    }

    fn attach(&self, above: Weak<dyn Above>) {
        let second = self.core.above.set(above).is_err();
        debug_assert!(!second, "one stack is above a tier");
    }

    fn put<'a>(&'a self, _block: Outgoing) -> BoxFuture<'a, Result<Location>> {
        Box::pin(async {
            let what = "put one block into the object tier: it takes sealed runs of nvme";
            Err(Error::new(ErrorKind::Unsupported, what))
        })
    }

    fn get<'a>(&'a self, wanted: Wanted, into: BlockWriter) -> BoxFuture<'a, Result<Load>> {
        Box::pin(self.read(wanted, into))
    }

    fn is_damaged(&self, block: &Wanted) -> bool {
        self.core.metrics.wrong_blocks.inc();
        self.is_given_up(block.location)
    }

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>> {
        let mut asks: Vec<_> = self.core.seats.all().into_iter().map(|seat| (seat, None)).collect();
        for block in blocks {
            let ordinal = self.core.catalog.ordinal_of(block.location);
            let of = asks.iter().position(|(seat, _)| Some(seat.owner.ordinal) == ordinal);
            // Unreadable from now on, also while the bucket is being told.
            let killed = self.core.catalog.kill(block.location);
            // The own keeper, who is first, may not have said yet that the pack is dropped.
            if let Some((_, keys)) = asks.get_mut(of.unwrap_or(0)) {
                // Whoever removed it before may still wait until the bucket knows.
                keys.get_or_insert_with(Vec::new).extend(killed.then(|| IndexKey::of(block)));
            }
        }
        let asks = asks.into_iter().filter_map(|(seat, keys)| Some((seat, keys?)));
        self.note_removals(asks.collect(), |keys, done| Keep::Remove { keys, done })
    }

    fn removed<'a>(
        &'a self,
        namespace: NamespaceId,
        hashes: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<()>> {
        let keys = hashes.iter().map(|hash| IndexKey { namespace, hash: *hash });
        let keys: Vec<IndexKey> = keys.collect();
        let (mut asks, mut too_early) = (Vec::new(), false);
        for seat in self.core.seats.all() {
            if let Some(unfound) = seat.unfound.lock().as_mut() {
                let room = UNFOUND_MAX.saturating_sub(unfound.len());
                unfound.extend(keys.iter().copied().take(room));
                too_early = true;
                continue;
            }
            asks.push((seat, keys.clone()));
        }
        let noted = self.note_removals(asks, |keys, done| Keep::Removed { keys, done });
        if too_early {
            let what = "remove from the object tier: it has not found its blocks yet, and if this \
                        node restarts before it has they may come back; then remove them again";
            let early = Error::new(ErrorKind::Unavailable, what);
            return Box::pin(async move { noted.await.and(Err(early)) });
        }
        noted
    }

    fn shed(&self) {
        self.core.seats.all().iter().for_each(|seat| seat.shed.notify_one());
    }

    fn usage(&self) -> StoreUsage {
        let totals = self.core.catalog.totals();
        StoreUsage {
            capacity_bytes: self.core.config.capacity_bytes,
            used_bytes: totals.bytes,
            blocks: totals.live_blocks,
            evicted_blocks: self.core.metrics.collected_blocks.get(),
        }
    }

    fn ailment(&self) -> Option<Ailment> {
        if self.core.bucket.metrics().breaker_open.get() != 0 {
            return Some(Ailment::Away);
        }
        // It starts, another node has its ordinal, or the store cannot say who may write.
        (!self.core.seats.own().epoch.is_held()).then_some(Ailment::ReadOnly)
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            if self.reads.lock().take().is_none() {
                return Ok(());
            }
            let closing = self.core.seats.close().into_iter().map(async |seat| {
                let (done, closed) = oneshot::channel();
                seat.keep_last(Keep::Close { done }).await?;
                let ended = |_dropped| Error::new(ErrorKind::Unavailable, "close the object tier");
                closed.await.map_err(ended)
            });
            let closed = timeout(CLOSE_DEADLINE, join_all(closing)).await.map_err(|_elapsed| {
                Error::new(ErrorKind::Timeout, "close the object tier: the store does not answer")
            })?;
            // What the keeper of a ward did not say, the next one finds.
            closed.into_iter().next().unwrap_or(Ok(()))
        })
    }
}
