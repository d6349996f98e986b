//! What a simulated cluster is made of.

use kvstrata_tiers::{
    error::{Error, Result},
    tier::Tier,
};

use crate::score::{Prefill, Weights};

/// The most workers of a cluster: every request looks at each of them.
pub const WORKERS_MAX: u32 = 1024;

/// How fast something is read.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// Milliseconds to the first byte.
    pub setup_ms: f64,
    /// Milliseconds for each block.
    pub block_ms: f64,
}

/// One tier of every node.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierSetup {
    /// What it holds, in blocks; 0: there is none. Dram and nvme of each node, object of all together.
    pub capacity_blocks: u32,
    /// Read from the node that has it; the object store is read like this by every node.
    pub local: Rate,
    /// Read from another node.
    pub remote: Rate,
}

impl TierSetup {
    /// No such tier.
    pub const NONE: Self = Self {
        capacity_blocks: 0,
        local: Rate { setup_ms: 0.0, block_ms: 0.0 },
        remote: Rate { setup_ms: 0.0, block_ms: 0.0 },
    };
}

/// What an engine loads of what the tiers have of its prompt. It is the same in all modes: they differ in
/// where a prompt goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loading {
    /// As many blocks as save most time, by what loading takes when the request arrives.
    Paying,
    /// All that was found.
    All,
}

/// A cluster and its load.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// Engines, 1 to [`WORKERS_MAX`].
    pub workers: u32,
    /// Engines of each node, at least 1; the last node may have fewer.
    pub workers_per_node: u32,
    /// How long an engine prefills.
    pub prefill: Prefill,
    /// Blocks that an engine's device holds.
    pub device_blocks: u32,
    /// Requests that an engine has under way at most, from prefill to the last token; at least 1.
    pub slots: u32,
    /// Milliseconds for each token of each request.
    pub decode_token_ms: f64,
    /// Dram, nvme and object.
    pub tiers: [TierSetup; 3],
    /// What engines load.
    pub loading: Loading,
    /// Milliseconds between two reports of what waits for the tiers; what a router itself sends there it
    /// reserves, and knows at once. At least 1.
    pub report_ms: f64,
    /// What a block that is decoded weighs against one to prefill, in the modes that score by the cost: 1
    /// in the published one; 0 where other engines decode.
    pub decode_weight: f64,
    /// The weights of the mode that knows constants.
    pub weights: Weights,
    /// How much faster than in the trace requests arrive, above 0.
    pub speedup: f64,
    /// Decides among equals.
    pub seed: u64,
}

impl Setup {
    /// What there is of `tier`.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> TierSetup {
        let [dram, nvme, object] = self.tiers;
        match tier {
            Tier::Dram => dram,
            Tier::Nvme => nvme,
            Tier::Object => object,
        }
    }

    /// Nodes.
    pub(super) fn nodes(&self) -> u32 {
        self.workers.div_ceil(self.workers_per_node.max(1))
    }

    /// The node of a worker.
    pub(super) fn node_of(&self, worker: u32) -> u32 {
        worker / self.workers_per_node.max(1)
    }

    /// Checks everything that has a range.
    ///
    /// # Errors
    /// `Invalid`, naming field, value and range.
    pub fn validate(&self) -> Result<()> {
        let refuse = |what: String| Err(Error::invalid(what));
        if !(1..=WORKERS_MAX).contains(&self.workers) {
            return refuse(format!("workers: {} given, 1 to {WORKERS_MAX} allowed", self.workers));
        }
        for (field, value) in [("workers per node", self.workers_per_node), ("slots", self.slots)] {
            if value == 0 {
                return refuse(format!("{field}: 0 given, at least 1 needed"));
            }
        }
        if !(self.speedup.is_finite() && self.speedup > 0.0) {
            return refuse(format!("speedup: {} given, above 0 allowed", self.speedup));
        }
        if !(self.decode_weight.is_finite() && self.decode_weight >= 0.0) {
            let given = self.decode_weight;
            return refuse(format!("decode weight: {given} given, 0 or more allowed"));
        }
        if !(self.report_ms.is_finite() && self.report_ms >= 1.0) {
            return refuse(format!("report: {} ms given, at least 1 needed", self.report_ms));
        }
        let rates = self.tiers.iter().flat_map(|tier| [tier.local, tier.remote]);
        let times = rates.flat_map(|rate| [rate.setup_ms, rate.block_ms]).chain([
            self.prefill.linear_ms,
            self.prefill.quadratic_ms,
            self.decode_token_ms,
        ]);
        for ms in times {
            if !(ms.is_finite() && ms >= 0.0) {
                return refuse(format!("time: {ms} ms given, 0 or more allowed"));
            }
        }
        Ok(())
    }
}
