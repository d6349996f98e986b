//! The choice of an engine for a prompt. Nothing waits here; how busy an engine is and what it has come
//! from outside.
//!
//! | mode | takes the engine |
//! |---|---|
//! | `round-robin` | whose turn is longest ago |
//! | `least-loaded` | with the fewest blocks under way |
//! | `device-only` | of the least `blocks to prefill + blocks under way`, the published formula |
//! | `constants` | the same, where blocks of a tier count as a share of one, whatever loading them takes |
//! | `timed` | the same, where they count as much as they save now |
//!
//! Blocks to prefill are those of requests that wait for their first token, and those of the prompt; blocks
//! under way are those of all requests with the prompt, shared ones once. The prompt's own are thus in both,
//! as a router counts them that looks ahead. Of equals that one is taken which has least on its device, so that prompts
//! that have nothing in common spread; then that whose turn is longest ago.

use clap::ValueEnum;
use kvstrata_tiers::tier::Tier;

use super::slots::{Load, as_blocks};
use crate::score::{
    self, Assessment, Candidate, Prefill, Segment, Settings, Weights, assess, pick,
};

/// How engines are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Mode {
    /// In turn
    RoundRobin,
    /// The fewest blocks under way
    LeastLoaded,
    /// What devices have, and the load
    DeviceOnly,
    /// As device-only, with constant weights for tiers
    Constants,
    /// As device-only, with the time that tiers save now
    Timed,
}

impl Mode {
    /// The spelling of the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::DeviceOnly => "device-only",
            Self::Constants => "constants",
            Self::Timed => "timed",
        }
    }

    /// Whether it asks what tiers have.
    pub(super) fn wants_tiers(self) -> bool {
        matches!(self, Self::Constants | Self::Timed)
    }

    /// Whether it asks what a prompt is.
    pub(super) fn wants_prompt(self) -> bool {
        !matches!(self, Self::RoundRobin | Self::LeastLoaded)
    }

    /// How tiers count for the score.
    fn scoring(self) -> score::Mode {
        match self {
            Self::Constants => score::Mode::Constants(Weights::DYNAMO),
            Self::Timed => score::Mode::Timed,
            Self::RoundRobin | Self::LeastLoaded | Self::DeviceOnly => score::Mode::DeviceOnly,
        }
    }
}

/// An engine that could take the prompt.
#[derive(Debug, Clone)]
pub(super) struct Offer {
    /// Which one.
    pub(super) engine: usize,
    /// Leading blocks of the prompt on its device.
    pub(super) device: u32,
    /// How busy it is.
    pub(super) load: Load,
    /// What it could load, behind these.
    pub(super) segments: Vec<Segment>,
    /// How long it takes to prefill.
    pub(super) prefill: Prefill,
    /// Blocks of anybody on its device.
    pub(super) held: usize,
    /// When it was taken last.
    pub(super) turn: u64,
}

/// What an engine would do for the prompt, and what speaks for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Choice {
    /// Which one.
    pub(super) engine: usize,
    /// Blocks on its device.
    pub(super) device: u32,
    /// Blocks that it loads from dram, nvme and object.
    pub(super) loaded: [u32; 3],
    /// Blocks that it computes.
    pub(super) computed: u32,
    /// Milliseconds for these.
    pub(super) prefill_ms: f64,
    /// Milliseconds to the first token.
    pub(super) ttft_ms: f64,
    /// The least one is taken.
    pub(super) cost: f64,
}

/// What each of the offers comes to, in the order in which equals are preferred.
pub(super) fn weigh(mode: Mode, prompt_blocks: u32, offers: &[Offer]) -> Vec<Choice> {
    let mut offers: Vec<_> = offers.iter().collect();
    match mode {
        Mode::RoundRobin => offers.sort_by_key(|offer| (offer.turn, offer.engine)),
        Mode::LeastLoaded => {
            offers.sort_by_key(|offer| (offer.load.requests, offer.turn, offer.engine));
        }
        Mode::DeviceOnly | Mode::Constants | Mode::Timed => {
            offers.sort_by_key(|offer| (offer.held, offer.turn, offer.engine));
        }
    }
    let settings = Settings { mode: mode.scoring(), ..Settings::default() };
    offers.into_iter().map(|offer| offer.weigh(mode, prompt_blocks, &settings)).collect()
}

/// The one to take.
pub(super) fn take(choices: &[Choice]) -> Option<Choice> {
    let costs: Vec<f64> = choices.iter().map(|choice| choice.cost).collect();
    pick(&costs, 0.0, 0.0).and_then(|at| choices.get(at)).copied()
}

impl Offer {
    fn weigh(&self, mode: Mode, prompt_blocks: u32, settings: &Settings) -> Choice {
        let candidate = Candidate {
            device_blocks: self.device,
            decode_blocks: self.load.blocks + self.load.prefill_blocks,
            queue_ms: self.load.queue_ms,
            prefill: self.prefill,
            segments: &self.segments,
        };
        let assessed = assess(prompt_blocks, &candidate, settings);
        let device = self.device.min(prompt_blocks);
        let ready = device.saturating_add(assessed.best_blocks);
        Choice {
            engine: self.engine,
            device,
            loaded: self.loaded(assessed.best_blocks),
            computed: prompt_blocks.saturating_sub(ready),
            prefill_ms: self.prefill.ms(ready, prompt_blocks),
            ttft_ms: assessed.ttft_ms,
            cost: self.cost(mode, &assessed),
        }
    }

    fn cost(&self, mode: Mode, assessed: &Assessment) -> f64 {
        match mode {
            // Equals, so that the first one is taken.
            Mode::RoundRobin => 0.0,
            Mode::LeastLoaded => self.load.prefill_blocks + self.load.blocks,
            Mode::DeviceOnly | Mode::Constants | Mode::Timed => assessed.cost,
        }
    }

    /// The first so many blocks of its segments, by tier.
    fn loaded(&self, mut blocks: u32) -> [u32; 3] {
        let mut loaded = [0_u32; 3];
        for segment in &self.segments {
            let taken = segment.blocks.min(blocks);
            blocks -= taken;
            let [dram, nvme, object] = &mut loaded;
            let tier = match segment.tier {
                Tier::Dram => dram,
                Tier::Nvme => nvme,
                Tier::Object => object,
            };
            *tier += taken;
        }
        loaded
    }
}

/// What is known of how long an engine takes to prefill: the time to first tokens of requests that were
/// alone in being computed, later ones counting more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Learned {
    ms: f64,
    tokens: f64,
}

/// What each further request leaves of those before it.
const FADE: f64 = 0.8;
/// Before the first one: 8,000 tokens a second, of a prompt that weighs little.
const ASSUMED: Learned = Learned { ms: 8.0, tokens: 64.0 };
/// Fewer tokens say more of what else takes time than of prefilling.
const LEAST_TOKENS: f64 = 64.0;

impl Default for Learned {
    fn default() -> Self {
        ASSUMED
    }
}

impl Learned {
    /// So many tokens took so long.
    pub(super) fn learn(&mut self, tokens: f64, ms: f64) {
        if tokens >= LEAST_TOKENS && ms.is_finite() && ms > 0.0 {
            self.ms = self.ms * FADE + ms;
            self.tokens = self.tokens * FADE + tokens;
        }
    }

    /// The line through it, in blocks of so many tokens.
    pub(super) fn prefill(self, block_tokens: usize) -> Prefill {
        Prefill::linear(self.ms / self.tokens * as_blocks(block_tokens))
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
