//! How long a load takes, from how long loads took.
//!
//! A load is a run of blocks of one tier, from its beginning to its last byte. What loads took fades
//! by the time spent loading and by bytes, so that single loads do not count for much; but two in a
//! row that are far off in the same direction, or a long one, are a change of the device (another
//! client, a throttled drive, a heated one), and replace what was known before. Loads that run at the
//! same time share the device, which is what the next one will see, too.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use parking_lot::Mutex;

use crate::tier::Tier;

/// Seconds of loading in which what was known counts half.
const HALF_LIFE_SECS: f64 = 1.0;
/// Bytes of loads in which what was known counts half.
const HALF_LIFE_BYTES: f64 = 268_435_456.0;
/// A load that took so much more or less than what was known is far off. Below it fading is fast
/// enough, and neighbours on the device cause as much.
const FAR_OFF: f64 = 1.5;

/// What is assumed before anything was measured, for each tier: setup, and bytes per second. Round
/// numbers of the right order: memory over a 10 GbE class network, one flash drive, one stream of an
/// object store.
const ASSUMED: [(Duration, f64); 3] = [
    (Duration::from_micros(200), 1e9),
    (Duration::from_micros(500), 5e8),
    (Duration::from_millis(40), 8e7),
];

/// Bytes delivered and the time they took.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    bytes: f64,
    secs: f64,
}

impl Sum {
    /// Seconds for each byte.
    fn cost(self) -> f64 {
        self.secs / self.bytes
    }

    fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, secs: self.secs + other.secs }
    }

    /// Fades by `load` and adds it at this cost.
    fn blended(self, load: Self, cost: f64) -> Self {
        let secs = load.bytes * cost;
        let half_lives = secs / HALF_LIFE_SECS + load.bytes / HALF_LIFE_BYTES;
        let kept = (-half_lives).exp2();
        Self { bytes: self.bytes * kept + load.bytes, secs: self.secs * kept + secs }
    }
}

/// In which direction a load was far off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Off {
    Slower,
    Faster,
}

#[derive(Debug, Default)]
struct Known {
    /// Past loads, faded; none before the first one.
    past: Option<Sum>,
    /// The last load and its direction, if it was far off.
    far: Option<(Off, Sum)>,
}

impl Known {
    fn take(&mut self, load: Sum) {
        let Some(past) = self.past else {
            self.past = Some(load);
            return;
        };
        let ratio = load.cost() / past.cost();
        let off = match ratio {
            ratio if ratio > FAR_OFF => Some(Off::Slower),
            ratio if ratio < 1.0 / FAR_OFF => Some(Off::Faster),
            _ => None,
        };
        self.past = Some(match (off, self.far) {
            (Some(off), Some((before, last))) if off == before => last.plus(load),
            (Some(_), _) if load.secs >= HALF_LIFE_SECS => load,
            // It may be the only one: it counts as the least that would have been far off.
            (Some(Off::Slower), _) => past.blended(load, past.cost() * FAR_OFF),
            (Some(Off::Faster), _) => past.blended(load, past.cost() / FAR_OFF),
            (None, _) => past.blended(load, load.cost()),
        });
        self.far = off.map(|off| (off, load));
    }
}

/// What is known of one tier.
#[derive(Debug, Default)]
struct Measured {
    known: Mutex<Known>,
    /// Bytes that are being loaded now.
    queued: AtomicU64,
}

/// Measured bandwidth and load of each tier.
#[derive(Debug, Default)]
pub(crate) struct Costs([Measured; 3]);

/// Bytes that are being loaded while this exists.
#[derive(Debug)]
pub(crate) struct Queued<'a> {
    queued: &'a AtomicU64,
    bytes: u64,
}

impl Drop for Queued<'_> {
    fn drop(&mut self) {
        // Relaxed: an estimate.
        self.queued.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Costs {
    fn of(&self, tier: Tier) -> (&Measured, (Duration, f64)) {
        let [dram, nvme, object] = &self.0;
        let [assumed_dram, assumed_nvme, assumed_object] = ASSUMED;
        match tier {
            Tier::Dram => (dram, assumed_dram),
            Tier::Nvme => (nvme, assumed_nvme),
            Tier::Object => (object, assumed_object),
        }
    }

    /// Counts `bytes` as being loaded until the guard is dropped.
    pub(crate) fn queue(&self, tier: Tier, bytes: u64) -> Queued<'_> {
        let (measured, _) = self.of(tier);
        measured.queued.fetch_add(bytes, Ordering::Relaxed);
        Queued { queued: &measured.queued, bytes }
    }

    /// Takes note of a load from its beginning to its end.
    pub(crate) fn record(&self, tier: Tier, bytes: u64, elapsed: Duration) {
        if bytes == 0 {
            return;
        }
        let load = Sum { bytes: bytes as f64, secs: elapsed.as_secs_f64().max(1e-9) };
        self.of(tier).0.known.lock().take(load);
    }

    /// Setup, what is being loaded already, and `bytes`, by the measured bandwidth.
    pub(crate) fn estimate(&self, tier: Tier, bytes: u64) -> Duration {
        let (measured, (setup, assumed)) = self.of(tier);
        let cost = measured.known.lock().past.map_or(1.0 / assumed, Sum::cost);
        let queued = measured.queued.load(Ordering::Relaxed);
        let secs = queued.saturating_add(bytes) as f64 * cost;
        setup.saturating_add(Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load from a device of some bandwidth; returns how long it took.
    fn load(costs: &Costs, bytes: u64, per_second: f64) -> Duration {
        let elapsed = Duration::from_secs_f64(bytes as f64 / per_second);
        costs.record(Tier::Nvme, bytes, elapsed);
        elapsed
    }

    /// The estimate of a large load in shares of what it would take.
    fn accuracy(costs: &Costs, per_second: f64) -> f64 {
        costs.estimate(Tier::Nvme, 10_000_000_000).as_secs_f64() / (1e10 / per_second)
    }

    #[test]
    fn estimates_follow_a_change_after_three_loads_or_a_second_and_back() {
        for bytes in [2_000_000, 50_000_000, 400_000_000] {
            let costs = Costs::default();
            for per_second in [2e9, 2e8, 2e9, 6e9, 2e9, 1e9, 2e9] {
                let (mut loads, mut elapsed) = (0, Duration::ZERO);
                while loads < 3 && elapsed < Duration::from_secs(1) {
                    elapsed += load(&costs, bytes, per_second);
                    loads += 1;
                }
                let off = accuracy(&costs, per_second);
                assert!((0.8..1.25).contains(&off), "{bytes} at {per_second}: {off}");
                // What was known for long does not hold it back.
                for _ in 0..100 {
                    load(&costs, bytes, per_second);
                }
                let off = accuracy(&costs, per_second);
                assert!((0.99..1.01).contains(&off), "{bytes} at {per_second}: {off}");
            }
        }
    }

    #[test]
    fn one_load_that_was_held_up_counts_as_what_it_is() {
        let costs = Costs::default();
        for _ in 0..100 {
            load(&costs, 50_000_000, 2e9);
        }
        load(&costs, 50_000_000, 2e8);
        let off = accuracy(&costs, 2e9);
        assert!((0.99..1.1).contains(&off), "{off}");
        load(&costs, 50_000_000, 2e9);
        load(&costs, 50_000_000, 2e8);
        let off = accuracy(&costs, 2e9);
        assert!((0.9..1.6).contains(&off), "every other one: {off}");
    }

    #[test]
    fn what_is_being_loaded_comes_first() {
        let costs = Costs::default();
        let alone = costs.estimate(Tier::Nvme, 1_000_000);
        let queued = costs.queue(Tier::Nvme, 500_000_000);
        let behind = costs.estimate(Tier::Nvme, 1_000_000);
        assert_eq!((behind - alone).as_millis(), 1000);
        assert_eq!(costs.estimate(Tier::Object, 0), Duration::from_millis(40));
        drop(queued);
        assert_eq!(costs.estimate(Tier::Nvme, 1_000_000), alone);
    }

    #[test]
    fn colder_tiers_cost_more_and_nothing_overflows() {
        let costs = Costs::default();
        let all = Tier::ALL.map(|tier| costs.estimate(tier, 1 << 20));
        assert!(all.is_sorted());
        costs.record(Tier::Dram, 0, Duration::from_secs(1));
        assert_eq!(costs.estimate(Tier::Dram, 1 << 20), all[0]);
        costs.record(Tier::Dram, 1, Duration::MAX);
        assert_eq!(costs.estimate(Tier::Dram, u64::MAX), Duration::MAX);
        costs.record(Tier::Dram, u64::MAX, Duration::ZERO);
        assert!(costs.estimate(Tier::Dram, 1) < Duration::MAX);
    }
}
