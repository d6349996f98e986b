//! The modes that are compared, and what a router knows when it chooses.
//!
//! It knows what is on each device and in each tier; what it sent where, and which of that has had its
//! first or its last token; how long the tiers' queues were when they were last reported, and what it has
//! sent there since.

use std::{collections::VecDeque, fmt, str::FromStr};

use kvstrata_tiers::error::{Error, Result};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use super::{
    setup::Setup,
    tiers::{Found, Queues, Tiers},
};
use crate::score::{self, Candidate, Segment, Settings};

/// How a router chooses a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// One after another.
    RoundRobin,
    /// The one with the fewest requests under way.
    LeastLoaded,
    /// By the published cost, which knows devices only.
    DeviceOnly,
    /// By that cost with a constant credit for each tier.
    Constants,
    /// By that cost with the credit that the tiers are worth now.
    Timed,
    /// By the time to the first token that is expected.
    FirstToken,
}

impl Mode {
    /// All modes, in the order of tables and legends.
    pub const ALL: [Self; 6] = [
        Self::RoundRobin,
        Self::LeastLoaded,
        Self::DeviceOnly,
        Self::Constants,
        Self::Timed,
        Self::FirstToken,
    ];

    /// The name in flags and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::DeviceOnly => "device-only",
            Self::Constants => "constants",
            Self::Timed => "timed",
            Self::FirstToken => "first-token",
        }
    }

    /// How it scores; `None` for modes that do not.
    fn scoring(self, setup: &Setup) -> Option<Settings> {
        let mode = match self {
            Self::RoundRobin | Self::LeastLoaded => return None,
            Self::DeviceOnly => score::Mode::DeviceOnly,
            Self::Constants => score::Mode::Constants(setup.weights),
            Self::Timed | Self::FirstToken => score::Mode::Timed,
        };
        Some(Settings { mode, parallel_loads: true, ..Settings::default() })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mode {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid(format!("mode: {name} given, one of {names} allowed"))
        })
    }
}

/// A request as the router sees it.
#[derive(Debug, Clone, Copy)]
struct Sent {
    request: usize,
    /// Blocks that it expects the worker to prefill, and how long that takes: loads keep no engine busy.
    prefill_blocks: f64,
    prefill_ms: f64,
}

/// What a router has sent to one worker.
#[derive(Debug, Clone, Default)]
struct Tracked {
    /// Without a first token yet, in the order in which they were sent.
    waiting: VecDeque<Sent>,
    /// When the first of them became the first.
    since_ms: f64,
    /// Blocks of those that have one.
    decode_blocks: u64,
    /// Requests under way.
    requests: u32,
}

impl Tracked {
    /// Blocks under way: to prefill, and `decode_weight` for each that is decoded.
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    fn load_blocks(&self, decode_weight: f64) -> f64 {
        let waiting: f64 = self.waiting.iter().map(|sent| sent.prefill_blocks).sum();
        waiting + decode_weight * self.decode_blocks as f64
    }

    fn queue_ms(&self, now_ms: f64) -> f64 {
        let waiting: f64 = self.waiting.iter().map(|sent| sent.prefill_ms).sum();
        let first_ms = self.waiting.front().map_or(0.0, |sent| sent.prefill_ms);
        waiting - (now_ms - self.since_ms).clamp(0.0, first_ms)
    }
}

/// A router of one mode.
#[derive(Debug)]
pub(super) struct Router<'a> {
    setup: &'a Setup,
    mode: Mode,
    scoring: Option<Settings>,
    tracked: Vec<Tracked>,
    /// As last reported, with what was reserved since.
    queues: Queues,
    /// When that was.
    reported_ms: f64,
    /// The worker that is asked first: the next one, or any.
    turn: u32,
    chance: ChaCha8Rng,
}

/// What is to be routed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prompt<'a> {
    pub(super) request: usize,
    pub(super) now_ms: f64,
    pub(super) blocks: u32,
    /// What each worker's device has of it.
    pub(super) device_blocks: &'a [u32],
    pub(super) found: &'a Found,
}

/// What a router expects of a worker.
#[derive(Debug)]
struct Expected {
    worker: u32,
    /// By which workers are compared; the lower, the better.
    cost: f64,
    prefill_blocks: f64,
    prefill_ms: f64,
    /// From where it would load, and how many blocks.
    segments: Vec<Segment>,
    load_blocks: u32,
}

impl<'a> Router<'a> {
    pub(super) fn new(setup: &'a Setup, mode: Mode) -> Self {
        Self {
            setup,
            mode,
            scoring: mode.scoring(setup),
            tracked: vec![Tracked::default(); setup.workers as usize],
            queues: Queues::default(),
            reported_ms: f64::NEG_INFINITY,
            turn: 0,
            chance: ChaCha8Rng::seed_from_u64(setup.seed),
        }
    }

    /// Chooses a worker and takes note that the request goes there.
    pub(super) fn route(&mut self, prompt: &Prompt<'_>, tiers: &Tiers<'_>) -> u32 {
        self.hear_reports(prompt.now_ms, tiers);
        if self.mode == Mode::RoundRobin {
            self.turn = self.turn.wrapping_add(1);
        } else {
            // Among equals any may be the first.
            self.turn = self.chance.next_u32();
        }
        let workers = self.setup.workers;
        let order = (0..workers).map(|step| (self.turn % workers + step) % workers);
        let mut expected: Vec<Expected> =
            order.map(|worker| self.expect(worker, prompt, tiers)).collect();
        let costs: Vec<f64> = expected.iter().map(|expected| expected.cost).collect();
        let Some(picked) = score::pick(&costs, 0.0, 0.0) else { return 0 };
        let picked = expected.swap_remove(picked);
        self.send(prompt, &picked);
        picked.worker
    }

    fn hear_reports(&mut self, now_ms: f64, tiers: &Tiers<'_>) {
        if now_ms - self.reported_ms >= self.setup.report_ms {
            self.reported_ms = (now_ms / self.setup.report_ms).floor() * self.setup.report_ms;
            self.queues = tiers.queues(self.reported_ms);
        }
    }

    fn expect(&self, worker: u32, prompt: &Prompt<'_>, tiers: &Tiers<'_>) -> Expected {
        let mut expected = Expected {
            worker,
            cost: 0.0,
            prefill_blocks: 0.0,
            prefill_ms: 0.0,
            segments: Vec::new(),
            load_blocks: 0,
        };
        let Some(tracked) = self.tracked.get(worker as usize) else { return expected };
        let Some(scoring) = &self.scoring else {
            if self.mode == Mode::LeastLoaded {
                expected.cost = f64::from(tracked.requests);
            }
            return expected;
        };
        let device_blocks = prompt.device_blocks.get(worker as usize).copied().unwrap_or(0);
        if scoring.mode != score::Mode::DeviceOnly {
            let node = self.setup.node_of(worker);
            expected.segments = tiers.plan(prompt.found, node, device_blocks, &self.queues);
        }
        let candidate = Candidate {
            device_blocks,
            decode_blocks: tracked.load_blocks(self.setup.decode_weight),
            queue_ms: tracked.queue_ms(prompt.now_ms),
            prefill: self.setup.prefill,
            segments: &expected.segments,
        };
        let assessed = score::assess(prompt.blocks, &candidate, scoring);
        let by_time = self.mode == Mode::FirstToken;
        expected.cost = if by_time { assessed.ttft_ms } else { assessed.cost };
        expected.load_blocks = assessed.best_blocks;
        let ready = device_blocks.saturating_add(assessed.best_blocks);
        expected.prefill_blocks = f64::from(prompt.blocks.saturating_sub(ready));
        expected.prefill_ms = self.setup.prefill.ms(ready, prompt.blocks);
        expected
    }

    fn send(&mut self, prompt: &Prompt<'_>, expected: &Expected) {
        self.queues.reserve(&expected.segments, expected.load_blocks);
        let Some(tracked) = self.tracked.get_mut(expected.worker as usize) else { return };
        if tracked.waiting.is_empty() {
            tracked.since_ms = prompt.now_ms;
        }
        tracked.requests += 1;
        tracked.waiting.push_back(Sent {
            request: prompt.request,
            prefill_blocks: expected.prefill_blocks,
            prefill_ms: expected.prefill_ms,
        });
    }

    /// The first token of a request of `blocks` blocks has come.
    pub(super) fn first_token(&mut self, worker: u32, request: usize, blocks: u32, now_ms: f64) {
        let Some(tracked) = self.tracked.get_mut(worker as usize) else { return };
        tracked.waiting.retain(|sent| sent.request != request);
        tracked.since_ms = now_ms;
        tracked.decode_blocks += u64::from(blocks);
    }

    /// The last token of a request of `blocks` blocks has come.
    pub(super) fn last_token(&mut self, worker: u32, blocks: u32) {
        let Some(tracked) = self.tracked.get_mut(worker as usize) else { return };
        tracked.decode_blocks = tracked.decode_blocks.saturating_sub(u64::from(blocks));
        tracked.requests = tracked.requests.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        score::{Prefill, Weights},
        sim::cluster::{Loading, Rate, TierSetup},
        trace::Run,
    };

    #[test]
    fn queues_are_known_by_reports_and_by_what_was_reserved_since() {
        let rate = Rate { setup_ms: 0.0, block_ms: 1.0 };
        let dram = TierSetup { capacity_blocks: 100, local: rate, remote: rate };
        let setup = Setup {
            workers: 1,
            workers_per_node: 1,
            prefill: Prefill::linear(10.0),
            device_blocks: 100,
            slots: 1,
            decode_token_ms: 1.0,
            tiers: [dram, TierSetup::NONE, TierSetup::NONE],
            loading: Loading::Paying,
            report_ms: 100.0,
            decode_weight: 0.0,
            weights: Weights::DYNAMO,
            speedup: 1.0,
            seed: 0,
        };
        let mut tiers = Tiers::new(&setup);
        let runs = [Run { first: 0, count: 40 }];
        tiers.store(0, &runs);
        let found = tiers.find(&runs);
        let mut router = Router::new(&setup, Mode::Timed);
        let mut known_ms = |now_ms: f64, tiers: &Tiers<'_>| {
            let prompt =
                Prompt { request: 0, now_ms, blocks: 40, device_blocks: &[0], found: &found };
            router.hear_reports(now_ms, tiers);
            let known = tiers.plan(&found, 0, 0, &router.queues)[0].cost.queue_ms;
            router.route(&prompt, tiers);
            known
        };
        assert_eq!(known_ms(0.0, &tiers), 0.0);
        // The node has more to do than this router gave it.
        let segments = tiers.plan(&found, 0, 0, &Queues::default());
        for _ in 0..5 {
            tiers.load(0.0, &runs, 0, (&segments, 40));
        }
        assert_eq!(known_ms(50.0, &tiers), 40.0, "what was reserved");
        assert_eq!(known_ms(99.0, &tiers), 80.0);
        assert_eq!(known_ms(130.0, &tiers), 100.0, "200 ms at 0, reported at 100");
    }
}
