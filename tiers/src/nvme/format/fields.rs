//! Pages that begin with a magic and a version and end their fields with a checksum.

use xxhash_rust::xxh3::xxh3_64;

use super::{Damage, FORMAT_VERSION};
use crate::nvme::aligned::PAGE_BYTES;

/// Copies `bytes` into `page` at `at`, if they fit.
pub(super) fn copy_to(page: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = page.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Hands `bytes` on, and zeros up to the next page.
pub(super) fn put_padded(bytes: &[u8], out: &mut impl FnMut(&[u8])) {
    out(bytes);
    let padding = bytes.len().next_multiple_of(PAGE_BYTES) - bytes.len();
    if let Some(zeros) = [0; PAGE_BYTES].get(..padding).filter(|zeros| !zeros.is_empty()) {
        out(zeros);
    }
}

/// Builds a page: magic, version, fields, checksum.
pub(super) struct Fields(Vec<u8>);

impl Fields {
    pub(super) fn start(magic: &[u8; 8], bytes: usize) -> Self {
        let mut fields = Vec::with_capacity(bytes);
        fields.extend_from_slice(magic);
        fields.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        Self(fields)
    }

    pub(super) fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(super) fn u32(&mut self, number: u32) -> &mut Self {
        self.put(&number.to_le_bytes())
    }

    pub(super) fn u64(&mut self, number: u64) -> &mut Self {
        self.put(&number.to_le_bytes())
    }

    pub(super) fn sealed_into(mut self, page: &mut [u8]) {
        let sum = xxh3_64(&self.0);
        self.u64(sum);
        copy_to(page, 0, &self.0);
    }
}

/// Reads fields in order; what is missing reads as zero.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    /// Checks magic, version and the checksum of the first `bytes`, and goes on behind the version.
    pub(super) fn open(page: &'a [u8], magic: &[u8; 8], bytes: usize) -> Result<Self, Damage> {
        let (Some(head), Some(sum)) = (page.get(..bytes), page.get(bytes..bytes + 8)) else {
            return Err(Damage::Foreign);
        };
        if !head.starts_with(magic) {
            return Err(Damage::Foreign);
        }
        if sum != xxh3_64(head).to_le_bytes() {
            return Err(Damage::Checksum);
        }
        let mut fields = Self(head.get(8..).unwrap_or_default());
        let version = u16::from_le_bytes(fields.array());
        if version == FORMAT_VERSION { Ok(fields) } else { Err(Damage::Version) }
    }

    /// Bytes left.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at_checked(len).unwrap_or((self.0, &[]));
        self.0 = rest;
        head
    }

    pub(super) fn array<const N: usize>(&mut self) -> [u8; N] {
        self.bytes(N).try_into().unwrap_or([0; N])
    }

    pub(super) fn skip(&mut self, len: usize) {
        self.bytes(len);
    }

    pub(super) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}
