//! The one owner of all writes: takes operations in order, groups them, and keeps room.
//!
//! One group is one run of pages, one sync and one group of index changes, so that many small puts
//! cost what one large one does. Whoever must not be kept waiting (a durable put, a removal) goes at
//! once; others wait a moment for company.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use super::{
    Core, QUEUE_OPS_MAX, Recovered,
    device::{SegmentId, Space},
    format::{Place, Tombstone},
    index::{Change, IndexEntry, IndexKey},
    item::{Item, bytes_of},
    pipeline::{Pipeline, Progress},
    seal::Open,
    state::WriteBudget,
    survey::Survey,
};
use crate::{
    error::{Error, ErrorKind, Result},
    map::Location,
    namespace::NamespaceId,
    nvme::RejectLabel,
    store::{Outgoing, Urgency, Wanted},
};

/// No more is taken into a group of so many bytes: all of it is answered together, after one sync.
const GROUP_BYTES_MAX: u64 = 8 << 20;
/// A group that is smaller waits for more, in bytes.
const GROUP_BYTES_MIN: u64 = 2 << 20;
/// A segment takes so many of the largest groups at least.
const SEGMENT_GROUPS_MIN: u64 = 8;
/// How long it waits.
const GROUP_WAIT: Duration = Duration::from_millis(5);
/// How long reads may hold up one write that nobody waits for.
pub(super) const GIVE_WAY_MAX: Duration = Duration::from_millis(10);
/// The share of the write burst that blocks which were never read again must leave for others.
const UNREAD_RESERVE: f64 = 0.25;

/// What the writer is asked to do.
#[derive(Debug)]
pub(super) enum Op {
    /// Write a block.
    Put { block: Outgoing, done: oneshot::Sender<Result<Location>> },
    /// Write tombstones.
    Remove { blocks: Vec<Wanted>, done: oneshot::Sender<Result<()>> },
    /// Finish and end.
    Close { done: oneshot::Sender<()> },
}

/// The task that writes. It ends when the store is closed or dropped.
#[derive(Debug)]
pub struct Writer {
    pub(super) core: Arc<Core>,
    queue: mpsc::Receiver<Op>,
    tell: watch::Sender<Option<Recovered>>,
    pub(super) open: Option<Open>,
    pub(super) next_segment: u64,
    pub(super) generations: u64,
    /// Namespaces as the index knows them, encoded.
    pub(super) known: HashMap<NamespaceId, Vec<u8>>,
    pub(super) budget: WriteBudget,
    /// Changes that the index has refused so far.
    pub(super) unindexed: Vec<Change>,
    /// Tombstones that could not be written so far.
    pub(super) owed: Vec<Tombstone>,
    /// A segment is being reclaimed: making room does not make room.
    pub(super) reclaiming: bool,
    /// The most that the segments have taken.
    pub(super) peak_bytes: u64,
    /// When a segment was last reclaimed whose room others took.
    pub(super) in_vain: Option<Instant>,
    pub(super) pipeline: Pipeline,
    /// Groups and single items that could not be written so far.
    pub(super) failures: u64,
    pub(super) survey: Survey,
    /// From when on reclaiming may wait for an offer again.
    pub(super) hold_from: Instant,
    /// What the disk said last of its room.
    pub(super) space: Option<(Instant, Space)>,
}

/// Operations taken from the queue.
#[derive(Default)]
struct Taken {
    items: Vec<Item>,
    bytes: u64,
    /// Operations, refused ones too.
    count: usize,
    /// Somebody waits for it.
    urgent: bool,
    closing: Option<oneshot::Sender<()>>,
}

impl Writer {
    pub(super) fn new(
        core: Arc<Core>,
        queue: mpsc::Receiver<Op>,
        tell: watch::Sender<Option<Recovered>>,
    ) -> Self {
        let budget = WriteBudget::new(core.config.daily_write_bytes, core.config.capacity_bytes);
        Self {
            pipeline: Pipeline::new(Arc::clone(&core.device)),
            core,
            queue,
            tell,
            open: None,
            next_segment: 1,
            generations: 0,
            known: HashMap::new(),
            budget,
            unindexed: Vec::new(),
            owed: Vec::new(),
            reclaiming: false,
            peak_bytes: 0,
            in_vain: None,
            failures: 0,
            survey: Survey::default(),
            hold_from: Instant::now(),
            space: None,
        }
    }

    /// Finds what is on the disk, then writes until the store is closed.
    ///
    /// # Blocking
    /// Calls the index and makes and deletes files: run it on a thread of its own.
    ///
    /// # Cancel safety
    /// Not safe: what was accepted and not answered is lost, as with a kill.
    pub async fn run(mut self) {
        let recovered = self.recover().await;
        self.tell.send_replace(Some(recovered));
        self.core.feed.sealed.notify_one();
        loop {
            let core = Arc::clone(&self.core);
            let op = tokio::select! {
                biased;
                progress = self.pipeline.progress(), if !self.pipeline.is_empty() => {
                    let landed = !matches!(progress, Progress::Written);
                    self.follow(progress);
                    if landed {
                        self.tend().await;
                    }
                    continue;
                }
                () = core.shed.notified() => {
                    self.shed().await;
                    continue;
                }
                () = core.lost.notified() => {
                    self.drop_lost();
                    continue;
                }
                () = core.described.notified() => {
                    self.keep_descriptions();
                    continue;
                }
                op = self.queue.recv() => op,
            };
            let Some(op) = op else { break };
            if self.serve(op).await {
                break;
            }
        }
    }

    /// Does an operation, and those that come with it; true if that was the last one.
    async fn serve(&mut self, op: Op) -> bool {
        let mut taken = Taken::default();
        self.take(op, &mut taken);
        self.gather(&mut taken).await;
        self.append(std::mem::take(&mut taken.items), taken.urgent).await;
        self.tend().await;
        let Some(done) = taken.closing else { return false };
        self.settle().await;
        while self.keep_descriptions() {}
        self.tend().await;
        self.seal().await;
        if done.send(()).is_err() {
            tracing::warn!("nvme closed later than anybody waited for it");
        }
        true
    }

    /// Does what is due between groups.
    async fn tend(&mut self) {
        self.pay().await;
        self.keep_room().await;
    }

    /// No more is taken into a group of so many bytes.
    pub(super) fn group_bytes_max(&self) -> u64 {
        GROUP_BYTES_MAX.min(self.core.config.segment_bytes / SEGMENT_GROUPS_MIN)
    }

    /// A group that is smaller waits for more, in bytes.
    fn group_bytes_min(&self) -> u64 {
        self.group_bytes_max().min(GROUP_BYTES_MIN)
    }

    /// Takes what else is in the queue. If that is little, waits until the groups before it are there,
    /// and a moment at least if nobody is in a hurry: what comes meanwhile goes with it.
    async fn gather(&mut self, taken: &mut Taken) {
        let mut deadline = Instant::now() + GROUP_WAIT;
        let (most, least) = (self.group_bytes_max(), self.group_bytes_min());
        let more = |taken: &Taken| taken.bytes < most && taken.count < QUEUE_OPS_MAX;
        while more(taken) && taken.closing.is_none() {
            let op = match self.queue.try_recv() {
                Ok(op) => op,
                Err(_empty) if taken.bytes >= least => return,
                Err(_empty) if taken.urgent && self.pipeline.is_empty() => return,
                Err(_empty) => tokio::select! {
                    biased;
                    progress = self.pipeline.progress(), if !self.pipeline.is_empty() => {
                        self.follow(progress);
                        // Who was answered may have more.
                        deadline = Instant::now() + GROUP_WAIT;
                        continue;
                    }
                    op = self.queue.recv() => match op {
                        Some(op) => op,
                        None => return,
                    },
                    () = sleep_until(deadline), if self.pipeline.is_empty() => return,
                },
            };
            self.take(op, taken);
        }
    }

    fn take(&mut self, op: Op, taken: &mut Taken) {
        taken.count += 1;
        match op {
            Op::Put { block, done } => match self.admit(&block) {
                Ok(()) => {
                    taken.urgent |= block.urgency == Urgency::Durable;
                    let item = Item::block(block, done);
                    taken.bytes = taken.bytes.saturating_add(item.bytes());
                    taken.items.push(item);
                }
                // Whoever asked may have gone.
                Err(refused) => drop(done.send(Err(refused))),
            },
            Op::Remove { blocks, done } => {
                taken.urgent = true;
                let item = Item::tombstones(blocks, done);
                taken.bytes = taken.bytes.saturating_add(item.bytes());
                taken.items.push(item);
            }
            Op::Close { done } => taken.closing = Some(done),
        }
    }

    /// Whether a block is taken: it fits, writes are possible, and the budget allows it.
    fn admit(&mut self, block: &Outgoing) -> Result<()> {
        let refuse = |reason, error| {
            self.core.metrics.rejected(reason).inc();
            Err(error)
        };
        if let Err(refused) = self.core.state.check() {
            return refuse(RejectLabel::State, refused);
        }
        let bytes = Item::record_bytes(block);
        if bytes > Open::room_bytes(self.core.config.segment_bytes) {
            let what = format!(
                "write to nvme: a block of {bytes} bytes with its header does not fit into a \
                 segment of {} bytes",
                self.core.config.segment_bytes
            );
            return refuse(RejectLabel::Size, Error::invalid(what));
        }
        let reserve = if block.reused { 0.0 } else { UNREAD_RESERVE };
        if block.urgency != Urgency::Durable && !self.budget.allows(bytes, reserve) {
            let kind = ErrorKind::Exhausted { retry_after: Duration::from_secs(1) };
            let what = "write to nvme: the write budget of the day is short (nvme.daily_writes)";
            return refuse(RejectLabel::Budget, Error::new(kind, what));
        }
        Ok(())
    }

    /// The current place of a block, as the index has it, or will have it.
    pub(super) fn current(&self, key: &IndexKey) -> Option<(Place, u64)> {
        self.look_up(key).unwrap_or_else(|error| {
            tracing::warn!(%error, "nvme index cannot be read");
            self.core.metrics.errors(super::OpLabel::Index).inc();
            None
        })
    }

    /// As [`current`](Self::current), for whom it matters that nothing is known.
    pub(super) fn look_up(&self, key: &IndexKey) -> io::Result<Option<(Place, u64)>> {
        if let Some(latest) = self.pipeline.latest(key) {
            return Ok(latest);
        }
        let place = |entry: &IndexEntry| (Place::of(entry.location), bytes_of(entry));
        for change in self.unindexed.iter().rev() {
            match change {
                Change::Put(other, entry) if other == key => return Ok(Some(place(entry))),
                Change::Remove(other) if other == key => return Ok(None),
                _ => {}
            }
        }
        let entry = self.core.index.get(key)?;
        Ok(entry.as_ref().map(place))
    }

    /// A number that no other segment has had, and a generation.
    pub(super) fn next_id(&mut self) -> (SegmentId, u64) {
        let id = SegmentId(self.next_segment);
        self.next_segment += 1;
        self.generations += 1;
        let drawn = [self.core.config.seed, id.0, self.generations].map(u64::to_le_bytes).concat();
        (id, super::format::checksum(&drawn) | 1)
    }
}
