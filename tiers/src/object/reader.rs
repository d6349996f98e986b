//! Reads: what is asked for at about the same time and lies near each other in a pack comes in one
//! ranged GET.
//!
//! An object store answers after tens of milliseconds and then delivers fast, so that bytes between
//! two blocks cost less than a second request. Who asks decodes his own part; who does not wait any
//! more costs nothing but the bytes.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use super::{
    bucket::{Bucket, BucketErrorKind},
    catalog::{PackNumber, Stored},
    counts::PackMetrics,
};
use crate::store::BoxFuture;

/// How long a read waits for others to go with it: little beside what any object store takes.
const GATHER: Duration = Duration::from_millis(1);
/// Bytes between two blocks that are read and thrown away rather than asked for around: what a store
/// delivers in a few milliseconds.
pub(super) const GAP_BYTES_MAX: u64 = 256 << 10;
/// The most bytes asked for in one request, unless one block is larger.
pub const RUN_BYTES_MAX: u64 = 4 << 20;
/// Requests under way at once: with the size of each, what reads hold of memory.
const RUNS_MAX: usize = 8;
/// Reads that wait; more are refused.
pub(super) const QUEUE_MAX: usize = 1024;

/// Why there are no bytes.
pub(super) type Refusal = BucketErrorKind;

/// A block that somebody waits for.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) stored: Stored,
    pub(super) deadline: Instant,
    pub(super) done: oneshot::Sender<Result<Bytes, Refusal>>,
}

impl Request {
    fn range(&self) -> Range<u64> {
        let start = u64::from(self.stored.slot.offset);
        start..start + u64::from(self.stored.slot.stored)
    }
}

/// The task that reads. It ends when the store is dropped or closed.
#[derive(Debug)]
pub(super) struct Fetcher {
    bucket: Arc<Bucket>,
    queue: mpsc::Receiver<Request>,
    metrics: PackMetrics,
}

impl Fetcher {
    pub(super) fn new(bucket: Arc<Bucket>, metrics: PackMetrics) -> (mpsc::Sender<Request>, Self) {
        let (ask, queue) = mpsc::channel(QUEUE_MAX);
        (ask, Self { bucket, queue, metrics })
    }

    /// Reads what is asked for until nobody can ask any more.
    pub(super) async fn run(mut self) {
        let mut running: FuturesUnordered<BoxFuture<'static, ()>> = FuturesUnordered::new();
        let mut waiting: Vec<Request> = Vec::new();
        let mut start_at = Instant::now();
        loop {
            let may_start = !waiting.is_empty() && running.len() < RUNS_MAX;
            tokio::select! {
                biased;
                Some(()) = running.next() => {}
                () = sleep_until(start_at), if may_start => {
                    for run in self.cut(&mut waiting, RUNS_MAX - running.len()) {
                        running.push(Box::pin(fetch(Arc::clone(&self.bucket), run)));
                    }
                }
                request = self.queue.recv(), if waiting.len() < QUEUE_MAX => {
                    let Some(request) = request else { break };
                    if waiting.is_empty() {
                        start_at = Instant::now() + GATHER;
                    }
                    waiting.push(request);
                }
            }
        }
        while running.next().await.is_some() {}
    }

    /// Takes up to `most` runs of neighbours out of what waits, the longest waiting first.
    fn cut(&self, waiting: &mut Vec<Request>, most: usize) -> Vec<Vec<Request>> {
        let now = Instant::now();
        waiting.retain(|request| !request.done.is_closed());
        let late = waiting.extract_if(.., |request| request.deadline <= now);
        for request in late {
            // Whoever asked may have gone.
            drop(request.done.send(Err(BucketErrorKind::Timeout)));
        }
        let mut runs = Vec::new();
        while runs.len() < most
            && let Some(first) = waiting.first()
        {
            let run = neighbours(waiting, first.stored.number, first.range());
            self.metrics.read_runs.inc();
            self.metrics.read_run_blocks.inc_by(u64::try_from(run.len()).unwrap_or(0));
            runs.push(run);
        }
        runs
    }
}

/// Takes out of `waiting` what lies in `pack` near `first`, in the order of its place.
fn neighbours(waiting: &mut Vec<Request>, pack: PackNumber, first: Range<u64>) -> Vec<Request> {
    let mut same: Vec<Request> =
        waiting.extract_if(.., |request| request.stored.number == pack).collect();
    same.sort_by_key(|request| request.range().start);
    let starts_at = same.iter().position(|request| request.range() == first).unwrap_or(0);
    let near = |run: &Range<u64>, next: &Range<u64>| {
        let (start, end) = (run.start.min(next.start), run.end.max(next.end));
        let gap = next.start.saturating_sub(run.end).max(run.start.saturating_sub(next.end));
        (gap <= GAP_BYTES_MAX && end - start <= RUN_BYTES_MAX).then_some(start..end)
    };
    let (mut run, mut from, mut to) = (first, starts_at, starts_at + 1);
    while let Some(next) = same.get(to).and_then(|request| near(&run, &request.range())) {
        (run, to) = (next, to + 1);
    }
    while let Some(before) = from.checked_sub(1)
        && let Some(next) = same.get(before).and_then(|request| near(&run, &request.range()))
    {
        (run, from) = (next, before);
    }
    let behind = same.split_off(to.min(same.len()));
    let taken = same.split_off(from);
    waiting.extend(same);
    waiting.extend(behind);
    taken
}

/// Reads a run and hands out its parts.
async fn fetch(bucket: Arc<Bucket>, run: Vec<Request>) {
    let (Some(first), Some(deadline)) = (run.first(), run.iter().map(|r| r.deadline).max()) else {
        return;
    };
    let start = first.range().start;
    let end = run.iter().map(|request| request.range().end).max().unwrap_or(start);
    let read = bucket.get(&first.stored.pack.name, start..end, deadline).await;
    for request in run {
        let range = request.range();
        let part = |bytes: &Bytes| {
            let from = usize::try_from(range.start - start).ok()?;
            let to = usize::try_from(range.end - start).ok()?;
            (to <= bytes.len()).then(|| bytes.slice(from..to))
        };
        let answer = match &read {
            Ok(bytes) => part(bytes).ok_or(BucketErrorKind::Damaged),
            Err(error) => Err(error.kind()),
        };
        // Whoever asked may have gone.
        drop(request.done.send(answer));
    }
}
