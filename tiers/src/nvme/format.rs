//! The bytes of a segment file. Numbers are little-endian; everything starts at a page of 4 KiB.
//!
//! ```text
//! page 0        segment header
//! page 1 ..     records, one behind the other, in the order of their writing
//!               entry table     once sealed
//! last page     trailer         once sealed; the file ends here
//!
//! segment header               record header                      trailer
//!  0  8 "KVSTRSEG"              0   8 "KVSTRREC"                   0  8 "KVSTREND"
//!  8  2 version 1               8   2 version 1                    8  2 version 1
//! 10  6 zero                   10   1 kind                        10  6 zero
//! 16  8 segment                11   1 flags: 1 inline, 2 sums     16  8 segment
//! 24  8 generation                    behind the payload          24  8 generation
//! 32 16 store                  12   4 count of part checksums     32  8 bytes before the table
//! 48  8 bytes of the file      16   8 generation                  40  8 bytes of the table
//! 56  8 XXH3-64 of 0..56       24   4 own page                    48  4 entries
//!                              28   4 pages of the record         52  4 zero
//!                              32  32 namespace id                56  8 XXH3-64 of the table
//!                              64  32 block hash                  64  8 XXH3-64 of 0..64
//!                              96   4 bytes of the payload
//!                             100   4 zero
//!                             104   8 layout digest
//!                             112   8 XXH3-64 of the payload
//!                             120   8 XXH3-64 of the checksums
//!                             128   8 XXH3-64 of 0..128
//!                             136     8 for each checksum, then an inline payload
//! ```
//! Kinds: 1 a block; 2 tombstones, 72 bytes each (namespace id, block hash, barrier: records of the
//! block at places before it are dead); 3 a namespace (its encoded form), written in each segment
//! before the first block of it. A payload that does not fit behind the header starts at the next
//! page. A record header tells its own place and the generation of its segment, so that a page which
//! went to another place, or was left there by another segment, is not taken for a record.
//!
//! Upgrades: a version that is not known is passed over as a whole. Its segment is left alone at the
//! start, its number is not used, and its blocks are misses, until a program that knows it comes back.
//! Version N reads what N-1 wrote.

mod pages;
mod record;
mod table;

use std::num::NonZeroU64;

use self::pages::copy_to;
pub use self::{
    record::{Frame, Kind, RecordHeader, Shape, SumsBehind, Tombstone},
    table::{Entry, EntryTable},
};
use super::{
    aligned::{PAGE, PAGE_BYTES},
    device::SegmentId,
};
pub use crate::fields::{Damage, checksum};
use crate::{
    fields::{Fields, Reader},
    map::Location,
};

/// The version of everything here.
pub const FORMAT_VERSION: u16 = 1;
/// Bits of a [`Location`] that count pages within a segment.
const UNIT_BITS: u32 = 18;
/// The longest segment, in bytes: what the pages of a location can name.
pub const SEGMENT_BYTES_MAX: u64 = PAGE << UNIT_BITS;

const SEGMENT_MAGIC: &[u8; 8] = b"KVSTRSEG";
const TRAILER_MAGIC: &[u8; 8] = b"KVSTREND";

/// A place within the segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The segment.
    pub segment: SegmentId,
    /// The page within it.
    pub unit: u32,
}

impl Place {
    /// The byte offset within the segment.
    #[must_use]
    pub fn offset(self) -> u64 {
        u64::from(self.unit) * PAGE
    }

    /// The place as the map keeps it; `None` for numbers that do not fit (no segment has them).
    #[must_use]
    pub fn location(self) -> Option<Location> {
        let fits = self.unit >> UNIT_BITS == 0 && self.segment.0 >> (64 - UNIT_BITS) == 0;
        let packed = (self.segment.0 << UNIT_BITS) | u64::from(self.unit);
        NonZeroU64::new(packed).filter(|_| fits).map(Location)
    }

    /// The place of the next page: a barrier that kills what is at this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self { unit: self.unit.saturating_add(1), ..self }
    }

    /// As [`location`](Self::location); a location that no tier has for numbers that do not fit.
    #[must_use]
    pub fn location_or_nowhere(self) -> Location {
        self.location().unwrap_or(Location(NonZeroU64::MAX))
    }

    /// The place that a location names.
    #[must_use]
    pub fn of(location: Location) -> Self {
        let packed = location.0.get();
        let unit = u32::try_from(packed & ((1 << UNIT_BITS) - 1)).unwrap_or(0);
        Self { segment: SegmentId(packed >> UNIT_BITS), unit }
    }
}

/// Pages that hold so many bytes.
#[must_use]
pub fn pages(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(PAGE_BYTES)).unwrap_or(u32::MAX)
}

/// The first page of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Its number.
    pub segment: SegmentId,
    /// Drawn when it was made: tells it from any other that had or will have the number.
    pub generation: u64,
    /// The store that it belongs to.
    pub store: [u8; 16],
    /// Bytes of the file when it was made.
    pub bytes: u64,
}

impl SegmentHeader {
    /// Writes it into a page.
    pub fn encode(&self, page: &mut [u8]) {
        let mut out = Fields::start(SEGMENT_MAGIC, FORMAT_VERSION, 64);
        out.put(&[0; 6]).u64(self.segment.0).u64(self.generation).put(&self.store).u64(self.bytes);
        copy_to(page, 0, &out.sealed());
    }

    /// Reads it from a page.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn decode(page: &[u8]) -> Result<Self, Damage> {
        let mut fields = Reader::open(page, SEGMENT_MAGIC, FORMAT_VERSION, 56)?;
        fields.skip(6);
        Ok(Self {
            segment: SegmentId(fields.u64()),
            generation: fields.u64(),
            store: fields.array(),
            bytes: fields.u64(),
        })
    }
}

/// The last page of a sealed segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// The segment.
    pub segment: SegmentId,
    /// Its generation.
    pub generation: u64,
    /// Bytes before the entry table: where the records end.
    pub data_bytes: u64,
    /// Bytes of the entry table.
    pub table_bytes: u64,
    /// Entries in it.
    pub entries: u32,
    /// XXH3-64 of it.
    pub table_sum: u64,
}

impl Trailer {
    /// Writes it into a page.
    pub fn encode(&self, page: &mut [u8]) {
        let mut out = Fields::start(TRAILER_MAGIC, FORMAT_VERSION, 72);
        out.put(&[0; 6]).u64(self.segment.0).u64(self.generation);
        out.u64(self.data_bytes).u64(self.table_bytes).u32(self.entries).u32(0);
        out.u64(self.table_sum);
        copy_to(page, 0, &out.sealed());
    }

    /// Reads it from the last page of a file of `file_bytes`.
    ///
    /// # Errors
    /// What is wrong with it; `Foreign` for a segment that was not sealed.
    pub fn decode(page: &[u8], file_bytes: u64) -> Result<Self, Damage> {
        let mut fields = Reader::open(page, TRAILER_MAGIC, FORMAT_VERSION, 64)?;
        fields.skip(6);
        let trailer = Self {
            segment: SegmentId(fields.u64()),
            generation: fields.u64(),
            data_bytes: fields.u64(),
            table_bytes: fields.u64(),
            entries: fields.u32(),
            table_sum: {
                fields.skip(4);
                fields.u64()
            },
        };
        let table_end = trailer.table_bytes.checked_next_multiple_of(PAGE);
        let end = table_end.and_then(|table| trailer.data_bytes.checked_add(table));
        if end.and_then(|end| end.checked_add(PAGE)) != Some(file_bytes) {
            return Err(Damage::Misplaced);
        }
        Ok(trailer)
    }
}

#[cfg(test)]
mod tests;
