//! `kvstrata simulate`: what ways to route would make of a trace.
//!
//! Reads traces, lets each arrive at a simulated cluster once for every router mode and speed, and prints
//! tables, JSON or charts. Nothing is served. Results depend on the traces and the arguments alone, never on
//! the machine or the number of threads.

use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use kvstrata_tiers::error::{Error, Result};

use self::{
    report::{Load, Report, Row, TraceReport},
    setup::{Bandwidth, Named, SetupTime, Weight},
};
use super::{plan::TierCapacity, progress, stdout, trace_args::TraceArgs};
use crate::{
    sim::cluster::{Mode, Setup, compare},
    trace::{
        Trace,
        model::{KvType, Model},
        read,
    },
};

mod chart;
pub mod fleet;
mod report;
mod setup;

const EXAMPLES: &str = "\
Examples:
  What would each way to route make of this traffic?
    kvstrata simulate trace.jsonl.zst
  And at eight times the load, with charts:
    kvstrata simulate trace.jsonl.zst --speedup 2,4,8 --svg charts/
  On sixteen engines, two on each node, whose nodes have less memory:
    kvstrata simulate trace.jsonl.zst --workers 16 --workers-per-node 2 \\
        --tiers dram=128GiB,nvme=2TiB
  If the disks were slow?
    kvstrata simulate trace.jsonl.zst --bandwidth nvme=1GB

Modes: round-robin; least-loaded, by requests under way; device-only, the published cost
`prefill blocks + decode blocks`; constants, with a constant credit for what tiers have; timed, with the
credit that it is worth now; first-token, by the time that is expected. Engines load the same from
the tiers in all modes. docs/simulate.md says what is simulated and where the defaults come from.";

/// Compare ways to route the requests of traces
///
/// Reads Mooncake, run-length (gen-trace) and Qwen-Bailian JSON lines, plain or zstd.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    /// What else to simulate
    #[command(subcommand)]
    pub instead: Option<Instead>,

    /// The trace files
    #[arg(required = true)]
    pub traces: Vec<PathBuf>,

    /// Router modes to compare
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "round-robin,least-loaded,device-only,constants,timed,first-token"
    )]
    pub modes: Vec<Mode>,

    /// How much faster than in the trace requests arrive; each is simulated
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    pub speedup: Vec<f64>,

    /// Engines, 1 to 1024
    #[arg(long, default_value_t = 8)]
    pub workers: u32,

    /// Engines of one node, which share its tiers
    #[arg(long, default_value_t = 4)]
    pub workers_per_node: u32,

    /// The model: how many bytes a token's KV has, and how fast prefill is if that is known
    #[arg(long, default_value = setup::MODEL)]
    pub model: Model,

    /// The model's KV is stored in fp8, half of bf16
    #[arg(long)]
    pub fp8: bool,

    /// Tokens that an engine prefills in a second, of a short prompt
    #[arg(long, value_name = "TOKENS")]
    pub prefill_rate: Option<f64>,

    /// Tokens of a prompt whose prefill takes twice as long as that; 0: none ever does
    #[arg(long, value_name = "TOKENS", requires = "prefill_rate")]
    pub prefill_doubles_at: Option<f64>,

    /// Tokens that a request decodes in a second
    #[arg(long, value_name = "TOKENS", default_value_t = 40.0)]
    pub decode_rate: f64,

    /// Requests that an engine has under way at most
    #[arg(long, default_value_t = 64)]
    pub slots: u32,

    /// Memory for KV on the devices of one engine
    #[arg(long, value_name = "SIZE", default_value = "72GiB")]
    pub device: ByteSize,

    /// The tiers: dram and nvme of each node, object of all together; others are not there
    #[arg(long, value_delimiter = ',', default_value = "dram=512GiB,nvme=4TiB,object=unlimited")]
    pub tiers: Vec<TierCapacity>,

    /// There are no tiers
    #[arg(long, conflicts_with = "tiers")]
    pub no_tiers: bool,

    /// Bytes a second of each tier, and between nodes, where it differs:
    /// dram=50GB,nvme=6GB,object=4GB,network=11GB
    #[arg(long, value_delimiter = ',')]
    pub bandwidth: Vec<Named<Bandwidth>>,

    /// Time to the first byte of each tier, and more of another node, where it differs:
    /// dram=1ms,nvme=2ms,object=50ms,network=1ms
    #[arg(long, value_delimiter = ',')]
    pub setup: Vec<Named<SetupTime>>,

    /// Engines load all that the tiers have of a prompt, not only what saves time
    #[arg(long)]
    pub load_all: bool,

    /// How old what a router knows of the tiers' queues may be, 1ms or more
    #[arg(long, default_value = "100ms")]
    pub report: humantime::Duration,

    /// What a block that is decoded weighs against one to prefill, in the modes that score by the cost: 1
    /// in the published one; decoding slows no prefill here
    #[arg(long, default_value_t = 0.0)]
    pub decode_weight: f64,

    /// What a block of a tier counts in the mode `constants`, where it differs:
    /// dram=0.75,nvme=0.25,object=0.25
    #[arg(long, value_delimiter = ',')]
    pub weights: Vec<Named<Weight>>,

    /// Within what time a request should have its first token
    #[arg(long, default_value = "5s")]
    pub slo: humantime::Duration,

    /// Decides among equals
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// How the trace is read.
    #[command(flatten)]
    pub reading: TraceArgs,

    /// Write charts into this folder
    #[arg(long, value_name = "FOLDER")]
    pub svg: Option<PathBuf>,

    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

/// What is simulated in place of ways to route.
#[derive(Debug, Clone, clap::Subcommand)]
pub enum Instead {
    /// Tell what lookups over many nodes find on a trace, and what they cost
    Fleet(fleet::Args),
}

/// Simulates and prints; writes the charts that were asked for.
///
/// # Errors
/// If a trace or an argument cannot be used, or a chart cannot be written.
///
/// # Blocking
/// Computes on all cores: seconds to minutes.
pub fn run(args: &Args) -> Result<()> {
    if let Some(Instead::Fleet(args)) = &args.instead {
        return fleet::run(args);
    }
    let traces = args.traces.iter().map(|path| simulate(args, path));
    let report = Report {
        setup: setup::facts(args)?,
        slo_ms: setup::ms(args.slo.into()),
        traces: traces.collect::<Result<_>>()?,
    };
    if let Some(folder) = &args.svg {
        chart::write(&report, folder)?;
    }
    if args.json { stdout::print_json(&report) } else { stdout::print(&report.text()) }
}

/// Reads one trace and simulates all of it.
fn simulate(args: &Args, path: &Path) -> Result<TraceReport> {
    let trace = read(path, &args.reading.options())?;
    let mut cells: Vec<(Setup, Mode)> = Vec::new();
    for speedup in &args.speedup {
        let setup = setup::of(args, &trace, *speedup)?;
        cells.extend(args.modes.iter().map(|mode| (setup.clone(), *mode)));
    }
    let requests = trace.len().saturating_mul(cells.len());
    let bar = progress::bar(
        requests as u64,
        "simulating [{wide_bar}] {percent:>3} % of {human_len} requests, {eta} left",
    );
    let outcomes = compare(&trace, &cells, &|requests| bar.inc(requests as u64))?;
    bar.finish_and_clear();
    let slo_ms = setup::ms(args.slo.into());
    let rows: Vec<Row> = cells
        .iter()
        .zip(&outcomes)
        .map(|((_, mode), outcome)| Row::of(*mode, outcome, slo_ms, trace.block_tokens()))
        .collect();
    let loads = rows.chunks(args.modes.len().max(1)).zip(&args.speedup);
    Ok(TraceReport {
        trace: trace.name().to_owned(),
        block_tokens: trace.block_tokens(),
        block_bytes: block_bytes(args, &trace),
        requests: trace.len(),
        references: trace.references(),
        blocks_unique: trace.blocks_unique(),
        loads: loads
            .map(|(rows, speedup)| Load { speedup: *speedup, rows: rows.to_vec() })
            .collect(),
    })
}

fn block_bytes(args: &Args, trace: &Trace) -> u64 {
    let kv_type = if args.fp8 { KvType::Fp8 } else { KvType::Bf16 };
    args.model.block_bytes(trace.block_tokens(), kv_type)
}

/// An argument that cannot be used.
fn refuse(field: &str, value: impl std::fmt::Display, allowed: &str) -> Error {
    Error::invalid(format!("{field}: {value} given, {allowed}"))
}
