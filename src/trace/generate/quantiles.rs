//! Chance from integers only.
//!
//! Distributions are given by their quantiles and drawn by linear interpolation between them. That
//! reads like the measurement it stands for, and it uses no floating point: logarithms and powers
//! differ in the last bit between C libraries, and a trace must be the same bytes everywhere.

use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

/// Parts of one in which probabilities are given.
pub(super) const ONE: u32 = 1_000_000;

/// A seeded source of numbers.
#[derive(Debug)]
pub(super) struct Chance(ChaCha8Rng);

impl Chance {
    /// The numbers of `seed` in an independent `stream`.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut key = [0; 32];
        let words = seed.to_le_bytes().into_iter().chain(stream.to_le_bytes());
        for (to, from) in key.iter_mut().zip(words) {
            *to = from;
        }
        Self(ChaCha8Rng::from_seed(key))
    }

    /// A number from 0 to one less than `end`; 0 if `end` is 0.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        let wide = u128::from(self.0.next_u64()).wrapping_mul(u128::from(end));
        // The high half is below `end`; its bias is under end / 2^64.
        u64::try_from(wide >> 64).unwrap_or(0)
    }

    /// A number from `low` to `high`, both included.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low.saturating_add(self.below(high.saturating_sub(low).saturating_add(1)))
    }

    /// Yes with a probability of `millionths`.
    pub(super) fn happens(&mut self, millionths: u32) -> bool {
        self.below(u64::from(ONE)) < u64::from(millionths)
    }

    /// A draw from `quantiles`.
    pub(super) fn draw(&mut self, quantiles: &Quantiles) -> u64 {
        let at = self.below(u64::from(ONE));
        quantiles.at(at)
    }
}

/// A distribution: (share of draws that lie below, in millionths; value), both ascending, from
/// share 0 to [`ONE`].
#[derive(Debug)]
pub(super) struct Quantiles(pub(super) &'static [(u32, u64)]);

impl Quantiles {
    fn at(&self, share: u64) -> u64 {
        let mut below = (0, 0);
        for (edge, value) in self.0 {
            let edge = u64::from(*edge);
            if edge > share {
                let (edge_below, value_below) = below;
                let rise = value.saturating_sub(value_below);
                let part = rise.saturating_mul(share.saturating_sub(edge_below));
                let width = edge.saturating_sub(edge_below).max(1);
                return value_below.saturating_add(part / width);
            }
            below = (edge, *value);
        }
        below.1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_quantiles() {
        let quantiles = Quantiles(&[(0, 10), (500_000, 20), (900_000, 100), (ONE, 1000)]);
        assert_eq!(quantiles.at(0), 10);
        assert_eq!(quantiles.at(250_000), 15);
        assert_eq!(quantiles.at(500_000), 20);
        assert_eq!(quantiles.at(950_000), 550);
        assert_eq!(quantiles.at(u64::from(ONE)), 1000);
        let mut chance = Chance::new(1, 0);
        let below = (0..10_000).filter(|_| chance.draw(&quantiles) < 20).count();
        assert!((4_800..5_200).contains(&below), "{below}");
    }

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let draws = |stream| {
            let mut chance = Chance::new(7, stream);
            (0..4).map(|_| chance.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
    }
}
