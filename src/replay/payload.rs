//! The bytes of a block, computed from its identity, so that any reader can check them.
//!
//! No reader and writer share state: whoever knows namespace, block hash, part and length can tell
//! every byte. Two sources:
//!
//! - *Generated.* Word `i` of a part is `fold(x_i * (x_i ^ b))`, where `x_i = a + i * K` is a Weyl
//!   sequence, `fold` xors the halves of the 128-bit product, and `(a, b)` is XXH3-128 of the
//!   identity. Every word depends on its position and on the identity, so a shifted, swapped, mixed
//!   or truncated block differs.
//! - *Sampled.* Real KV blocks from a file: a part is the sample from an offset that the identity
//!   chooses, wrapping around, and every 256 bytes begin with one generated word. The bytes stay
//!   real enough to measure codecs on, and all but an exchange of the 248 bytes between two stamps
//!   for the same stretch of the same sample is seen.
//!
//! Why not a hash stream such as BLAKE3 XOF or ChaCha: checking must cost less than the copy it
//! checks. This makes and compares over 5 GB/s on one core.

use std::sync::Arc;

use kvstrata_tiers::{block::BlockHash, namespace::NamespaceId};
use xxhash_rust::xxh3::xxh3_128;

/// Step of the Weyl sequence: odd, and without a pattern in its bits (2^64 / golden ratio).
const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
/// Distance of stamps in sampled parts, in bytes.
const STAMP_EVERY: usize = 256;
/// Bytes of one word.
const WORD_BYTES: usize = size_of::<u64>();

/// Where the bytes of blocks come from.
#[derive(Debug, Clone)]
pub enum Source {
    /// Generated from the identity alone.
    Generated,
    /// Real KV bytes with stamps; at least one byte.
    Sampled(Arc<[u8]>),
}

/// One part of one block, as far as its bytes are concerned.
#[derive(Debug, Clone, Copy)]
pub struct PartIdentity<'a> {
    /// The namespace.
    pub namespace: &'a NamespaceId,
    /// The block.
    pub hash: &'a BlockHash,
    /// Index of the part.
    pub part: u32,
}

impl Source {
    /// Writes the part's bytes, as many as `out` takes.
    pub fn fill(&self, identity: PartIdentity<'_>, out: &mut [u8]) {
        let words = Words::of(identity);
        match self {
            Self::Generated => words.fill(out),
            Self::Sampled(sample) => {
                copy_wrapping(sample, words.start % sample.len().max(1) as u64, out);
                for (stamp, chunk) in (0..).zip(out.chunks_mut(STAMP_EVERY)) {
                    for (to, from) in chunk.iter_mut().zip(words.at(stamp).to_le_bytes()) {
                        *to = from;
                    }
                }
            }
        }
    }
}

/// The generated words of one part.
#[derive(Clone, Copy)]
struct Words {
    start: u64,
    mask: u64,
}

impl Words {
    fn of(identity: PartIdentity<'_>) -> Self {
        let mut bytes = [0_u8; 32 + 32 + 4];
        let fields = identity.namespace.as_bytes().iter().chain(identity.hash.as_bytes()).copied();
        for (to, from) in bytes.iter_mut().zip(fields.chain(identity.part.to_le_bytes())) {
            *to = from;
        }
        let seed = xxh3_128(&bytes);
        Self { start: low(seed), mask: high(seed) }
    }

    fn at(self, index: u64) -> u64 {
        let x = self.start.wrapping_add(index.wrapping_mul(STEP));
        let product = u128::from(x) * u128::from(x ^ self.mask);
        low(product) ^ high(product)
    }

    fn fill(self, out: &mut [u8]) {
        let mut words = out.chunks_exact_mut(WORD_BYTES);
        let mut index = 0;
        for word in &mut words {
            word.copy_from_slice(&self.at(index).to_le_bytes());
            index += 1;
        }
        for (to, from) in words.into_remainder().iter_mut().zip(self.at(index).to_le_bytes()) {
            *to = from;
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low(wide: u128) -> u64 {
    wide as u64
}

fn high(wide: u128) -> u64 {
    low(wide >> 64)
}

fn copy_wrapping(sample: &[u8], start: u64, out: &mut [u8]) {
    let start = usize::try_from(start).unwrap_or(0);
    let mut from = sample.get(start..).unwrap_or(sample);
    let mut rest = out;
    while !rest.is_empty() && !sample.is_empty() {
        let count = from.len().min(rest.len());
        let (head, tail) = rest.split_at_mut(count);
        head.copy_from_slice(from.get(..count).unwrap_or_default());
        rest = tail;
        from = sample;
    }
}

/// Compares fetched bytes with the expected ones, part by part. Keeps one buffer.
#[derive(Debug)]
pub struct Checker {
    source: Source,
    expected: Vec<u8>,
}

impl Checker {
    /// A checker of parts of up to `part_bytes`.
    #[must_use]
    pub fn new(source: Source, part_bytes: usize) -> Self {
        Self { source, expected: vec![0; part_bytes] }
    }

    /// Returns how many bytes of the part in `pieces` are wrong; missing and surplus ones count.
    pub fn wrong_bytes(&mut self, identity: PartIdentity<'_>, pieces: &[impl AsRef<[u8]>]) -> u64 {
        self.source.fill(identity, &mut self.expected);
        let mut rest = self.expected.as_slice();
        let mut wrong = 0;
        for piece in pieces {
            let piece = piece.as_ref();
            let (head, tail) = rest.split_at(piece.len().min(rest.len()));
            if piece != head {
                let same = piece.iter().zip(head).filter(|(got, want)| got == want).count();
                wrong += piece.len().saturating_sub(same);
            }
            rest = tail;
        }
        (wrong + rest.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 4096;

    fn bytes(source: &Source, namespace: u8, hash: u8, part: u32) -> Vec<u8> {
        let (namespace, hash) = names(namespace, hash);
        let mut out = vec![0; LEN];
        source.fill(PartIdentity { namespace: &namespace, hash: &hash, part }, &mut out);
        out
    }

    fn names(namespace: u8, hash: u8) -> (NamespaceId, BlockHash) {
        (NamespaceId::from_bytes([namespace; 32]), BlockHash::new(&[hash; 32]).unwrap())
    }

    fn sources() -> [Source; 2] {
        let sample: Vec<u8> = (0..=255).flat_map(|n| [n; 3]).collect();
        [Source::Generated, Source::Sampled(sample.into())]
    }

    #[test]
    fn every_field_of_the_identity_changes_the_bytes() {
        for source in sources() {
            let all = [
                bytes(&source, 1, 1, 0),
                bytes(&source, 2, 1, 0),
                bytes(&source, 1, 2, 0),
                bytes(&source, 1, 1, 1),
            ];
            for (at, one) in all.iter().enumerate() {
                for other in &all[at + 1..] {
                    let same = one.iter().zip(other).filter(|(a, b)| a == b).count();
                    assert!(same < LEN * 15 / 16, "{same} of {LEN} bytes are the same");
                }
            }
        }
    }

    #[test]
    fn the_generated_bytes_never_change() {
        let golden = xxhash_rust::xxh3::xxh3_64(&bytes(&Source::Generated, 1, 2, 3));
        assert_eq!(golden, GOLDEN);
    }

    /// XXH3-64 of the bytes, computed with Python and its `xxhash` package.
    const GOLDEN: u64 = 815_711_377_001_126_865;

    #[test]
    fn words_are_evenly_spread() {
        let ones: u32 =
            bytes(&Source::Generated, 7, 7, 0).iter().map(|byte| byte.count_ones()).sum();
        let expected = u32::try_from(LEN * 4).unwrap();
        assert!(ones.abs_diff(expected) < expected / 50, "{ones} of {expected} bits are set");
    }

    #[test]
    fn a_check_counts_each_wrong_missing_and_surplus_byte() {
        for source in sources() {
            let (namespace, hash) = names(1, 1);
            let identity = PartIdentity { namespace: &namespace, hash: &hash, part: 0 };
            let mut checker = Checker::new(source.clone(), LEN);
            let right = bytes(&source, 1, 1, 0);
            assert_eq!(checker.wrong_bytes(identity, &[&right[..13], &right[13..]]), 0);
            let mut flipped = right.clone();
            flipped[0] ^= 1;
            flipped[LEN - 1] ^= 0x80;
            assert_eq!(checker.wrong_bytes(identity, &[&flipped]), 2);
            assert_eq!(checker.wrong_bytes(identity, &[&right[..LEN - 5]]), 5);
            assert_eq!(checker.wrong_bytes(identity, &[right.as_slice(), &[1, 2, 3]]), 3);
            assert_eq!(checker.wrong_bytes(identity, &[] as &[&[u8]]), LEN as u64);
        }
    }

    #[test]
    fn shifted_words_differ() {
        let right = bytes(&Source::Generated, 1, 1, 0);
        let same = right.iter().zip(&right[8..]).filter(|(a, b)| a == b).count();
        assert!(same < LEN / 64);
    }
}
