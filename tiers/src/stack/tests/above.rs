//! What tiers tell the stack: blocks found, moved, leaving; ages; and a map that is full of them.

use super::*;
use crate::{
    dram::BlockWriter,
    event::TierEvent::{Removed, Stored},
    map::{Checksums, Hashed, Location},
    store::{Above, BoxFuture, Load, Outgoing, StoreUsage, Wanted},
    testing::MemoryStore,
};

struct Tiers {
    fixture: Fixture,
    namespace: Arc<Namespace>,
    nvme: Arc<MemoryStore>,
}

fn with_index(index_blocks_max: u64) -> Tiers {
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
    let cold = vec![Arc::clone(&nvme) as Arc<dyn BlockStore>];
    let fixture = Fixture::with_index(MIB, index_blocks_max, cold).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    Tiers { fixture, namespace, nvme }
}

fn tiers() -> Tiers {
    with_index(1 << 20)
}

impl Tiers {
    fn shared(&self) -> &Shared {
        &self.fixture.stack.shared
    }

    fn at(&self, number: u64) -> Hashed {
        self.shared().map.hashed(self.namespace.index(), hash_of(number))
    }

    /// The right bytes of a block, found on the medium.
    fn discover(&self, number: u64) -> bool {
        self.discover_as(number, number)
    }

    /// The bytes of block `contents`, found under the hash of block `number`.
    fn discover_as(&self, number: u64, contents: u64) -> bool {
        let bytes = block_bytes(&self.namespace, contents, 0, 4096);
        let hash = hash_of(number);
        let sum = crate::checksum::part_checksum(self.namespace.id(), &hash, 0, 0, &bytes);
        self.nvme.discover(&self.namespace, hash, &bytes, Checksums::One(sum))
    }

    async fn demote(&self, number: u64) {
        let hash = hash_of(number);
        assert!(self.fixture.stack.demote(&self.namespace, hash, Tier::Nvme).await.unwrap());
    }

    fn copy(&self, number: u64) -> Wanted {
        let copies = self.nvme.copies();
        copies.into_iter().find(|copy| copy.hash == hash_of(number)).unwrap()
    }

    /// Pushes everything out of dram.
    fn press(&self) {
        (100_000..100_256).for_each(|number| {
            self.fixture.put(&self.namespace, &[number]).unwrap();
        });
    }

    fn ages(&self, copies: &[Wanted]) -> Vec<Option<u64>> {
        self.shared().ages(Tier::Nvme, copies)
    }

    fn blocks(&self) -> u64 {
        self.namespace.counters().blocks.load(Ordering::Relaxed)
    }
}

#[tokio::test]
async fn what_is_found_is_readable_counted_once_and_told() {
    let tiers = tiers();
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    assert!(tiers.discover(1));
    assert_eq!(drain(&feed), [Stored { key: tiers.at(1).key, tier: Tier::Nvme }]);
    audit(&tiers.fixture);
    assert_eq!(tiers.blocks(), 1);
    let found = look(&tiers.fixture, &tiers.namespace, &[1], Ask::default());
    assert_eq!(found.counts.to_array(), [0, 1, 0, 0, 0]);
    // Found again: at a newer place, and nothing else.
    assert!(tiers.discover(1));
    assert_eq!((drain(&feed), tiers.nvme.usage().blocks), (Vec::new(), 1));
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    audit(&tiers.fixture);
    assert_eq!(tiers.blocks(), 1);
    // A put of it is a duplicate.
    assert_eq!(
        tiers.fixture.offer(&tiers.namespace, &[1], None).unwrap().claims(),
        [Claim::Duplicate]
    );
}

#[tokio::test]
async fn what_is_found_of_a_block_in_dram_is_one_more_copy_if_it_is_the_same() {
    let tiers = tiers();
    tiers.fixture.put(&tiers.namespace, &[1, 2]).unwrap();
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    assert!(tiers.discover(1));
    assert_eq!(drain(&feed), [Stored { key: tiers.at(1).key, tier: Tier::Nvme }]);
    assert!(!tiers.discover_as(2, 7), "dram stays");
    assert!(drain(&feed).is_empty());
    audit(&tiers.fixture);
    tiers.press();
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    assert!(!has(&tiers.fixture, &tiers.namespace, 2).await);
    // Nobody has a newer one: the later record counts.
    assert!(tiers.discover_as(3, 7) && tiers.discover(3));
    assert!(has(&tiers.fixture, &tiers.namespace, 3).await);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn what_is_found_of_a_block_that_is_being_put_is_forgotten() {
    let tiers = tiers();
    let mut batch = tiers.fixture.offer(&tiers.namespace, &[1], None).unwrap();
    assert!(!tiers.discover(1));
    tiers.fixture.write(&mut batch, &tiers.namespace, (0, 1), 0).unwrap();
    batch.finish();
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn what_is_found_leaves_an_eighth_of_the_map() {
    let tiers = with_index(80);
    let known = (0..100).filter(|number| tiers.discover(*number)).count();
    assert_eq!(known, 70);
    assert_eq!(tiers.nvme.usage().blocks, 70, "the rest is forgotten");
    assert!(tiers.discover(3), "what is known may still be found again");
    audit(&tiers.fixture);
    let new: Vec<u64> = (1000..1010).collect();
    assert_eq!(tiers.fixture.put(&tiers.namespace, &new).unwrap(), 10);
}

#[tokio::test]
async fn a_restart_finds_everything() {
    let tiers = tiers();
    let numbers: Vec<u64> = (0..20).collect();
    tiers.fixture.put(&tiers.namespace, &numbers).unwrap();
    for number in &numbers {
        tiers.demote(*number).await;
    }
    let cold = vec![Arc::clone(&tiers.nvme) as Arc<dyn BlockStore>];
    let again = Fixture::new(MIB, cold).unwrap();
    let namespace = again.namespace("m", &[4096]).unwrap();
    assert_eq!(tiers.nvme.recover(&again.namespaces), 20);
    for number in numbers {
        assert!(has(&again, &namespace, number).await, "{number}");
    }
    audit(&again);
}

#[tokio::test]
async fn what_leaves_is_told_and_forgotten_and_what_dram_has_stays() {
    let tiers = tiers();
    tiers.fixture.put(&tiers.namespace, &[1, 2]).unwrap();
    tiers.demote(1).await;
    tiers.press();
    assert_eq!(tiers.fixture.put(&tiers.namespace, &[2]).unwrap(), 1);
    tiers.demote(2).await;
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    let before = tiers.blocks();
    tiers.nvme.reclaim(2);
    let mut told = drain(&feed);
    told.sort_by_key(|event| format!("{event:?}"));
    let mut expected = [1, 2].map(|n| Removed { key: tiers.at(n).key, tier: Tier::Nvme });
    expected.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(told, expected);
    assert_eq!(tiers.blocks(), before - 1);
    assert!(!has(&tiers.fixture, &tiers.namespace, 1).await);
    assert!(has(&tiers.fixture, &tiers.namespace, 2).await);
    audit(&tiers.fixture);
    // Once more, and of a namespace that nobody opened: nothing happens.
    let stranger = crate::namespace::NamespaceId::from_bytes([9; 32]);
    let location = crate::map::Location(std::num::NonZeroU64::MIN);
    let hash = hash_of(2);
    let gone = Wanted { namespace: *tiers.namespace.id(), hash, location };
    let strange = Wanted { namespace: stranger, hash, location };
    tiers.shared().leaving(Tier::Nvme, &[gone, strange]);
    assert!(!tiers.shared().moved(Tier::Nvme, &strange, location));
    assert_eq!(tiers.ages(&[gone, strange]), [None, None]);
    assert!(drain(&feed).is_empty());
    audit(&tiers.fixture);
}

#[tokio::test]
async fn a_copy_that_moved_is_read_at_its_new_place_and_leaves_only_from_there() {
    let tiers = tiers();
    assert!(tiers.discover(1));
    let old = tiers.copy(1);
    assert!(tiers.nvme.compact(&old));
    assert_ne!(tiers.copy(1), old);
    // The old place is reclaimed after the move.
    tiers.shared().leaving(Tier::Nvme, &[old]);
    assert!(!tiers.shared().moved(Tier::Nvme, &old, old.location));
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    let packed = pack(&[1]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    assert!(tiers.discover(2));
    let removed = tiers.copy(2);
    let packed = pack(&[2]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    assert!(!tiers.shared().moved(Tier::Nvme, &removed, removed.location), "removed meanwhile");
    assert_eq!(tiers.nvme.usage().blocks, 0);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn ages_are_those_of_the_last_use_also_without_a_copy_in_dram() {
    let tiers = tiers();
    for number in 0..10 {
        assert!(tiers.discover(number));
    }
    let copies: Vec<Wanted> = (0..10).map(|number| tiers.copy(number)).collect();
    assert_eq!(tiers.ages(&copies), [Some(0); 10], "not used yet");
    let packed = pack(&[3, 4]);
    let touched = tiers.fixture.stack.touch(&tiers.namespace, Hashes::new(&packed, 32).unwrap());
    assert_eq!(touched, 0, "of those in dram");
    let ages = tiers.ages(&copies);
    assert!(ages[4] > Some(0) && ages[3] > ages[4], "tail first: {ages:?}");
    assert_eq!(ages.iter().filter(|age| **age == Some(0)).count(), 8);
    let elsewhere = Wanted { location: copies[5].location, ..copies[3] };
    assert_eq!(tiers.ages(&[elsewhere, copies[3]]), [None, ages[3]]);
}

#[tokio::test]
async fn the_cold_age_divides_a_tier() {
    let tiers = tiers();
    assert_eq!(tiers.shared().cold_age(Tier::Nvme, 0.5), 0);
    let numbers: Vec<u64> = (0..20_000).collect();
    for number in &numbers {
        assert!(tiers.discover(*number));
    }
    for number in &numbers {
        let packed = pack(&[*number]);
        tiers.fixture.stack.touch(&tiers.namespace, Hashes::new(&packed, 32).unwrap());
    }
    let copies: Vec<Wanted> = tiers.nvme.copies();
    let ages = tiers.ages(&copies);
    for share in [0.1, 0.5, 0.9] {
        // Several samples: each begins elsewhere.
        for _ in 0..5 {
            let age = tiers.shared().cold_age(Tier::Nvme, share);
            let below = ages.iter().filter(|found| found.unwrap() < age).count() as f64 / 20_000.0;
            assert!((below - share).abs() < 0.05, "{share}: {below}");
        }
    }
    assert_eq!(tiers.shared().cold_age(Tier::Object, 0.5), 0);
}

#[tokio::test]
async fn a_map_full_of_cold_blocks_takes_puts_again_after_the_tier_has_shed() {
    let tiers = with_index(400);
    for number in 0..350 {
        assert!(tiers.discover(number));
    }
    let mut stored = 0;
    for number in 1000..2000 {
        stored += tiers.fixture.put(&tiers.namespace, &[number]).unwrap();
        tiers.demote(number).await;
        assert!(tiers.fixture.stack.usage().index_blocks <= 400);
    }
    assert_eq!(stored, 1000, "asked in time");
    audit(&tiers.fixture);
    assert!(has(&tiers.fixture, &tiers.namespace, 1999).await);
    assert!(!has(&tiers.fixture, &tiers.namespace, 0).await, "the oldest have left");
}

/// What a tier does to the copy in the middle of a call.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Meanwhile {
    MoveBeforeFirstRead,
    MoveBeforeEachRead,
    MoveTwiceAfterWrite,
    ReclaimAfterWrite,
}

/// A tier that moves or reclaims a copy at the worst time.
#[derive(Debug)]
struct Hasty(Arc<MemoryStore>, Meanwhile);

impl BlockStore for Hasty {
    fn tier(&self) -> Tier {
        self.0.tier()
    }

    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, crate::error::Result<Location>> {
        Box::pin(async move {
            let location = self.0.put(block).await?;
            match self.1 {
                Meanwhile::MoveBeforeFirstRead | Meanwhile::MoveBeforeEachRead => {}
                Meanwhile::MoveTwiceAfterWrite => {
                    for _ in 0..2 {
                        assert!(self.0.compact(&self.0.copies()[0]));
                    }
                }
                Meanwhile::ReclaimAfterWrite => self.0.reclaim(1),
            }
            Ok(location)
        })
    }

    fn get<'a>(
        &'a self,
        wanted: Wanted,
        into: BlockWriter,
    ) -> BoxFuture<'a, crate::error::Result<Load>> {
        let first = wanted.location == Location(std::num::NonZeroU64::MIN);
        if first || self.1 == Meanwhile::MoveBeforeEachRead {
            assert!(self.0.compact(&wanted));
        }
        self.0.get(wanted, into)
    }

    fn attach(&self, above: std::sync::Weak<dyn Above>) {
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

fn hasty(meanwhile: Meanwhile) -> Tiers {
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
    let hasty: Arc<dyn BlockStore> = Arc::new(Hasty(Arc::clone(&nvme), meanwhile));
    let fixture = Fixture::new(MIB, vec![hasty]).unwrap();
    let namespace = fixture.namespace("m", &[4096]).unwrap();
    Tiers { fixture, namespace, nvme }
}

#[tokio::test]
async fn a_copy_that_moves_before_the_map_knows_it_is_known_where_it_is() {
    let tiers = hasty(Meanwhile::MoveTwiceAfterWrite);
    tiers.fixture.put(&tiers.namespace, &[1]).unwrap();
    tiers.demote(1).await;
    let copy = tiers.copy(1);
    assert!(tiers.ages(&[copy])[0].is_some());
    assert_eq!(tiers.nvme.usage().blocks, 1);
    let packed = pack(&[1]);
    tiers.fixture.stack.remove(&tiers.namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
    assert_eq!(tiers.nvme.usage().blocks, 0);
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn a_copy_that_leaves_before_the_map_knows_it_was_not_made() {
    let tiers = hasty(Meanwhile::ReclaimAfterWrite);
    tiers.fixture.put(&tiers.namespace, &[1]).unwrap();
    let feed = tiers.fixture.stack.subscribe();
    drain(&feed);
    let hash = hash_of(1);
    assert!(!tiers.fixture.stack.demote(&tiers.namespace, hash, Tier::Nvme).await.unwrap());
    assert!(drain(&feed).is_empty());
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
}

#[tokio::test]
async fn a_copy_that_moves_while_it_is_read_is_read_or_missed_and_stays_known() {
    let tiers = hasty(Meanwhile::MoveBeforeFirstRead);
    assert!(tiers.discover(1));
    assert!(has(&tiers.fixture, &tiers.namespace, 1).await);
    let tiers = hasty(Meanwhile::MoveBeforeEachRead);
    assert!(tiers.discover(1));
    assert!(!has(&tiers.fixture, &tiers.namespace, 1).await);
    assert_eq!(tiers.ages(&[tiers.copy(1)]), [Some(0)], "it is there");
    assert_quiet(&tiers.fixture);
    audit(&tiers.fixture);
}
