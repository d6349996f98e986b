//! Randomness that can be drawn again: numbers that depend on a seed and on how many came before.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A sequence of random numbers. The same seed gives the same sequence, everywhere and always.
#[derive(Debug, Clone)]
pub struct Draws {
    seed: u64,
    drawn: u64,
}

impl Draws {
    /// The sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { seed, drawn: 0 }
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.drawn += 1;
        xxh3_64_with_seed(&self.drawn.to_le_bytes(), self.seed)
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.draw().checked_rem(end).unwrap_or(0)
    }

    /// True `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same() {
        let draw = |seed| {
            let mut draws = Draws::new(seed);
            std::array::from_fn::<u64, 8, _>(|_| draws.draw())
        };
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
    }

    #[test]
    fn chances_are_what_they_say() {
        let mut draws = Draws::new(7);
        let hits = (0..10_000).filter(|_| draws.chance(250)).count();
        assert!((2_300..2_700).contains(&hits), "{hits}");
        assert!(!(0..1000).any(|_| draws.chance(0)));
        assert!((0..1000).all(|_| draws.chance(1000)));
    }
}
