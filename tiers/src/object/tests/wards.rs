//! Several nodes over one bucket: who serves the packs of one that is gone, and until when.

use futures_util::TryStreamExt;
use object_store::ObjectStore as _;

use super::*;
use crate::{
    object::{
        format::Role,
        owner::{Claim, Sighting, look, open_epoch},
    },
    testing::Trouble,
};

const NAMES: [&str; 4] = ["node-0", "node-1", "node-2", "node-3"];
/// Longer than a node may be silent, and a scan.
const LONG: u64 = 800;

/// Nodes with the ordinals 0 to 3, each with its own way to the bucket.
struct Cluster {
    rig: Rig,
    ways: Vec<Arc<FaultyObjectStore>>,
    dirs: Vec<tempfile::TempDir>,
    nodes: Vec<Option<Node>>,
}

impl Cluster {
    async fn of(count: usize) -> Self {
        let rig = Rig::new();
        let ways = (0..count).map(|_| Arc::new(rig.objects.another_way())).collect();
        let dirs = (0..count).map(|_| tempfile::tempdir().unwrap()).collect();
        let nodes = (0..count).map(|_| None).collect();
        let mut cluster = Self { rig, ways, dirs, nodes };
        for node in 0..count {
            cluster.start(node).await;
        }
        cluster
    }

    async fn start(&mut self, node: usize) {
        self.rig.ordinal = u32::try_from(node).unwrap();
        self.rig.holder = NAMES[node];
        self.rig.objects = Arc::clone(&self.ways[node]);
        self.nodes[node] = Some(self.rig.start_at(self.dirs[node].path()));
        self.node(node).found().await;
    }

    fn kill(&mut self, node: usize) {
        self.nodes[node] = None;
    }

    fn node(&self, node: usize) -> &Node {
        self.nodes[node].as_ref().unwrap()
    }

    /// Seconds pass, on all clocks.
    async fn pass(&self, seconds: u64) {
        for _ in 0..seconds.div_ceil(10) {
            self.rig.clock.fetch_add(10_000, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
    }

    fn now(&self) -> u64 {
        self.rig.clock.load(Ordering::Relaxed)
    }

    /// The nodes that have adopted something and not given it back.
    fn adopters(&self) -> Vec<usize> {
        let has = |node: &Node| node.metrics.adopted_ordinals.get() > 0;
        let nodes = self.nodes.iter().enumerate();
        nodes.filter(|(_, node)| node.as_ref().is_some_and(has)).map(|(at, _)| at).collect()
    }

    fn bucket(&self) -> Arc<Bucket> {
        let metrics = ObjectMetrics::register(&mut Registry::default());
        let objects = Arc::new(self.rig.objects.another_way());
        Bucket::over(objects, BucketConfig::default(), metrics)
    }

    async fn sees(&self, ordinal: u32) -> Sighting {
        let soon = tokio::time::Instant::now() + Duration::from_secs(60);
        look(&self.bucket(), &owner(ordinal), soon).await.unwrap().unwrap()
    }

    /// Gives an ordinal up for adoption.
    async fn release(&self, ordinal: u32) {
        let soon = tokio::time::Instant::now() + Duration::from_secs(60);
        let claim = Claim::release("somebody", true);
        open_epoch(&self.bucket(), &owner(ordinal), claim, self.now(), soon).await.unwrap();
    }

    /// The names of the objects of an ordinal's packs.
    async fn packs(&self, ordinal: u32) -> Vec<String> {
        let prefix = object_store::path::Path::from("v1/test/packs");
        let way = self.rig.objects.another_way();
        let listed: Vec<_> = way.list(Some(&prefix)).try_collect().await.unwrap();
        let of = format!("/{ordinal:05}-");
        let names = listed.into_iter().map(|meta| meta.location.to_string());
        let mut names: Vec<_> = names.filter(|name| name.contains(&of)).collect();
        names.sort();
        names
    }
}

fn owner(ordinal: u32) -> Owner {
    Owner { cluster: ClusterName::new("test").unwrap(), ordinal }
}

async fn remove(node: &Node, numbers: &[u64]) -> u32 {
    let packed = pack(numbers);
    let hashes = Hashes::new(&packed, 32).unwrap();
    node.fixture.stack.remove(&node.namespace, hashes).await.unwrap()
}

/// Four nodes, the first of which has stored blocks and is gone, and who has adopted it.
async fn bereft(blocks: u64) -> (Cluster, usize) {
    let mut cluster = Cluster::of(4).await;
    let run = cluster.node(0).seal(0..blocks).await;
    cluster.node(0).packed(run).await;
    cluster.kill(0);
    cluster.pass(500).await;
    assert!(cluster.adopters().is_empty(), "it may only be starting again");
    cluster.pass(LONG - 500).await;
    let [adopter] = cluster.adopters()[..] else { panic!("{:?}", cluster.adopters()) };
    (cluster, adopter)
}

#[tokio::test(start_paused = true)]
async fn one_of_those_left_serves_the_packs_of_a_node_that_is_gone_until_it_is_back() {
    let (mut cluster, adopter) = bereft(60).await;
    let packs = cluster.packs(0).await;
    for node in 1..4 {
        let hits = cluster.node(node).hits(0..60).await.len();
        assert_eq!(hits, if node == adopter { 60 } else { 0 }, "node {node}");
    }
    let node = cluster.node(adopter);
    assert_eq!((node.metrics.adoptions.get(), node.metrics.given_back.get()), (1, 0));
    // It packs in its own name only, also what others have put.
    let run = node.seal(100..140).await;
    node.packed(run).await;
    assert!(node.metrics.packs_made.get() > 0);
    assert_eq!(cluster.packs(0).await, packs);
    assert_eq!(remove(node, &[3, 4, 5]).await, 3);
    assert_eq!(node.hits(0..60).await.len(), 57);
    cluster.pass(LONG).await;
    assert_eq!(cluster.adopters(), [adopter], "it leaves signs of life");

    cluster.start(0).await;
    let left: Vec<u64> = (0..60).filter(|number| ![3, 4, 5].contains(number)).collect();
    assert_eq!(cluster.node(0).hits(0..60).await, left, "at once");
    let run = cluster.node(0).seal(60..90).await;
    cluster.node(0).packed(run).await;
    cluster.pass(120).await;
    assert_eq!(cluster.adopters(), [0; 0]);
    let node = cluster.node(adopter);
    assert_eq!(node.metrics.given_back.get(), 1);
    assert_eq!((node.stored(0..60).len(), node.hits(100..140).await.len()), (0, 40));
    let held = cluster.sees(0).await;
    assert_eq!((held.role(), held.alive(cluster.now())), (Role::Own, Some("node-0")));
    // What was removed there is removed for good.
    cluster.kill(0);
    cluster.start(0).await;
    assert_eq!(cluster.node(0).hits(0..90).await.len(), 87);
}

#[tokio::test(start_paused = true)]
async fn a_node_that_was_cut_off_takes_its_packs_back_without_what_was_removed_meanwhile() {
    let mut cluster = Cluster::of(3).await;
    let run = cluster.node(0).seal(0..40).await;
    cluster.node(0).packed(run).await;
    cluster.ways[0].trouble_always(Trouble::Status(503));
    cluster.pass(LONG + 200).await;
    let [adopter] = cluster.adopters()[..] else { panic!("{:?}", cluster.adopters()) };
    assert_eq!(cluster.node(adopter).hits(0..40).await.len(), 40);
    assert_eq!(remove(cluster.node(adopter), &[7, 8]).await, 2);
    assert_eq!(cluster.node(0).stored(0..40).len(), 40, "it does not know yet");
    cluster.ways[0].trouble_always(Trouble::None);
    cluster.pass(400).await;
    assert_eq!(cluster.adopters(), [0; 0]);
    let node = cluster.node(0);
    let left: Vec<u64> = (0..40).filter(|number| ![7, 8].contains(number)).collect();
    assert_eq!(node.stored(0..40), left);
    assert_eq!(node.hits(0..40).await.len(), 40, "it has these in memory");
    assert_eq!(cluster.sees(0).await.role(), Role::Own);
    // It writes again.
    let run = node.seal(40..60).await;
    node.packed(run).await;
    assert_eq!(node.stored(40..60).len(), 20);
    cluster.kill(0);
    cluster.start(0).await;
    assert_eq!(cluster.node(0).hits(0..60).await.len(), 58);
}

#[tokio::test(start_paused = true)]
async fn when_the_adopter_is_gone_another_one_adopts_both_and_it_comes_back_to_both_at_once() {
    let (mut cluster, first) = bereft(40).await;
    let run = cluster.node(first).seal(50..80).await;
    cluster.node(first).packed(run).await;
    // It starts again, soon: nobody waits for what it had.
    cluster.kill(first);
    cluster.start(first).await;
    cluster.pass(120).await;
    assert_eq!(cluster.adopters(), [first]);
    cluster.kill(first);
    cluster.pass(LONG).await;
    let mut hits = 0;
    for node in (1..4).filter(|node| *node != first) {
        hits += cluster.node(node).hits(0..80).await.len();
    }
    assert_eq!(hits, 70);
}

#[tokio::test(start_paused = true)]
async fn what_is_released_is_adopted_within_a_minute_or_two() {
    let mut cluster = Cluster::of(3).await;
    let run = cluster.node(0).seal(0..40).await;
    cluster.node(0).packed(run).await;
    cluster.kill(0);
    let soon = tokio::time::Instant::now() + Duration::from_secs(60);
    let polite = Claim::release("somebody", false);
    let refused = open_epoch(&cluster.bucket(), &owner(0), polite, cluster.now(), soon).await;
    assert!(refused.unwrap_err().to_string().contains("\"node-0\""));
    cluster.release(0).await;
    cluster.pass(120).await;
    let [adopter] = cluster.adopters()[..] else { panic!("{:?}", cluster.adopters()) };
    assert_eq!(cluster.node(adopter).hits(0..40).await.len(), 40);
    let held = cluster.sees(0).await;
    assert_eq!((held.role(), held.alive(cluster.now())), (Role::Ward, Some(NAMES[adopter])));
}

#[tokio::test(start_paused = true)]
async fn two_nodes_that_claim_an_ordinal_as_their_own_are_told_by_name_whoever_had_adopted_it() {
    let (mut cluster, adopter) = bereft(20).await;
    cluster.start(0).await;
    cluster.pass(120).await;
    cluster.rig.ordinal = 0;
    cluster.rig.holder = "another";
    let other_dir = tempfile::tempdir().unwrap();
    let other = cluster.rig.start_at(other_dir.path());
    assert!(timeout(Duration::from_secs(100), other.store.found()).await.is_err());
    let soon = tokio::time::Instant::now() + Duration::from_secs(60);
    let claim = Claim::own("another");
    let refused = open_epoch(&cluster.bucket(), &owner(0), claim, cluster.now(), soon).await;
    assert!(refused.unwrap_err().to_string().contains("\"node-0\""));
    assert_eq!(cluster.node(0).hits(0..20).await.len(), 20);
    assert_ne!(cluster.sees(0).await.alive(cluster.now()), Some(NAMES[adopter]));
}

#[tokio::test(start_paused = true)]
async fn a_ward_grows_old_and_when_nothing_is_left_of_it_nobody_holds_it_any_more() {
    let mut cluster = Cluster::of(2).await;
    let run = cluster.node(1).seal(0..40).await;
    cluster.node(1).packed(run).await;
    cluster.kill(1);
    cluster.kill(0);
    cluster.rig.ttl = Some(Duration::from_secs(3600));
    cluster.start(0).await;
    cluster.pass(LONG).await;
    let node = cluster.node(0);
    assert_eq!((node.metrics.adoptions.get(), node.hits(0..40).await.len()), (1, 40));
    cluster.pass(3000).await;
    assert_eq!(node.stored(0..40).len(), 0, "too old");
    assert!(!cluster.packs(1).await.is_empty(), "somebody may be reading them");
    cluster.pass(2 * 3600).await;
    assert_eq!(cluster.packs(1).await, [""; 0]);
    assert_eq!((cluster.sees(1).await.role(), cluster.adopters()), (Role::Empty, vec![]));
    cluster.pass(LONG).await;
    assert_eq!((node.metrics.adoptions.get(), node.metrics.given_back.get()), (1, 0));
    cluster.start(1).await;
    let run = cluster.node(1).seal(0..40).await;
    cluster.node(1).packed(run).await;
    assert_eq!(cluster.node(1).stored(0..40).len(), 40);
}

#[tokio::test(start_paused = true)]
async fn a_block_that_two_nodes_had_is_removed_from_both() {
    let mut cluster = Cluster::of(2).await;
    for node in 0..2 {
        let run = cluster.node(node).seal(0..30).await;
        cluster.node(node).packed(run).await;
    }
    cluster.kill(1);
    cluster.pass(LONG).await;
    let node = cluster.node(0);
    assert_eq!((node.metrics.adoptions.get(), node.stored(0..30).len()), (1, 30));
    assert_eq!(remove(node, &[1, 2]).await, 2);
    for node in 0..2 {
        cluster.kill(node);
    }
    for node in 0..2 {
        cluster.start(node).await;
        assert_eq!(cluster.node(node).hits(0..30).await.len(), 28, "node {node}");
    }
}

/// A node that has stored blocks and removed one is gone; the other can do so many more calls.
async fn cut_off_after(calls: usize, how: Trouble) -> Cluster {
    let mut cluster = Cluster::of(2).await;
    let run = cluster.node(0).seal(0..30).await;
    cluster.node(0).packed(run).await;
    assert_eq!(remove(cluster.node(0), &[0]).await, 1);
    cluster.kill(0);
    let way = &cluster.ways[1];
    way.trouble_next(vec![Trouble::None; calls].into_iter().chain([how]));
    way.trouble_always(Trouble::Status(503));
    cluster
}

#[tokio::test(start_paused = true)]
async fn an_adopter_that_is_cut_off_at_any_call_loses_nothing_and_brings_nothing_back() {
    // The calls with which it adopts.
    let cluster = cut_off_after(10_000, Trouble::None).await;
    let way = &cluster.ways[1];
    let (from, mut before) = (way.requests(), 0);
    while cluster.node(1).metrics.adoptions.get() == 0 {
        before = way.requests() - from;
        cluster.pass(10).await;
    }
    let calls = before..way.requests() - from + 10;
    let (mut adopted, mut removals) = (0, 0);
    for how in [Trouble::Status(503), Trouble::ResetAfter] {
        for calls in calls.clone() {
            let mut cluster = cut_off_after(usize::try_from(calls).unwrap(), how).await;
            let node = cluster.node(1);
            for _ in 0..LONG / 10 {
                cluster.pass(10).await;
                if node.metrics.adoptions.get() > 0 {
                    break;
                }
            }
            adopted += node.metrics.adoptions.get();
            let packed = pack(&[5]);
            let hashes = Hashes::new(&packed, 32).unwrap();
            let removed = node.fixture.stack.remove(&node.namespace, hashes).await;
            let is_removed = matches!(removed, Ok(1));
            removals += u64::from(is_removed);
            cluster.kill(1);
            cluster.start(0).await;
            let mut hits = cluster.node(0).hits(0..30).await;
            hits.retain(|number| *number != 5 || is_removed);
            let left: Vec<u64> = (1..30).filter(|number| *number != 5).collect();
            assert_eq!(hits, left, "{calls} calls, then {how:?}");
        }
    }
    let tries = 2 * (calls.end - calls.start);
    println!("{tries} tries, {adopted} adopted, {removals} removals acknowledged");
    assert!((1..tries).contains(&adopted), "{adopted} of {tries}");
    assert!((1..tries).contains(&removals), "{removals} of {tries}");
}
