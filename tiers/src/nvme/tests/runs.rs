//! Segments as runs: what is in them, which are about to leave, and how reclaiming waits for copies.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::time::{Instant, advance, timeout};

use super::{
    MIB,
    bench::{Bench, Running},
};
use crate::{
    map::Location,
    nvme::{device::SegmentId, format::Place},
    store::{BlockStore, RunBlock, RunId, Runs},
    testing::{Call, DeviceFault, FaultyDevice, MemoryIndex, VolatileDevice, block_bytes, hash_of},
};

/// The blocks of all runs, in order.
async fn blocks(running: &Running) -> Vec<RunBlock> {
    let mut blocks = Vec::new();
    for run in running.store.sealed() {
        blocks.extend(running.store.contents(run).await.unwrap());
    }
    blocks
}

fn segment_of(location: Location) -> RunId {
    RunId(Place::of(location).segment.0)
}

/// A tier of 16 segments, and a disk that fails on demand.
fn faulty() -> (Arc<FaultyDevice>, Bench) {
    let device = Arc::new(VolatileDevice::new(64 * MIB));
    let device = Arc::new(FaultyDevice::new(device, 1));
    let bench = Bench::new(Arc::<FaultyDevice>::clone(&device), Arc::new(MemoryIndex::new()));
    (device, bench)
}

#[tokio::test]
async fn runs_have_what_was_put_in_its_order_also_after_a_restart() {
    let bench = Bench::in_memory(64 * MIB);
    let running = bench.start();
    let mut put = running.put_all(0..100).await;
    let open = segment_of(put[99].1);
    let removed = [put[3], put[40]];
    running.remove(&removed).await;
    put.retain(|(_, location)| segment_of(*location) != open);
    assert!(put.len() > 60 && put.len() < 100, "{}", put.len());
    let sealed: BTreeSet<RunId> = put.iter().map(|(_, location)| segment_of(*location)).collect();
    assert_eq!(running.store.sealed(), sealed.into_iter().collect::<Vec<_>>());
    put.retain(|block| !removed.contains(block));
    let there = blocks(&running).await;
    let found: Vec<_> = there.iter().map(|block| (block.hash, block.location)).collect();
    let expected: Vec<_> = put.iter().map(|(number, at)| (hash_of(*number), *at)).collect();
    assert_eq!(found, expected);
    let namespace = running.namespace();
    for ((number, _), block) in put.iter().zip(&there) {
        let bytes = running.store.read(block).await.unwrap().unwrap();
        assert_eq!(bytes, block_bytes(&namespace, *number, 0, 64 << 10), "block {number}");
        assert_eq!((block.len, block.namespace.id()), (64 << 10, namespace.id()));
    }
    assert!(running.store.contents(open).await.unwrap().is_empty(), "it is being written");
    drop(running);
    let again = bench.start();
    again.recovered().await;
    again.store.sealed_more().await;
    let mut after = blocks(&again).await;
    assert_eq!(after.len(), 100, "the map knows what of it was removed");
    after.retain(|block| !removed.iter().any(|(number, _)| hash_of(*number) == block.hash));
    let found: Vec<_> = after.iter().map(|block| (block.hash, block.location)).collect();
    // What was being written then is closed now.
    assert_eq!(found[..expected.len()], expected);
    assert_eq!(found.len(), 98);
}

#[tokio::test]
async fn what_is_not_a_whole_block_of_the_run_is_not_read() {
    let (device, bench) = faulty();
    let running = bench.start();
    let put = running.put_all(0..40).await;
    let there = blocks(&running).await;
    let (first, second) = (&there[0], &there[1]);
    // Removed since it was listed.
    running.remove(&put[..1]).await;
    assert_eq!(running.store.read(first).await.unwrap(), None);
    let forged = RunBlock { hash: hash_of(7), ..second.clone() };
    assert_eq!(running.store.read(&forged).await.unwrap(), None);
    let forged = RunBlock { checksums: first.checksums.clone(), ..second.clone() };
    assert_eq!(running.store.read(&forged).await.unwrap(), None);
    assert!(running.store.read(second).await.unwrap().is_some());
    let place = Place::of(second.location);
    let page = place.offset() + 8192;
    device.flip(move |id, at| (id == place.segment && at == page).then_some(7));
    assert_eq!(running.store.read(second).await.unwrap(), None, "damaged");
    device.heal();
    device.plan(Call::Read, &[DeviceFault::Error; 3]);
    assert!(running.store.read(&there[2]).await.is_err(), "the disk fails: ask again later");
    assert!(running.store.read(&there[2]).await.unwrap().is_some());
    let gone = RunId(999);
    assert!(running.store.contents(gone).await.unwrap().is_empty());
    let location = Place { segment: SegmentId(gone.0), unit: 1 }.location().unwrap();
    let gone = RunBlock { location, ..second.clone() };
    assert_eq!(running.store.read(&gone).await.unwrap(), None);
}

#[tokio::test]
async fn whoever_waits_is_woken_when_a_segment_is_closed() {
    let running = Bench::in_memory(64 * MIB).start();
    running.recovered().await;
    running.store.sealed_more().await;
    let moment = Duration::from_millis(20);
    assert!(timeout(moment, running.store.sealed_more()).await.is_err());
    running.put_all(0..20).await;
    running.store.sealed_more().await;
    assert_eq!(running.store.sealed(), [RunId(1)]);
}

#[tokio::test]
async fn the_oldest_that_were_not_offered_are_about_to_leave_when_there_is_little_room() {
    let running = Bench::in_memory(20 * MIB).start();
    running.put_all(0..16 * 14).await;
    assert_eq!(running.store.next_to_leave(), [], "sixteen of twenty");
    running.put_all(16 * 14..16 * 14 + 1).await;
    let leaving = running.store.next_to_leave();
    assert_eq!(leaving, [RunId(1)]);
    running.store.offered(RunId(1));
    assert_eq!(running.store.next_to_leave(), []);
}

#[tokio::test]
async fn a_disk_that_others_fill_has_little_room() {
    let device = Arc::new(VolatileDevice::new(8 * MIB));
    let bench = Bench::new(device, Arc::new(MemoryIndex::new()));
    assert_eq!(bench.config.capacity_bytes, 64 * MIB);
    let running = bench.start();
    running.put_all(0..90).await;
    let taken = running.store.core.segments.totals().file_bytes;
    assert!(taken > 5 * MIB, "no more is given up than has to be: {taken}");
    assert!(!running.store.next_to_leave().is_empty());
}

#[tokio::test(start_paused = true)]
async fn what_was_offered_leaves_before_what_was_not() {
    let running = Bench::in_memory(8 * MIB).start();
    running.store.hold_unoffered(true);
    running.put_all(0..80).await;
    // Not the oldest, which would go first.
    let offered = [RunId(3), RunId(4)];
    offered.into_iter().for_each(|run| running.store.offered(run));
    let mut sealed = running.store.sealed();
    for number in 80.. {
        if !sealed.contains(&RunId(3)) && !sealed.contains(&RunId(4)) {
            break;
        }
        running.put(number).await;
        sealed = running.store.sealed();
    }
    assert!(sealed.contains(&RunId(1)) && sealed.contains(&RunId(2)), "{sealed:?}");
    let metrics = running.store.metrics();
    assert_eq!((metrics.held_reclaims.get(), metrics.uncopied_segments.get()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn reclaiming_waits_for_an_offer_for_two_seconds_at_most_and_seldom() {
    let running = Bench::in_memory(8 * MIB).start();
    running.put_all(0..80).await;
    running.store.hold_unoffered(true);
    let started = Instant::now();
    // Many segments go, and nobody offers any.
    running.put_all(80..400).await;
    let waited = started.elapsed();
    assert!((2..4).contains(&waited.as_secs()), "{waited:?}");
    let metrics = running.store.metrics();
    assert_eq!(metrics.held_reclaims.get(), 1);
    assert!(metrics.uncopied_segments.get() > 10);
    advance(Duration::from_secs(18)).await;
    running.put_all(400..440).await;
    assert_eq!(metrics.held_reclaims.get(), 2, "once in a while it waits again");
}

#[tokio::test(start_paused = true)]
async fn an_offer_ends_the_wait_and_so_does_the_end() {
    let running = Arc::new(Bench::in_memory(8 * MIB).start());
    running.put_all(0..80).await;
    let store = Arc::clone(&running.store);
    store.hold_unoffered(true);
    let offer = async {
        while store.metrics().held_reclaims.get() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        store.offered(RunId(2));
    };
    let started = Instant::now();
    let put = async {
        for number in 80..1000 {
            running.put(number).await;
            if !store.sealed().contains(&RunId(2)) {
                return;
            }
        }
    };
    tokio::join!(offer, put);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(!store.sealed().contains(&RunId(2)) && store.sealed().contains(&RunId(1)));
    assert_eq!(store.metrics().uncopied_segments.get(), 0);
    advance(Duration::from_secs(60)).await;
    let started = Instant::now();
    let put = async {
        for number in 1000..2000 {
            if running.try_put(number).await.is_err() {
                return;
            }
        }
    };
    let close = async {
        while store.metrics().held_reclaims.get() < 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        store.close().await.unwrap();
    };
    tokio::join!(put, close);
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
}
