//! Identity: which bytes are interchangeable, and what a block of them looks like.
//!
//! A namespace is the set of settings under which bytes may be shared. Its id is BLAKE3 (256 bits),
//! keyed with the tenant's secret, over all of those settings as tagged, length-prefixed fields, so
//! that no two settings can be written down in one way and nobody without the secret can guess an
//! id. In memory a namespace is interned to a 32-bit index; the wire and the disk carry the full id.
//!
//! A block consists of *parts*, named by (cache group, rank). The namespace declares them with their
//! exact lengths; a block is present only when all of them are.
//!
//! Why not one field "model name": each field here has been left out of some shipped cache's key,
//! and each omission served wrong bytes.

mod counters;
mod decode;
mod encode;
mod layout;
mod roots;
mod table;
mod wishes;

use std::fmt;

pub use counters::NamespaceCounters;
pub use decode::layout_of;
pub use encode::foreign_hash;
pub use layout::{BlockLayout, PartSpec};
pub use roots::RootMismatch;
pub use table::{Namespace, NamespaceTable, Opened};
pub use wishes::Wishes;

/// Everything that decides whether bytes are interchangeable. The default is not valid: it has no
/// parts and no names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Identity {
    /// Owner, from the authenticated identity of the client; never from a request field.
    pub tenant: String,
    /// Model name or path.
    pub model: String,
    /// Digest or revision of the weights.
    pub weights: String,
    /// `vllm`, `sglang`, `lmcache`, ...
    pub engine: String,
    /// The engine's name of its block layout, with its version.
    pub layout: String,
    /// Element type of the cache, such as `bf16`.
    pub dtype: String,
    /// Tokens per block, at least 1.
    pub block_tokens: u32,
    /// The declared parts, ascending by (group, rank), at least one.
    pub parts: Vec<PartSpec>,
    /// How parts divide the block: `none`, `heads`, `layers`, ...
    pub split: String,
    /// Name of the block hash algorithm, such as `sha256_cbor`.
    pub hash_algorithm: String,
    /// Length of one block hash, 8 to 32 bytes.
    pub hash_bytes: u32,
    /// Digest of the hash chain's root or seed; empty when the algorithm has a fixed one.
    pub hash_root: Vec<u8>,
    /// Digest of the LoRA adapter; empty for none.
    pub lora: Vec<u8>,
    /// Cache salt; empty for none.
    pub cache_salt: Vec<u8>,
}

/// What a client asks to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NamespaceSpec {
    /// Blocks of an engine, named by its own hashes.
    Engine(Box<Identity>),
    /// Values under foreign keys, hashed by [`foreign_hash`]; one part of any length.
    Opaque {
        /// Owner, as in [`Identity::tenant`].
        tenant: String,
        /// Separates users of foreign keys from one another.
        name: String,
        /// The longest value accepted, in bytes; 0 takes the limit for parts.
        bytes_max: u32,
    },
}

impl NamespaceSpec {
    /// Whose it is.
    #[must_use]
    pub fn tenant(&self) -> &str {
        match self {
            Self::Engine(identity) => &identity.tenant,
            Self::Opaque { tenant, .. } => tenant,
        }
    }
}

/// The keyed 256-bit digest of a namespace: equal ids mean interchangeable bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamespaceId([u8; 32]);

impl NamespaceId {
    /// The id with exactly these bytes.
    #[must_use]
    pub const fn from_array(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The id with these bytes, as read from the wire or the disk.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The first eight hex digits, for logs.
    #[must_use]
    pub fn short(&self) -> String {
        self.0.iter().take(4).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for NamespaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..", self.short())
    }
}

/// A tenant's secret: the key of its namespace ids. Never printed.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// Takes the bytes of a secret.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Another key that only those with the secret can make: BLAKE3's key derivation for `context`, which
    /// says what it is for, over the secret and `of`, which says whose it is.
    #[must_use]
    pub fn derive(&self, context: &str, of: &[u8]) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new_derive_key(context);
        hasher.update(&self.0).update(of);
        *hasher.finalize().as_bytes()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(redacted)")
    }
}
