//! Dynamo's hashes, from tokens: XXH3-64 of a block's tokens alone (local), and chained (sequence).
//!
//! ```text
//! seed        1337 + XXH3(name of the adapter, seed 0) + XXH3(cache salt, seed 1), wrapping; nothing for
//!             an empty one
//! local[i]    XXH3(tokens of block i, each u32 little-endian; seed)
//! sequence[0] local[0]
//! sequence[i] XXH3(sequence[i-1] local[i], each u64 little-endian; 1337)
//! ```
//! Only whole blocks have hashes. Those of multi-modal items, which stand behind the tokens, are not made
//! here: a description has tokens only.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The seed of all of them.
const SEED: u64 = 1337;

/// The seed of local hashes of requests with this adapter and salt; empty for none.
#[must_use]
pub fn seed(lora_name: &str, cache_salt: &[u8]) -> u64 {
    let part = |bytes: &[u8], seed| match bytes {
        [] => 0,
        bytes => xxh3_64_with_seed(bytes, seed),
    };
    SEED.wrapping_add(part(lora_name.as_bytes(), 0)).wrapping_add(part(cache_salt, 1))
}

/// The local hash of a block.
#[must_use]
pub fn local(tokens: &[u32], seed: u64) -> u64 {
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, seed)
}

/// The local hashes of a prompt's whole blocks.
#[must_use]
pub fn locals(block_tokens: usize, tokens: &[u32], seed: u64) -> Vec<u64> {
    tokens.chunks_exact(block_tokens.max(1)).map(|tokens| local(tokens, seed)).collect()
}

/// The sequence hash of a block with this local hash, behind the one with that sequence hash.
#[must_use]
pub fn sequence(before: Option<u64>, local: u64) -> u64 {
    let Some(before) = before else { return local };
    let [a, b, c, d, e, f, g, h] = before.to_le_bytes();
    let [i, j, k, l, m, n, o, p] = local.to_le_bytes();
    xxh3_64_with_seed(&[a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p], SEED)
}

/// Chains local hashes.
#[must_use]
pub fn sequences(locals: &[u64]) -> Vec<u64> {
    let mut before = None;
    let chained = locals.iter().map(|local| *before.insert(sequence(before, *local)));
    chained.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_those_of_dynamo() {
        let tokens: Vec<u32> = (1..=13).collect();
        let locals = super::locals(4, &tokens, seed("", b""));
        assert_eq!(
            locals,
            [14_643_705_804_678_351_452, 16_777_012_769_546_811_212, 483_935_686_894_639_516]
        );
        assert_eq!(
            sequences(&locals),
            [14_643_705_804_678_351_452, 4_945_711_292_740_353_085, 12_583_592_247_330_656_132]
        );
        let tokens: Vec<u32> = (1..=32).collect();
        let locals = super::locals(16, &tokens, seed("", b""));
        assert_eq!(locals, [16_863_443_419_780_771_464, 2_287_610_619_914_608_821]);
        assert_eq!(sequences(&locals)[1], 12_466_389_667_045_779_788);
    }

    #[test]
    fn adapter_and_salt_shape_the_seed() {
        let tokens: Vec<u32> = (1..=16).collect();
        assert_eq!(local(&tokens, seed("adapter-a", b"")), 4_377_081_107_200_288_488);
        assert_eq!(local(&tokens, seed("", b"tenant-a")), 8_175_209_796_170_318_505);
        assert_eq!(seed("", b""), 1337);
        assert_ne!(seed("tenant-a", b""), seed("", b"tenant-a"));
    }
}
