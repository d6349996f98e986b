//! What a mode came to.

use kvstrata_tiers::tier::Tier;

/// What a simulated run did. Blocks: all that was asked for was on the device, loaded, or computed.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Blocks of all prompts.
    pub asked_blocks: u64,
    /// Blocks that were on the worker's device.
    pub device_blocks: u64,
    /// Blocks that were loaded from dram, nvme and object of the worker's own node.
    pub local_blocks: [u64; 3],
    /// Blocks that were loaded from dram and nvme of other nodes.
    pub remote_blocks: [u64; 3],
    /// Blocks that were prefilled.
    pub computed_blocks: u64,
    /// Milliseconds that each worker prefilled.
    pub busy_ms: Vec<f64>,
    /// When the last request had its last token, in ms from the first arrival.
    pub end_ms: f64,
    /// Milliseconds to the first token of each request, ascending.
    pub first_token_ms: Vec<f64>,
}

impl Outcome {
    /// Blocks that were loaded from `tier` of any node.
    #[must_use]
    pub fn loaded_blocks(&self, tier: Tier) -> u64 {
        let number = Tier::ALL.iter().position(|known| *known == tier).unwrap_or_default();
        let of = |blocks: &[u64; 3]| blocks.get(number).copied().unwrap_or(0);
        of(&self.local_blocks) + of(&self.remote_blocks)
    }

    /// The mean time to the first token, in ms; 0 without requests.
    #[must_use]
    pub fn mean_ms(&self) -> f64 {
        mean(&self.first_token_ms)
    }

    /// The time to the first token that a share of `quantile`, 0 to 1, of the requests did not exceed.
    #[must_use]
    pub fn quantile_ms(&self, quantile: f64) -> f64 {
        let len = self.first_token_ms.len();
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a rank among requests; the cast saturates"
        )]
        let rank = (quantile * len as f64).ceil() as usize;
        self.first_token_ms.get(rank.clamp(1, len.max(1)) - 1).copied().unwrap_or(0.0)
    }

    /// The share of the requests that had their first token within `limit_ms`.
    #[must_use]
    pub fn within(&self, limit_ms: f64) -> f64 {
        let within = self.first_token_ms.partition_point(|ms| *ms <= limit_ms);
        crate::sim::ratio(within as u64, self.first_token_ms.len() as u64)
    }

    /// The share of the time that the busiest worker and the mean one prefilled.
    #[must_use]
    pub fn busy(&self) -> (f64, f64) {
        if self.end_ms <= 0.0 {
            return (0.0, 0.0);
        }
        let most = self.busy_ms.iter().copied().fold(0.0, f64::max);
        (most / self.end_ms, mean(&self.busy_ms) / self.end_ms)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a number of requests or workers")]
fn mean(of: &[f64]) -> f64 {
    if of.is_empty() { 0.0 } else { of.iter().sum::<f64>() / of.len() as f64 }
}
