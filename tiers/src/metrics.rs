//! What the store counts. Gauges are taken from [`crate::stack::Stack::usage`] by the server.

use std::fmt;

use prometheus_client::{
    encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder},
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use crate::{error::ErrorKind, store::Urgency, tier::Tier};

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

/// Why a block was not copied to a colder tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Undemoted {
    /// Too many were waiting already.
    QueueFull,
    /// It had left dram before its turn came.
    Gone,
    /// The tier is short of its write budget, or full.
    Budget,
    /// The tier takes no writes now.
    Unavailable,
    /// The tier failed.
    Failed,
    /// Its tenant has on the tier what it may have.
    Quota,
}

impl Undemoted {
    /// All reasons, in the order of the declaration.
    pub const ALL: [Self; 6] =
        [Self::QueueFull, Self::Gone, Self::Budget, Self::Unavailable, Self::Failed, Self::Quota];

    /// The reason that an error of the tier stands for.
    #[must_use]
    pub fn of(kind: ErrorKind) -> Self {
        match kind {
            ErrorKind::Exhausted { .. } => Self::Budget,
            ErrorKind::Unavailable => Self::Unavailable,
            ErrorKind::Invalid
            | ErrorKind::Unauthenticated
            | ErrorKind::UnknownNamespace
            | ErrorKind::LayoutMismatch
            | ErrorKind::LeaseExpired
            | ErrorKind::Timeout
            | ErrorKind::Cancelled
            | ErrorKind::Corrupt
            | ErrorKind::Unsupported
            | ErrorKind::Internal => Self::Failed,
        }
    }
}

impl EncodeLabelValue for Undemoted {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        let name = match self {
            Self::QueueFull => "queue_full",
            Self::Gone => "gone",
            Self::Budget => "budget",
            Self::Unavailable => "unavailable",
            Self::Failed => "failed",
            Self::Quota => "quota",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

impl EncodeLabelValue for Urgency {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        let name = match self {
            Self::Durable => "durable",
            Self::Background => "background",
        };
        EncodeLabelValue::encode(&name, encoder)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UndemotedLabels {
    reason: Undemoted,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct UrgencyLabels {
    urgency: Urgency,
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
    demoted: [Counter; 2],
    undemoted: [Counter; Undemoted::ALL.len()],
    /// Evictions of blocks that no other tier had.
    pub(crate) evicted_only_copy: Counter,
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
        let (demoted, undemoted) = register_demotions(registry);
        let evicted_only_copy = Counter::default();
        registry.register(
            "kvstrata_evicted_only_copy_blocks",
            "Blocks that left dram to make room while no other tier had them",
            evicted_only_copy.clone(),
        );
        Self {
            stored,
            corrupt,
            evicted,
            demoted,
            undemoted,
            evicted_only_copy,
            duplicate_differs,
            refused,
        }
    }

    pub(crate) fn demoted(&self, urgency: Urgency) -> &Counter {
        let [durable, background] = &self.demoted;
        match urgency {
            Urgency::Durable => durable,
            Urgency::Background => background,
        }
    }

    pub(crate) fn undemoted(&self, reason: Undemoted) -> &Counter {
        let [queue_full, gone, budget, unavailable, failed, quota] = &self.undemoted;
        match reason {
            Undemoted::QueueFull => queue_full,
            Undemoted::Gone => gone,
            Undemoted::Budget => budget,
            Undemoted::Unavailable => unavailable,
            Undemoted::Failed => failed,
            Undemoted::Quota => quota,
        }
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

/// The counters of copies made and not made.
fn register_demotions(registry: &mut Registry) -> ([Counter; 2], [Counter; Undemoted::ALL.len()]) {
    let urgencies = Family::<UrgencyLabels, Counter>::default();
    registry.register(
        "kvstrata_demoted_blocks",
        "Blocks copied to a colder tier, by whether a client waited for it",
        urgencies.clone(),
    );
    let reasons = Family::<UndemotedLabels, Counter>::default();
    registry.register(
        "kvstrata_undemoted_blocks",
        "Blocks that were to be copied to a colder tier and were not, by reason",
        reasons.clone(),
    );
    let demoted = [Urgency::Durable, Urgency::Background]
        .map(|urgency| urgencies.get_or_create_owned(&UrgencyLabels { urgency }));
    let undemoted =
        Undemoted::ALL.map(|reason| reasons.get_or_create_owned(&UndemotedLabels { reason }));
    (demoted, undemoted)
}

fn of_tier(counters: &[Counter; 3], tier: Tier) -> &Counter {
    let [dram, nvme, object] = counters;
    match tier {
        Tier::Dram => dram,
        Tier::Nvme => nvme,
        Tier::Object => object,
    }
}
