//! The families of a router. `docs/router.md` has the table.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use kvstrata_tiers::label_values;

use super::decide::Choice;
use crate::metrics::{EventMetrics, PREFIX};

/// Upper bounds for deciding, in seconds: in time in the first two lines.
const DECISION_SECONDS: [f64; 12] = [
    0.000_1, 0.000_2, 0.000_5, //
    0.001, 0.002, 0.005, //
    0.01, 0.02, 0.05, //
    0.1, 0.5, 2.0,
];
/// Upper bounds for times to first tokens, in seconds.
const TTFT_SECONDS: [f64; 13] =
    [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0];
/// Upper bounds for what was predicted over what it was.
const RATIOS: [f64; 10] = [0.25, 0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0, 4.0, 8.0];

label_values! {
    /// What became of a request.
    Outcome {
        /// Answered to the end, with success.
        Ok = "ok",
        /// Answered with an error of the engine's.
        Refused = "refused",
        /// The engine was lost on the way.
        Broken = "broken",
        /// The client went away.
        Cancelled = "cancelled",
        /// There was no engine for it.
        Nobody = "nobody",
        /// There were too many at a time.
        Full = "full",
    }
}

label_values! {
    /// What kvstrata said.
    TiersSaid {
        /// The tiers have something of the prompt.
        Found = "found",
        /// They have nothing of it.
        Nothing = "nothing",
        /// It did not answer in time.
        Late = "late",
        /// It answered with an error, or is away.
        Failed = "failed",
        /// It was not asked.
        Off = "off",
    }
}

label_values! {
    /// Where blocks of a prompt come from, as it is predicted.
    Source {
        /// The engine's device has them.
        Device = "device",
        /// Loaded from CPU memory.
        Dram = "dram",
        /// Loaded from local flash.
        Nvme = "nvme",
        /// Loaded from object storage.
        Object = "object",
        /// Computed.
        Computed = "computed",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByEngine {
    engine: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySaid {
    answer: TiersSaid,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BySource {
    source: Source,
}

/// See the module; clones share the families. Engines are named on the command line, and no more come.
#[derive(Debug, Clone)]
pub(super) struct RouterMetrics {
    requests: Family<ByOutcome, Counter>,
    taken: Family<ByEngine, Counter>,
    tiers: Family<BySaid, Counter>,
    blocks: Family<BySource, Counter>,
    up: Family<ByEngine, Gauge>,
    device_blocks: Family<ByEngine, Gauge>,
    in_flight: Family<ByEngine, Gauge>,
    /// Connections of clients.
    pub(super) connections: Gauge,
    /// Requests whose prompt was not known, in a mode that asks for it.
    pub(super) blind: Counter,
    /// Requests that another engine was found for, because one was not reached.
    pub(super) retried: Counter,
    /// Time to decide, tokenising and asking included.
    pub(super) decision_seconds: Histogram,
    /// Time to the first token of requests that stream.
    pub(super) ttft_seconds: Histogram,
    /// What of it was predicted, over what it was.
    pub(super) ttft_ratio: Histogram,
    /// What engines publish.
    pub(super) events: EventMetrics,
}

impl RouterMetrics {
    /// Registers the families, with every series.
    pub(super) fn register(registry: &mut Registry, engines: impl Iterator<Item = String>) -> Self {
        let prefixed = registry.sub_registry_with_prefix(PREFIX);
        let events = EventMetrics::register(prefixed);
        let metrics = Self {
            requests: Family::default(),
            taken: Family::default(),
            tiers: Family::default(),
            blocks: Family::default(),
            up: Family::default(),
            device_blocks: Family::default(),
            in_flight: Family::default(),
            connections: Gauge::default(),
            blind: Counter::default(),
            retried: Counter::default(),
            decision_seconds: Histogram::new(DECISION_SECONDS),
            ttft_seconds: Histogram::new(TTFT_SECONDS),
            ttft_ratio: Histogram::new(RATIOS),
            events,
        };
        metrics.show_in(prefixed.sub_registry_with_prefix("router"));
        for engine in engines {
            let by = ByEngine { engine };
            drop(metrics.taken.get_or_create(&by));
            for gauges in [&metrics.up, &metrics.device_blocks, &metrics.in_flight] {
                drop(gauges.get_or_create(&by));
            }
        }
        for &outcome in Outcome::ALL {
            drop(metrics.requests.get_or_create(&ByOutcome { outcome }));
        }
        for &answer in TiersSaid::ALL {
            drop(metrics.tiers.get_or_create(&BySaid { answer }));
        }
        for &source in Source::ALL {
            drop(metrics.blocks.get_or_create(&BySource { source }));
        }
        metrics
    }

    fn show_in(&self, registry: &mut Registry) {
        registry.register(
            "requests",
            "Requests for completions, by what became of them",
            self.requests.clone(),
        );
        registry.register("taken", "Requests that were sent to an engine", self.taken.clone());
        registry.register("tier_lookups", "Decisions, by what the tiers had", self.tiers.clone());
        registry.register(
            "prompt_blocks",
            "Blocks of prompts, by where they were expected to come from",
            self.blocks.clone(),
        );
        registry.register("engine_up", "1 if requests are sent to the engine", self.up.clone());
        registry.register(
            "device_blocks",
            "Blocks that the engine has told of",
            self.device_blocks.clone(),
        );
        registry.register(
            "in_flight",
            "Requests that the engine works on, of this router",
            self.in_flight.clone(),
        );
        registry.register(
            "connections",
            "Connections of clients open now",
            self.connections.clone(),
        );
        registry.register(
            "blind",
            "Decisions without knowing the prompt, in a mode that asks for it",
            self.blind.clone(),
        );
        registry.register(
            "retried",
            "Requests sent to another engine because one was not reached",
            self.retried.clone(),
        );
        registry.register_with_unit(
            "decision",
            "Time from a request to the choice of its engine",
            Unit::Seconds,
            self.decision_seconds.clone(),
        );
        registry.register_with_unit(
            "ttft",
            "Time from sending a request that streams to the first bytes of its answer",
            Unit::Seconds,
            self.ttft_seconds.clone(),
        );
        registry.register(
            "ttft_predicted_ratio",
            "Predicted time to the first token over what it was",
            self.ttft_ratio.clone(),
        );
    }

    /// What became of a request.
    pub(super) fn record(&self, outcome: Outcome) {
        self.requests.get_or_create(&ByOutcome { outcome }).inc();
    }

    /// What the tiers were found to have.
    pub(super) fn record_tiers(&self, answer: TiersSaid) {
        self.tiers.get_or_create(&BySaid { answer }).inc();
    }

    /// An engine was taken.
    pub(super) fn record_choice(&self, engine: &str, choice: &Choice) {
        self.taken.get_or_create(&ByEngine { engine: engine.to_owned() }).inc();
        let [dram, nvme, object] = choice.loaded;
        for (source, blocks) in [
            (Source::Device, choice.device),
            (Source::Dram, dram),
            (Source::Nvme, nvme),
            (Source::Object, object),
            (Source::Computed, choice.computed),
        ] {
            self.blocks.get_or_create(&BySource { source }).inc_by(blocks.into());
        }
    }

    /// How an engine is now.
    pub(super) fn show_engine(&self, engine: &str, up: bool, blocks: usize, requests: u32) {
        let by = ByEngine { engine: engine.to_owned() };
        self.up.get_or_create(&by).set(up.into());
        self.device_blocks.get_or_create(&by).set(i64::try_from(blocks).unwrap_or(i64::MAX));
        self.in_flight.get_or_create(&by).set(requests.into());
    }
}
