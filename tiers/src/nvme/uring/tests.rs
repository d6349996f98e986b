//! Operations that hang, and a ring that fails: a pipe in the place of a segment reads like a disk
//! that does not answer until somebody writes to it.

use std::{
    io::{PipeWriter, Write},
    task::Poll,
};

use super::*;
use crate::nvme::device::read_full;

const PIPE: SegmentId = SegmentId(99);
const FIRST: SegmentId = SegmentId(1);
const PAGE: usize = 4096;

struct World {
    device: UringDevice,
    disk: PipeWriter,
    _directory: tempfile::TempDir,
}

/// Nothing where the kernel refuses io_uring.
fn world() -> Option<World> {
    let directory = tempfile::tempdir().unwrap();
    let files = PosixFiles::open(directory.path()).unwrap();
    let device = UringDevice::new(Arc::clone(&files)).ok()?;
    device.create(FIRST, 1 << 16).unwrap();
    let (hanging, disk) = io::pipe().unwrap();
    drop(files.keep(PIPE, hanging.into()));
    Some(World { device, disk, _directory: directory })
}

fn landing() -> Landing {
    Landing::new(AlignedBuf::zeroed(PAGE), None)
}

async fn poll<T>(future: &mut BoxFuture<'static, T>) -> Poll<T> {
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await
}

async fn begun(device: &UringDevice) -> Moved<Landing> {
    let mut read = device.read(PIPE, 0, landing());
    assert!(poll(&mut read).await.is_pending());
    read
}

async fn turns_come_back(turns: &Semaphore) {
    while turns.available_permits() < OPERATIONS_MAX {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn what_hangs_keeps_its_buffer_and_nobody_else() {
    let Some(World { device, mut disk, .. }) = world() else { return };
    let turns = Arc::clone(&device.shared.turns);
    drop(begun(&device).await);
    // Others go on.
    for _ in 0..1000 {
        read_full(&device, FIRST, 0, landing()).await.1.unwrap();
    }
    assert_eq!(turns.available_permits(), OPERATIONS_MAX - 1, "given up, not over");
    disk.write_all(&[1; PAGE]).unwrap();
    turns_come_back(&turns).await;
}

#[tokio::test]
async fn the_end_of_the_device_does_not_wait() {
    let Some(World { device, mut disk, .. }) = world() else { return };
    let shared = Arc::downgrade(&device.shared);
    let inbox = Arc::downgrade(&device.shared.inbox);
    let read = begun(&device).await;
    drop(device);
    disk.write_all(&[1; PAGE]).unwrap();
    let (landing, moved) = read.await;
    assert_eq!(moved.unwrap(), PAGE);
    assert!(landing.head.iter().all(|byte| *byte == 1));
    assert!(shared.upgrade().is_none());
    // The thread has let go too.
    while inbox.upgrade().is_some() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn no_more_are_under_way_than_the_ring_holds() {
    let Some(World { device, mut disk, .. }) = world() else { return };
    let mut reads = Vec::new();
    for _ in 0..OPERATIONS_MAX + 20 {
        reads.push(begun(&device).await);
    }
    assert_eq!(device.shared.turns.available_permits(), 0);
    let writer = std::thread::spawn(move || {
        for _ in 0..OPERATIONS_MAX + 20 {
            disk.write_all(&[1; PAGE]).unwrap();
        }
        disk
    });
    for read in reads {
        assert_eq!(read.await.1.unwrap(), PAGE);
    }
    drop(writer.join().unwrap());
}

/// What the thread does when it ends in any other way than by its own decision.
#[tokio::test]
async fn a_ring_that_fails_says_so_and_frees_nothing_that_the_kernel_has() {
    let Some(World { device, mut disk, .. }) = world() else { return };
    let inbox = Arc::new(Inbox::new().unwrap());
    let ring = Ring::new(Arc::clone(&inbox)).unwrap();
    let files = Arc::clone(&device.shared.files);
    let turns = Arc::new(Semaphore::new(OPERATIONS_MAX));
    let shared = Arc::new(Shared { files, inbox, turns });
    let broken = UringDevice { shared };

    let hung = begun(&broken).await;
    let ring = ring.after_a_step().unwrap();
    let queued = begun(&broken).await;
    drop(ring);

    let (landing_of_hung, moved) = hung.await;
    assert!(moved.unwrap_err().to_string().contains("open the device again"));
    assert!(landing_of_hung.head.is_empty(), "the kernel has it");
    let refused = broken.read(FIRST, 0, landing());
    for (operation, back) in [("queued", queued.await), ("refused", refused.await)] {
        let (landing, moved) = back;
        let error = moved.unwrap_err().to_string();
        assert!(error.contains("open the device again"), "{operation}: {error}");
        assert_eq!(landing.head.len(), PAGE, "{operation}: the kernel never had it");
    }
    // The kernel still writes where it was told to.
    disk.write_all(&[1; PAGE]).unwrap();
    read_full(&device, FIRST, 0, landing()).await.1.unwrap();
}
