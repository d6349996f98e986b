//! Where segments lie and how their bytes move: the seam between the tier and the disk.
//!
//! A device is one directory of segment files, named by number. Bytes move by position, with owned
//! buffers: whoever reads or writes gives the buffer away and gets it back with the outcome, so an
//! operation that is still under way when its caller has gone owns what it writes into.
//!
//! Two implementations: io_uring where the kernel permits it, and `preadv`/`pwritev` on a bounded pool
//! of threads ([`open`] probes and says which). Doubles: a disk with a volatile cache, and a wrapper
//! that injects faults, both in `testing`.
//!
//! Why segments are named and not handed out as files: a name cannot outlive the device, and the
//! volatile double must be able to lose a file.

use std::{
    any::Any,
    fmt::{self, Debug},
    io,
    path::Path,
    sync::Arc,
};

use super::{
    aligned::{AlignedBuf, PAGE_BYTES},
    gather::Gather,
    posix::PosixFiles,
    pread::PreadDevice,
    uring::UringDevice,
};
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
///
/// It remembers how much of it is filled, so that a read that fell short can go on behind that.
#[derive(Debug)]
pub struct Landing {
    /// Whole pages of the tier's own.
    pub head: AlignedBuf,
    /// Memory of the arena; filled up to the next whole page behind its length. A body that direct
    /// I/O cannot fill ([`BlockWriter::pages_mut`]) is left alone and not counted.
    pub body: Option<BlockWriter>,
    filled: usize,
    _holder: Option<Arc<dyn Any + Send + Sync>>,
}

impl Landing {
    /// Nothing of it is filled.
    #[must_use]
    pub fn new(head: AlignedBuf, body: Option<BlockWriter>) -> Self {
        Self { head, body, filled: 0, _holder: None }
    }

    /// Keeps `holder` for as long as the memory: also when nobody waits for the read any more.
    #[must_use]
    pub fn held_by(self, holder: Arc<dyn Any + Send + Sync>) -> Self {
        Self { _holder: Some(holder), ..self }
    }

    /// Bytes that a read should deliver in all: a multiple of [`PAGE_BYTES`].
    #[must_use]
    pub fn len(&mut self) -> usize {
        self.filled + self.slices().iter().map(|slice| slice.len()).sum::<usize>()
    }

    /// Whether it has no memory to fill.
    #[must_use]
    pub fn is_empty(&mut self) -> bool {
        self.len() == 0
    }

    /// Bytes of it that are filled: the first ones.
    #[must_use]
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// The memory that is still to be filled, in order. Each slice starts at a page and is whole
    /// pages long, none is empty.
    #[must_use]
    pub fn slices(&mut self) -> Vec<&mut [u8]> {
        let body = self.body.as_mut().and_then(|body| body.pages_mut(PAGE_BYTES));
        let mut filled = self.filled;
        let mut slices = Vec::with_capacity(2);
        for slice in std::iter::once(&mut *self.head).chain(body) {
            let skipped = filled.min(slice.len());
            filled -= skipped;
            slices.extend(slice.split_at_mut_checked(skipped).map(|(_, rest)| rest));
        }
        slices.retain(|slice| !slice.is_empty());
        slices
    }

    /// Notes that the next `bytes` are filled; only whole pages count, and no more than there are.
    /// Returns how many do.
    pub fn advance(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.len() - self.filled);
        let pages = bytes - bytes % PAGE_BYTES;
        self.filled += pages;
        pages
    }
}

/// The outcome of moving bytes: the buffer comes back, with how many bytes moved.
///
/// If the engine itself broke while the kernel had the buffer, or the device was dropped first, the
/// buffer does not come back: an empty one does, with the error.
pub type Moved<B> = BoxFuture<'static, (B, io::Result<usize>)>;

/// A directory of segment files.
///
/// Offsets and lengths are multiples of [`PAGE_BYTES`], and buffers start at a page. Reads and writes
/// may move less than was asked for ([`read_full`] and [`write_full`] go on behind it); 0 bytes read
/// is the end of the file. An operation begins when its turn comes, not before its future is polled;
/// once it has begun, dropping the future leaves it running to its end. Only `read`, `write` and
/// `sync` may wait for the disk without holding a thread of the caller; all else is short and
/// blocking. After an error the device stays usable, unless the error says otherwise. Dropping the
/// device waits for nothing.
pub trait Device: Debug + Send + Sync + 'static {
    /// Name of the engine, for logs and metrics: `io_uring`, `pread`, ...
    fn name(&self) -> &'static str;

    /// All segments, ascending, with the length of their files.
    ///
    /// # Errors
    /// Those of the file system.
    fn list(&self) -> io::Result<Vec<(SegmentId, u64)>>;

    /// Makes a segment file of `bytes`, all of them allocated. It exists for good only after
    /// [`sync_directory`](Self::sync_directory).
    ///
    /// # Errors
    /// `AlreadyExists` if it is there; `StorageFull` if the disk is, and then nothing of it is left.
    fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()>;

    /// Cuts a segment file to `bytes` and gives the rest back to the file system. That the file is
    /// shorter survives a loss of power only after [`sync`](Self::sync).
    ///
    /// # Errors
    /// `NotFound` if it is not there, `InvalidInput` if it is shorter.
    fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()>;

    /// Deletes a segment file. Reads under way may still succeed. Absent files are a success.
    ///
    /// # Errors
    /// Those of the file system.
    fn remove(&self, segment: SegmentId) -> io::Result<()>;

    /// Makes creations and deletions so far survive a loss of power.
    ///
    /// # Errors
    /// Those of the disk. What was not synced may then be lost whatever a later sync says.
    fn sync_directory(&self, why: SyncPoint) -> io::Result<()>;

    /// How full the disk is.
    ///
    /// # Errors
    /// Those of the file system.
    ///
    /// # Blocking
    /// Looks at every segment file: some microseconds for each.
    fn space(&self) -> io::Result<Space>;

    /// Reads from `offset` into `landing`.
    fn read(&self, segment: SegmentId, offset: u64, landing: Landing) -> Moved<Landing>;

    /// Writes what is not written yet of `from` at `offset`.
    fn write(&self, segment: SegmentId, offset: u64, from: Gather) -> Moved<Gather>;

    /// Makes what was written to a segment survive a loss of power.
    fn sync(&self, segment: SegmentId, why: SyncPoint) -> BoxFuture<'static, io::Result<()>>;
}

/// How bytes move to and from the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Engine {
    /// io_uring if the kernel permits it, else the pool of threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// `preadv` and `pwritev` on a bounded pool of threads.
    Pread,
}

/// Opens the segments in `directory`, which must exist, and logs which engine moves the bytes.
///
/// # Errors
/// If the directory cannot be used, or [`Engine::Uring`] is asked for and the kernel refuses it.
pub fn open(directory: &Path, engine: Engine) -> io::Result<Arc<dyn Device>> {
    let files = PosixFiles::open(directory)?;
    let direct = files.is_direct();
    let refusal = match engine {
        Engine::Pread => None,
        Engine::Auto | Engine::Uring => match UringDevice::new(Arc::clone(&files)) {
            Ok(device) => {
                tracing::info!(engine = device.name(), direct, "nvme device opened");
                return Ok(Arc::new(device));
            }
            Err(error) => Some(error),
        },
    };
    if let (Engine::Uring, Some(error)) = (engine, &refusal) {
        let what = format!(
            "io_uring is asked for but refused ({error}): permit it (kernel 5.6 or later, sysctl \
             kernel.io_uring_disabled=0, a seccomp profile that allows io_uring_setup, \
             io_uring_enter and io_uring_register) or choose the engine auto or pread"
        );
        return Err(io::Error::new(error.kind(), what));
    }
    let device = PreadDevice::new(files)?;
    let reason = refusal.map_or_else(|| "as configured".into(), |error| error.to_string());
    tracing::info!(engine = device.name(), direct, reason, "nvme device opened");
    Ok(Arc::new(device))
}

/// Fills all of `landing` from `offset`, which is where its first byte, filled or not, lies.
///
/// # Errors
/// `UnexpectedEof` if the file ends before; else those of the device. The landing comes back, filled
/// as far as it went.
///
/// # Cancel safety
/// The read that is under way completes in the background, no further one begins.
pub async fn read_full(
    device: &dyn Device,
    segment: SegmentId,
    offset: u64,
    mut landing: Landing,
) -> (Landing, io::Result<()>) {
    while landing.filled() < landing.len() {
        let at = offset.saturating_add(u64::try_from(landing.filled()).unwrap_or(u64::MAX));
        let (back, moved) = device.read(segment, at, landing).await;
        landing = back;
        match moved {
            Ok(bytes) if landing.advance(bytes) > 0 => {}
            Ok(_less_than_a_page) => {
                let what = format!("read {segment:?} at {at}: the file ends there");
                return (landing, Err(io::Error::new(io::ErrorKind::UnexpectedEof, what)));
            }
            Err(error) => return (landing, Err(error)),
        }
    }
    (landing, Ok(()))
}

/// Writes all of `from` at `offset`, which is where its first byte, written or not, goes.
///
/// # Errors
/// `WriteZero` if the disk takes nothing without saying why; else those of the device. How much was
/// written is then unknown.
///
/// # Cancel safety
/// The write that is under way completes in the background, no further one begins.
pub async fn write_full(
    device: &dyn Device,
    segment: SegmentId,
    offset: u64,
    mut from: Gather,
) -> (Gather, io::Result<()>) {
    while from.written() < from.len() {
        let at = offset.saturating_add(u64::try_from(from.written()).unwrap_or(u64::MAX));
        let (back, moved) = device.write(segment, at, from).await;
        from = back;
        match moved {
            Ok(bytes) if from.advance(bytes) > 0 => {}
            Ok(_less_than_a_page) => {
                let what = format!("write {segment:?} at {at}: nothing was written");
                return (from, Err(io::Error::new(io::ErrorKind::WriteZero, what)));
            }
            Err(error) => return (from, Err(error)),
        }
    }
    (from, Ok(()))
}
