//! Replays a trace against a server process, as engines would, and checks every byte.
//!
//! The server is always another process behind a socket: either one that is running already, or one
//! that [`ServerProcess`] starts. Nothing here reaches into it.
//!
//! ```text
//! feeder -> bounded queue of each client -> Driver: lookup+lease, get and check, put, release
//!                                                -> Tally -> Report
//! ```
//! Invariants: with one client, requests run one after the other in trace order, which makes the
//! hits exactly reproducible. With several, a request goes to the client of its session, or round
//! robin where the trace knows no sessions; queues are short, so no client runs far ahead.
//!
//! A replay that finds a wrong byte, a broken promise or counts that do not add up goes on to the
//! end and lists them as [`Report::problems`]: one look should tell how bad it is. A call that fails
//! ends it.

mod driver;
pub mod payload;
mod process;
mod report;
mod tally;

use std::sync::Arc;

use indicatif::ProgressBar;
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    tier::Tier,
};
use tokio::{sync::mpsc, task::JoinSet, time::Instant};

use self::{
    driver::{Driver, Shared},
    report::Measured,
};
pub use self::{
    payload::Source,
    process::{ServerProcess, ServerSettings},
    report::{Opt, Report, Transfer, Verb},
    tally::{Latency, PutCounts, Tally},
};
use crate::{
    client::{Client, ClientOptions, Stats},
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
    /// Address of the server.
    pub endpoint: String,
    /// Whether no other client uses the server, so that its counts must be ours.
    pub alone: bool,
    /// Connections, each with its own session, 1 to [`CLIENTS_MAX`].
    pub clients: usize,
    /// Bytes of one block.
    pub block_bytes: u32,
    /// Where the bytes come from.
    pub source: Source,
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
    let watcher = Client::connect(&options.endpoint, ClientOptions::default()).await?;
    let before = watcher.stats().await?;
    let shared = Shared {
        trace: Arc::clone(&trace),
        endpoint: options.endpoint.clone(),
        block_bytes: options.block_bytes,
        source: options.source.clone(),
        progress,
    };
    let started = Instant::now();
    let tally = run_clients(&shared, options.clients).await?;
    let elapsed = started.elapsed();
    let after = watcher.stats().await?;
    let opt = upper_bound(trace, capacity_blocks(&before, &after)).await?;
    let measured = Measured { tally, elapsed, before, after, opt };
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

/// How many blocks dram can hold; `None` if nothing had to leave it.
fn capacity_blocks(before: &Stats, after: &Stats) -> Option<u64> {
    let dram = after.tier(Tier::Dram)?;
    let evicted_before = before.tier(Tier::Dram).map_or(0, |tier| tier.evicted_blocks);
    if dram.evicted_blocks == evicted_before || dram.blocks == 0 {
        return None;
    }
    let slot_bytes = (dram.used_bytes / dram.blocks).max(1);
    Some(dram.capacity_bytes / slot_bytes)
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
