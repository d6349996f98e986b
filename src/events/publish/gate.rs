//! From how many blocks on a chain is announced on each tier, and whether a tier is announced at all.
//!
//! Routers weigh tiers by constants: they cannot know that two blocks of an object are sooner computed than
//! loaded, or that a disk is failing. So what would not pay is not announced, and a tier that is unwell for a
//! while is withdrawn until it has been well for a while.

use std::time::Duration;

use kvstrata_tiers::tier::Tier;
use tokio::time::Instant;

use super::{announce::Gates, shadow::index};
use crate::{
    costs::{Costs, TierState},
    limits::PUBLISH_WITHDRAW_AFTER,
};

/// How a tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TierHealth {
    /// It answers as it should.
    pub(super) well: bool,
    /// From how many blocks on loading takes less time than computing; none if that is not known.
    pub(super) break_even_blocks: Option<u32>,
}

/// Knows how the tiers are.
pub(super) trait Health {
    /// How this one is now. Asked twice a second.
    fn of(&self, tier: Tier) -> TierHealth;
}

/// From how many blocks on loading pays depends on how fast engines compute, which is not known here: that is
/// for the configuration to say.
impl Health for Costs {
    fn of(&self, tier: Tier) -> TierHealth {
        TierHealth { well: self.state(tier) == TierState::Ok, break_even_blocks: None }
    }
}

/// Whether each tier is announced.
#[derive(Debug)]
pub(super) struct Wards([Ward; 3]);

#[derive(Debug, Clone, Copy)]
struct Ward {
    announced: bool,
    /// Since when it is otherwise than announced.
    otherwise_since: Option<Instant>,
    break_even_blocks: Option<u32>,
}

impl Default for Wards {
    fn default() -> Self {
        let ward = Ward { announced: true, otherwise_since: None, break_even_blocks: None };
        Self([ward; 3])
    }
}

impl Wards {
    /// Looks how the tiers are.
    pub(super) fn look(&mut self, health: &dyn Health, now: Instant) {
        let (withdraw, announce) = PUBLISH_WITHDRAW_AFTER;
        for (tier, ward) in Tier::ALL.into_iter().zip(&mut self.0) {
            let found = health.of(tier);
            ward.break_even_blocks = found.break_even_blocks;
            if found.well == ward.announced {
                ward.otherwise_since = None;
                continue;
            }
            let since = *ward.otherwise_since.get_or_insert(now);
            let patience: Duration = if ward.announced { withdraw } else { announce };
            if now.duration_since(since) >= patience {
                *ward = Ward { announced: found.well, otherwise_since: None, ..*ward };
            }
        }
    }

    /// What holds for a target that asks for `from_blocks`.
    pub(super) fn gates(&self, from_blocks: &Gates) -> Gates {
        let mut gates = *from_blocks;
        for tier in Tier::ALL {
            let ward = self.0.get(index(tier));
            let Some((gate, ward)) = gates.get_mut(index(tier)).zip(ward) else { continue };
            let least = ward.break_even_blocks.unwrap_or(0);
            *gate = gate.filter(|_| ward.announced).map(|from| from.max(least));
        }
        gates
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    struct Disk(AtomicBool);

    impl Health for Disk {
        fn of(&self, tier: Tier) -> TierHealth {
            let well = tier != Tier::Nvme || self.0.load(Ordering::Relaxed);
            TierHealth { well, break_even_blocks: (tier == Tier::Object).then_some(12) }
        }
    }

    #[test]
    fn a_tier_is_withdrawn_and_comes_back_when_it_has_been_so_for_a_while() {
        let (disk, mut wards) = (Disk(AtomicBool::new(true)), Wards::default());
        let start = Instant::now();
        let mut at = |well: bool, seconds: u64| {
            disk.0.store(well, Ordering::Relaxed);
            wards.look(&disk, start + Duration::from_secs(seconds));
            wards.gates(&[Some(1), Some(2), Some(3)])[1]
        };
        assert_eq!(at(true, 0), Some(2));
        assert_eq!(at(false, 1), Some(2));
        assert_eq!(at(false, 10), Some(2));
        // Well for a moment: it begins anew.
        assert_eq!(at(true, 11), Some(2));
        assert_eq!(at(false, 12), Some(2));
        assert_eq!(at(false, 22), None);
        assert_eq!(at(true, 23), None);
        assert_eq!(at(true, 52), None);
        assert_eq!(at(true, 53), Some(2));
        assert_eq!(wards.gates(&[Some(1), None, Some(3)]), [Some(1), None, Some(12)]);
    }
}
