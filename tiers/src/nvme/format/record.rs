//! Records: a header page, and the payload in it or behind it.

use std::num::NonZeroU64;

use xxhash_rust::xxh3::xxh3_64;

use super::{
    Damage, FORMAT_VERSION, Place, pages,
    pages::{copy_to, put_padded},
};
use crate::{
    block::BlockHash,
    fields::{Fields, Reader},
    limits::PARTS_MAX,
    map::{Checksums, Location},
    namespace::NamespaceId,
    nvme::{
        aligned::{PAGE, PAGE_BYTES},
        index::IndexKey,
    },
};

const RECORD_MAGIC: &[u8; 8] = b"KVSTRREC";
const HEADER_BYTES: usize = 136;
const FLAG_INLINE: u8 = 1;
const FLAG_SUMS_BEHIND: u8 = 2;
/// Bytes of one tombstone.
const TOMBSTONE_BYTES: usize = 72;

/// What a record holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A block.
    Block,
    /// Tombstones.
    Tombstones,
    /// A namespace.
    Namespace,
}

impl Kind {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Block => 1,
            Self::Tombstones => 2,
            Self::Namespace => 3,
        }
    }

    pub(super) fn of(number: u8) -> Option<Self> {
        match number {
            1 => Some(Self::Block),
            2 => Some(Self::Tombstones),
            3 => Some(Self::Namespace),
            _ => None,
        }
    }
}

/// The first page of a record, without what else is in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordHeader {
    /// What it holds.
    pub kind: Kind,
    /// The generation of its segment.
    pub generation: u64,
    /// Its own page.
    pub unit: u32,
    /// Its namespace and its hash; zeros where there is none.
    pub key: IndexKey,
    /// Bytes of the payload.
    pub len: u32,
    /// See [`BlockLayout::digest`](crate::namespace::BlockLayout::digest).
    pub layout: u64,
    /// XXH3-64 of the payload.
    pub payload_sum: u64,
    /// How many checksums of parts there are; 0 but for blocks.
    pub parts: usize,
    /// The checksums; empty while they have not been read (see [`SumsBehind`]).
    pub sums: Vec<u64>,
}

/// A record in whole pages, but for those of its payload, which lie between `head` and `behind`.
#[derive(Debug)]
pub struct Frame {
    /// The header, and an inline payload.
    pub head: [u8; PAGE_BYTES],
    /// So many of the payload's bytes, all of them in whole pages, follow.
    pub whole: usize,
    /// The rest of the payload, and checksums that lie behind it.
    pub behind: Vec<u8>,
}

/// How a record lies in its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The payload is in the first page.
    pub inline: bool,
    /// The checksums are behind the payload.
    pub sums_behind: bool,
    /// Pages of the whole record.
    pub units: u32,
}

impl Shape {
    /// The shape of a record with so many checksums and bytes of payload.
    #[must_use]
    pub fn of(sums: usize, len: usize) -> Self {
        let head = HEADER_BYTES + sums * 8;
        let sums_behind = head > PAGE_BYTES;
        let inline = !sums_behind && head + len <= PAGE_BYTES;
        let payload = if inline { 0 } else { pages(len) };
        let behind = if sums_behind { pages(sums * 8) } else { 0 };
        Self { inline, sums_behind, units: 1 + payload + behind }
    }

    /// Bytes of the whole record.
    #[must_use]
    pub fn bytes(self) -> u64 {
        u64::from(self.units) * PAGE
    }

    /// The longest payload that can be inline.
    #[must_use]
    pub fn inline_bytes_max() -> usize {
        PAGE_BYTES - HEADER_BYTES
    }
}

impl RecordHeader {
    /// The shape of the record.
    #[must_use]
    pub fn shape(&self) -> Shape {
        Shape::of(self.parts, usize::try_from(self.len).unwrap_or(usize::MAX))
    }

    /// The record but for the whole pages of a payload that is not inline.
    #[must_use]
    pub fn frame(&self, payload: &[u8]) -> Frame {
        let shape = self.shape();
        let sums: Vec<u8> = self.sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let mut page = [0; PAGE_BYTES];
        self.encode_fields(shape, &sums, &mut page);
        let mut at = HEADER_BYTES;
        if !shape.sums_behind {
            copy_to(&mut page, at, &sums);
            at += sums.len();
        }
        if shape.inline {
            copy_to(&mut page, at, payload);
        }
        let whole = if shape.inline { 0 } else { payload.len() - payload.len() % PAGE_BYTES };
        let mut behind = Vec::new();
        if !shape.inline {
            put_padded(payload.get(whole..).unwrap_or_default(), &mut behind);
        }
        if shape.sums_behind {
            put_padded(&sums, &mut behind);
        }
        Frame { head: page, whole, behind }
    }

    fn encode_fields(&self, shape: Shape, sums: &[u8], page: &mut [u8]) {
        let inline = if shape.inline { FLAG_INLINE } else { 0 };
        let behind = if shape.sums_behind { FLAG_SUMS_BEHIND } else { 0 };
        let mut out = Fields::start(RECORD_MAGIC, FORMAT_VERSION, HEADER_BYTES);
        out.put(&[self.kind.number(), inline | behind])
            .u32(u32::try_from(self.sums.len()).unwrap_or(u32::MAX))
            .u64(self.generation)
            .u32(self.unit)
            .u32(shape.units)
            .put(self.key.namespace.as_bytes())
            .put(self.key.hash.as_bytes())
            .u32(self.len)
            .u32(0)
            .u64(self.layout)
            .u64(self.payload_sum)
            .u64(xxh3_64(sums));
        copy_to(page, 0, &out.sealed());
    }

    /// Reads a header page of the segment of `generation` at page `unit`. The checksums of parts are
    /// taken if they are in the page; if they lie behind the payload they are left out and
    /// [`SumsBehind`] says how many there are.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(page: &[u8], generation: u64, unit: u32) -> Result<(Self, SumsBehind), Damage> {
        let mut fields = Reader::open(page, RECORD_MAGIC, FORMAT_VERSION, 128)?;
        let kind = Kind::of(fields.u8()).ok_or(Damage::Version)?;
        let flags = fields.u8();
        let count = fields.size();
        let (found_generation, found_unit, units) = (fields.u64(), fields.u32(), fields.u32());
        let namespace = NamespaceId::from_array(fields.array());
        let key = IndexKey { namespace, hash: BlockHash::from_array(fields.array()) };
        let len = fields.u32();
        fields.skip(4);
        let (layout, payload_sum, sums_sum) = (fields.u64(), fields.u64(), fields.u64());
        if count > PARTS_MAX || (found_generation, found_unit) != (generation, unit) {
            return Err(Damage::Misplaced);
        }
        let shape = Shape::of(count, usize::try_from(len).unwrap_or(usize::MAX));
        let expected = u8::from(shape.inline) | (u8::from(shape.sums_behind) << 1);
        if units != shape.units || flags != expected {
            return Err(Damage::Misplaced);
        }
        let behind = SumsBehind { count: if shape.sums_behind { count } else { 0 }, sums_sum };
        let here = page.get(HEADER_BYTES..).unwrap_or_default();
        let sums = if shape.sums_behind { Vec::new() } else { behind.read_from(here, count)? };
        Ok((
            Self { kind, generation, unit, key, len, layout, payload_sum, parts: count, sums },
            behind,
        ))
    }

    /// The inline payload within the header page.
    #[must_use]
    pub fn inline_payload<'a>(&self, page: &'a [u8]) -> Option<&'a [u8]> {
        let start = HEADER_BYTES + self.parts * 8;
        page.get(start..start + usize::try_from(self.len).ok()?).filter(|_| self.shape().inline)
    }

    /// Whether `payload` is what was written.
    #[must_use]
    pub fn is_payload(&self, payload: &[u8]) -> bool {
        xxh3_64(payload) == self.payload_sum
    }

    /// The checksums of the parts as the map keeps them.
    #[must_use]
    pub fn checksums(&self) -> Checksums {
        Checksums::new(self.sums.clone())
    }
}

/// Part checksums that lie behind the payload of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumsBehind {
    /// How many; 0 when the header page has them.
    pub count: usize,
    sums_sum: u64,
}

impl SumsBehind {
    /// Reads them from the bytes behind the payload's pages.
    ///
    /// # Errors
    /// `Checksum` if they are not what was written.
    pub fn read(&self, bytes: &[u8]) -> Result<Vec<u64>, Damage> {
        self.read_from(bytes, self.count)
    }

    fn read_from(&self, bytes: &[u8], count: usize) -> Result<Vec<u64>, Damage> {
        let bytes = bytes.get(..count * 8).ok_or(Damage::Misplaced)?;
        if xxh3_64(bytes) != self.sums_sum {
            return Err(Damage::Checksum);
        }
        let sums = bytes.chunks_exact(8);
        Ok(sums.map(|sum| u64::from_le_bytes(sum.try_into().unwrap_or_default())).collect())
    }
}

/// A block that is not there any more, wherever it is recorded before `barrier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tombstone {
    /// Which block.
    pub key: IndexKey,
    /// Records of it at places before this one are dead.
    pub barrier: Place,
}

impl Tombstone {
    /// Bytes of one in a record.
    pub const BYTES: usize = TOMBSTONE_BYTES;

    /// The payload of a record of tombstones.
    #[must_use]
    pub fn encode_all(tombstones: &[Self]) -> Vec<u8> {
        let mut out = Vec::with_capacity(tombstones.len() * TOMBSTONE_BYTES);
        for tombstone in tombstones {
            out.extend_from_slice(tombstone.key.namespace.as_bytes());
            out.extend_from_slice(tombstone.key.hash.as_bytes());
            let barrier = tombstone.barrier.location().map_or(0, |location| location.0.get());
            out.extend_from_slice(&barrier.to_le_bytes());
        }
        out
    }

    /// What [`encode_all`](Self::encode_all) wrote.
    #[must_use]
    pub fn decode_all(payload: &[u8]) -> Vec<Self> {
        let decode = |bytes: &[u8]| {
            let mut fields = Reader(bytes);
            let namespace = NamespaceId::from_array(fields.array());
            let key = IndexKey { namespace, hash: BlockHash::from_array(fields.array()) };
            let barrier = NonZeroU64::new(fields.u64()).map(Location)?;
            Some(Self { key, barrier: Place::of(barrier) })
        };
        payload.chunks_exact(TOMBSTONE_BYTES).filter_map(decode).collect()
    }
}
