//! The whole tier: the contract on every device and index, reclaiming, restarts, faults.

mod bench;
mod damage;
mod described;
mod edges;
mod faults;
#[cfg(feature = "rocksdb")]
mod files;
#[cfg(feature = "rocksdb")]
mod fixture;
mod pipeline;
mod rig;
mod runs;
mod simulation;

use std::sync::Arc;

use self::bench::Bench;
use super::{
    NvmeStore,
    device::{Device, Engine, open},
    index::Index,
};
use crate::testing::{Call, DeviceFault, FaultyDevice, MemoryIndex, VolatileDevice, suite};

const MIB: u64 = 1 << 20;

#[tokio::test]
async fn the_tier_in_memory_keeps_the_contract() {
    let bench = Bench::in_memory(64 * MIB);
    let running = bench.start();
    suite::run(Arc::<NvmeStore>::clone(&running.store)).await;
}

#[cfg(feature = "rocksdb")]
#[tokio::test(flavor = "multi_thread")]
async fn the_tier_on_disk_keeps_the_contract_with_every_engine() {
    for engine in [Engine::Pread, Engine::Auto] {
        let directory = tempfile::tempdir().unwrap();
        let segments = directory.path().join("segments");
        std::fs::create_dir(&segments).unwrap();
        let index = super::index::RocksIndex::open(&directory.path().join("index"), 16 << 20);
        let bench = Bench::new(open(&segments, engine).unwrap(), Arc::new(index.unwrap()));
        let running = bench.start();
        suite::run(Arc::<NvmeStore>::clone(&running.store)).await;
    }
}

#[tokio::test]
async fn a_restart_finds_what_was_put_and_not_what_was_removed() {
    let device = Arc::new(VolatileDevice::new(64 * MIB));
    let index: Arc<dyn Index> = Arc::new(MemoryIndex::new());
    let bench = Bench::new(Arc::<VolatileDevice>::clone(&device), Arc::clone(&index));
    let running = bench.start();
    let mut kept = running.put_all(0..200).await;
    let removed: Vec<_> = kept.extract_if(.., |(number, _)| *number % 3 == 0).collect();
    running.remove(&removed).await;
    // As a kill: nothing is closed.
    drop(running);
    let again = Bench::new(device, index).start();
    again.recovered().await;
    assert_eq!(again.found(), kept);
    for (number, location) in kept {
        assert!(again.is_right(number, location).await, "block {number}");
    }
}

#[tokio::test]
async fn a_lost_index_is_made_again_from_the_segments() {
    let device = Arc::new(VolatileDevice::new(64 * MIB));
    let bench = Bench::new(Arc::<VolatileDevice>::clone(&device), Arc::new(MemoryIndex::new()));
    let running = bench.start();
    let mut kept = running.put_all(0..200).await;
    let removed: Vec<_> = kept.extract_if(.., |(number, _)| *number % 3 == 0).collect();
    running.remove(&removed).await;
    kept.extend(running.put_all(1000..1050).await);
    drop(running);
    let again = Bench::new(device, Arc::new(MemoryIndex::new())).start();
    let recovered = again.recovered().await;
    assert!(recovered.replayed >= 250, "{recovered:?}");
    assert_eq!(again.found(), kept);
}

#[tokio::test]
async fn reclaiming_keeps_what_is_hot_and_tells_of_what_leaves() {
    let bench = Bench::in_memory(8 * MIB);
    let running = bench.start();
    // 8 segments of 1 MiB hold about 100 blocks of 64 KiB with their headers.
    for number in 0..400 {
        running.put(number).await;
        // The first ten are used all the time.
        running.above.touch_all(0..10);
    }
    let there: Vec<u64> = running.above.there().into_iter().map(|(number, _)| number).collect();
    assert!((0..10).all(|hot| there.contains(&hot)), "{there:?}");
    assert!((370..400).all(|new| there.contains(&new)), "{there:?}");
    assert!((70..130).contains(&there.len()), "{}", there.len());
    for (number, location) in running.above.there() {
        assert!(running.is_right(number, location).await, "block {number}");
    }
    assert!(running.store.metrics().reclaimed_segments.get() > 10);
    assert!(running.store.metrics().moved_bytes.get() > 0);
}

#[tokio::test(start_paused = true)]
async fn what_a_start_vouches_for_survives_a_loss_of_power() {
    let disk = Arc::new(VolatileDevice::new(64 * MIB));
    let faulty = Arc::new(FaultyDevice::new(Arc::<VolatileDevice>::clone(&disk), 1));
    let index = Arc::new(MemoryIndex::new());
    let bench = Bench::new(Arc::<FaultyDevice>::clone(&faulty), Arc::<MemoryIndex>::clone(&index));
    let running = bench.start();
    running.put(0).await;
    // Killed between the write and the sync.
    faulty.plan(Call::Sync, &[DeviceFault::Hang]);
    let put = tokio::time::timeout(std::time::Duration::from_secs(1), running.try_put(1));
    assert!(put.await.is_err(), "it waits for the sync");
    drop(running);
    let disk_now: Arc<dyn Device> = Arc::<VolatileDevice>::clone(&disk);
    let again = Bench::new(disk_now, Arc::<MemoryIndex>::clone(&index)).start();
    again.recovered().await;
    let found = again.found();
    assert_eq!(found.len(), 2);
    for seed in 0..50 {
        let (disk, index) = (disk.crash(seed), index.crash(seed));
        let after = Bench::new(Arc::new(disk), Arc::new(index)).start();
        after.recovered().await;
        for (number, location) in &found {
            assert!(after.is_right(*number, *location).await, "block {number}, SEED={seed}");
        }
    }
}
