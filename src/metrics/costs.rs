//! The families of what loading costs.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};

use super::{
    ByTier,
    labels::{Judge, TierLabel, TierStateLabel},
};

/// Upper bounds for predicted over actual: fine around 1, where it should be.
const RATIOS: [f64; 15] = [
    0.1, 0.25, 0.5, 0.67, //
    0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, //
    1.5, 2.0, 4.0, 10.0,
];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByEstimate {
    tier: TierLabel,
    by: Judge,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByState {
    tier: TierLabel,
    state: TierStateLabel,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct CostMetrics {
    ratios: Family<ByEstimate, Histogram>,
    queued_bytes: Family<ByTier, Gauge>,
    rates: Family<ByTier, Gauge>,
    states: Family<ByState, Gauge>,
}

impl CostMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let ratios = Family::new_with_constructor((|| Histogram::new(RATIOS)) as fn() -> Histogram);
        registry.register(
            "tier_estimate_ratio",
            "Load times that were estimated over those that they took",
            ratios.clone(),
        );
        let (queued_bytes, rates, states) =
            (Family::default(), Family::default(), Family::default());
        registry.register_with_unit(
            "tier_queued",
            "What gets and prefetches have yet to load from a tier, and what is reserved",
            Unit::Bytes,
            Family::clone(&queued_bytes),
        );
        registry.register(
            "tier_load_bytes_per_second",
            "What loads by engines on this host achieve; assumed before anything was measured",
            Family::clone(&rates),
        );
        registry.register(
            "tier_state",
            "1 for the state that the device of a tier is in",
            Family::clone(&states),
        );
        for &tier in TierLabel::ALL {
            for &by in Judge::ALL {
                drop(ratios.get_or_create(&ByEstimate { tier, by }));
            }
        }
        Self { ratios, queued_bytes, rates, states }
    }

    /// Shows how a tier is.
    pub fn show(&self, tier: TierLabel, queued: u64, bytes_per_second: f64, is: TierStateLabel) {
        let gauge = |number: u64| i64::try_from(number).unwrap_or(i64::MAX);
        self.queued_bytes.get_or_create(&ByTier { tier }).set(gauge(queued));
        #[expect(clippy::cast_possible_truncation, reason = "a rate for people; casts saturate")]
        self.rates.get_or_create(&ByTier { tier }).set(bytes_per_second as i64);
        for &state in TierStateLabel::ALL {
            let series = ByState { tier, state };
            self.states.get_or_create(&series).set(i64::from(state == is));
        }
    }

    /// Records an estimate: predicted over actual.
    pub fn record(&self, tier: TierLabel, by: Judge, ratio: f64) {
        self.ratios.get_or_create(&ByEstimate { tier, by }).observe(ratio);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl CostMetrics {
        /// How many were recorded, since the start.
        pub(crate) fn count(&self, tier: TierLabel, by: Judge) -> u64 {
            let (mut registry, mut text) = (Registry::default(), String::new());
            registry.register("r", "", self.ratios.clone());
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let series = format!("r_count{{tier=\"{tier:?}\",by=\"{by:?}\"}} ").to_lowercase();
            text.lines()
                .find_map(|line| line.strip_prefix(series.as_str()))
                .unwrap()
                .parse()
                .unwrap()
        }
    }
}
