//! The cleaner: what puts store gets to nvme, and nothing that fails is lost, hot or silent.

use std::time::Duration;

use tokio::sync::oneshot;

use super::*;
use crate::{
    admission::Admission,
    limits::{CLEANER_BLOCKS_MAX, CLEANER_QUEUE_MAX},
    metrics::Undemoted,
    store::Urgency,
    testing::{Fault, Faulty, MemoryStore},
};

struct Tiers {
    fixture: Fixture,
    namespace: Arc<Namespace>,
    nvme: Arc<MemoryStore>,
    faults: Arc<Faulty>,
}

fn tiers(dram_bytes: u64, block_bytes: u32) -> Tiers {
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
    let faults = Arc::new(Faulty::new(Arc::clone(&nvme) as Arc<dyn BlockStore>));
    let cold = vec![Arc::clone(&faults) as Arc<dyn BlockStore>];
    let fixture = Fixture::new(dram_bytes, cold).unwrap();
    let namespace = fixture.namespace("m", &[block_bytes]).unwrap();
    Tiers { fixture, namespace, nvme, faults }
}

impl Tiers {
    /// Runs `act` beside the cleaner, then stops that.
    async fn cleaning<T>(&self, act: impl Future<Output = T>) -> T {
        let (stop, stopped) = oneshot::channel::<()>();
        let acting = async {
            let done = act.await;
            drop(stop);
            done
        };
        let (done, ()) = tokio::join!(
            acting,
            self.fixture.stack.clean(async {
                drop(stopped.await);
            })
        );
        done
    }

    fn put(&self, numbers: std::ops::Range<u64>) {
        let numbers: Vec<u64> = numbers.collect();
        self.fixture.put(&self.namespace, &numbers).unwrap();
    }

    /// Waits until nvme has so many blocks; returns how long that took.
    async fn until(&self, blocks: u64) -> Duration {
        let started = Instant::now();
        let reached = async {
            while self.nvme.usage().blocks < blocks {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let limit = Duration::from_secs(600);
        assert!(tokio::time::timeout(limit, reached).await.is_ok(), "{}", self.nvme.usage().blocks);
        started.elapsed()
    }

    fn undemoted(&self, why: Undemoted) -> u64 {
        self.fixture.stack.shared.metrics.undemoted(why).get()
    }

    fn demoted(&self, urgency: Urgency) -> u64 {
        self.fixture.stack.shared.metrics.demoted(urgency).get()
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_put_is_copied_in_chain_order() {
    let tiers = tiers(4 * MIB, 4096);
    tiers.put(0..200);
    assert_eq!(tiers.fixture.stack.usage().demote_queue_blocks, 200);
    tiers.cleaning(tiers.until(200)).await;
    let order: Vec<_> = tiers.nvme.copies().into_iter().map(|copy| copy.hash).collect();
    assert_eq!(order, (0..200).map(hash_of).collect::<Vec<_>>());
    assert_eq!(tiers.demoted(Urgency::Background), 200);
    assert_eq!(tiers.fixture.stack.usage().demote_queue_blocks, 0);
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn a_put_that_is_cut_short_has_its_blocks_copied_and_duplicates_are_not_again() {
    let tiers = tiers(4 * MIB, 4096);
    let mut batch = tiers.fixture.offer(&tiers.namespace, &[1, 2], None).unwrap();
    tiers.fixture.write(&mut batch, &tiers.namespace, (0, 1), 0).unwrap();
    drop(batch);
    tiers.put(1..3);
    tiers.put(1..3);
    tiers.cleaning(tiers.until(2)).await;
    assert_eq!(tiers.nvme.usage().blocks, 2);
}

#[tokio::test(start_paused = true)]
async fn copies_under_way_are_bounded_in_blocks_and_in_bytes() {
    for (block_bytes, expected) in [(64, CLEANER_BLOCKS_MAX), (65_536, 8)] {
        let tiers = tiers(4 * MIB, block_bytes);
        tiers.faults.plan(&[Fault::Slow(Duration::from_secs(1)); 200]);
        tiers.put(0..50);
        if block_bytes == 64 {
            tiers.put(50..200);
        }
        let first = async {
            tokio::time::sleep(Duration::from_millis(1500)).await;
            tiers.nvme.usage().blocks
        };
        assert_eq!(tiers.cleaning(first).await, expected as u64, "after one round");
        assert_eq!(tiers.nvme.usage().blocks, 2 * expected as u64, "what has begun is completed");
        assert_quiet(&tiers.fixture);
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_drops_demotions_and_a_sweep_finds_the_blocks() {
    let tiers = tiers(64 * MIB, 64);
    let all = CLEANER_QUEUE_MAX as u64 + 1000;
    tiers.put(0..60_000);
    tiers.put(60_000..all);
    assert_eq!(tiers.undemoted(Undemoted::QueueFull), 1000);
    assert_eq!(tiers.fixture.stack.usage().demote_queue_blocks, CLEANER_QUEUE_MAX as u64);
    tiers.cleaning(tiers.until(all)).await;
    audit(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn what_was_evicted_or_removed_before_its_turn_is_counted() {
    let tiers = tiers(MIB, 4096);
    tiers.put(0..2);
    let packed = pack(&[0]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    tiers.cleaning(tiers.until(1)).await;
    assert_eq!(tiers.undemoted(Undemoted::Gone), 1);
    let only = || tiers.fixture.stack.shared.metrics.evicted_only_copy.get();
    // The first one to make way has a copy, the others have none.
    for number in 1000..1256 {
        tiers.put(number..number + 1);
    }
    assert_eq!(only(), 0);
    for number in 2000..2003 {
        tiers.put(number..number + 1);
    }
    assert_eq!(only(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_tier_in_trouble_is_asked_seldom_and_gets_everything_when_it_is_well() {
    let tiers = tiers(4 * MIB, 4096);
    tiers.put(0..300);
    tiers.nvme.admit(None);
    let history = async {
        tokio::time::sleep(Duration::from_secs(3600)).await;
        let asked = tiers.undemoted(Undemoted::Unavailable);
        assert!((64..64 + 400).contains(&asked), "{asked} in an hour");
        tiers.nvme.admit(Some(Admission::All));
        let late = tiers.until(300).await;
        assert!(late < Duration::from_secs(40), "{late:?}");
    };
    tiers.cleaning(history).await;
    audit(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn a_short_budget_is_spent_on_what_is_read() {
    let tiers = tiers(4 * MIB, 4096);
    tiers.nvme.admit(Some(Admission::Reused));
    tiers.put(0..300);
    let history = async {
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(tiers.nvme.usage().blocks, 0);
        assert!(tiers.undemoted(Undemoted::Budget) >= 300);
        // Read after they were put: a later sweep finds them.
        for number in [7, 250] {
            assert!(has(&tiers.fixture, &tiers.namespace, number).await);
        }
        tiers.until(2).await;
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(tiers.nvme.usage().blocks, 2);
        // What a client waits for is written in any case.
        let waited = tiers.fixture.stack.demote(&tiers.namespace, hash_of(9), Tier::Nvme).await;
        assert!(waited.unwrap());
    };
    tiers.cleaning(history).await;
    assert_eq!((tiers.nvme.usage().blocks, tiers.demoted(Urgency::Durable)), (3, 1));
}

#[tokio::test(start_paused = true)]
async fn a_copy_that_nobody_waits_for_any_more_is_completed_and_known() {
    let tiers = tiers(4 * MIB, 4096);
    tiers.put(1..2);
    let slow = Duration::from_secs(2);
    tiers.faults.plan(&[Fault::Slow(slow)]);
    let history = async {
        // The cleaner has it already, as the first one.
        let demote = || tiers.fixture.stack.demote(&tiers.namespace, hash_of(1), Tier::Nvme);
        let waited = tokio::time::timeout(Duration::from_secs(1), demote()).await;
        assert!(waited.is_err());
        tokio::time::sleep(slow).await;
        assert_eq!(tiers.nvme.usage().blocks, 1);
        assert!(demote().await.unwrap());
        // And one that the waiter has begun.
        tiers.put(2..3);
        let at = tiers.fixture.stack.shared.map.hashed(tiers.namespace.index(), hash_of(2));
        tiers.faults.plan(&[Fault::Slow(slow)]);
        let demote = tiers.fixture.stack.demote(&tiers.namespace, hash_of(2), Tier::Nvme);
        drop(tokio::time::timeout(Duration::from_millis(1), demote).await);
        tokio::time::sleep(2 * slow).await;
        let known = tiers
            .fixture
            .stack
            .shared
            .map
            .with(at, |shard| shard.entry(at).unwrap().cold(Tier::Nvme).is_some());
        assert!(known);
    };
    tiers.cleaning(history).await;
    assert_eq!(tiers.nvme.usage().blocks, 2);
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn when_the_cleaner_stops_what_has_begun_is_completed_and_later_work_is_done_by_its_caller() {
    let tiers = tiers(4 * MIB, 4096);
    tiers.put(1..2);
    tiers.faults.plan(&[Fault::Slow(Duration::from_secs(5))]);
    tiers.cleaning(tokio::time::sleep(Duration::from_secs(1))).await;
    assert_eq!(tiers.nvme.usage().blocks, 1);
    tiers.put(2..3);
    let demoted = tiers.fixture.stack.demote(&tiers.namespace, hash_of(2), Tier::Nvme).await;
    assert!(demoted.unwrap());
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn a_flush_copies_all_that_was_put_and_what_a_full_queue_has_dropped() {
    let tiers = tiers(64 * MIB, 64);
    let all = CLEANER_QUEUE_MAX as u64 + 1000;
    tiers.put(0..60_000);
    tiers.put(60_000..all);
    let flushed = async {
        tokio::task::yield_now().await;
        let left = tiers.fixture.stack.flush(Instant::now() + Duration::from_secs(5)).await;
        (left, tiers.nvme.usage().blocks)
    };
    assert_eq!(tiers.cleaning(flushed).await, (0, all));
}

#[tokio::test(start_paused = true)]
async fn a_flush_ends_at_its_deadline_and_at_once_when_there_is_nothing_to_wait_for() {
    let tiers = tiers(4 * MIB, 4096);
    let stack = &tiers.fixture.stack;
    let flush = async |limit: Duration| {
        tokio::task::yield_now().await;
        let started = Instant::now();
        (stack.flush(started + limit).await, started.elapsed())
    };
    let (second, minute) = (Duration::from_secs(1), Duration::from_secs(60));
    tiers.put(0..100);
    assert_eq!(flush(minute).await, (100, Duration::ZERO), "no cleaner");
    tiers.faults.plan(&[Fault::Slow(10 * second); 100]);
    assert_eq!(tiers.cleaning(flush(second)).await, (100 - CLEANER_BLOCKS_MAX as u64, second));
    assert_eq!(tiers.cleaning(flush(minute)).await.0, 0);
    assert_eq!(tiers.nvme.usage().blocks, 100);
    assert_eq!(tiers.cleaning(flush(minute)).await, (0, Duration::ZERO), "nothing is queued");
    tiers.put(100..300);
    tiers.faults.plan(&[Fault::Error; 1000]);
    let (left, took) = tiers.cleaning(flush(minute)).await;
    assert!(left > 0 && took < second, "a tier in trouble: {left} left after {took:?}");
}

#[tokio::test(start_paused = true)]
async fn without_an_nvme_tier_nothing_is_queued() {
    let fixture = Fixture::new(MIB, Vec::new()).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    fixture.put(&namespace, &[1]).unwrap();
    assert_eq!(fixture.stack.usage().demote_queue_blocks, 0);
    assert!(fixture.stack.has_tier(Tier::Dram) && !fixture.stack.has_tier(Tier::Nvme));
    assert!(!fixture.stack.demote(&namespace, hash_of(1), Tier::Nvme).await.unwrap());
    fixture.stack.clean(tokio::time::sleep(Duration::from_secs(1))).await;
}

#[tokio::test(start_paused = true)]
async fn a_block_that_no_segment_can_hold_does_not_hold_up_the_others() {
    let tiers = tiers(4 * MIB, 4096);
    tiers.nvme.fit(4096);
    let large = tiers.fixture.namespace("large", &[8192]).unwrap();
    let numbers: Vec<u64> = (0..100).collect();
    tiers.fixture.put(&large, &numbers).unwrap();
    tiers.put(0..100);
    let late = tiers.cleaning(tiers.until(100)).await;
    assert!(late < Duration::from_secs(1), "{late:?}");
    assert_eq!(tiers.undemoted(Undemoted::of(crate::error::ErrorKind::Invalid)), 100);
}
