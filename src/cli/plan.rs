//! `kvstrata plan`: what a cache of each size would hit on a trace.
//!
//! Reads a trace, runs the tiers' own policies over it at each capacity, and prints tables, JSON or
//! charts. Nothing is served and no payload exists: only block ids move. Results depend on the
//! trace and the arguments alone, never on the machine or the number of threads.

use std::{path::PathBuf, time::Duration};

use bytesize::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};
use kvstrata_tiers::error::{Error, ErrorKind, Result};

pub use self::capacity::{Capacity, TierCapacity};
use self::report::{Report, Row, TierRow};
use super::{Failure, settings::Settings, stdout, trace_args::TraceArgs};
use crate::{
    config,
    sim::{self, Opt, Policy, TiersOutcome, simulate_tiers, sweep},
    trace::{
        Trace,
        model::{KvType, Model},
        read,
    },
};

mod capacity;
mod chart;
mod object;
mod report;

const EXAMPLES: &str = "\
Examples:
  Hit ratio of every policy at the usual capacities:
    kvstrata plan trace.jsonl.zst
  How much memory does Llama-3-70B need for this traffic?
    kvstrata plan trace.jsonl.zst --model llama-3-70b --capacities 64GiB,256GiB,1TiB
  What would an object tier cost in a month?
    kvstrata plan trace.jsonl.zst --model llama-3-70b --object \\
        --tiers dram=64GiB,nvme=1TiB,object=unlimited
  And on a store that charges something else?
    kvstrata plan trace.jsonl.zst --model llama-3-70b --object \\
        --tiers object=unlimited --set object.prices=put=0.004,get=0.0003,gib=0.02
  What would each tier serve, as a chart:
    kvstrata plan trace.jsonl.zst --tiers dram=1%,nvme=10%,object=unlimited --svg charts/

Capacities are percentages of the trace's distinct blocks (5%), sizes (64GiB; these need
--model or --block-bytes), or `unlimited`. A request is atomic: its longest resident prefix
counts as hits, then its blocks are touched or inserted tail first. OPT knows the future and is
an upper bound.";

/// Tell what caches of several sizes would hit on a trace
///
/// Reads Mooncake, run-length (gen-trace) and Qwen-Bailian JSON lines, plain or zstd.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The trace file
    pub trace: PathBuf,

    /// Policies to simulate
    #[arg(long, value_delimiter = ',', default_value = "lru,s3fifo,arc,opt")]
    pub policies: Vec<Policy>,

    /// Capacities to simulate, each 5%, 64GiB or unlimited
    #[arg(long, value_delimiter = ',', default_value = "0.5%,1%,2%,5%,10%,25%,50%")]
    pub capacities: Vec<Capacity>,

    /// Inclusive tiers, hot to cold, each run with LRU: dram=1%,nvme=10%,object=unlimited
    #[arg(long, value_delimiter = ',')]
    pub tiers: Vec<TierCapacity>,

    /// Tell what the object tier costs in a month; needs it in --tiers, and the bytes of a block
    #[arg(long, requires = "tiers")]
    pub object: bool,

    /// What a node would be started with: `object.pack_bytes` and `object.prices` count here
    #[command(flatten)]
    pub settings: Settings,

    /// Express blocks in GiB of this model's KV, for example llama-3-8b or deepseek-v3
    #[arg(long, conflicts_with = "block_bytes")]
    pub model: Option<Model>,

    /// The model's KV is stored in fp8, half of bf16
    #[arg(long, requires = "model")]
    pub fp8: bool,

    /// Bytes of one block, where the model is not known here
    #[arg(long)]
    pub block_bytes: Option<ByteSize>,

    /// How the trace is read.
    #[command(flatten)]
    pub reading: TraceArgs,

    /// Write charts: into this folder, or to this file if it ends in .svg (the tier split goes
    /// beside it, with -tiers in its name)
    #[arg(long, value_name = "PATH")]
    pub svg: Option<PathBuf>,

    /// Print JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

/// Simulates and prints; writes the charts that were asked for.
///
/// # Errors
/// If the trace, an argument or a setting cannot be used, or a chart cannot be written.
///
/// # Blocking
/// Computes on all cores: seconds to minutes.
pub fn run(args: &Args) -> Result<(), Failure> {
    let config = config::load(&args.settings.sources()?)?;
    let report = report(args, &config.object)?;
    if let Some(path) = &args.svg {
        chart::write(&report, path)?;
    }
    Ok(stdout::print(&if args.json { report.json()? } else { report.text() })?)
}

/// Reads the trace and runs all simulations.
fn report(args: &Args, settings: &config::Object) -> Result<Report> {
    let spinner = ProgressBar::new_spinner().with_message("reading the trace");
    spinner.enable_steady_tick(Duration::from_millis(100));
    let trace = read(&args.trace, &args.reading.options())?;
    spinner.finish_and_clear();
    let block_bytes = block_bytes(args, &trace);
    let hierarchy = Hierarchy::simulate(&args.tiers, &trace, block_bytes)?;
    let object = match args.object {
        true => Some(object::bill((args, settings), &trace, &hierarchy, block_bytes)?),
        false => None,
    };
    Ok(Report {
        trace: trace.name().to_owned(),
        format: trace.format().to_string(),
        block_tokens: trace.block_tokens(),
        requests: trace.len(),
        references: trace.references(),
        blocks_unique: trace.blocks_unique(),
        repeats_dropped: trace.repeats_dropped(),
        unbounded_hits: sim::unbounded_hits(&trace),
        model: args.model.map(|model| model.name().to_owned()),
        block_bytes,
        policies: args.policies.iter().map(|policy| policy.name()).collect(),
        rows: rows(args, &trace, block_bytes)?,
        tiers: tier_rows(&args.tiers, &trace, &hierarchy, block_bytes),
        object,
    })
}

fn block_bytes(args: &Args, trace: &Trace) -> Option<u64> {
    let kv_type = if args.fp8 { KvType::Fp8 } else { KvType::Bf16 };
    let of_model = args.model.map(|model| model.block_bytes(trace.block_tokens(), kv_type));
    of_model.or(args.block_bytes.map(|size| size.as_u64()))
}

fn rows(args: &Args, trace: &Trace, block_bytes: Option<u64>) -> Result<Vec<Row>> {
    let mut cells = Vec::new();
    let mut labels = Vec::new();
    for capacity in &args.capacities {
        let blocks = capacity.blocks(trace, block_bytes)?;
        for policy in &args.policies {
            cells.push((*policy, blocks));
            labels.push(capacity);
        }
    }
    let bar = progress_bar(trace.references().saturating_mul(cells.len() as u64))?;
    let outcomes = sweep(trace, &cells, &|references| bar.inc(references))?;
    bar.finish_and_clear();
    let opt = Opt::new(trace);
    let unique = u64::from(trace.blocks_unique());
    let row =
        |((label, (policy, blocks)), outcome): ((&&Capacity, &(Policy, u32)), &sim::Outcome)| Row {
            capacity: label.to_string(),
            blocks: *blocks,
            bytes: block_bytes.map(|bytes| bytes.saturating_mul(u64::from(*blocks))),
            policy: policy.name(),
            hits: outcome.hits,
            hit_ratio: outcome.hit_ratio(),
            share_of_opt: sim::ratio(outcome.hits, opt.outcome(*blocks).hits),
            insertions: outcome.insertions,
            insertions_per_block: sim::ratio(outcome.insertions, unique),
        };
    Ok(labels.iter().zip(&cells).zip(&outcomes).map(row).collect())
}

/// The tiers that were asked for, and what they did.
struct Hierarchy {
    /// Capacities.
    blocks: Vec<u32>,
    outcome: TiersOutcome,
}

impl Hierarchy {
    fn simulate(tiers: &[TierCapacity], trace: &Trace, block_bytes: Option<u64>) -> Result<Self> {
        let blocks = tiers.iter().map(|tier| tier.capacity.blocks(trace, block_bytes));
        let blocks = blocks.collect::<Result<Vec<_>>>()?;
        let outcome = simulate_tiers(trace, &blocks);
        Ok(Self { blocks, outcome })
    }
}

fn tier_rows(
    tiers: &[TierCapacity],
    trace: &Trace,
    Hierarchy { blocks, outcome }: &Hierarchy,
    block_bytes: Option<u64>,
) -> Vec<TierRow> {
    let counts = blocks.iter().zip(outcome.hits.iter().zip(&outcome.insertions));
    let row =
        |(tier, (blocks, (hits, insertions))): (&TierCapacity, (&u32, (&u64, &u64)))| TierRow {
            tier: tier.name.clone(),
            capacity: tier.capacity.to_string(),
            blocks: *blocks,
            bytes: block_bytes.map(|bytes| bytes.saturating_mul(u64::from(*blocks))),
            hits: *hits,
            hit_ratio: sim::ratio(*hits, trace.references()),
            insertions: *insertions,
            insertions_per_block: sim::ratio(*insertions, u64::from(trace.blocks_unique())),
        };
    tiers.iter().zip(counts).map(row).collect()
}

/// A bar over block references, on stderr and only if that is a terminal.
fn progress_bar(references: u64) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template(
        "simulating [{wide_bar}] {percent:>3} % of {human_len} references, {eta} left",
    )
    .map_err(|source| {
        Error::new(ErrorKind::Internal, "lay out the progress bar").because(source)
    })?;
    Ok(ProgressBar::new(references).with_style(style.progress_chars("=> ")))
}
