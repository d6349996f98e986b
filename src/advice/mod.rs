//! What routers are told: where the prefixes of prompts are, what loading them costs each engine now, and
//! which engine to take.
//!
//! ```text
//! prompt -> namespaces of its model (prompt) -> runs of the one map -> what each instance would load from
//!           them (offer), at what it costs it now (cost) -> answer (lookup), or scores (score)
//! ```
//! Invariants
//! - A tenant is told of what is its own; all else does not exist, for errors and their timing, too.
//! - Nothing here waits for a disk or a network: an answer is made of what is in memory. What takes longer
//!   than the caller's deadline is left out, and the answer says so.
//! - What a candidate is worth is said by [`score`](crate::score) alone.
//! - Asking is no use of a block, and no lookup of an engine: nothing is protected by it, or counted.
//!
//! Who an instance is, and where, is what it said when it opened its namespaces ([`Openers`]).
//!
//! [`Openers`]: crate::openers::Openers

mod cost;
mod lookup;
mod offer;
mod prompt;
mod score;
#[cfg(test)]
mod tests;

pub(crate) use self::{
    cost::{Locality, TierCost, TierState},
    lookup::{Advised, Answer, Question},
    offer::{Candidate, Offer, Piece},
    prompt::{Among, Asked, Found, Prefix, Prompt, Scheme},
    score::{Contest, Outcome, Scored},
};

use kvstrata_tiers::error::Result;

use crate::id;

/// What is kept for routers; one for each node.
#[derive(Debug)]
pub struct Advice {
    /// Another one after each start.
    epoch: u64,
    /// The host that the node runs on, as engines on it call it.
    host: String,
    /// Whether engines on it are shown its memory.
    shares_memory: bool,
}

impl Advice {
    /// Nothing was asked yet; `shares_memory` if engines on this host are shown the node's memory.
    ///
    /// # Errors
    /// `Internal` if the system has no randomness.
    pub fn new(shares_memory: bool) -> Result<Self> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Self { epoch: id::random_seed()?, host, shares_memory })
    }

    /// Says whether the node has started anew: then what was told before may be wrong.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }
}
