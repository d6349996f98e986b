//! What loading costs whom: the seam to what is measured.

use std::time::Duration;

use kvstrata_tiers::tier::Tier;

use crate::{node::Node, openers::Opener, score::LoadCost};

/// Where a holder is, seen from an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Locality {
    /// On its host, by shared memory.
    SharedMemory,
    /// On its host, by a socket.
    SameNode,
    /// In its zone.
    SameZone,
    /// Elsewhere.
    Remote,
}

/// Whether a tier can be loaded from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TierState {
    /// As it should be.
    Ok,
    /// Far slower than it was.
    Degraded,
    /// Nothing can be read from it.
    Down,
}

/// What loading costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TierCost {
    pub(crate) tier: Tier,
    pub(crate) locality: Locality,
    /// Bytes per second.
    pub(crate) bandwidth: f64,
    pub(crate) setup: Duration,
    pub(crate) queue: Duration,
    pub(crate) queued_bytes: u64,
    pub(crate) in_flight: u32,
    pub(crate) state: TierState,
    /// None: assumed.
    pub(crate) sample_age: Option<Duration>,
}

impl Node {
    /// Where this node is, seen from an engine on `host` in `zone`.
    pub(super) fn locality(&self, opener: &Opener, zone: &str) -> Locality {
        let own = self.members.list.iter().find(|each| each.index == self.members.answering);
        let own_zone = own.map_or("", |own| own.zone.as_str());
        let zone = if zone.is_empty() { opener.zone.as_str() } else { zone };
        let advice = &self.advice;
        if opener.host == self.name || opener.host == advice.host {
            if advice.shares_memory { Locality::SharedMemory } else { Locality::SameNode }
        } else if zone == own_zone {
            Locality::SameZone
        } else {
            Locality::Remote
        }
    }

    /// What blocks of `block_bytes` cost to load.
    pub(super) fn load_cost(&self, tier: Tier, _locality: Locality, block_bytes: u64) -> LoadCost {
        let fixed = self.stack.estimate_load(tier, 0);
        let with_block = self.stack.estimate_load(tier, block_bytes);
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        LoadCost {
            queue_ms: 0.0,
            setup_ms: ms(fixed),
            block_ms: ms(with_block.saturating_sub(fixed)),
        }
    }

    /// Whether blocks of this tier can be loaded.
    pub(super) fn can_load(&self, tier: Tier) -> bool {
        self.stack.has_tier(tier)
    }

    /// What loading costs, of all tiers.
    pub(crate) fn tier_costs(&self) -> Vec<TierCost> {
        Vec::new()
    }
}
