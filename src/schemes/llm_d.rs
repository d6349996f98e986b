//! llm-d's request keys, from tokens: FNV-64a over canonical CBOR of `[key before, tokens, null]`, where
//! the key before the first one is that of `[FNV-64a of the hash seed, null, model]`.
//!
//! The model is its name, or that of the adapter. The hash seed is a setting of llm-d's, empty unless somebody
//! sets it; keys of another seed are of no use here. So are those of multi-modal items, in the place
//! of the last null.

use super::cbor;

const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// The key of what comes before the first block of a model, or of an adapter.
#[must_use]
pub fn root(model: &str) -> u64 {
    let mut bytes = Vec::new();
    let mut writer = cbor::Writer(&mut bytes);
    writer.array(3);
    writer.unsigned(fnv(&[]));
    writer.null();
    writer.text(model);
    fnv(&bytes)
}

/// The key of a block behind the one with that key.
#[must_use]
pub fn key(before: u64, tokens: &[u32]) -> u64 {
    let mut bytes = Vec::new();
    let mut writer = cbor::Writer(&mut bytes);
    writer.array(3);
    writer.unsigned(before);
    writer.tokens(tokens);
    writer.null();
    fnv(&bytes)
}

/// The keys of a prompt's whole blocks.
#[must_use]
pub fn keys(model: &str, block_tokens: usize, tokens: &[u32]) -> Vec<u64> {
    let mut before = root(model);
    let keys = tokens.chunks_exact(block_tokens.max(1)).map(|tokens| {
        before = key(before, tokens);
        before
    });
    keys.collect()
}

fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_chained_from_the_model() {
        let tokens: Vec<u32> = (1..=14).collect();
        assert_eq!(
            keys("m", 4, &tokens),
            [14_686_617_092_727_577_033, 9_856_792_211_163_113_858, 8_070_811_301_862_111_567]
        );
        assert_ne!(keys("n", 4, &tokens), keys("m", 4, &tokens));
        // A published value of FNV-64a.
        assert_eq!(fnv(b"a"), 0xaf63_dc4c_8601_ec8c);
    }
}
