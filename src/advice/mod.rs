//! What routers are told: where the prefixes of prompts are, what loading them costs each engine now, and
//! which engine to take.
//!
//! ```text
//! prompt -> namespaces of its model (prompt) -> runs of the one map -> what other members have behind them (others)
//!        -> what each instance would load of that, at what that costs it now (offer)
//!        -> answer (lookup), or scores (score)
//! ```
//! Invariants
//! - A tenant is told of what is its own; all else does not exist, for errors and their timing, too.
//! - Nothing here waits for a disk. A node that is alone waits for nothing: its answer is made of what is in memory. One
//!   of a cluster waits for other members once, no longer than an engine's lookup does
//!   ([`FANOUT_DEADLINE`](crate::limits::FANOUT_DEADLINE)) and half of the caller's deadline; whoever has not answered
//!   by then costs its blocks. What takes longer than the caller's deadline is left out, and the answer says so.
//! - What a candidate is worth is said by [`score`](crate::score) alone.
//! - Asking is no use of a block, and no lookup of an engine: nothing is protected by it, or counted.
//!
//! Who an instance is, and where, is what it said when it opened its namespaces, here or at another member ([`Openers`]).
//!
//! [`Openers`]: crate::openers::Openers

mod lookup;
mod offer;
mod others;
mod prompt;
mod score;
#[cfg(test)]
mod tests;
mod watch;

pub(crate) use self::{
    lookup::{Advised, Answer, Question},
    offer::{Candidate, Offer, Piece},
    others::Others,
    prompt::{Among, Asked, Found, Prefix, Prompt},
    score::{Contest, Outcome, Scored},
    watch::{Blocks, Names, Range, Update},
};

use std::sync::Arc;

use kvstrata_tiers::error::Result;
use tokio::sync::Semaphore;

use crate::{id, limits::ROUTER_WATCHERS_MAX};

/// What is kept for routers; one for each node.
#[derive(Debug)]
pub struct Advice {
    /// Another one after each start.
    epoch: u64,
    /// Bounds those who watch.
    watchers: Arc<Semaphore>,
}

impl Advice {
    /// Nothing was asked yet.
    ///
    /// # Errors
    /// `Internal` if the system has no randomness.
    pub fn new() -> Result<Self> {
        let watchers = Arc::new(Semaphore::new(ROUTER_WATCHERS_MAX));
        Ok(Self { epoch: id::random_seed()?, watchers })
    }

    /// Says whether the node has started anew: then what was told before may be wrong.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}
