//! The names of blocks: hash, key, and a borrowed list of hashes.
//!
//! A block hash is the engine's own chained hash. It is opaque here, at most 32 bytes, and never
//! truncated: shorter ones are zero-extended, which cannot collide because every namespace declares
//! one length.

use std::fmt;

use crate::error::{Error, Result};

/// The longest block hash, in bytes.
pub const HASH_BYTES_MAX: usize = 32;
/// The shortest block hash accepted, in bytes.
pub const HASH_BYTES_MIN: usize = 8;

/// An engine's chained content id of one block.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash([u8; HASH_BYTES_MAX]);

impl BlockHash {
    /// Makes a hash of up to 32 bytes, zero-extended.
    ///
    /// # Errors
    /// `Invalid` if `bytes` is shorter than 8 or longer than 32.
    pub fn new(bytes: &[u8]) -> Result<Self> {
        let mut full = [0; HASH_BYTES_MAX];
        match full.get_mut(..bytes.len()) {
            Some(head) if bytes.len() >= HASH_BYTES_MIN => head.copy_from_slice(bytes),
            _ => {
                return Err(Error::invalid(format!(
                    "block hash: {} bytes given, {HASH_BYTES_MIN} to {HASH_BYTES_MAX} allowed",
                    bytes.len()
                )));
            }
        }
        Ok(Self(full))
    }

    /// The hash with exactly these bytes.
    #[must_use]
    pub const fn from_array(bytes: [u8; HASH_BYTES_MAX]) -> Self {
        Self(bytes)
    }

    /// The zero-extended bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; HASH_BYTES_MAX] {
        &self.0
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in self.0.iter().take(6) {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("..")
    }
}

/// A block of one namespace: the interned namespace and the full hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey {
    /// Index of the namespace in this process; the wire and the disk carry the full id.
    pub namespace: u32,
    /// The engine's hash.
    pub hash: BlockHash,
}

const _: () = assert!(size_of::<BlockKey>() == 36, "the key is part of every index entry");

/// A borrowed, packed list of equally long block hashes, in chain order.
#[derive(Debug, Clone, Copy)]
pub struct Hashes<'a> {
    packed: &'a [u8],
    hash_bytes: usize,
}

impl<'a> Hashes<'a> {
    /// Views `packed` as hashes of `hash_bytes` bytes each.
    ///
    /// # Errors
    /// `Invalid` if the length is not a multiple of `hash_bytes`, or that is not 8 to 32.
    pub fn new(packed: &'a [u8], hash_bytes: usize) -> Result<Self> {
        if !(HASH_BYTES_MIN..=HASH_BYTES_MAX).contains(&hash_bytes) {
            return Err(Error::invalid(format!(
                "hash_bytes: {hash_bytes} given, {HASH_BYTES_MIN} to {HASH_BYTES_MAX} allowed"
            )));
        }
        if !packed.len().is_multiple_of(hash_bytes) {
            return Err(Error::invalid(format!(
                "hashes: {} bytes given, a multiple of hash_bytes {hash_bytes} required",
                packed.len()
            )));
        }
        Ok(Self { packed, hash_bytes })
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

    /// The hash at `position`.
    #[must_use]
    pub fn get(&self, position: usize) -> Option<BlockHash> {
        let start = position.checked_mul(self.hash_bytes)?;
        let bytes = self.packed.get(start..start.checked_add(self.hash_bytes)?)?;
        BlockHash::new(bytes).ok()
    }

    /// Those behind the first `count`.
    #[must_use]
    pub fn skip(&self, count: usize) -> Self {
        let start = count.saturating_mul(self.hash_bytes);
        Self { packed: self.packed.get(start..).unwrap_or_default(), ..*self }
    }

    /// All hashes in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = BlockHash> + ExactSizeIterator + 'a {
        self.packed.chunks_exact(self.hash_bytes).map(|bytes| {
            // The usual length without a loop.
            BlockHash(bytes.try_into().unwrap_or_else(|_shorter| {
                let mut full = [0; HASH_BYTES_MAX];
                for (to, from) in full.iter_mut().zip(bytes) {
                    *to = *from;
                }
                full
            }))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_lengths_outside_the_range_are_refused_by_name() {
        for bad in [0, 7, 33] {
            let error = BlockHash::new(&vec![1; bad]).unwrap_err().to_string();
            assert!(error.contains("block hash") && error.contains("8 to 32"), "{error}");
        }
        assert!(Hashes::new(&[0; 33], 32).is_err());
        assert!(Hashes::new(&[0; 64], 4).is_err());
    }

    #[test]
    fn packed_hashes_read_back_in_order() {
        let packed: Vec<u8> = (0..48).collect();
        let hashes = Hashes::new(&packed, 16).unwrap();
        assert_eq!(hashes.len(), 3);
        let listed: Vec<_> = hashes.iter().collect();
        assert_eq!(hashes.get(2), listed.last().copied());
        assert_eq!(listed[1].as_bytes()[..16], packed[16..32]);
        assert_eq!(hashes.get(3), None);
        assert_eq!(hashes.skip(1).iter().collect::<Vec<_>>(), listed[1..]);
        assert!(hashes.skip(3).is_empty() && hashes.skip(usize::MAX).is_empty());
    }
}
