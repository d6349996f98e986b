//! Followers that come, fall behind and go: what they know is what is there.

use std::collections::HashSet;

use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    namespace::Namespace,
    testing::{Fixture, hash_of},
};
use tokio::time::sleep;

use super::*;

const MIB: u64 = 1 << 20;

/// A follower that believes what it is told.
#[derive(Default)]
struct Believer {
    shards: Vec<HashSet<(BlockHash, Tier)>>,
    resyncs: usize,
    described: usize,
}

impl Believer {
    fn believe(&mut self, change: Change) {
        self.shards.resize(SHARDS, HashSet::new());
        let shard = &mut self.shards[change.shard];
        match change.what {
            Changed::Resync(held) => {
                self.resyncs += 1;
                *shard = held.iter().map(|(key, tier)| (key.hash, *tier)).collect();
            }
            Changed::Events(events) => {
                for event in events.iter() {
                    match event {
                        TierEvent::Stored { key, tier } => {
                            assert!(shard.insert((key.hash, *tier)), "told twice: {event:?}");
                        }
                        TierEvent::Removed { key, tier } => {
                            assert!(shard.remove(&(key.hash, *tier)), "not known: {event:?}");
                        }
                        TierEvent::Described { .. } => self.described += 1,
                    }
                }
            }
        }
    }

    /// Takes what comes until nothing has come for a while.
    async fn catch_up(&mut self, follower: &mut Follower) {
        sleep(CHANGES_INTERVAL * 3).await;
        while let Some(change) = follower.try_next() {
            self.believe(change);
            if follower.queue.waiting.lock().changes.is_empty() {
                sleep(CHANGES_INTERVAL * 3).await;
            }
        }
    }

    fn known(&self) -> usize {
        self.shards.iter().map(HashSet::len).sum()
    }
}

struct Rig {
    fixture: Fixture,
    namespace: Arc<Namespace>,
    changes: Changes,
    stop: CancellationToken,
}

impl Rig {
    fn new(dram_bytes: u64) -> Self {
        let fixture = Fixture::new(dram_bytes, Vec::new()).unwrap();
        let namespace = fixture.namespace("m", &[64]).unwrap();
        let changes = Changes::new(fixture.stack.clone());
        let stop = CancellationToken::new();
        let (running, until) = (changes.clone(), stop.clone());
        #[expect(clippy::disallowed_methods, reason = "a test without a server has no tasks")]
        drop(tokio::spawn(async move { running.run(until).await }));
        Self { fixture, namespace, changes, stop }
    }

    fn put(&self, numbers: impl Iterator<Item = u64>) {
        let numbers: Vec<u64> = numbers.collect();
        for batch in numbers.chunks(65_536) {
            self.fixture.put(&self.namespace, batch).unwrap();
        }
    }

    async fn remove(&self, number: u64) {
        let hash = hash_of(number);
        let hashes = Hashes::new(hash.as_bytes(), 32).unwrap();
        self.fixture.stack.remove(&self.namespace, hashes).await.unwrap();
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_there_comes_first_and_then_what_changes() {
    let rig = Rig::new(16 * MIB);
    rig.put(0..100);
    let mut early = (rig.changes.follow(), Believer::default());
    early.1.catch_up(&mut early.0).await;
    assert_eq!((early.1.known(), early.1.resyncs), (100, SHARDS));
    rig.put(100..150);
    rig.remove(7).await;
    let mut late = (rig.changes.follow(), Believer::default());
    for (follower, believer) in [&mut early, &mut late] {
        believer.catch_up(follower).await;
        assert_eq!((believer.known(), believer.resyncs), (149, SHARDS));
    }
    let hash = hash_of(100);
    let chain = kvstrata_tiers::stack::Chain {
        hashes: Hashes::new(hash.as_bytes(), 32).unwrap(),
        parent: None,
        position: 0,
        tokens: &[],
        lora_name: "",
    };
    rig.fixture.stack.describe(&rig.namespace, chain).unwrap();
    early.1.catch_up(&mut early.0).await;
    assert_eq!(early.1.described, 1);
}

#[tokio::test(start_paused = true)]
async fn one_that_falls_behind_is_told_all_again_and_holds_up_nobody() {
    let rig = Rig::new(128 * MIB);
    let mut slow = (rig.changes.follow(), Believer::default());
    let mut quick = (rig.changes.follow(), Believer::default());
    slow.1.catch_up(&mut slow.0).await;
    for round in 0..8 {
        rig.put(round * 60_000..(round + 1) * 60_000);
        quick.1.catch_up(&mut quick.0).await;
    }
    let known = usize::try_from(rig.fixture.stack.usage().dram_blocks).unwrap();
    assert_eq!((quick.1.known(), quick.1.resyncs), (known, SHARDS), "it was never behind");
    let waiting = slow.0.queue.waiting.lock().keys;
    assert!(waiting < 2 * FOLLOWER_QUEUE_KEYS_MAX, "{waiting}");
    slow.1.catch_up(&mut slow.0).await;
    assert_eq!(slow.1.known(), known);
    assert!(slow.1.resyncs > SHARDS, "{}", slow.1.resyncs);
}

#[tokio::test(start_paused = true)]
async fn without_followers_the_store_keeps_no_events_and_the_next_one_begins_anew() {
    let rig = Rig::new(16 * MIB);
    let mut first = rig.changes.follow();
    first.next().await;
    drop(first);
    sleep(CHANGES_INTERVAL * 3).await;
    assert!(!rig.changes.is_followed());
    rig.put(0..10);
    let mut second = (rig.changes.follow(), Believer::default());
    second.1.catch_up(&mut second.0).await;
    assert_eq!((second.1.known(), second.1.resyncs), (10, SHARDS));
}
