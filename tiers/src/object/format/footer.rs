//! The footer of a pack: which blocks are where in it, and what is needed to vouch for them.

use std::{
    collections::{HashMap, HashSet},
    ops::Range,
};

use super::{
    Damage, FOOTER_BYTES_MAX, FORMAT_VERSION, PACK_ENTRIES_MAX, PackTrailer, length, short,
};
use crate::{
    block::BlockHash,
    fields::{Fields, Reader},
    key::IndexKey,
    limits::{BLOCK_BYTES_MAX, PARTS_MAX},
    map::Checksums,
    namespace::NamespaceId,
    object::{
        codec::{self, Coding},
        names::{ClusterName, PackId},
    },
};

const MAGIC: &[u8; 8] = b"KVSTRPKF";
const HEADER_BYTES: usize = 48;
const ENTRY_BYTES: usize = 56;
const SUM_BYTES: usize = 8;
/// Id and length of a namespace.
const NAMESPACE_BYTES: usize = 36;

/// One block of a pack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackEntry {
    /// The block.
    pub key: IndexKey,
    /// Where its stored bytes are in the pack: behind those of the entry before.
    pub offset: u32,
    /// Bytes that it takes in the pack, at least 1.
    pub stored: u32,
    /// Bytes of the block itself: as many, if it is stored raw, else more.
    pub len: u32,
    /// How it is stored.
    pub coding: Coding,
    /// See [`BlockLayout::digest`](crate::namespace::BlockLayout::digest).
    pub layout: u64,
    /// The checksums of its parts, at least one.
    pub sums: Vec<u64>,
}

impl PackEntry {
    /// Where its stored bytes are in the pack.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        u64::from(self.offset)..u64::from(self.offset) + u64::from(self.stored)
    }

    /// The checksums as the map keeps them.
    #[must_use]
    pub fn checksums(&self) -> Checksums {
        Checksums::new(self.sums.clone())
    }

    /// The payload of the block from the bytes of its [`range`](Self::range).
    ///
    /// # Errors
    /// What is wrong with it. That the bytes are right is what the checksums of the parts say.
    ///
    /// # Blocking
    /// Computes for about a millisecond per MiB.
    pub fn decode_block(&self, stored: &[u8], into: &mut [u8]) -> Result<(), Damage> {
        if length(stored.len()) != self.stored || length(into.len()) != self.len {
            return Err(Damage::Misplaced);
        }
        codec::decode(self.coding, stored, into)
    }

    /// Bytes that it takes in a footer.
    pub(super) fn footer_bytes(sums: usize) -> usize {
        ENTRY_BYTES + sums * SUM_BYTES
    }

    fn encode(&self, namespace: u32, out: &mut Fields) {
        out.put(self.key.hash.as_bytes()).u32(namespace).u32(self.stored).u32(self.len);
        out.u64(self.layout).u16(short(self.sums.len())).put(&[self.coding.number(), 0]);
        for sum in &self.sums {
            out.u64(*sum);
        }
    }

    fn read(
        fields: &mut Reader<'_>,
        namespaces: &[(NamespaceId, Vec<u8>)],
        offset: u32,
    ) -> Result<Self, Damage> {
        fields.need(ENTRY_BYTES)?;
        let hash = BlockHash::from_array(fields.array());
        let (namespace, _) = namespaces.get(fields.size()).ok_or(Damage::Misplaced)?;
        let (stored, len, layout) = (fields.u32(), fields.u32(), fields.u64());
        let count = usize::from(fields.u16());
        let coding = Coding::of(fields.u8())?;
        fields.zeros(1)?;
        let right_length = match coding {
            Coding::Raw => stored == len,
            Coding::Zstd | Coding::PlanesZstd => stored < len,
        };
        let bounded = stored > 0 && u64::from(len) <= BLOCK_BYTES_MAX;
        if !right_length || !bounded || !(1..=PARTS_MAX).contains(&count) {
            return Err(Damage::Misplaced);
        }
        let mut sums = Reader(fields.take(count * SUM_BYTES)?);
        let sums = (0..count).map(|_| sums.u64()).collect();
        let key = IndexKey { namespace: *namespace, hash };
        Ok(Self { key, offset, stored, len, coding, layout, sums })
    }
}

/// What a pack holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footer {
    /// The pack.
    pub id: PackId,
    /// Its cluster.
    pub cluster: ClusterName,
    /// When it was made, in milliseconds since 1970, as its maker's clock said.
    pub created_unix_ms: u64,
    /// The namespaces of its blocks, in their encoded form, each once.
    pub namespaces: Vec<(NamespaceId, Vec<u8>)>,
    /// Its blocks, in the order in which they lie.
    pub entries: Vec<PackEntry>,
}

impl Footer {
    /// Bytes of the blocks in the pack: where the footer begins.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        self.entries.last().map_or(0, |last| last.range().end)
    }

    /// Bytes of its encoded form.
    #[must_use]
    pub fn footer_bytes(&self) -> u64 {
        let entries = self.entries.iter().map(|entry| PackEntry::footer_bytes(entry.sums.len()));
        let namespaces = self.namespaces.iter().map(|(_, encoded)| namespace_bytes(encoded.len()));
        let body = entries.sum::<usize>() + namespaces.sum::<usize>();
        (empty_bytes(&self.cluster) + body) as u64
    }

    /// Bytes of the whole pack.
    #[must_use]
    pub fn object_bytes(&self) -> u64 {
        self.data_bytes() + self.footer_bytes() + PackTrailer::BYTES as u64
    }

    /// Its bytes. Each entry is written as lying behind the one before it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let bytes = usize::try_from(self.footer_bytes()).unwrap_or(0);
        let mut out = Fields::start(MAGIC, FORMAT_VERSION, bytes);
        let cluster = self.cluster.as_str();
        out.u16(short(cluster.len())).u32(self.id.ordinal).u64(self.id.epoch).u64(self.id.seq);
        out.u64(self.created_unix_ms);
        out.u32(length(self.namespaces.len())).u32(length(self.entries.len()));
        out.put(cluster.as_bytes());
        let mut numbers = HashMap::with_capacity(self.namespaces.len());
        for (number, (id, encoded)) in (0_u32..).zip(&self.namespaces) {
            out.put(id.as_bytes()).u32(length(encoded.len())).put(encoded);
            numbers.insert(*id, number);
        }
        let mut end = 0;
        for entry in &self.entries {
            debug_assert_eq!(entry.offset, end, "entries lie one behind the other");
            let number = numbers.get(&entry.key.namespace).copied().unwrap_or(u32::MAX);
            entry.encode(number, &mut out);
            end = entry.offset.saturating_add(entry.stored);
        }
        out.sealed()
    }

    /// Reads it.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        if length(bytes.len()) > FOOTER_BYTES_MAX {
            return Err(Damage::Misplaced);
        }
        let mut fields = Reader::open_whole(bytes, MAGIC, FORMAT_VERSION)?;
        fields.need(HEADER_BYTES - 10)?;
        let cluster_bytes = fields.u16();
        let id = PackId { ordinal: fields.u32(), epoch: fields.u64(), seq: fields.u64() };
        let created_unix_ms = fields.u64();
        let (namespaces, entries) = (fields.size(), fields.size());
        let cluster = super::cluster(&mut fields, cluster_bytes)?;
        let namespaces = decode_namespaces(&mut fields, namespaces)?;
        let entries = decode_entries(&mut fields, &namespaces, entries)?;
        fields.end()?;
        Ok(Self { id, cluster, created_unix_ms, namespaces, entries })
    }
}

/// Bytes of a footer without namespaces and entries.
pub(super) fn empty_bytes(cluster: &ClusterName) -> usize {
    HEADER_BYTES + cluster.as_str().len() + SUM_BYTES
}

/// Bytes that a namespace takes in a footer.
pub(super) fn namespace_bytes(encoded: usize) -> usize {
    NAMESPACE_BYTES + encoded
}

fn decode_namespaces(
    fields: &mut Reader<'_>,
    count: usize,
) -> Result<Vec<(NamespaceId, Vec<u8>)>, Damage> {
    // A count that what follows cannot hold is refused before anything is made for it.
    fields.need(count.saturating_mul(NAMESPACE_BYTES))?;
    let mut namespaces = Vec::with_capacity(count);
    let mut seen = HashSet::with_capacity(count);
    for _ in 0..count {
        fields.need(NAMESPACE_BYTES)?;
        let id = NamespaceId::from_array(fields.array());
        let bytes = fields.size();
        if !seen.insert(id) {
            return Err(Damage::Misplaced);
        }
        namespaces.push((id, fields.take(bytes)?.to_vec()));
    }
    Ok(namespaces)
}

fn decode_entries(
    fields: &mut Reader<'_>,
    namespaces: &[(NamespaceId, Vec<u8>)],
    count: usize,
) -> Result<Vec<PackEntry>, Damage> {
    if count > PACK_ENTRIES_MAX {
        return Err(Damage::Misplaced);
    }
    fields.need(count.saturating_mul(ENTRY_BYTES))?;
    let mut entries = Vec::with_capacity(count);
    let mut end = 0_u32;
    for _ in 0..count {
        let entry = PackEntry::read(fields, namespaces, end)?;
        end = end.checked_add(entry.stored).ok_or(Damage::Misplaced)?;
        entries.push(entry);
    }
    Ok(entries)
}
