//! Colder tiers: promotion, faults, deadlines; each fault is a miss and nothing else breaks.

use super::*;
use crate::{
    checksum::part_checksum,
    dram::BlockWriter,
    map::Location,
    store::{BoxFuture, Load, Outgoing, StoreUsage, Wanted},
    testing::{Fault, Faulty, MemoryStore},
};

pub(super) struct Tiers {
    pub(super) fixture: Fixture,
    pub(super) namespace: Arc<Namespace>,
    pub(super) nvme: Arc<Faulty>,
    pub(super) object: Arc<Faulty>,
}

/// Room for 256 blocks over two colder tiers.
pub(super) fn tiers() -> Tiers {
    let nvme = Arc::new(Faulty::new(Arc::new(MemoryStore::new(Tier::Nvme))));
    let object = Arc::new(Faulty::new(Arc::new(MemoryStore::new(Tier::Object))));
    let cold: Vec<Arc<dyn BlockStore>> =
        vec![Arc::clone(&nvme) as Arc<dyn BlockStore>, Arc::clone(&object) as Arc<dyn BlockStore>];
    let fixture = Fixture::new(MIB, cold).unwrap();
    let namespace = fixture.namespace("m", &[2048, 2048]).unwrap();
    Tiers { fixture, namespace, nvme, object }
}

impl Tiers {
    pub(super) async fn demote(&self, number: u64, tier: Tier) {
        assert!(self.fixture.stack.demote(&self.namespace, hash_of(number), tier).await.unwrap());
    }

    /// Pushes everything out of dram.
    pub(super) fn press(&self) {
        for number in 100_000..100_256 {
            self.fixture.put(&self.namespace, &[number]).unwrap();
        }
    }

    pub(super) fn tier_of(&self, number: u64) -> Option<Tier> {
        look(&self.fixture, &self.namespace, &[number], Ask::default()).runs.first().map(|r| r.tier)
    }

    /// Block 1 on both colder tiers, and not in dram.
    pub(super) async fn with_cold_block() -> Self {
        let tiers = tiers();
        tiers.fixture.put(&tiers.namespace, &[1, 2]).unwrap();
        for tier in [Tier::Nvme, Tier::Object] {
            tiers.demote(1, tier).await;
        }
        tiers.press();
        assert_eq!(tiers.tier_of(1), Some(Tier::Nvme));
        assert_eq!(tiers.tier_of(2), None);
        tiers
    }

    pub(super) async fn get(&self, number: u64) -> Fetch {
        get(&self.fixture, &self.namespace, number).await
    }
}

#[tokio::test]
async fn an_evicted_block_stays_readable_on_its_colder_tier() {
    let tiers = Tiers::with_cold_block().await;
    let Fetch::Hit(block) = tiers.get(1).await else { panic!("it is on nvme") };
    assert_eq!(block.tier(), Tier::Nvme);
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    assert_eq!(tiers.tier_of(1), Some(Tier::Dram), "a load promotes");
    drop(block);
    assert_quiet(&tiers.fixture);
    let counts = look(&tiers.fixture, &tiers.namespace, &[1, 2], Ask::default()).counts;
    assert_eq!(counts.to_array(), [1, 0, 0, 0, 1]);
}

#[tokio::test]
async fn a_damaged_copy_is_dropped_and_the_next_tier_serves() {
    for fault in [Fault::BitFlip(3000), Fault::Torn] {
        let tiers = Tiers::with_cold_block().await;
        tiers.nvme.plan(&[fault]);
        let Fetch::Hit(block) = tiers.get(1).await else { panic!("object has it: {fault:?}") };
        assert_eq!(block.tier(), Tier::Object);
        assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
        assert_eq!(tiers.fixture.stack.usage().corrupt, 1);
        assert_eq!(tiers.nvme.usage().blocks, 0, "the damaged copy is off its tier");
    }
}

#[tokio::test]
async fn damaged_everywhere_is_a_miss_and_heals_by_a_put() {
    let tiers = Tiers::with_cold_block().await;
    tiers.nvme.plan(&[Fault::BitFlip(0)]);
    tiers.object.plan(&[Fault::BitFlip(4095)]);
    assert!(matches!(tiers.get(1).await, Fetch::Corrupt));
    assert!(matches!(tiers.get(1).await, Fetch::Miss));
    assert_eq!(tiers.fixture.put(&tiers.namespace, &[1]).unwrap(), 1);
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
}

#[tokio::test]
async fn a_failing_or_busy_tier_is_passed_over() {
    for fault in [Fault::Error, Fault::Busy] {
        let tiers = Tiers::with_cold_block().await;
        tiers.nvme.plan(&[fault]);
        let Fetch::Hit(block) = tiers.get(1).await else { panic!("object has it: {fault:?}") };
        assert_eq!(block.tier(), Tier::Object);
        assert_eq!(tiers.nvme.usage().blocks, 1, "trouble is no reason to forget");
    }
    let tiers = Tiers::with_cold_block().await;
    tiers.nvme.plan(&[Fault::Busy]);
    tiers.object.plan(&[Fault::Busy]);
    assert!(matches!(tiers.get(1).await, Fetch::Busy));
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await, "and later it is there");
}

#[tokio::test]
async fn what_a_tier_lost_is_forgotten_and_reported() {
    let tiers = Tiers::with_cold_block().await;
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    tiers.nvme.plan(&[Fault::Miss]);
    tiers.object.plan(&[Fault::Miss]);
    assert!(matches!(tiers.get(1).await, Fetch::Miss));
    assert_eq!(tiers.tier_of(1), None);
    let key = tiers.fixture.stack.shared.map.hashed(tiers.namespace.index(), hash_of(1)).key;
    let removed = |tier| crate::event::TierEvent::Removed { key, tier };
    let events: Vec<_> = drain(&feed)
        .into_iter()
        .filter(|event| *event == removed(Tier::Nvme) || *event == removed(Tier::Object))
        .collect();
    assert_eq!(events, [removed(Tier::Nvme), removed(Tier::Object)]);
}

#[tokio::test(start_paused = true)]
async fn a_hanging_tier_ends_at_the_deadline_and_holds_nobody_up() {
    let tiers = Tiers::with_cold_block().await;
    tiers.demote(100_000, Tier::Nvme).await;
    tiers.nvme.plan(&[Fault::Hang]);
    tiers.object.plan(&[Fault::Hang]);
    let started = Instant::now();
    assert!(matches!(tiers.get(1).await, Fetch::Timeout));
    assert!(started.elapsed() <= Duration::from_millis(5001));
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn many_readers_make_one_load_and_a_failure_lets_the_next_try() {
    let tiers = Tiers::with_cold_block().await;
    tiers.nvme.plan(&[Fault::Slow(Duration::from_secs(1))]);
    // Were there a second load it would meet an error here, and read from object.
    tiers.nvme.plan(&[Fault::Error]);
    let reads = (0..20).map(|_| tiers.get(1));
    let fetched = join_all(reads).await;
    let from_nvme =
        fetched.iter().filter(|fetch| matches!(fetch, Fetch::Hit(b) if b.tier() == Tier::Nvme));
    assert_eq!(from_nvme.count(), 1);
    assert!(fetched.iter().all(|fetch| matches!(fetch, Fetch::Hit(_))));
    assert_eq!(tiers.fixture.stack.shared.flights.len(), 0);
}

/// Runs futures side by side.
async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut running: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        for (future, done) in &mut running {
            if done.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *done = Some(value);
            }
        }
        match running.iter().all(|(_, done)| done.is_some()) {
            true => std::task::Poll::Ready(()),
            false => std::task::Poll::Pending,
        }
    })
    .await;
    running.into_iter().filter_map(|(_, done)| done).collect()
}

#[tokio::test]
async fn removal_reaches_every_tier() {
    let tiers = Tiers::with_cold_block().await;
    let packed = pack(&[1]);
    let removed = tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap());
    assert_eq!(removed.await.unwrap(), 1);
    assert_eq!((tiers.nvme.usage().blocks, tiers.object.usage().blocks), (0, 0));
    assert!(matches!(tiers.get(1).await, Fetch::Miss));
}

#[tokio::test]
async fn prefetch_says_what_has_to_be_loaded() {
    let tiers = Tiers::with_cold_block().await;
    let packed = pack(&[1, 2, 100_255]);
    let prefetch =
        tiers.fixture.stack.prefetch(&tiers.namespace, Hashes::new(&packed, 32).unwrap());
    assert_eq!(prefetch, Prefetch { in_dram: 1, cold: vec![hash_of(1)] });
}

#[tokio::test]
async fn a_cold_block_is_a_duplicate_and_is_not_under_lease() {
    let tiers = Tiers::with_cold_block().await;
    let batch = tiers.fixture.offer(&tiers.namespace, &[1], None).unwrap();
    assert_eq!(batch.claims(), [Claim::Duplicate]);
    let held = lease(&tiers.fixture, &tiers.namespace, &[1]);
    assert_eq!((held.prefix_blocks, held.pins.len()), (1, 0));
    assert_eq!(held.counts.to_array(), [0, 1, 0, 0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_gives_up_leaves_no_flight() {
    let tiers = Tiers::with_cold_block().await;
    tiers.nvme.plan(&[Fault::Hang]);
    let first = Box::pin(tiers.get(1));
    // The first one hangs in its load, the second waits for the first.
    let waiting = tiers.fixture.stack.get(
        &tiers.namespace,
        hash_of(1),
        &[],
        Instant::now() + Duration::from_secs(1),
    );
    let give_up = Duration::from_secs(2);
    let (first, second) = tokio::join!(tokio::time::timeout(give_up, first), waiting);
    assert!(first.is_err() && matches!(second, Ok(Fetch::Timeout)));
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_when_told_to_forget_does_not_hold_up_a_read() {
    let tiers = Tiers::with_cold_block().await;
    tiers.nvme.plan(&[Fault::BitFlip(0), Fault::Hang]);
    let fetch = tokio::time::timeout(Duration::from_secs(60), tiers.get(1)).await;
    assert!(fetch.is_ok(), "the deadline was five seconds");
    assert_quiet(&tiers.fixture);
}

#[tokio::test(start_paused = true)]
async fn demoting_twice_makes_one_copy() {
    let tiers = tiers();
    tiers.fixture.put(&tiers.namespace, &[1]).unwrap();
    tiers.nvme.plan(&[Fault::Slow(Duration::from_secs(1))]);
    tokio::join!(tiers.demote(1, Tier::Nvme), tiers.demote(1, Tier::Nvme));
    tiers.demote(1, Tier::Nvme).await;
    assert_eq!(tiers.nvme.usage().blocks, 1, "a second copy would be known to nobody");
    assert_quiet(&tiers.fixture);
    let packed = pack(&[1]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    assert_eq!(tiers.nvme.usage().blocks, 0);
}

#[tokio::test]
async fn removal_is_reported_for_every_tier() {
    use crate::event::TierEvent::Removed;
    let tiers = Tiers::with_cold_block().await;
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    let packed = pack(&[1]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    let key = tiers.fixture.stack.shared.map.hashed(tiers.namespace.index(), hash_of(1)).key;
    let expected = [Tier::Nvme, Tier::Object].map(|tier| Removed { key, tier });
    assert_eq!(drain(&feed), expected);
}

#[tokio::test]
async fn a_resync_tells_all_tiers_of_a_block() {
    use crate::event::Drained;
    let tiers = tiers();
    tiers.fixture.put(&tiers.namespace, &[1]).unwrap();
    tiers.demote(1, Tier::Nvme).await;
    let feed = tiers.fixture.stack.subscribe();
    let told = (0..feed.shards()).flat_map(|shard| match feed.drain(shard) {
        Drained::Resync(blocks) => blocks,
        Drained::Events(_) => panic!("the first drain is a resync"),
    });
    // Or the reader would take the later removal from dram for the end of the block.
    let told: Vec<Tier> = told.map(|(_, tier)| tier).collect();
    assert_eq!(told, [Tier::Dram, Tier::Nvme]);
}

#[tokio::test]
async fn a_map_full_of_colder_copies_refuses_until_the_tier_has_shed() {
    let nvme: Arc<dyn BlockStore> = Arc::new(MemoryStore::new(Tier::Nvme));
    let fixture = Fixture::with_index(MIB, 100, vec![nvme]).unwrap();
    let namespace = fixture.namespace("m", &[64]).unwrap();
    for number in 0..300 {
        fixture.put(&namespace, &[number]).unwrap();
        if number < 90 {
            fixture.stack.demote(&namespace, hash_of(number), Tier::Nvme).await.unwrap();
        }
        assert!(fixture.stack.usage().index_blocks <= 100, "after {number}");
    }
    for number in 0..90 {
        assert!(has(&fixture, &namespace, number).await, "{number}");
    }
    for number in 90..300 {
        fixture.stack.demote(&namespace, hash_of(number), Tier::Nvme).await.unwrap();
    }
    assert_eq!(fixture.put(&namespace, &[1000]).unwrap(), 0);
    assert_eq!(fixture.stack.usage().index_blocks, 100);
    // The tier was asked to shed meanwhile.
    assert_eq!(fixture.put(&namespace, &[1000]).unwrap(), 1);
    audit(&fixture);
}

/// Reads at once, and takes a second to say so.
#[derive(Debug)]
struct Late(MemoryStore);

impl BlockStore for Late {
    fn tier(&self) -> Tier {
        self.0.tier()
    }

    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, crate::error::Result<Location>> {
        self.0.put(block)
    }

    fn get<'a>(
        &'a self,
        wanted: Wanted,
        into: BlockWriter,
    ) -> BoxFuture<'a, crate::error::Result<Load>> {
        Box::pin(async move {
            let load = self.0.get(wanted, into).await;
            tokio::time::sleep(Duration::from_secs(1)).await;
            load
        })
    }

    fn attach(&self, above: std::sync::Weak<dyn crate::store::Above>) {
        self.0.attach(above);
    }

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, crate::error::Result<()>> {
        self.0.remove(blocks)
    }

    fn shed(&self) {
        self.0.shed();
    }

    fn usage(&self) -> StoreUsage {
        self.0.usage()
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, crate::error::Result<()>> {
        self.0.close()
    }
}

#[tokio::test(start_paused = true)]
async fn a_load_from_before_a_removal_is_not_made_resident() {
    let nvme: Arc<dyn BlockStore> = Arc::new(Late(MemoryStore::new(Tier::Nvme)));
    let fixture = Fixture::new(MIB, vec![nvme]).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    let put = |byte: u8| {
        let data = vec![byte; 4096];
        let checksum = part_checksum(namespace.id(), &hash_of(1), 0, 0, &data);
        let mut batch = fixture.offer(&namespace, &[1], None).unwrap();
        let piece = Piece { position: 0, part: 0, offset: 0, data: &data, checksum, part_bytes: 0 };
        assert_eq!(batch.write(piece).unwrap(), Some(PutOutcome::Stored));
    };
    let demote_and_press = async || {
        fixture.stack.demote(&namespace, hash_of(1), Tier::Nvme).await.unwrap();
        for number in 1000..1256 {
            fixture.put(&namespace, &[number]).unwrap();
        }
        let removed: Vec<u64> = (1000..1256).collect();
        fixture.stack.remove(&namespace, Hashes::new(&pack(&removed), 32).unwrap()).await.unwrap();
    };
    put(7);
    demote_and_press().await;
    let replace = async {
        tokio::time::sleep(Duration::from_millis(500)).await;
        fixture.stack.remove(&namespace, Hashes::new(&pack(&[1]), 32).unwrap()).await.unwrap();
        put(8);
        demote_and_press().await;
    };
    let (early, ()) = tokio::join!(get(&fixture, &namespace, 1), replace);
    // It was read before the removal, and is right.
    assert!(matches!(early, Fetch::Hit(block) if block.part(0).unwrap().as_ref() == [7; 4096]));
    let late = get(&fixture, &namespace, 1).await;
    assert!(matches!(late, Fetch::Hit(block) if block.part(0).unwrap().as_ref() == [8; 4096]));
    assert_eq!(fixture.stack.usage().corrupt, 0);
    audit(&fixture);
}

#[tokio::test]
async fn what_one_get_loads_takes_a_bounded_share_from_others_and_is_delivered_all() {
    let tiers = tiers();
    let context: Vec<u64> = (0..200).collect();
    tiers.fixture.put(&tiers.namespace, &context).unwrap();
    for number in &context {
        tiers.demote(*number, Tier::Nvme).await;
    }
    tiers.press();
    let others = || (100_000..100_256).filter(|n| tiers.tier_of(*n) == Some(Tier::Dram)).count();
    assert_eq!(others(), 256);
    let promotions = tiers.fixture.stack.promotions();
    for number in &context {
        let (stack, hash) = (&tiers.fixture.stack, hash_of(*number));
        let fetch = stack.get_within(&promotions, &tiers.namespace, hash, &[], soon()).await;
        let Ok(Fetch::Hit(block)) = fetch else { panic!("{number}: {fetch:?}") };
        assert_eq!(block.tier(), Tier::Nvme);
    }
    assert!(promotions.is_spent());
    let share = 256 / usize::try_from(CONTEXT_SHARE_DIVISOR).unwrap();
    let lost = 256 - others();
    assert!((share..=share + 1).contains(&lost), "{lost}");
    assert_eq!(tiers.tier_of(0), Some(Tier::Dram), "the head stays");
    drop(promotions);
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
    // Memory that nobody uses is anybody's.
    let all: Vec<u64> = (100_000..100_256).collect();
    tiers
        .fixture
        .stack
        .remove(&tiers.namespace, Hashes::new(&pack(&all), 32).unwrap())
        .await
        .unwrap();
    let promotions = tiers.fixture.stack.promotions();
    for number in &context {
        let (stack, hash) = (&tiers.fixture.stack, hash_of(*number));
        stack.get_within(&promotions, &tiers.namespace, hash, &[], soon()).await.unwrap();
        assert_eq!(tiers.tier_of(*number), Some(Tier::Dram));
    }
}
