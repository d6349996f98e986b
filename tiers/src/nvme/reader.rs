//! Reading a block: one read of its header and its bytes, which lands in the arena.

use std::{
    collections::HashSet,
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    time::timeout,
};

use super::{
    Core, DamageLabel, OpLabel,
    aligned::{AlignedBuf, PAGE_BYTES},
    device::{Landing, read_full},
    format::{Kind, Place, RecordHeader, Shape},
    index::IndexKey,
};
use crate::{
    error::{Error, ErrorKind, Result},
    map::Location,
    store::{BlockWriter, Load, Wanted},
};

/// Reads under way: more would only wait for the disk, each holding a block of dram.
const READS_MAX: usize = 64;
/// How long a read waits for others to end: longer than a disk that is merely busy needs for those.
const READ_PATIENCE: Duration = Duration::from_millis(500);
/// How long a read may take. A disk that needs longer for a block is worse than a miss.
const READ_DEADLINE: Duration = Duration::from_secs(2);
/// When to come back to a tier that is busy.
const RETRY_AFTER_BUSY: Duration = Duration::from_millis(20);
/// Places remembered that the disk failed to read once; a second time, the block is given up.
const SUSPECTS_MAX: usize = 4096;

/// The reads under way.
#[derive(Debug)]
pub(super) struct Reads {
    turns: Arc<Semaphore>,
    count: AtomicUsize,
    idle: Notify,
    suspects: Mutex<HashSet<Location>>,
}

/// Counts one read while it exists. The buffer of the read holds it, too: a read that nobody waits for
/// any more counts until the disk is done with it, so that a disk that hangs has a bounded number.
struct Reading {
    reads: Arc<Reads>,
    _turn: OwnedSemaphorePermit,
}

impl Default for Reads {
    fn default() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(READS_MAX)),
            count: AtomicUsize::new(0),
            idle: Notify::new(),
            suspects: Mutex::default(),
        }
    }
}

impl Reads {
    /// Waits for its turn; `None` if that does not come soon.
    async fn begin(self: &Arc<Self>) -> Option<Arc<Reading>> {
        let turn = timeout(READ_PATIENCE, Arc::clone(&self.turns).acquire_owned()).await;
        let turn = turn.ok()?.ok()?;
        // Relaxed: a hint for the writer.
        self.count.fetch_add(1, Ordering::Relaxed);
        Some(Arc::new(Reading { reads: Arc::clone(self), _turn: turn }))
    }

    /// Waits until no read is under way, at most for `patience`.
    pub(super) async fn give_way(&self, patience: Duration) {
        if self.count.load(Ordering::Relaxed) > 0 {
            // Either way the writer goes on: reads come first, but not for ever.
            drop(timeout(patience, self.idle.notified()).await);
        }
    }

    /// Whether the disk failed at this place for the second time.
    fn is_lost(&self, location: Location) -> bool {
        let mut suspects = self.suspects.lock();
        if suspects.len() >= SUSPECTS_MAX {
            suspects.clear();
        }
        !suspects.insert(location)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        if self.reads.count.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.reads.idle.notify_waiters();
        }
    }
}

impl Core {
    pub(super) async fn get(&self, wanted: Wanted, into: BlockWriter) -> Result<Load> {
        let place = Place::of(wanted.location);
        let Some(generation) = self.segments.readable(place) else { return Ok(Load::Miss) };
        let Some(reading) = self.reads.begin().await else {
            self.metrics.reads_refused.inc();
            return Ok(Load::Busy(RETRY_AFTER_BUSY));
        };
        let asked = Asked { wanted, place, generation, reading };
        match timeout(READ_DEADLINE, self.read(&asked, into)).await {
            Ok(Ok(load)) => Ok(load),
            Ok(Err(error)) => self.failed_read(&asked, error),
            Err(_elapsed) => {
                self.metrics.read_timeouts.inc();
                Ok(Load::Busy(RETRY_AFTER_BUSY))
            }
        }
    }

    /// A failed read is a block that cannot be had now; failing twice it is given up.
    fn failed_read(&self, asked: &Asked, error: io::Error) -> Result<Load> {
        if self.segments.readable(asked.place) != Some(asked.generation) {
            // It left meanwhile, and its file with it.
            return Ok(Load::Miss);
        }
        self.metrics.errors(OpLabel::Read).inc();
        if error.kind() == io::ErrorKind::UnexpectedEof {
            self.metrics.damaged(DamageLabel::Header).inc();
            self.lost.note(asked.wanted);
            return Ok(Load::Miss);
        }
        if self.reads.is_lost(asked.wanted.location) {
            self.lost.note(asked.wanted);
            return Ok(Load::Miss);
        }
        let what = format!("read {:?} at page {}", asked.place.segment, asked.place.unit);
        Err(Error::new(ErrorKind::Unavailable, what).because(error))
    }

    async fn read(&self, asked: &Asked, into: BlockWriter) -> io::Result<Load> {
        let len = into.len();
        let load = if len <= Shape::inline_bytes_max() {
            self.read_small(asked, into).await?
        } else {
            self.read_large(asked, into).await?
        };
        if let Load::Hit(_) = &load {
            let len = u64::try_from(len).unwrap_or(u64::MAX);
            self.metrics.read_bytes.inc_by(len);
        }
        Ok(load)
    }

    /// A block that may be in the page of its header.
    async fn read_small(&self, asked: &Asked, mut into: BlockWriter) -> io::Result<Load> {
        let head = AlignedBuf::zeroed(PAGE_BYTES);
        let landing = self.read_pages(asked, 0, Landing::new(head, None)).await?;
        let Some(header) = self.checked(asked, &landing.head, into.len()) else {
            return Ok(Load::Miss);
        };
        if let Some(payload) = header.inline_payload(&landing.head) {
            into.bytes_mut().copy_from_slice(payload);
            return Ok(Load::Hit(into));
        }
        // Many checksums have pushed it out of the page.
        let landing = Landing::new(AlignedBuf::zeroed(into.len()), None);
        let landing = self.read_pages(asked, PAGE_BYTES, landing).await?;
        copy(&landing.head, &mut into);
        Ok(Load::Hit(into))
    }

    /// A block that lies behind the page of its header.
    async fn read_large(&self, asked: &Asked, mut into: BlockWriter) -> io::Result<Load> {
        if into.pages_mut(PAGE_BYTES).is_none() {
            let head = AlignedBuf::zeroed(PAGE_BYTES + into.len());
            let landing = self.read_pages(asked, 0, Landing::new(head, None)).await?;
            if self.checked(asked, &landing.head, into.len()).is_none() {
                return Ok(Load::Miss);
            }
            copy(landing.head.get(PAGE_BYTES..).unwrap_or_default(), &mut into);
            return Ok(Load::Hit(into));
        }
        let landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), Some(into));
        let Landing { head, body, .. } = self.read_pages(asked, 0, landing).await?;
        let hit = body.filter(|body| self.checked(asked, &head, body.len()).is_some());
        Ok(hit.map_or(Load::Miss, Load::Hit))
    }

    async fn read_pages(
        &self,
        asked: &Asked,
        behind: usize,
        landing: Landing,
    ) -> io::Result<Landing> {
        let offset = asked.place.offset() + u64::try_from(behind).unwrap_or(0);
        let landing = landing.held_by(Arc::<Reading>::clone(&asked.reading));
        let (landing, read) =
            read_full(self.device.as_ref(), asked.place.segment, offset, landing).await;
        read.map(|()| landing)
    }

    /// The header, if it is that of the block asked for, and the block may still be read.
    fn checked(&self, asked: &Asked, page: &[u8], len: usize) -> Option<RecordHeader> {
        let page = page.get(..PAGE_BYTES)?;
        let header = match RecordHeader::decode(page, asked.generation, asked.place.unit) {
            Ok((header, _)) => header,
            Err(damage) => {
                let key = asked.wanted.hash;
                tracing::error!(?damage, hash = ?key, "nvme record header is damaged");
                self.metrics.damaged(DamageLabel::Header).inc();
                self.lost.note(asked.wanted);
                return None;
            }
        };
        let key = IndexKey::of(&asked.wanted);
        let same = header.kind == Kind::Block
            && header.key == key
            && usize::try_from(header.len) == Ok(len);
        if !same {
            tracing::error!(hash = ?key.hash, "nvme index names the record of another block");
            self.metrics.damaged(DamageLabel::Index).inc();
            self.lost.note(asked.wanted);
        }
        // Removed or reclaimed while it was read: the promise to the remover comes first.
        let readable = self.segments.readable(asked.place) == Some(asked.generation);
        (same && readable).then_some(header)
    }
}

/// A block to be read, and where it should be.
struct Asked {
    wanted: Wanted,
    place: Place,
    generation: u64,
    reading: Arc<Reading>,
}

fn copy(from: &[u8], into: &mut BlockWriter) {
    let len = into.len();
    if let Some(payload) = from.get(..len) {
        into.bytes_mut().copy_from_slice(payload);
    }
}
