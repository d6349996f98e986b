//! How an engine makes the hashes of a namespace, where that can be done here.

use kvstrata_tiers::{block::BlockHash, namespace::Identity};
use sha2::{Digest, Sha256};

use super::{
    Prompt, sglang,
    vllm::{self, Encoding},
};

/// Values of `PYTHONHASHSEED` that are tried, from 0: what people write by hand. A namespace has no more than
/// a digest of the root.
const SEEDS_TRIED: u32 = 1024;

/// How the hashes of a namespace are made from tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// vLLM's, from this root.
    Vllm {
        /// How the input of a hash becomes bytes.
        encoding: Encoding,
        /// What its chains begin with.
        root: vllm::Hash,
    },
    /// SGLang's pages.
    Sglang,
}

impl Algorithm {
    /// That of a namespace; none if it is not known here, or begins with a root that is not.
    #[must_use]
    pub fn of(identity: &Identity) -> Option<Self> {
        let encoding = match (identity.engine.as_str(), identity.hash_algorithm.as_str()) {
            _ if identity.hash_bytes != 32 => return None,
            ("sglang", "sglang-sha256") => return Some(Self::Sglang),
            ("vllm", "sha256_cbor") => Encoding::Cbor,
            ("vllm", "sha256") => Encoding::Pickle,
            _ => return None,
        };
        root_of(encoding, &identity.hash_root).map(|root| Self::Vllm { encoding, root })
    }

    /// The hashes of a prompt's whole blocks; none if they cannot be made of what is known of it.
    #[must_use]
    pub fn hashes(&self, block_tokens: usize, prompt: &Prompt<'_>) -> Option<Vec<vllm::Hash>> {
        match self {
            Self::Vllm { encoding, root } => vllm::chain(*encoding, root, block_tokens, prompt),
            // Newer versions of it begin the chains of such requests with a seed, older ones do not.
            Self::Sglang if prompt.lora.is_some() || !prompt.cache_salt.is_empty() => None,
            Self::Sglang => Some(sglang::chain(block_tokens, prompt.tokens)),
        }
    }

    /// Whether the hash of a block is that of its tokens and nothing else but what is said here. Something
    /// else may be a salt, or the items of a picture, which nobody has told of. None if it cannot be told.
    #[must_use]
    pub fn is_of(
        &self,
        hash: &BlockHash,
        before: Option<&BlockHash>,
        prompt: &Prompt<'_>,
    ) -> Option<bool> {
        let made = match self {
            Self::Vllm { encoding, root } => {
                let before_it = before.map_or(root, BlockHash::as_bytes);
                vllm::next(*encoding, before_it, prompt, before.is_none())?
            }
            Self::Sglang => sglang::next(before.map(BlockHash::as_bytes), prompt.tokens),
        };
        Some(made == *hash.as_bytes())
    }
}

/// The root whose digest, or which itself, a namespace has; that of vLLM if it has none.
fn root_of(encoding: Encoding, hash_root: &[u8]) -> Option<vllm::Hash> {
    let usual = vllm::root(encoding, None);
    let is_it = |root: &vllm::Hash| {
        hash_root.is_empty() || hash_root == root || hash_root == Sha256::digest(root).as_slice()
    };
    if is_it(&usual) {
        return Some(usual);
    }
    let seeded = |seed: u32| vllm::root(encoding, Some(&seed.to_string()));
    (0..SEEDS_TRIED).map(seeded).find(is_it)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schemes::Lora;

    fn identity(engine: &str, hash_algorithm: &str, hash_root: &[u8]) -> Identity {
        Identity {
            engine: engine.to_owned(),
            hash_algorithm: hash_algorithm.to_owned(),
            hash_bytes: 32,
            hash_root: hash_root.to_vec(),
            ..Identity::default()
        }
    }

    #[test]
    fn roots_are_found_by_their_digest() {
        let of = |root: &[u8]| Algorithm::of(&identity("vllm", "sha256_cbor", root));
        let encoding = Encoding::Cbor;
        let with = |root| Some(Algorithm::Vllm { encoding, root });
        let usual = vllm::root(encoding, None);
        let zero = vllm::root(encoding, Some("0"));
        assert_eq!(of(b""), with(usual));
        assert_eq!(of(&Sha256::digest(usual)), with(usual));
        assert_eq!(of(&Sha256::digest(zero)), with(zero));
        assert_eq!(of(&zero), with(zero));
        assert_eq!(of(&[7; 32]), None);
        assert_eq!(Algorithm::of(&identity("vllm", "xxhash_cbor", b"")), None);
        assert_eq!(Algorithm::of(&identity("sglang", "sglang-sha256-eagle", b"")), None);
        let short = Identity { hash_bytes: 16, ..identity("vllm", "sha256", b"") };
        assert_eq!(Algorithm::of(&short), None);
    }

    #[test]
    fn what_a_block_has_besides_its_tokens_is_noticed() {
        let tokens: Vec<u32> = (1..=8).collect();
        let plain = Prompt { tokens: &tokens, ..Prompt::default() };
        let salted = Prompt { cache_salt: "tenant-a", ..plain };
        for (engine, algorithm) in
            [("vllm", "sha256"), ("vllm", "sha256_cbor"), ("sglang", "sglang-sha256")]
        {
            let algorithm = Algorithm::of(&identity(engine, algorithm, b"")).unwrap();
            let chain = |prompt| {
                let hashes = algorithm.hashes(4, prompt)?;
                Some(hashes.into_iter().map(BlockHash::from_array).collect::<Vec<_>>())
            };
            let hashes = chain(&plain).unwrap();
            let [first, second] =
                [0, 1].map(|at| Prompt { tokens: &tokens[at * 4..][..4], ..plain });
            assert_eq!(algorithm.is_of(&hashes[0], None, &first), Some(true));
            assert_eq!(algorithm.is_of(&hashes[1], Some(&hashes[0]), &second), Some(true));
            assert_eq!(algorithm.is_of(&hashes[1], None, &second), Some(false));
            assert_eq!(algorithm.is_of(&hashes[0], None, &second), Some(false));
            match chain(&salted) {
                Some(other) => {
                    assert_eq!(algorithm.is_of(&other[0], None, &first), Some(false));
                    let first = Prompt { cache_salt: "tenant-a", ..first };
                    assert_eq!(algorithm.is_of(&other[0], None, &first), Some(true));
                }
                None => assert_eq!(engine, "sglang"),
            }
        }
        let nowhere = Some(Lora { name: "adapter-a", path: "" });
        let prompt = Prompt { lora: nowhere, ..plain };
        let algorithm = Algorithm::of(&identity("vllm", "sha256", b"")).unwrap();
        assert_eq!(algorithm.is_of(&BlockHash::from_array([1; 32]), None, &prompt), None);
    }
}
