//! Where the parts of a block lie within its bytes.

use std::ops::Range;

use super::NamespaceSpec;
use crate::{checksum::part_checksum, fields::checksum, key::IndexKey, limits::PART_BYTES_MAX};

/// One declared share of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PartSpec {
    /// The engine's cache group.
    pub group: u32,
    /// The TP/PP/CP rank that makes it.
    pub rank: u32,
    /// Its exact length; for an opaque namespace the longest length.
    pub bytes: u32,
}

/// The parts of a block, one behind the other without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLayout {
    parts: Box<[PartSpec]>,
    offsets: Box<[u32]>,
    block_bytes: u32,
    opaque: bool,
}

impl BlockLayout {
    /// The layout of a validated `spec`.
    pub(super) fn new(spec: &NamespaceSpec) -> Self {
        match spec {
            NamespaceSpec::Engine(identity) => Self::of_parts(&identity.parts, false),
            NamespaceSpec::Opaque { bytes_max, .. } => {
                let limit = u32::try_from(PART_BYTES_MAX).unwrap_or(u32::MAX);
                let bytes = if *bytes_max == 0 { limit } else { *bytes_max };
                Self::of_parts(&[PartSpec { group: 0, rank: 0, bytes }], true)
            }
        }
    }

    fn of_parts(parts: &[PartSpec], opaque: bool) -> Self {
        let mut block_bytes = 0_u32;
        let mut offsets = Vec::with_capacity(parts.len());
        for part in parts {
            offsets.push(block_bytes);
            block_bytes = block_bytes.saturating_add(part.bytes);
        }
        Self { parts: parts.into(), offsets: offsets.into(), block_bytes, opaque }
    }

    /// The declared parts, in order.
    #[must_use]
    pub fn parts(&self) -> &[PartSpec] {
        &self.parts
    }

    /// Bytes of a whole block; 0 for an opaque namespace, whose values have any length.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        if self.opaque { 0 } else { u64::from(self.block_bytes) }
    }

    /// Whether values have any length up to [`bytes_max`](Self::bytes_max).
    #[must_use]
    pub fn is_opaque(&self) -> bool {
        self.opaque
    }

    /// The longest block, in bytes.
    #[must_use]
    pub fn bytes_max(&self) -> u32 {
        self.block_bytes
    }

    /// What shapes the parts, in short: XXH3-64 of (group, rank, bytes) of each.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let numbers = self.parts.iter().flat_map(|part| [part.group, part.rank, part.bytes]);
        checksum(&numbers.flat_map(u32::to_le_bytes).collect::<Vec<_>>())
    }

    /// The range of `part` within a block of `len` bytes.
    #[must_use]
    pub fn range(&self, part: usize, len: usize) -> Option<Range<usize>> {
        if self.opaque {
            return (part == 0).then_some(0..len);
        }
        let start = usize::try_from(*self.offsets.get(part)?).ok()?;
        let end = start.checked_add(usize::try_from(self.parts.get(part)?.bytes).ok()?)?;
        (end <= len).then_some(start..end)
    }

    /// The checksums of the parts of a block with this payload, in order; `None` if its length is wrong.
    pub(crate) fn checksums(&self, key: &IndexKey, payload: &[u8]) -> Option<Vec<u64>> {
        let sum = |(number, part): (usize, &PartSpec)| {
            let bytes = payload.get(self.range(number, payload.len())?)?;
            Some(part_checksum(&key.namespace, &key.hash, part.group, part.rank, bytes))
        };
        self.parts.iter().enumerate().map(sum).collect()
    }

    /// The lengths of the parts of a block of `len` bytes, in order.
    pub(crate) fn lengths(&self, len: u32) -> Vec<u32> {
        if self.opaque { vec![len] } else { self.parts.iter().map(|part| part.bytes).collect() }
    }
}
