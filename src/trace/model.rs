//! How many bytes of KV a model keeps for a token.
//!
//! Two (K and V) x layers x KV heads x head size x bytes of the element, or the latent size for
//! MLA. The numbers are for the whole model, all ranks together, in bf16; fp8 halves them.

use std::{fmt, str::FromStr};

use kvstrata_tiers::error::{Error, Result};

/// A model whose KV size is known.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    name: &'static str,
    /// KiB for one token in bf16.
    kib_per_token: f64,
}

/// The element type of the stored KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    /// Two bytes.
    Bf16,
    /// One byte.
    Fp8,
}

/// The known models.
pub const MODELS: [Model; 9] = [
    Model { name: "llama-3-8b", kib_per_token: 128.0 },
    Model { name: "llama-3-70b", kib_per_token: 320.0 },
    Model { name: "qwen3-8b", kib_per_token: 144.0 },
    Model { name: "qwen3-32b", kib_per_token: 256.0 },
    Model { name: "qwen3-235b-a22b", kib_per_token: 188.0 },
    Model { name: "deepseek-v3", kib_per_token: 68.6 },
    Model { name: "kimi-k2", kib_per_token: 68.6 },
    Model { name: "glm-4.5", kib_per_token: 368.0 },
    Model { name: "gpt-oss-120b", kib_per_token: 72.0 },
];

impl Model {
    /// The name, as `--model` takes it.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Bytes of a block of `block_tokens` tokens, at least 1.
    #[must_use]
    pub fn block_bytes(&self, block_tokens: u32, kv_type: KvType) -> u64 {
        let scale = match kv_type {
            KvType::Bf16 => 1024.0,
            KvType::Fp8 => 512.0,
        };
        let bytes = (self.kib_per_token * scale * f64::from(block_tokens)).round().max(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "whole, at least 1, and below 2^52: 368 KiB x 2^32 tokens"
        )]
        let bytes = bytes as u64;
        bytes
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl FromStr for Model {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        MODELS.into_iter().find(|model| model.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
            let known: Vec<_> = MODELS.iter().map(Model::name).collect();
            Error::invalid(format!("model: {name} given, one of {} allowed", known.join(", ")))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_known_models_have_the_published_size() {
        let llama: Model = "Llama-3-8B".parse().unwrap();
        assert_eq!(llama.block_bytes(16, KvType::Bf16), 2 << 20);
        assert_eq!(llama.block_bytes(64, KvType::Fp8), 4 << 20);
        let error = "gpt-9".parse::<Model>().unwrap_err().to_string();
        assert!(error.contains("gpt-9 given") && error.contains("kimi-k2"), "{error}");
    }
}
