//! The seam to kvstrata: what its tiers have of a prompt, and what loading that costs each engine now.
//!
//! The router goes on without it: an error, or no answer in time, is a prompt that no tier has anything of.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use kvstrata_tiers::{error::Result, tier::Tier};

use crate::score::{LoadCost, Segment};

/// A prompt, and who could take it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Question<'a> {
    /// The model that engines have opened their namespaces with.
    pub(super) model: &'a str,
    /// The LoRA adapter; empty for none.
    pub(super) lora: &'a str,
    /// The salt; empty for none.
    pub(super) salt: &'a str,
    /// The prompt.
    pub(super) tokens: &'a [u32],
    /// The engines, by what they are called where they open namespaces, and where they run if that is known.
    pub(super) engines: &'a [(&'a str, &'a str)],
}

/// What the tiers have for one engine: consecutive blocks from the beginning of the prompt on.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Found {
    /// Tokens in a block of the namespace.
    pub(super) block_tokens: usize,
    /// What is where, without gaps.
    pub(super) pieces: Vec<Piece>,
}

/// Consecutive blocks of one tier of one holder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Piece {
    /// How many.
    pub(super) blocks: u32,
    /// The tier.
    pub(super) tier: Tier,
    /// Tells holders and tiers apart.
    pub(super) source: u32,
    /// What loading costs, by blocks of the namespace.
    pub(super) cost: LoadCost,
}

/// An engine was taken, and will load so much.
#[derive(Debug, Clone)]
pub(super) struct Taken {
    /// As in the question.
    pub(super) model: String,
    /// As in the question.
    pub(super) lora: String,
    /// As in the question.
    pub(super) salt: String,
    /// As in the question.
    pub(super) tokens: Arc<[u32]>,
    /// The engine.
    pub(super) instance: String,
    /// Where it runs, if that is known.
    pub(super) node: String,
    /// Leading blocks of the namespace that its device has.
    pub(super) device_blocks: u32,
    /// Milliseconds that a block of the namespace takes to prefill.
    pub(super) prefill_block_ms: f64,
    /// How long it is expected to take until it has loaded.
    pub(super) reserve: Duration,
}

/// Somebody who knows what tiers have. Both may be asked at any time; whoever asks has a deadline.
pub(super) trait Tiers: fmt::Debug + Send + Sync {
    /// What there is for each of the engines, in their order; nothing for those that are not known.
    fn lookup<'a>(&'a self, question: Question<'a>) -> BoxFuture<'a, Result<Vec<Found>>>;

    /// Has what an engine will load brought nearer, and counted in what others are told.
    fn taken(&self, taken: Taken) -> BoxFuture<'_, Result<()>>;
}

impl Found {
    /// What is behind the first `device` blocks of `unit` tokens, in such blocks.
    pub(super) fn behind(&self, device: u32, unit: usize) -> Vec<Segment> {
        let factor = u32::try_from(self.block_tokens / unit.max(1)).unwrap_or(0);
        if factor == 0 || !self.block_tokens.is_multiple_of(unit.max(1)) {
            return Vec::new();
        }
        let mut skipped = device;
        let mut segments = Vec::new();
        for piece in &self.pieces {
            let blocks = piece.blocks.saturating_mul(factor);
            let left = blocks.saturating_sub(skipped);
            skipped = skipped.saturating_sub(blocks);
            if left > 0 {
                let block_ms = piece.cost.block_ms / f64::from(factor);
                let cost = LoadCost { block_ms, ..piece.cost };
                let Piece { tier, source, .. } = *piece;
                segments.push(Segment { blocks: left, tier, source, cost });
            }
        }
        segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_behind_the_device_is_to_be_loaded() {
        let cost = LoadCost { queue_ms: 1.0, setup_ms: 2.0, block_ms: 8.0 };
        let piece = |blocks, tier| Piece { blocks, tier, source: 0, cost };
        let found =
            Found { block_tokens: 64, pieces: vec![piece(2, Tier::Dram), piece(3, Tier::Nvme)] };
        let blocks = |device| {
            let segments = found.behind(device, 16);
            segments.iter().map(|s| (s.blocks, s.tier)).collect::<Vec<_>>()
        };
        assert_eq!(blocks(0), [(8, Tier::Dram), (12, Tier::Nvme)]);
        assert_eq!(blocks(3), [(5, Tier::Dram), (12, Tier::Nvme)]);
        assert_eq!(blocks(8), [(12, Tier::Nvme)]);
        assert_eq!(blocks(19), [(1, Tier::Nvme)]);
        assert_eq!(blocks(20), []);
        assert_eq!(found.behind(0, 16)[0].cost, LoadCost { block_ms: 2.0, ..cost });
        // Blocks of the device that are no share of theirs.
        assert_eq!(found.behind(0, 48), []);
        assert_eq!(Found::default().behind(0, 16), []);
    }
}
