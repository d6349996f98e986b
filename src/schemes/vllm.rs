//! vLLM's block hashes, from tokens: `h[i] = SHA-256(encode((h[i-1], tokens, extra)))`, where the block before
//! the first one is the chain's root.
//!
//! The encoding is canonical CBOR (`sha256_cbor`) or a pickle (`sha256`, vLLM's default). `extra` is null, or
//! a tuple of `("lora", name, path)` in every block of an adapter and `("cache_salt", salt)` in the first one of a
//! salted request, in this order. Two more are not made here, because tokens do not say them: those of
//! multi-modal items and of prompt embeddings.
//!
//! The root is the hash of a text: of `vllm-none-hash`, or of what `PYTHONHASHSEED` is, if it is set.
//! Model, element type, block size and layout are not in the hash; the namespace has them.

use sha2::{Digest, Sha256};

use super::{Prompt, cbor, pickle};

/// What roots are made of where nothing else is said.
const ROOT_SEED: &str = "vllm-none-hash";

/// How the input of a hash becomes bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// `sha256_cbor`.
    Cbor,
    /// `sha256`.
    Pickle,
}

/// The hash of a block of vLLM.
pub type Hash = [u8; 32];

/// The root of chains, `NONE_HASH`: with what `PYTHONHASHSEED` says, if it is set.
#[must_use]
pub fn root(encoding: Encoding, python_hash_seed: Option<&str>) -> Hash {
    let seed = python_hash_seed.unwrap_or(ROOT_SEED);
    let mut bytes = Vec::new();
    match encoding {
        Encoding::Cbor => cbor::Writer(&mut bytes).text(seed),
        Encoding::Pickle => {
            // A short text is one frame.
            let _whole = pickle::write(&mut bytes, |writer| writer.text(seed));
        }
    }
    Sha256::digest(bytes).into()
}

/// The chain of a prompt's whole blocks; none if it cannot be computed: `block_tokens` is 0, the path of the
/// adapter is not known, or blocks are so long that a pickle of one takes several frames (from 13,000
/// tokens on).
#[must_use]
pub fn chain(
    encoding: Encoding,
    root: &Hash,
    block_tokens: usize,
    prompt: &Prompt<'_>,
) -> Option<Vec<Hash>> {
    if block_tokens == 0 || prompt.lora.is_some_and(|lora| lora.path.is_empty()) {
        return None;
    }
    let mut scratch = Vec::new();
    let mut before = *root;
    let blocks = prompt.tokens.chunks_exact(block_tokens).enumerate().map(|(at, tokens)| {
        let prompt = Prompt { tokens, ..*prompt };
        before = block(encoding, &before, &prompt, at == 0, &mut scratch)?;
        Some(before)
    });
    blocks.collect()
}

/// The hash of the block that has all tokens of `prompt`, behind the block, or the root, `before`; none as for
/// [`chain`].
#[must_use]
pub fn next(
    encoding: Encoding,
    before: &Hash,
    prompt: &Prompt<'_>,
    is_first: bool,
) -> Option<Hash> {
    if prompt.lora.is_some_and(|lora| lora.path.is_empty()) {
        return None;
    }
    block(encoding, before, prompt, is_first, &mut Vec::new())
}

fn block(
    encoding: Encoding,
    before: &Hash,
    prompt: &Prompt<'_>,
    is_first: bool,
    scratch: &mut Vec<u8>,
) -> Option<Hash> {
    let salt = Some(prompt.cache_salt).filter(|salt| is_first && !salt.is_empty());
    let extras = usize::from(prompt.lora.is_some()) + usize::from(salt.is_some());
    match encoding {
        Encoding::Cbor => {
            scratch.clear();
            let mut writer = cbor::Writer(scratch);
            writer.array(3);
            writer.bytes(before);
            writer.tokens(prompt.tokens);
            if extras == 0 {
                writer.null();
            } else {
                writer.array(extras);
            }
            if let Some(lora) = prompt.lora {
                writer.array(3);
                ["lora", lora.name, lora.path].iter().for_each(|text| writer.text(text));
            }
            if let Some(salt) = salt {
                writer.array(2);
                ["cache_salt", salt].iter().for_each(|text| writer.text(text));
            }
        }
        Encoding::Pickle => {
            let whole = pickle::write(scratch, |writer| {
                writer.tuple(3, |writer| {
                    writer.bytes(before);
                    writer.tokens(prompt.tokens);
                    if extras == 0 {
                        return writer.none();
                    }
                    writer.tuple(extras, |writer| {
                        if let Some(lora) = prompt.lora {
                            let texts = ["lora", lora.name, lora.path];
                            writer.tuple(3, |writer| texts.iter().for_each(|t| writer.text(t)));
                        }
                        if let Some(salt) = salt {
                            let texts = ["cache_salt", salt];
                            writer.tuple(2, |writer| texts.iter().for_each(|t| writer.text(t)));
                        }
                    });
                });
            });
            if !whole {
                return None;
            }
        }
    }
    Some(Sha256::digest(scratch).into())
}

/// The 64 bits that vLLM's events name a block by: its last 8 bytes, big-endian.
#[must_use]
pub fn event_hash(hash: &[u8]) -> Option<u64> {
    hash.last_chunk().map(|bytes| u64::from_be_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schemes::Lora;

    fn hash(text: &str) -> Hash {
        hex::decode(text).unwrap().try_into().unwrap()
    }

    fn cbor_of(tokens: &[u32], lora: Option<Lora<'_>>, cache_salt: &str) -> Vec<u8> {
        let mut scratch = Vec::new();
        let prompt = Prompt { tokens, lora, cache_salt };
        block(Encoding::Cbor, &root(Encoding::Cbor, None), &prompt, true, &mut scratch).unwrap();
        scratch
    }

    #[test]
    fn roots_are_those_of_vllm() {
        assert_eq!(
            root(Encoding::Cbor, None),
            hash("9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0")
        );
        assert_eq!(
            root(Encoding::Pickle, None),
            hash("066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198")
        );
        assert_eq!(root(Encoding::Cbor, Some(ROOT_SEED)), root(Encoding::Cbor, None));
        assert_ne!(root(Encoding::Cbor, Some("0")), root(Encoding::Cbor, None));
    }

    #[test]
    fn what_is_hashed_is_canonical_cbor() {
        let root = "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0";
        let plain = cbor_of(&[1, 2, 300, 70_000], None, "");
        assert_eq!(hex::encode(&plain), format!("835820{root}84010219012c1a00011170f6"));
        assert_eq!(
            hex::encode(Sha256::digest(plain)),
            "67516cd611fd0d7e4c5c7f6fdbf4d93a304496db502c69895dc6a82deea8ae72"
        );
        assert_eq!(
            hex::encode(cbor_of(&[1, 2], None, "tenant-a")),
            format!("835820{root}82010281826a63616368655f73616c746874656e616e742d61")
        );
    }

    #[test]
    fn the_pickles_are_those_of_python() {
        let lora = Lora { name: "adapter-a", path: "/models/a" };
        let prompt = Prompt { tokens: &[1, 2, 3], lora: Some(lora), cache_salt: "tenant-a" };
        let mut scratch = Vec::new();
        let root = root(Encoding::Pickle, None);
        block(Encoding::Pickle, &root, &prompt, true, &mut scratch).unwrap();
        assert_eq!(
            hex::encode(&scratch),
            "8005956b000000000000004320066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198\
             944b014b024b0387948c046c6f7261948c09616461707465722d61948c092f6d6f64656c732f619487948c0a63\
             616368655f73616c74948c0874656e616e742d61948694869487942e"
        );
        let prompt = Prompt { tokens: &[1, 2], lora: None, cache_salt: "tenant-a" };
        block(Encoding::Pickle, &root, &prompt, true, &mut scratch).unwrap();
        assert_eq!(
            hex::encode(&scratch),
            "80059548000000000000004320066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198\
             944b014b0286948c0a63616368655f73616c74948c0874656e616e742d61948694859487942e"
        );
    }

    #[test]
    fn the_default_chain_is_that_of_python() {
        let tokens: Vec<u32> = (1..=40).collect();
        let prompt = Prompt { tokens: &tokens, ..Prompt::default() };
        let root = root(Encoding::Pickle, None);
        let expected = [
            "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",
            "8e717becdc2054b7a3223b7b844f462c0db0ac86287b752b16d077ad0843c577",
        ];
        let chained = chain(Encoding::Pickle, &root, 16, &prompt).unwrap();
        assert_eq!(chained, expected.map(hash), "whole blocks only");
    }

    /// A batch of vLLM 0.32's events, with whole hashes: two blocks without a salt, two of a salted request.
    #[test]
    fn chains_are_those_that_vllm_publishes() {
        let plain: [u32; 64] = [
            223, 166, 230, 40, 144, 215, 86, 29, 20, 57, 189, 170, 140, 214, 208, 115, 101, 217,
            25, 89, 145, 225, 70, 206, 125, 157, 158, 194, 44, 69, 164, 161, 199, 226, 206, 87,
            189, 225, 176, 195, 42, 236, 128, 105, 43, 112, 224, 124, 226, 84, 133, 199, 44, 213,
            70, 199, 182, 223, 94, 44, 31, 170, 71, 231,
        ];
        let salted: [u32; 64] = [
            102, 58, 121, 186, 32, 38, 230, 157, 44, 113, 169, 34, 149, 74, 29, 42, 131, 127, 37,
            81, 43, 161, 128, 35, 231, 164, 51, 77, 181, 180, 169, 35, 167, 169, 121, 32, 76, 31,
            162, 54, 94, 127, 56, 158, 50, 166, 98, 163, 228, 194, 66, 46, 168, 166, 183, 68, 115,
            44, 160, 202, 36, 164, 35, 178,
        ];
        let root = root(Encoding::Cbor, None);
        let of = |prompt| chain(Encoding::Cbor, &root, 32, &prompt).unwrap();
        let expected = [
            "8d2ed23e909d6363bddace7705787d6524eee8fc9255c19dcc3ec1566e05653c",
            "ef5c353c49b597f346cbaea559d869f634f7183467804554e76e4ec2788ff454",
        ];
        assert_eq!(of(Prompt { tokens: &plain, ..Prompt::default() }), expected.map(hash));
        let expected = [
            "e0b41157b216a70792e4f540553cd598ba998c338b9be8a0e79799ed5ead80e0",
            "1d0c0b514d0cc04318b40f9c8b07d9f1d32d572f4f82f494a2c65589443f6b4d",
        ];
        let prompt = Prompt { tokens: &salted, cache_salt: "tenant-a", ..Prompt::default() };
        assert_eq!(of(prompt), expected.map(hash));
        // The same batches name them so where hashes are numbers.
        let short = of(Prompt { tokens: &plain, ..Prompt::default() });
        let short: Vec<_> = short.iter().map(|hash| event_hash(hash).unwrap()).collect();
        assert_eq!(short, [14_717_413_209_250_555_196, 16_676_353_067_352_847_444]);
    }

    #[test]
    fn an_adapter_is_in_every_block_and_a_salt_in_the_first_one() {
        let lora = Some(Lora { name: "adapter-a", path: "/models/a" });
        let tokens: Vec<u32> = (1..=8).collect();
        let prompt = Prompt { tokens: &tokens, lora, cache_salt: "tenant-a" };
        let chained = chain(Encoding::Cbor, &root(Encoding::Cbor, None), 4, &prompt).unwrap();
        let expected = [
            "a59949e6aa96d5c7e6e4062fce2762fdad52b9dedbffcfd1e1941caaca2d952a",
            "7c5b4743b8c4ae3b59e9b3d4c2e8974260e18a852a7b546a63abb324823889a2",
        ];
        assert_eq!(chained, expected.map(hash));
        let nowhere = Some(Lora { name: "adapter-a", path: "" });
        let prompt = Prompt { lora: nowhere, ..prompt };
        assert_eq!(chain(Encoding::Cbor, &root(Encoding::Cbor, None), 4, &prompt), None);
        assert_eq!(chain(Encoding::Cbor, &root(Encoding::Cbor, None), 0, &Prompt::default()), None);
    }
}
