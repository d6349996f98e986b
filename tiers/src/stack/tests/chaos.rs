//! Random histories against one promise: right bytes or nothing, and nothing left over.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{
    account::Quota, block::BlockKey, checksum::part_checksum, error::ErrorKind, event::TierEvent,
    map::Checksums, store::Above, testing::MemoryStore,
};

const BLOCKS: u64 = 80;

#[derive(Debug, Clone)]
enum Step {
    Put { from: u64, count: u64, give_up_at: Option<usize> },
    Open { from: u64, count: u64 },
    WriteOpen { which: usize },
    DropOpen { which: usize },
    Lease { from: u64, count: u64 },
    Unpin { which: usize },
    Forget { which: usize },
    Get { number: u64 },
    Remove { number: u64 },
    Large { number: u64 },
    Rank { from: u64, count: u64, part: u32 },
    Tier(TierStep),
}

/// What happens on nvme, or between it and dram.
#[derive(Debug, Clone)]
enum TierStep {
    Demote { number: u64 },
    Clean { turns: usize },
    Reclaim { count: usize },
    Compact { which: usize },
    Discover { number: u64 },
    Shed,
}

fn step() -> impl Strategy<Value = Step> {
    let block = || 0..BLOCKS;
    let span = || 1..40_u64;
    prop_oneof![
        4 => (block(), span(), prop::option::of(0..40_usize))
            .prop_map(|(from, count, give_up_at)| Step::Put { from, count, give_up_at }),
        2 => (block(), span()).prop_map(|(from, count)| Step::Open { from, count }),
        3 => (0..8_usize).prop_map(|which| Step::WriteOpen { which }),
        1 => (0..8_usize).prop_map(|which| Step::DropOpen { which }),
        2 => (block(), span()).prop_map(|(from, count)| Step::Lease { from, count }),
        1 => (0..8_usize).prop_map(|which| Step::Unpin { which }),
        1 => (0..8_usize).prop_map(|which| Step::Forget { which }),
        4 => block().prop_map(|number| Step::Get { number }),
        1 => block().prop_map(|number| Step::Remove { number }),
        1 => block().prop_map(|number| Step::Large { number }),
        2 => (block(), span(), 0..2_u32)
            .prop_map(|(from, count, part)| Step::Rank { from, count, part }),
        12 => tier_step().prop_map(Step::Tier),
    ]
}

fn tier_step() -> impl Strategy<Value = TierStep> {
    prop_oneof![
        3 => (0..BLOCKS).prop_map(|number| TierStep::Demote { number }),
        2 => (0..30_usize).prop_map(|turns| TierStep::Clean { turns }),
        1 => (0..20_usize).prop_map(|count| TierStep::Reclaim { count }),
        2 => (0..40_usize).prop_map(|which| TierStep::Compact { which }),
        3 => (0..BLOCKS).prop_map(|number| TierStep::Discover { number }),
        1 => Just(TierStep::Shed),
    ]
}

struct World {
    fixture: Fixture,
    namespace: Arc<Namespace>,
    large: Arc<Namespace>,
    nvme: Arc<MemoryStore>,
    open: Vec<(PutBatch, Vec<u64>, usize)>,
    held: Vec<(u64, Vec<Pin>)>,
    feed: EventFeed,
    /// What the events said so far.
    told: BTreeSet<(BlockKey, Tier)>,
}

impl World {
    fn new(index_blocks_max: u64, quotas: [Quota; 2]) -> Self {
        // 32 blocks of the usual size: everything is under pressure all the time.
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let cold = Arc::clone(&nvme) as Arc<dyn BlockStore>;
        let fixture = Fixture::with_index(2 * MIB, index_blocks_max, vec![cold]).unwrap();
        let namespace = fixture.namespace("m", &[32_768, 32_768]).unwrap();
        let large = fixture.namespace_for("other", ("large", &[1 << 19]), 16).unwrap();
        let [default, other] = quotas;
        fixture.stack.set_quotas(&[("default", default), ("other", other)]).unwrap();
        let feed = fixture.stack.subscribe();
        let (open, held, told) = (Vec::new(), Vec::new(), BTreeSet::new());
        Self { fixture, namespace, large, nvme, open, held, feed, told }
    }

    async fn run(&mut self, step: Step) {
        match step {
            Step::Put { from, count, give_up_at } => self.put(from, count, give_up_at),
            Step::Open { from, count } => {
                let numbers: Vec<u64> = (from..from + count).collect();
                let batch = self.fixture.offer(&self.namespace, &numbers, None).unwrap();
                self.open.push((batch, numbers, 0));
            }
            Step::WriteOpen { which } => self.write_open(which),
            Step::DropOpen { which } => {
                if which < self.open.len() {
                    drop(self.open.remove(which));
                }
            }
            Step::Lease { from, count } => {
                let numbers: Vec<u64> = (from..from + count).collect();
                let answer = lease(&self.fixture, &self.namespace, &numbers);
                assert!(answer.pins.len() <= answer.prefix_blocks as usize);
                self.held.push((from, answer.pins));
            }
            Step::Unpin { which } => {
                if which < self.held.len() {
                    let (_, pins) = self.held.remove(which);
                    self.fixture.stack.unpin(pins);
                }
            }
            Step::Forget { which } => {
                if which < self.held.len() {
                    drop(self.held.remove(which));
                }
            }
            Step::Get { number } => {
                let fetch = get(&self.fixture, &self.namespace, number).await;
                if let Fetch::Hit(_) = fetch {
                    assert!(has(&self.fixture, &self.namespace, number).await);
                }
                // Busy: everything is pinned, so there is no room to load into.
                assert!(!matches!(fetch, Fetch::Corrupt | Fetch::Timeout));
            }
            Step::Remove { number } => {
                let packed = pack(&[number]);
                let hashes = Hashes::new(&packed, 32).unwrap();
                self.fixture.stack.remove(&self.namespace, hashes).await.unwrap();
            }
            Step::Large { number } => {
                self.fixture.put(&self.large, &[number]).unwrap();
            }
            Step::Rank { from, count, part } => {
                let numbers: Vec<u64> = (from..from + count).collect();
                put_part(&self.fixture, &self.namespace, &numbers, part, None);
            }
            Step::Tier(step) => self.run_tier(step).await,
        }
        self.check_held();
        self.check_events();
        self.check_copies();
    }

    async fn run_tier(&self, step: TierStep) {
        match step {
            TierStep::Demote { number } => {
                let hash = hash_of(number);
                let demoted = self.fixture.stack.demote(&self.namespace, hash, Tier::Nvme).await;
                // It has on nvme what it may have.
                let is_over = |error: &Error| matches!(error.kind(), ErrorKind::Exhausted { .. });
                assert!(demoted.as_ref().err().is_none_or(is_over), "{demoted:?}");
            }
            TierStep::Clean { turns } => {
                let stop = async {
                    for _ in 0..turns {
                        tokio::task::yield_now().await;
                    }
                };
                self.fixture.stack.clean(stop).await;
            }
            TierStep::Reclaim { count } => self.nvme.reclaim(count),
            TierStep::Compact { which } => {
                if let Some(copy) = self.nvme.copies().get(which) {
                    assert!(self.nvme.compact(copy), "every copy is known");
                }
            }
            TierStep::Discover { number } => {
                self.discover(number);
            }
            TierStep::Shed => self.nvme.shed(),
        }
    }

    fn discover(&self, number: u64) -> bool {
        let (namespace, hash) = (&self.namespace, hash_of(number));
        let parts = [0, 1].map(|part| block_bytes(namespace, number, part, 32_768));
        let sum =
            |(rank, bytes): (u32, &Vec<u8>)| part_checksum(namespace.id(), &hash, 0, rank, bytes);
        let sums = (0..).zip(&parts).map(sum).collect();
        self.nvme.discover(namespace, hash, &parts.concat(), Checksums::new(sums))
    }

    /// What the events told is what the map has.
    fn check_events(&mut self) {
        for shard in 0..self.feed.shards() {
            match self.feed.drain(shard) {
                crate::event::Drained::Resync(blocks) => self.told.extend(blocks),
                crate::event::Drained::Events(events) => {
                    for event in events {
                        let fits = match event {
                            TierEvent::Stored { key, tier } => self.told.insert((key, tier)),
                            TierEvent::Removed { key, tier } => self.told.remove(&(key, tier)),
                            TierEvent::Described { .. } => true,
                        };
                        assert!(fits, "told twice: {event:?}");
                    }
                }
            }
        }
        let map = &self.fixture.stack.shared.map;
        let shards = (0..crate::limits::SHARDS).filter_map(|n| map.with_shard(n, |s| s.readable()));
        let here: BTreeSet<_> = shards.flatten().collect();
        assert_eq!(self.told, here);
    }

    /// Every copy of the tier is known, and every copy that is known is there.
    fn check_copies(&self) {
        let shared = &self.fixture.stack.shared;
        let copies = self.nvme.copies();
        for (copy, age) in copies.iter().zip(shared.ages(Tier::Nvme, &copies)) {
            assert!(age.is_some(), "no map knows of {copy:?}");
        }
        let known = self.told.iter().filter(|(_, tier)| *tier == Tier::Nvme).count();
        assert_eq!(copies.len(), known);
    }

    fn put(&mut self, from: u64, count: u64, give_up_at: Option<usize>) {
        let numbers: Vec<u64> = (from..from + count).collect();
        let mut batch = self.fixture.offer(&self.namespace, &numbers, None).unwrap();
        let claims = batch.claims().to_vec();
        for (position, number) in numbers.iter().enumerate() {
            if give_up_at == Some(position) {
                return;
            }
            if claims[position] == Claim::Wanted {
                for part in 0..2 {
                    let at = (u32::try_from(position).unwrap(), *number);
                    let done = self.fixture.write(&mut batch, &self.namespace, at, part).unwrap();
                    if done == Some(PutOutcome::Refused) {
                        break;
                    }
                }
            }
        }
        batch.finish();
    }

    /// Writes one more part of a batch that stays open.
    fn write_open(&mut self, which: usize) {
        let Some((batch, numbers, written)) = self.open.get_mut(which) else { return };
        let (position, part) = (*written / 2, u32::from(!written.is_multiple_of(2)));
        *written += 1;
        let Some(number) = numbers.get(position) else { return };
        let at = (u32::try_from(position).unwrap(), *number);
        // Errors are legal here: the position may not be wanted, or have been refused.
        let _outcome = self.fixture.write(batch, &self.namespace, at, part);
    }

    /// No pinned byte ever changes.
    fn check_held(&self) {
        for (from, pins) in &self.held {
            for (pin, number) in pins.iter().zip(*from..) {
                let both = [0, 1].map(|part| block_bytes(&self.namespace, number, part, 32_768));
                assert!(pin.contents().as_ref() == both.concat(), "pinned block {number} changed");
            }
        }
    }
}

/// No quota, a floor, or a most that both sizes fit into.
fn quota() -> impl Strategy<Value = Quota> {
    let none = Quota::default();
    prop_oneof![
        2 => Just(none),
        1 => Just(Quota { dram_floor: MIB / 2, nvme_floor: MIB / 2, ..none }),
        1 => Just(Quota { dram_max: MIB, nvme_max: MIB / 2, ..none }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_history_ends_with_right_bytes_and_nothing_left(
        steps in prop::collection::vec(step(), 1..60),
        // Enough for everything, and less than the blocks that there are.
        index_blocks_max in prop_oneof![Just(1 << 20), Just(72)],
        quotas in [quota(), quota()],
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let mut world = World::new(index_blocks_max, quotas);
            for step in steps {
                world.run(step).await;
                audit(&world.fixture);
            }
            // All clients die.
            world.open.clear();
            world.held.clear();
            // Fragments of half-written blocks may stay; they make way for whole ones.
            for number in 1000..1064 {
                world.fixture.put(&world.namespace, &[number]).unwrap();
            }
            assert_quiet(&world.fixture);
            let usage = world.fixture.stack.usage();
            assert_eq!(usage.corrupt, 0);
            for number in 1063 - 15..1064 {
                assert!(has(&world.fixture, &world.namespace, number).await, "{number}");
            }
            audit(&world.fixture);
            // Without blocks there are no contexts: none was held twice, none let go too late.
            for namespace in [&world.namespace, &world.large] {
                let all: Vec<u64> = (0..1064).collect();
                let packed = pack(&all);
                let hashes = Hashes::new(&packed, 32).unwrap();
                world.fixture.stack.remove(namespace, hashes).await.unwrap();
            }
            audit(&world.fixture);
            let shared = &world.fixture.stack.shared;
            assert_eq!((shared.contexts.len(), shared.pool.used_bytes()), (0, 0));
            assert_eq!(world.nvme.usage().blocks, 0, "no copy that no map knows");
        });
    }
}

/// Four threads on one small stack: every byte read or held is right, and nothing is left over.
#[test]
fn threads_do_not_disturb_one_another() {
    const THREADS: u64 = 4;
    const ROUNDS: u64 = 800;
    let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
    let fixture = Fixture::new(2 * MIB, vec![Arc::clone(&nvme) as Arc<dyn BlockStore>]).unwrap();
    let namespace = fixture.namespace("m", &[8192, 8192]).unwrap();
    let (mut hits, mut asked) = (0, 0);
    let (stop, stopped) = tokio::sync::watch::channel(false);
    std::thread::scope(|scope| {
        scope.spawn(|| clean_until(&fixture, stopped.clone()));
        scope.spawn(|| churn(&nvme, &stopped));
        let workers: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (fixture, namespace) = (&fixture, &namespace);
                scope.spawn(move || work(fixture, namespace, thread, ROUNDS))
            })
            .collect();
        let done: Vec<_> = workers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        stop.send_replace(true);
        for (found, of) in done.into_iter().map(Result::unwrap) {
            hits += found;
            asked += of;
        }
    });
    assert!(hits * 4 > asked, "{hits} of {asked}: a stack that always misses proves nothing");
    let usage = fixture.stack.usage();
    assert_eq!(usage.corrupt, 0);
    audit(&fixture);
    assert!(usage.evicted_blocks > 0);
    let all: Vec<u64> = (0..192).collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let packed = pack(&all);
    runtime.block_on(fixture.stack.remove(&namespace, Hashes::new(&packed, 32).unwrap())).unwrap();
    audit(&fixture);
    let shared = &fixture.stack.shared;
    assert_eq!((shared.contexts.len(), shared.pool.used_bytes()), (0, 0));
    assert_eq!((nvme.usage().blocks, shared.map.len()), (0, 0));
}

/// The cleaner, on a thread of its own.
fn clean_until(fixture: &Fixture, mut stopped: tokio::sync::watch::Receiver<bool>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let stop = async move { drop(stopped.wait_for(|stopped| *stopped).await) };
    runtime.block_on(fixture.stack.clean(stop));
}

/// A tier that reclaims, sheds and compacts all the time.
fn churn(nvme: &MemoryStore, stopped: &tokio::sync::watch::Receiver<bool>) {
    let mut rounds = 0_usize;
    while !*stopped.borrow() {
        rounds += 1;
        let copies = nvme.copies();
        if let Some(copy) = copies.get(rounds % copies.len().max(1)) {
            // Whoever removed it meanwhile was faster.
            let _moved = nvme.compact(copy);
        }
        match rounds % 64 {
            0 => nvme.reclaim(3),
            32 => nvme.shed(),
            _ => std::thread::yield_now(),
        }
    }
}

/// Puts, leases, reads and removes chains out of 192 blocks, 128 of which fit.
fn work(fixture: &Fixture, namespace: &Arc<Namespace>, thread: u64, rounds: u64) -> (u64, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut hits = 0;
    for round in 0..rounds {
        // Some of the eight chains are asked for more often than others.
        let random = round.wrapping_mul(2_654_435_761).wrapping_add(thread * 97) >> 3;
        let from = 24 * ((random % 8) * (random / 8 % 8) / 8);
        let chain: Vec<u64> = (from..from + 24).collect();
        let held = lease(fixture, namespace, &chain);
        hits += u64::from(held.prefix_blocks);
        fixture.put(namespace, &chain).unwrap();
        for (pin, number) in held.pins.iter().zip(from..) {
            let both = [0, 1].map(|part| block_bytes(namespace, number, part, 8192));
            assert!(pin.contents().as_ref() == both.concat(), "pinned block {number} changed");
        }
        fixture.stack.unpin(held.pins);
        runtime.block_on(async {
            if let Fetch::Hit(block) = get(fixture, namespace, from).await {
                let expected = block_bytes(namespace, from, 1, 8192);
                assert!(block.part(1).unwrap().as_ref() == expected, "wrong bytes: {from}");
            }
            if round % 10 == thread {
                fixture.stack.demote(namespace, hash_of(from + 1), Tier::Nvme).await.unwrap();
            }
            if round % 25 == thread {
                let packed = pack(&chain[..4]);
                fixture.stack.remove(namespace, Hashes::new(&packed, 32).unwrap()).await.unwrap();
                put_part(fixture, namespace, &chain[..4], (thread % 2) as u32, None);
            }
        });
    }
    (hits, rounds * 24)
}
