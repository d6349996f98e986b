//! XXH3-64 of inputs that come in pieces, by the specification of the xxHash project. What is short is
//! left to `xxhash-rust`.
//!
//! A block of 1,024 bytes is absorbed once more is known to follow, because the end of an input is
//! absorbed in another way.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::kernel;
use crate::shared::{Room, SharedBytes};

/// Bytes that are absorbed at a time.
pub(super) const STRIPE_BYTES: usize = 64;
/// Bytes after which the lanes are scrambled.
pub(super) const BLOCK_BYTES: usize = 1024;
const SECRET_BYTES: usize = 192;
/// Each stripe is absorbed with the secret from so many bytes further on than the one before.
pub(super) const SECRET_STEP: usize = 8;
/// Where the secret begins that a block ends with.
pub(super) const SCRAMBLE_AT: usize = SECRET_BYTES - STRIPE_BYTES;
/// Where the secret begins that the last stripe is absorbed with.
const LAST_AT: usize = SECRET_BYTES - STRIPE_BYTES - 7;
/// Where the secret begins that the lanes are merged with.
const MERGE_AT: usize = 11;

/// What everything is absorbed into.
pub(super) type Lanes = [u64; 8];
/// What it is absorbed with.
pub(super) type Secret = [u8; SECRET_BYTES];
/// What is absorbed at a time by a [`kernel`].
pub(super) type Block = [u8; BLOCK_BYTES];

pub(super) const PRIME32_1: u64 = 0x9E37_79B1;
const PRIME32_2: u64 = 0x85EB_CA77;
const PRIME32_3: u64 = 0xC2B2_AE3D;
const PRIME64_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME64_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME64_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME64_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME64_5: u64 = 0x27D4_EB2F_1656_67C5;
const AVALANCHE: u64 = 0x1656_6791_9E37_79F9;
/// What the lanes begin with.
const LANES: Lanes =
    [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1];
/// The secret of the specification, in little-endian words.
const SECRET_WORDS: [u64; SECRET_BYTES / 8] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
    0xc3eb_d334_83ac_c5ea,
    0xeb63_13fa_ffa0_81c5,
    0x49da_f0b7_51dd_0d17,
    0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b,
    0xce31_d07a_d1b8_f88f,
    0x2804_1695_8f3a_cb45,
    0x7e40_4bbb_cafb_d7af,
];

/// The state of one input.
#[derive(Clone)]
pub(super) struct State {
    seed: u64,
    secret: Secret,
    lanes: Lanes,
    /// What is not absorbed yet, at the front.
    held: Block,
    held_bytes: usize,
    /// The last stripe of what is absorbed.
    before: [u8; STRIPE_BYTES],
    total: u64,
}

impl State {
    pub(super) fn with_seed(seed: u64) -> Self {
        let mut secret = [0; SECRET_BYTES];
        let (pairs, _) = secret.as_chunks_mut::<16>();
        let (words, _) = SECRET_WORDS.as_chunks::<2>();
        for (pair, [low, high]) in pairs.iter_mut().zip(words) {
            let low = u128::from(low.wrapping_add(seed));
            let high = u128::from(high.wrapping_sub(seed));
            *pair = (low | high << 64).to_le_bytes();
        }
        let before = [0; STRIPE_BYTES];
        Self { seed, secret, lanes: LANES, held: [0; BLOCK_BYTES], held_bytes: 0, before, total: 0 }
    }

    /// Takes the next piece.
    pub(super) fn update(&mut self, piece: &[u8]) {
        let rest = piece.get(self.fill(piece)..).unwrap_or_default();
        if rest.is_empty() {
            return;
        }
        self.absorb_held();
        let ahead = (rest.len() - 1) / BLOCK_BYTES * BLOCK_BYTES;
        let (whole, rest) = rest.split_at(ahead);
        kernel::absorb(&mut self.lanes, &self.secret, whole.as_chunks().0);
        self.absorbed(whole);
        self.fill(rest);
    }

    /// Copies a piece out of memory that is shared, and takes the copy: whole blocks of it while they are in
    /// a core's registers.
    pub(super) fn copy(&mut self, from: SharedBytes<'_>, to: Room<'_>) {
        let (head, rest) = from.split_at(BLOCK_BYTES - self.held_bytes);
        let (head_to, to) = to.split_at(head.len());
        self.fill(head.copy_to(head_to));
        let Some(ahead) = rest.len().min(to.len()).checked_sub(1) else { return };
        self.absorb_held();
        let (whole, tail) = rest.split_at(ahead / BLOCK_BYTES * BLOCK_BYTES);
        let (whole_to, tail_to) = to.split_at(whole.len());
        let copied = kernel::absorb_shared(&mut self.lanes, &self.secret, whole, whole_to);
        self.absorbed(copied);
        self.fill(tail.copy_to(tail_to));
    }

    /// The checksum of all pieces together.
    pub(super) fn digest(&self) -> u64 {
        let held = self.held.get(..self.held_bytes).unwrap_or_default();
        if self.total == held.len() as u64 {
            return xxh3_64_with_seed(held, self.seed);
        }
        let mut lanes = self.lanes;
        let ahead = held.len().saturating_sub(1) / STRIPE_BYTES * STRIPE_BYTES;
        let stripes = held.get(..ahead).unwrap_or_default();
        kernel::absorb_stripes(&mut lanes, &self.secret, 0, stripes.as_chunks().0);
        let last = held.last_chunk().copied().unwrap_or_else(|| {
            // The last stripe reaches back into what is absorbed.
            let mut last = self.before;
            last.rotate_left(held.len());
            let start = last.len() - held.len();
            last.get_mut(start..).unwrap_or_default().copy_from_slice(held);
            last
        });
        kernel::absorb_stripes(&mut lanes, &self.secret, LAST_AT, &[last]);
        self.merge(&lanes)
    }

    /// What is held is followed by more.
    fn absorb_held(&mut self) {
        kernel::absorb(&mut self.lanes, &self.secret, std::slice::from_ref(&self.held));
        if let Some(last) = self.held.last_chunk() {
            self.before = *last;
        }
        self.held_bytes = 0;
    }

    /// Whole blocks have been absorbed.
    fn absorbed(&mut self, whole: &[u8]) {
        if let Some(last) = whole.last_chunk() {
            self.before = *last;
        }
        self.total += whole.len() as u64;
    }

    fn merge(&self, lanes: &Lanes) -> u64 {
        let secret = self.secret.get(MERGE_AT..).unwrap_or_default().as_chunks::<8>().0;
        let mut mixed =
            lanes.iter().zip(secret).map(|(lane, secret)| lane ^ u64::from_le_bytes(*secret));
        let mut sum = self.total.wrapping_mul(PRIME64_1);
        while let (Some(one), Some(other)) = (mixed.next(), mixed.next()) {
            let product = u128::from(one) * u128::from(other);
            #[expect(clippy::cast_possible_truncation, reason = "the halves are folded")]
            let folded = product as u64 ^ (product >> 64) as u64;
            sum = sum.wrapping_add(folded);
        }
        sum = (sum ^ sum >> 37).wrapping_mul(AVALANCHE);
        sum ^ sum >> 32
    }

    /// Holds as much of a piece as there is room for; returns how much.
    fn fill(&mut self, piece: &[u8]) -> usize {
        let room = self.held.get_mut(self.held_bytes..).unwrap_or_default();
        let bytes = room.len().min(piece.len());
        room.get_mut(..bytes)
            .unwrap_or_default()
            .copy_from_slice(piece.get(..bytes).unwrap_or_default());
        self.held_bytes += bytes;
        self.total += bytes as u64;
        bytes
    }
}
