//! Kills the server again and again while clients use it, starts it on what it left, and holds it to
//! its promises before clients may go on.

use std::time::Duration;

use kvstrata_tiers::{error::Result, tier::Tier};
use tokio::{sync::watch, time::sleep};
use tokio_util::sync::CancellationToken;
use tracing::debug;

use super::{
    audit::{Findings, audit},
    crash::{Kill, Schedule},
    ledger::Claims,
    link::{Disturbed, Serving, Shared},
    process::ServerProcess,
    tally::Latency,
};
use crate::client::{Client, ClientOptions, Stats};

/// Blocks of each claim that are asked for after each start. All are asked for at the end.
const SAMPLE_BLOCKS: usize = 256;

/// What the servers of one replay counted, as far as they could be asked before they were killed.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counted {
    /// Blocks evicted, on all tiers.
    pub(super) evicted: u64,
    /// Blocks evicted from nvme.
    pub(super) evicted_nvme: u64,
    /// Parts that failed verification.
    pub(super) corrupt: u64,
}

/// What came of all kills.
#[derive(Debug)]
pub(super) struct Killed {
    pub(super) kills: u64,
    /// Starts that were killed too.
    pub(super) interrupted: u64,
    /// Times from the start of a process until it was ready, one for each kill.
    pub(super) recovery: Latency,
    pub(super) findings: Findings,
    pub(super) counted: Counted,
}

/// The one who kills.
pub(super) struct Killer<'a> {
    pub(super) server: &'a mut ServerProcess,
    pub(super) shared: Shared,
    pub(super) disturbed: Disturbed,
    pub(super) schedule: Schedule,
    pub(super) serving: watch::Sender<Serving>,
    /// Whether nvme has room for everything, so that what is durable cannot have been evicted.
    pub(super) roomy: bool,
    pub(super) killed: Killed,
}

impl Killer<'_> {
    /// Kills and starts again until `stop`, which is heeded only while the server runs.
    pub(super) async fn run(mut self, stop: CancellationToken) -> Result<Killed> {
        loop {
            let kill = self.schedule.next();
            let target = self.disturbed.pace.finished() + kill.after_requests;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = self.disturbed.pace.reach(target) => {}
                error = self.server.ended() => return Err(error),
            }
            self.kill(kill).await?;
            self.start_again(kill).await?;
        }
        let endpoint = self.server.endpoint().to_owned();
        self.killed.counted.add(&ask(&endpoint, &self.shared.client).await?);
        Ok(self.killed)
    }

    async fn kill(&mut self, kill: Kill) -> Result<()> {
        // Asked a moment before, because a killed process answers nothing.
        let stats = ask(self.server.endpoint(), &self.shared.client).await?;
        let wait = kill.delay(self.disturbed.pace.mean());
        sleep(wait).await;
        self.server.kill().await?;
        self.serving.send_modify(|serving| serving.endpoint = None);
        self.disturbed.pace.killed();
        self.killed.counted.add(&stats);
        self.killed.kills += 1;
        debug!(kills = self.killed.kills, "server killed");
        Ok(())
    }

    async fn start_again(&mut self, kill: Kill) -> Result<()> {
        if let Some(after) = kill.interrupt(self.killed.recovery.quantile(0.5)) {
            self.server.start_and_kill(after).await?;
            self.killed.interrupted += 1;
        }
        let took = self.server.start_again().await?;
        self.killed.recovery.record(took);
        let generation = self.serving.borrow().generation + 1;
        let endpoint = Some(self.server.endpoint().to_owned());
        let serving = Serving { generation, endpoint };
        // All clients wait for what is sent below, so nobody changes what is audited.
        let claims = self.sample();
        let audited = audit(&self.shared, serving.clone(), &claims, &mut self.killed.findings);
        if let Err(error) = audited.await {
            return Err(self.server.explain(error).await);
        }
        self.serving.send_replace(serving);
        self.disturbed.pace.serves();
        Ok(())
    }

    fn sample(&mut self) -> Claims {
        let mut claims = self.disturbed.ledger.claims();
        if !self.roomy || self.killed.counted.evicted_nvme > 0 {
            claims.kept.clear();
        }
        Claims {
            kept: self.schedule.sample(claims.kept, SAMPLE_BLOCKS),
            removed: self.schedule.sample(claims.removed, SAMPLE_BLOCKS),
        }
    }
}

/// What the server at `endpoint` counted.
pub(super) async fn ask(endpoint: &str, options: &ClientOptions) -> Result<Stats> {
    Client::connect(endpoint, options.clone()).await?.stats().await
}

impl Counted {
    fn add(&mut self, stats: &Stats) {
        self.evicted += stats.tiers.iter().map(|tier| tier.evicted_blocks).sum::<u64>();
        self.evicted_nvme += stats.tier(Tier::Nvme).map_or(0, |tier| tier.evicted_blocks);
        self.corrupt += stats.corrupt;
    }
}

impl Killed {
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            kills: 0,
            interrupted: 0,
            recovery: Latency::new()?,
            findings: Findings::default(),
            counted: Counted::default(),
        })
    }

    /// The time within which this share of the starts ended, in microseconds.
    pub(super) fn recovery_us(&self, share: f64) -> u64 {
        micros(self.recovery.quantile(share))
    }

    pub(super) fn recovery_max_us(&self) -> u64 {
        micros(self.recovery.max())
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
