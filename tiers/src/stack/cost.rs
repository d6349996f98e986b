//! How long a load takes, from how long loads took.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use crate::tier::Tier;

/// Bytes of past loads that count; older ones fade as new ones come.
const WINDOW_BYTES: u64 = 1 << 30;

/// What is assumed before anything was measured, for each tier: setup, and bytes per second. Round
/// numbers of the right order: memory over a 10 GbE class network, one flash drive, one stream of an
/// object store.
const ASSUMED: [(Duration, u64); 3] = [
    (Duration::from_micros(200), 1_000_000_000),
    (Duration::from_micros(500), 500_000_000),
    (Duration::from_millis(40), 80_000_000),
];

/// Delivered bytes and the time they took, both fading together.
#[derive(Debug, Default)]
struct Measured {
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// Measured bandwidth for each tier.
#[derive(Debug, Default)]
pub(crate) struct Costs([Measured; 3]);

impl Costs {
    fn of(&self, tier: Tier) -> (&Measured, (Duration, u64)) {
        let [dram, nvme, object] = &self.0;
        let [assumed_dram, assumed_nvme, assumed_object] = ASSUMED;
        match tier {
            Tier::Dram => (dram, assumed_dram),
            Tier::Nvme => (nvme, assumed_nvme),
            Tier::Object => (object, assumed_object),
        }
    }

    pub(crate) fn record(&self, tier: Tier, bytes: u64, elapsed: Duration) {
        let (measured, _) = self.of(tier);
        let nanos = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX).max(1);
        // Relaxed and not atomic together: an estimate. Concurrent loads share the bandwidth, which
        // is what the next one will see, too.
        let total = measured.bytes.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        measured.nanos.fetch_add(nanos, Ordering::Relaxed);
        if total > WINDOW_BYTES {
            measured.bytes.store(total / 2, Ordering::Relaxed);
            let nanos = measured.nanos.load(Ordering::Relaxed);
            measured.nanos.store(nanos / 2, Ordering::Relaxed);
        }
    }

    pub(crate) fn estimate(&self, tier: Tier, bytes: u64) -> Duration {
        let (measured, (setup, assumed)) = self.of(tier);
        let (seen, nanos) =
            (measured.bytes.load(Ordering::Relaxed), measured.nanos.load(Ordering::Relaxed));
        let per_second = match u128::from(seen).saturating_mul(1_000_000_000) {
            0 => u128::from(assumed),
            scaled => (scaled / u128::from(nanos.max(1))).max(1),
        };
        let nanos = u128::from(bytes).saturating_mul(1_000_000_000) / per_second.max(1);
        setup.saturating_add(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimates_follow_what_was_measured() {
        let costs = Costs::default();
        let before = costs.estimate(Tier::Dram, 1 << 30);
        for _ in 0..100 {
            costs.record(Tier::Dram, 100_000_000, Duration::from_millis(10));
        }
        let fast = costs.estimate(Tier::Dram, 1_000_000_000);
        assert!(fast < before && fast.as_millis().abs_diff(100) <= 1, "{fast:?}");
        for _ in 0..200 {
            costs.record(Tier::Dram, 100_000_000, Duration::from_millis(100));
        }
        let slow = costs.estimate(Tier::Dram, 1_000_000_000);
        assert!(slow.as_millis() > 900, "the past fades: {slow:?}");
    }

    #[test]
    fn colder_tiers_cost_more() {
        let costs = Costs::default();
        let all = Tier::ALL.map(|tier| costs.estimate(tier, 1 << 20));
        assert!(all.is_sorted());
    }
}
