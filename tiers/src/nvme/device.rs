//! Where segments lie and how their bytes move: the seam between the tier and the disk.
//!
//! A device is one directory of segment files, named by number. Bytes move by position, with owned
//! buffers: whoever reads or writes gives the buffer away and gets it back with the outcome, so an
//! operation that is still under way when its caller has gone owns what it writes into.
//!
//! Two implementations: io_uring where the kernel permits it, and `pread`/`pwrite` on a bounded pool
//! of threads ([`open`] probes and says which). Doubles: a disk with a volatile cache, and a wrapper
//! that injects faults, both in `testing`.
//!
//! Why segments are named and not handed out as files: a name cannot outlive the device, and the
//! volatile double must be able to lose a file.

use std::{
    fmt::{self, Debug},
    io,
};

use super::aligned::{AlignedBuf, PAGE_BYTES};
use crate::store::{BlockWriter, BoxFuture};

/// The number of a segment: ascending from 1 in the order of creation, never used again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u64);

impl Debug for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "segment {}", self.0)
    }
}

/// How full the disk is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    /// Bytes of the file system.
    pub total_bytes: u64,
    /// Bytes that this process may still allocate, whoever else uses the file system.
    pub available_bytes: u64,
    /// Bytes that the segments have allocated.
    pub allocated_bytes: u64,
}

/// What a sync is for. Each is needed: leaving one out loses or resurrects blocks
/// (`testing` shows it).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SyncPoint {
    /// Records, before they are indexed and acknowledged.
    Records,
    /// The directory, before a record in a new segment is acknowledged.
    Created,
    /// The directory, before what a deleted segment held may be forgotten for good.
    Deleted,
}

impl SyncPoint {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Records, Self::Created, Self::Deleted];
}

/// Where a read puts its bytes: first the head, then, if there is one, the block's own memory.
#[derive(Debug)]
pub struct Landing {
    /// Whole pages of the tier's own.
    pub head: AlignedBuf,
    /// Memory of the arena; filled up to the next whole page behind its length.
    pub body: Option<BlockWriter>,
}

impl Landing {
    /// Bytes that a read should deliver: a multiple of [`PAGE_BYTES`].
    #[must_use]
    pub fn len(&mut self) -> usize {
        self.slices().iter().map(|slice| slice.len()).sum()
    }

    /// The memory to be filled, in order. Each slice starts at a page and is whole pages long.
    #[must_use]
    pub fn slices(&mut self) -> Vec<&mut [u8]> {
        let body = self.body.as_mut().and_then(|body| body.pages_mut(PAGE_BYTES));
        std::iter::once(&mut *self.head).chain(body).collect()
    }
}

/// The outcome of moving bytes: the buffer comes back, with how many bytes moved.
pub type Moved<B> = BoxFuture<'static, (B, io::Result<usize>)>;

/// A directory of segment files.
///
/// Offsets and lengths are multiples of [`PAGE_BYTES`], and buffers start at a page. Reads and writes
/// may move less than was asked for (the callers go on behind it); 0 bytes read is the end of the
/// file. Dropping a future leaves the operation running to its end. Only `read`, `write` and `sync`
/// may wait for the disk without holding a thread of the caller; all else is short and blocking.
/// After an error the device stays usable.
pub trait Device: Debug + Send + Sync + 'static {
    /// Name of the engine, for logs and metrics: `io_uring`, `pread`, ...
    fn name(&self) -> &'static str;

    /// All segments, ascending, with the length of their files.
    fn list(&self) -> io::Result<Vec<(SegmentId, u64)>>;

    /// Makes a segment file of `bytes`, all of them allocated. It exists for good only after
    /// [`sync_directory`](Self::sync_directory). Fails with `StorageFull` without a trace.
    fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()>;

    /// Cuts a segment file to `bytes` and gives the rest back to the file system.
    fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()>;

    /// Deletes a segment file. Reads under way may still succeed. Absent files are a success.
    fn remove(&self, segment: SegmentId) -> io::Result<()>;

    /// Makes creations and deletions so far survive a loss of power.
    fn sync_directory(&self, why: SyncPoint) -> io::Result<()>;

    /// How full the disk is.
    fn space(&self) -> io::Result<Space>;

    /// Reads from `offset` into `landing`.
    fn read(&self, segment: SegmentId, offset: u64, landing: Landing) -> Moved<Landing>;

    /// Writes `from[start..]` at `offset`; `start` is a multiple of [`PAGE_BYTES`].
    fn write(
        &self,
        segment: SegmentId,
        offset: u64,
        from: AlignedBuf,
        start: usize,
    ) -> Moved<AlignedBuf>;

    /// Makes what was written to a segment survive a loss of power.
    fn sync(&self, segment: SegmentId, why: SyncPoint) -> BoxFuture<'static, io::Result<()>>;
}
