//! The schemes by which blocks can be found, and what each needs of a namespace.

use std::collections::BTreeSet;

use kvstrata_tiers::{
    error::{Error, Result},
    label_values,
    namespace::NamespaceSpec,
};

use super::{dynamo, llm_d, sglang, vllm};

label_values! {
    /// How others name blocks.
    Scheme {
        /// The last 64 bits of the engine's hash, as vLLM's events have them.
        VllmU64 = "vllm_u64",
        /// Its first 64 bits, as SGLang's events have them.
        SglangI64 = "sglang_i64",
        /// Dynamo's sequence hashes, of tokens.
        Dynamo = "dynamo",
        /// llm-d's request keys, of tokens.
        LlmD = "llm_d",
    }
}

impl Scheme {
    /// The scheme of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|scheme| scheme.name() == name)
    }

    /// Whether its names are made of tokens, so that blocks must be described with theirs.
    #[must_use]
    pub fn is_of_tokens(self) -> bool {
        match self {
            Self::VllmU64 | Self::SglangI64 => false,
            Self::Dynamo | Self::LlmD => true,
        }
    }

    /// The name that a block has by its hash; none in a scheme of tokens.
    pub(crate) fn of_hash(self, hash: &[u8]) -> Option<u64> {
        match self {
            Self::VllmU64 => vllm::event_hash(hash),
            Self::SglangI64 => sglang::event_hash(hash),
            Self::Dynamo | Self::LlmD => None,
        }
    }

    /// The name of a block with these tokens behind one of that name, none at the root; `root` is what
    /// [`root`](Self::root) gave for its adapter.
    pub(super) fn of_tokens(self, before: Option<u64>, tokens: &[u32], root: u64) -> Option<u64> {
        match self {
            Self::VllmU64 | Self::SglangI64 => None,
            Self::Dynamo => Some(dynamo::sequence(before, dynamo::local(tokens, root))),
            Self::LlmD => Some(llm_d::key(before.unwrap_or(root), tokens)),
        }
    }

    /// What names begin with in a namespace: the seed of local hashes, or the key of its model.
    pub(super) fn root(self, model: &str, lora_name: &str, cache_salt: &[u8]) -> u64 {
        match self {
            Self::VllmU64 | Self::SglangI64 => 0,
            Self::Dynamo => dynamo::seed(lora_name, cache_salt),
            Self::LlmD if lora_name.is_empty() => llm_d::root(model),
            Self::LlmD => llm_d::root(lora_name),
        }
    }
}

/// Checks the hash schemes that a client wishes for a namespace; returns them, each once.
///
/// # Errors
/// `Invalid` naming the field, for a name that is none, a scheme that the namespace cannot have, and one of
/// tokens in a namespace that keeps none.
pub fn checked(
    names: &[String],
    spec: &NamespaceSpec,
    keep_tokens: bool,
) -> Result<BTreeSet<String>> {
    for name in names {
        let allowed = || Scheme::ALL.iter().map(|scheme| scheme.name()).collect::<Vec<_>>();
        let Some(scheme) = Scheme::named(name) else {
            let shown: String = name.chars().take(40).collect();
            return Err(Error::invalid(format!(
                "hash_schemes: {shown:?} given; {} allowed",
                allowed().join(", ")
            )));
        };
        if let NamespaceSpec::Opaque { .. } = spec {
            return Err(Error::invalid(format!(
                "hash_schemes: {name} given for an opaque namespace, whose keys nobody names \
                 otherwise; leave it empty"
            )));
        }
        if scheme.is_of_tokens() && !keep_tokens {
            return Err(Error::invalid(format!(
                "hash_schemes: {name} given, which is made of token ids, and keep_tokens is false; set \
                 keep_tokens, or leave {name} out"
            )));
        }
    }
    Ok(names.iter().cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_unknown_or_impossible_is_refused_with_what_to_do() {
        let engine = NamespaceSpec::Engine(Box::default());
        let opaque = NamespaceSpec::Opaque {
            tenant: "default".to_owned(),
            name: "n".to_owned(),
            bytes_max: 0,
        };
        let of = |names: &[&str], spec, keep_tokens| {
            let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
            checked(&names, spec, keep_tokens).map_err(|error| error.to_string())
        };
        assert_eq!(of(&[], &opaque, false).unwrap().len(), 0);
        assert_eq!(of(&["vllm_u64", "vllm_u64", "sglang_i64"], &engine, false).unwrap().len(), 2);
        assert_eq!(of(&["dynamo", "llm_d"], &engine, true).unwrap().len(), 2);
        let cases: [(&[&str], &NamespaceSpec, [&str; 2]); 3] = [
            (&["vllm_u64", "vllm64"], &engine, ["\"vllm64\" given", "vllm_u64, sglang_i64"]),
            (&["vllm_u64"], &opaque, ["opaque", "leave it empty"]),
            (&["dynamo"], &engine, ["keep_tokens is false", "set keep_tokens"]),
        ];
        for (names, spec, said) in cases {
            let error = of(names, spec, false).unwrap_err();
            assert!(error.contains("hash_schemes: "), "{error}");
            assert!(said.iter().all(|said| error.contains(said)), "{error}");
        }
    }

    #[test]
    fn names_of_tokens_are_chained_as_their_owners_chain_them() {
        let tokens: Vec<u32> = (1..=12).collect();
        let of = |scheme: Scheme| {
            let root = scheme.root("m", "", b"");
            let mut before = None;
            let names = tokens.chunks(4).map(|tokens| {
                before = scheme.of_tokens(before, tokens, root);
                before.unwrap()
            });
            names.collect::<Vec<_>>()
        };
        let locals = dynamo::locals(4, &tokens, dynamo::seed("", b""));
        assert_eq!(of(Scheme::Dynamo), dynamo::sequences(&locals));
        assert_eq!(of(Scheme::LlmD), llm_d::keys("m", 4, &tokens));
        assert_eq!(Scheme::VllmU64.of_tokens(None, &tokens, 0), None);
        assert_eq!(Scheme::VllmU64.of_hash(&[1, 0, 0, 0, 0, 0, 0, 0, 2]), Some(2));
        assert_eq!(Scheme::SglangI64.of_hash(&[0, 0, 0, 0, 0, 0, 0, 1, 2]), Some(1));
    }
}
