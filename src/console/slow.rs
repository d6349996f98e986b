//! The slowest loads of late, a few of each tenant: what a person looks at who wonders why an engine waits.

use std::{collections::HashMap, sync::Arc, time::Duration};

use kvstrata_tiers::{namespace::Namespace, tier::Tier};
use parking_lot::Mutex;
use tokio::time::Instant;

use crate::limits::{SLOW_LOAD_AGE_MAX, SLOW_LOAD_MIN, SLOW_LOADS_MAX, SLOW_TENANTS_MAX};

/// What one get loaded from one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlowLoad {
    /// Where it came from.
    pub tier: Tier,
    /// What came, in bytes.
    pub bytes: u64,
    /// How long it took, without what the reader itself took.
    pub took: Duration,
    /// The namespace, shortened.
    pub namespace: String,
    /// When it had come.
    pub at: Instant,
}

/// The slowest loads by tenant; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct SlowLoads(Arc<Mutex<HashMap<Box<str>, Vec<SlowLoad>>>>);

impl SlowLoads {
    /// A get has ended that loaded so many bytes from each tier, in that time.
    pub(crate) fn note(
        &self,
        namespace: &Namespace,
        loads: impl Iterator<Item = (Tier, u64, Duration)>,
    ) {
        for (tier, bytes, took) in loads.filter(|(_, _, took)| *took >= SLOW_LOAD_MIN) {
            let load = || {
                let namespace = namespace.id().short();
                SlowLoad { tier, bytes, took, namespace, at: Instant::now() }
            };
            self.keep(namespace.tenant(), took, load);
        }
    }

    /// The slowest of a tenant, or of all, slowest first.
    pub(super) fn slowest(&self, tenant: Option<&str>) -> Vec<SlowLoad> {
        let kept = self.0.lock();
        let of = kept.iter().filter(|(of, _)| tenant.is_none_or(|tenant| tenant == &***of));
        let mut loads: Vec<_> =
            of.flat_map(|(_, loads)| loads).filter(|load| load.is_late()).cloned().collect();
        drop(kept);
        loads.sort_by_key(|load| std::cmp::Reverse(load.took));
        loads.truncate(SLOW_LOADS_MAX);
        loads
    }

    fn keep(&self, tenant: &str, took: Duration, load: impl FnOnce() -> SlowLoad) {
        let mut kept = self.0.lock();
        if !kept.contains_key(tenant) {
            if kept.len() >= SLOW_TENANTS_MAX {
                forget_one(&mut kept);
            }
            kept.insert(tenant.into(), Vec::new());
        }
        let Some(loads) = kept.get_mut(tenant) else { return };
        if loads.len() >= SLOW_LOADS_MAX {
            loads.retain(SlowLoad::is_late);
        }
        if loads.len() >= SLOW_LOADS_MAX {
            let quickest = loads.iter().enumerate().min_by_key(|(_, load)| load.took);
            match quickest.map(|(at, load)| (at, load.took)) {
                Some((at, quickest)) if quickest < took => drop(loads.swap_remove(at)),
                _ => return,
            }
        }
        loads.push(load());
    }
}

impl SlowLoad {
    fn is_late(&self) -> bool {
        self.at.elapsed() <= SLOW_LOAD_AGE_MAX
    }
}

/// Makes room for another tenant: whoever has loaded nothing slow for the longest time goes.
fn forget_one(kept: &mut HashMap<Box<str>, Vec<SlowLoad>>) {
    let latest = |loads: &Vec<SlowLoad>| loads.iter().map(|load| load.at).max();
    let oldest =
        kept.iter().min_by_key(|(_, loads)| latest(loads)).map(|(tenant, _)| tenant.clone());
    if let Some(tenant) = oldest {
        kept.remove(&tenant);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(millis: u64) -> SlowLoad {
        SlowLoad {
            tier: Tier::Nvme,
            bytes: 1,
            took: Duration::from_millis(millis),
            namespace: "0123456789ab".to_owned(),
            at: Instant::now(),
        }
    }

    fn keep(slow: &SlowLoads, tenant: &str, millis: u64) {
        slow.keep(tenant, Duration::from_millis(millis), || load(millis));
    }

    fn millis(slow: &SlowLoads, tenant: Option<&str>) -> Vec<u128> {
        slow.slowest(tenant).iter().map(|load| load.took.as_millis()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_of_each_tenant_stay_slowest_first() {
        let slow = SlowLoads::default();
        for number in [7, 3, 9, 1, 20, 2, 11, 5, 13, 4, 6, 8, 10, 12] {
            keep(&slow, "a", number);
        }
        keep(&slow, "b", 2);
        assert_eq!(millis(&slow, Some("a")), [20, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3]);
        assert_eq!(millis(&slow, Some("b")), [2]);
        assert!(millis(&slow, Some("c")).is_empty());
        assert_eq!(millis(&slow, None).len(), SLOW_LOADS_MAX);
    }

    #[tokio::test(start_paused = true)]
    async fn old_ones_make_room_for_quicker_new_ones() {
        let slow = SlowLoads::default();
        (0..SLOW_LOADS_MAX).for_each(|_| keep(&slow, "a", 500));
        keep(&slow, "a", 30);
        assert_eq!(millis(&slow, Some("a")), [500; SLOW_LOADS_MAX]);
        tokio::time::advance(SLOW_LOAD_AGE_MAX + Duration::from_secs(1)).await;
        assert!(millis(&slow, None).is_empty());
        keep(&slow, "a", 30);
        assert_eq!(millis(&slow, None), [30]);
    }

    #[tokio::test(start_paused = true)]
    async fn tenants_are_bounded() {
        let slow = SlowLoads::default();
        for number in 0..=SLOW_TENANTS_MAX as u64 {
            keep(&slow, &number.to_string(), 10 + number);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert_eq!(slow.0.lock().len(), SLOW_TENANTS_MAX);
        assert!(millis(&slow, Some("0")).is_empty() && !millis(&slow, Some("1")).is_empty());
    }
}
