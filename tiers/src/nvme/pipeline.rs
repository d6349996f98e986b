//! Groups on their way to the disk: one is written while the one before it is synced.
//!
//! ```text
//! begin -> write, write, ... -> complete -> all of it is written -> sync -> landed
//! ```
//! Groups land in the order in which they began, all in the same segment; one sync serves all that
//! are written when it begins. After a failure no further one lands: whoever began one completes it
//! as it is, and all of them come back together, when the kernel has let go of their pages.

use std::{
    collections::{HashMap, VecDeque},
    future, io,
    sync::Arc,
    task::Poll,
};

use futures_util::{StreamExt, future::BoxFuture, poll, stream::FuturesUnordered};

use super::{
    OpLabel,
    chunks::Buffers,
    device::{Device, SegmentId, SyncPoint, write_full},
    format::{Place, RecordHeader},
    gather::Gather,
    index::{Change, IndexKey},
    item::Item,
};
use crate::namespace::NamespaceId;

/// Groups under way at once: one that is synced, one that is written, and one that is being filled.
const GROUPS_MAX: usize = 4;

/// A record with its place.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) header: RecordHeader,
    pub(super) item: Item,
}

/// Records that are written, synced and indexed together.
#[derive(Debug, Default)]
pub(super) struct Group {
    pub(super) placed: Vec<Placed>,
    pub(super) changes: Vec<Change>,
    /// Bytes of the segment before and behind it.
    pub(super) start: u64,
    pub(super) end: u64,
    /// What became of blocks within this group, which the index does not know yet.
    pub(super) latest: HashMap<IndexKey, Option<(Place, u64)>>,
    /// Places that die with it, and the bytes of their records.
    pub(super) dead: Vec<(Place, u64)>,
    /// Namespaces that the index hears of with it.
    pub(super) namespaces: Vec<NamespaceId>,
}

/// What has ended on the disk.
#[derive(Debug)]
pub(super) enum Progress {
    /// One write: there is room for another.
    Written,
    /// All of these groups are durable, the earliest first.
    Landed(SegmentId, Vec<Group>),
    /// None of these is, for all that is known.
    Failed { segment: SegmentId, groups: Vec<Group>, op: OpLabel, error: io::Error },
}

#[derive(Debug)]
struct Flying {
    number: u64,
    /// None while it is being handed over.
    group: Option<Group>,
    /// Writes that have not ended.
    writes: usize,
}

struct Written {
    number: u64,
    pages: Gather,
    outcome: io::Result<()>,
}

struct Syncing {
    /// So many of the first groups land with it.
    groups: usize,
    done: BoxFuture<'static, io::Result<()>>,
}

/// See the [module](self).
pub(super) struct Pipeline {
    device: Arc<dyn Device>,
    segment: SegmentId,
    groups: VecDeque<Flying>,
    writes: FuturesUnordered<BoxFuture<'static, Written>>,
    sync: Option<Syncing>,
    failed: Option<(OpLabel, io::Error)>,
    begun: u64,
    pub(super) buffers: Buffers,
}

impl Pipeline {
    pub(super) fn new(device: Arc<dyn Device>) -> Self {
        Self {
            device,
            segment: SegmentId(0),
            groups: VecDeque::new(),
            writes: FuturesUnordered::new(),
            sync: None,
            failed: None,
            begun: 0,
            buffers: Buffers::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Whether one must land before another may begin.
    pub(super) fn is_full(&self) -> bool {
        self.groups.len() >= GROUPS_MAX
    }

    /// Whether nothing that is under way lands any more, but what is already being synced.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Writes that have not ended.
    pub(super) fn writes(&self) -> usize {
        self.writes.len()
    }

    /// What becomes of a block with the groups under way; `None` if they leave it alone.
    pub(super) fn latest(&self, key: &IndexKey) -> Option<Option<(Place, u64)>> {
        let groups = self.groups.iter().rev().filter_map(|flying| flying.group.as_ref());
        groups.filter_map(|group| group.latest.get(key)).next().copied()
    }

    /// Begins a group in `segment`, in which those under way are as well.
    pub(super) fn begin(&mut self, segment: SegmentId) {
        debug_assert!(self.is_empty() || self.segment == segment, "a segment is left first");
        self.segment = segment;
        self.begun += 1;
        self.groups.push_back(Flying { number: self.begun, group: None, writes: 0 });
    }

    /// Writes pages of the group that was begun last.
    ///
    /// # Cancel safety
    /// Safe: the write goes on.
    pub(super) async fn write(&mut self, at: u64, pages: Gather) {
        let Some(last) = self.groups.back_mut() else { return };
        last.writes += 1;
        let (number, segment, device) = (last.number, self.segment, Arc::clone(&self.device));
        self.writes.push(Box::pin(async move {
            let (pages, outcome) = write_full(device.as_ref(), segment, at, pages).await;
            Written { number, pages, outcome }
        }));
        // A write begins when it is first polled; what comes next is encoded meanwhile.
        if let Poll::Ready(Some(written)) = poll!(self.writes.next()) {
            self.written(written);
        }
    }

    /// All pages of the group that was begun last are handed over, or it has failed.
    pub(super) fn complete(&mut self, group: Group) {
        if let Some(last) = self.groups.back_mut() {
            last.group = Some(group);
        }
    }

    /// Waits until something has ended; for ever if nothing is under way.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn progress(&mut self) -> Progress {
        loop {
            if self.writes.is_empty()
                && self.sync.is_none()
                && self.groups.iter().all(|flying| flying.group.is_some())
                && let Some((op, error)) = self.failed.take()
            {
                let groups = self.take(self.groups.len());
                return Progress::Failed { segment: self.segment, groups, op, error };
            }
            self.begin_sync();
            tokio::select! {
                biased;
                Some(written) = self.writes.next() => {
                    self.written(written);
                    return Progress::Written;
                }
                outcome = synced(self.sync.as_mut()) => {
                    let landed = self.sync.take().map_or(0, |sync| sync.groups);
                    match outcome {
                        Ok(()) => return Progress::Landed(self.segment, self.take(landed)),
                        // It weighs more than a failed write.
                        Err(error) => self.failed = Some((OpLabel::Sync, error)),
                    }
                }
            }
        }
    }

    /// Syncs what is written, if nothing is synced at the moment.
    fn begin_sync(&mut self) {
        if self.sync.is_some() || self.failed.is_some() {
            return;
        }
        let written = |flying: &&Flying| flying.group.is_some() && flying.writes == 0;
        let groups = self.groups.iter().take_while(written).count();
        if groups > 0 {
            let done = self.device.sync(self.segment, SyncPoint::Records);
            self.sync = Some(Syncing { groups, done });
        }
    }

    fn take(&mut self, count: usize) -> Vec<Group> {
        self.groups.drain(..count).filter_map(|flying| flying.group).collect()
    }

    fn written(&mut self, written: Written) {
        let Written { number, pages, outcome } = written;
        self.buffers.give(pages.into_own());
        if let Some(flying) = self.groups.iter_mut().find(|flying| flying.number == number) {
            flying.writes -= 1;
        }
        if let Err(error) = outcome
            && self.failed.is_none()
        {
            self.failed = Some((OpLabel::Write, error));
        }
    }
}

async fn synced(sync: Option<&mut Syncing>) -> io::Result<()> {
    match sync {
        Some(sync) => (&mut sync.done).await,
        None => future::pending().await,
    }
}

impl std::fmt::Debug for Pipeline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Pipeline");
        shown.field("segment", &self.segment).field("groups", &self.groups.len());
        shown.field("writes", &self.writes.len()).field("failed", &self.failed);
        shown.finish_non_exhaustive()
    }
}
