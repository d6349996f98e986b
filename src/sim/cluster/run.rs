//! The run of a trace through a cluster, event by event.
//!
//! ```text
//! arrives -> routed -> loads from the tiers -> ready -> waits for the engine and a slot
//!         -> prefills what is missing -> first token; its blocks are stored -> decodes -> last token
//! ```
//! The requests of a session follow one another: one that is due before the last token of the one before it
//! arrives with that, because its prompt has the answer in it. Requests without a session arrive when
//! they are due.
//!
//! Loads begin when a request is routed, and keep no engine from working. An engine prefills one prompt
//! at a time, those that are ready in their order. What the device has of a prompt when it is routed is
//! used then, and stays for it.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, VecDeque},
};

use kvstrata_tiers::{error::Result, tier::Tier};

use super::{
    Outcome,
    extents::{Extents, part},
    router::{Mode, Prompt, Router},
    setup::{Loading, Setup},
    tiers::{Source, Tiers, first},
};
use crate::{
    score::{self, Candidate, Settings},
    sim::spread::spread,
    trace::{Request, Trace},
};

/// A request on its way through a worker.
#[derive(Debug, Clone, Copy)]
struct Job {
    request: usize,
    worker: u32,
    arrived_ms: f64,
    blocks: u32,
    /// Leading blocks on the device when it was routed.
    device_blocks: u32,
    /// Blocks loaded behind them.
    loaded_blocks: u32,
    decode_ms: f64,
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Ready(Job),
    FirstToken(Job),
    LastToken(Job),
}

/// An event in the queue: the earliest first, then the one that was planned first.
#[derive(Debug)]
struct Due {
    at_ms: f64,
    number: u64,
    event: Event,
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at_ms.total_cmp(&other.at_ms).then(self.number.cmp(&other.number))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}

/// An engine.
#[derive(Debug)]
struct Worker {
    device: Extents,
    ready: VecDeque<Job>,
    prefilling: bool,
    /// Requests that have a slot.
    running: u32,
}

/// A session, whose requests follow one another.
#[derive(Debug, Clone, Default)]
struct Session {
    /// One of its requests is under way.
    busy: bool,
    /// Those that are due.
    due: VecDeque<usize>,
}

/// Requests between two calls of `progress`.
const PROGRESS_EVERY: usize = 64;

/// Runs `trace` through a cluster whose router works in `mode`. `progress` is called with the requests
/// that have arrived since its last call. Equal arguments give equal outcomes.
///
/// # Errors
/// `Invalid` if the setup has something out of range.
///
/// # Blocking
/// Computes for seconds: see docs/simulate.md.
pub fn run(
    trace: &Trace,
    setup: &Setup,
    mode: Mode,
    progress: &mut dyn FnMut(usize),
) -> Result<Outcome> {
    setup.validate()?;
    let mut cluster = Cluster::new(trace, setup, mode);
    let start_ms = trace.request(0).map_or(0, |request| request.timestamp_ms);
    for (number, request) in trace.requests().enumerate() {
        #[expect(clippy::cast_precision_loss, reason = "milliseconds of a trace, below 2^53")]
        let now_ms = request.timestamp_ms.saturating_sub(start_ms) as f64 / setup.speedup;
        cluster.until(now_ms);
        cluster.due(number, &request, now_ms);
        if (number + 1).is_multiple_of(PROGRESS_EVERY) {
            progress(PROGRESS_EVERY);
        }
    }
    cluster.until(f64::INFINITY);
    progress(trace.len() % PROGRESS_EVERY);
    cluster.outcome.first_token_ms.sort_by(f64::total_cmp);
    Ok(cluster.outcome)
}

/// Runs `trace` through each of `cells` and returns the outcomes in their order. `progress` is called from
/// any thread with the requests that have arrived since its last call.
///
/// # Errors
/// As [`run`].
///
/// # Blocking
/// Computes on up to 16 threads until all are done: minutes for a large trace.
pub fn compare(
    trace: &Trace,
    cells: &[(Setup, Mode)],
    progress: &(dyn Fn(usize) + Sync),
) -> Result<Vec<Outcome>> {
    spread(cells, &|(setup, mode)| run(trace, setup, *mode, &mut |done| progress(done)))?
        .into_iter()
        .collect()
}

struct Cluster<'a> {
    trace: &'a Trace,
    setup: &'a Setup,
    router: Router<'a>,
    tiers: Tiers<'a>,
    workers: Vec<Worker>,
    events: BinaryHeap<Reverse<Due>>,
    /// Events planned so far.
    planned: u64,
    sessions: Vec<Session>,
    outcome: Outcome,
}

impl<'a> Cluster<'a> {
    fn new(trace: &'a Trace, setup: &'a Setup, mode: Mode) -> Self {
        let worker = |_| Worker {
            device: Extents::new(setup.device_blocks),
            ready: VecDeque::new(),
            prefilling: false,
            running: 0,
        };
        let busy_ms = vec![0.0; setup.workers as usize];
        Self {
            trace,
            setup,
            router: Router::new(setup, mode),
            tiers: Tiers::new(setup),
            workers: (0..setup.workers).map(worker).collect(),
            events: BinaryHeap::new(),
            planned: 0,
            sessions: vec![Session::default(); trace.sessions() as usize],
            outcome: Outcome { busy_ms, ..Outcome::default() },
        }
    }

    fn plan(&mut self, at_ms: f64, event: Event) {
        self.planned += 1;
        self.events.push(Reverse(Due { at_ms, number: self.planned, event }));
    }

    /// Lets happen what is due up to `now_ms`.
    fn until(&mut self, now_ms: f64) {
        while self.events.peek().is_some_and(|Reverse(due)| due.at_ms <= now_ms) {
            let Some(Reverse(due)) = self.events.pop() else { return };
            match due.event {
                Event::Ready(job) => self.ready(job, due.at_ms),
                Event::FirstToken(job) => self.first_token(job, due.at_ms),
                Event::LastToken(job) => self.last_token(job, due.at_ms),
            }
        }
    }

    /// A request is due: it arrives if its session waits for nothing.
    fn due(&mut self, number: usize, request: &Request<'_>, now_ms: f64) {
        let session = request.session.and_then(|session| self.sessions.get_mut(session as usize));
        match session {
            Some(session) if session.busy => session.due.push_back(number),
            Some(session) => {
                session.busy = true;
                self.arrive(number, request, now_ms);
            }
            None => self.arrive(number, request, now_ms),
        }
    }

    /// Routes a request and begins to load for it.
    fn arrive(&mut self, number: usize, request: &Request<'_>, now_ms: f64) {
        let runs = request.runs();
        let blocks = request.blocks_count();
        let device_blocks: Vec<u32> =
            self.workers.iter().map(|worker| worker.device.prefix_blocks(runs)).collect();
        let found = self.tiers.find(runs);
        let prompt = Prompt {
            request: number,
            now_ms,
            blocks,
            device_blocks: &device_blocks,
            found: &found,
        };
        let chosen = self.router.route(&prompt, &self.tiers);
        let device = device_blocks.get(chosen as usize).copied().unwrap_or(0);

        let queues = self.tiers.queues(now_ms);
        let node = self.setup.node_of(chosen);
        let segments = self.tiers.plan(&found, node, device, &queues);
        let loaded = match self.setup.loading {
            Loading::All => segments.iter().map(|segment| segment.blocks).sum(),
            Loading::Paying => {
                let candidate = Candidate {
                    device_blocks: device,
                    decode_blocks: 0.0,
                    queue_ms: 0.0,
                    prefill: self.setup.prefill,
                    segments: &segments,
                };
                let settings = Settings { parallel_loads: true, ..Settings::default() };
                score::assess(blocks, &candidate, &settings).best_blocks
            }
        };
        for (segment, count) in first(&segments, loaded) {
            let source = Source::of(segment);
            let counts = match source.node == node {
                true => &mut self.outcome.local_blocks,
                false => &mut self.outcome.remote_blocks,
            };
            for (of, tier) in counts.iter_mut().zip(Tier::ALL) {
                *of += if tier == source.tier { u64::from(count) } else { 0 };
            }
        }
        let ready_ms = self.tiers.load(now_ms, runs, device, (&segments, loaded));
        if let Some(worker) = self.workers.get_mut(chosen as usize) {
            worker.device.use_runs(&part(runs, 0..device));
        }
        let job = Job {
            request: number,
            worker: chosen,
            arrived_ms: now_ms,
            blocks,
            device_blocks: device,
            loaded_blocks: loaded,
            decode_ms: f64::from(request.output_tokens) * self.setup.decode_token_ms,
        };
        self.plan(ready_ms, Event::Ready(job));
    }

    fn ready(&mut self, job: Job, now_ms: f64) {
        if let Some(worker) = self.workers.get_mut(job.worker as usize) {
            worker.ready.push_back(job);
            self.start(job.worker, now_ms);
        }
    }

    /// Begins to prefill the next prompt, if the engine and a slot are free.
    fn start(&mut self, number: u32, now_ms: f64) {
        let Some(worker) = self.workers.get_mut(number as usize) else { return };
        if worker.prefilling || worker.running >= self.setup.slots {
            return;
        }
        let Some(job) = worker.ready.pop_front() else { return };
        worker.prefilling = true;
        worker.running += 1;
        // Prompts that were before this one may have brought more of it.
        let runs = self.trace.request(job.request).map_or(&[][..], |request| request.runs());
        let on_device = worker.device.prefix_blocks(runs);
        let known = job.device_blocks.saturating_add(job.loaded_blocks);
        let from = known.max(on_device).min(job.blocks);
        let prefill_ms = self.setup.prefill.ms(from, job.blocks);
        self.outcome.asked_blocks += u64::from(job.blocks);
        self.outcome.device_blocks += u64::from(job.device_blocks + from.saturating_sub(known));
        self.outcome.computed_blocks += u64::from(job.blocks - from);
        if let Some(busy_ms) = self.outcome.busy_ms.get_mut(number as usize) {
            *busy_ms += prefill_ms;
        }
        self.plan(now_ms + prefill_ms, Event::FirstToken(job));
    }

    fn first_token(&mut self, job: Job, now_ms: f64) {
        let runs = self.trace.request(job.request).map_or(&[][..], |request| request.runs());
        if let Some(worker) = self.workers.get_mut(job.worker as usize) {
            worker.prefilling = false;
            worker.device.use_runs(runs);
        }
        self.tiers.store(self.setup.node_of(job.worker), runs);
        self.outcome.first_token_ms.push(now_ms - job.arrived_ms);
        self.router.first_token(job.worker, job.request, job.blocks, now_ms);
        self.plan(now_ms + job.decode_ms, Event::LastToken(job));
        self.start(job.worker, now_ms);
    }

    fn last_token(&mut self, job: Job, now_ms: f64) {
        if let Some(worker) = self.workers.get_mut(job.worker as usize) {
            worker.running = worker.running.saturating_sub(1);
        }
        self.router.last_token(job.worker, job.blocks);
        self.outcome.end_ms = self.outcome.end_ms.max(now_ms);
        self.start(job.worker, now_ms);
        self.next_of_session(job.request, now_ms);
    }

    /// The next request of the session of `request` arrives, if it is due.
    fn next_of_session(&mut self, request: usize, now_ms: f64) {
        let session = self.trace.request(request).and_then(|request| request.session);
        let session = session.and_then(|session| self.sessions.get_mut(session as usize));
        let Some(session) = session else { return };
        let next = session.due.pop_front();
        session.busy = next.is_some();
        if let Some(next) = next
            && let Some(request) = self.trace.request(next)
        {
            self.arrive(next, &request, now_ms);
        }
    }
}
