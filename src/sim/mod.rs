//! What a cache of a given size would have hit on a trace.
//!
//! One request is atomic. Its hits are its longest prefix that is resident when it arrives; then
//! its blocks are touched or inserted **tail first**, so that with recency the head of a chain
//! outlives its tail. This is how the live tiers are driven, and the policies are the tiers' own
//! code ([`kvstrata_tiers::evict`]), so a simulated ratio is a prediction and not a model of one.
//!
//! [`simulate`] runs one policy in one tier, [`simulate_tiers`] an inclusive hierarchy, [`Opt`] the
//! upper bound that knows the future, and [`unbounded_hits`] the ratio that no capacity can pass.
//! [`ObjectLoad`] says what the object tier of such a hierarchy costs in a month.
//! [`sweep`] spreads many of them over the cores.
//!
//! Capacities are in blocks. A simulation keeps four bytes for each distinct block of the trace and
//! the policy's own memory for each resident one; it never expands the trace's runs.

pub mod cluster;
pub mod fleet;
mod opt;
mod price;
mod spread;
mod sweep;
mod tier;

use std::{fmt, str::FromStr};

use kvstrata_tiers::{
    error::{Error, Result},
    evict::{ArcPolicy, Eviction, Lru, S3Fifo},
};

pub use self::{
    opt::{Opt, opt_hits},
    price::{Bill, ObjectLoad},
    sweep::sweep,
    tier::{TiersOutcome, simulate_tiers},
};
use crate::trace::Trace;

/// A way to choose what leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Least recently used, with reverse touch.
    Lru,
    /// S3-FIFO.
    S3Fifo,
    /// ARC.
    Arc,
    /// The best any policy can do, knowing the future: see [`Opt`].
    Opt,
}

impl Policy {
    /// All policies, in the order of tables and legends.
    pub const ALL: [Self; 4] = [Self::Lru, Self::S3Fifo, Self::Arc, Self::Opt];

    /// The tiers' own policy for a cache of `capacity_blocks`; `None` for [`Opt`](Self::Opt), which
    /// no live cache can run.
    #[must_use]
    pub fn eviction(self, capacity_blocks: u32) -> Option<Box<dyn Eviction>> {
        match self {
            Self::Lru => Some(Box::new(Lru::new())),
            Self::S3Fifo => Some(Box::new(S3Fifo::new(capacity_blocks as usize))),
            Self::Arc => Some(Box::new(ArcPolicy::new(capacity_blocks as usize))),
            Self::Opt => None,
        }
    }

    /// The name in flags and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::S3Fifo => "s3fifo",
            Self::Arc => "arc",
            Self::Opt => "opt",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Policy {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|policy| policy.name() == name).ok_or_else(|| {
            Error::invalid(format!("policy: {name} given, one of lru, s3fifo, arc, opt allowed"))
        })
    }
}

/// What one simulated cache did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Block references of the trace.
    pub references: u64,
    /// References that were part of a resident prefix.
    pub hits: u64,
    /// Blocks that were not resident when a request arrived and were written for it; what OPT
    /// bypasses is not written.
    pub insertions: u64,
}

impl Outcome {
    /// Hits as a share of the references, 0 to 1.
    #[must_use]
    pub fn hit_ratio(&self) -> f64 {
        ratio(self.hits, self.references)
    }
}

/// `part / whole`, 0 if there is no whole.
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^53, shown with four digits")]
pub fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Runs `policy` in one tier of `capacity_blocks` over the whole trace.
#[must_use]
pub fn simulate(trace: &Trace, policy: Policy, capacity_blocks: u32) -> Outcome {
    simulate_watched(trace, policy, capacity_blocks, &mut |_| {})
}

/// [`simulate`] that tells `progress` of the references done since the last call.
fn simulate_watched(
    trace: &Trace,
    policy: Policy,
    capacity_blocks: u32,
    progress: &mut dyn FnMut(u64),
) -> Outcome {
    match policy.eviction(capacity_blocks) {
        Some(eviction) => {
            let tiers = vec![tier::Tier::new(trace, eviction, capacity_blocks)];
            tier::run(trace, tiers, progress).single()
        }
        None => {
            let outcome = Opt::new(trace).outcome(capacity_blocks);
            progress(trace.references());
            outcome
        }
    }
}

/// The references that a cache of unlimited size hits.
#[must_use]
pub fn unbounded_hits(trace: &Trace) -> u64 {
    let mut seen = vec![false; trace.blocks_unique() as usize];
    let mut hits = 0;
    for request in trace.requests() {
        let known = |id: &u32| seen.get(*id as usize).copied().unwrap_or(false);
        hits += request.blocks().take_while(known).count() as u64;
        for run in request.runs() {
            if let Some(run) = seen.get_mut(run.first as usize..run.end() as usize) {
                run.fill(true);
            }
        }
    }
    hits
}

#[cfg(test)]
mod tests;
