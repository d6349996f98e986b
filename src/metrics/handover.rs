//! The families of what goes to other members: at a drain, and of what is read often.

use std::time::Duration;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::labels::HandoverOutcome;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: HandoverOutcome,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct HandoverMetrics {
    drain_blocks: Family<ByOutcome, Counter>,
    drain_bytes: Counter,
    drain_seconds: Gauge<f64, std::sync::atomic::AtomicU64>,
    second_blocks: Family<ByOutcome, Counter>,
    second_bytes: Counter,
}

impl HandoverMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            drain_blocks: Family::default(),
            drain_bytes: Counter::default(),
            drain_seconds: Gauge::default(),
            second_blocks: Family::default(),
            second_bytes: Counter::default(),
        };
        registry.register(
            "drain_blocks",
            "Blocks that a drain has offered to other members, by what became of them",
            metrics.drain_blocks.clone(),
        );
        registry.register_with_unit(
            "drain",
            "Payload that other members have taken from a drain",
            Unit::Bytes,
            metrics.drain_bytes.clone(),
        );
        registry.register_with_unit(
            "drain",
            "Time that the drain of this node has taken; 0 before it is over",
            Unit::Seconds,
            metrics.drain_seconds.clone(),
        );
        registry.register(
            "second_holder_blocks",
            "Blocks that are read often and were offered to a second member, by what became of them",
            metrics.second_blocks.clone(),
        );
        registry.register_with_unit(
            "second_holder",
            "Payload that second holders have taken",
            Unit::Bytes,
            metrics.second_bytes.clone(),
        );
        for &outcome in HandoverOutcome::ALL {
            drop(metrics.drain_blocks.get_or_create(&ByOutcome { outcome }));
            drop(metrics.second_blocks.get_or_create(&ByOutcome { outcome }));
        }
        metrics
    }

    /// Records what became of blocks that a drain has offered, and payload that was taken.
    pub fn record_drain(&self, taken: u64, bytes: u64, present: u64, refused: u64) {
        record(&self.drain_blocks, taken, present, refused);
        self.drain_bytes.inc_by(bytes);
    }

    /// The same of blocks that are read often.
    pub fn record_second(&self, taken: u64, bytes: u64, present: u64, refused: u64) {
        record(&self.second_blocks, taken, present, refused);
        self.second_bytes.inc_by(bytes);
    }

    /// Records that the drain is over.
    pub fn record_drained(&self, took: Duration) {
        self.drain_seconds.set(took.as_secs_f64());
    }
}

fn record(family: &Family<ByOutcome, Counter>, taken: u64, present: u64, refused: u64) {
    let outcomes = [
        (HandoverOutcome::Taken, taken),
        (HandoverOutcome::Present, present),
        (HandoverOutcome::Refused, refused),
    ];
    for (outcome, blocks) in outcomes {
        family.get_or_create(&ByOutcome { outcome }).inc_by(blocks);
    }
}
