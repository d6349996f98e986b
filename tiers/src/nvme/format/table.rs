//! The entry table of a sealed segment: what its records are, without reading them.
//!
//! ```text
//! for each record, in order:
//!   0  1  kind           as in the record
//!   1  3  zero
//!   4  4  page
//!   8  4  pages
//!  12  4  bytes of the payload
//!  16  4  count of part checksums
//!  20  4  which namespace: the number of its record among those of namespaces, from 0
//!  24 32  block hash; for a namespace its id
//!  56  8  for each checksum; for a namespace: its encoded form instead
//! ```

use super::{Damage, Kind, RecordHeader, Shape};
use crate::{
    block::BlockHash, fields::Reader, limits::PARTS_MAX, map::Checksums, namespace::NamespaceId,
    nvme::index::IndexKey,
};

const ENTRY_BYTES: usize = 56;

/// One record of a segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it holds.
    pub kind: Kind,
    /// Its first page.
    pub unit: u32,
    /// Its pages.
    pub units: u32,
    /// Bytes of the payload.
    pub len: u32,
    /// Its block, or its namespace.
    pub key: IndexKey,
    /// The checksums of the parts of a block.
    pub sums: Vec<u64>,
    /// The encoded namespace, of the kind that has one.
    pub encoded: Vec<u8>,
}

impl Entry {
    /// Bytes of an entry without checksums and encoded namespace.
    pub const BYTES: usize = ENTRY_BYTES;

    /// The entry of a record; `encoded` is the payload of a namespace.
    #[must_use]
    pub fn of(header: &RecordHeader, encoded: &[u8]) -> Self {
        Self {
            kind: header.kind,
            unit: header.unit,
            units: header.shape().units,
            len: header.len,
            key: header.key,
            sums: header.sums.clone(),
            encoded: encoded.to_vec(),
        }
    }

    /// Bytes that it takes in a table.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        ENTRY_BYTES + self.sums.len() * 8 + self.encoded.len()
    }

    /// The checksums as the map keeps them.
    #[must_use]
    pub fn checksums(&self) -> Checksums {
        Checksums::new(self.sums.clone())
    }
}

/// All records of a segment, in order.
#[derive(Debug, Default)]
pub struct EntryTable {
    entries: Vec<Entry>,
    bytes: usize,
}

impl EntryTable {
    /// Adds a record.
    pub fn push(&mut self, entry: Entry) {
        self.bytes += entry.table_bytes();
        self.entries.push(entry);
    }

    /// The entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The entries, taken out.
    #[must_use]
    pub fn into_entries(self) -> Vec<Entry> {
        self.entries
    }

    /// Bytes of the encoded table.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The encoded table.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes);
        let mut namespaces: Vec<NamespaceId> = Vec::new();
        for entry in &self.entries {
            let hash = match entry.kind {
                Kind::Namespace => {
                    namespaces.push(entry.key.namespace);
                    entry.key.namespace.as_bytes()
                }
                Kind::Block | Kind::Tombstones => entry.key.hash.as_bytes(),
            };
            let number = namespaces.iter().position(|id| *id == entry.key.namespace);
            let number = number.and_then(|number| u32::try_from(number).ok()).unwrap_or(u32::MAX);
            let sums = u32::try_from(entry.sums.len()).unwrap_or(u32::MAX);
            out.extend_from_slice(&[entry.kind.number(), 0, 0, 0]);
            for field in [entry.unit, entry.units, entry.len, sums, number] {
                out.extend_from_slice(&field.to_le_bytes());
            }
            out.extend_from_slice(hash);
            out.extend(entry.sums.iter().flat_map(|sum| sum.to_le_bytes()));
            out.extend_from_slice(&entry.encoded);
        }
        out
    }

    /// Reads a table whose checksum was verified.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(bytes: &[u8], count: u32) -> Result<Self, Damage> {
        let mut table = Self::default();
        let mut namespaces: Vec<NamespaceId> = Vec::new();
        let mut fields = Reader(bytes);
        for _ in 0..count {
            if fields.len() < ENTRY_BYTES {
                return Err(Damage::Misplaced);
            }
            let entry = decode_entry(&mut fields, &mut namespaces)?;
            table.push(entry);
        }
        if fields.len() > 0 { Err(Damage::Misplaced) } else { Ok(table) }
    }
}

fn decode_entry(
    fields: &mut Reader<'_>,
    namespaces: &mut Vec<NamespaceId>,
) -> Result<Entry, Damage> {
    let kind = Kind::of(fields.u8()).ok_or(Damage::Version)?;
    fields.skip(3);
    let (unit, units, len) = (fields.u32(), fields.u32(), fields.u32());
    let sums = fields.size();
    let number = fields.size();
    let hash: [u8; 32] = fields.array();
    let payload = usize::try_from(len).unwrap_or(usize::MAX);
    let encoded = if kind == Kind::Namespace { payload } else { 0 };
    let follows = sums.checked_mul(8).and_then(|sums| sums.checked_add(encoded));
    if sums > PARTS_MAX || follows.is_none_or(|bytes| bytes > fields.len()) {
        return Err(Damage::Misplaced);
    }
    if units != Shape::of(sums, payload).units {
        return Err(Damage::Misplaced);
    }
    let key = match kind {
        Kind::Namespace => {
            let namespace = NamespaceId::from_array(hash);
            namespaces.push(namespace);
            IndexKey { namespace, hash: BlockHash::from_array([0; 32]) }
        }
        Kind::Block => {
            let namespace = *namespaces.get(number).ok_or(Damage::Misplaced)?;
            IndexKey { namespace, hash: BlockHash::from_array(hash) }
        }
        Kind::Tombstones => IndexKey::NONE,
    };
    let sums = (0..sums).map(|_| fields.u64()).collect();
    let encoded = fields.bytes(encoded).to_vec();
    Ok(Entry { kind, unit, units, len, key, sums, encoded })
}
