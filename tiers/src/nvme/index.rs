//! The index of the segments: which record holds which block. Lost or stale, it is made again from
//! the segments, which are the truth.
//!
//! Changes are applied in atomic groups, in order. A group that was applied survives the end of the
//! process; after a loss of power the latest groups may be missing, but never one before another
//! that is there. Recovery then reads in the segments what [`Change::Indexed`] says is not covered.

#[cfg(any(feature = "rocksdb", feature = "testing", test))]
pub(crate) mod codec;
#[cfg(feature = "rocksdb")]
mod rocks;

use std::{fmt::Debug, io};

#[cfg(feature = "rocksdb")]
pub use self::rocks::RocksIndex;

use super::device::SegmentId;
pub use crate::key::IndexKey;
use crate::{
    description::Description,
    map::{Checksums, Location},
    namespace::NamespaceId,
};

/// Where its record is and what it holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexEntry {
    /// The place of the record.
    pub location: Location,
    /// The generation of the segment.
    pub generation: u64,
    /// Bytes of the block.
    pub len: u32,
    /// The checksums of its parts.
    pub checksums: Checksums,
}

/// One change of the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The block is there (now).
    Put(IndexKey, IndexEntry),
    /// The block is not there (any more), nor is its description.
    Remove(IndexKey),
    /// What was described of a block.
    Describe(IndexKey, Description),
    /// Nothing is described of a block (any more).
    Undescribe(IndexKey),
    /// All records of a segment below `bytes` are in the index.
    Indexed {
        /// The segment.
        segment: SegmentId,
        /// Its generation.
        generation: u64,
        /// Up to where.
        bytes: u64,
    },
    /// The segment is gone.
    Forget(SegmentId),
    /// What a namespace is, encoded.
    Namespace(NamespaceId, Vec<u8>),
}

/// One thing that the index holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// See [`Change::Namespace`].
    Namespace(NamespaceId, Vec<u8>),
    /// See [`Change::Indexed`].
    Indexed {
        /// The segment.
        segment: SegmentId,
        /// Its generation.
        generation: u64,
        /// Up to where.
        bytes: u64,
    },
    /// See [`Change::Put`].
    Block(IndexKey, IndexEntry),
    /// See [`Change::Describe`]. The block may not be there.
    Described(IndexKey, Description),
}

/// What the index takes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IndexUsage {
    /// Bytes of its files.
    pub disk_bytes: u64,
    /// Bytes of memory that it has allocated.
    pub memory_bytes: u64,
}

/// The index. Calls block for as long as a write to the page cache takes, seldom for a disk.
///
/// Errors are of kind `StorageFull` when room may help, `InvalidData` when it is damaged, and of
/// other kinds for what the disk says. After a failed [`apply`](Self::apply) later ones may fail too,
/// until it is opened again; what was applied can still be read.
pub trait Index: Debug + Send + Sync + 'static {
    /// Applies all of `changes` or none.
    ///
    /// # Errors
    /// `StorageFull` and others; nothing was applied.
    fn apply(&self, changes: &[Change]) -> io::Result<()>;

    /// Where a block is.
    ///
    /// # Errors
    /// `InvalidData` and others. An entry that cannot be decoded is none.
    fn get(&self, key: &IndexKey) -> io::Result<Option<IndexEntry>>;

    /// Visits everything: namespaces, then segments, then blocks, then descriptions, in ascending order of
    /// their keys.
    /// What cannot be decoded is passed over and counted in the result: if there is any, then
    /// [`Known::Indexed`] promises too much, and the segments must be read. `visit` must not call the
    /// index.
    ///
    /// # Errors
    /// `InvalidData` and others, then not everything was visited; the error of `visit`, which ends it.
    fn load(&self, visit: &mut dyn FnMut(Known) -> io::Result<()>) -> io::Result<u64>;

    /// Drops everything, also when what there is is damaged.
    ///
    /// # Errors
    /// Of any kind; only [`clear`](Self::clear) and [`reopen`](Self::reopen) may work then.
    fn clear(&self) -> io::Result<()>;

    /// Opens it again after a failure, if that may help; what was applied stays.
    ///
    /// # Errors
    /// Of any kind; it is closed then, and may be opened again later.
    fn reopen(&self) -> io::Result<()>;

    /// What it takes.
    fn usage(&self) -> IndexUsage;
}
