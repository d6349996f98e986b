//! Segments as runs: what the writer is done with can be copied as it is, in the order of its puts.
//!
//! Reclaiming does not wait for whoever copies, but it is polite. While runs are
//! [held](Runs::hold_unoffered), a segment that was offered goes before one that was not, and if none
//! was, the writer waits a moment for an offer. It does so for a small part of its time at most: a
//! copier that is slower than what is put, or stuck, costs its copies and not the puts.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout, timeout_at},
};

use super::{
    Core, NvmeStore, OpLabel,
    aligned::PAGE,
    device::SegmentId,
    format::{Entry, Kind, Place},
    reclaim::floor_bytes,
    scan::{Scanned, Scanner, Trouble},
    segments::Segment,
    victim::wanted,
    writer::{GIVE_WAY_MAX, Writer},
};
use crate::{
    error::{Error, ErrorKind, Result},
    store::{BoxFuture, RunBlock, RunId, Runs},
};

/// The longest that reclaiming waits for an offer.
const HOLD_MAX: Duration = Duration::from_secs(2);
/// For so many times as long as it has waited, it does not wait again.
const HOLD_REST: u32 = 9;
/// How long reading a block, or the table of a segment, may take.
const READ_DEADLINE: Duration = Duration::from_secs(10);
/// Segments are about to leave when less than this part of the room is free: 1 / this.
const FREE_DIVISOR: u64 = 5;
/// And when fewer segments than this fit into what is free.
const FREE_SEGMENTS: u64 = 3;

/// What the tier and whoever copies its segments tell each other.
#[derive(Debug, Default)]
pub(super) struct Feed {
    /// A segment was closed.
    pub(super) sealed: Notify,
    /// Segments that were not offered should stay a little longer.
    hold: AtomicBool,
    /// A segment was offered, or it is over with holding.
    offered: Notify,
}

impl Feed {
    /// Whether segments that were not offered should stay.
    pub(super) fn holds(&self) -> bool {
        // Relaxed: a hint.
        self.hold.load(Ordering::Relaxed)
    }

    pub(super) fn hold(&self, hold: bool) {
        self.hold.store(hold, Ordering::Relaxed);
        self.offered.notify_one();
    }
}

impl Writer {
    /// Waits until a segment was offered, if segments are held, none was, and it is time to wait.
    pub(super) async fn await_offer(&mut self) {
        let core = &self.core;
        let now = Instant::now();
        let has_to =
            || core.feed.holds() && core.segments.dead().is_none() && !core.segments.any_offered();
        if now < self.hold_from || !has_to() || core.segments.closed().is_empty() {
            return;
        }
        core.metrics.held_reclaims.inc();
        let deadline = now + HOLD_MAX;
        while has_to() {
            if timeout_at(deadline, core.feed.offered.notified()).await.is_err() {
                break;
            }
        }
        self.hold_from = Instant::now() + now.elapsed() * HOLD_REST;
    }
}

impl Runs for NvmeStore {
    fn sealed(&self) -> Vec<RunId> {
        self.core.segments.closed().into_iter().map(|(id, _)| RunId(id.0)).collect()
    }

    fn contents<'a>(&'a self, run: RunId) -> BoxFuture<'a, Result<Vec<RunBlock>>> {
        Box::pin(in_time("list a segment", self.core.run_blocks(SegmentId(run.0))))
    }

    fn read<'a>(&'a self, block: &'a RunBlock) -> BoxFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(in_time("read a block of a segment", self.core.read_run_block(block)))
    }

    fn sealed_more<'a>(&'a self) -> BoxFuture<'a, ()> {
        Box::pin(self.core.feed.sealed.notified())
    }

    fn next_to_leave(&self) -> Vec<RunId> {
        let core = &self.core;
        let taken = core.segments.totals().file_bytes;
        let room = core.room_bytes(taken);
        let free = (room / FREE_DIVISOR).max(core.config.segment_bytes * FREE_SEGMENTS);
        let mut excess = taken.saturating_add(free).saturating_sub(room);
        let mut leaving = Vec::new();
        for (id, segment) in core.segments.closed() {
            if excess == 0 {
                break;
            }
            excess = excess.saturating_sub(segment.file_bytes);
            if !segment.offered {
                leaving.push(RunId(id.0));
            }
        }
        leaving
    }

    fn hold_unoffered(&self, hold: bool) {
        self.core.feed.hold(hold);
    }

    fn offered(&self, run: RunId) {
        self.core.segments.update(SegmentId(run.0), |segment| segment.offered = true);
        self.core.feed.offered.notify_one();
    }
}

async fn in_time<T>(doing: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_elapsed| Error::new(ErrorKind::Timeout, doing);
    timeout(READ_DEADLINE, work).await.map_err(late)?
}

impl Core {
    /// What the segments may take, `taken` of which they have taken: the capacity, or what others leave
    /// of the disk.
    fn room_bytes(&self, taken: u64) -> u64 {
        let capacity = self.config.capacity_bytes;
        // A disk that does not say it has room enough.
        let Ok(space) = self.device.space() else { return capacity };
        let free = space.available_bytes.saturating_sub(floor_bytes(&space));
        capacity.min(taken.saturating_add(free))
    }

    fn closed(&self, id: SegmentId) -> Option<Segment> {
        self.segments.get(id).filter(|segment| segment.closed)
    }

    async fn run_blocks(&self, id: SegmentId) -> Result<Vec<RunBlock>> {
        let Some(segment) = self.closed(id) else { return Ok(Vec::new()) };
        self.reads.give_way(GIVE_WAY_MAX).await;
        let (entries, _) = self.entries_of(id, &segment).await;
        Ok(entries.iter().filter_map(|entry| self.run_block(id, entry)).collect())
    }

    /// The block of an entry; none if it was removed, or nobody here knows its namespace.
    fn run_block(&self, id: SegmentId, entry: &Entry) -> Option<RunBlock> {
        let place = Place { segment: id, unit: entry.unit };
        if entry.kind != Kind::Block || self.segments.readable(place).is_none() {
            return None;
        }
        let namespace = self.namespaces.get(entry.key.namespace.as_bytes()).ok()?;
        Some(RunBlock {
            namespace,
            hash: entry.key.hash,
            location: place.location()?,
            len: entry.len,
            checksums: entry.checksums(),
        })
    }

    async fn read_run_block(&self, block: &RunBlock) -> Result<Option<Vec<u8>>> {
        let place = Place::of(block.location);
        let Some(segment) = self.closed(place.segment) else { return Ok(None) };
        if self.segments.readable(place).is_none() {
            return Ok(None);
        }
        self.reads.give_way(GIVE_WAY_MAX).await;
        let range = (u64::from(place.unit) * PAGE, segment.data_bytes);
        let device = self.device.as_ref();
        let mut scanner = Scanner::new(device, place.segment, segment.generation, range);
        let read = scanner.read_record(true).await;
        // Removed meanwhile, perhaps with its segment.
        if self.segments.readable(place) != Some(segment.generation) {
            return Ok(None);
        }
        match read {
            Ok(scanned) if is_it(&scanned, block, place) => Ok(Some(scanned.payload)),
            Ok(_other) => Ok(None),
            Err(Trouble::Damaged(damage)) => {
                self.note(place.segment, &Trouble::Damaged(damage));
                Ok(None)
            }
            Err(Trouble::Disk(error)) => {
                self.metrics.errors(OpLabel::Read).inc();
                let doing = "read a block of a segment";
                Err(Error::new(ErrorKind::Unavailable, doing).because(error))
            }
        }
    }
}

/// Whether a record, whose payload was verified, is that of the block.
fn is_it(Scanned { entry, .. }: &Scanned, block: &RunBlock, place: Place) -> bool {
    entry.kind == Kind::Block
        && wanted(place.segment, entry) == block.wanted()
        && entry.len == block.len
        && entry.checksums() == block.checksums
}
