//! A disk and an index that fail: nothing wrong is read, what is there is served, and writing goes on
//! when the cause is gone.

use std::{io, sync::Arc, time::Duration};

use tokio::time::Instant;

use super::rig::{Life, MANY, Rig, SEGMENT_BYTES};
use crate::{
    error::ErrorKind,
    nvme::{OpLabel, RejectLabel, StateLabel, device::Device, index::Change},
    store::{BlockStore, Load},
    testing::{Arena, Call, DeviceFault, hash_of},
};

async fn assert_all(life: &Life) {
    assert_eq!(life.lost().await, Vec::<u64>::new());
}

/// Waits until writes are tried again after a failure.
async fn pause_over() {
    tokio::time::sleep(Duration::from_secs(61)).await;
}

#[tokio::test(start_paused = true)]
async fn a_read_that_fails_once_is_tried_again_by_the_next_who_asks() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.plan(Call::Read, &[DeviceFault::Error]);
    assert_eq!(life.lost().await, [0]);
    assert_eq!(life.metrics().errors(OpLabel::Read).get(), 1);
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_reads_nothing_is_all_misses_and_recovers() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.chance(Call::Read, DeviceFault::Error, 1000);
    assert_eq!(life.lost().await.len() as u64, MANY);
    assert_eq!(life.metrics().errors(OpLabel::Read).get(), MANY);
    rig.device.heal();
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fails_now_and_then_at_the_start_loses_nothing() {
    for lose in [false, true] {
        let rig = Rig::filled().await;
        if lose {
            rig.lose_index();
        }
        rig.device.chance(Call::Read, DeviceFault::Error, 100);
        let life = rig.start().await;
        rig.device.heal();
        assert_all(&life).await;
        life.works(&rig).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_without_readable_segments_deletes_none() {
    let rig = Rig::filled().await;
    let files = rig.device.list().unwrap();
    rig.lose_index();
    rig.device.chance(Call::Read, DeviceFault::Error, 1000);
    let life = rig.start().await;
    assert_eq!(life.lost().await.len() as u64, MANY);
    drop(life);
    rig.device.heal();
    assert_eq!(rig.device.list().unwrap(), files);
    let life = rig.start().await;
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn short_reads_and_writes_are_no_fault() {
    let rig = Rig::new();
    rig.device.chance(Call::Read, DeviceFault::Short, 700);
    rig.device.chance(Call::Write, DeviceFault::Short, 700);
    rig.fill().await;
    let life = rig.start().await;
    assert_all(&life).await;
    assert_eq!(life.metrics().errors(OpLabel::Read).get(), 0);
    assert_eq!(rig.verify().await.problems, []);
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_write_refuses_its_blocks_and_no_others() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.plan(Call::Write, &[DeviceFault::Error]);
    assert!(!life.try_put(1000).await);
    assert_eq!(life.metrics().errors(OpLabel::Write).get(), 1);
    assert_eq!(life.metrics().state(), StateLabel::Failing);
    assert_all(&life).await;
    pause_over().await;
    let again = life.works(&rig).await;
    assert_all(&again).await;
    assert_eq!(again.metrics().state(), StateLabel::Ready);
}

#[tokio::test(start_paused = true)]
async fn the_first_write_of_a_namespace_may_fail() {
    let rig = Rig::new();
    let life = rig.start().await;
    rig.device.plan(Call::Write, &[DeviceFault::Error]);
    assert!(!life.try_put(1000).await);
    pause_over().await;
    life.put(0..MANY).await;
    drop(life);
    assert_all(&rig.start().await).await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_takes_no_writes_keeps_what_it_has() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.chance(Call::Write, DeviceFault::Error, 1000);
    let files = rig.device.list().unwrap().len();
    for number in 1000..1100 {
        assert!(!life.try_put(number).await);
        pause_over().await;
    }
    assert!(rig.device.list().unwrap().len() <= files + 1, "no heap of abandoned segments");
    assert_all(&life).await;
    rig.device.heal();
    assert_all(&life.works(&rig).await).await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_sync_is_read_only_until_the_restart() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.plan(Call::Sync, &[DeviceFault::Error]);
    assert!(!life.try_put(1000).await);
    assert_eq!(life.metrics().errors(OpLabel::Sync).get(), 1);
    assert_eq!(life.metrics().state(), StateLabel::ReadOnly);
    pause_over().await;
    assert!(!life.try_put(1001).await, "for good");
    assert!(life.metrics().rejected(RejectLabel::State).get() > 0);
    assert_all(&life).await;
    // A removal cannot be made durable; the index forgets it all the same.
    life.remove(0..5).await;
    assert_eq!(life.lost().await, [0, 1, 2, 3, 4]);
    drop(life);
    let life = rig.start().await;
    assert_eq!(life.lost().await, [0, 1, 2, 3, 4]);
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn a_segment_that_cannot_be_made_stops_writes_for_a_while() {
    for (call, fault) in [(Call::Create, DeviceFault::Error), (Call::Create, DeviceFault::Full)] {
        let rig = Rig::filled().await;
        let life = rig.start().await;
        rig.device.plan(call, &[fault, fault, fault]);
        let refused = !life.try_put(1000).await;
        assert!(refused, "{fault:?}");
        let state = life.metrics().state();
        assert!([StateLabel::Failing, StateLabel::Full].contains(&state), "{state:?}");
        // A full disk may cost the oldest segment, once.
        assert!(life.lost().await.len() <= 16);
        rig.device.heal();
        pause_over().await;
        life.works(&rig).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_cannot_be_synced_is_read_only() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.plan(Call::SyncDirectory, &[DeviceFault::Error]);
    assert!(!life.try_put(1000).await);
    assert_eq!(life.metrics().state(), StateLabel::ReadOnly);
    assert_all(&life).await;
    drop(life);
    let life = rig.start().await;
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn hung_reads_are_bounded_and_over_when_the_disk_is_back() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    let index = Arc::clone(&rig.index);
    let key = rig.records().await.last().unwrap().1.key;
    let location = index.get(&key).unwrap().unwrap().location;
    rig.device.chance(Call::Read, DeviceFault::Hang, 1000);
    let arena = Arena::new(32 << 20).unwrap();
    let wanted = crate::store::Wanted { namespace: key.namespace, hash: key.hash, location };
    let mut waves = Vec::new();
    for _ in 0..3 {
        let started = Instant::now();
        let gets = (0..100).map(async |_| {
            let got = life.store.get(wanted, arena.writer(super::rig::LEN).unwrap()).await;
            matches!(got.unwrap(), Load::Busy(_))
        });
        let busy = futures_util::future::join_all(gets).await;
        assert!(busy.iter().all(|busy| *busy), "not a miss: the block is there");
        waves.push((started.elapsed(), rig.device.hung()));
    }
    assert!(waves.iter().all(|(elapsed, hung)| elapsed.as_secs() < 3 && *hung <= 64), "{waves:?}");
    assert!(life.metrics().read_timeouts.get() >= 64);
    assert!(life.metrics().reads_refused.get() >= 100);
    rig.device.heal();
    rig.device.release();
    tokio::task::yield_now().await;
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn a_hung_write_holds_up_neither_callers_nor_reads_nor_the_end() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.chance(Call::Write, DeviceFault::Hang, 1000);
    let started = Instant::now();
    assert!(!life.try_put(1000).await);
    assert!(started.elapsed() < Duration::from_secs(40), "{:?}", started.elapsed());
    assert_all(&life).await;
    let started = Instant::now();
    assert_eq!(life.store.close().await.unwrap_err().kind(), ErrorKind::Timeout);
    assert!(started.elapsed() < Duration::from_secs(6));
    drop(life);
    rig.device.heal();
    rig.device.release();
    let life = rig.start().await;
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn a_put_that_nobody_waits_for_does_not_come_back_after_a_removal() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.device.chance(Call::Write, DeviceFault::Hang, 1000);
    // Given up after half a minute, and written after all.
    assert!(!life.try_put(1000).await);
    rig.device.heal();
    rig.device.release();
    tokio::time::sleep(Duration::from_secs(1)).await;
    life.remove([1000]).await;
    for lose in [false, true] {
        if lose {
            rig.lose_index();
        }
        let again = rig.start().await;
        assert!(again.hits([1000]).await.is_empty(), "index lost: {lose}");
        assert_all(&again).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_index_that_fails_for_a_while_keeps_the_order_of_the_log() {
    for kind in [io::ErrorKind::StorageFull, io::ErrorKind::Other] {
        let rig = Rig::filled().await;
        let life = rig.start().await;
        // Two tries for each group: a put, then a removal, then the index is back.
        rig.memory.fail_next(4, kind);
        assert!(!life.try_put(1000).await);
        assert_eq!(life.metrics().errors(OpLabel::Index).get(), 1);
        life.remove(0..5).await;
        assert_all_but_first_five(&life).await;
        // Its put was refused, so nobody will remove it from the tier.
        life.remove([1000]).await;
        pause_over().await;
        life.put(2000..2010).await;
        drop(life);
        for lose in [false, true] {
            if lose {
                rig.lose_index();
            }
            let again = rig.start().await;
            assert_all_but_first_five(&again).await;
            assert_eq!(again.hits(2000..2010).await.len(), 10);
            assert!(again.hits([1000]).await.is_empty(), "index lost: {lose}");
        }
        assert_eq!(rig.verify().await.problems, []);
        rig.start().await.works(&rig).await;
    }
}

async fn assert_all_but_first_five(life: &Life) {
    assert_eq!(life.lost().await, [0, 1, 2, 3, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_kill_while_the_index_fails_undoes_no_removal() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.memory.fail_next(1000, io::ErrorKind::Other);
    life.remove(0..5).await;
    drop(life);
    rig.memory.fail_next(0, io::ErrorKind::Other);
    let life = rig.start().await;
    assert_all_but_first_five(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn an_index_that_fails_at_the_start_leaves_all_for_the_next_one() {
    let rig = Rig::filled().await;
    rig.lose_index();
    rig.memory.fail_next(u32::MAX, io::ErrorKind::StorageFull);
    let started = Instant::now();
    let life = rig.start().await;
    assert!(started.elapsed() < Duration::from_secs(10));
    assert_eq!(life.metrics().state(), StateLabel::ReadOnly);
    assert!(life.metrics().errors(OpLabel::Index).get() > 0);
    life.lost().await;
    assert!(!life.try_put(1000).await);
    drop(life);
    rig.memory.fail_next(0, io::ErrorKind::Other);
    let life = rig.start().await;
    assert_all(&life).await;
    life.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn removals_while_the_index_fails_for_hours_take_bounded_memory() {
    let rig = Rig::filled().await;
    let life = rig.start().await;
    rig.memory.fail_next(u32::MAX, io::ErrorKind::Other);
    let namespace = *life.namespace.id();
    for round in 0..40 {
        let location = rig.index.get(&rig.records().await[1].1.key).unwrap().unwrap().location;
        let blocks = (0..2000_u64).map(|number| {
            let hash = hash_of(100_000 + round * 2000 + number);
            crate::store::Wanted { namespace, hash, location }
        });
        let blocks: Vec<_> = blocks.collect();
        drop(life.store.remove(&blocks).await);
    }
    assert_eq!(life.metrics().state(), StateLabel::ReadOnly, "it gives up at some point");
    drop(life);
    rig.memory.fail_next(0, io::ErrorKind::Other);
    rig.start().await.works(&rig).await;
}

#[tokio::test(start_paused = true)]
async fn reclaiming_with_an_index_that_fails_tells_the_truth() {
    let mut rig = Rig::new();
    rig.config.capacity_bytes = 4 * SEGMENT_BYTES;
    let life = rig.start().await;
    life.put(0..30).await;
    for round in 0..60_u64 {
        if round % 7 == 3 {
            rig.memory.fail_next(3, io::ErrorKind::Other);
        }
        life.try_put(100 + round).await;
        pause_over().await;
    }
    let hits = life.hits(0..200).await;
    assert!(hits.len() > 20, "{hits:?}");
    drop(life);
    let again = rig.start().await;
    let found = again.hits(0..200).await;
    assert!(found.len() > 20, "{found:?}");
    let report = rig.verify().await;
    assert_eq!(report.problems, []);
    rig.index.apply(&[Change::Forget(crate::nvme::device::SegmentId(1))]).unwrap();
    again.works(&rig).await;
}
