//! The engine for kernels that permit it: io_uring.
//!
//! ```text
//! callers --turn--> Inbox (mutex, eventfd) --> the ring's thread: Table of operations, the ring
//!    ^                                              |
//!    +------------------- oneshot ------------------+  when the kernel has said that it is over
//! ```
//!
//! - One thread owns the ring: it alone submits, and it alone reaps, so neither needs a lock.
//! - An operation owns everything that the kernel was told about (file, buffers, the list of buffers)
//!   and lies in the thread's table until the kernel has reported its end. That is what makes it
//!   sound to drop the future, or the device, at any time.
//! - At most [`OPERATIONS_MAX`] operations are under way; more callers wait for their turn without a
//!   thread. Neither of the ring's queues can overflow: together with the bell they fit.
//! - When the device is dropped the thread goes on until the last operation has ended. Nobody joins
//!   it: an operation that hangs in the kernel keeps the thread, and its buffer, but nobody else.
//! - If the ring itself fails, the operations under way fail with it, but what the kernel may still
//!   write into is never freed.
//!
//! Why callers do not submit for themselves: the kernel ties an operation to the thread that
//! submitted it, and that thread cannot end before the operation does, nor be sure that what is
//! queued for it is not cancelled; callers are on the threads of a runtime, which come and go. A
//! submission may also take long: without direct I/O it copies the bytes.

mod op;
mod ring;

use std::{ffi::CString, io, os::fd::OwnedFd, sync::Arc};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use self::{
    op::Op,
    ring::{Inbox, Ring},
};
use super::{
    aligned::AlignedBuf,
    device::{Device, Landing, Moved, SegmentId, Space, SyncPoint},
    gather::Gather,
    posix::PosixFiles,
    turn::turn,
};
use crate::store::BoxFuture;

/// Operations under way: enough for several disks behind one file system at reads of 2 MiB. One less
/// than the submission queue holds: the bell takes that place.
const OPERATIONS_MAX: usize = 255;

/// Entries of the submission queue; the completion queue has twice as many.
const RING_ENTRIES: u32 = 256;

const _: () = assert!(OPERATIONS_MAX < RING_ENTRIES as usize);

/// What the futures share with the device.
#[derive(Debug)]
struct Shared {
    files: Arc<PosixFiles>,
    inbox: Arc<Inbox>,
    turns: Arc<Semaphore>,
}

impl Shared {
    /// Hands the ring what `make` makes. `None` if the operation was lost with the ring.
    async fn run<T>(
        &self,
        make: impl FnOnce(oneshot::Sender<T>, OwnedSemaphorePermit) -> Op,
    ) -> Option<T> {
        let turn = turn(&self.turns).await?;
        let (done, outcome) = oneshot::channel();
        self.inbox.put(make(done, turn));
        outcome.await.ok()
    }

    async fn file(&self, segment: SegmentId) -> io::Result<Arc<OwnedFd>> {
        if let Some(file) = self.files.cached(segment) {
            return Ok(file);
        }
        let (name, flags) = self.files.how_to_open(segment);
        let name = CString::new(name)?;
        let files = Arc::clone(&self.files);
        let opened =
            self.run(|done, turn| Op::open(files, segment, (name, flags), done, turn)).await;
        Ok(self.files.keep(segment, opened.unwrap_or_else(|| Err(lost()))?))
    }
}

/// Moves bytes with io_uring.
#[derive(Debug)]
pub(super) struct UringDevice {
    shared: Arc<Shared>,
}

impl UringDevice {
    /// Sets up a ring, tries it, and starts its thread.
    pub(super) fn new(files: Arc<PosixFiles>) -> io::Result<Self> {
        let inbox = Arc::new(Inbox::new()?);
        Ring::new(Arc::clone(&inbox))?.start()?;
        let turns = Arc::new(Semaphore::new(OPERATIONS_MAX));
        Ok(Self { shared: Arc::new(Shared { files, inbox, turns }) })
    }
}

impl Drop for UringDevice {
    fn drop(&mut self) {
        self.shared.inbox.close();
    }
}

impl Device for UringDevice {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn list(&self) -> io::Result<Vec<(SegmentId, u64)>> {
        self.shared.files.list()
    }

    fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        self.shared.files.create(segment, bytes)
    }

    fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        self.shared.files.truncate(segment, bytes)
    }

    fn remove(&self, segment: SegmentId) -> io::Result<()> {
        self.shared.files.remove(segment)
    }

    fn sync_directory(&self, _why: SyncPoint) -> io::Result<()> {
        self.shared.files.sync_directory()
    }

    fn space(&self) -> io::Result<Space> {
        self.shared.files.space()
    }

    fn read(&self, segment: SegmentId, offset: u64, landing: Landing) -> Moved<Landing> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let file = match shared.file(segment).await {
                Ok(file) => file,
                Err(error) => return (landing, Err(error)),
            };
            let make = |done, turn| Op::read(file, (segment, offset), landing, done, turn);
            let done = shared.run(make).await;
            done.unwrap_or_else(|| (Landing::new(AlignedBuf::default(), None), Err(lost())))
        })
    }

    fn write(&self, segment: SegmentId, offset: u64, from: Gather) -> Moved<Gather> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let file = match shared.file(segment).await {
                Ok(file) => file,
                Err(error) => return (from, Err(error)),
            };
            let make = |done, turn| Op::write(file, (segment, offset), from, done, turn);
            shared.run(make).await.unwrap_or_else(|| (Gather::default(), Err(lost())))
        })
    }

    fn sync(&self, segment: SegmentId, _why: SyncPoint) -> BoxFuture<'static, io::Result<()>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let file = shared.file(segment).await?;
            let done = shared.run(|done, turn| Op::sync(file, segment, done, turn)).await;
            done.unwrap_or_else(|| Err(lost()))
        })
    }
}

fn lost() -> io::Error {
    io::Error::other("the io_uring of the nvme device is gone: open the device again")
}

#[cfg(test)]
mod tests;
