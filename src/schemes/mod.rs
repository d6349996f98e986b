//! Hash schemes: the names that others have for our blocks, and which block they mean.
//!
//! Engines name a block by their own hash, and that is how it is put and found. Others name it otherwise: by
//! 64 bits of that hash (events of vLLM and SGLang), or by hashes of its tokens that they make themselves
//! (Dynamo, llm-d).
//!
//! [`vllm`], [`sglang`], [`dynamo`] and [`llm_d`] make those names: pure functions, each with its source.
//! [`Algorithm`] is how the engine of a namespace makes hashes from tokens.
//!
//! A namespace may opt in to schemes ([`Scheme`]). Then [`Schemes`] keeps, for each of its blocks, the name that it has
//! there, and finds the block by it: what can be read is followed ([`crate::changes`]), what names need is in
//! the descriptions of blocks.

mod algorithm;
mod cbor;
pub mod dynamo;
mod follow;
mod index;
pub mod llm_d;
mod pickle;
mod scheme;
pub mod sglang;
mod table;
pub mod vllm;

pub use algorithm::Algorithm;
pub(crate) use follow::start;
pub use index::Schemes;
pub use scheme::{Scheme, checked};

/// A LoRA adapter, as engines tell it from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lora<'a> {
    /// Its name.
    pub name: &'a str,
    /// Where the engine has it from; empty if that is not known. vLLM's hashes have it.
    pub path: &'a str,
}

/// What hashes of a prompt are made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Prompt<'a> {
    /// Its token ids.
    pub tokens: &'a [u32],
    /// The adapter that it is for.
    pub lora: Option<Lora<'a>>,
    /// What separates it from other users' prompts; empty for none.
    pub cache_salt: &'a str,
}

#[cfg(test)]
mod tests;
