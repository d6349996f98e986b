//! A readable block, and how it is verified: at once, or piece by piece on its way out.

use std::{ops::Range, sync::Arc};

use crate::{
    block::BlockHash,
    checksum::{PartHasher, part_checksum},
    dram::Payload,
    map::Checksums,
    namespace::{Namespace, PartSpec},
    tier::Tier,
};

/// A readable block. Its memory stays as it is while this exists.
#[derive(Debug, Clone)]
pub struct Block {
    pub(super) namespace: Arc<Namespace>,
    pub(super) hash: BlockHash,
    pub(super) payload: Payload,
    pub(super) checksums: Checksums,
    pub(super) tier: Tier,
    /// Dram has it from the object tier, and nvme does not.
    pub(super) is_guest: bool,
    /// The parts that were asked for are right.
    pub(super) is_verified: bool,
}

impl Block {
    /// The tier it was read from.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Bytes of the whole block.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> usize {
        self.payload.as_ref().len()
    }

    /// One declared part, without copying.
    #[must_use]
    pub fn part(&self, part: u32) -> Option<PartBytes> {
        let part = usize::try_from(part).ok()?;
        let range = self.namespace.layout().range(part, self.len())?;
        let checksum = self.checksums.get(part)?;
        Some(PartBytes { payload: self.payload.clone(), range, checksum })
    }

    /// Bytes of one declared part.
    #[must_use]
    pub fn part_len(&self, part: u32) -> Option<usize> {
        let part = usize::try_from(part).ok()?;
        self.namespace.layout().range(part, self.len()).map(|range| range.len())
    }

    /// Whether the parts that were asked for are known to be right.
    #[must_use]
    pub fn is_verified(&self) -> bool {
        self.is_verified
    }

    /// Begins to verify a declared part: of all its bytes together, the hasher makes the
    /// [checksum](PartBytes::checksum) of the part if they are right.
    #[must_use]
    pub fn hasher(&self, part: u32) -> Option<PartHasher> {
        let spec = self.spec(part)?;
        Some(PartHasher::new(self.namespace.id(), &self.hash, spec.group, spec.rank))
    }

    /// Whether a declared part is right; one hash over all of it.
    #[must_use]
    pub fn is_right(&self, part: u32) -> bool {
        let id = self.namespace.id();
        self.spec(part).zip(self.part(part)).is_some_and(|(spec, bytes)| {
            let found = part_checksum(id, &self.hash, spec.group, spec.rank, bytes.as_ref());
            found == bytes.checksum
        })
    }

    /// Verifies the parts named, all if empty, unless that has been done.
    pub(super) fn verify(&mut self, parts: &[u32]) -> bool {
        if !self.is_verified {
            let declared = (0_u32..).zip(self.namespace.layout().parts());
            let mut asked = declared.filter(|(part, _)| parts.is_empty() || parts.contains(part));
            self.is_verified = asked.all(|(part, _)| self.is_right(part));
        }
        self.is_verified
    }

    fn spec(&self, part: u32) -> Option<&PartSpec> {
        self.namespace.layout().parts().get(usize::try_from(part).ok()?)
    }
}

/// The bytes of one part in the arena, with their checksum. Holding it pins the block.
#[derive(Debug, Clone)]
pub struct PartBytes {
    payload: Payload,
    range: Range<usize>,
    checksum: u64,
}

impl PartBytes {
    /// A whole block, without its checksums.
    pub(super) fn whole(payload: Payload) -> Self {
        let range = 0..payload.as_ref().len();
        Self { payload, range, checksum: 0 }
    }

    /// The checksum made where the bytes entered.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }
}

impl AsRef<[u8]> for PartBytes {
    fn as_ref(&self) -> &[u8] {
        self.payload.as_ref().get(self.range.clone()).unwrap_or_default()
    }
}
