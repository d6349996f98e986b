//! `kvstrata gen-trace`: writes an agentic-coding trace of our own.

use std::path::PathBuf;

use kvstrata_tiers::error::Result;

use super::stdout;
use crate::trace::generate::{GenerateOptions, generate};

const EXAMPLES: &str = "\
Examples:
  A day of 600 sessions:
    kvstrata gen-trace day.jsonl.zst
  A small one, like the sample in examples/:
    kvstrata gen-trace small.jsonl.zst --sessions 32 --duration 90m --turns-max 60
  What a cache would do with it:
    kvstrata plan day.jsonl.zst --model llama-3-70b";

/// Generate an agentic-coding trace from a seed
///
/// Sessions of a few up to 3,000 turns that resend their whole context, with prompts shared by tool
/// and model, sub-agents, compaction, and heavy sessions that reach 480 k tokens in five turns. The
/// output is JSON lines with 64-token blocks as ranges; equal arguments give equal content.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The file to write; compressed if the name ends in .zst
    pub out: PathBuf,

    /// Which trace, 0 to 2^64 - 1
    #[arg(long, default_value_t = GenerateOptions::default().seed)]
    pub seed: u64,

    /// Sessions, not counting sub-sessions, 1 to 100000
    #[arg(long, default_value_t = GenerateOptions::default().sessions)]
    pub sessions: u32,

    /// The time covered, 1m to 31d; later requests are cut off
    #[arg(long, default_value = "24h")]
    pub duration: humantime::Duration,

    /// Tools, each with its own prompts, 1 to 64
    #[arg(long, default_value_t = GenerateOptions::default().tools)]
    pub tools: u32,

    /// Models, between which nothing is shared, 1 to 16
    #[arg(long, default_value_t = GenerateOptions::default().models)]
    pub models: u32,

    /// The most turns of one session, 5 to 3000
    #[arg(long, default_value_t = GenerateOptions::default().turns_max)]
    pub turns_max: u32,

    /// The largest context in tokens, 131072 to 10000000; heavy sessions reach 96 % of it
    #[arg(long, default_value_t = GenerateOptions::default().context_tokens_max)]
    pub context_tokens_max: u32,
}

impl Args {
    fn options(&self) -> GenerateOptions {
        GenerateOptions {
            seed: self.seed,
            sessions: self.sessions,
            duration: self.duration.into(),
            tools: self.tools,
            models: self.models,
            turns_max: self.turns_max,
            context_tokens_max: self.context_tokens_max,
        }
    }
}

/// Generates and writes the trace, and prints its size.
///
/// # Errors
/// `Invalid` if an argument is out of range or the file cannot be written.
///
/// # Blocking
/// Seconds for the default day.
pub fn run(args: &Args) -> Result<()> {
    let generated = generate(&args.options())?;
    generated.write_file(&args.out)?;
    stdout::print(&format!(
        "{}: {} requests, {} block references, {} distinct blocks of 64 tokens\n",
        args.out.display(),
        generated.requests(),
        generated.references(),
        generated.blocks_unique(),
    ))
}
