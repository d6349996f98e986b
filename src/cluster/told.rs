//! What another member has told of itself, so that routers can be answered in its place: what loading costs there, and
//! which engines have opened namespaces there.
//!
//! It is as old as the last question, a second or so; until a member has been asked, and for one that does not know the
//! question, nothing is told. What loads cost is told and not worked out here: a device, its queue and the paths from
//! there are measured by that member alone, and one time for all of a run, such as lookups are answered with, cannot be
//! taken apart into what comes before the first byte and what each block takes, nor be moved to an engine elsewhere.

use std::{collections::HashMap, sync::Arc};

use kvstrata_tiers::{namespace::NamespaceId, tier::Tier};

use crate::{
    costs::{Locality, TierCost, TierState},
    openers::Opener,
    score::LoadCost,
};

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct Told {
    /// Of every tier there at every distance.
    pub costs: Vec<TierCost>,
    /// Whether engines on its host load by shared memory.
    pub shared_memory: bool,
    /// Of the openers; 0 if none were told.
    pub openers_version: u64,
    /// Who opened which namespace there, oldest first.
    pub openers: Arc<HashMap<NamespaceId, Vec<Opener>>>,
}

impl Told {
    /// What is known after `next` was told: openers that had been told before are not told again.
    #[must_use]
    pub fn followed_by(&self, next: Self) -> Self {
        match self.openers_version == next.openers_version {
            true => Self { openers: Arc::clone(&self.openers), ..next },
            false => next,
        }
    }

    /// What loading blocks of so many bytes costs, if that was told.
    #[must_use]
    pub fn load_cost(&self, tier: Tier, locality: Locality, block_bytes: u64) -> Option<LoadCost> {
        let told = self.costs.iter().find(|cost| (cost.tier, cost.locality) == (tier, locality))?;
        Some(LoadCost {
            queue_ms: 1e3 * told.queue.as_secs_f64(),
            setup_ms: 1e3 * told.setup.as_secs_f64(),
            block_ms: 1e3 * block_bytes as f64 / told.bandwidth,
        })
    }

    /// Whether blocks of this tier can be loaded, as far as was told.
    #[must_use]
    pub fn can_load(&self, tier: Tier) -> bool {
        !self.costs.iter().any(|cost| cost.tier == tier && cost.state == TierState::Down)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn cost(locality: Locality, bandwidth: f64, state: TierState) -> TierCost {
        TierCost {
            node: "b".to_owned(),
            tier: Tier::Nvme,
            locality,
            bandwidth,
            setup: Duration::from_millis(2),
            queue: Duration::from_millis(30),
            queued_bytes: 0,
            in_flight: 0,
            state,
            sample_age: None,
        }
    }

    #[test]
    fn what_was_told_of_a_distance_is_what_loading_over_it_costs() {
        let costs = vec![
            cost(Locality::SameZone, 1e9, TierState::Ok),
            cost(Locality::Remote, 1e8, TierState::Ok),
        ];
        let told = Told { costs, ..Told::default() };
        let far = told.load_cost(Tier::Nvme, Locality::Remote, 1_000_000).unwrap();
        assert_eq!((far.queue_ms, far.setup_ms, far.block_ms), (30.0, 2.0, 10.0));
        assert_eq!(told.load_cost(Tier::Nvme, Locality::SameNode, 1), None);
        assert_eq!(told.load_cost(Tier::Dram, Locality::Remote, 1), None);
        assert!(told.can_load(Tier::Nvme) && told.can_load(Tier::Dram));
        let down = vec![cost(Locality::Remote, 1e8, TierState::Down)];
        assert!(!Told { costs: down, ..Told::default() }.can_load(Tier::Nvme));
    }

    #[test]
    fn openers_stay_known_until_others_are_told() {
        let of = |version, ids: &[u8]| Told {
            openers_version: version,
            openers: Arc::new(
                ids.iter().map(|id| (NamespaceId::from_bytes([*id; 32]), Vec::new())).collect(),
            ),
            ..Told::default()
        };
        let known = Told::default().followed_by(of(7, &[1, 2]));
        let same = known.followed_by(of(7, &[]));
        assert_eq!((same.openers.len(), same.openers_version), (2, 7));
        let next = same.followed_by(of(8, &[3]));
        assert_eq!((next.openers.len(), next.openers_version), (1, 8));
    }
}
