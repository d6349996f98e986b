//! The families of the events of engines.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::labels::EventBatch;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByBatch {
    outcome: EventBatch,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct EventMetrics {
    /// Engines that are listened to now.
    pub connected: Gauge,
    /// Blocks that engines have told of.
    pub told_blocks: Counter,
    /// Blocks that are here and were described by an event.
    pub described_blocks: Counter,
    batches: Family<ByBatch, Counter>,
}

impl EventMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            connected: Gauge::default(),
            told_blocks: Counter::default(),
            described_blocks: Counter::default(),
            batches: Family::default(),
        };
        registry.register(
            "event_sources",
            "Engines whose events are listened to now",
            metrics.connected.clone(),
        );
        registry.register(
            "event_batches",
            "Batches of events of engines, by what became of them",
            metrics.batches.clone(),
        );
        registry.register(
            "event_told_blocks",
            "Blocks that engines have told of",
            metrics.told_blocks.clone(),
        );
        registry.register(
            "event_described_blocks",
            "Blocks described by what engines have told of them",
            metrics.described_blocks.clone(),
        );
        for &outcome in EventBatch::ALL {
            drop(metrics.batches.get_or_create(&ByBatch { outcome }));
        }
        metrics
    }

    /// Records batches.
    pub fn record_batches(&self, outcome: EventBatch, count: u64) {
        self.batches.get_or_create(&ByBatch { outcome }).inc_by(count);
    }

    /// Batches of which this became, since the start.
    #[must_use]
    pub fn batches(&self, outcome: EventBatch) -> u64 {
        self.batches.get_or_create(&ByBatch { outcome }).get()
    }
}
