//! The engine that works everywhere: `preadv`, `pwritev` and `fdatasync` on a bounded pool of threads.
//!
//! A job owns the buffer that it moves, and the thread that runs it owns the job: a caller that goes
//! away leaves both alone. At most [`OPERATIONS_MAX`] jobs are queued or running; more callers wait
//! for their turn without a thread. The threads are not joined: when the device is dropped they
//! finish what is queued and end, and one that hangs in the kernel keeps nobody but itself.

use std::{
    collections::VecDeque,
    fmt,
    io::{self, IoSlice, IoSliceMut},
    sync::Arc,
    thread,
};

use parking_lot::{Condvar, Mutex};
use rustix::io::{preadv, pwritev, retry_on_intr};
use tokio::sync::{Semaphore, oneshot};

use super::{
    aligned::AlignedBuf,
    device::{Device, Landing, Moved, SegmentId, Space, SyncPoint},
    gather::Gather,
    posix::{MOVE_BYTES_MAX, MOVE_SLICES_MAX, PosixFiles, failed},
    turn::turn,
};
use crate::store::BoxFuture;

/// Threads of the pool, which is how many operations the disk sees at once: enough to keep a flash
/// disk busy with reads of 2 MiB, few enough that all of them hanging is no burden.
const THREADS: usize = 32;

/// Operations queued or running.
const OPERATIONS_MAX: usize = 256;

type Job = Box<dyn FnOnce(&PosixFiles) + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

struct Pool {
    files: Arc<PosixFiles>,
    queue: Mutex<Queue>,
    /// Rung for every job, and for all threads at the end.
    bell: Condvar,
    turns: Arc<Semaphore>,
}

impl Pool {
    /// Runs `work` on a thread of the pool. `None` if the device is gone, or the thread died of it.
    async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&PosixFiles) -> T + Send + 'static,
    ) -> Option<T> {
        let turn = turn(&self.turns).await?;
        let (done, outcome) = oneshot::channel();
        {
            let mut queue = self.queue.lock();
            if queue.closed {
                return None;
            }
            queue.jobs.push_back(Box::new(move |files| {
                let outcome = work(files);
                drop(turn);
                // Nobody waits any more? Then the buffer ends here, after the operation.
                drop(done.send(outcome));
            }));
        }
        self.bell.notify_one();
        outcome.await.ok()
    }

    /// What each thread does.
    fn serve(&self) {
        loop {
            let mut queue = self.queue.lock();
            let job = loop {
                match queue.jobs.pop_front() {
                    Some(job) => break job,
                    None if queue.closed => return,
                    None => self.bell.wait(&mut queue),
                }
            };
            drop(queue);
            job(&self.files);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} jobs queued)", self.queue.lock().jobs.len())
    }
}

/// Moves bytes with `preadv` and `pwritev`.
#[derive(Debug)]
pub(super) struct PreadDevice {
    pool: Arc<Pool>,
}

impl PreadDevice {
    /// Starts the threads.
    pub(super) fn new(files: Arc<PosixFiles>) -> io::Result<Self> {
        let pool = Arc::new(Pool {
            files,
            queue: Mutex::default(),
            bell: Condvar::new(),
            turns: Arc::new(Semaphore::new(OPERATIONS_MAX)),
        });
        // Made before the threads: if one of them cannot start, dropping it ends the others.
        let device = Self { pool };
        for number in 0..THREADS {
            let pool = Arc::clone(&device.pool);
            // Detached on purpose: it ends by itself, see the essay.
            let _detached = thread::Builder::new()
                .name(format!("nvme-io-{number}"))
                .spawn(move || pool.serve())
                .map_err(|error| {
                    io::Error::new(error.kind(), format!("start an nvme thread: {error}"))
                })?;
        }
        Ok(device)
    }
}

impl Drop for PreadDevice {
    fn drop(&mut self) {
        self.pool.queue.lock().closed = true;
        self.pool.bell.notify_all();
    }
}

impl Device for PreadDevice {
    fn name(&self) -> &'static str {
        "pread"
    }

    fn list(&self) -> io::Result<Vec<(SegmentId, u64)>> {
        self.pool.files.list()
    }

    fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        self.pool.files.create(segment, bytes)
    }

    fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        self.pool.files.truncate(segment, bytes)
    }

    fn remove(&self, segment: SegmentId) -> io::Result<()> {
        self.pool.files.remove(segment)
    }

    fn sync_directory(&self, _why: SyncPoint) -> io::Result<()> {
        self.pool.files.sync_directory()
    }

    fn space(&self) -> io::Result<Space> {
        self.pool.files.space()
    }

    fn read(&self, segment: SegmentId, offset: u64, mut landing: Landing) -> Moved<Landing> {
        let pool = Arc::clone(&self.pool);
        Box::pin(async move {
            let work = move |files: &PosixFiles| {
                let read = read_now(files, segment, offset, &mut landing);
                (landing, read)
            };
            let done = pool.run(work).await;
            done.unwrap_or_else(|| (Landing::new(AlignedBuf::zeroed(0), None), Err(gone())))
        })
    }

    fn write(&self, segment: SegmentId, offset: u64, from: Gather) -> Moved<Gather> {
        let pool = Arc::clone(&self.pool);
        Box::pin(async move {
            let work = move |files: &PosixFiles| {
                let written = write_now(files, segment, offset, &from);
                (from, written)
            };
            pool.run(work).await.unwrap_or_else(|| (Gather::default(), Err(gone())))
        })
    }

    fn sync(&self, segment: SegmentId, _why: SyncPoint) -> BoxFuture<'static, io::Result<()>> {
        let pool = Arc::clone(&self.pool);
        Box::pin(async move {
            let work = move |files: &PosixFiles| {
                let file = files.file(segment)?;
                retry_on_intr(|| rustix::fs::fdatasync(&file))
                    .map_err(|errno| failed(&format!("sync {segment:?}"), errno))
            };
            pool.run(work).await.unwrap_or_else(|| Err(gone()))
        })
    }
}

fn read_now(
    files: &PosixFiles,
    segment: SegmentId,
    offset: u64,
    landing: &mut Landing,
) -> io::Result<usize> {
    let file = files.file(segment)?;
    let mut room = MOVE_BYTES_MAX;
    let mut slices: Vec<IoSliceMut<'_>> = Vec::with_capacity(2);
    for slice in landing.slices() {
        let taken = room.min(slice.len());
        room -= taken;
        slices.extend(slice.get_mut(..taken).map(IoSliceMut::new));
    }
    retry_on_intr(|| preadv(&file, &mut slices, offset))
        .map_err(|errno| failed(&format!("read {segment:?} at {offset}"), errno))
}

fn write_now(
    files: &PosixFiles,
    segment: SegmentId,
    offset: u64,
    from: &Gather,
) -> io::Result<usize> {
    let file = files.file(segment)?;
    let mut room = MOVE_BYTES_MAX;
    let slices = from.slices().take(MOVE_SLICES_MAX).map(|slice| {
        let taken = slice.get(..room).unwrap_or(slice);
        room -= taken.len();
        IoSlice::new(taken)
    });
    let slices: Vec<_> = slices.collect();
    retry_on_intr(|| pwritev(&file, &slices, offset))
        .map_err(|errno| failed(&format!("write {segment:?} at {offset}"), errno))
}

fn gone() -> io::Error {
    io::Error::other("use an nvme device that is closed")
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, task::Poll};

    use super::*;
    use crate::nvme::device::read_full;

    /// A device whose threads all hang until the sender is dropped, and what waits for them.
    async fn hung(
        files: Arc<PosixFiles>,
    ) -> (PreadDevice, mpsc::Sender<()>, Vec<BoxFuture<'static, ()>>) {
        let device = PreadDevice::new(files).unwrap();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let mut waiting: Vec<BoxFuture<'static, ()>> = Vec::new();
        for _ in 0..THREADS {
            let (pool, released) = (Arc::clone(&device.pool), Arc::clone(&released));
            let mut hanging: BoxFuture<'static, ()> = Box::pin(async move {
                let hang = move |_: &PosixFiles| assert!(released.lock().recv().is_err());
                pool.run(hang).await.unwrap();
            });
            assert!(is_pending(&mut hanging).await);
            waiting.push(hanging);
        }
        (device, release, waiting)
    }

    async fn is_pending<T>(future: &mut BoxFuture<'static, T>) -> bool {
        std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending()))
            .await
    }

    #[tokio::test]
    async fn a_hung_pool_hangs_nobody_at_the_end_and_finishes_what_it_took() {
        let directory = tempfile::tempdir().unwrap();
        let files = PosixFiles::open(directory.path()).unwrap();
        let (device, release, waiting) = hung(Arc::clone(&files)).await;
        device.create(SegmentId(1), 4096).unwrap();
        let mut read = device.read(SegmentId(1), 0, Landing::new(AlignedBuf::zeroed(4096), None));
        assert!(is_pending(&mut read).await);
        drop(device);
        assert!(is_pending(&mut read).await);
        // Another one in the same place is not concerned.
        let other = PreadDevice::new(files).unwrap();
        let landing = Landing::new(AlignedBuf::zeroed(4096), None);
        read_full(&other, SegmentId(1), 0, landing).await.1.unwrap();
        drop(release);
        assert_eq!(read.await.1.unwrap(), 4096);
        for hanging in waiting {
            hanging.await;
        }
    }

    #[tokio::test]
    async fn no_more_are_queued_than_may_be() {
        let directory = tempfile::tempdir().unwrap();
        let files = PosixFiles::open(directory.path()).unwrap();
        let (device, release, waiting) = hung(files).await;
        device.create(SegmentId(1), 4096).unwrap();
        let mut syncs = Vec::new();
        for _ in 0..OPERATIONS_MAX * 2 {
            let mut sync = device.sync(SegmentId(1), SyncPoint::Records);
            assert!(is_pending(&mut sync).await);
            syncs.push(sync);
        }
        assert!(device.pool.queue.lock().jobs.len() <= OPERATIONS_MAX);
        assert_eq!(device.pool.turns.available_permits(), 0);
        drop(release);
        for sync in syncs {
            sync.await.unwrap();
        }
        for hanging in waiting {
            hanging.await;
        }
        assert_eq!(device.pool.turns.available_permits(), OPERATIONS_MAX);
    }
}
