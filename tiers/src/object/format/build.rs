//! Builds a pack in memory, block by block.
//!
//! What it takes is bounded: the stored bytes of the blocks, its footer, and the encoder's memory for
//! two blocks.

use std::{collections::HashMap, mem};

use bytes::Bytes;

use super::{
    FOOTER_BYTES_MAX, Footer, PACK_ENTRIES_MAX, PackEntry, PackTrailer,
    footer::{empty_bytes, namespace_bytes},
    length,
};
use crate::{
    block::BlockHash,
    key::IndexKey,
    limits::{BLOCK_BYTES_MAX, GIB, MIB, PARTS_MAX},
    namespace::{Namespace, NamespaceId, NamespaceSpec},
    object::{
        codec::{Coding, Encoder, element_bytes},
        names::{ClusterName, PackId},
    },
};

/// The body is in pieces of this size, in bytes, so that a part of an upload is one of them.
const PIECE_BYTES: usize = 8 << 20;
/// No pack is larger, so that places in it fit into 32 bits.
const PACK_BYTES_MAX: u64 = GIB;

const _: () = assert!(PACK_BYTES_MAX + BLOCK_BYTES_MAX < u32::MAX as u64, "places are 32 bits");
const _: () = assert!(PACK_ENTRIES_MAX < 1 << 24, "a location has 24 bits for the entry");
const _: () = assert!(PIECE_BYTES as u64 >= 5 * MIB, "the least that S3 takes as a part");

/// Whether blocks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CodingPolicy {
    /// Never.
    Raw,
    /// Where it saves something, as fits the element type of the namespace.
    Compressed,
}

/// A block for a pack.
#[derive(Debug, Clone, Copy)]
pub struct Block<'a> {
    /// Its namespace.
    pub namespace: &'a Namespace,
    /// Its hash.
    pub hash: BlockHash,
    /// The checksums of its parts.
    pub sums: &'a [u64],
    /// Its bytes.
    pub payload: &'a [u8],
}

/// Why a block was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The pack is full: finish it, the block is the first of the next one. An empty one never is.
    Full,
    /// It has no bytes or too many, or no checksums or too many: no pack takes it.
    Invalid,
}

/// A pack that is ready to be uploaded.
#[derive(Debug)]
pub struct Pack {
    /// What it holds.
    pub footer: Footer,
    /// Its bytes in order, in pieces of 8 MiB but for the last ones.
    pub body: Vec<Bytes>,
}

impl Pack {
    /// Bytes of the object.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.body.iter().map(|piece| piece.len() as u64).sum()
    }
}

/// What the blocks of one namespace have in common.
#[derive(Debug, Clone, Copy)]
struct Common {
    layout: u64,
    element_bytes: u8,
}

/// A pack that is being built. Dropping it forgets its blocks.
#[derive(Debug)]
pub struct PackBuilder {
    cluster: ClusterName,
    bytes_max: u64,
    policy: CodingPolicy,
    encoder: Encoder,
    common: HashMap<NamespaceId, Common>,
    namespaces: Vec<(NamespaceId, Vec<u8>)>,
    entries: Vec<PackEntry>,
    footer_bytes: usize,
    data_bytes: u32,
    body: Body,
}

impl PackBuilder {
    /// Starts a pack whose blocks take up to `bytes_max`, which is at most 1 GiB.
    #[must_use]
    pub fn new(cluster: ClusterName, bytes_max: u64, policy: CodingPolicy) -> Self {
        Self {
            footer_bytes: empty_bytes(&cluster),
            cluster,
            bytes_max: bytes_max.min(PACK_BYTES_MAX),
            policy,
            encoder: Encoder::default(),
            common: HashMap::new(),
            namespaces: Vec::new(),
            entries: Vec::new(),
            data_bytes: 0,
            body: Body::default(),
        }
    }

    /// Adds a block behind the others; its number in the pack.
    ///
    /// # Errors
    /// See [`Refused`]; the pack is as it was.
    ///
    /// # Blocking
    /// Computes for milliseconds per MiB.
    pub fn push(&mut self, block: &Block<'_>) -> Result<u32, Refused> {
        let Block { namespace, hash, sums, payload } = *block;
        let len = payload.len() as u64;
        if !(1..=BLOCK_BYTES_MAX).contains(&len) || !(1..=PARTS_MAX).contains(&sums.len()) {
            return Err(Refused::Invalid);
        }
        // By the bytes before they are encoded, so that no block is encoded twice.
        let common = self.admit(namespace, len, sums.len())?;
        let (coding, stored) = match self.policy {
            CodingPolicy::Raw => (Coding::Raw, payload),
            CodingPolicy::Compressed => self.encoder.encode(payload, common.element_bytes),
        };
        self.body.append(stored);
        let stored = length(stored.len());
        Ok(self.enter(PackEntry {
            key: IndexKey { namespace: *namespace.id(), hash },
            offset: self.data_bytes,
            stored,
            len: length(payload.len()),
            coding,
            layout: common.layout,
            sums: sums.to_vec(),
        }))
    }

    /// Adds a block that another pack has, as it is encoded there: `stored` are the bytes of the `entry`
    /// of its footer. Its number in this pack.
    ///
    /// # Errors
    /// See [`Refused`]; the pack is as it was. `Invalid` for bytes that are not those of the entry.
    pub fn push_encoded(
        &mut self,
        namespace: &Namespace,
        entry: PackEntry,
        stored: &[u8],
    ) -> Result<u32, Refused> {
        if entry.key.namespace != *namespace.id() || entry.stored != length(stored.len()) {
            return Err(Refused::Invalid);
        }
        self.admit(namespace, entry.stored.into(), entry.sums.len())?;
        self.body.append(stored);
        Ok(self.enter(PackEntry { offset: self.data_bytes, ..entry }))
    }

    /// Makes sure of room for a block of so many bytes and checksums.
    fn admit(&mut self, namespace: &Namespace, bytes: u64, sums: usize) -> Result<Common, Refused> {
        let known = self.common.get(namespace.id()).copied();
        let encoded = if known.is_some() { Vec::new() } else { namespace.encoded() };
        let more = if known.is_some() { 0 } else { namespace_bytes(encoded.len()) };
        let footer_bytes = self.footer_bytes + more + PackEntry::footer_bytes(sums);
        let room = u64::from(self.data_bytes) + bytes <= self.bytes_max
            && self.entries.len() < PACK_ENTRIES_MAX
            && length(footer_bytes) <= FOOTER_BYTES_MAX;
        if !room && !self.entries.is_empty() {
            return Err(Refused::Full);
        }
        self.footer_bytes = footer_bytes;
        Ok(known.unwrap_or_else(|| self.meet(namespace, encoded)))
    }

    /// Notes the block whose bytes were appended last.
    fn enter(&mut self, entry: PackEntry) -> u32 {
        let number = length(self.entries.len());
        self.data_bytes += entry.stored;
        self.entries.push(entry);
        number
    }

    /// Notes what the first block of a namespace brings along.
    fn meet(&mut self, namespace: &Namespace, encoded: Vec<u8>) -> Common {
        let element_bytes = match namespace.spec() {
            NamespaceSpec::Engine(identity) => element_bytes(&identity.dtype),
            NamespaceSpec::Opaque { .. } => 1,
        };
        let common = Common { layout: namespace.layout().digest(), element_bytes };
        self.common.insert(*namespace.id(), common);
        self.namespaces.push((*namespace.id(), encoded));
        common
    }

    /// Bytes of the pack as it is now.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::from(self.data_bytes) + (self.footer_bytes + PackTrailer::BYTES) as u64
    }

    /// Bytes of the blocks in it, as they are stored.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.data_bytes.into()
    }

    /// Blocks in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether no block is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The pack.
    #[must_use]
    pub fn finish(mut self, id: PackId, created_unix_ms: u64) -> Pack {
        let footer = Footer {
            id,
            cluster: self.cluster,
            created_unix_ms,
            namespaces: self.namespaces,
            entries: self.entries,
        };
        let encoded = footer.encode();
        self.body.append(&encoded);
        self.body.append(&PackTrailer::of(&footer, &encoded).encode());
        Pack { footer, body: self.body.finish() }
    }
}

/// The bytes, in pieces.
#[derive(Debug, Default)]
struct Body {
    full: Vec<Bytes>,
    piece: Vec<u8>,
}

impl Body {
    fn append(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = PIECE_BYTES - self.piece.len();
            let (head, rest) = bytes.split_at(room.min(bytes.len()));
            self.piece.extend_from_slice(head);
            bytes = rest;
            if self.piece.len() == PIECE_BYTES {
                self.full.push(mem::take(&mut self.piece).into());
            }
        }
    }

    fn finish(mut self) -> Vec<Bytes> {
        if !self.piece.is_empty() {
            self.full.push(self.piece.into());
        }
        self.full
    }
}
