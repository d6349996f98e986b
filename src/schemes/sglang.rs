//! SGLang's page hashes, from tokens: `h[i] = SHA-256(h[i-1] tokens)` with each token as four bytes,
//! little-endian, and nothing before the first page. Adapter and salt are not in them, unless SGLang is so new
//! that it begins salted chains with a seed of their own: those are told apart, and not made here. Speculation
//! by pairs of tokens hashes other units; its namespaces have an algorithm of another name.

use sha2::{Digest, Sha256};

/// The chain of whole pages.
#[must_use]
pub fn chain(page_tokens: usize, tokens: &[u32]) -> Vec<[u8; 32]> {
    let mut before = None;
    let pages = tokens.chunks_exact(page_tokens.max(1)).map(|tokens| {
        let hash = next(before.as_ref(), tokens);
        before = Some(hash);
        hash
    });
    pages.collect()
}

/// The hash of the page with these tokens, behind the page `before`.
#[must_use]
pub fn next(before: Option<&[u8; 32]>, tokens: &[u32]) -> [u8; 32] {
    let mut hasher = Sha256::new();
    hasher.update(before.map_or(&[][..], |before| before));
    tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    hasher.finalize().into()
}

/// The 64 bits that SGLang's events name a page by: its first 8 bytes, big-endian. SGLang publishes them as
/// a signed number of the same bits.
#[must_use]
pub fn event_hash(hash: &[u8]) -> Option<u64> {
    hash.first_chunk().map(|bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python's hashlib makes of it.
    #[test]
    fn pages_are_chained_over_their_tokens() {
        let tokens: Vec<u32> = (1..=15).collect();
        let chained = chain(4, &tokens);
        let expected = [
            "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72",
            "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6",
            "eddb4ab93695109cc0853fa0167c53aa0dc373ece757e530a734981168bdeebc",
        ];
        assert_eq!(chained.iter().map(hex::encode).collect::<Vec<_>>(), expected);
        assert_eq!(event_hash(&chained[0]).unwrap().cast_signed(), -3_488_128_144_981_237_669);
        assert_eq!(event_hash(&chained[1]), Some(0x4ebf_a8a1_f3c3_4151));
        assert_eq!(event_hash(&[1; 7]), None);
    }
}
