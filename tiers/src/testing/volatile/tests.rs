//! What a crash may and may not do.

use super::*;
use crate::nvme::{
    aligned::AlignedBuf,
    device::{read_full, write_full},
};

const CRASHES: u64 = 1000;
const FIRST: SegmentId = SegmentId(1);

async fn write(device: &VolatileDevice, segment: SegmentId, page: u64, byte: u8) {
    let mut from = AlignedBuf::zeroed(PAGE_BYTES);
    from.fill(byte);
    write_full(device, segment, page * PAGE, from.into()).await.1.unwrap();
}

/// The bytes of a page, or nothing if the file or the page is not there.
async fn read(device: &VolatileDevice, segment: SegmentId, page: u64) -> Option<Vec<u8>> {
    let landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), None);
    let (landing, read) = read_full(device, segment, page * PAGE, landing).await;
    read.ok().map(|()| landing.head.to_vec())
}

/// A segment of 16 pages with everything synced; page 0 holds ones.
async fn synced() -> VolatileDevice {
    let device = VolatileDevice::new(1 << 20);
    device.create(FIRST, 16 * PAGE).unwrap();
    write(&device, FIRST, 0, 1).await;
    device.sync(FIRST, SyncPoint::Records).await.unwrap();
    device.sync_directory(SyncPoint::Created).unwrap();
    device
}

#[tokio::test]
async fn what_was_synced_survives_every_crash() {
    let device = synced().await;
    write(&device, FIRST, 1, 2).await;
    device.create(SegmentId(2), PAGE).unwrap();
    for seed in 0..CRASHES {
        let left = device.crash(seed);
        assert_eq!(read(&left, FIRST, 0).await, Some(vec![1; PAGE_BYTES]), "seed {seed}");
        // And goes on to: what is left after a crash is not volatile.
        let left = left.crash(seed + 1);
        assert_eq!(read(&left, FIRST, 0).await, Some(vec![1; PAGE_BYTES]), "seed {seed}");
        assert_eq!(left.list().unwrap().first(), Some(&(FIRST, 16 * PAGE)));
    }
}

#[tokio::test]
async fn what_was_not_synced_is_kept_lost_or_torn_at_sectors() {
    let device = synced().await;
    write(&device, FIRST, 0, 2).await;
    let (mut kept, mut lost, mut torn) = (0, 0, 0);
    for seed in 0..CRASHES {
        let page = read(&device.crash(seed), FIRST, 0).await.unwrap();
        for sector in page.chunks(SECTOR_BYTES) {
            assert!(sector.iter().all(|byte| *byte == sector[0]), "torn inside of a sector");
            assert!([1, 2].contains(&sector[0]), "a byte that nobody wrote");
        }
        let new = page.iter().filter(|byte| **byte == 2).count();
        match new {
            0 => lost += 1,
            PAGE_BYTES => kept += 1,
            _ => torn += 1,
        }
    }
    assert!(kept > 100 && lost > 100 && torn > 100, "{kept} kept, {lost} lost, {torn} torn");
}

#[tokio::test]
async fn a_later_write_may_survive_an_earlier_one() {
    let device = synced().await;
    write(&device, FIRST, 1, 3).await;
    write(&device, FIRST, 2, 3).await;
    let mut seen = [[0; 2]; 2];
    for seed in 0..CRASHES {
        let left = device.crash(seed);
        let is_kept = async |page| read(&left, FIRST, page).await == Some(vec![3; PAGE_BYTES]);
        let kept = (is_kept(1).await, is_kept(2).await);
        seen[usize::from(kept.0)][usize::from(kept.1)] += 1;
    }
    assert!(seen.as_flattened().iter().all(|times| *times > 50), "{seen:?}");
}

#[tokio::test]
async fn names_wait_for_the_sync_of_the_directory() {
    let device = synced().await;
    device.create(SegmentId(2), PAGE).unwrap();
    device.sync(SegmentId(2), SyncPoint::Records).await.unwrap();
    device.remove(FIRST).unwrap();
    let listed = |left: &VolatileDevice| {
        let segments = left.list().unwrap();
        segments.iter().map(|(segment, _)| segment.0).collect::<Vec<_>>()
    };
    let mut seen = HashMap::new();
    for seed in 0..CRASHES {
        *seen.entry(listed(&device.crash(seed))).or_insert(0) += 1;
    }
    for names in [vec![], vec![1], vec![2], vec![1, 2]] {
        assert!(seen.get(&names).is_some_and(|times| *times > 50), "{seen:?}");
    }
    device.sync_directory(SyncPoint::Deleted).unwrap();
    assert!((0..CRASHES).all(|seed| listed(&device.crash(seed)) == [2]));
}

#[tokio::test]
async fn a_file_may_come_back_longer_or_empty() {
    let device = synced().await;
    device.truncate(FIRST, PAGE).unwrap();
    device.create(SegmentId(2), PAGE).unwrap();
    device.sync_directory(SyncPoint::Created).unwrap();
    let mut seen = HashMap::new();
    for seed in 0..CRASHES {
        let lengths = device.crash(seed).list().unwrap();
        *seen.entry((lengths[0].1 / PAGE, lengths[1].1 / PAGE)).or_insert(0) += 1;
    }
    for lengths in [(16, 0), (16, 1), (1, 0), (1, 1)] {
        assert!(seen.get(&lengths).is_some_and(|times| *times > 50), "{seen:?}");
    }
    device.sync(FIRST, SyncPoint::Records).await.unwrap();
    assert!((0..CRASHES).all(|seed| device.crash(seed).list().unwrap()[0].1 == PAGE));
}

#[tokio::test]
async fn a_skipped_sync_does_nothing() {
    for point in SyncPoint::ALL {
        let device = VolatileDevice::new(1 << 20);
        device.create(SegmentId(9), PAGE).unwrap();
        device.sync_directory(SyncPoint::Created).unwrap();
        device.skip(Some(point));
        device.create(FIRST, PAGE).unwrap();
        write(&device, FIRST, 0, 5).await;
        device.sync(FIRST, SyncPoint::Records).await.unwrap();
        device.sync_directory(SyncPoint::Created).unwrap();
        device.remove(SegmentId(9)).unwrap();
        device.sync_directory(SyncPoint::Deleted).unwrap();
        let mut bad = 0;
        for seed in 0..CRASHES {
            let left = device.crash(seed);
            let is_whole = read(&left, FIRST, 0).await == Some(vec![5; PAGE_BYTES]);
            bad += u64::from(!is_whole || left.list().unwrap().len() != 1);
        }
        // A later sync of the directory makes up for a missing one.
        assert_eq!(bad > 100, point != SyncPoint::Created, "{point:?}: {bad} bad crashes");
    }
}

#[tokio::test]
async fn the_same_seed_crashes_the_same_way() {
    let device = synced().await;
    for page in 0..16 {
        write(&device, FIRST, page, 4).await;
    }
    let contents = async |seed| {
        let left = device.crash(seed);
        let mut pages = Vec::new();
        for page in 0..16 {
            pages.push(read(&left, FIRST, page).await);
        }
        pages
    };
    let mut different = 0;
    for seed in 0..100 {
        assert!(contents(seed).await == contents(seed).await);
        different += u64::from(contents(seed).await != contents(seed + 1).await);
    }
    assert!(different > 50, "{different}");
}

#[tokio::test]
async fn counters_and_capacity_are_kept() {
    let device = synced().await;
    assert_eq!((device.bytes_read(), device.bytes_written(), device.syncs()), (0, PAGE, 2));
    let _page = read(&device, FIRST, 0).await;
    assert_eq!(device.bytes_read(), PAGE);
    let error = device.create(SegmentId(2), 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert_eq!(device.list().unwrap().len(), 1);
    let space = device.space().unwrap();
    assert_eq!(space.allocated_bytes, 16 * PAGE);
    assert_eq!(space.available_bytes, (1 << 20) - 16 * PAGE);
    device.create(SegmentId(2), space.available_bytes).unwrap();
}

#[tokio::test]
async fn what_is_not_whole_pages_is_refused() {
    let device = synced().await;
    let landing = Landing::new(AlignedBuf::zeroed(PAGE_BYTES), None);
    let (_, read) = device.read(FIRST, 512, landing).await;
    assert_eq!(read.unwrap_err().kind(), ErrorKind::InvalidInput);
    let (_, written) = device.write(FIRST, 512, AlignedBuf::zeroed(PAGE_BYTES).into()).await;
    assert_eq!(written.unwrap_err().kind(), ErrorKind::InvalidInput);
}
