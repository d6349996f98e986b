//! A stack over nvme and object: copies come to object from the runs of nvme, and back through dram.

use tokio::sync::oneshot;

use super::*;
use crate::{
    admission::Admission,
    limits::LONG_CHAIN_TOKENS,
    map::Checksums,
    metrics::Undemoted,
    store::{Above, RunBlock, Runs, Uncopied, Wanted},
    testing::{MemoryRuns, MemoryStore},
};

/// A stack over two tiers, and what cuts runs from the warmer one.
struct Tiers {
    fixture: Fixture,
    namespace: Arc<Namespace>,
    nvme: Arc<MemoryStore>,
    object: Arc<MemoryStore>,
    runs: MemoryRuns,
}

/// Room for 256 blocks in dram, and for so many in the map.
fn with_index(index_blocks_max: u64) -> Tiers {
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
    let object = Arc::new(MemoryStore::new(Tier::Object));
    let runs = MemoryRuns::over(Arc::clone(&nvme));
    let cold: Vec<Arc<dyn BlockStore>> =
        vec![Arc::<MemoryStore>::clone(&nvme), Arc::<MemoryStore>::clone(&object)];
    let fixture = Fixture::with_index(MIB, index_blocks_max, cold).unwrap();
    let namespace = fixture.namespace("m", &[2048, 2048]).unwrap();
    Tiers { fixture, namespace, nvme, object, runs }
}

fn tiers() -> Tiers {
    with_index(1 << 20)
}

impl Tiers {
    fn shared(&self) -> &Shared {
        &self.fixture.stack.shared
    }

    async fn put_to_nvme(&self, numbers: &[u64]) {
        self.fixture.put(&self.namespace, numbers).unwrap();
        for number in numbers {
            let demoted = self.fixture.stack.demote(&self.namespace, hash_of(*number), Tier::Nvme);
            assert!(demoted.await.unwrap());
        }
    }

    /// Copies what nvme has in no run so far to object; returns the blocks of the run.
    async fn pack(&self) -> Vec<RunBlock> {
        let run = self.runs.seal();
        let blocks = self.runs.contents(run).await.unwrap();
        let wanted: Vec<Wanted> = blocks.iter().map(RunBlock::wanted).collect();
        let uncopied = self.shared().uncopied(Tier::Nvme, Tier::Object, &wanted);
        for (block, uncopied) in blocks.iter().zip(uncopied) {
            if uncopied.is_some() {
                let bytes = self.runs.read(block).await.unwrap().unwrap();
                assert!(self.object.copy_in(block, &bytes));
            }
        }
        self.runs.offered(run);
        blocks
    }

    /// Blocks that only object has.
    async fn on_object(&self, numbers: &[u64]) {
        self.put_to_nvme(numbers).await;
        self.pack().await;
        for run in self.runs.offers() {
            self.runs.reclaim(run);
        }
        self.press();
        for number in numbers {
            assert_eq!(self.tiers_of(*number), [Tier::Object]);
        }
    }

    /// Pushes everything else out of dram.
    fn press(&self) {
        for number in 100_000..100_256 {
            self.fixture.put(&self.namespace, &[number]).unwrap();
        }
    }

    fn tiers_of(&self, number: u64) -> Vec<Tier> {
        let at = self.shared().map.hashed(self.namespace.index(), hash_of(number));
        let tiers = self.shared().map.with(at, |shard| Some(shard.entry(at)?.tiers().collect()));
        tiers.unwrap_or_default()
    }

    /// Reads a block, whose bytes must be right; returns where it was.
    async fn read(&self, number: u64, parts: &[u32]) -> Tier {
        let hash = hash_of(number);
        let fetch = self.fixture.stack.get(&self.namespace, hash, parts, soon()).await.unwrap();
        let Fetch::Hit(block) = fetch else { panic!("block {number}: {fetch:?}") };
        for part in [0, 1] {
            let expected = block_bytes(&self.namespace, number, part, 2048);
            assert!(block.part(part).unwrap().as_ref() == expected, "block {number} is wrong");
        }
        block.tier()
    }

    /// All that the cleaner finds to do, also by a walk over the map.
    async fn clean(&self) {
        let (stop, stopped) = oneshot::channel::<()>();
        let cleaned = async {
            // The cleaner has begun then.
            tokio::task::yield_now().await;
            self.shared().cleaner.sweep_later(Admission::All);
            assert_eq!(self.fixture.stack.flush(soon()).await, 0);
            drop(stop);
        };
        tokio::join!(
            cleaned,
            self.fixture.stack.clean(async {
                drop(stopped.await);
            })
        );
    }

    async fn remove(&self, number: u64) {
        let packed = pack(&[number]);
        let hashes = Hashes::new(&packed, 32).unwrap();
        assert_eq!(self.fixture.stack.remove(&self.namespace, hashes).await.unwrap(), 1);
    }
}

#[tokio::test]
async fn what_leaves_nvme_stays_readable_on_object() {
    let tiers = tiers();
    tiers.put_to_nvme(&[1, 2, 3]).await;
    tiers.pack().await;
    assert_eq!(tiers.tiers_of(2), [Tier::Dram, Tier::Nvme, Tier::Object]);
    let stack = &tiers.fixture.stack;
    assert_eq!(stack.colder_usage().iter().map(|(_, u)| u.blocks).collect::<Vec<_>>(), [3, 3]);
    tiers.press();
    tiers.runs.reclaim(tiers.runs.offers()[0]);
    let answer = look(&tiers.fixture, &tiers.namespace, &[1, 2, 3, 4], Ask::default());
    assert_eq!(answer.counts.to_array(), [0, 0, 3, 0, 1]);
    let run = answer.runs[0];
    assert_eq!((run.tier, run.start, run.end, run.bytes), (Tier::Object, 0, 3, 3 * 4096));
    assert!(
        stack.pace(Tier::Object).unwrap().setup_secs > stack.pace(Tier::Nvme).unwrap().setup_secs
    );
    assert!(stack.has_tier(Tier::Object));
    for number in [1, 2, 3] {
        assert_eq!(tiers.read(number, &[]).await, Tier::Object);
        assert_eq!(tiers.read(number, &[]).await, Tier::Dram, "a load promotes");
    }
    audit(&tiers.fixture);
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn what_is_loaded_from_object_gets_to_nvme_when_it_is_used_again() {
    let tiers = tiers();
    tiers.on_object(&[1, 2, 3]).await;
    for number in [1, 2] {
        assert_eq!(tiers.read(number, &[]).await, Tier::Object);
    }
    tiers.clean().await;
    for number in [1, 2] {
        assert_eq!(tiers.tiers_of(number), [Tier::Dram, Tier::Object], "used once");
    }
    assert_eq!(tiers.read(1, &[]).await, Tier::Dram);
    tiers.clean().await;
    assert_eq!(tiers.tiers_of(1), Tier::ALL, "used twice");
    assert_eq!(tiers.tiers_of(2), [Tier::Dram, Tier::Object]);
    // Evicted and loaded again: that is the second use as well.
    tiers.press();
    (200_000..200_256)
        .for_each(|n| assert_eq!(tiers.fixture.put(&tiers.namespace, &[n]).unwrap(), 1));
    assert_eq!(tiers.read(2, &[]).await, Tier::Object);
    tiers.clean().await;
    assert_eq!(tiers.tiers_of(2), Tier::ALL);
    assert_eq!(tiers.object.usage().blocks, 3, "nothing is put to object");
    audit(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn ranks_that_read_their_parts_and_loads_ahead_are_no_second_use() {
    let tiers = tiers();
    tiers.on_object(&[1, 2]).await;
    for part in [1, 0, 1] {
        tiers.read(1, &[part]).await;
    }
    let stack = &tiers.fixture.stack;
    let ahead = stack.promotions_ahead();
    let hash = hash_of(2);
    let loaded = stack.get_within(&ahead, &tiers.namespace, hash, &[], soon()).await.unwrap();
    assert!(matches!(loaded, Fetch::Hit(block) if block.tier() == Tier::Object));
    assert_eq!(tiers.read(2, &[]).await, Tier::Dram);
    tiers.clean().await;
    for number in [1, 2] {
        assert_eq!(tiers.tiers_of(number), [Tier::Dram, Tier::Object]);
        tiers.read(number, &[0]).await;
    }
    tiers.clean().await;
    assert_eq!([1, 2].map(|number| tiers.tiers_of(number)), [Tier::ALL, Tier::ALL]);
}

#[tokio::test(start_paused = true)]
async fn what_object_loses_while_dram_has_it_gets_to_nvme() {
    let tiers = tiers();
    tiers.on_object(&[1]).await;
    tiers.read(1, &[]).await;
    tiers.object.reclaim(1);
    assert_eq!(tiers.tiers_of(1), [Tier::Dram]);
    tiers.clean().await;
    assert_eq!(tiers.tiers_of(1), [Tier::Dram, Tier::Nvme]);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_put_to_object() {
    let tiers = tiers();
    // A put would fail, and that would be counted.
    tiers.object.admit(None);
    tiers.fixture.put(&tiers.namespace, &(0..100).collect::<Vec<_>>()).unwrap();
    tiers.clean().await;
    assert_eq!(tiers.nvme.usage().blocks, 100);
    tiers.pack().await;
    assert_eq!(tiers.object.usage().blocks, 100);
    let undemoted = |why| tiers.shared().metrics.undemoted(why).get();
    assert_eq!(Undemoted::ALL.iter().map(|why| undemoted(*why)).sum::<u64>(), 0);
}

#[tokio::test]
async fn a_durable_put_of_what_object_has_is_done() {
    let tiers = tiers();
    tiers.on_object(&[1]).await;
    let demote = |number| tiers.fixture.stack.demote(&tiers.namespace, hash_of(number), Tier::Nvme);
    assert!(demote(1).await.unwrap());
    assert!(!demote(7).await.unwrap());
    assert_eq!(tiers.tiers_of(1), [Tier::Object]);
}

#[tokio::test]
async fn removal_reaches_object_and_no_copy_of_what_was_removed_is_kept() {
    let tiers = tiers();
    tiers.put_to_nvme(&[1, 2]).await;
    let blocks = tiers.pack().await;
    tiers.remove(1).await;
    assert_eq!((tiers.nvme.usage().blocks, tiers.object.usage().blocks), (1, 1));
    let bytes = tiers.runs.read(&blocks[1]).await.unwrap().unwrap();
    tiers.remove(2).await;
    // It was on its way when it was removed.
    assert!(!tiers.object.copy_in(&blocks[1], &bytes));
    assert_eq!(tiers.object.usage().blocks, 0);
    for number in [1, 2] {
        assert!(!has(&tiers.fixture, &tiers.namespace, number).await);
    }
    audit(&tiers.fixture);
}

#[tokio::test]
async fn only_current_copies_that_object_lacks_are_uncopied_and_only_right_ones_are_kept() {
    let tiers = tiers();
    tiers.put_to_nvme(&[1, 2, 3, 4]).await;
    let run = tiers.runs.seal();
    let blocks = tiers.runs.contents(run).await.unwrap();
    let wanted: Vec<Wanted> = blocks.iter().map(RunBlock::wanted).collect();
    let asked = || tiers.shared().uncopied(Tier::Nvme, Tier::Object, &wanted);
    let ages: Vec<u64> = asked().into_iter().map(|uncopied| uncopied.unwrap().age).collect();
    assert!(ages.is_sorted_by(|before, after| before > after), "tail first: {ages:?}");
    assert!(asked().iter().all(|uncopied| !uncopied.unwrap().reused));
    tiers.read(4, &[]).await;
    assert!(asked()[3].unwrap().reused);
    tiers.remove(1).await;
    assert!(tiers.nvme.compact(&wanted[1]));
    let bytes = tiers.runs.read(&blocks[2]).await.unwrap().unwrap();
    assert!(tiers.object.copy_in(&blocks[2], &bytes));
    let there: Vec<bool> = asked().iter().map(Option::is_some).collect();
    assert_eq!(there, [false, false, false, true], "removed, moved, copied, and neither");
    // It has moved while it was copied.
    let moved = block_bytes(&tiers.namespace, 2, 0, 2048);
    let moved = [moved, block_bytes(&tiers.namespace, 2, 1, 2048)].concat();
    assert!(tiers.object.copy_in(&blocks[1], &moved));
    assert!(!tiers.object.copy_in(&blocks[2], &bytes), "once is enough");
    let other = RunBlock { checksums: Checksums::new(vec![1, 2]), ..blocks[3].clone() };
    assert!(!tiers.object.copy_in(&other, &bytes), "other bytes");
    // Being put, and not readable yet.
    let batch = tiers.fixture.offer(&tiers.namespace, &[1], None).unwrap();
    assert!(!tiers.object.copy_in(&blocks[0], &bytes));
    drop(batch);
    let stranger =
        [Wanted { namespace: crate::namespace::NamespaceId::from_bytes([9; 32]), ..wanted[3] }];
    let stranger = tiers.shared().uncopied(Tier::Nvme, Tier::Object, &stranger);
    assert_eq!(stranger, [None::<Uncopied>]);
    assert_eq!(tiers.object.usage().blocks, 2);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn a_chain_stays_long_when_dram_has_lost_it_and_until_a_block_of_it_is_read() {
    let mut tiers = tiers();
    let block_tokens = u32::try_from(LONG_CHAIN_TOKENS / 4).unwrap();
    tiers.namespace = tiers.fixture.namespace_of("m", &[2048, 2048], block_tokens).unwrap();
    let demote = async |numbers: std::ops::Range<u64>, parent| {
        let numbers: Vec<u64> = numbers.collect();
        tiers.fixture.put_behind(&tiers.namespace, &numbers, parent).unwrap();
        for number in numbers {
            let hash = hash_of(number);
            assert!(tiers.fixture.stack.demote(&tiers.namespace, hash, Tier::Nvme).await.unwrap());
        }
    };
    let run = async || tiers.runs.contents(tiers.runs.seal()).await.unwrap();
    let long = |blocks: &[RunBlock]| {
        let wanted: Vec<Wanted> = blocks.iter().map(RunBlock::wanted).collect();
        let asked = tiers.shared().uncopied(Tier::Nvme, Tier::Object, &wanted).into_iter();
        asked.map(|block| block.unwrap().in_long_chain).collect::<Vec<bool>>()
    };
    demote(0..2, None).await;
    let head = run().await;
    assert_eq!(long(&head), [false; 2], "so far");
    demote(2..4, Some(1)).await;
    demote(10..13, None).await;
    let rest = run().await;
    let expected = [true, true, false, false, false];
    assert_eq!((long(&head), long(&rest)), (vec![true; 2], expected.to_vec()));
    tiers.press();
    assert_eq!(tiers.tiers_of(0), [Tier::Nvme]);
    assert_eq!((long(&head), long(&rest)), (vec![true; 2], expected.to_vec()));
    tiers.read(1, &[]).await;
    assert_eq!(long(&head), [true, false]);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn a_copy_is_told_as_stored_and_one_that_leaves_as_removed() {
    use crate::event::TierEvent::{Removed, Stored};
    let tiers = tiers();
    tiers.put_to_nvme(&[1]).await;
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    tiers.pack().await;
    let key = tiers.shared().map.hashed(tiers.namespace.index(), hash_of(1)).key;
    assert_eq!(drain(&feed), [Stored { key, tier: Tier::Object }]);
    tiers.object.reclaim(1);
    assert_eq!(drain(&feed), [Removed { key, tier: Tier::Object }]);
    assert_eq!(tiers.tiers_of(1), [Tier::Dram, Tier::Nvme]);
}

#[tokio::test]
async fn a_map_full_of_cold_blocks_sheds_them_from_both_tiers_and_takes_new_ones() {
    let tiers = with_index(300);
    // What both tiers have leaves the map when both have shed it.
    for first in (0..280).step_by(40) {
        let numbers: Vec<u64> = (first..first + 40).collect();
        tiers.put_to_nvme(&numbers).await;
        tiers.pack().await;
    }
    tiers.press();
    let stored =
        (500_000..500_200).filter(|n| tiers.fixture.put(&tiers.namespace, &[*n]).unwrap() == 1);
    assert_eq!(stored.count(), 200);
    let blocks = [&tiers.nvme, &tiers.object].map(|store| store.usage().blocks);
    assert!(blocks.iter().all(|blocks| (1..280).contains(blocks)), "{blocks:?}");
    assert!(blocks[0].abs_diff(blocks[1]) <= 20, "in turns: {blocks:?}");
    audit(&tiers.fixture);
}
