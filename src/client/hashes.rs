//! Packed lists of block hashes: one buffer, sliced without copying.

use std::{fmt, ops::Range};

use bytes::Bytes;
use kvstrata_tiers::{
    block::{BlockHash, HASH_BYTES_MAX, Hashes},
    error::Result,
};

/// Equally long block hashes in chain order. Cloning and slicing are free.
#[derive(Clone, PartialEq, Eq)]
pub struct HashList {
    packed: Bytes,
    hash_bytes: usize,
}

impl HashList {
    /// Takes `packed` as hashes of `hash_bytes` bytes each.
    ///
    /// # Errors
    /// `Invalid` if the length is not a multiple of `hash_bytes`, or that is not 8 to 32.
    pub fn new(packed: Bytes, hash_bytes: usize) -> Result<Self> {
        Hashes::new(&packed, hash_bytes)?;
        Ok(Self { packed, hash_bytes })
    }

    /// Packs full 32-byte hashes.
    #[must_use]
    pub fn of(hashes: &[BlockHash]) -> Self {
        let packed: Vec<u8> = hashes.iter().flat_map(BlockHash::as_bytes).copied().collect();
        Self { packed: packed.into(), hash_bytes: HASH_BYTES_MAX }
    }

    /// Takes `packed` as full 32-byte hashes; a short tail is cut off.
    #[must_use]
    pub fn of_full(mut packed: Bytes) -> Self {
        packed.truncate(packed.len() / HASH_BYTES_MAX * HASH_BYTES_MAX);
        Self { packed, hash_bytes: HASH_BYTES_MAX }
    }

    /// How many hashes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.packed.len() / self.hash_bytes
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Length of one hash, in bytes.
    #[must_use]
    pub fn hash_bytes(&self) -> usize {
        self.hash_bytes
    }

    /// The hash at `position`.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<BlockHash> {
        let start = position.checked_mul(self.hash_bytes)?;
        let end = start.checked_add(self.hash_bytes)?;
        BlockHash::new(self.packed.get(start..end)?).ok()
    }

    /// All hashes, in order.
    pub fn iter(&self) -> impl Iterator<Item = BlockHash> + '_ {
        (0..self.len()).filter_map(|position| self.get(position))
    }

    /// The hashes at `positions`, cut to the length of the list.
    #[must_use]
    pub fn slice(&self, positions: Range<usize>) -> Self {
        let end = positions.end.min(self.len());
        let start = positions.start.min(end);
        let packed = self.packed.slice(start * self.hash_bytes..end * self.hash_bytes);
        Self { packed, hash_bytes: self.hash_bytes }
    }

    /// Consecutive slices of at most `count` hashes with the position of their first one.
    pub(super) fn chunks(&self, count: usize) -> impl Iterator<Item = (usize, Self)> + '_ {
        let count = count.max(1);
        (0..self.len()).step_by(count).map(move |start| (start, self.slice(start..start + count)))
    }

    /// The bytes as they go over the wire.
    #[must_use]
    pub fn packed(&self) -> Bytes {
        self.packed.clone()
    }
}

impl fmt::Debug for HashList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HashList({} x {} bytes)", self.len(), self.hash_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_and_chunks_keep_order() {
        let hashes: Vec<_> = (0..5).map(|n| BlockHash::new(&[n; 32]).unwrap()).collect();
        let list = HashList::of(&hashes);
        assert_eq!(list.slice(1..3).get(1), Some(hashes[2]));
        assert_eq!(list.slice(4..9).len(), 1);
        let chunks: Vec<_> = list.chunks(2).map(|(start, part)| (start, part.len())).collect();
        assert_eq!(chunks, [(0, 2), (2, 2), (4, 1)]);
        assert!(list.iter().eq(hashes));
    }
}
