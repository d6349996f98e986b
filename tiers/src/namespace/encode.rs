//! How a namespace becomes its id: the canonical encoding, and the hash of foreign keys.
//!
//! ```text
//! "kvstrata namespace v1" 00
//! kind  u8                      1 engine, 2 opaque
//! for each field, ascending tag:
//!   tag     u8
//!   length  u64 little-endian   of the value, in bytes
//!   value
//! ```
//! Numbers are u32 little-endian. The parts are one value: (group, rank, bytes) of each, in order.
//! A new field gets a new tag; a field is never reused. docs/formats.md has the table of tags.
//!
//! The id is keyed BLAKE3 over exactly these bytes, and the disk keeps exactly these bytes
//! (`decode` reads them), so what is stored can neither say less nor more than what is hashed. Behind
//! them the disk keeps what is no part of the identity: the hash schemes.

use super::{Identity, NamespaceId, NamespaceSpec, PartSpec, Secret};
use crate::block::BlockHash;

pub(super) const DOMAIN: &[u8] = b"kvstrata namespace v1\0";
pub(super) const KIND_ENGINE: u8 = 1;
pub(super) const KIND_OPAQUE: u8 = 2;
/// The field of the hash schemes, which is not hashed.
pub(super) const TAG_HASH_SCHEMES: u8 = 15;
const FOREIGN_CONTEXT: &str = "kvstrata v1 foreign key";

struct Encoder(Vec<u8>);

impl Encoder {
    fn new(kind: u8) -> Self {
        let mut bytes = DOMAIN.to_vec();
        bytes.push(kind);
        Self(bytes)
    }

    fn field(mut self, tag: u8, value: &[u8]) -> Self {
        let length = u64::try_from(value.len()).unwrap_or(u64::MAX);
        self.0.push(tag);
        self.0.extend(length.to_le_bytes());
        self.0.extend(value);
        self
    }
}

/// Returns the bytes that say what `spec` is.
pub(super) fn encode(spec: &NamespaceSpec) -> Vec<u8> {
    match spec {
        NamespaceSpec::Engine(identity) => engine_fields(identity, &identity.hash_root),
        NamespaceSpec::Opaque { tenant, name, bytes_max } => {
            Encoder::new(KIND_OPAQUE)
                .field(1, tenant.as_bytes())
                .field(2, name.as_bytes())
                .field(3, &bytes_max.to_le_bytes())
                .0
        }
    }
}

/// Appends the hash schemes to what [`encode`] made of an engine's namespace, if there are any.
pub(super) fn with_schemes(encoded: Vec<u8>, hash_schemes: &str) -> Vec<u8> {
    let encoder = Encoder(encoded);
    match hash_schemes {
        "" => encoder.0,
        names => encoder.field(TAG_HASH_SCHEMES, names.as_bytes()).0,
    }
}

/// Returns the id of `spec` under `secret`.
pub(super) fn namespace_id(secret: &Secret, spec: &NamespaceSpec) -> NamespaceId {
    keyed(secret, &encode(spec))
}

/// Returns what is equal for two identities that differ in nothing but the hash root.
pub(super) fn rootless_id(secret: &Secret, identity: &Identity) -> NamespaceId {
    keyed(secret, &engine_fields(identity, b"any root"))
}

fn keyed(secret: &Secret, encoded: &[u8]) -> NamespaceId {
    NamespaceId(*blake3::keyed_hash(&secret.0, encoded).as_bytes())
}

fn engine_fields(identity: &Identity, hash_root: &[u8]) -> Vec<u8> {
    Encoder::new(KIND_ENGINE)
        .field(1, identity.tenant.as_bytes())
        .field(2, identity.model.as_bytes())
        .field(3, identity.weights.as_bytes())
        .field(4, identity.engine.as_bytes())
        .field(5, identity.layout.as_bytes())
        .field(6, identity.dtype.as_bytes())
        .field(7, &identity.block_tokens.to_le_bytes())
        .field(8, &encode_parts(&identity.parts))
        .field(9, identity.split.as_bytes())
        .field(10, identity.hash_algorithm.as_bytes())
        .field(11, &identity.hash_bytes.to_le_bytes())
        .field(12, hash_root)
        .field(13, &identity.lora)
        .field(14, &identity.cache_salt)
        .0
}

fn encode_parts(parts: &[PartSpec]) -> Vec<u8> {
    parts
        .iter()
        .flat_map(|part| [part.group, part.rank, part.bytes])
        .flat_map(u32::to_le_bytes)
        .collect()
}

/// Returns the block hash of a key that is not an engine's block hash, for opaque namespaces.
///
/// BLAKE3 in key-derivation mode with the context `kvstrata v1 foreign key`.
#[must_use]
pub fn foreign_hash(key: &[u8]) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key(FOREIGN_CONTEXT);
    hasher.update(key);
    BlockHash::from_array(*hasher.finalize().as_bytes())
}
