//! `kvstrata simulate fleet`: what lookups over many nodes find on a trace, and what they cost.
//!
//! Reads a trace, lets it come to a fleet of nodes that ask each other, once with all of them and once with one that
//! is lost half way, and prints a table or JSON. Nothing is served; equal arguments give equal results.

use std::path::PathBuf;

use bytesize::ByteSize;
use kvstrata_tiers::error::Result;
use serde::Serialize;

use crate::{
    cli::{progress, stdout, table::Table, trace_args::TraceArgs},
    numbers::count,
    sim::{
        fleet::{Outcome, Setup, simulate},
        ratio,
    },
    trace::{
        Trace,
        model::{KvType, Model},
        read,
    },
};

const EXAMPLES: &str = "\
Examples:
  What do a hundred nodes ask each other on this traffic?
    kvstrata simulate fleet trace.jsonl.zst
  Of ten nodes with one engine each, between which sessions move at every request:
    kvstrata simulate fleet trace.jsonl.zst --nodes 10 --engines 10 --moves 1

docs/simulate.md says what is simulated.";

/// Tell what lookups over many nodes find on a trace, and what they cost
///
/// Reads Mooncake, run-length (gen-trace) and Qwen-Bailian JSON lines, plain or zstd.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The trace files
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,

    /// Nodes, 1 to 1024
    #[arg(long, default_value_t = 100)]
    pub nodes: u32,

    /// Engines, each of which has a node as its home
    #[arg(long, default_value_t = 400)]
    pub engines: u32,

    /// Zones that nodes and engines are in, in turn
    #[arg(long, default_value_t = 3)]
    pub zones: u32,

    /// The model: how many bytes a token's KV has
    #[arg(long, default_value = super::setup::MODEL)]
    pub model: Model,

    /// The model's KV is stored in fp8, half of bf16
    #[arg(long)]
    pub fp8: bool,

    /// Room of a node for KV, all tiers together
    #[arg(long, value_name = "SIZE", default_value = "512GiB")]
    pub room: ByteSize,

    /// How likely a request of a session goes to another engine than the one before, 0 to 1
    #[arg(long, default_value_t = 0.1)]
    pub moves: f64,

    /// Decides which engine takes what
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// How the trace is read.
    #[command(flatten)]
    pub reading: TraceArgs,

    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Simulates and prints.
///
/// # Errors
/// If a trace or an argument cannot be used.
///
/// # Blocking
/// Computes on one core: seconds to minutes.
pub fn run(args: &Args) -> Result<()> {
    let mut reports = Vec::new();
    for path in &args.traces {
        let trace = read(path, &args.reading.options())?;
        reports.push(report(args, &trace)?);
    }
    if args.json {
        return stdout::print_json(&reports);
    }
    let texts: Vec<_> = reports.iter().map(Report::text).collect();
    stdout::print(&texts.concat())
}

/// What was found on one trace.
#[derive(Debug, Serialize)]
struct Report {
    trace: String,
    requests: usize,
    references: u64,
    block_bytes: u64,
    nodes: u32,
    engines: u32,
    room_blocks: u32,
    moves: f64,
    all: Figures,
    /// One node is lost half way.
    lost: Figures,
}

/// What one simulation came to.
#[derive(Debug, Serialize)]
struct Figures {
    /// Shares of all blocks, 0 to 1: what the homes have, and what is found with the others.
    own: f64,
    found: f64,
    /// The same from the minute of the loss on.
    own_after: f64,
    found_after: f64,
    /// The share of the lookups that ask anybody.
    asking: f64,
    /// Members asked by a lookup.
    members_mean: f64,
    members_p99: usize,
    members_max: usize,
    /// Shares of the lookups by rounds, none first.
    rounds: Vec<f64>,
    /// Answers with nothing, of a lookup, and of all that were asked.
    nothing_mean: f64,
    nothing_share: f64,
    silent: u64,
    partial: u64,
    /// Bytes of a node's filter, and of those that it has of all others.
    filter_bytes: f64,
    filters_bytes: f64,
    /// What a node takes of all others, in bytes a second.
    additions_bytes_per_s: f64,
    wholes_bytes_per_s: f64,
    wholes: u64,
    /// The largest over the mean.
    engines_imbalance: f64,
    requests_imbalance: f64,
    engines_moved: usize,
    resident_blocks: u64,
}

impl Figures {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    fn of(outcome: &Outcome, after_minute: usize) -> Self {
        let lookups = outcome.lookups;
        let others = outcome.nodes.saturating_sub(1) as f64 / outcome.nodes.max(1) as f64;
        let seconds = (outcome.span_ms as f64 / 1e3).max(1.0);
        let filter_bytes = ratio(outcome.filter_bytes, outcome.nodes);
        let asked = outcome.asked_members();
        let [own_after, found_after] = outcome.hits_from(after_minute);
        Self {
            own: ratio(outcome.own_blocks, outcome.asked_blocks),
            found: ratio(outcome.found_blocks, outcome.asked_blocks),
            own_after,
            found_after,
            asking: ratio(outcome.asking(), lookups),
            members_mean: ratio(asked, lookups),
            members_p99: outcome.members_quantile(0.99),
            members_max: outcome.by_members.len().saturating_sub(1),
            rounds: outcome.by_rounds.iter().map(|part| ratio(*part, lookups)).collect(),
            nothing_mean: ratio(outcome.nothing, lookups),
            nothing_share: ratio(outcome.nothing, asked),
            silent: outcome.silent,
            partial: outcome.partial,
            filter_bytes,
            filters_bytes: filter_bytes * outcome.nodes.saturating_sub(1) as f64,
            additions_bytes_per_s: outcome.additions as f64 * 8.0 * others / seconds,
            wholes_bytes_per_s: outcome.generation_bytes as f64 * others / seconds,
            wholes: outcome.generations,
            engines_imbalance: outcome.engines.imbalance(),
            requests_imbalance: outcome.requests_of_nodes.imbalance(),
            engines_moved: outcome.engines_moved,
            resident_blocks: outcome.resident_blocks,
        }
    }

    /// Lines of the table: what, and how much.
    fn lines(&self) -> Vec<(&'static str, String)> {
        let percent = |share: f64| format!("{:.3}", 100.0 * share);
        let kib = |bytes: f64| format!("{:.1}", bytes / 1024.0);
        let rounds: Vec<_> =
            self.rounds.iter().map(|share| format!("{:.2}", 100.0 * share)).collect();
        vec![
            ("blocks that homes have, %", percent(self.own)),
            ("blocks found with the others, %", percent(self.found)),
            ("the same in the second half, homes", percent(self.own_after)),
            ("the same in the second half, with others", percent(self.found_after)),
            ("lookups that ask others, %", percent(self.asking)),
            ("members asked by a lookup, mean", format!("{:.3}", self.members_mean)),
            ("p99", self.members_p99.to_string()),
            ("most", self.members_max.to_string()),
            ("lookups by rounds, %", rounds.join(" ")),
            ("answers with nothing, of a lookup", format!("{:.4}", self.nothing_mean)),
            ("of those asked, %", percent(self.nothing_share)),
            ("members that did not answer", count(self.silent)),
            ("partial lookups", count(self.partial)),
            ("filter of a node, KiB", kib(self.filter_bytes)),
            ("filters of others at a node, KiB", kib(self.filters_bytes)),
            ("additions to a node, KiB/s", kib(self.additions_bytes_per_s)),
            ("whole filters to a node, KiB/s", kib(self.wholes_bytes_per_s)),
            ("whole filters made", count(self.wholes)),
            ("engines of a home, max / mean", format!("{:.2}", self.engines_imbalance)),
            ("requests of a home, max / mean", format!("{:.2}", self.requests_imbalance)),
            ("engines that moved", count(self.engines_moved as u64)),
            ("blocks of all nodes", count(self.resident_blocks)),
        ]
    }
}

impl Report {
    fn text(&self) -> String {
        let mut text = format!(
            "{}: {} requests, {} references to blocks of {} bytes\n{} nodes with room for {} blocks each, {} \
             engines; a session moves with probability {}\n",
            self.trace,
            count(self.requests as u64),
            count(self.references),
            count(self.block_bytes),
            self.nodes,
            count(self.room_blocks.into()),
            self.engines,
            self.moves,
        );
        let mut table = Table::new(["", "all nodes", "one lost half way"]);
        for ((what, all), (_, lost)) in self.all.lines().into_iter().zip(self.lost.lines()) {
            table.lines.push(vec![what.to_owned(), all, lost]);
        }
        table.render(&mut text, "lookups over the nodes");
        text.push('\n');
        text
    }
}

fn report(args: &Args, trace: &Trace) -> Result<Report> {
    let kv_type = if args.fp8 { KvType::Fp8 } else { KvType::Bf16 };
    let block_bytes = args.model.block_bytes(trace.block_tokens(), kv_type);
    let room = args.room.as_u64() / block_bytes.max(1);
    let room_blocks = u32::try_from(room).unwrap_or(u32::MAX);
    let all = Setup {
        nodes: args.nodes,
        engines: args.engines,
        zones: args.zones,
        node_blocks: room_blocks,
        moves: args.moves,
        lost_at_ms: None,
        seed: args.seed,
    };
    let times = || trace.requests().map(|request| request.timestamp_ms);
    let (first, last) = (times().next().unwrap_or(0), times().next_back().unwrap_or(0));
    let half = first + last.saturating_sub(first) / 2;
    let lost = Setup { lost_at_ms: Some(half), ..all.clone() };
    let minute = usize::try_from((half - first) / 60_000).unwrap_or(0);
    let bar = progress::bar(
        2 * trace.len() as u64,
        "simulating [{wide_bar}] {percent:>3} % of {human_len} requests, {eta} left",
    );
    let progress = |requests| bar.inc(requests);
    let all = Figures::of(&simulate(trace, &all, &progress)?, minute);
    let lost = Figures::of(&simulate(trace, &lost, &progress)?, minute);
    bar.finish_and_clear();
    Ok(Report {
        trace: trace.name().to_owned(),
        requests: trace.len(),
        references: trace.references(),
        block_bytes,
        nodes: args.nodes,
        engines: args.engines,
        room_blocks,
        moves: args.moves,
        all,
        lost,
    })
}
