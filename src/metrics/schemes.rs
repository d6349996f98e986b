//! The families of the index of hash schemes.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::labels::UnindexedLabel;
use crate::schemes::Scheme;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByScheme {
    scheme: Scheme,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReason {
    scheme: Scheme,
    reason: UnindexedLabel,
}

/// See the module; clones share the families.
#[derive(Debug, Clone, Default)]
pub struct SchemeMetrics {
    entries: Family<ByScheme, Gauge>,
    bytes: Family<ByScheme, Gauge>,
    unindexed: Family<ByReason, Counter>,
}

impl SchemeMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        registry.register(
            "scheme_index_entries",
            "Blocks that can be found by names of other hash schemes",
            metrics.entries.clone(),
        );
        registry.register_with_unit(
            "scheme_index",
            "Memory of the index of hash schemes",
            Unit::Bytes,
            metrics.bytes.clone(),
        );
        registry.register(
            "scheme_unindexed_blocks",
            "Times that a block was not indexed in a hash scheme, by reason",
            metrics.unindexed.clone(),
        );
        for scheme in Scheme::ALL {
            metrics.show(*scheme, 0, 0);
            for reason in UnindexedLabel::ALL {
                metrics.record_unindexed(*scheme, *reason, 0);
            }
        }
        metrics
    }

    /// Shows what there is of a scheme.
    pub fn show(&self, scheme: Scheme, entries: u64, bytes: u64) {
        let set = |family: &Family<ByScheme, Gauge>, value| {
            let gauge = family.get_or_create_owned(&ByScheme { scheme });
            gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        };
        set(&self.entries, entries);
        set(&self.bytes, bytes);
    }

    /// Records blocks that were not indexed.
    pub fn record_unindexed(&self, scheme: Scheme, reason: UnindexedLabel, blocks: u64) {
        self.unindexed.get_or_create_owned(&ByReason { scheme, reason }).inc_by(blocks);
    }
}
