//! Agentic-coding traces of our own, from a seed.
//!
//! Real traces of coding agents are large or may not be passed on. These have the same shape:
//!
//! - several tools and models, each pair with a prompt that all its sessions share; sub-agents
//!   share the first part of it and go on with their own;
//! - sessions of a few up to 3,000 turns, most of them short; every turn resends the whole context,
//!   so input is about a hundred times the output;
//! - heavy sessions that go from 64 k to 480 k tokens within five turns;
//! - sub-sessions, some with a fresh context, some forked from all of their parent's;
//! - compaction: a context at its limit restarts from prompt and summary;
//! - times between uses of a block with a median near 20 s, a 99th percentile near half an hour and
//!   a longest of hours.
//!
//! Invariants: equal options give equal bytes on every machine (integers only, one random stream
//! for each session); a block names its whole prefix; lines are sorted by time. Adding a session
//! changes no other one's content.

use std::{
    fs::File,
    io::{self, BufWriter, Write},
    ops::RangeInclusive,
    path::Path,
    time::Duration,
};

use kvstrata_tiers::error::{Error, Result};

use self::{
    quantiles::Chance,
    session::{BLOCK_TOKENS, Output, Planned, Prompts},
};

mod quantiles;
mod session;

/// What to generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GenerateOptions {
    /// Picks one of 2^64 traces.
    pub seed: u64,
    /// Sessions, not counting their sub-sessions; 1 to 100,000.
    pub sessions: u32,
    /// The time the trace covers, a minute to 31 days; what would come later is cut off.
    pub duration: Duration,
    /// Tools, each with prompts of its own; 1 to 64.
    pub tools: u32,
    /// Models; blocks are never shared between them. 1 to 16.
    pub models: u32,
    /// The most turns of a session; 5 to 3,000.
    pub turns_max: u32,
    /// The largest context, in tokens, 131,072 to 10,000,000. Heavy sessions reach 96 % of it in
    /// five turns; the others compact at 200,000.
    pub context_tokens_max: u32,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            seed: 1,
            sessions: 600,
            duration: Duration::from_secs(24 * 3600),
            tools: 3,
            models: 2,
            turns_max: 3000,
            context_tokens_max: 500_000,
        }
    }
}

impl GenerateOptions {
    fn duration_ms(&self) -> u64 {
        u64::try_from(self.duration.as_millis()).unwrap_or(u64::MAX)
    }

    /// Refuses what is out of range, all of it at once.
    ///
    /// # Errors
    /// `Invalid`, naming each field, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let checks: [(&str, u64, RangeInclusive<u64>); 6] = [
            ("sessions", self.sessions.into(), 1..=100_000),
            ("duration in seconds", self.duration.as_secs(), 60..=31 * 24 * 3600),
            ("tools", self.tools.into(), 1..=64),
            ("models", self.models.into(), 1..=16),
            ("turns_max", self.turns_max.into(), 5..=3000),
            ("context_tokens_max", self.context_tokens_max.into(), 131_072..=10_000_000),
        ];
        let wrong: Vec<_> = checks
            .iter()
            .filter(|(_, value, allowed)| !allowed.contains(value))
            .map(|(field, value, allowed)| {
                format!("{field}: {value} given, {} to {} allowed", allowed.start(), allowed.end())
            })
            .collect();
        if wrong.is_empty() { Ok(()) } else { Err(Error::invalid(wrong.join("; "))) }
    }
}

/// A generated trace, not yet written.
#[derive(Debug)]
pub struct Generated {
    requests: Vec<Planned>,
    /// By stretch: its first block id.
    bases: Vec<u64>,
    blocks_unique: u64,
}

/// Generates a trace.
///
/// # Errors
/// `Invalid` if the options are out of range.
///
/// # Blocking
/// Computes: well under a second for a day of 600 sessions.
pub fn generate(options: &GenerateOptions) -> Result<Generated> {
    options.validate()?;
    let mut out = Output::default();
    let prompts = prompts(options, &mut out);
    for index in 0..options.sessions {
        session::run(options, index, &prompts, &mut out);
    }
    let mut requests = out.requests;
    // Stable: requests of one session and one time keep their order.
    requests.sort_by_key(|request| (request.timestamp_ms, request.session));
    let mut blocks_unique = 0_u64;
    let bases = out.stretches.iter().map(|blocks| {
        let base = blocks_unique;
        blocks_unique = blocks_unique.saturating_add(*blocks);
        base
    });
    let bases = bases.collect();
    Ok(Generated { requests, bases, blocks_unique })
}

/// Draws the prompts of each (tool, model).
fn prompts(options: &GenerateOptions, out: &mut Output) -> Vec<Prompts> {
    let mut all = Vec::new();
    for tool in 0..options.tools {
        for _model in 0..options.models {
            // A tool's prompts are as long for every model.
            let mut chance = Chance::new(options.seed ^ u64::from(tool), 0);
            let mut piece = |low, high| {
                let tokens = chance.between(low, high);
                out.new_stretch(tokens / BLOCK_TOKENS)
            };
            all.push(Prompts {
                shared: piece(8_000, 16_000),
                main: piece(3_000, 12_000),
                sub_agents: (0..3).map(|_| piece(1_000, 4_000)).collect(),
            });
        }
    }
    all
}

impl Generated {
    /// How many requests there are.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Block references, all requests together.
    #[must_use]
    pub fn references(&self) -> u64 {
        let chains = self.requests.iter().flat_map(|request| &request.chain);
        chains.map(|piece| piece.blocks).sum()
    }

    /// Distinct blocks.
    #[must_use]
    pub fn blocks_unique(&self) -> u64 {
        self.blocks_unique
    }

    /// Writes the trace in the run-length format, one request a line.
    ///
    /// # Errors
    /// What `out` returns.
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        for request in &self.requests {
            write!(
                out,
                "{{\"timestamp\":{},\"session\":{}",
                request.timestamp_ms, request.session
            )?;
            if let Some(parent) = request.parent {
                write!(out, ",\"parent_session\":{parent}")?;
            }
            write!(
                out,
                ",\"input_length\":{},\"output_length\":{},\"hash_ranges\":[",
                request.input_tokens, request.output_tokens
            )?;
            for (at, piece) in request.chain.iter().enumerate() {
                let base = self.bases.get(piece.stretch as usize).copied().unwrap_or(0);
                let comma = if at == 0 { "" } else { "," };
                write!(out, "{comma}[{base},{}]", piece.blocks)?;
            }
            out.write_all(b"]}\n")?;
        }
        out.flush()
    }

    /// Writes the trace to `path`, compressed with zstd if the name ends in `.zst`.
    ///
    /// # Errors
    /// `Invalid` if the file cannot be written.
    ///
    /// # Blocking
    /// Writes the whole file.
    pub fn write_file(&self, path: &Path) -> Result<()> {
        let write = || {
            let file = BufWriter::new(File::create(path)?);
            if path.extension().is_some_and(|extension| extension == "zst") {
                let mut encoder = zstd::stream::write::Encoder::new(file, ZSTD_LEVEL)?;
                self.write(BufWriter::new(&mut encoder))?;
                encoder.finish()?.flush()
            } else {
                self.write(file)
            }
        };
        write().map_err(|source| {
            Error::invalid(format!("write trace {}", path.display())).because(source)
        })
    }
}

/// Traces are written once and read often; 19 is the highest level without extra memory.
const ZSTD_LEVEL: i32 = 19;

#[cfg(test)]
mod tests;
