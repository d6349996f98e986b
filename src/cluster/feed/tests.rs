//! A filter that follows real tiers, and one that is told to somebody over it.

use kvstrata_tiers::{
    block::Hashes,
    namespace::Namespace,
    testing::{Fixture, hash_of},
};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    cluster::mirror::{Mirror, Room},
    limits::CHANGES_INTERVAL,
};

const MIB: u64 = 1 << 20;

struct Rig {
    fixture: Arc<Fixture>,
    namespace: Arc<Namespace>,
    feed: Feed,
    mirror: Mirror,
    stop: CancellationToken,
}

impl Rig {
    fn new(dram_bytes: u64, blocks_max: u64) -> Self {
        let fixture = Arc::new(Fixture::new(dram_bytes, Vec::new()).unwrap());
        let namespace = fixture.namespace("m", &[64]).unwrap();
        let changes = Changes::new(fixture.stack.clone());
        let (stop, feed) = (CancellationToken::new(), Feed::new(blocks_max));
        let (running, until) = (changes.clone(), stop.clone());
        let (following, of) = (feed.clone(), Arc::clone(&fixture));
        #[expect(clippy::disallowed_methods, reason = "a test without a server has no tasks")]
        drop(tokio::spawn(async move {
            let follow = following.follow(1, &of.stack, &changes, &of.namespaces);
            let follow = until.run_until_cancelled(follow);
            tokio::join!(running.run(until.clone()), follow)
        }));
        let mirror = Mirror::new(Room::new(16 << 20));
        Self { fixture, namespace, feed, mirror, stop }
    }

    fn put(&self, numbers: impl Iterator<Item = u64>) {
        let numbers: Vec<u64> = numbers.collect();
        self.fixture.put(&self.namespace, &numbers).unwrap();
    }

    async fn remove(&self, numbers: impl Iterator<Item = u64>) {
        for number in numbers {
            let hash = hash_of(number);
            let hashes = Hashes::new(hash.as_bytes(), 32).unwrap();
            self.fixture.stack.remove(&self.namespace, hashes).await.unwrap();
        }
    }

    /// Lets the feed follow, then tells the mirror; returns how many pieces and additions that took.
    async fn tell(&mut self) -> (usize, usize) {
        sleep(CHANGES_INTERVAL * 10).await;
        let (generation, version) = self.mirror.known();
        let mut telling = self.feed.telling(generation, version);
        let (mut pieces, mut added, mut complete) = (0, 0, false);
        while let Some(update) = self.feed.next(&mut telling) {
            assert!(!complete, "nothing follows what is complete");
            pieces += usize::from(update.keys > 0);
            added += update.added.len() / 8;
            complete = self.mirror.take(&update).unwrap();
        }
        assert!(complete);
        (pieces, added)
    }

    fn may_have(&self, numbers: impl Iterator<Item = u64>) -> usize {
        let digester = Digester::new(self.namespace.id());
        let filter = self.mirror.filter().unwrap();
        numbers.filter(|number| filter.may_have(digester.digest(&hash_of(*number)))).count()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_stored_is_told_as_a_whole_and_then_as_additions() {
    let mut rig = Rig::new(16 * MIB, 100_000);
    rig.put(0..100);
    assert_eq!(rig.tell().await, (1, 0));
    assert_eq!(rig.may_have(0..100), 100);
    assert!(rig.may_have(100..1100) < 10, "far from full");
    rig.put(100..150);
    let (pieces, added) = rig.tell().await;
    assert!(pieces == 0 && (49..=50).contains(&added), "{pieces} {added}");
    assert_eq!(rig.may_have(0..150), 150);
    assert_eq!(rig.tell().await, (0, 0), "nothing is new");
    // Put again, or removed: no change of the filter.
    rig.put(100..150);
    rig.remove(0..10).await;
    assert_eq!(rig.tell().await, (0, 0));
    assert_eq!(rig.may_have(0..10), 10);
}

#[tokio::test(start_paused = true)]
async fn another_one_is_made_when_it_is_overfull_or_a_quarter_has_gone() {
    let mut rig = Rig::new(16 * MIB, 20_000);
    rig.put(0..10);
    rig.tell().await;
    let (first, _) = rig.mirror.known();
    rig.put(10..u64::from(FILTER_KEYS_MIN) + 100);
    assert_eq!(rig.tell().await, (1, 0));
    let (second, _) = rig.mirror.known();
    assert!(second > first, "{second} after {first}");
    assert_eq!(rig.may_have(0..4196), 4196);
    assert!(rig.mirror.filter().unwrap().keys() > FILTER_KEYS_MIN);
    rig.remove(0..1100).await;
    assert_eq!(rig.tell().await, (1, 0));
    assert!(rig.mirror.known().0 > second);
    assert!(rig.may_have(0..1100) < 50, "what has gone is out");
    assert_eq!(rig.may_have(1100..4196), 4196 - 1100, "and the rest is in");
}

#[tokio::test(start_paused = true)]
async fn whoever_is_too_far_behind_is_told_the_whole_again() {
    let mut own = Own::new(9, FILTER_KEYS_MAX >> 6);
    let all = FILTER_ADDITIONS_KEPT as u64 + 50;
    for number in 0..2 * all {
        if own.version < all {
            own.add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        }
    }
    assert_eq!(own.latest.len(), FILTER_ADDITIONS_KEPT);
    let next = |generation, version| own.telling(generation, version).next;
    let whole = Some(Next::Piece { offset: 0, version: all });
    assert_eq!(next(9, 50), Some(Next::Added(50)));
    assert_eq!((next(9, 49), next(8, 100), next(9, all + 1)), (whole, whole, whole));
    let feed = Feed::new(1000);
    assert!(feed.next(&mut feed.telling(0, 0)).is_none(), "nothing before there is one");
    *feed.own.write() = Some(own);
    let mut telling = feed.telling(9, 50);
    let update = feed.next(&mut telling).unwrap();
    assert_eq!((update.version, update.complete), (all, true));
    assert_eq!(update.added.len(), FILTER_ADDITIONS_KEPT * 8);
    let mut telling = feed.telling(0, 0);
    feed.next(&mut telling).unwrap();
    *feed.own.write() = Some(Own::new(10, 10));
    assert!(feed.next(&mut telling).is_none(), "of a generation that is no more");
}

#[test]
fn memory_is_bounded_by_what_the_index_holds() {
    let feed = Feed::new(1_000_000);
    let bytes = 2 * (1_250_048 + 1_048_576);
    assert_eq!(feed.bytes_max(), bytes);
    assert_eq!(Feed::new(u64::MAX).keys_max, FILTER_KEYS_MAX);
}
