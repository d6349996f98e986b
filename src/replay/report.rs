//! What a replay found: numbers for machines, a table for people, and everything that is wrong.

use std::{fmt, time::Duration};

use serde::Serialize;

use super::{
    Disturbance, ReplayOptions,
    tally::{Latency, PutCounts, Tally},
    trouble::problems,
};
use crate::{
    client::Stats,
    numbers::{count, gib_per_s, percent, time},
    sim::ratio,
    trace::Trace,
};

/// Times of one verb, in microseconds.
#[derive(Debug, Clone, Serialize)]
pub struct Verb {
    /// Calls.
    pub calls: u64,
    /// Half of them took no longer.
    pub p50_us: u64,
    /// 99 of 100 took no longer.
    pub p99_us: u64,
    /// The longest.
    pub max_us: u64,
}

/// What was moved by one verb, and how fast while it was being moved: all clients together, not
/// counting the time that they spent on other things.
#[derive(Debug, Clone, Serialize)]
pub struct Transfer {
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
    /// Blocks per second.
    pub blocks_per_s: f64,
    /// GiB per second.
    pub gib_per_s: f64,
}

/// The hits of Belady's policy with bypass, which knows the future.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Opt {
    /// Blocks that the tiers can hold together; absent when nothing had to leave the coldest.
    pub capacity_blocks: Option<u64>,
    /// Hits.
    pub hits: u64,
}

/// The result of a replay.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// Name of the trace.
    pub trace: String,
    /// Requests replayed.
    pub requests: u64,
    /// Block references of these requests.
    pub references: u64,
    /// Distinct blocks.
    pub blocks_unique: u32,
    /// Bytes of one block.
    pub block_bytes: u32,
    /// Clients.
    pub clients: usize,
    /// Seconds from the first request to the last answer.
    pub elapsed_s: f64,
    /// References found in dram.
    pub hits_dram: u64,
    /// References found on nvme.
    pub hits_nvme: u64,
    /// References found in the object store.
    pub hits_object: u64,
    /// Of these three, on the node that was asked.
    pub hits_local: u64,
    /// Of these three, on other nodes.
    pub hits_remote: u64,
    /// References whose put was in flight.
    pub pending: u64,
    /// References that were not found.
    pub misses: u64,
    /// Hits, all tiers together, as a share of the references.
    pub hit_ratio: f64,
    /// The upper bound at the same capacity.
    pub opt: Opt,
    /// Hits as a share of the upper bound's.
    pub ratio_to_opt: f64,
    /// Times of lookups.
    pub lookup: Verb,
    /// Hashes in the longest lookup.
    pub lookup_hashes_max: u64,
    /// Times of gets.
    pub get: Verb,
    /// What gets moved.
    pub got: Transfer,
    /// Of these blocks, those that came from other nodes than the client was at.
    pub remote_blocks: u64,
    /// Times of puts.
    pub put: Verb,
    /// What puts moved.
    pub sent: Transfer,
    /// What became of the blocks offered.
    pub put_outcomes: PutCounts,
    /// Bytes compared with what they must be.
    pub checked_bytes: u64,
    /// Bytes that differed.
    pub wrong_bytes: u64,
    /// Blocks that failed verification at the client.
    pub corrupt_blocks: u64,
    /// Blocks promised under a lease and not delivered.
    pub lease_failures: u64,
    /// Blocks found, not covered by a lease, and gone when they were read.
    pub gone_blocks: u64,
    /// Blocks that left a tier meanwhile.
    pub evicted_blocks: u64,
    /// What came of the kills; absent if the server was left alone.
    pub disturbance: Option<Disturbance>,
    /// Everything that is wrong, in words; empty is success.
    pub problems: Vec<String>,
}

/// What a replay measured.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) tally: Tally,
    pub(super) elapsed: Duration,
    pub(super) before: Stats,
    pub(super) after: Stats,
    /// Servers that blocks may be at.
    pub(super) servers: usize,
    pub(super) opt: Opt,
    pub(super) disturbance: Option<Disturbance>,
}

impl Report {
    pub(super) fn new(trace: &Trace, options: &ReplayOptions, measured: &Measured) -> Self {
        let Measured { tally, elapsed, opt, .. } = measured;
        let [hits_dram, hits_nvme, hits_object, pending, misses] = tally.looked_up;
        let got = tally.got;
        Self {
            trace: trace.name().to_owned(),
            requests: tally.requests,
            references: tally.references,
            blocks_unique: trace.blocks_unique(),
            block_bytes: options.block_bytes,
            clients: options.clients,
            elapsed_s: elapsed.as_secs_f64(),
            hits_dram,
            hits_nvme,
            hits_object,
            hits_local: tally.hits().saturating_sub(tally.remote),
            hits_remote: tally.remote,
            pending,
            misses,
            hit_ratio: ratio(tally.hits(), tally.references),
            opt: *opt,
            ratio_to_opt: ratio(tally.hits(), opt.hits),
            lookup: Verb::of(&tally.lookup),
            lookup_hashes_max: tally.lookup_hashes_max,
            get: Verb::of(&tally.get),
            remote_blocks: got.remote,
            got: Transfer::of(got.blocks(), got.bytes, tally.get.busy(), options.clients),
            put: Verb::of(&tally.put_latency),
            sent: Transfer::of(
                tally.put.stored,
                tally.put_bytes,
                tally.put_latency.busy(),
                options.clients,
            ),
            put_outcomes: tally.put,
            checked_bytes: tally.checked_bytes,
            wrong_bytes: tally.wrong_bytes,
            corrupt_blocks: got.corrupt_here,
            lease_failures: tally.lease_failures,
            gone_blocks: tally.gone,
            evicted_blocks: measured.left(),
            disturbance: measured.disturbance.clone(),
            problems: problems(trace, options, measured),
        }
    }
}

impl Measured {
    /// Blocks that have left a tier meanwhile, as the servers count. They do not tell that to a tenant, of whom those
    /// have left that it has stored and that are not among its blocks now.
    pub(super) fn left(&self) -> u64 {
        let Self { tally, before, after, .. } = self;
        if after.tiers.is_empty() {
            let kept = after.index_blocks.saturating_sub(before.index_blocks);
            return tally.put.stored.saturating_sub(kept);
        }
        let evicted =
            |stats: &Stats| stats.tiers.iter().map(|tier| tier.evicted_blocks).sum::<u64>();
        evicted(after).saturating_sub(evicted(before))
    }
}

impl Verb {
    fn of(latency: &Latency) -> Self {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        Self {
            calls: latency.calls(),
            p50_us: micros(latency.quantile(0.5)),
            p99_us: micros(latency.quantile(0.99)),
            max_us: micros(latency.max()),
        }
    }
}

impl Transfer {
    #[expect(clippy::cast_precision_loss, reason = "a rate for people, far below 2^53")]
    fn of(blocks: u64, bytes: u64, busy: Duration, clients: usize) -> Self {
        let seconds = busy.as_secs_f64() / clients.max(1) as f64;
        let rate = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
        let gib = bytes as f64 / (1_u64 << 30) as f64;
        Self { blocks, bytes, blocks_per_s: rate(blocks as f64), gib_per_s: rate(gib) }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{}: {} requests, {} block references, {} distinct blocks of {} in {:.1} s by {} client{}",
            self.trace,
            count(self.requests),
            count(self.references),
            count(self.blocks_unique.into()),
            bytesize::ByteSize(self.block_bytes.into()),
            self.elapsed_s,
            self.clients,
            if self.clients == 1 { "" } else { "s" },
        )?;
        self.write_hits(f)?;
        self.write_speed(f)?;
        self.write_checks(f)
    }
}

impl Report {
    fn write_hits(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{:<22}{:>14}{:>10}", "found by lookups", "blocks", "share")?;
        for (name, blocks) in [
            ("dram", self.hits_dram),
            ("nvme", self.hits_nvme),
            ("object", self.hits_object),
            ("pending", self.pending),
            ("miss", self.misses),
            ("all", self.references),
            ("hits on the node asked", self.hits_local),
            ("hits on other nodes", self.hits_remote),
        ] {
            let share = percent(ratio(blocks, self.references));
            writeln!(f, "  {name:<22}{:>12}{share:>10}", count(blocks))?;
        }
        let capacity = match self.opt.capacity_blocks {
            Some(blocks) => format!("{} blocks", count(blocks)),
            None => "everything".to_owned(),
        };
        writeln!(
            f,
            "  {} of the upper bound for tiers that hold {capacity} (OPT: {})",
            percent(self.ratio_to_opt),
            count(self.opt.hits)
        )?;
        // The upper bound knows of no kills.
        match &self.disturbance {
            Some(kills) if kills.repeated_requests > 0 && self.ratio_to_opt > 1.0 => writeln!(
                f,
                "  more than that: requests repeated after a kill found what they had put before it"
            ),
            _ => Ok(()),
        }
    }

    fn write_speed(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["calls", "p50", "p99", "max", "blocks/s", "GiB/s"];
        write!(f, "\n{:<10}", "verb")?;
        for name in head {
            write!(f, "{name:>11}")?;
        }
        writeln!(f)?;
        for (name, verb, transfer) in [
            ("lookup", &self.lookup, None),
            ("get", &self.get, Some(&self.got)),
            ("put", &self.put, Some(&self.sent)),
        ] {
            write!(f, "  {name:<8}{:>11}", count(verb.calls))?;
            for micros in [verb.p50_us, verb.p99_us, verb.max_us] {
                write!(f, "{:>11}", time(micros))?;
            }
            if let Some(transfer) = transfer {
                let blocks = format!("{:.0}", transfer.blocks_per_s);
                write!(f, "{blocks:>11}{:>11}", gib_per_s(transfer.gib_per_s))?;
            }
            writeln!(f)?;
        }
        writeln!(f, "  the longest lookup asked for {} blocks", count(self.lookup_hashes_max))
    }

    fn write_checks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let put = self.put_outcomes;
        writeln!(f)?;
        for (name, number) in [
            ("bytes checked", self.checked_bytes),
            ("wrong bytes", self.wrong_bytes),
            ("corrupt blocks", self.corrupt_blocks),
            ("lease failures", self.lease_failures),
            ("gone before the get", self.gone_blocks),
            ("stored", put.stored),
            ("duplicate", put.duplicate),
            ("duplicate_differs", put.duplicate_differs),
            ("pending elsewhere", put.pending),
            ("refused", put.refused),
            ("not durable", put.not_durable),
            ("evicted", self.evicted_blocks),
        ] {
            writeln!(f, "{name:<20}{:>16}", count(number))?;
        }
        if let Some(disturbance) = &self.disturbance {
            write!(f, "{disturbance}")?;
        }
        if self.problems.is_empty() {
            return writeln!(f, "\nOK: every byte is right and every count adds up");
        }
        writeln!(f, "\nFAILED")?;
        self.problems.iter().try_for_each(|problem| writeln!(f, "  {problem}"))
    }
}
