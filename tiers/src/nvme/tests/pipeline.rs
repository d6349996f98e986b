//! Groups that are under way together: what one does to the other.

use std::{sync::Arc, time::Duration};

use futures_util::future::{join, join_all};

use super::{MIB, bench::Bench};
use crate::{
    nvme::{OpLabel, device::Device},
    store::BlockStore,
    testing::{Call, DeviceFault, FaultyDevice, MemoryIndex, VolatileDevice},
};

/// A tier whose groups have one block: it takes no two, and waits for none.
fn bench() -> (Arc<FaultyDevice>, Arc<VolatileDevice>, Bench) {
    let disk = Arc::new(VolatileDevice::new(64 * MIB));
    let faulty = Arc::new(FaultyDevice::new(Arc::<VolatileDevice>::clone(&disk), 1));
    let device: Arc<dyn Device> = Arc::<FaultyDevice>::clone(&faulty);
    let mut bench = Bench::new(device, Arc::new(MemoryIndex::new()));
    bench.len = 128 << 10;
    (faulty, disk, bench)
}

#[tokio::test(start_paused = true)]
async fn one_is_written_while_another_is_synced() {
    let (faulty, disk, bench) = bench();
    let running = bench.start();
    running.put(0).await;
    let before = disk.bytes_written();
    faulty.plan(Call::Sync, &[DeviceFault::Hang]);
    let release = async {
        // Time stands still while anybody can do anything.
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(faulty.hung(), 1, "one sync at a time");
        let written = disk.bytes_written() - before;
        faulty.release();
        written
    };
    let (put, written) = join(join_all((1..8).map(|n| running.try_put(n))), release).await;
    assert!(put.iter().all(Result::is_ok));
    let blocks = written / u64::from(bench.len);
    assert!((2..=4).contains(&blocks), "{blocks} blocks were written meanwhile");
}

#[tokio::test(start_paused = true)]
async fn a_block_that_is_put_twice_or_removed_meanwhile_counts_once() {
    let (.., bench) = bench();
    let running = bench.start();
    let first = running.put(3).await;
    let puts = [1, 2, 1, 2, 1, 4].map(|number| running.try_put(number));
    let removed = [(3, first), (4, first)];
    let (put, ()) = join(join_all(puts), running.remove(&removed)).await;
    let place = |at: usize| *put[at].as_ref().unwrap();
    // Who asks again gets the place that counts.
    running.put(5).await;
    assert_eq!(running.store.usage().blocks, 3);
    assert!(running.is_right(1, place(4)).await && running.is_right(2, place(3)).await);
    assert!(running.get(4, place(5)).await.is_none(), "its removal came later");
    drop(running);
    let again = bench.start();
    again.recovered().await;
    let found: Vec<u64> = again.found().iter().map(|(number, _)| *number).collect();
    assert_eq!(found, [1, 2, 5]);
    assert_eq!(again.store.usage().blocks, 3);
}

#[tokio::test(start_paused = true)]
async fn those_behind_a_failed_one_are_refused_and_those_before_it_are_there() {
    for (call, op) in [(Call::Write, OpLabel::Write), (Call::Sync, OpLabel::Sync)] {
        let (faulty, _, bench) = bench();
        let running = bench.start();
        faulty.plan(call, &[DeviceFault::None, DeviceFault::None, DeviceFault::Error]);
        let put = join_all((0..12).map(|number| running.try_put(number))).await;
        let stored: Vec<u64> = (0..).zip(&put).filter(|(_, p)| p.is_ok()).map(|(n, _)| n).collect();
        assert!(put[0].is_ok() || call == Call::Write, "{put:?}");
        assert!(put.iter().any(Result::is_err), "{put:?}");
        assert_eq!(running.store.metrics().errors(op).get(), 1);
        for number in &stored {
            let place = running.above.location(*number).unwrap();
            assert!(running.is_right(*number, place).await, "block {number}");
        }
        assert_eq!(running.store.usage().blocks, stored.len() as u64);
        // What was refused is owed a tombstone, and gets it when writing works again.
        tokio::time::sleep(Duration::from_secs(61)).await;
        let works = running.try_put(100).await.is_ok();
        assert_eq!(works, call == Call::Write, "a failed sync is final");
        drop(running);
        let again = bench.start();
        again.recovered().await;
        let found: Vec<u64> = again.found().iter().map(|(number, _)| *number).collect();
        assert!(stored.iter().all(|number| found.contains(number)), "{stored:?} {found:?}");
        if works {
            assert_eq!(found.len(), stored.len() + 1, "{stored:?} {found:?}");
        }
        again.put(101).await;
    }
}
