//! Damages bytes as disks, networks and those who mean harm do, in an order that can be had again.

use super::Draws;

/// No input grows beyond this, in bytes.
const BYTES_MAX: usize = 1 << 16;
/// Numbers at the edges of what decoders compare with.
const EDGES: [u64; 12] = [
    0,
    1,
    2,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    0x0001_0000,
    0x7fff_ffff,
    0xffff_ffff,
    0x0001_0000_0000,
    u64::MAX,
];

/// Changes inputs, a little at a time. The same seed makes the same changes.
#[derive(Debug, Clone)]
pub struct Mutator {
    draws: Draws,
}

impl Mutator {
    /// The changes of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { draws: Draws::new(seed) }
    }

    /// A number below `end`; 0 if that is 0.
    pub fn below(&mut self, end: usize) -> usize {
        let end = u64::try_from(end).unwrap_or(u64::MAX);
        usize::try_from(self.draws.below(end)).unwrap_or(0)
    }

    /// True `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.draws.chance(per_mille)
    }

    /// Changes `bytes` in one to four places; some changes take pieces of `other`.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        for _ in 0..=self.below(4) {
            self.change(bytes, other);
        }
        bytes.truncate(BYTES_MAX);
    }

    fn change(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(bytes.len());
        match self.below(9) {
            0 => self.flip(bytes, at),
            1 => {
                let byte = self.draws.draw().to_le_bytes();
                overwrite(bytes, at, &byte[..1]);
            }
            2 => self.edge(bytes, at),
            3 => self.nudge(bytes, at),
            4 => bytes.truncate(at),
            5 => {
                let range = self.range(bytes.len());
                bytes.drain(range);
            }
            6 => {
                let piece = bytes.get(self.range(bytes.len())).unwrap_or_default().to_vec();
                bytes.splice(at..at, piece);
            }
            7 => {
                let range = self.range(other.len());
                overwrite(bytes, at, other.get(range).unwrap_or_default());
            }
            _ => {
                let piece = other.get(self.range(other.len())).unwrap_or_default().to_vec();
                bytes.splice(at..at, piece);
            }
        }
    }

    fn flip(&mut self, bytes: &mut [u8], at: usize) {
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1 << self.below(8);
        }
    }

    /// Writes a number at the edge of something, 1 to 8 bytes long.
    fn edge(&mut self, bytes: &mut [u8], at: usize) {
        let edge = EDGES.get(self.below(EDGES.len())).copied().unwrap_or(0).to_le_bytes();
        let width = 1 << self.below(4);
        overwrite(bytes, at, edge.get(..width).unwrap_or_default());
    }

    /// Adds a little to a number of 4 bytes, or takes it away.
    fn nudge(&mut self, bytes: &mut [u8], at: usize) {
        let by = u32::try_from(self.below(65)).unwrap_or(0);
        if let Some(number) = bytes.get_mut(at..).and_then(<[u8]>::first_chunk_mut::<4>) {
            *number = u32::from_le_bytes(*number).wrapping_add(by).wrapping_sub(32).to_le_bytes();
        }
    }

    /// A range within `len`, seldom a long one.
    fn range(&mut self, len: usize) -> std::ops::Range<usize> {
        let start = self.below(len);
        let longest = if self.chance(100) { len - start } else { (len - start).min(64) };
        start..start + self.below(longest + 1)
    }
}

fn overwrite(bytes: &mut [u8], at: usize, with: &[u8]) {
    for (to, from) in bytes.iter_mut().skip(at).zip(with) {
        *to = *from;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_makes_the_same_changes_and_most_of_them_change_something() {
        let original: Vec<u8> = (0..=255).collect();
        let mutants = |seed| {
            let mut mutator = Mutator::new(seed);
            let mutant = |_| {
                let mut bytes = original.clone();
                mutator.mutate(&mut bytes, b"another");
                bytes
            };
            (0..1000).map(mutant).collect::<Vec<_>>()
        };
        assert_eq!(mutants(1), mutants(1));
        assert_ne!(mutants(1), mutants(2));
        let changed = mutants(3).iter().filter(|mutant| **mutant != original).count();
        assert!(changed > 950, "{changed}");
    }

    #[test]
    fn nothing_is_too_short_to_be_changed_and_nothing_grows_for_ever() {
        let mut mutator = Mutator::new(1);
        let mut bytes = Vec::new();
        for _ in 0..10_000 {
            mutator.mutate(&mut bytes, b"ab");
            mutator.mutate(&mut bytes, &[]);
            assert!(bytes.len() <= BYTES_MAX);
        }
    }
}
