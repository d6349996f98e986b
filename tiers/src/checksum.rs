//! The one checksum that travels with a part through every tier and over the wire.
//!
//! XXH3-64 (the XXH3 specification of the xxHash project, little-endian) over the part's bytes, with a seed that is itself XXH3-64 over the identity:
//! namespace id (32 bytes), block hash (32 bytes, zero-extended), cache group and rank (u32,
//! little-endian). Bytes that are right for another block, another namespace or another part
//! therefore fail as surely as damaged ones.
//!
//! It guards against faults, not against an adversary who can choose bytes: whoever may put under a
//! key may put anything. Why this one: docs/decisions/0002-part-checksum.md, measured by
//! `cargo bench --bench checksum`.

mod kernel;
mod xxh3;

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use crate::{
    block::BlockHash,
    namespace::NamespaceId,
    shared::{Room, SharedBytes},
};

/// Bytes of identity that make the seed.
const IDENTITY_BYTES: usize = 32 + 32 + 4 + 4;

/// Returns the checksum of `bytes` as the part (`group`, `rank`) of one block.
#[must_use]
pub fn part_checksum(
    namespace: &NamespaceId,
    hash: &BlockHash,
    group: u32,
    rank: u32,
    bytes: &[u8],
) -> u64 {
    let mut hasher = PartHasher::new(namespace, hash, group, rank);
    hasher.update(bytes);
    hasher.checksum()
}

/// The same checksum over bytes that arrive in pieces.
#[derive(Clone)]
pub struct PartHasher(xxh3::State);

impl PartHasher {
    /// Starts the checksum of the part (`group`, `rank`) of one block.
    #[must_use]
    pub fn new(namespace: &NamespaceId, hash: &BlockHash, group: u32, rank: u32) -> Self {
        Self(xxh3::State::with_seed(seed(namespace, hash, group, rank)))
    }

    /// Takes the next piece.
    pub fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    /// Copies the next piece out of memory that is shared, and takes the copy; `to` is as long as the piece
    /// and is filled.
    pub fn copy(&mut self, from: SharedBytes<'_>, to: Room<'_>) {
        self.0.copy(from, to);
    }

    /// The checksum of all pieces together.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.0.digest()
    }
}

impl fmt::Debug for PartHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PartHasher")
    }
}

fn seed(namespace: &NamespaceId, hash: &BlockHash, group: u32, rank: u32) -> u64 {
    let mut identity = [0_u8; IDENTITY_BYTES];
    let fields = namespace
        .as_bytes()
        .iter()
        .chain(hash.as_bytes())
        .copied()
        .chain(group.to_le_bytes())
        .chain(rank.to_le_bytes());
    for (to, from) in identity.iter_mut().zip(fields) {
        *to = from;
    }
    xxh3_64(&identity)
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "small numbers, or some bits of large ones")]
mod tests {
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    use super::*;

    fn hash(byte: u8) -> BlockHash {
        BlockHash::new(&[byte; 32]).unwrap()
    }

    /// Computed with the `xxhash` package of Python.
    const GOLDEN: u64 = 2_777_250_146_512_885_267;

    #[test]
    fn golden_value_never_changes() {
        let namespace = NamespaceId::from_bytes([7; 32]);
        let bytes: Vec<u8> = (0..=255).cycle().take(4096).collect();
        assert_eq!(part_checksum(&namespace, &hash(9), 1, 2, &bytes), GOLDEN);
    }

    #[test]
    fn pieces_add_up_to_the_whole() {
        let namespace = NamespaceId::from_bytes([7; 32]);
        let bytes: Vec<u8> = (0..=255).cycle().take(4096).collect();
        let mut hasher = PartHasher::new(&namespace, &hash(9), 1, 2);
        for piece in bytes.chunks(1000) {
            hasher.update(piece);
        }
        assert_eq!(hasher.checksum(), GOLDEN);
    }

    #[test]
    fn every_length_and_every_cut_has_the_sum_of_the_specification() {
        let mut numbers = (1_u64..).map(|at| at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 24);
        let mut random = |below: usize| numbers.next().unwrap() as usize % below;
        let bytes: Vec<u8> = (0..70_000).map(|_| random(256) as u8).collect();
        let lengths = (0..2_200).chain((0..200).map(|_| 65_000 + random(5_000)));
        for len in lengths.collect::<Vec<_>>() {
            let start = random(70_001 - len);
            let bytes = &bytes[start..start + len];
            let (namespace, block) = (NamespaceId::from_bytes([len as u8; 32]), hash(3));
            let right = xxh3_64_with_seed(bytes, seed(&namespace, &block, 4, 5));
            assert_eq!(part_checksum(&namespace, &block, 4, 5, bytes), right, "{len}");
            let mut hasher = PartHasher::new(&namespace, &block, 4, 5);
            let mut copy = vec![0xEE; len];
            let (mut at, steps) = (0, [1, 64, 100, 1_024, 1_025, 5_000, 40_000]);
            while at < len {
                let step = steps[random(steps.len())];
                let end = len.min(at + 1 + random(step));
                if random(2) == 0 {
                    hasher.update(&bytes[at..end]);
                    copy[at..end].copy_from_slice(&bytes[at..end]);
                } else {
                    let room = Room::from(&mut copy[at..end]);
                    hasher.copy(SharedBytes::of(&bytes[at..end]), room);
                }
                at = end;
            }
            assert_eq!(hasher.checksum(), right, "{len} in pieces");
            assert!(bytes == copy, "{len}");
        }
    }

    #[test]
    fn every_part_of_the_identity_counts() {
        let (a, b) = (NamespaceId::from_bytes([1; 32]), NamespaceId::from_bytes([2; 32]));
        let bytes = [5; 1000];
        let all = [
            part_checksum(&a, &hash(1), 0, 0, &bytes),
            part_checksum(&b, &hash(1), 0, 0, &bytes),
            part_checksum(&a, &hash(2), 0, 0, &bytes),
            part_checksum(&a, &hash(1), 1, 0, &bytes),
            part_checksum(&a, &hash(1), 0, 1, &bytes),
            part_checksum(&a, &hash(1), 0, 0, &bytes[..999]),
        ];
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
