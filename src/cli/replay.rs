//! `kvstrata replay`: drives a server with a trace and checks every byte that comes back.

use std::{path::PathBuf, sync::Arc};

use bytesize::ByteSize;
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    limits::PART_BYTES_MAX,
};

use super::{progress, stdout, target::Access};
use crate::{
    client::{ClientOptions, Path},
    replay::{
        CLIENTS_MAX, CrashOptions, Every, NvmeSettings, ReplayOptions, Report, ServerProcess,
        ServerSettings, Source, replay, replay_disturbed,
    },
    trace::{ReadOptions, TimeUnit, Trace, read},
};

const EXAMPLES: &str = "\
Examples:
  Start a server, replay the sample, stop the server:
    kvstrata replay examples/sample-trace.jsonl.zst
  With a dram that cannot hold everything, and eight engines:
    kvstrata replay trace.jsonl.zst --block-bytes 4KiB --dram 72MiB --clients 8
  Against a server that is running, with real KV blocks:
    kvstrata replay trace.jsonl.zst --endpoint 127.0.0.1:9400 --kv-sample blocks.kv
  Against a cluster, each of eight engines at its home:
    kvstrata replay trace.jsonl.zst --endpoint kvstrata-0:9400,kvstrata-1:9400 --clients 8
  The same behind TLS, for the tenant of a token, with engines of other names:
    KVSTRATA_TOKEN=... kvstrata replay trace.jsonl.zst --tls-ca ca.pem --instance vllm \
        --endpoint kvstrata-0:9400,kvstrata-1:9400 --clients 8
  With an nvme tier, killing the server every 50 to 400 requests:
    kvstrata replay trace.jsonl.zst --nvme 8GiB --durable --crash-every 50..400 --clients 4
  Everything encrypted, and by the bulk port:
    kvstrata replay trace.jsonl.zst --tls --path bulk

For each request: look up all blocks with a lease, get what was found and check every byte, put the
rest, release the lease. Every byte follows from the block's identity. The exit code is 1 if a byte
is wrong, a leased block is not delivered, a stored block is not found although nothing was evicted,
a duplicate differs, or the counts do not add up.

With --crash-every the server is killed with SIGKILL while requests are under way and started again on
what it left; one start in five is killed too. A ledger notes, synced to disk, what it has acknowledged: durable puts, and removals made
on purpose. After each restart a sample of both is asked for, and everything at the end: a durable block
that is lost or a removed block that is back makes the exit code 1, and what the server left is kept.";

/// Drive a server with the requests of a trace and check every byte
///
/// Reads Mooncake, run-length (gen-trace) and Qwen-Bailian JSON lines, plain or zstd.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The trace file
    pub trace: PathBuf,

    /// Replay only the first N requests
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,

    /// Bytes of one block, 1B to 64MiB; all distinct blocks together should fit into the machine
    #[arg(long, value_name = "SIZE", default_value = "16KiB")]
    pub block_bytes: ByteSize,

    /// Engines to play, each with its own connection and session
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub clients: usize,

    /// File of real KV bytes to use as payload, with a stamp of 8 bytes in every 256
    #[arg(long, value_name = "FILE")]
    pub kv_sample: Option<PathBuf>,

    /// A running server, or several of one cluster; without it one is started on free ports and stopped at
    /// the end
    #[arg(
        long,
        value_name = "HOST:PORT[,..]",
        conflicts_with_all = [
            "dram", "memory", "nvme", "nvme_path", "segment_bytes", "set", "crash_every", "tls"
        ]
    )]
    pub endpoint: Option<String>,

    /// Who this is for a running server, and how that is made sure of.
    #[command(flatten)]
    pub access: Access,

    /// What routers and nodes call the engines, each with a number behind it
    #[arg(long, value_name = "NAME", default_value = "replay")]
    pub instance: String,

    /// The server that is started asks for a token and speaks TLS, by a certificate made for it
    #[arg(long)]
    pub tls: bool,

    /// Size of dram of the server that is started, for example 512MiB
    #[arg(long, value_name = "SIZE")]
    pub dram: Option<String>,

    /// Memory of the server that is started, for example 1GiB
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<String>,

    /// Gives the server that is started an nvme tier of this capacity, for example 4GiB
    #[arg(long, value_name = "SIZE")]
    pub nvme: Option<String>,

    /// Directory of that tier; without it the tier goes away with the server
    #[arg(long, value_name = "DIR")]
    pub nvme_path: Option<PathBuf>,

    /// Bytes of one segment of that tier, for example 16MiB
    #[arg(long, value_name = "SIZE")]
    pub segment_bytes: Option<String>,

    /// Any other setting of the server that is started, for example object.url=file:///var/blocks;
    /// can be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,

    /// Puts ask to be acknowledged when they are on nvme, not when they are readable
    #[arg(long)]
    pub durable: bool,

    /// Kills the server after so many requests, again and again, for example 200 or 50..400
    #[arg(long, value_name = "N|N..N")]
    pub crash_every: Option<Every>,

    /// Share of the requests after which one of their blocks is removed, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.002, requires = "crash_every")]
    pub remove_share: f64,

    /// What the choices of --crash-every and --remove-share follow from
    #[arg(long, value_name = "N", default_value_t = 1, requires = "crash_every")]
    pub seed: u64,

    /// The way that blocks take: auto (shared memory or the bulk port if there is one), grpc, bulk or shm
    #[arg(long, value_name = "PATH", default_value = "auto")]
    pub path: Path,

    /// Tokens of one block, if not the format's own
    #[arg(long, value_name = "N")]
    pub block_tokens: Option<u32>,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Replays the trace and prints the report.
///
/// # Errors
/// `Invalid` for arguments out of range; `Internal` if the replay found anything wrong; else
/// whatever kept it from running to the end.
///
/// # Cancel safety
/// Safe: a server that was started is killed.
pub async fn run(args: Args) -> Result<()> {
    let block_bytes = check(&args)?;
    let source = source(&args)?;
    let trace = Arc::new(load(&args).await?);
    let mut server = match &args.endpoint {
        Some(_) => None,
        None => Some(ServerProcess::start(settings(&args)).await?),
    };
    let client = match &server {
        Some(server) => server.client_options(),
        None => args.access.options()?,
    };
    let own = server.as_ref().map(|server| server.endpoint().to_owned());
    let options = ReplayOptions {
        endpoint: args.endpoint.clone().or(own).unwrap_or_default(),
        alone: server.is_some(),
        clients: args.clients,
        block_bytes,
        source,
        durable: args.durable,
        client: ClientOptions { path: args.path, instance: Some(args.instance.clone()), ..client },
    };
    let report = tokio::select! {
        report = drive(&args, trace, &options, &mut server) => report,
        _ = tokio::signal::ctrl_c() => {
            return Err(Error::new(ErrorKind::Cancelled, "replay: stopped by SIGINT"));
        }
    };
    let report = match (report, &mut server) {
        (Err(error), Some(server)) => return Err(server.explain(error).await),
        (report, _) => report?,
    };
    let mut kept = String::new();
    if let Some(mut server) = server {
        if report.disturbance.is_some() && !report.problems.is_empty() {
            kept = format!("; what the server left is in {}", server.keep_directory().display());
        }
        server.stop().await?;
    }
    if args.json {
        stdout::print_json(&report)?;
    } else {
        stdout::print(&report.to_string())?;
    }
    if report.problems.is_empty() {
        return Ok(());
    }
    let problems = report.problems.join("; ");
    Err(Error::new(ErrorKind::Internal, format!("replay: {problems}{kept}")))
}

/// Replays the trace, and kills the server meanwhile if that was asked for.
async fn drive(
    args: &Args,
    trace: Arc<Trace>,
    options: &ReplayOptions,
    server: &mut Option<ServerProcess>,
) -> Result<Report> {
    let template = "{bar:40} {percent:>3} % of {human_len} block references, {per_sec}, {eta} left";
    let progress = progress::bar(trace.references(), template);
    match (&args.crash_every, server) {
        (Some(every), Some(server)) => {
            let (seed, remove_share) = (args.seed, args.remove_share);
            let crash = CrashOptions { every: every.clone(), seed, remove_share };
            // Boxed: the future is large, and every command would carry it.
            Box::pin(replay_disturbed(trace, options, &crash, server, progress)).await
        }
        _ => replay(trace, options, progress).await,
    }
}

fn settings(args: &Args) -> ServerSettings {
    let nvme = NvmeSettings {
        path: args.nvme_path.clone(),
        capacity: args.nvme.clone(),
        segment_bytes: args.segment_bytes.clone(),
    };
    let wanted = nvme.path.is_some() || nvme.capacity.is_some();
    ServerSettings {
        dram: args.dram.clone(),
        memory: args.memory.clone(),
        nvme: wanted.then_some(nvme),
        others: args.set.clone(),
        secure: args.tls,
        shared_memory: args.path == Path::Shm,
    }
}

fn check(args: &Args) -> Result<u32> {
    let bytes = args.block_bytes.0;
    if !(1..=PART_BYTES_MAX).contains(&bytes) {
        let max = ByteSize(PART_BYTES_MAX);
        return Err(Error::invalid(format!("--block-bytes: {bytes} given, 1 to {max} allowed")));
    }
    if !(1..=CLIENTS_MAX).contains(&args.clients) {
        return Err(Error::invalid(format!(
            "--clients: {} given, 1 to {CLIENTS_MAX} allowed",
            args.clients
        )));
    }
    if !(0.0..=1.0).contains(&args.remove_share) {
        let share = args.remove_share;
        return Err(Error::invalid(format!("--remove-share: {share} given, 0 to 1 allowed")));
    }
    if args.segment_bytes.is_some() && args.nvme.is_none() && args.nvme_path.is_none() {
        return Err(Error::invalid("--segment-bytes: there is no nvme tier; give --nvme too"));
    }
    u32::try_from(bytes).map_err(|error| Error::invalid("--block-bytes").because(error))
}

fn source(args: &Args) -> Result<Source> {
    let Some(path) = &args.kv_sample else { return Ok(Source::Generated) };
    let bytes = std::fs::read(path).map_err(|error| {
        Error::invalid(format!("--kv-sample: read {}", path.display())).because(error)
    })?;
    if bytes.is_empty() {
        return Err(Error::invalid(format!("--kv-sample: {} is empty", path.display())));
    }
    Ok(Source::Sampled(bytes.into()))
}

/// Reads the trace on a thread of its own: a large one takes seconds.
async fn load(args: &Args) -> Result<Trace> {
    let path = args.trace.clone();
    let options = ReadOptions {
        block_tokens: args.block_tokens,
        time_unit: None::<TimeUnit>,
        requests_max: args.requests,
    };
    let reading = tokio::task::spawn_blocking(move || read(&path, &options));
    let failed = |error| Error::new(ErrorKind::Internal, "read the trace").because(error);
    reading.await.map_err(failed)?
}
