//! The chain of a prompt: one number for each of its full blocks, of all tokens up to its end.
//!
//! ```text
//! root      = of the block size and the LoRA adapter
//! chain[i]  = xxh3(tokens of block i, what else its hash is of; seed chain[i-1])
//! ```
//! Events of engines have tokens, and so have prompts: whatever an engine hashes its blocks by, the same
//! tokens are the same chain here. A salt belongs to the first block, as it does in engines. Chains are
//! of this process: their root is drawn when it starts, so that nobody can make prompts that are taken for
//! others. A collision would cost a wrong estimate, and no more.

use std::sync::LazyLock;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::events::subscribe::batch::Extras;

static SEED: LazyLock<u64> = LazyLock::new(rand::random);

/// Whose blocks are not those of others with the same tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Identity {
    /// The LoRA adapter; empty for the model itself.
    pub(super) lora: String,
    /// The salt of the request; empty for none.
    pub(super) salt: String,
}

/// What a chain begins with.
pub(super) fn root(block_tokens: usize, lora: &str) -> u64 {
    let bytes = [&block_tokens.to_le_bytes()[..], lora.as_bytes()].concat();
    xxh3_64_with_seed(&bytes, *SEED)
}

/// The next link, behind `parent`. Names of the adapter among the extras say nothing: the root has it.
pub(super) fn link(parent: u64, tokens: &[u32], lora: &str, extras: &Extras) -> u64 {
    let mut bytes = Vec::with_capacity(tokens.len() * 4 + 64);
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    for text in extras.texts.iter().filter(|text| text.as_str() != lora) {
        bytes.push(1);
        bytes.extend(text.len().to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    if extras.others {
        bytes.push(2);
    }
    xxh3_64_with_seed(&bytes, parent)
}

/// The chain of a prompt in blocks of so many tokens; a last block that is not full is left out.
pub(super) fn chain(tokens: &[u32], block_tokens: usize, identity: &Identity) -> Vec<u64> {
    let mut parent = root(block_tokens, &identity.lora);
    let mut extras = Extras::default();
    extras.texts.extend(Some(identity.salt.clone()).filter(|salt| !salt.is_empty()));
    let blocks = tokens.chunks_exact(block_tokens.max(1));
    let link = |block| {
        parent = link(parent, block, &identity.lora, &std::mem::take(&mut extras));
        parent
    };
    blocks.map(link).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_equal_beginnings_have_equal_chains() {
        let of = |tokens: &[u32], lora: &str, salt: &str| {
            chain(tokens, 2, &Identity { lora: lora.to_owned(), salt: salt.to_owned() })
        };
        let whole = of(&[1, 2, 3, 4, 5], "", "");
        assert_eq!(whole.len(), 2);
        assert_eq!(of(&[1, 2, 3, 4], "", ""), whole);
        assert_eq!(of(&[1, 2, 9, 4], "", "")[0], whole[0]);
        assert_ne!(of(&[1, 2, 9, 4], "", "")[1], whole[1]);
        let others = [
            of(&[9, 2, 3, 4], "", ""),
            of(&[1, 2, 3, 4], "a", ""),
            of(&[1, 2, 3, 4], "", "a"),
            of(&[1, 2, 3, 4], "a", "a"),
            chain(&[1, 2, 3, 4], 1, &Identity::default())[..2].to_vec(),
        ];
        for other in others {
            assert!(other[0] != whole[0] && other[1] != whole[1], "{other:?}");
        }
    }
}
