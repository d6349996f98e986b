//! One operation, and all that the kernel was told about for it.
#![expect(
    unsafe_code,
    reason = "keeps pointers for the kernel; see the essay of the parent module"
)]

use std::{
    ffi::CString,
    fmt, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::Arc,
};

use io_uring::{opcode, squeue, types};
use rustix::{fs::OFlags, io::Errno};
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use crate::nvme::{
    device::{Landing, SegmentId},
    gather::Gather,
    posix::{MOVE_BYTES_MAX, MOVE_SLICES_MAX, PosixFiles, failed},
};

/// What is to be done, with the buffers, and who waits for it.
enum Work {
    Open {
        files: Arc<PosixFiles>,
        name: CString,
        flags: OFlags,
        done: oneshot::Sender<io::Result<OwnedFd>>,
    },
    Read {
        file: Arc<OwnedFd>,
        landing: Landing,
        done: oneshot::Sender<(Landing, io::Result<usize>)>,
    },
    Write {
        file: Arc<OwnedFd>,
        from: Gather,
        done: oneshot::Sender<(Gather, io::Result<usize>)>,
    },
    Sync {
        file: Arc<OwnedFd>,
        done: oneshot::Sender<io::Result<()>>,
    },
}

/// An operation that the kernel has, or is about to get.
///
/// Nothing in it is touched between its submission and the report of its end, and nothing that the
/// kernel has a pointer to moves with it: the buffers, the list of them and the name are on the heap.
pub(super) struct Op {
    segment: SegmentId,
    offset: u64,
    /// Where the bytes of `work`'s buffers are. Empty if there are none.
    buffers: Box<[libc::iovec]>,
    work: Work,
    /// Given back when the operation is over, before anybody hears of that.
    turn: OwnedSemaphorePermit,
}

// SAFETY: the pointers in `buffers` lead to memory that `work` owns, which may be sent.
unsafe impl Send for Op {}

impl Op {
    /// Opens the file of a segment.
    pub(super) fn open(
        files: Arc<PosixFiles>,
        segment: SegmentId,
        (name, flags): (CString, OFlags),
        done: oneshot::Sender<io::Result<OwnedFd>>,
        turn: OwnedSemaphorePermit,
    ) -> Self {
        let work = Work::Open { files, name, flags, done };
        Self { segment, offset: 0, buffers: Box::default(), work, turn }
    }

    /// Reads into what is not filled yet of `landing`.
    pub(super) fn read(
        file: Arc<OwnedFd>,
        (segment, offset): (SegmentId, u64),
        mut landing: Landing,
        done: oneshot::Sender<(Landing, io::Result<usize>)>,
        turn: OwnedSemaphorePermit,
    ) -> Self {
        let mut room = MOVE_BYTES_MAX;
        let mut buffers = Vec::with_capacity(2);
        for slice in landing.slices() {
            let iov_len = room.min(slice.len());
            room -= iov_len;
            buffers.push(libc::iovec { iov_base: slice.as_mut_ptr().cast(), iov_len });
        }
        let work = Work::Read { file, landing, done };
        Self { segment, offset, buffers: buffers.into(), work, turn }
    }

    /// Writes what is not written yet of `from`.
    pub(super) fn write(
        file: Arc<OwnedFd>,
        (segment, offset): (SegmentId, u64),
        from: Gather,
        done: oneshot::Sender<(Gather, io::Result<usize>)>,
        turn: OwnedSemaphorePermit,
    ) -> Self {
        let mut room = MOVE_BYTES_MAX;
        let buffers = from.slices().take(MOVE_SLICES_MAX).map(|slice| {
            let iov_len = room.min(slice.len());
            room -= iov_len;
            // The kernel only reads there.
            libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len }
        });
        let buffers = buffers.collect();
        let work = Work::Write { file, from, done };
        Self { segment, offset, buffers, work, turn }
    }

    /// Makes what was written to the file survive a loss of power.
    pub(super) fn sync(
        file: Arc<OwnedFd>,
        segment: SegmentId,
        done: oneshot::Sender<io::Result<()>>,
        turn: OwnedSemaphorePermit,
    ) -> Self {
        let work = Work::Sync { file, done };
        Self { segment, offset: 0, buffers: Box::default(), work, turn }
    }

    /// What to tell the kernel. Valid for as long as the operation exists.
    pub(super) fn entry(&self) -> squeue::Entry {
        let count = u32::try_from(self.buffers.len()).unwrap_or(0);
        match &self.work {
            Work::Open { files, name, flags, .. } => {
                let directory = types::Fd(files.directory().as_raw_fd());
                opcode::OpenAt::new(directory, name.as_ptr())
                    .flags(flags.bits().cast_signed())
                    .build()
            }
            Work::Read { file, .. } => {
                let file = types::Fd(file.as_raw_fd());
                opcode::Readv::new(file, self.buffers.as_ptr(), count).offset(self.offset).build()
            }
            Work::Write { file, .. } => {
                let file = types::Fd(file.as_raw_fd());
                opcode::Writev::new(file, self.buffers.as_ptr(), count).offset(self.offset).build()
            }
            Work::Sync { file, .. } => opcode::Fsync::new(types::Fd(file.as_raw_fd()))
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
        }
    }

    /// The kernel has reported the end of the operation: hands the outcome and the buffers back.
    ///
    /// `result` is as the kernel reported it: a count, a new descriptor, or an error below 0.
    pub(super) fn finish(self, result: i32) {
        let what = self.to_string();
        let moved = usize::try_from(result)
            .map_err(|_below_0| failed(&what, Errno::from_raw_os_error(result.saturating_neg())));
        drop(self.turn);
        // Nobody waits any more? Then the buffers end here, after the operation.
        match self.work {
            Work::Open { done, .. } => {
                // SAFETY: the kernel has just made this descriptor for us, nobody else knows it.
                let file = moved.map(|_| unsafe { OwnedFd::from_raw_fd(result) });
                drop(done.send(file));
            }
            Work::Read { landing, done, .. } => drop(done.send((landing, moved))),
            Work::Write { from, done, .. } => drop(done.send((from, moved))),
            Work::Sync { done, .. } => drop(done.send(moved.map(|_zero| ()))),
        }
    }

    /// The kernel was never told of the operation: hands the error and the buffers back.
    pub(super) fn refuse(self, reason: &str) {
        let error = io::Error::other(format!("{self}: {reason}"));
        drop(self.turn);
        match self.work {
            Work::Open { done, .. } => drop(done.send(Err(error))),
            Work::Read { landing, done, .. } => drop(done.send((landing, Err(error)))),
            Work::Write { from, done, .. } => drop(done.send((from, Err(error)))),
            Work::Sync { done, .. } => drop(done.send(Err(error))),
        }
    }

    /// The kernel has the operation and nobody will hear of its end: whoever waits gets an error,
    /// and all that the kernel has pointers to is given up for good.
    pub(super) fn strand(self) {
        let Self { segment, buffers, work, .. } = self;
        let _lent: &mut [libc::iovec] = Box::leak(buffers);
        tracing::error!(?segment, "an operation of the nvme tier was lost with its ring");
        // Dropping the sender is the error.
        match work {
            Work::Open { name, .. } => drop(name.into_raw()),
            Work::Read { landing, .. } => drop_never(landing),
            Work::Write { from, .. } => drop_never(from),
            Work::Sync { .. } => {}
        }
    }
}

fn drop_never<T: 'static>(lent: T) {
    let _lent: &mut T = Box::leak(Box::new(lent));
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, offset, .. } = self;
        match &self.work {
            Work::Open { .. } => write!(f, "open {segment:?}"),
            Work::Read { .. } => write!(f, "read {segment:?} at {offset}"),
            Work::Write { .. } => write!(f, "write {segment:?} at {offset}"),
            Work::Sync { .. } => write!(f, "sync {segment:?}"),
        }
    }
}

impl fmt::Debug for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
