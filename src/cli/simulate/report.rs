//! What `simulate` found, as tables or JSON.

use kvstrata_tiers::tier::Tier;
use serde::Serialize;

use super::setup::Facts;
use crate::{
    cli::table::{Table, gib},
    numbers::count,
    sim::{
        cluster::{Mode, Outcome},
        ratio,
    },
};

/// Everything found.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) setup: Facts,
    pub(super) slo_ms: f64,
    pub(super) traces: Vec<TraceReport>,
}

/// One trace.
#[derive(Debug, Serialize)]
pub(super) struct TraceReport {
    pub(super) trace: String,
    pub(super) block_tokens: u32,
    pub(super) block_bytes: u64,
    pub(super) requests: usize,
    pub(super) references: u64,
    pub(super) blocks_unique: u32,
    pub(super) loads: Vec<Load>,
}

/// One trace at one speed.
#[derive(Debug, Serialize)]
pub(super) struct Load {
    pub(super) speedup: f64,
    /// By mode.
    pub(super) rows: Vec<Row>,
}

/// One mode.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Row {
    pub(super) mode: &'static str,
    /// Time to the first token.
    pub(super) mean_ms: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    /// Share of the requests that had it in time, 0 to 1.
    pub(super) within_slo: f64,
    pub(super) recomputed_tokens: u64,
    /// Shares of all blocks of prompts, 0 to 1: they come to 1.
    pub(super) device: f64,
    pub(super) dram: f64,
    pub(super) nvme: f64,
    pub(super) object: f64,
    pub(super) computed: f64,
    /// The share that was loaded from other nodes, of dram and nvme; in those, too.
    pub(super) remote: f64,
    /// The share of the time that the workers prefilled, and the busiest of them.
    pub(super) busy: f64,
    pub(super) busiest: f64,
}

impl Row {
    pub(super) fn of(mode: Mode, outcome: &Outcome, slo_ms: f64, block_tokens: u32) -> Self {
        let share = |blocks: u64| ratio(blocks, outcome.asked_blocks);
        let (busiest, busy) = outcome.busy();
        Self {
            mode: mode.name(),
            mean_ms: outcome.mean_ms(),
            p50_ms: outcome.quantile_ms(0.5),
            p99_ms: outcome.quantile_ms(0.99),
            within_slo: outcome.within(slo_ms),
            recomputed_tokens: outcome.computed_blocks.saturating_mul(block_tokens.into()),
            device: share(outcome.device_blocks),
            dram: share(outcome.loaded_blocks(Tier::Dram)),
            nvme: share(outcome.loaded_blocks(Tier::Nvme)),
            object: share(outcome.loaded_blocks(Tier::Object)),
            computed: share(outcome.computed_blocks),
            remote: share(outcome.remote_blocks.iter().sum()),
            busy,
            busiest,
        }
    }

    /// The split of a prompt's blocks by where they came from.
    pub(super) fn split(&self) -> [(&'static str, f64); 5] {
        [
            ("device", self.device),
            ("dram", self.dram),
            ("nvme", self.nvme),
            ("object", self.object),
            ("computed", self.computed),
        ]
    }
}

impl Report {
    /// The report as tables.
    pub(super) fn text(&self) -> String {
        let mut text = self.head();
        for trace in &self.traces {
            text += &format!(
                "\n{}: {} requests, {} references to {} distinct blocks of {} tokens ({} bytes)\n",
                trace.trace,
                count(trace.requests as u64),
                count(trace.references),
                count(trace.blocks_unique.into()),
                trace.block_tokens,
                count(trace.block_bytes),
            );
            for load in &trace.loads {
                self.table(load).render(&mut text, &format!("at {} times the speed", load.speedup));
            }
        }
        text
    }

    fn head(&self) -> String {
        let setup = &self.setup;
        let tiers = if setup.tiers.is_empty() { "none".to_owned() } else { setup.tiers.join(", ") };
        let doubles = match setup.prefill_doubles_at_tokens {
            tokens if tokens > 0.0 => format!("{tokens:.0} tokens take twice as long"),
            _ => "a line".to_owned(),
        };
        format!(
            "{} workers, {} a node, {}: prefill {:.0} tokens/s ({doubles}), decode {:.0} tokens/s \
             a request,\n{} slots, {} GiB of KV; tiers of each node: {tiers}\n\
             TTFT: time to the first token; percentages of blocks of all prompts; remote: from \
             other nodes, of dram and nvme\n",
            setup.workers,
            setup.workers_per_node,
            setup.model,
            setup.prefill_tokens_per_s,
            setup.decode_tokens_per_s,
            setup.slots,
            gib(setup.device_bytes),
        )
    }

    fn table(&self, load: &Load) -> Table {
        let seconds = |ms: f64| format!("{:.2}", ms / 1000.0);
        let percent = |share: f64| format!("{:.2}", 100.0 * share);
        let slo = format!("% <= {} s", self.slo_ms / 1000.0);
        let mut table =
            Table::new(["mode", "mean TTFT s", "p50 s", "p99 s", &slo, "recomputed Mtok"]);
        let shares = ["device %", "dram %", "nvme %", "object %", "computed %", "remote %"];
        table.head.extend(shares.into_iter().chain(["busy %", "busiest %"]).map(str::to_owned));
        for row in &load.rows {
            let mut line: Vec<String> =
                [row.mean_ms, row.p50_ms, row.p99_ms].into_iter().map(seconds).collect();
            line.insert(0, row.mode.to_owned());
            line.push(percent(row.within_slo));
            line.push(megas(row.recomputed_tokens));
            line.extend(row.split().map(|(_, share)| percent(share)));
            line.extend([row.remote, row.busy, row.busiest].map(percent));
            table.lines.push(line);
        }
        table
    }
}

#[expect(clippy::cast_precision_loss, reason = "shown with one digit")]
fn megas(number: u64) -> String {
    format!("{:.1}", number as f64 / 1e6)
}
