//! The bytes of the index: keys in the order in which they are loaded, values with a version.
//!
//! ```text
//! key         offset  bytes
//! marker           0      1   00
//!                  1      6   "format"
//! namespace        0      1   01
//!                  1     32   namespace id
//! segment          0      1   02
//!                  1      8   segment             u64, big-endian
//! block            0      1   03
//!                  1     32   namespace id
//!                 33     32   block hash
//! description      0      1   04
//!                  1     32   namespace id
//!                 33     32   block hash
//!
//! value       offset  bytes
//! marker           0      4   version of the index    u32
//! namespace        0      1   version, 1
//!                  1          the namespace, encoded
//! segment          0      1   version, 1
//!                  1      8   generation          u64
//!                  9      8   indexed bytes       u64
//! block            0      1   version, 1
//!                  1      8   location            u64, not 0
//!                  9      8   generation          u64
//!                 17      4   length              u32
//!                 21    8 n   checksum of each part, u64; n is 1 to 1024
//! description      0      1   version, 1
//!                  1          the description, encoded
//! ```
//! Numbers are little-endian but for the segment in a key, where big-endian makes the order of the
//! bytes that of the numbers. A value of another version or length is not decoded: it is passed over
//! and counted.

use std::num::NonZeroU64;

use super::{Change, IndexEntry, IndexKey, Known};
use crate::{
    block::BlockHash,
    description::Description,
    limits::PARTS_MAX,
    map::{Checksums, Location},
    namespace::NamespaceId,
    nvme::device::SegmentId,
};

/// The key of the marker, before all others.
#[cfg(any(feature = "rocksdb", test))]
pub(crate) const MARKER: &[u8] = b"\0format";
/// The version of keys, kinds and marker; raised when an older build would read them wrongly.
#[cfg(any(feature = "rocksdb", test))]
pub(crate) const FORMAT: u32 = 1;
/// The first key that is loaded.
pub(crate) const FIRST: &[u8] = &[KIND_NAMESPACE];

const KIND_NAMESPACE: u8 = 1;
const KIND_SEGMENT: u8 = 2;
const KIND_BLOCK: u8 = 3;
const KIND_DESCRIPTION: u8 = 4;
/// What the keys of descriptions begin with.
#[cfg(any(feature = "rocksdb", test))]
pub(crate) const DESCRIPTIONS: &[u8] = &[KIND_DESCRIPTION];
const VALUE_VERSION: u8 = 1;

/// Bytes of the longest key.
const KEY_BYTES_MAX: usize = 1 + 32 + 32;

/// A key, on the stack: there are 64 of them in every group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Key {
    bytes: [u8; KEY_BYTES_MAX],
    len: usize,
}

impl Key {
    fn new(kind: u8, first: &[u8], second: &[u8]) -> Self {
        let mut key = Self { bytes: [0; KEY_BYTES_MAX], len: 1 + first.len() + second.len() };
        let source = std::iter::once(&kind).chain(first).chain(second);
        for (to, from) in key.bytes.iter_mut().zip(source) {
            *to = *from;
        }
        key
    }

    pub(crate) fn namespace(id: &NamespaceId) -> Self {
        Self::new(KIND_NAMESPACE, id.as_bytes(), &[])
    }

    pub(crate) fn segment(segment: SegmentId) -> Self {
        Self::new(KIND_SEGMENT, &segment.0.to_be_bytes(), &[])
    }

    pub(crate) fn block(key: &IndexKey) -> Self {
        Self::new(KIND_BLOCK, key.namespace.as_bytes(), key.hash.as_bytes())
    }

    pub(crate) fn description(key: &IndexKey) -> Self {
        Self::new(KIND_DESCRIPTION, key.namespace.as_bytes(), key.hash.as_bytes())
    }
}

impl AsRef<[u8]> for Key {
    fn as_ref(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or(&self.bytes)
    }
}

/// What a change does to the bytes. The value is written into `scratch`.
pub(crate) enum Edit<'a> {
    Put(Key, &'a [u8]),
    Delete(Key),
    /// A block and its description, if it may have one.
    DeleteBlock(Key, Key),
}

impl<'a> Edit<'a> {
    pub(crate) fn of(change: &Change, scratch: &'a mut Vec<u8>) -> Self {
        scratch.clear();
        scratch.push(VALUE_VERSION);
        match change {
            Change::Put(key, entry) => {
                encode_entry(entry, scratch);
                Self::Put(Key::block(key), scratch)
            }
            Change::Remove(key) => Self::DeleteBlock(Key::block(key), Key::description(key)),
            Change::Describe(key, description) => {
                description.encode(scratch);
                Self::Put(Key::description(key), scratch)
            }
            Change::Undescribe(key) => Self::Delete(Key::description(key)),
            Change::Indexed { segment, generation, bytes } => {
                scratch.extend(generation.to_le_bytes());
                scratch.extend(bytes.to_le_bytes());
                Self::Put(Key::segment(*segment), scratch)
            }
            Change::Forget(segment) => Self::Delete(Key::segment(*segment)),
            Change::Namespace(id, encoded) => {
                scratch.extend(encoded);
                Self::Put(Key::namespace(id), scratch)
            }
        }
    }
}

fn encode_entry(entry: &IndexEntry, into: &mut Vec<u8>) {
    into.extend(entry.location.0.get().to_le_bytes());
    into.extend(entry.generation.to_le_bytes());
    into.extend(entry.len.to_le_bytes());
    match &entry.checksums {
        Checksums::One(sum) => into.extend(sum.to_le_bytes()),
        Checksums::Many(sums) => into.extend(sums.iter().flat_map(|sum| sum.to_le_bytes())),
    }
}

/// Reads one pair back; `None` if it is of a kind, version or length that this build does not know.
pub(crate) fn decode(key: &[u8], value: &[u8]) -> Option<Known> {
    let (kind, name) = key.split_first()?;
    match *kind {
        KIND_NAMESPACE => {
            let encoded = current(value)?;
            Some(Known::Namespace(NamespaceId::from_bytes(name.try_into().ok()?), encoded.to_vec()))
        }
        KIND_SEGMENT => {
            let segment = SegmentId(u64::from_be_bytes(name.try_into().ok()?));
            let mut fields = Fields(current(value)?);
            let (generation, bytes) = (fields.u64()?, fields.u64()?);
            fields.0.is_empty().then_some(Known::Indexed { segment, generation, bytes })
        }
        KIND_BLOCK => Some(Known::Block(block(name)?, decode_entry(value)?)),
        KIND_DESCRIPTION => {
            Some(Known::Described(block(name)?, Description::decode(current(value)?)?))
        }
        _ => None,
    }
}

fn block(name: &[u8]) -> Option<IndexKey> {
    let (namespace, hash) = name.split_first_chunk()?;
    Some(IndexKey {
        namespace: NamespaceId::from_bytes(*namespace),
        hash: BlockHash::from_array(hash.try_into().ok()?),
    })
}

/// Reads the value of a block; `None` as for [`decode`].
pub(crate) fn decode_entry(value: &[u8]) -> Option<IndexEntry> {
    let mut fields = Fields(current(value)?);
    let location = Location(NonZeroU64::new(fields.u64()?)?);
    let (generation, len) = (fields.u64()?, fields.u32()?);
    let (sums, rest) = fields.0.as_chunks();
    if sums.is_empty() || sums.len() > PARTS_MAX || !rest.is_empty() {
        return None;
    }
    let checksums = match sums {
        [one] => Checksums::One(u64::from_le_bytes(*one)),
        many => Checksums::new(many.iter().map(|sum| u64::from_le_bytes(*sum)).collect()),
    };
    Some(IndexEntry { location, generation, len, checksums })
}

/// The value behind its version.
fn current(value: &[u8]) -> Option<&[u8]> {
    value.split_first().and_then(|(version, rest)| (*version == VALUE_VERSION).then_some(rest))
}

/// Fixed-width fields, taken from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u64(&mut self) -> Option<u64> {
        self.0.split_off(..8)?.try_into().ok().map(u64::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.0.split_off(..4)?.try_into().ok().map(u32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> IndexKey {
        IndexKey {
            namespace: NamespaceId::from_array([7; 32]),
            hash: BlockHash::from_array([9; 32]),
        }
    }

    fn entry(checksums: Checksums) -> IndexEntry {
        let location = Location(NonZeroU64::new(0x0102_0304_0506_0708).unwrap());
        IndexEntry { location, generation: 3, len: 65_536, checksums }
    }

    fn described() -> Description {
        Description { parent: None, position: 6, tokens: vec![5], lora_name: "a".to_owned() }
    }

    fn pair(change: &Change) -> (Vec<u8>, Vec<u8>) {
        let mut scratch = Vec::new();
        match Edit::of(change, &mut scratch) {
            Edit::Put(key, value) => (key.as_ref().to_vec(), value.to_vec()),
            Edit::Delete(_) | Edit::DeleteBlock(..) => panic!("{change:?} deletes"),
        }
    }

    #[test]
    fn the_bytes_never_change() {
        let (key, value) = pair(&Change::Put(key(), entry(Checksums::One(5))));
        assert_eq!(key, [vec![3], vec![7; 32], vec![9; 32]].concat());
        let fields: [&[u8]; 5] = [
            &[1, 8, 7, 6, 5, 4, 3, 2, 1],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[0, 0, 1, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0],
            &[],
        ];
        assert_eq!(value, fields.concat());
        let (key, value) =
            pair(&Change::Indexed { segment: SegmentId(258), generation: 1, bytes: 2 });
        assert_eq!(key, [2, 0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(value, [1, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        let (key, value) = pair(&Change::Namespace(NamespaceId::from_array([7; 32]), vec![4, 5]));
        assert_eq!((key, value), ([vec![1], vec![7; 32]].concat(), vec![1, 4, 5]));
        let (description, key) = (described(), self::key());
        let (key, value) = pair(&Change::Describe(key, description.clone()));
        assert_eq!(key, [vec![4], vec![7; 32], vec![9; 32]].concat());
        assert_eq!(value, [1, 0, 6, 0, 0, 0, 1, 0, b'a', 5, 0, 0, 0]);
        assert_eq!(decode(&key, &value), Some(Known::Described(self::key(), description)));
        assert_eq!(decode(&key, &[&[2], &value[1..]].concat()), None, "a newer one");
    }

    #[test]
    fn what_was_encoded_is_decoded_and_what_was_cut_is_not() {
        let many = Checksums::new((0..PARTS_MAX as u64).collect());
        for checksums in [Checksums::One(u64::MAX), Checksums::new(vec![1, 2]), many] {
            let entry = entry(checksums);
            let (bytes, value) = pair(&Change::Put(key(), entry.clone()));
            assert_eq!(decode(&bytes, &value), Some(Known::Block(key(), entry.clone())));
            for cut in 0..value.len() {
                let decoded = decode_entry(&value[..cut]);
                let shorter = decoded.as_ref().is_some_and(|cut| cut.checksums != entry.checksums);
                assert!(decoded.is_none() || shorter, "cut at {cut}");
            }
            for cut in 0..bytes.len() {
                assert_eq!(decode(&bytes[..cut], &value), None, "key cut at {cut}");
            }
            let newer = [&[2], &value[1..]].concat();
            assert_eq!(decode(&bytes, &newer), None);
        }
        let (segment, value) =
            pair(&Change::Indexed { segment: SegmentId(1), generation: 1, bytes: 2 });
        for cut in 0..value.len() {
            assert_eq!(decode(&segment, &value[..cut]), None);
        }
        assert_eq!(decode(&segment, &[value.as_slice(), &[0]].concat()), None, "longer");
        assert_eq!(decode(&[4; 9], &value), None, "another kind");
        assert_eq!(decode(MARKER, &FORMAT.to_le_bytes()), None);
        let no_place = [&[1][..], &[0; 28]].concat();
        assert_eq!(decode_entry(&no_place), None, "location 0");
    }
}
