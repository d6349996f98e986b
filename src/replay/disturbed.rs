//! A replay whose server is killed with SIGKILL now and then, while requests are under way, and has to
//! come back with everything that it had acknowledged as durable and nothing of what it had
//! acknowledged as removed.

use std::{fmt, sync::Arc};

use indicatif::ProgressBar;
use kvstrata_tiers::{error::Result, tier::Tier};
use serde::Serialize;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    CrashOptions, ReplayOptions, Report, ServerProcess,
    audit::audit,
    crash::{Removals, Schedule},
    killer::{Killed, Killer, ask},
    ledger::Ledger,
    link::{Disturbed, Serving, Shared},
    pace::{Pace, WINDOW_REQUESTS},
    report::Measured,
    run_clients,
    tally::Tally,
    upper_bound,
};
use crate::{
    client::Stats,
    numbers::{count, percent, time},
    sim::ratio,
    trace::Trace,
};

/// The ledger's name in the server's directory.
const LEDGER: &str = "ledger";
/// What a record takes on nvme besides its payload, at most, in bytes: its header, and the rest of the
/// last page.
const RECORD_OVERHEAD_BYTES: u64 = 2 * 4096;
/// A tier in which all blocks of a trace take less than this share, in percent, has no reason to
/// evict: the rest is for open segments and for what was removed or written twice.
const SAFE_PERCENT: u64 = 60;

/// What came of the kills of a replay.
#[derive(Debug, Clone, Serialize)]
pub struct Disturbance {
    /// What all choices followed from.
    pub seed: u64,
    /// How often the server was killed, and started again.
    pub kills: u64,
    /// Starts after a kill that were killed too, somewhere on the way to being ready.
    pub interrupted_starts: u64,
    /// Half of the starts took no longer from the process's start until it was ready, in microseconds.
    pub recovery_p50_us: u64,
    /// 99 of 100 starts took no longer.
    pub recovery_p99_us: u64,
    /// The longest start.
    pub recovery_max_us: u64,
    /// Requests that were under way at a kill and were repeated.
    pub repeated_requests: u64,
    /// Requests before and after each kill that the next two look at, at most.
    pub window_requests: usize,
    /// Hits among the references of the last requests before kills.
    pub hit_ratio_before: f64,
    /// Hits among the references of the first requests after kills.
    pub hit_ratio_after: f64,
    /// Blocks removed on purpose.
    pub removed_blocks: u64,
    /// Blocks acknowledged as durable, at the end.
    pub durable_blocks: u64,
    /// Durable blocks asked for after restarts and at the end.
    pub durable_checked: u64,
    /// Of these, not found or not brought.
    pub lost_blocks: u64,
    /// Removed blocks asked for after restarts and at the end.
    pub removed_checked: u64,
    /// Of these, found or brought.
    pub resurrected_blocks: u64,
    /// Bytes that were wrong when these were asked for.
    pub audit_wrong_bytes: u64,
    /// Whether all durable blocks were asked for at the end; not if the tier may have evicted some.
    pub all_durable_checked: bool,
}

/// Replays the whole of `trace` on `server`, which is killed and started again as `crash` says.
///
/// # Errors
/// Any call that fails while the server should be running, and a server that does not start again.
/// What was replayed but is wrong is in [`Report::problems`] instead.
///
/// # Cancel safety
/// Safe: the sessions end with the connections; the server may be killed and not started again.
pub async fn replay_disturbed(
    trace: Arc<Trace>,
    options: &ReplayOptions,
    crash: &CrashOptions,
    server: &mut ServerProcess,
    progress: ProgressBar,
) -> Result<Report> {
    let disturbed = Disturbed {
        ledger: Ledger::open(&server.directory().join(LEDGER))?,
        pace: Arc::new(Pace::new()),
        removals: Removals::new(crash),
    };
    let endpoint = Some(server.endpoint().to_owned());
    let (sender, serving) = watch::channel(Serving { generation: 0, endpoint });
    let shared = Shared {
        trace: Arc::clone(&trace),
        serving,
        block_bytes: options.block_bytes,
        source: options.source.clone(),
        durable: options.durable,
        client: options.client.clone(),
        disturbed: Some(disturbed.clone()),
        progress,
    };
    let roomy = fits(&shared, &ask(server.endpoint(), &options.client).await?);
    let killer = Killer {
        server,
        shared: shared.clone(),
        disturbed: disturbed.clone(),
        schedule: Schedule::new(crash),
        serving: sender,
        roomy,
        killed: Killed::new()?,
    };
    let started = Instant::now();
    let stop = CancellationToken::new();
    let clients = async {
        let tally = run_clients(&shared, options.clients).await?;
        stop.cancel();
        Ok(tally)
    };
    let (tally, mut killed) = tokio::try_join!(clients, killer.run(stop.clone()))?;
    let elapsed = started.elapsed();
    let all = roomy && killed.counted.evicted_nvme == 0;
    let after = audit_all(&shared, &disturbed, &mut killed, all).await?;
    let disturbance = Disturbance::new(crash, &tally, &killed, &disturbed, all);
    let measured = Measured {
        tally,
        elapsed,
        before: Stats::default(),
        after: with_counts(after, &killed),
        opt: upper_bound(trace, None).await?,
        servers: 1,
        disturbance: Some(disturbance),
    };
    Ok(Report::new(&shared.trace, options, &measured))
}

/// Asks the last server for everything that was removed, and with `all` for everything durable;
/// returns its stats.
async fn audit_all(
    shared: &Shared,
    disturbed: &Disturbed,
    killed: &mut Killed,
    all: bool,
) -> Result<Stats> {
    let serving = shared.serving.borrow().clone();
    let after = ask(serving.endpoint.as_deref().unwrap_or_default(), &shared.client).await?;
    let mut claims = disturbed.ledger.claims();
    if !all {
        claims.kept.clear();
    }
    audit(shared, serving, &claims, &mut killed.findings).await?;
    Ok(after)
}

/// Whether nvme has room for all blocks of the trace, with some to spare.
fn fits(shared: &Shared, stats: &Stats) -> bool {
    let record = u64::from(shared.block_bytes) + RECORD_OVERHEAD_BYTES;
    let needed = u64::from(shared.trace.blocks_unique()).saturating_mul(record);
    let capacity = stats.tier(Tier::Nvme).map_or(0, |tier| tier.capacity_bytes);
    needed <= capacity / 100 * SAFE_PERCENT
}

/// The last server's stats with what all servers counted.
fn with_counts(mut stats: Stats, killed: &Killed) -> Stats {
    for tier in &mut stats.tiers {
        tier.evicted_blocks = 0;
    }
    if let Some(first) = stats.tiers.first_mut() {
        first.evicted_blocks = killed.counted.evicted;
    }
    stats.corrupt = killed.counted.corrupt;
    stats
}

impl Disturbance {
    fn new(
        crash: &CrashOptions,
        tally: &Tally,
        killed: &Killed,
        disturbed: &Disturbed,
        all_durable_checked: bool,
    ) -> Self {
        let (before, after) = disturbed.pace.windows();
        let findings = killed.findings;
        Self {
            seed: crash.seed,
            kills: killed.kills,
            interrupted_starts: killed.interrupted,
            recovery_p50_us: killed.recovery_us(0.5),
            recovery_p99_us: killed.recovery_us(0.99),
            recovery_max_us: killed.recovery_max_us(),
            repeated_requests: tally.repeated,
            window_requests: WINDOW_REQUESTS,
            hit_ratio_before: ratio(before.hits, before.references),
            hit_ratio_after: ratio(after.hits, after.references),
            removed_blocks: tally.removed,
            durable_blocks: disturbed.ledger.claims().kept.len() as u64,
            durable_checked: findings.kept_checked,
            lost_blocks: findings.lost,
            removed_checked: findings.removed_checked,
            resurrected_blocks: findings.resurrected,
            audit_wrong_bytes: findings.wrong_bytes,
            all_durable_checked,
        }
    }
}

impl fmt::Display for Disturbance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nkilled {} time{} (seed {}); ready again after {} (p50), {} (p99), {} (max)",
            count(self.kills),
            if self.kills == 1 { "" } else { "s" },
            self.seed,
            time(self.recovery_p50_us),
            time(self.recovery_p99_us),
            time(self.recovery_max_us),
        )?;
        writeln!(
            f,
            "  hits in the last {} requests before a kill {}, in the first {} after it {}",
            self.window_requests,
            percent(self.hit_ratio_before),
            self.window_requests,
            percent(self.hit_ratio_after),
        )?;
        for (name, number) in [
            ("starts killed too", self.interrupted_starts),
            ("repeated requests", self.repeated_requests),
            ("durable blocks", self.durable_blocks),
            ("durable, asked for", self.durable_checked),
            ("durable, lost", self.lost_blocks),
            ("removed on purpose", self.removed_blocks),
            ("removed, asked for", self.removed_checked),
            ("removed, back again", self.resurrected_blocks),
        ] {
            writeln!(f, "{name:<20}{:>16}", count(number))?;
        }
        if !self.all_durable_checked {
            writeln!(f, "  nvme may have evicted: at the end no durable block was asked for")?;
        }
        Ok(())
    }
}
