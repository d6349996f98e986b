//! What the byte formats of the tiers share: a magic and a version in front, a checksum behind, and
//! readers that neither panic nor read past the end.

use xxhash_rust::xxh3::xxh3_64;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// Not written, or not by us.
    Foreign,
    /// Of a version that this program does not know.
    Version,
    /// The checksum does not match.
    Checksum,
    /// A number that cannot be right, or of another place, segment, pack or generation.
    Misplaced,
}

/// The checksum of everything that a tier writes and that is not a part of a block: XXH3-64 without a
/// seed.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Builds a structure: magic, version, fields, checksum.
#[derive(Debug)]
pub(crate) struct Fields(Vec<u8>);

impl Fields {
    /// Begins one of about `bytes`.
    pub(crate) fn start(magic: &[u8; 8], version: u16, bytes: usize) -> Self {
        let mut fields = Vec::with_capacity(bytes);
        fields.extend_from_slice(magic);
        fields.extend_from_slice(&version.to_le_bytes());
        Self(fields)
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub(crate) fn u16(&mut self, number: u16) -> &mut Self {
        self.put(&number.to_le_bytes())
    }

    pub(crate) fn u32(&mut self, number: u32) -> &mut Self {
        self.put(&number.to_le_bytes())
    }

    pub(crate) fn u64(&mut self, number: u64) -> &mut Self {
        self.put(&number.to_le_bytes())
    }

    /// The structure with its checksum.
    pub(crate) fn sealed(mut self) -> Vec<u8> {
        let sum = checksum(&self.0);
        self.u64(sum);
        self.0
    }
}

/// Reads fields in order; what is missing reads as zero, where it is not asked for by
/// [`need`](Self::need) or [`take`](Self::take).
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    /// Checks magic, version and the checksum of the first `bytes`, and goes on behind the version.
    pub(crate) fn open(
        input: &'a [u8],
        magic: &[u8; 8],
        version: u16,
        bytes: usize,
    ) -> Result<Self, Damage> {
        let (Some(head), Some(sum)) = (input.get(..bytes), input.get(bytes..bytes + 8)) else {
            return Err(Damage::Foreign);
        };
        if !head.starts_with(magic) {
            return Err(Damage::Foreign);
        }
        if sum != checksum(head).to_le_bytes() {
            return Err(Damage::Checksum);
        }
        let mut fields = Self(head.get(8..).unwrap_or_default());
        if fields.u16() == version { Ok(fields) } else { Err(Damage::Version) }
    }

    /// As [`open`](Self::open) for a structure that is all of `input`, its checksum last.
    pub(crate) fn open_whole(
        input: &'a [u8],
        magic: &[u8; 8],
        version: u16,
    ) -> Result<Self, Damage> {
        Self::open(input, magic, version, input.len().saturating_sub(8))
    }

    /// Bytes left.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Checks that so many bytes are left.
    pub(crate) fn need(&self, bytes: usize) -> Result<(), Damage> {
        if self.len() < bytes { Err(Damage::Misplaced) } else { Ok(()) }
    }

    /// Checks that nothing is left.
    pub(crate) fn end(&self) -> Result<(), Damage> {
        if self.len() > 0 { Err(Damage::Misplaced) } else { Ok(()) }
    }

    /// The next bytes, all of them.
    pub(crate) fn take(&mut self, len: usize) -> Result<&'a [u8], Damage> {
        self.need(len)?;
        Ok(self.bytes(len))
    }

    /// Passes over bytes that must be zero: what this version does not use.
    pub(crate) fn zeros(&mut self, len: usize) -> Result<(), Damage> {
        let zero = self.take(len)?.iter().all(|byte| *byte == 0);
        if zero { Ok(()) } else { Err(Damage::Misplaced) }
    }

    pub(crate) fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at_checked(len).unwrap_or((self.0, &[]));
        self.0 = rest;
        head
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        self.bytes(N).try_into().unwrap_or([0; N])
    }

    pub(crate) fn skip(&mut self, len: usize) {
        self.bytes(len);
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// A count or a length.
    pub(crate) fn size(&mut self) -> usize {
        usize::try_from(self.u32()).unwrap_or(usize::MAX)
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}
