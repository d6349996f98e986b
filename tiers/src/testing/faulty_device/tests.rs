//! Each fault does what it says, and nothing else.

use std::task::Poll;

use super::*;
use crate::{
    nvme::device::{read_full, write_full},
    testing::VolatileDevice,
};

const FIRST: SegmentId = SegmentId(1);
const PAGES: usize = 4;

/// A device with a segment of four pages: ones, twos, threes, fours.
async fn device() -> FaultyDevice {
    let device = FaultyDevice::new(Arc::new(VolatileDevice::new(1 << 20)), 1);
    device.create(FIRST, 1 << 16).unwrap();
    let (_, written) = write_full(&device, FIRST, 0, gather(0)).await;
    written.unwrap();
    device
}

fn pages(more: u8) -> Vec<u8> {
    let bytes = (1..).take(PAGES).flat_map(|byte: u8| [byte + more; PAGE_BYTES]);
    bytes.collect()
}

fn gather(more: u8) -> Gather {
    let mut from = AlignedBuf::zeroed(PAGES * PAGE_BYTES);
    from.copy_from_slice(&pages(more));
    from.into()
}

fn landing() -> Landing {
    Landing::new(AlignedBuf::zeroed(PAGES * PAGE_BYTES), None)
}

async fn read(device: &FaultyDevice) -> Vec<u8> {
    let (landing, read) = read_full(device, FIRST, 0, landing()).await;
    read.unwrap();
    landing.head.to_vec()
}

/// Polls a future once.
async fn is_pending<T>(future: &mut BoxFuture<'static, T>) -> bool {
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

#[tokio::test]
async fn planned_errors_hit_the_next_calls_only() {
    let device = device().await;
    let calls = [Call::Read, Call::Write, Call::Sync, Call::Create];
    let calls = calls.into_iter().chain([Call::Truncate, Call::Remove, Call::SyncDirectory]);
    calls.for_each(|call| device.plan(call, &[DeviceFault::None, DeviceFault::Error]));
    for turn in 0..3 {
        let segment = SegmentId(10 + turn);
        let outcomes = [
            device.read(FIRST, 0, landing()).await.1.is_err(),
            device.write(FIRST, 0, gather(0)).await.1.is_err(),
            device.sync(FIRST, SyncPoint::Records).await.is_err(),
            device.create(segment, 4096).is_err(),
            device.truncate(FIRST, 1 << 15).is_err(),
            device.remove(segment).is_err(),
            device.sync_directory(SyncPoint::Deleted).is_err(),
        ];
        assert_eq!(outcomes, [turn == 1; 7], "turn {turn}");
    }
}

#[tokio::test]
async fn a_short_read_delivers_half_and_garbage() {
    let device = device().await;
    device.plan(Call::Read, &[DeviceFault::Short]);
    let (landing, read) = device.read(FIRST, 0, landing()).await;
    assert_eq!(read.unwrap(), PAGES / 2 * PAGE_BYTES);
    assert_eq!(landing.head[PAGE_BYTES], 2);
    assert!(landing.head[PAGES / 2 * PAGE_BYTES..].iter().all(|byte| *byte == GARBAGE));
}

#[tokio::test]
async fn full_reads_and_writes_go_on_behind_short_ones() {
    let device = device().await;
    device.plan(Call::Read, &[DeviceFault::Short; 2]);
    assert!(read(&device).await == *pages(0));
    device.plan(Call::Write, &[DeviceFault::Short; 2]);
    let (from, written) = write_full(&device, FIRST, 0, gather(7)).await;
    written.unwrap();
    assert!(*from.into_own() == *pages(7), "the buffer came back");
    assert!(read(&device).await == *pages(7));
}

#[tokio::test]
async fn a_creation_finds_no_space_as_planned() {
    let device = device().await;
    device.plan(Call::Create, &[DeviceFault::Full]);
    let error = device.create(SegmentId(2), 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert_eq!(device.list().unwrap().len(), 1);
    device.create(SegmentId(2), 4096).unwrap();
}

#[tokio::test]
async fn bits_flip_where_they_are_told_to() {
    let device = device().await;
    let page = u64::try_from(PAGE_BYTES).unwrap();
    device.flip(move |segment, offset| (segment == FIRST && offset == 2 * page).then_some(5));
    let wrong = read(&device).await;
    let places: Vec<usize> = (0..wrong.len()).filter(|at| wrong[*at] != pages(0)[*at]).collect();
    assert_eq!(places, [2 * PAGE_BYTES + 5]);
    device.heal();
    assert!(read(&device).await == *pages(0));
}

#[tokio::test(start_paused = true)]
async fn a_slow_call_takes_its_time() {
    let device = device().await;
    device.plan(Call::Read, &[DeviceFault::Slow(Duration::from_secs(3))]);
    let before = tokio::time::Instant::now();
    assert!(read(&device).await == *pages(0));
    assert_eq!(before.elapsed(), Duration::from_secs(3));
}

#[tokio::test]
async fn what_hangs_begins_when_it_is_released() {
    let device = device().await;
    device.plan(Call::Write, &[DeviceFault::Hang]);
    let mut hung = device.write(FIRST, 0, gather(9));
    assert!(is_pending(&mut hung).await);
    assert_eq!(device.hung(), 1);
    assert!(read(&device).await == *pages(0), "others go on");
    device.release();
    let (from, written) = hung.await;
    assert_eq!(written.unwrap(), from.len());
    assert_eq!(device.hung(), 0);
    assert!(read(&device).await == *pages(9));
}

#[tokio::test]
async fn what_hangs_and_was_given_up_keeps_its_buffer_until_released() {
    let device = device().await;
    device.plan(Call::Read, &[DeviceFault::Hang]);
    let mut hung = device.read(FIRST, 0, landing());
    assert!(is_pending(&mut hung).await);
    drop(hung);
    assert_eq!((device.hung(), device.shared.state.lock().stranded.len()), (1, 1));
    device.release();
    assert_eq!((device.hung(), device.shared.state.lock().stranded.len()), (0, 0));
}

#[tokio::test]
async fn chances_are_drawn_from_the_seed() {
    let failures = async |seed| {
        let device = FaultyDevice::new(Arc::new(VolatileDevice::new(1 << 20)), seed);
        device.create(FIRST, 1 << 16).unwrap();
        device.chance(Call::Sync, DeviceFault::Error, 300);
        let mut failed = Vec::new();
        for _ in 0..1000 {
            failed.push(device.sync(FIRST, SyncPoint::Records).await.is_err());
        }
        device.chance(Call::Sync, DeviceFault::Error, 0);
        assert!(device.sync(FIRST, SyncPoint::Records).await.is_ok());
        failed
    };
    let first = failures(1).await;
    let count = first.iter().filter(|failed| **failed).count();
    assert!((200..400).contains(&count), "{count}");
    assert!(first == failures(1).await && first != failures(2).await);
}
