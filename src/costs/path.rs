//! The ways from dram to an engine.

use std::time::Duration;

use kvstrata_tiers::rate::Rate;

use super::Locality;

/// What is assumed before anything was measured: seconds to the first byte, and bytes per second. Round
/// numbers of the right order: a copy, a socket of the host, a network of the 10 GbE class, a slower one.
const ASSUMED: [(f64, f64); 4] = [(50e-6, 4e9), (100e-6, 2e9), (300e-6, 1e9), (2e-3, 5e8)];

/// What a path costs, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PathCost {
    /// To the first byte.
    pub(super) setup: f64,
    /// For each byte.
    pub(super) byte: f64,
}

/// What is known of the ways, near to far.
#[derive(Debug, Default)]
pub(super) struct Paths([Rate; 4]);

impl Paths {
    pub(super) fn take(&mut self, locality: Locality, bytes: u64, elapsed: Duration) {
        locality.of(self.0.each_mut()).take(bytes, elapsed);
    }

    pub(super) fn age(&self, locality: Locality) -> Option<Duration> {
        locality.of(self.0.each_ref()).age()
    }

    /// What was measured; what was not is assumed, between what was measured of nearer ones and of those
    /// that are farther away.
    pub(super) fn cost(&self, locality: Locality) -> PathCost {
        let (setup, per_second) = locality.of(ASSUMED);
        if let Some(byte) = locality.of(self.0.each_ref()).cost() {
            return PathCost { setup, byte };
        }
        let known = || Locality::ALL.into_iter().zip(self.0.iter().map(Rate::cost));
        let nearer = known().filter_map(|(other, byte)| byte.filter(|_| other < locality));
        let farther = known().filter_map(|(other, byte)| byte.filter(|_| other > locality));
        let byte = (1.0 / per_second).min(farther.fold(f64::INFINITY, f64::min));
        PathCost { setup, byte: nearer.fold(byte, f64::max) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis_for_a_gigabyte(paths: &Paths) -> [u128; 4] {
        let secs = |locality| paths.cost(locality).byte * 1e9;
        Locality::ALL.map(|locality| Duration::from_secs_f64(secs(locality)).as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_not_measured_lies_between_what_was() {
        let mut paths = Paths::default();
        assert_eq!(millis_for_a_gigabyte(&paths), [250, 500, 1000, 2000]);
        let take = |paths: &mut Paths, locality, millis| {
            paths.take(locality, 1_000_000_000, Duration::from_millis(millis));
        };
        take(&mut paths, Locality::SameNode, 1500);
        assert_eq!(millis_for_a_gigabyte(&paths), [250, 1500, 1500, 2000]);
        take(&mut paths, Locality::SameNode, 100);
        take(&mut paths, Locality::SameNode, 100);
        assert_eq!(millis_for_a_gigabyte(&paths), [100, 100, 1000, 2000]);
        take(&mut paths, Locality::Remote, 700);
        assert_eq!(millis_for_a_gigabyte(&paths), [100, 100, 700, 700]);
        assert!(paths.age(Locality::Remote).is_some() && paths.age(Locality::SameZone).is_none());
    }
}
