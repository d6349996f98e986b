//! The thread that owns the ring, the table of what the kernel has, and the inbox that feeds it.
#![expect(unsafe_code, reason = "tells the kernel pointers; see the essay of the parent module")]

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsRawFd, OwnedFd},
    sync::Arc,
    thread,
};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use parking_lot::Mutex;
use rustix::{
    event::{EventfdFlags, eventfd},
    io::{Errno, read, write},
};

use super::{RING_ENTRIES, op::Op};

/// Marks the completion of the bell; the others carry their place in the table.
const BELL: u64 = u64::MAX;

/// What the callers have put down for the ring's thread.
#[derive(Debug)]
pub(super) struct Inbox {
    state: Mutex<InboxState>,
    /// An eventfd: rung when there is something new to see here.
    bell: OwnedFd,
}

#[derive(Debug, Default)]
struct InboxState {
    ops: VecDeque<Op>,
    /// Why nothing is taken any more.
    ended: Option<String>,
}

impl Inbox {
    /// An empty one.
    pub(super) fn new() -> io::Result<Self> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Mutex::default(), bell })
    }

    /// Puts an operation down, or refuses it if the ring has ended.
    pub(super) fn put(&self, op: Op) {
        let mut state = self.state.lock();
        if let Some(reason) = &state.ended {
            let reason = reason.clone();
            drop(state);
            return op.refuse(&reason);
        }
        let first = state.ops.is_empty();
        state.ops.push_back(op);
        drop(state);
        // If it was not empty, whoever was first has rung already.
        if first {
            self.ring();
        }
    }

    /// Takes nothing any more; the thread ends when it has finished what it has.
    pub(super) fn close(&self) {
        let _first = self.state.lock().ended.get_or_insert_with(|| "the device is closed".into());
        self.ring();
    }

    /// Takes nothing any more and refuses what has not been taken.
    fn end(&self, reason: &str) {
        let mut state = self.state.lock();
        let _first = state.ended.get_or_insert_with(|| reason.into());
        let left = std::mem::take(&mut state.ops);
        drop(state);
        left.into_iter().for_each(|op| op.refuse(reason));
    }

    fn take(&self) -> (VecDeque<Op>, bool) {
        let mut state = self.state.lock();
        (std::mem::take(&mut state.ops), state.ended.is_some())
    }

    fn ring(&self) {
        let rung = write(&self.bell, &1_u64.to_ne_bytes());
        debug_assert!(rung.is_ok(), "an eventfd overflows after 2^64 writes");
    }

    fn silence(&self) {
        let mut count = [0; 8];
        // Would block: it has not rung.
        let silenced = read(&self.bell, &mut count);
        debug_assert!(matches!(silenced, Ok(8) | Err(Errno::AGAIN)), "{silenced:?}");
    }
}

/// The operations that the kernel has, each at the place that its completion will name.
#[derive(Debug, Default)]
struct Table {
    ops: Vec<Option<Op>>,
    free: Vec<usize>,
}

impl Table {
    fn is_empty(&self) -> bool {
        self.free.len() == self.ops.len()
    }

    /// Keeps an operation and returns what to tell the kernel.
    fn keep(&mut self, op: Op) -> squeue::Entry {
        let place = self.free.pop().unwrap_or(self.ops.len());
        let entry = op.entry().user_data(u64::try_from(place).unwrap_or(BELL));
        match self.ops.get_mut(place) {
            Some(free) => *free = Some(op),
            None => self.ops.push(Some(op)),
        }
        entry
    }

    /// Takes out the operation that a completion named.
    fn take(&mut self, place: u64) -> Option<Op> {
        let place = usize::try_from(place).ok()?;
        let op = self.ops.get_mut(place)?.take()?;
        self.free.push(place);
        Some(op)
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // Whatever ended the thread: the kernel may still write there.
        self.ops.drain(..).flatten().for_each(Op::strand);
    }
}

/// The ring; see the essay of the parent module.
pub(super) struct Ring {
    ring: IoUring,
    inbox: Arc<Inbox>,
    table: Table,
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Before the table goes: who hears of the end of an operation must not start another.
        self.inbox.end("the io_uring of the nvme device has failed: open the device again");
    }
}

impl Ring {
    /// Sets up a ring and has it do nothing, once, to see that it can.
    pub(super) fn new(inbox: Arc<Inbox>) -> io::Result<Self> {
        let needed = |what: &'static str| {
            move |error: io::Error| io::Error::new(error.kind(), format!("{what}: {error}"))
        };
        let ring = IoUring::new(RING_ENTRIES).map_err(needed("set up an io_uring"))?;
        let mut ring = Self { ring, inbox, table: Table::default() };
        let mut probe = Probe::new();
        ring.ring
            .submitter()
            .register_probe(&mut probe)
            .map_err(needed("ask io_uring what it can do"))?;
        let codes = [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE];
        let codes = codes.into_iter().chain([opcode::PollAdd::CODE, opcode::OpenAt::CODE]);
        if !codes.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's io_uring is too old",
            ));
        }
        ring.push(&opcode::Nop::new().build())?;
        ring.ring.submit_and_wait(1).map_err(needed("enter an io_uring"))?;
        let done = ring.ring.completion().next().map(|entry| entry.result());
        match done {
            Some(0) => Ok(ring),
            _ => Err(io::Error::other(format!("try an io_uring: {done:?}"))),
        }
    }

    /// Starts the thread.
    pub(super) fn start(mut self) -> io::Result<()> {
        self.arm()?;
        // Detached on purpose: it ends by itself, see the essay.
        let _detached = thread::Builder::new()
            .name("nvme-uring".into())
            .spawn(move || {
                if let Err(error) = self.serve() {
                    tracing::error!(%error, "the io_uring of the nvme device has failed");
                }
            })
            .map_err(|error| {
                io::Error::new(error.kind(), format!("start the nvme thread: {error}"))
            })?;
        Ok(())
    }

    /// Until the device has been dropped and all operations are over.
    fn serve(&mut self) -> io::Result<()> {
        while self.take()? {
            self.enter(1)?;
            self.reap()?;
        }
        Ok(())
    }

    /// Takes what is in the inbox; whether there is still something to do, now or later.
    fn take(&mut self) -> io::Result<bool> {
        let (ops, ended) = self.inbox.take();
        for op in ops {
            let entry = self.table.keep(op);
            self.push(&entry)?;
        }
        Ok(!ended || !self.table.is_empty())
    }

    /// Tells the kernel what is new and waits until `done` operations are over, or something else
    /// has woken it.
    fn enter(&mut self, done: usize) -> io::Result<()> {
        let Err(error) = self.ring.submit_and_wait(done) else { return Ok(()) };
        match error.raw_os_error() {
            Some(libc::EINTR) => Ok(()),
            // The kernel lacks memory at the moment; what it did not take is still queued.
            Some(libc::EAGAIN | libc::EBUSY) => {
                thread::yield_now();
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// One step of the thread that waits for nothing.
    #[cfg(test)]
    pub(super) fn after_a_step(mut self) -> io::Result<Self> {
        assert!(self.take()?);
        self.enter(0)?;
        Ok(self)
    }

    fn reap(&mut self) -> io::Result<()> {
        let done: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (place, result) in done {
            if place == BELL {
                if result < 0 && result != -libc::EINTR {
                    return Err(io::Error::from_raw_os_error(result.saturating_neg()));
                }
                self.inbox.silence();
                self.arm()?;
                continue;
            }
            match self.table.take(place) {
                Some(op) if result == -libc::EINTR => {
                    let entry = self.table.keep(op);
                    self.push(&entry)?;
                }
                Some(op) => op.finish(result),
                None => return Err(io::Error::other("the kernel reports what it was not asked")),
            }
        }
        Ok(())
    }

    /// Has the kernel tell when the bell rings next.
    fn arm(&mut self) -> io::Result<()> {
        let readable = u32::from(libc::POLLIN.unsigned_abs());
        let bell = types::Fd(self.inbox.bell.as_raw_fd());
        self.push(&opcode::PollAdd::new(bell, readable).build().user_data(BELL))
    }

    fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        let mut queue = self.ring.submission();
        // SAFETY: all that the entry points to is owned by an operation in the table, which stays
        // there until the kernel has reported its end and is never freed otherwise; the bell is
        // owned by the inbox, which outlives the ring.
        let pushed = unsafe { queue.push(entry) };
        // There is a place for each operation that may be under way.
        pushed.map_err(|full| io::Error::other(format!("the submission queue is {full}")))
    }
}
