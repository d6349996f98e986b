//! The cleaner: keeps dram copied to nvme ahead of evictions.
//!
//! Blocks of a put are queued in chain order when its batch ends, and copied with a bound on blocks
//! and on bytes that are held for it. A queue that is full drops *demotions* and makes a *sweep* due:
//! when the queue is empty, the map is walked for resident blocks that nvme does not have.
//!
//! A tier in trouble is asked again after a while, with one block: nothing is lost by waiting but the
//! copy of what is evicted meanwhile. A tier that is short of its write budget turns down what nobody
//! has read; that is left for sweeps that take only what has been read since.

use std::{collections::VecDeque, pin::pin, sync::Arc};

use futures_util::{StreamExt, stream::FuturesUnordered};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{Duration, Instant, sleep_until, timeout_at},
};

use super::{
    Shared,
    demote::{Candidate, Demotion, Job},
    mood::Mood,
};
use crate::{
    admission::Admission,
    block::BlockKey,
    error::Result,
    limits::{
        CLEANER_BLOCKS_MAX, CLEANER_BYTES_MAX, CLEANER_DRAM_DIVISOR, CLEANER_JOBS_MAX,
        CLEANER_QUEUE_MAX, SHARDS,
    },
    metrics::Undemoted,
    store::{BlockStore, BoxFuture, Urgency},
    tier::Tier,
};

/// Least time from the start of a sweep to that of the next one: a walk over the whole map.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// The same after a sweep that has left out what was not read: more of it is read only with time.
const SWEEP_INTERVAL_REUSED: Duration = Duration::from_secs(30);
/// Entries of one step of a sweep: tens of microseconds under a shard's lock.
const SWEEP_PLACES: usize = 1024;
/// Steps without waiting for anything before others get a turn.
const STEPS_MAX: usize = 64;

/// What waits for the cleaner.
#[derive(Debug, Default)]
pub(crate) struct Cleaner {
    waiting: Mutex<Waiting>,
    /// Something was queued or became due.
    work: Notify,
    /// Nothing is under way and nothing can be begun now, or the cleaner has ended.
    settled: Notify,
    /// Where demotions that somebody waits for go; none while no cleaner runs.
    inbox: Mutex<Option<mpsc::Sender<Job>>>,
}

#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<BlockKey>,
    /// A sweep for such blocks is due.
    sweep: Option<Admission>,
    /// Somebody waits for all of it.
    hurry: bool,
}

impl Cleaner {
    /// Appends keys; returns how many did not find room.
    pub(super) fn queue(&self, keys: impl Iterator<Item = BlockKey>) -> u64 {
        let mut dropped = 0;
        let mut waiting = self.waiting.lock();
        for key in keys {
            if waiting.queue.len() < CLEANER_QUEUE_MAX {
                waiting.queue.push_back(key);
            } else {
                dropped += 1;
            }
        }
        if dropped > 0 {
            waiting.sweep = Some(Admission::All);
        }
        drop(waiting);
        self.work.notify_one();
        dropped
    }

    /// Makes a sweep due, or a looser one than was.
    pub(super) fn sweep_later(&self, admission: Admission) {
        let mut waiting = self.waiting.lock();
        waiting.sweep = waiting.sweep.max(Some(admission));
    }

    /// Blocks that are queued.
    pub(super) fn len(&self) -> usize {
        self.waiting.lock().queue.len()
    }

    pub(super) fn inbox(&self) -> Option<mpsc::Sender<Job>> {
        self.inbox.lock().clone()
    }

    /// Waits until nothing is under way and nothing can be begun.
    async fn settle(&self) {
        // Made first: what happens from here on is not missed.
        let settled = self.settled.notified();
        if self.inbox().is_none() {
            return;
        }
        self.waiting.lock().hurry = true;
        self.work.notify_one();
        settled.await;
    }
}

/// Closes the inbox when the cleaner ends, however it ends.
struct Open<'a>(&'a Cleaner);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        *self.0.inbox.lock() = None;
        self.0.settled.notify_waiters();
    }
}

/// What a demotion that has ended says: the bytes that it held, and for one of the cleaner's own
/// whether the block had been read and what became of it.
struct Done {
    bytes: u64,
    own: Option<(bool, Result<Demotion>)>,
}

/// A walk over the map.
struct Sweep {
    admission: Admission,
    shard: usize,
    place: usize,
    /// It has passed over blocks that were not read.
    left_out: bool,
}

/// What a step of the cleaner came to.
enum Step {
    /// There may be more to do at once.
    Went,
    /// Nothing to do now; perhaps then.
    Idle(Option<Instant>),
}

/// One run of the cleaner.
struct Run<'a> {
    shared: &'a Arc<Shared>,
    nvme: Option<Arc<dyn BlockStore>>,
    running: FuturesUnordered<BoxFuture<'static, Done>>,
    /// How many of those are the cleaner's own.
    own: usize,
    held_bytes: u64,
    held_bytes_max: u64,
    mood: Mood,
    sweep: Option<Sweep>,
    /// When the next sweep may start.
    sweep_from: Instant,
}

impl Shared {
    /// Demotes until `stop`, then finishes what it has begun.
    pub(super) async fn clean(self: &Arc<Self>, stop: impl Future<Output = ()>) {
        let (sender, mut inbox) = mpsc::channel(CLEANER_JOBS_MAX);
        *self.cleaner.inbox.lock() = Some(sender);
        let open = Open(&self.cleaner);
        let mut run = Run::new(self);
        let mut stop = pin!(stop);
        let mut awaited = false;
        loop {
            // Looked at before the queue: whoever waits has queued before.
            awaited |= run.hurry();
            let step = run.fill(&mut inbox);
            let (again, wake) = match step {
                Step::Went => (true, None),
                Step::Idle(wake) => (false, wake),
            };
            if awaited && !again && run.running.is_empty() {
                awaited = false;
                self.cleaner.settled.notify_waiters();
            }
            let has_room = run.has_room();
            tokio::select! {
                biased;
                () = &mut stop => break,
                Some(done) = run.running.next() => run.note(done),
                Some(job) = inbox.recv(), if has_room => run.begin(job),
                () = self.cleaner.work.notified(), if has_room && !again => {}
                () = tokio::task::yield_now(), if again => {}
                () = until(wake), if wake.is_some() => {}
            }
        }
        drop(open);
        // What waits in the inbox is told that there is no cleaner any more.
        drop(inbox);
        while run.running.next().await.is_some() {}
    }

    /// Waits until all that is queued is copied or cannot be now; returns how much is left of it.
    pub(super) async fn flush(&self, deadline: Instant) -> u64 {
        // Late or not, what is left says it.
        drop(timeout_at(deadline, self.cleaner.settle()).await);
        u64::try_from(self.cleaner.len()).unwrap_or(u64::MAX)
    }
}

async fn until(wake: Option<Instant>) {
    if let Some(wake) = wake {
        sleep_until(wake).await;
    }
}

impl<'a> Run<'a> {
    fn new(shared: &'a Arc<Shared>) -> Self {
        let share = shared.pool.capacity_bytes() / CLEANER_DRAM_DIVISOR;
        Self {
            shared,
            nvme: shared.store(Tier::Nvme).map(Arc::clone),
            running: FuturesUnordered::new(),
            own: 0,
            held_bytes: 0,
            held_bytes_max: share.min(CLEANER_BYTES_MAX),
            mood: Mood::default(),
            sweep: None,
            sweep_from: Instant::now(),
        }
    }

    /// Blocks are no larger than an extent, so that the bytes are exceeded by one at most.
    fn has_room(&self) -> bool {
        self.running.len() < CLEANER_BLOCKS_MAX && self.held_bytes < self.held_bytes_max
    }

    /// Whether somebody has begun to wait for all that there is to do; then a sweep need not wait.
    fn hurry(&mut self) -> bool {
        let hurry = std::mem::take(&mut self.shared.cleaner.waiting.lock().hurry);
        if hurry {
            self.sweep_from = Instant::now();
        }
        hurry
    }

    /// Begins what may begin: what somebody waits for, then what is queued.
    fn fill(&mut self, inbox: &mut mpsc::Receiver<Job>) -> Step {
        for _ in 0..STEPS_MAX {
            if !self.has_room() {
                return Step::Idle(None);
            }
            if let Ok(job) = inbox.try_recv() {
                self.begin(job);
                continue;
            }
            match self.step() {
                Step::Went => {}
                idle @ Step::Idle(_) => return idle,
            }
        }
        Step::Went
    }

    fn begin(&mut self, Job { bytes, work }: Job) {
        self.held_bytes = self.held_bytes.saturating_add(bytes);
        self.running.push(Box::pin(async move {
            work.await;
            Done { bytes, own: None }
        }));
    }

    /// Takes one step with what is queued, or with a sweep.
    fn step(&mut self) -> Step {
        let now = Instant::now();
        if let Some(until) = self.mood.paused_until(now) {
            return Step::Idle(Some(until));
        }
        // One block finds out whether the tier is well again.
        if self.mood.is_troubled() && self.own > 0 {
            return Step::Idle(None);
        }
        let Some(nvme) = self.nvme.clone() else { return Step::Idle(None) };
        let next = self.shared.cleaner.waiting.lock().queue.pop_front();
        match next {
            Some(key) => {
                self.demote(nvme, key, self.mood.admission(now));
                Step::Went
            }
            None => self.sweep(now),
        }
    }

    fn demote(&mut self, nvme: Arc<dyn BlockStore>, key: BlockKey, admission: Admission) {
        let shared = self.shared;
        let Some(namespace) = shared.namespaces.by_index(key.namespace) else { return };
        let at = shared.map.hashed(key.namespace, key.hash);
        let (bytes, reused) = match shared.candidate(Tier::Nvme, at) {
            Candidate::Resident { bytes, reused, due: true } => (bytes, reused),
            Candidate::Resident { due: false, .. } | Candidate::There => return,
            Candidate::Gone => return self.leave_out(Undemoted::Gone, None),
        };
        if !admission.admits(Urgency::Background, reused) {
            return self.leave_out(Undemoted::Budget, Some(Admission::Reused));
        }
        self.held_bytes = self.held_bytes.saturating_add(bytes);
        self.own += 1;
        let copied = Arc::clone(shared).copy_down(nvme, (namespace, at), Urgency::Background);
        self.running
            .push(Box::pin(async move { Done { bytes, own: Some((reused, copied.await)) } }));
    }

    fn leave_out(&self, why: Undemoted, sweep: Option<Admission>) {
        self.shared.metrics.undemoted(why).inc();
        if let Some(admission) = sweep {
            self.shared.cleaner.sweep_later(admission);
        }
    }

    /// Takes one step of the sweep, or begins one that is due.
    fn sweep(&mut self, now: Instant) -> Step {
        let Some(mut sweep) = self.sweep.take() else {
            let mut waiting = self.shared.cleaner.waiting.lock();
            if waiting.sweep.is_some() && now < self.sweep_from {
                return Step::Idle(Some(self.sweep_from));
            }
            let Some(admission) = waiting.sweep.take() else { return Step::Idle(None) };
            self.sweep = Some(Sweep { admission, shard: 0, place: 0, left_out: false });
            self.sweep_from = now + SWEEP_INTERVAL;
            return Step::Went;
        };
        let mut found = Vec::new();
        let next = self.shared.map.with_shard(sweep.shard, |shard| {
            shard.lacking(Tier::Nvme, sweep.place, SWEEP_PLACES, &mut found)
        });
        let admits = |reused| sweep.admission.admits(Urgency::Background, reused);
        sweep.left_out |= found.iter().any(|(_, reused)| !admits(*reused));
        let taken = found.iter().filter(|(_, reused)| admits(*reused)).map(|(key, _)| *key);
        self.shared.cleaner.waiting.lock().queue.extend(taken);
        match next.flatten() {
            Some(place) => sweep.place = place,
            None => (sweep.shard, sweep.place) = (sweep.shard + 1, 0),
        }
        if sweep.shard < SHARDS {
            self.sweep = Some(sweep);
        } else if sweep.left_out {
            // Some of them may be read later.
            self.sweep_from = now + SWEEP_INTERVAL_REUSED;
            self.shared.cleaner.sweep_later(Admission::Reused);
        }
        Step::Went
    }

    /// Takes note of a demotion that has ended.
    fn note(&mut self, done: Done) {
        self.held_bytes = self.held_bytes.saturating_sub(done.bytes);
        self.own -= usize::from(done.own.is_some());
        match done.own {
            None => {}
            Some((_, Ok(Demotion::Gone))) => self.leave_out(Undemoted::Gone, None),
            // The tier is well; another sweep would find the same again.
            Some((_, Ok(Demotion::OverQuota))) => self.leave_out(Undemoted::Quota, None),
            Some((_, Ok(Demotion::Copied | Demotion::There))) => self.mood.well(),
            Some((reused, Err(error))) => {
                let again = self.mood.trouble(&error, reused, Instant::now());
                self.leave_out(Undemoted::of(error.kind()), again);
            }
        }
    }
}
