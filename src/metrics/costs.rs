//! The families of what loading costs.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{family::Family, histogram::Histogram},
    registry::Registry,
};

use super::labels::{Judge, TierLabel};

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

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct CostMetrics {
    ratios: Family<ByEstimate, Histogram>,
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
        for &tier in TierLabel::ALL {
            for &by in Judge::ALL {
                drop(ratios.get_or_create(&ByEstimate { tier, by }));
            }
        }
        Self { ratios }
    }

    /// Records an estimate: predicted over actual.
    pub fn record(&self, tier: TierLabel, by: Judge, ratio: f64) {
        self.ratios.get_or_create(&ByEstimate { tier, by }).observe(ratio);
    }

    /// How many were recorded, since the start.
    #[cfg(test)]
    pub(crate) fn count(&self, tier: TierLabel, by: Judge) -> u64 {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register("r", "", self.ratios.clone());
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        let series = format!("r_count{{tier=\"{tier:?}\",by=\"{by:?}\"}} ").to_lowercase();
        text.lines().find_map(|line| line.strip_prefix(series.as_str())).unwrap().parse().unwrap()
    }
}
