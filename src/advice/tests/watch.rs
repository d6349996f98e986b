//! Watching: a snapshot, then where blocks are, and a reset for whoever does not keep up.

use std::collections::BTreeMap;

use kvstrata_tiers::block::{BlockHash, HASH_BYTES_MAX};

use super::*;
use crate::{advice::watch::Watcher, limits::ROUTER_WATCHERS_MAX, schemes::Scheme};

/// What somebody knows who does as updates say.
#[derive(Debug, Default)]
struct Seen {
    tiers: BTreeMap<BlockHash, u8>,
    resets: usize,
    snapshots: Vec<u64>,
}

impl Seen {
    fn take(&mut self, update: Update) {
        match update {
            Update::Reset(_) => {
                self.tiers.clear();
                self.resets += 1;
            }
            Update::SnapshotEnd(blocks) => self.snapshots.push(blocks),
            Update::Blocks(Blocks { names: Names::Own(hashes), tiers, .. }) => {
                assert_eq!(hashes.len(), tiers.len() * HASH_BYTES_MAX);
                for (hash, tiers) in hashes.chunks(HASH_BYTES_MAX).zip(tiers) {
                    let hash = BlockHash::new(hash).unwrap();
                    self.tiers.insert(hash, tiers);
                    if tiers == 0 {
                        self.tiers.remove(&hash);
                    }
                }
            }
            Update::Blocks(other) => panic!("{other:?}"),
        }
    }

    /// Takes what comes until nothing more does.
    async fn follow(&mut self, watcher: &mut Watcher) {
        while let Ok(update) = tokio::time::timeout(Duration::from_secs(1), watcher.next()).await {
            self.take(update);
        }
    }
}

impl Setup {
    /// Has the hub of changes run.
    fn run_changes(&self) {
        let (changes, stop) = (self.node.changes.clone(), self.node.tasks.stop_token());
        self.node.tasks.spawn("changes", async move { changes.run(stop).await });
    }

    fn truth(&self, numbers: std::ops::Range<u64>) -> BTreeMap<BlockHash, u8> {
        let bit = |tier: &Tier| match tier {
            Tier::Dram => 1,
            Tier::Nvme => 2,
            Tier::Object => 4,
        };
        let tiers = |number| {
            let held = self.node.stack.tiers_of(&self.namespace, hash_of(number));
            (hash_of(number), held.iter().map(bit).sum::<u8>())
        };
        numbers.map(tiers).filter(|(_, tiers)| *tiers > 0).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn a_watcher_knows_what_is_where_after_the_snapshot_and_after_each_change() {
    let setup = Setup::new();
    setup.run_changes();
    let mut watcher = setup.node.watch(&Bearer::anyone(), Range::All, None).unwrap();
    let mut seen = Seen::default();
    seen.follow(&mut watcher).await;
    assert_eq!((seen.resets, &seen.snapshots[..]), (1, &[12][..]));
    assert_eq!(seen.tiers, setup.truth(0..12));
    setup.nvme.reclaim(3);
    setup.fixture.put(&setup.namespace, &[4, 20, 21]).unwrap();
    let packed = pack(&[0, 21]);
    let gone = Hashes::new(&packed, 32).unwrap();
    setup.node.stack.remove(&setup.namespace, gone).await.unwrap();
    seen.follow(&mut watcher).await;
    assert_eq!(seen.resets, 1);
    assert_eq!(seen.tiers, setup.truth(0..30));
    assert!(!seen.tiers.contains_key(&hash_of(0)) && seen.tiers[&hash_of(20)] == 1);
}

#[tokio::test(start_paused = true)]
async fn whoever_does_not_keep_up_is_told_to_forget_and_told_all_again() {
    let setup = Setup::new();
    setup.run_changes();
    let mut watcher = setup.node.watch(&Bearer::anyone(), Range::All, None).unwrap();
    let mut seen = Seen::default();
    seen.follow(&mut watcher).await;
    // More changes than are kept for a follower, while it does not read.
    let numbers: Vec<u64> = (0..64).collect();
    for _ in 0..4000 {
        setup.fixture.put(&setup.namespace, &numbers).unwrap();
        let packed = pack(&numbers);
        let all = Hashes::new(&packed, 32).unwrap();
        setup.node.stack.remove(&setup.namespace, all).await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    setup.fixture.put(&setup.namespace, &[1, 2, 3]).unwrap();
    seen.follow(&mut watcher).await;
    assert!(seen.resets > 1 && seen.snapshots.len() == seen.resets, "{seen:?}");
    assert_eq!(seen.tiers, setup.truth(0..64));
    assert_eq!(seen.tiers.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn only_what_is_meant_is_told_and_nothing_of_other_tenants() {
    let setup = Setup::new();
    setup.run_changes();
    let other = setup.fixture.namespace("other", &[BLOCK_BYTES]).unwrap();
    setup.fixture.put(&other, &[50]).unwrap();
    let snapshot = async |bearer: &Bearer, range| {
        let mut watcher = setup.node.watch(bearer, range, None).unwrap();
        let mut seen = Seen::default();
        seen.follow(&mut watcher).await;
        seen.tiers.len()
    };
    let anyone = Bearer::anyone();
    assert_eq!(snapshot(&anyone, Range::All).await, 13);
    assert_eq!(snapshot(&anyone, Range::Model("m".to_owned())).await, 12);
    let id = Bytes::copy_from_slice(other.id().as_bytes());
    assert_eq!(snapshot(&anyone, Range::Namespace(id.clone())).await, 1);
    let stranger = stranger();
    assert_eq!(snapshot(&stranger, Range::All).await, 0);
    let refused = setup.node.watch(&stranger, Range::Namespace(id), None).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::UnknownNamespace);
}

#[tokio::test(start_paused = true)]
async fn short_names_are_those_of_events_and_watchers_are_bounded() {
    let setup = Setup::new();
    setup.run_changes();
    let anyone = Bearer::anyone();
    for (scheme, from) in [(Scheme::VllmU64, 24), (Scheme::SglangI64, 0)] {
        let mut watcher = setup.node.watch(&anyone, Range::All, Some(scheme)).unwrap();
        let mut names = Vec::new();
        while let Ok(update) = tokio::time::timeout(Duration::from_secs(1), watcher.next()).await {
            if let Update::Blocks(Blocks { names: Names::Short(short), .. }) = update {
                names.extend(short);
            }
        }
        let name = |number| {
            let hash = *hash_of(number).as_bytes();
            u64::from_be_bytes(hash[from..from + 8].try_into().unwrap())
        };
        let mut expected: Vec<u64> = (0..12).map(name).collect();
        names.sort_unstable();
        expected.sort_unstable();
        assert_eq!(names, expected);
    }
    let watchers: Vec<_> = (0..ROUTER_WATCHERS_MAX)
        .map(|_| setup.node.watch(&anyone, Range::All, None).unwrap())
        .collect();
    let refused = setup.node.watch(&anyone, Range::All, None).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Exhausted { .. }));
    drop(watchers);
    setup.node.watch(&anyone, Range::All, None).unwrap();
}
