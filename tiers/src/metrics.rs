//! What the store counts. Gauges are taken from [`crate::stack::Stack::usage`] by the server.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use crate::tier::Tier;

impl EncodeLabelValue for Tier {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        EncodeLabelValue::encode(&self.name(), encoder)
    }
}

/// Why a block left dram.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EvictReason {
    /// Another block of its size needed the memory.
    Capacity,
    /// Its extent went to another size.
    Reclaim,
    /// The map was full.
    Index,
    /// A client removed it.
    Removed,
    /// It failed verification.
    Corrupt,
}

impl EvictReason {
    /// All reasons, in the order of the declaration.
    pub const ALL: [Self; 5] =
        [Self::Capacity, Self::Reclaim, Self::Index, Self::Removed, Self::Corrupt];
}

impl EncodeLabelValue for EvictReason {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        let name = match self {
            Self::Capacity => "capacity",
            Self::Reclaim => "reclaim",
            Self::Index => "index",
            Self::Removed => "removed",
            Self::Corrupt => "corrupt",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

/// Resolved once: the hot paths only increment.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EvictLabels {
    reason: EvictReason,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    tier: Tier,
}

/// The counters of the store.
#[derive(Debug, Clone)]
pub struct TierMetrics {
    stored: [Counter; 3],
    corrupt: [Counter; 3],
    evicted: [Counter; EvictReason::ALL.len()],
    /// Offers of a block that is here with other bytes. The first ones stay.
    pub(crate) duplicate_differs: Counter,
    /// Blocks refused because storing them would hurt others, or everything is pinned.
    pub(crate) refused: Counter,
}

impl TierMetrics {
    /// Makes the counters and names them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let by_tier = |registry: &mut Registry, name: &str, help: &str| {
            let family = Family::<TierLabels, Counter>::default();
            registry.register(name, help, family.clone());
            Tier::ALL.map(|tier| family.get_or_create_owned(&TierLabels { tier }))
        };
        let stored =
            by_tier(registry, "kvstrata_stored_blocks", "Blocks that became readable on a tier");
        let corrupt = by_tier(
            registry,
            "kvstrata_corrupt_blocks",
            "Blocks that failed verification, by the tier they were read from",
        );
        let reasons = Family::<EvictLabels, Counter>::default();
        registry.register(
            "kvstrata_evicted_blocks",
            "Blocks that left dram, by reason",
            reasons.clone(),
        );
        let duplicate_differs = Counter::default();
        registry.register(
            "kvstrata_duplicate_differs_blocks",
            "Offers of a block that is here with other bytes",
            duplicate_differs.clone(),
        );
        let refused = Counter::default();
        registry.register(
            "kvstrata_refused_blocks",
            "Blocks refused for lack of room that may be taken",
            refused.clone(),
        );
        let evicted =
            EvictReason::ALL.map(|reason| reasons.get_or_create_owned(&EvictLabels { reason }));
        Self { stored, corrupt, evicted, duplicate_differs, refused }
    }

    pub(crate) fn stored(&self, tier: Tier) -> &Counter {
        of_tier(&self.stored, tier)
    }

    pub(crate) fn corrupt(&self, tier: Tier) -> &Counter {
        of_tier(&self.corrupt, tier)
    }

    pub(crate) fn evicted(&self, reason: EvictReason) -> &Counter {
        let [capacity, reclaim, index, removed, corrupt] = &self.evicted;
        match reason {
            EvictReason::Capacity => capacity,
            EvictReason::Reclaim => reclaim,
            EvictReason::Index => index,
            EvictReason::Removed => removed,
            EvictReason::Corrupt => corrupt,
        }
    }
}

fn of_tier(counters: &[Counter; 3], tier: Tier) -> &Counter {
    let [dram, nvme, object] = counters;
    match tier {
        Tier::Dram => dram,
        Tier::Nvme => nvme,
        Tier::Object => object,
    }
}
