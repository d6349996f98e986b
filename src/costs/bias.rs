//! How estimates are wrong: what loads took, in shares of what was estimated, by tier and distance.
//!
//! Devices and paths are measured apart, but share processors and memory, and other loads come and go
//! meanwhile. What is left over is learned here, slowly and within bounds: what changes by more is a
//! change of a device or a path, and measured there.

use std::{ops::RangeInclusive, time::Duration};

use kvstrata_tiers::tier::Tier;
use tokio::time::Instant;

use super::{Locality, at};

/// No bias is less or more.
const BIAS: RangeInclusive<f64> = 0.5..=3.0;
/// What one load says is believed within these.
const ERROR: RangeInclusive<f64> = 0.5..=2.0;
/// Seconds of loads, bytes of them, and seconds by the clock in which what was known counts half.
const HALF_LIVES: (f64, f64, f64) = (1.0, 268_435_456.0, 2.0);
/// The most that one load weighs.
const WEIGHT_MAX: f64 = 0.5;
/// What a report weighs: whoever makes it may be wrong, and was told the estimate a while ago.
const REPORT_WEIGHT: f64 = 0.1;

#[derive(Debug, Clone, Copy)]
struct Bias {
    /// Its logarithm.
    log: f64,
    at: Option<Instant>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Biases([[Bias; 4]; 3]);

impl Default for Biases {
    fn default() -> Self {
        Self([[Bias { log: 0.0, at: None }; 4]; 3])
    }
}

impl Biases {
    fn bias(&mut self, (tier, locality): (Tier, Locality)) -> &mut Bias {
        locality.of(at(self.0.each_mut(), tier).each_mut())
    }

    pub(super) fn of(&self, (tier, locality): (Tier, Locality)) -> f64 {
        locality.of(at(self.0, tier)).log.exp()
    }

    /// A load took `actual`, in shares of what is estimated with what is known now.
    pub(super) fn take(&mut self, pair: (Tier, Locality), actual: f64, load: (u64, Duration)) {
        let (bytes, elapsed) = load;
        let bias = self.bias(pair);
        let (secs, now) = (elapsed.as_secs_f64(), Instant::now());
        let since = bias.at.replace(now).map_or(0.0, |at| (now - at).as_secs_f64());
        let (busy, amount, clock) = HALF_LIVES;
        let half_lives = secs / busy + bytes as f64 / amount + since / clock;
        bias.learn(actual, (1.0 - (-half_lives).exp2()).min(WEIGHT_MAX));
    }

    /// A load is reported to have taken `actual`, in shares of what its reporter was told.
    pub(super) fn report(&mut self, pair: (Tier, Locality), actual: f64) {
        self.bias(pair).learn(actual, REPORT_WEIGHT);
    }
}

impl Bias {
    fn learn(&mut self, actual: f64, weight: f64) {
        let error = actual.clamp(*ERROR.start(), *ERROR.end()).ln();
        let bounds = (BIAS.start().ln(), BIAS.end().ln());
        self.log = (self.log + weight * error).clamp(bounds.0, bounds.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: (Tier, Locality) = (Tier::Nvme, Locality::SameNode);

    #[tokio::test(start_paused = true)]
    async fn it_is_learned_within_bounds_and_nobody_elses() {
        let mut biases = Biases::default();
        for _ in 0..40 {
            let now = biases.of(PAIR);
            biases.take(PAIR, 1.5 / now, (50 << 20, Duration::from_millis(50)));
        }
        assert!((biases.of(PAIR) - 1.5).abs() < 0.01, "{}", biases.of(PAIR));
        assert!((biases.of((Tier::Nvme, Locality::Remote)) - 1.0).abs() < 1e-9);
        for (error, bound) in [(1e9, 3.0), (1e-9, 0.5)] {
            for _ in 0..100 {
                biases.take(PAIR, error, (1 << 30, Duration::from_secs(1)));
            }
            assert!((biases.of(PAIR) - bound).abs() < 1e-9);
        }
    }

    #[test]
    fn one_report_changes_little() {
        let mut biases = Biases::default();
        biases.report(PAIR, 1e9);
        assert!((1.05..1.08).contains(&biases.of(PAIR)), "{}", biases.of(PAIR));
    }
}
