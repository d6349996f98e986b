//! The end of a pack: where its footer is. It is what a start reads first of a pack that no manifest
//! names.

use std::ops::Range;

use super::{Damage, FOOTER_BYTES_MAX, FORMAT_VERSION, Footer, length};
use crate::{
    fields::{Fields, Reader},
    object::names::PackId,
};

const MAGIC: &[u8; 8] = b"KVSTRPKT";

/// The last bytes of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackTrailer {
    /// The pack.
    pub id: PackId,
    /// Where the footer begins: behind the bytes of the blocks.
    pub footer_offset: u64,
    /// Bytes of the footer.
    pub footer_bytes: u32,
    /// Blocks in the pack.
    pub entries: u32,
    /// The footer's own checksum, so that this is the trailer of no other.
    pub footer_sum: u64,
}

impl PackTrailer {
    /// Bytes of a trailer, in every version.
    pub const BYTES: usize = 64;

    /// The trailer of a pack with this footer, of which `encoded` is the encoded form.
    #[must_use]
    pub fn of(footer: &Footer, encoded: &[u8]) -> Self {
        Self {
            id: footer.id,
            footer_offset: footer.data_bytes(),
            footer_bytes: length(encoded.len()),
            entries: length(footer.entries.len()),
            footer_sum: sum(encoded),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Fields::start(MAGIC, FORMAT_VERSION, Self::BYTES);
        out.u16(0).u32(self.id.ordinal).u64(self.id.epoch).u64(self.id.seq);
        out.u64(self.footer_offset).u32(self.footer_bytes).u32(self.entries).u64(self.footer_sum);
        out.sealed()
    }

    /// Reads it from the end of `tail`, which is the end of an object of `object_bytes`.
    ///
    /// # Errors
    /// What is wrong with it; `Misplaced` also for an object of another length.
    pub fn decode(tail: &[u8], object_bytes: u64) -> Result<Self, Damage> {
        let start = tail.len().checked_sub(Self::BYTES).ok_or(Damage::Foreign)?;
        let tail = tail.get(start..).unwrap_or_default();
        let mut fields = Reader::open_whole(tail, MAGIC, FORMAT_VERSION)?;
        fields.zeros(2)?;
        let trailer = Self {
            id: PackId { ordinal: fields.u32(), epoch: fields.u64(), seq: fields.u64() },
            footer_offset: fields.u64(),
            footer_bytes: fields.u32(),
            entries: fields.u32(),
            footer_sum: fields.u64(),
        };
        let footer = trailer.footer_offset.checked_add(trailer.footer_bytes.into());
        let bytes = footer.and_then(|end| end.checked_add(Self::BYTES as u64));
        let bounded = trailer.footer_bytes <= FOOTER_BYTES_MAX;
        if bounded && bytes == Some(object_bytes) { Ok(trailer) } else { Err(Damage::Misplaced) }
    }

    /// Where the footer is in the object.
    #[must_use]
    pub fn footer_range(&self) -> Range<u64> {
        self.footer_offset..self.footer_offset.saturating_add(self.footer_bytes.into())
    }

    /// The footer of this trailer, from the bytes of [`footer_range`](Self::footer_range).
    ///
    /// # Errors
    /// What is wrong with it; `Misplaced` also for that of another pack.
    pub fn footer(&self, bytes: &[u8]) -> Result<Footer, Damage> {
        let footer = Footer::decode(bytes)?;
        if Self::of(&footer, bytes) == *self { Ok(footer) } else { Err(Damage::Misplaced) }
    }
}

/// The last 8 bytes of a structure.
fn sum(encoded: &[u8]) -> u64 {
    encoded.last_chunk().map_or(0, |sum| u64::from_le_bytes(*sum))
}
