//! Replays a trace against a server process, as engines would, and checks every byte.
//!
//! The server is always another process behind a socket: either one that is running already, or one
//! that [`ServerProcess`] starts. Nothing here reaches into it.
//!
//! ```text
//! feeder -> bounded queue of each client -> Driver: lookup+lease, get and check, put, release
//!                                                -> Tally -> Report
//! killer -> kill -9, start again, audit of the ledger        (replay_disturbed only)
//! ```
//! In a cluster each client is an engine of its own, at its home.
//!
//! Invariants: with one client, requests run one after the other in trace order, which makes the
//! hits exactly reproducible. With several, a request goes to the client of its session, or round
//! robin where the trace knows no sessions; queues are short, so no client runs far ahead.
//!
//! A replay that finds a wrong byte, a broken promise or counts that do not add up goes on to the
//! end and lists them as [`Report::problems`]: one look should tell how bad it is. A call that fails
//! ends it, unless the server was killed on purpose.

mod audit;
mod crash;
mod disturbed;
mod driver;
mod killer;
mod ledger;
mod link;
mod pace;
pub mod payload;
mod process;
mod report;
mod tally;
mod trouble;
mod watcher;

use std::sync::Arc;

use indicatif::ProgressBar;
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    tier::Tier,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::Instant,
};

pub use self::{
    crash::{CrashOptions, Every},
    disturbed::{Disturbance, replay_disturbed},
    payload::Source,
    process::{NvmeSettings, ServerProcess, ServerSettings},
    report::{Opt, Report, Transfer, Verb},
    tally::{Latency, PutCounts, Tally},
};
use self::{
    driver::Driver,
    link::{Serving, Shared},
    report::Measured,
    watcher::Watcher,
};
use crate::{
    client::{ClientOptions, Stats},
    sim,
    trace::Trace,
};

/// The most clients of one replay: each has a connection and a buffer of one block.
pub const CLIENTS_MAX: usize = 1024;
/// Requests waiting for one client: enough to keep it busy, few enough to keep clients together.
const QUEUE_REQUESTS_MAX: usize = 2;

/// What to replay, and how.
#[derive(Debug, Clone)]
pub struct ReplayOptions {
    /// Address of the server, or of several of one cluster, with commas.
    pub endpoint: String,
    /// Whether no other client uses the server, so that its counts must be ours.
    pub alone: bool,
    /// Connections, each with its own session, 1 to [`CLIENTS_MAX`].
    pub clients: usize,
    /// Bytes of one block.
    pub block_bytes: u32,
    /// Where the bytes come from.
    pub source: Source,
    /// Whether puts ask to be acknowledged when they are on nvme.
    pub durable: bool,
    /// How its clients connect, and the way that their blocks take.
    pub client: ClientOptions,
}

/// Replays the whole of `trace`; `progress` counts block references.
///
/// # Errors
/// Any call that fails. What was replayed but is wrong is in [`Report::problems`] instead.
///
/// # Cancel safety
/// Safe: the sessions end with the connections.
pub async fn replay(
    trace: Arc<Trace>,
    options: &ReplayOptions,
    progress: ProgressBar,
) -> Result<Report> {
    let watcher = Watcher::connect(&options.endpoint, &options.client).await?;
    let before = watcher.stats().await?;
    let endpoint = Some(options.endpoint.clone());
    let (_server, serving) = watch::channel(Serving { generation: 0, endpoint });
    let shared = Shared {
        trace: Arc::clone(&trace),
        serving,
        block_bytes: options.block_bytes,
        source: options.source.clone(),
        durable: options.durable,
        client: options.client.clone(),
        disturbed: None,
        progress,
    };
    let started = Instant::now();
    let tally = run_clients(&shared, options.clients).await?;
    let elapsed = started.elapsed();
    let after = watcher.stats().await?;
    let opt = upper_bound(trace, capacity_blocks(&before, &after)).await?;
    let servers = watcher.servers();
    let measured = Measured { tally, elapsed, before, after, servers, opt, disturbance: None };
    Ok(Report::new(&shared.trace, options, &measured))
}

async fn run_clients(shared: &Shared, clients: usize) -> Result<Tally> {
    let mut drivers = JoinSet::new();
    let mut queues = Vec::with_capacity(clients);
    for number in 0..clients {
        let driver = Driver::connect(shared.clone(), number).await?;
        let (queue, requests) = mpsc::channel(QUEUE_REQUESTS_MAX);
        drivers.spawn(driver.run(requests));
        queues.push(queue);
    }
    feed(&shared.trace, &queues).await;
    drop(queues);
    let mut total = Tally::new()?;
    while let Some(joined) = drivers.join_next().await {
        let ended = |error| Error::new(ErrorKind::Internal, "replay requests").because(error);
        total.add(&joined.map_err(ended)??);
    }
    Ok(total)
}

/// Deals the requests in trace order; stops when a client has failed, whose error is found later.
async fn feed(trace: &Trace, queues: &[mpsc::Sender<usize>]) {
    for (position, request) in trace.requests().enumerate() {
        let turn = request.session.map_or(position, |session| session as usize);
        let Some(queue) = queues.get(turn % queues.len().max(1)) else { return };
        if queue.send(position).await.is_err() {
            return;
        }
    }
}

/// How many blocks the tiers can hold together; `None` if nothing had to leave the coldest of them.
fn capacity_blocks(before: &Stats, after: &Stats) -> Option<u64> {
    let tiers = || Tier::ALL.into_iter().filter_map(|tier| after.tier(tier));
    let coldest = tiers().next_back()?;
    let earlier = before.tiers.iter().find(|tier| tier.tier == coldest.tier);
    let evicted_before = earlier.map_or(0, |tier| tier.evicted_blocks);
    if coldest.evicted_blocks == evicted_before || coldest.blocks == 0 {
        return None;
    }
    let blocks = tiers().map(|tier| {
        if tier.capacity_bytes == 0 {
            // It has no bound of its own: what it holds is what it was let have.
            return tier.blocks;
        }
        let slot_bytes = (tier.used_bytes / tier.blocks.max(1)).max(1);
        tier.capacity_bytes / slot_bytes
    });
    Some(blocks.sum())
}

/// What the best policy would have hit; computed on a thread of its own, because it takes seconds.
async fn upper_bound(trace: Arc<Trace>, capacity_blocks: Option<u64>) -> Result<Opt> {
    let hits = tokio::task::spawn_blocking(move || match capacity_blocks {
        None => sim::unbounded_hits(&trace),
        Some(blocks) => sim::opt_hits(&trace, u32::try_from(blocks).unwrap_or(u32::MAX)),
    });
    let failed = |error| Error::new(ErrorKind::Internal, "compute the upper bound").because(error);
    Ok(Opt { capacity_blocks, hits: hits.await.map_err(failed)? })
}
