//! The families of lookups that ask other members, and of the filters that say whom.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::labels::{FilterOf, PeerAnswer};

/// Upper bounds for asking others, in seconds: the deadline is in the last line but one.
const FANOUT_SECONDS: [f64; 10] = [
    0.000_2, 0.000_5, //
    0.001, 0.002, 0.005, //
    0.01, 0.02, 0.025, //
    0.05, 0.1,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: PeerAnswer,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOwner {
    of: FilterOf,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct FanoutMetrics {
    seconds: Histogram,
    asked: Counter,
    blocks: Counter,
    partial: Counter,
    answers: Family<ByOutcome, Counter>,
    filter_bytes: Family<ByOwner, Gauge>,
    filter_age: Gauge,
    unknown: Gauge,
}

impl FanoutMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            seconds: Histogram::new(FANOUT_SECONDS),
            asked: Counter::default(),
            blocks: Counter::default(),
            partial: Counter::default(),
            answers: Family::default(),
            filter_bytes: Family::default(),
            filter_age: Gauge::default(),
            unknown: Gauge::default(),
        };
        registry.register_with_unit(
            "cluster_fanout",
            "Time that lookups took to ask other members",
            Unit::Seconds,
            metrics.seconds.clone(),
        );
        registry.register(
            "cluster_fanout_asked_members",
            "Members asked by lookups, in all rounds",
            metrics.asked.clone(),
        );
        registry.register(
            "cluster_fanout_blocks",
            "Blocks of prefixes that other members have",
            metrics.blocks.clone(),
        );
        registry.register(
            "cluster_fanout_partial_lookups",
            "Lookups that there may be more of than was found",
            metrics.partial.clone(),
        );
        registry.register(
            "cluster_fanout_answers",
            "Members asked by lookups, by what they answered",
            metrics.answers.clone(),
        );
        registry.register_with_unit(
            "cluster_filter",
            "Memory of the filters that say which blocks nodes may have",
            Unit::Bytes,
            metrics.filter_bytes.clone(),
        );
        registry.register_with_unit(
            "cluster_filter_age",
            "Time since a member last told what is new in its filter, of the member that it is longest of",
            Unit::Seconds,
            metrics.filter_age.clone(),
        );
        registry.register(
            "cluster_filter_unknown_members",
            "Members whose filter is not known",
            metrics.unknown.clone(),
        );
        for &outcome in PeerAnswer::ALL {
            drop(metrics.answers.get_or_create(&ByOutcome { outcome }));
        }
        for &of in FilterOf::ALL {
            drop(metrics.filter_bytes.get_or_create(&ByOwner { of }));
        }
        metrics
    }

    /// Records a lookup that has asked so many members, who had so many of its blocks.
    pub fn record(&self, asked: usize, blocks: u32, elapsed: Duration) {
        self.seconds.observe(elapsed.as_secs_f64());
        self.asked.inc_by(u64::try_from(asked).unwrap_or(u64::MAX));
        self.blocks.inc_by(blocks.into());
    }

    /// Records a lookup that there may be more of.
    pub fn record_partial(&self) {
        self.partial.inc();
    }

    /// Records an answer.
    pub fn record_answer(&self, outcome: PeerAnswer) {
        self.answers.get_or_create(&ByOutcome { outcome }).inc();
    }

    /// Answers of this kind, since the start.
    #[must_use]
    pub fn answers(&self, outcome: PeerAnswer) -> u64 {
        self.answers.get_or_create(&ByOutcome { outcome }).get()
    }

    /// Shows what is known of members: bytes of their filters, the age of the oldest, and how many are not known.
    pub fn show(&self, bytes: usize, oldest: Duration, unknown: usize) {
        self.show_filter(FilterOf::Members, bytes);
        self.filter_age.set(i64::try_from(oldest.as_secs()).unwrap_or(i64::MAX));
        self.unknown.set(i64::try_from(unknown).unwrap_or(i64::MAX));
    }

    /// Shows the bytes of filters.
    pub fn show_filter(&self, of: FilterOf, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        self.filter_bytes.get_or_create(&ByOwner { of }).set(bytes);
    }
}
