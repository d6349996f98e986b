//! How long prefilling and loading take.

use kvstrata_tiers::tier::Tier;

/// How long prefilling takes an engine: the first `n` blocks take `linear_ms n + quadratic_ms n^2`.
///
/// A block costs the more the more blocks are before it, because it attends to all of them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prefill {
    /// Milliseconds for each block.
    pub linear_ms: f64,
    /// Milliseconds for each block squared; 0 for a curve that is a line.
    pub quadratic_ms: f64,
}

impl Prefill {
    /// Every block takes so many milliseconds.
    #[must_use]
    pub fn linear(block_ms: f64) -> Self {
        Self { linear_ms: block_ms, quadratic_ms: 0.0 }
    }

    /// Milliseconds to prefill the blocks `from..to`; 0 if there is none.
    #[must_use]
    pub fn ms(self, from: u32, to: u32) -> f64 {
        let (from, to) = (f64::from(from), f64::from(to.max(from)));
        self.linear_ms * (to - from) + self.quadratic_ms * (to * to - from * from)
    }

    /// Mean milliseconds of a block of `from..to`; of the block at `from` if there is none.
    #[must_use]
    pub fn mean_ms(self, from: u32, to: u32) -> f64 {
        let to = to.max(from.saturating_add(1));
        self.ms(from, to) / f64::from(to - from)
    }
}

/// What loading from one tier of one holder costs one candidate, now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoadCost {
    /// Milliseconds until what waits already has been loaded.
    pub queue_ms: f64,
    /// Milliseconds to the first byte.
    pub setup_ms: f64,
    /// Milliseconds for each block, by the bandwidth that is achieved.
    pub block_ms: f64,
}

impl LoadCost {
    /// Milliseconds to load `blocks` blocks; nothing takes no time.
    #[must_use]
    pub fn ms(self, blocks: u32) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        self.queue_ms + self.setup_ms + f64::from(blocks) * self.block_ms
    }
}

/// Consecutive blocks that one source has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Segment {
    /// How many blocks.
    pub blocks: u32,
    /// The tier.
    pub tier: Tier,
    /// Names the tier and its holder among the segments of a candidate: queue and setup are paid once
    /// for each.
    pub source: u32,
    /// What loading from there costs.
    pub cost: LoadCost,
}

/// The smallest number of blocks that are loaded sooner than they are prefilled, `None` if there is none:
/// the smallest `k` with `k (prefill_block_ms - block_ms) > queue_ms + setup_ms`.
#[must_use]
pub fn break_even_blocks(prefill_block_ms: f64, cost: LoadCost) -> Option<u32> {
    let saved = prefill_block_ms - cost.block_ms;
    if saved.is_nan() || saved <= 0.0 {
        return None;
    }
    let blocks = ((cost.queue_ms + cost.setup_ms) / saved).floor() + 1.0;
    if blocks > f64::from(u32::MAX) {
        return None;
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked above")]
    let blocks = blocks.max(1.0) as u32;
    Some(blocks)
}

/// The weight between 0 and 1 by which a router that knows constants only would give the same credit for
/// a hit of `blocks` blocks: `max(0, 1 - load / prefill)`; 0 for no blocks.
#[must_use]
pub fn constant_weight(blocks: u32, prefill_block_ms: f64, cost: LoadCost) -> f64 {
    let prefill = f64::from(blocks) * prefill_block_ms;
    if prefill > 0.0 { (1.0 - cost.ms(blocks) / prefill).max(0.0) } else { 0.0 }
}
