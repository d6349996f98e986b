//! The inner loop of XXH3: what absorbs whole blocks, by the widest registers that this machine has, and
//! while they are copied, too: that reads memory once for both.
#![expect(unsafe_code, reason = "runs instructions that not every machine has, over raw memory")]

use super::xxh3::{Block, Lanes, PRIME32_1, SCRAMBLE_AT, SECRET_STEP, STRIPE_BYTES, Secret};
use crate::shared::{Room, SharedBytes};

/// Absorbs whole blocks.
pub(super) fn absorb(lanes: &mut Lanes, secret: &Secret, blocks: &[Block]) {
    #[cfg(target_arch = "x86_64")]
    {
        let from = blocks.as_ptr().cast();
        // SAFETY: there are as many blocks, and nothing is written.
        let done =
            unsafe { wide::run::<false>(lanes, secret, from, std::ptr::null_mut(), blocks.len()) };
        if done {
            return;
        }
    }
    absorb_plainly(lanes, secret, blocks);
}

/// As above, on any machine.
fn absorb_plainly(lanes: &mut Lanes, secret: &Secret, blocks: &[Block]) {
    for block in blocks {
        absorb_stripes(lanes, secret, 0, block.as_chunks().0);
        scramble(lanes, secret);
    }
}

/// Copies whole blocks and absorbs the copy; `to` is as long as `from`. Returns the copy.
pub(super) fn absorb_shared<'t>(
    lanes: &mut Lanes,
    secret: &Secret,
    from: SharedBytes<'_>,
    mut to: Room<'t>,
) -> &'t [u8] {
    let blocks = from.len().min(to.len()) / size_of::<Block>();
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: both have as many blocks, and the room is not shared.
        let done =
            unsafe { wide::run::<true>(lanes, secret, from.as_ptr(), to.as_mut_ptr(), blocks) };
        if done {
            // SAFETY: as many have just been written.
            return unsafe { to.written(blocks * size_of::<Block>()) };
        }
    }
    let (from, _) = from.split_at(blocks * size_of::<Block>());
    let copy = from.copy_to(to);
    absorb(lanes, secret, copy.as_chunks().0);
    copy
}

/// Absorbs stripes, the first one with the secret from `at` on.
pub(super) fn absorb_stripes(
    lanes: &mut Lanes,
    secret: &Secret,
    at: usize,
    stripes: &[[u8; STRIPE_BYTES]],
) {
    for (stripe, at) in stripes.iter().zip((at..).step_by(SECRET_STEP)) {
        let words = stripe.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        for (lane, (word, key)) in words.zip(secret_words(secret, at)).enumerate() {
            let mixed = word ^ key;
            let product = (mixed & u64::from(u32::MAX)).wrapping_mul(mixed >> 32);
            if let Some(lane) = lanes.get_mut(lane ^ 1) {
                *lane = lane.wrapping_add(word);
            }
            if let Some(lane) = lanes.get_mut(lane) {
                *lane = lane.wrapping_add(product);
            }
        }
    }
}

fn scramble(lanes: &mut Lanes, secret: &Secret) {
    for (lane, key) in lanes.iter_mut().zip(secret_words(secret, SCRAMBLE_AT)) {
        *lane = (*lane ^ *lane >> 47 ^ key).wrapping_mul(PRIME32_1);
    }
}

fn secret_words(secret: &Secret, at: usize) -> impl Iterator<Item = u64> {
    let words = secret.get(at..).unwrap_or_default().as_chunks::<8>().0;
    words.iter().map(|word| u64::from_le_bytes(*word))
}

/// By registers of 64 or 32 bytes. Bytes are loaded by instructions that the compiler knows nothing about,
/// because others may write them.
#[cfg(target_arch = "x86_64")]
mod wide {
    use std::arch::asm;
    #[allow(
        clippy::wildcard_imports,
        reason = "they are instructions, each with its own prefix"
    )]
    use std::arch::x86_64::*;

    use super::{Block, Lanes, PRIME32_1, SCRAMBLE_AT, SECRET_STEP, STRIPE_BYTES, Secret};

    const STRIPES: usize = size_of::<Block>() / STRIPE_BYTES;
    /// How far ahead memory is asked for when it is copied.
    const AHEAD: usize = 4096;
    #[expect(clippy::cast_possible_truncation, reason = "32 bits of it are set")]
    const PRIME: i32 = (PRIME32_1 as u32).cast_signed();

    /// Absorbs blocks, and copies them; false, and nothing, on a machine without such registers.
    ///
    /// # Safety
    /// `from` is mapped for as many blocks, and if they are copied, `to` is the caller's for as many.
    pub(super) unsafe fn run<const COPY: bool>(
        lanes: &mut Lanes,
        secret: &Secret,
        from: *const u8,
        to: *mut u8,
        blocks: usize,
    ) -> bool {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the machine has it, and the caller vouches for the memory.
            unsafe { by_64::<COPY>(lanes, secret, from, to, blocks) };
        } else if is_x86_feature_detected!("avx2") {
            // SAFETY: as above.
            unsafe { by_32::<COPY>(lanes, secret, from, to, blocks) };
        } else {
            return false;
        }
        true
    }

    /// # Safety
    /// As for [`run`].
    #[target_feature(enable = "avx512f")]
    unsafe fn by_64<const COPY: bool>(
        lanes: &mut Lanes,
        secret: &Secret,
        mut from: *const u8,
        mut to: *mut u8,
        blocks: usize,
    ) {
        let key = |at: usize| secret.as_ptr().wrapping_add(at).cast();
        let prime = _mm512_set1_epi32(PRIME);
        // SAFETY: the lanes have 64 bytes.
        let mut sum = unsafe { _mm512_loadu_si512(lanes.as_ptr().cast()) };
        for _ in 0..blocks {
            for stripe in 0..STRIPES {
                let bytes: __m512i;
                // SAFETY: the block has a stripe here.
                unsafe {
                    asm!("vmovdqu64 {}, [{}]", out(zmm_reg) bytes, in(reg) from,
                        options(nostack, preserves_flags, readonly));
                }
                if COPY {
                    _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                    // SAFETY: the room has a stripe here.
                    unsafe { _mm512_storeu_si512(to.cast(), bytes) };
                    to = to.wrapping_add(STRIPE_BYTES);
                }
                from = from.wrapping_add(STRIPE_BYTES);
                // SAFETY: the secret has a stripe there, and 15 steps.
                let key = unsafe { _mm512_loadu_si512(key(stripe * SECRET_STEP)) };
                let mixed = _mm512_xor_si512(bytes, key);
                let product = _mm512_mul_epu32(mixed, _mm512_srli_epi64::<32>(mixed));
                let swapped = _mm512_shuffle_epi32::<0x4E>(bytes);
                sum = _mm512_add_epi64(sum, _mm512_add_epi64(swapped, product));
            }
            // SAFETY: the secret ends with it.
            let key = unsafe { _mm512_loadu_si512(key(SCRAMBLE_AT)) };
            let mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64::<47>(sum)), key);
            let high = _mm512_mul_epu32(_mm512_srli_epi64::<32>(mixed), prime);
            sum = _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64::<32>(high));
        }
        // SAFETY: the lanes have 64 bytes.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast(), sum) };
    }

    /// # Safety
    /// As for [`run`].
    #[target_feature(enable = "avx2")]
    unsafe fn by_32<const COPY: bool>(
        lanes: &mut Lanes,
        secret: &Secret,
        mut from: *const u8,
        mut to: *mut u8,
        blocks: usize,
    ) {
        const HALF: usize = STRIPE_BYTES / 2;
        let key = |at: usize| secret.as_ptr().wrapping_add(at).cast();
        let prime = _mm256_set1_epi32(PRIME);
        let halves = lanes.as_mut_ptr().cast::<[__m256i; 2]>();
        // SAFETY: the lanes have 64 bytes.
        let mut sums = unsafe { halves.read_unaligned() };
        for _ in 0..blocks {
            for stripe in 0..STRIPES {
                for (sum, half) in sums.iter_mut().zip([0, HALF]) {
                    let bytes: __m256i;
                    // SAFETY: the block has half a stripe here.
                    unsafe {
                        asm!("vmovdqu {}, [{}]", out(ymm_reg) bytes, in(reg) from,
                            options(nostack, preserves_flags, readonly));
                    }
                    if COPY {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                        // SAFETY: the room has half a stripe here.
                        unsafe { _mm256_storeu_si256(to.cast(), bytes) };
                        to = to.wrapping_add(HALF);
                    }
                    from = from.wrapping_add(HALF);
                    // SAFETY: the secret has a stripe there, and 15 steps.
                    let key = unsafe { _mm256_loadu_si256(key(stripe * SECRET_STEP + half)) };
                    let mixed = _mm256_xor_si256(bytes, key);
                    let product = _mm256_mul_epu32(mixed, _mm256_srli_epi64::<32>(mixed));
                    let swapped = _mm256_shuffle_epi32::<0x4E>(bytes);
                    *sum = _mm256_add_epi64(*sum, _mm256_add_epi64(swapped, product));
                }
            }
            for (sum, half) in sums.iter_mut().zip([0, HALF]) {
                // SAFETY: the secret ends with it.
                let key = unsafe { _mm256_loadu_si256(key(SCRAMBLE_AT + half)) };
                let mixed =
                    _mm256_xor_si256(_mm256_xor_si256(*sum, _mm256_srli_epi64::<47>(*sum)), key);
                let high = _mm256_mul_epu32(_mm256_srli_epi64::<32>(mixed), prime);
                *sum =
                    _mm256_add_epi64(_mm256_mul_epu32(mixed, prime), _mm256_slli_epi64::<32>(high));
            }
        }
        // SAFETY: the lanes have 64 bytes.
        unsafe { halves.write_unaligned(sums) };
    }

    #[cfg(test)]
    #[expect(clippy::cast_possible_truncation, reason = "some bits of large numbers")]
    mod tests {
        use super::*;

        #[test]
        fn all_registers_come_to_the_same() {
            type Run = unsafe fn(&mut Lanes, &Secret, *const u8, *mut u8, usize);
            let bytes =
                (0_u64..3 * 1_025).map(|at| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8);
            let bytes: Vec<u8> = bytes.collect();
            let secret: Secret = std::array::from_fn(|at| (at * 7) as u8);
            let start: Lanes = std::array::from_fn(|at| PRIME32_1.wrapping_mul(at as u64 + 1));
            let wide: [(bool, [Run; 2]); 2] = [
                (is_x86_feature_detected!("avx512f"), [by_64::<false>, by_64::<true>]),
                (is_x86_feature_detected!("avx2"), [by_32::<false>, by_32::<true>]),
            ];
            for blocks in 0..3 {
                let mut right = start;
                let bytes = &bytes[1..=blocks * size_of::<Block>()];
                super::super::absorb_plainly(&mut right, &secret, bytes.as_chunks().0);
                for (_, [absorb, absorb_copying]) in wide.iter().filter(|(has, _)| *has) {
                    let (mut lanes, mut again) = (start, start);
                    let mut copy = vec![0; bytes.len()];
                    let (from, to) = (bytes.as_ptr(), copy.as_mut_ptr());
                    // SAFETY: there are as many blocks, and nothing is written.
                    unsafe { absorb(&mut lanes, &secret, from, to, blocks) };
                    // SAFETY: as above, and there is room for as many.
                    unsafe { absorb_copying(&mut again, &secret, from, to, blocks) };
                    assert_eq!((lanes, again), (right, right), "{blocks} blocks");
                    assert!(copy == bytes);
                }
            }
        }
    }
}
