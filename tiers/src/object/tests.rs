//! The whole tier over a bucket in memory: what it stores, finds again, forgets, and how little it asks.

mod wards;

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use prometheus_client::registry::Registry;
use tokio::{task::JoinSet, time::timeout};

use super::{
    ObjectAdmission, ObjectConfig, ObjectMetrics, ObjectParts, ObjectStore, OpLabel, OutcomeLabel,
    PackMetrics,
    bucket::{Bucket, BucketConfig},
    names::{ClusterName, Owner},
};
use crate::{
    block::Hashes,
    limits::LONG_CHAIN_TOKENS,
    namespace::{Namespace, NamespaceTable, Secret},
    store::{BlockStore, RunId},
    testing::{FaultyObjectStore, Fixture, MemoryRuns, MemoryStore, block_bytes, hash_of, pack},
    tier::Tier,
};

mod repack;
mod soak;

const LEN: u32 = 32 << 10;

/// A bucket, a clock, and a directory for the copy of the log.
struct Rig {
    objects: Arc<FaultyObjectStore>,
    clock: Arc<AtomicU64>,
    local: tempfile::TempDir,
    admission: ObjectAdmission,
    capacity_bytes: u64,
    ttl: Option<Duration>,
    delete_grace: Duration,
    ordinal: u32,
    dram_bytes: u64,
    holder: &'static str,
}

impl Rig {
    fn new() -> Self {
        Self {
            objects: Arc::new(FaultyObjectStore::default()),
            clock: Arc::new(AtomicU64::new(1_700_000_000_000)),
            local: tempfile::tempdir().unwrap(),
            admission: ObjectAdmission::All,
            capacity_bytes: 0,
            ttl: None,
            delete_grace: Duration::from_secs(4200),
            ordinal: 2,
            dram_bytes: 16 << 20,
            holder: "node-0",
        }
    }

    /// Lets time pass, for the clock on the wall, too.
    async fn pass(&self, seconds: u64) {
        for _ in 0..seconds {
            self.clock.fetch_add(1000, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// The packs in the bucket, and their bytes.
    async fn listed(&self) -> Vec<(String, u64)> {
        use futures_util::TryStreamExt;
        use object_store::ObjectStore as _;

        let packs = object_store::path::Path::from("v1/test/packs");
        let listed: Vec<_> = self.objects.list(Some(&packs)).try_collect().await.unwrap();
        listed.into_iter().map(|object| (object.location.to_string(), object.size)).collect()
    }

    /// A node over the bucket, whose dram and nvme are empty. Dropping it is a kill.
    fn start(&self) -> Node {
        self.start_at(self.local.path())
    }

    fn start_at(&self, local: &Path) -> Node {
        let namespaces = Arc::new(NamespaceTable::new(Secret::new([7; 32]), false));
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let runs = Arc::new(MemoryRuns::over(Arc::clone(&nvme)));
        let requests = ObjectMetrics::register(&mut Registry::default());
        let objects: Arc<dyn object_store::ObjectStore> =
            Arc::<FaultyObjectStore>::clone(&self.objects);
        let bucket = Bucket::over(objects, BucketConfig::default(), requests.clone());
        let config = ObjectConfig {
            owner: Owner { cluster: ClusterName::new("test").unwrap(), ordinal: self.ordinal },
            holder: self.holder.to_owned(),
            local: local.to_owned(),
            capacity_bytes: self.capacity_bytes,
            ttl: self.ttl,
            delete_grace: self.delete_grace,
            admission: self.admission,
            pack_bytes: 1 << 20,
        };
        let clock = Arc::clone(&self.clock);
        let metrics = PackMetrics::register(&mut Registry::default());
        let parts = ObjectParts {
            bucket,
            runs: Arc::<MemoryRuns>::clone(&runs),
            namespaces: Arc::clone(&namespaces),
            metrics: metrics.clone(),
            clock: Arc::new(move || clock.load(Ordering::Relaxed)),
        };
        let (store, work) = ObjectStore::open(config, parts).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(work.run());
        let nvme_store: Arc<dyn BlockStore> = Arc::<MemoryStore>::clone(&nvme);
        let cold = vec![nvme_store, Arc::<ObjectStore>::clone(&store) as Arc<dyn BlockStore>];
        let fixture = Fixture::over(self.dram_bytes, 1 << 20, cold, namespaces).unwrap();
        let namespace = fixture.namespace("m", &[LEN]).unwrap();
        Node { store, runs, nvme, fixture, namespace, metrics, requests, _tasks: tasks }
    }
}

struct Node {
    store: Arc<ObjectStore>,
    runs: Arc<MemoryRuns>,
    nvme: Arc<MemoryStore>,
    fixture: Fixture,
    namespace: Arc<Namespace>,
    metrics: PackMetrics,
    requests: ObjectMetrics,
    _tasks: JoinSet<()>,
}

impl Node {
    /// Puts blocks, copies them to nvme and seals them there.
    async fn seal(&self, numbers: impl Iterator<Item = u64>) -> RunId {
        let numbers: Vec<u64> = numbers.collect();
        self.fixture.put(&self.namespace, &numbers).unwrap();
        for number in numbers {
            let hash = hash_of(number);
            assert!(self.fixture.stack.demote(&self.namespace, hash, Tier::Nvme).await.unwrap());
        }
        self.runs.seal()
    }

    /// Waits until all blocks of a run that should be are in packs which the log names.
    async fn packed(&self, run: RunId) {
        let packed = async {
            while !self.runs.offers().contains(&run) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            // Named a moment later.
            tokio::time::sleep(Duration::from_secs(6)).await;
        };
        timeout(Duration::from_secs(300), packed).await.expect("it is packed");
    }

    /// Uses blocks, without reading them.
    fn touch(&self, numbers: &[u64]) {
        let packed = pack(numbers);
        self.fixture.stack.touch(&self.namespace, Hashes::new(&packed, 32).unwrap());
    }

    async fn remove(&self, numbers: &[u64]) -> u32 {
        let packed = pack(numbers);
        let hashes = Hashes::new(&packed, 32).unwrap();
        self.fixture.stack.remove(&self.namespace, hashes).await.unwrap()
    }

    async fn found(&self) {
        timeout(Duration::from_secs(300), self.store.found()).await.expect("packs are found");
    }

    /// Those of the blocks that the map has in the object store.
    fn stored(&self, numbers: impl Iterator<Item = u64>) -> Vec<u64> {
        let numbers: Vec<u64> = numbers.collect();
        let above = self.fixture.stack.above().upgrade().unwrap();
        let mut found = 0;
        above.survey(Tier::Object, &mut |_, _, _| found += 1);
        let stored: Vec<u64> =
            numbers.into_iter().filter(|number| self.has_in_object(*number)).collect();
        assert!(stored.len() <= found);
        stored
    }

    fn has_in_object(&self, number: u64) -> bool {
        self.fixture.stack.tiers_of(&self.namespace, hash_of(number)).contains(&Tier::Object)
    }

    /// The right blocks among these that can be read.
    async fn hits(&self, numbers: impl Iterator<Item = u64>) -> Vec<u64> {
        let mut hits = Vec::new();
        let reads =
            numbers.map(async |number| (number, self.fixture.read(&self.namespace, number).await));
        for (number, read) in futures_util::future::join_all(reads).await {
            if let Some(parts) = read {
                let right = block_bytes(&self.namespace, number, 0, LEN as usize);
                assert_eq!(parts, [right], "block {number}");
                hits.push(number);
            }
        }
        hits
    }

    fn requests(&self, op: OpLabel) -> u64 {
        self.requests.requests(op, OutcomeLabel::Ok).get()
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_has_lost_everything_finds_its_blocks_in_the_bucket() {
    let rig = Rig::new();
    let node = rig.start();
    let run = node.seal(0..100).await;
    node.packed(run).await;
    assert!((3..=5).contains(&node.metrics.packs_made.get()), "of 1 MiB each");
    assert_eq!(node.metrics.packed_blocks.get(), 100);
    assert_eq!(node.stored(0..100).len(), 100);
    drop(node);
    let empty = tempfile::tempdir().unwrap();
    for (start, local) in [rig.local.path(), empty.path()].into_iter().enumerate() {
        let node = rig.start_at(local);
        node.found().await;
        let lists = node.requests(OpLabel::List);
        let before = node.requests(OpLabel::Get);
        assert!(before < 20, "{before} reads to find 100 blocks");
        assert_eq!(node.hits(0..100).await.len(), 100, "start {start}");
        let gets = node.requests(OpLabel::Get) - before;
        assert!(gets <= 8, "{gets} requests for 100 neighbours in 4 packs");
        assert_eq!(node.requests(OpLabel::List), lists, "reading lists nothing");
        assert_eq!(node.hits(100..110).await.len(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_removed_does_not_come_back_from_the_bucket() {
    let rig = Rig::new();
    let node = rig.start();
    let run = node.seal(0..60).await;
    node.packed(run).await;
    let removed: Vec<u64> = (0..60).step_by(3).collect();
    let packed = pack(&removed);
    let hashes = Hashes::new(&packed, 32).unwrap();
    let count = node.fixture.stack.remove(&node.namespace, hashes).await.unwrap();
    assert_eq!(count, 20);
    // Killed at once after the acknowledgement.
    drop(node);
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    let hits = node.hits(0..60).await;
    assert_eq!(hits.len(), 40);
    assert!(hits.iter().all(|number| number % 3 != 0), "{hits:?}");
    // Put again, they are new.
    let run = node.seal(0..6).await;
    node.packed(run).await;
    drop(node);
    let node = rig.start();
    node.found().await;
    assert_eq!(node.hits([0, 3].into_iter()).await, [0, 3]);
}

#[tokio::test(start_paused = true)]
async fn what_is_removed_before_it_is_found_stays_removed() {
    let rig = Rig::new();
    let node = rig.start();
    let run = node.seal(0..30).await;
    node.packed(run).await;
    drop(node);
    let node = rig.start();
    // The bucket has not been read yet: it cannot be promised, and it is kept.
    let packed = pack(&[1, 2, 3]);
    let removed = node.fixture.stack.remove(&node.namespace, Hashes::new(&packed, 32).unwrap());
    assert!(removed.await.is_err());
    node.found().await;
    assert_eq!(node.hits(0..5).await, [0, 4]);
    tokio::time::sleep(Duration::from_secs(5)).await;
    drop(node);
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    assert_eq!(node.hits(0..30).await.len(), 27);
    let again = node.fixture.stack.remove(&node.namespace, Hashes::new(&packed, 32).unwrap());
    assert_eq!(again.await.unwrap(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_pack_that_was_not_named_comes_back_without_what_was_removed_meanwhile() {
    let rig = Rig::new();
    let node = rig.start();
    node.found().await;
    rig.objects.set_latency(Duration::from_secs(3));
    node.seal(0..20).await;
    // The pack is on its way.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(node.metrics.packs_made.get(), 0);
    let packed = pack(&[1, 2, 3]);
    let removed = node.fixture.stack.remove(&node.namespace, Hashes::new(&packed, 32).unwrap());
    assert_eq!(removed.await.unwrap(), 3);
    assert_eq!((node.metrics.packs_made.get(), node.metrics.named_packs.get()), (1, 0));
    drop(node);
    rig.objects.set_latency(Duration::ZERO);
    let empty = tempfile::tempdir().unwrap();
    let node = rig.start_at(empty.path());
    node.found().await;
    let left: Vec<u64> = (0..20).filter(|number| ![1, 2, 3].contains(number)).collect();
    assert_eq!(node.hits(0..20).await, left);
}

#[tokio::test(start_paused = true)]
async fn a_full_map_costs_a_pack_or_two_however_often_it_says_so() {
    let rig = Rig::new();
    let node = rig.start();
    let run = node.seal(0..120).await;
    node.packed(run).await;
    let made = node.metrics.packs_made.get();
    (0..100).for_each(|_| node.store.shed());
    tokio::time::sleep(Duration::from_secs(5)).await;
    // One for what is heard at once, one for all that was said meanwhile.
    let dropped = node.metrics.dropped_packs.get();
    assert!((1..=2).contains(&dropped), "{dropped} of {made}");
    let left = node.stored(0..120).len();
    assert!((120 - 2 * 32..120).contains(&left), "{left} of 120");
}

#[tokio::test(start_paused = true)]
async fn only_what_was_read_is_stored_unless_all_is_asked_for() {
    let mut rig = Rig::new();
    rig.admission = ObjectAdmission::Worthwhile;
    let node = rig.start();
    let run = node.seal(0..80).await;
    node.found().await;
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(node.metrics.packs_made.get(), 0, "nothing was read");
    assert_eq!(node.hits(0..40).await.len(), 40);
    // More than a quarter of a pack is worth it by now.
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(node.stored(0..80), (0..40).collect::<Vec<_>>());
    assert_eq!(node.hits(40..43).await.len(), 3);
    tokio::time::sleep(Duration::from_secs(200)).await;
    assert_eq!(node.stored(40..80).len(), 0, "too little for a pack");
    // At last, before it leaves, whatever it makes.
    node.runs.press(1);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(node.stored(40..80), [40, 41, 42]);
    assert!(node.runs.offers().contains(&run));
}

#[tokio::test(start_paused = true)]
async fn long_chains_are_stored_though_nobody_has_read_them() {
    let mut rig = Rig::new();
    rig.admission = ObjectAdmission::Worthwhile;
    let mut node = rig.start();
    let block_tokens = u32::try_from(LONG_CHAIN_TOKENS / 40).unwrap();
    node.namespace = node.fixture.namespace_of("m", &[LEN], block_tokens + 1).unwrap();
    node.found().await;
    node.seal(0..39).await;
    node.seal(100..140).await;
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(node.stored(0..39).len(), 0);
    assert_eq!(node.stored(100..140).len(), 40);
}

#[tokio::test(start_paused = true)]
async fn packs_leave_when_they_are_too_old_or_too_many_and_their_objects_later() {
    for (capacity_bytes, ttl) in [(8 << 20, None), (0, Some(Duration::from_secs(600)))] {
        let mut rig = Rig::new();
        (rig.capacity_bytes, rig.ttl) = (capacity_bytes, ttl);
        let node = rig.start();
        let run = node.seal(0..180).await;
        node.packed(run).await;
        let made = node.metrics.packs_made.get();
        if ttl.is_none() {
            // The first ones are the hottest.
            assert_eq!(node.hits(0..30).await.len(), 30);
            let packed = pack(&(0..30).collect::<Vec<_>>());
            node.fixture.stack.touch(&node.namespace, Hashes::new(&packed, 32).unwrap());
        }
        if ttl.is_some() {
            rig.clock.fetch_add(601_000, Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_secs(61)).await;
        let left = node.stored(0..180);
        assert_eq!(left.is_empty(), ttl.is_some(), "{left:?}");
        if capacity_bytes > 0 {
            assert!(node.store.usage().used_bytes <= capacity_bytes);
            assert!(node.store.usage().used_bytes >= capacity_bytes / 4, "not more than it must");
            assert_eq!(node.stored(0..30).len(), 30, "the hottest stay: {left:?}");
        }
        assert!((1..=made).contains(&node.metrics.dropped_packs.get()));
        assert_eq!(node.metrics.deleted_packs.get(), 0, "somebody may be reading them");
        rig.clock.fetch_add(2 * 3600 * 1000, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(61)).await;
        let unused = node.metrics.deleted_packs.get() - node.metrics.dropped_packs.get();
        assert!(unused <= 2, "numbers that no pack has");
    }
}

#[tokio::test(start_paused = true)]
async fn a_start_deletes_what_was_dropped_after_one_grace_however_short_that_is() {
    let mut rig = Rig::new();
    (rig.ttl, rig.delete_grace) = (Some(Duration::from_secs(600)), Duration::from_secs(1));
    let node = rig.start();
    let run = node.seal(0..40).await;
    node.packed(run).await;
    rig.clock.fetch_add(601_000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(5)).await;
    let dropped = node.metrics.dropped_packs.get();
    assert_eq!((dropped > 0, node.metrics.deleted_packs.get()), (true, 0), "the clock stands");
    drop(node);
    let node = rig.start();
    node.store.found().await;
    rig.clock.fetch_add(1000, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(3)).await;
    let deleted = node.metrics.deleted_packs.get();
    assert!((dropped..=dropped + 2).contains(&deleted), "{deleted}: numbers that no pack has, too");
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_is_closed_while_it_packs_has_not_failed() {
    let rig = Rig::new();
    let node = rig.start();
    node.store.found().await;
    rig.objects.set_latency(Duration::from_secs(2));
    node.seal(0..40).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    node.store.close().await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(node.metrics.named_packs.get(), 0, "it was closed too late");
    assert_eq!(node.metrics.pack_failures.get(), 0);
    drop(node);
    rig.objects.set_latency(Duration::ZERO);
    let node = rig.start();
    node.store.found().await;
    assert!(!node.stored(0..40).is_empty(), "what was uploaded is found");
}

#[tokio::test(start_paused = true)]
async fn an_object_that_somebody_deleted_is_a_miss_and_all_of_it_leaves_the_map() {
    use object_store::ObjectStoreExt as _;

    let rig = Rig::new();
    let node = rig.start();
    let run = node.seal(0..25).await;
    node.packed(run).await;
    drop(node);
    let node = rig.start();
    node.found().await;
    let listed = rig.listed().await;
    assert_eq!(listed.len(), 1);
    rig.objects.delete(&listed[0].0.as_str().into()).await.unwrap();
    assert!(node.hits(0..1).await.is_empty());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(node.metrics.lost_packs.get(), 1);
    assert_eq!(node.stored(0..25).len(), 0);
    // Put again, they are stored again.
    let run = node.seal(0..25).await;
    node.packed(run).await;
    assert_eq!(node.stored(0..25).len(), 25);
    assert_eq!(node.nvme.copies().len(), 25);
}

#[tokio::test(start_paused = true)]
async fn a_second_node_with_the_ordinal_is_refused_and_takes_over_when_the_first_is_silent() {
    let mut rig = Rig::new();
    let first = rig.start();
    let run = first.seal(0..40).await;
    first.packed(run).await;
    rig.holder = "node-9";
    let second_dir = tempfile::tempdir().unwrap();
    let second = rig.start_at(second_dir.path());
    let refused = timeout(Duration::from_secs(120), second.store.found()).await;
    assert!(refused.is_err(), "the first one is alive");
    drop(first);
    rig.clock.fetch_add(700_000, Ordering::Relaxed);
    second.found().await;
    assert_eq!(second.hits(0..40).await.len(), 40);
}
