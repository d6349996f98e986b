//! Five nodes as real processes, each in a network namespace of its own, under load, while the network breaks and
//! nodes die. After each fault: no wrong byte, no call that takes longer than its deadline, no lease and no
//! staging left, and the hits that had to survive.

mod load;
mod net;
mod slow_path;

use std::time::Duration;

use kvstrata::client::{Client, ClientOptions, GetOptions, Handle, Locality, LookupOptions};
use tokio::time::Instant;

use self::{
    load::{CALL_MAX, Checked, Load, Told, ratio},
    net::Net,
    slow_path::SlowPath,
};
use crate::{
    client::{batch, hashes, namespace},
    harness::{Builder, Server, cluster_home, wait_until},
};

const NODES: u8 = 5;
/// Engines of the load: two for each node.
const ENGINES: u32 = 10;
/// The blocks of a prompt of 500,000 tokens, and their length here.
const LONG_BLOCKS: u32 = 31_250;
const LONG_BLOCK_BYTES: u32 = 512;
/// Longest time for members to be found or given up, on a machine that has other tests to run.
const MEMBERS_WAIT: Duration = Duration::from_secs(30);
/// By then, at least this share of what was put is hit again.
const RECOVERY: (Duration, f64) = (Duration::from_secs(5), 0.75);
/// Time over which a ratio of hits is taken: a hundred turns.
const WINDOW: Duration = Duration::from_secs(2);

/// The nodes of a test.
struct Nodes {
    net: Net,
    home: tempfile::TempDir,
    running: Vec<Option<Server>>,
    /// What clients are given for each node.
    advertised: Vec<String>,
}

impl Nodes {
    /// Starts so many of five, or none where there are no namespaces.
    async fn start(test: &str, count: u8) -> Option<Self> {
        let net = Net::make(test, NODES)?;
        let advertised = (0..NODES).map(|node| format!("{}:9400", net.address(node))).collect();
        let running = (0..NODES).map(|_| None).collect();
        let mut nodes = Self { net, home: cluster_home(), running, advertised };
        for node in 0..count {
            nodes.start_one(node).await;
        }
        nodes.until_members(count.into()).await;
        Some(nodes)
    }

    async fn start_one(&mut self, node: u8) {
        self.running[usize::from(node)] = Some(self.builder(node).start().await);
    }

    fn builder(&self, node: u8) -> Builder {
        let seeds: Vec<_> =
            (0..NODES).map(|node| format!("{}:9403", self.net.address(node))).collect();
        let directory = self.home.path().join(format!("nvme-{node}"));
        std::fs::create_dir_all(&directory).unwrap();
        Server::builder()
            .home(self.home.path())
            .wrapped_in(self.net.wrapper(node))
            .at(&self.net.address(node))
            .dram("192MiB")
            .set("nvme.path", directory.to_str().unwrap())
            .set("nvme.capacity", "1GiB")
            .set("node.name", &format!("node-{node}"))
            .set("node.advertise", &self.advertised[usize::from(node)])
            .set("auth.allow_anonymous", "true")
            .set("cluster.listen", &format!("{}:9403", self.net.address(node)))
            .set("cluster.seeds", &seeds.join(","))
            .set("server.drain_grace", "5s")
    }

    fn alive(&self) -> impl Iterator<Item = (u8, &Server)> {
        (0_u8..).zip(&self.running).filter_map(|(node, server)| Some((node, server.as_ref()?)))
    }

    /// All endpoints, as clients are given them.
    fn endpoints(&self) -> String {
        self.advertised.join(",")
    }

    /// Until every node that runs sees so many.
    async fn until_members(&self, count: usize) {
        self.until_members_of(0..NODES, count).await;
    }

    async fn until_members_of(&self, nodes: impl IntoIterator<Item = u8>, count: usize) {
        for node in nodes {
            let Some(server) = &self.running[usize::from(node)] else { continue };
            let what = format!("node {node} sees {count} members");
            wait_until(&what, MEMBERS_WAIT, async || members_of(server).await == count).await;
        }
    }

    /// A handle whose lookups one node answers, whatever its home would be.
    async fn handle(&self, node: u8, block_bytes: u32) -> Handle {
        let options = ClientOptions { name: "check".to_owned(), ..load::options("") };
        let options = ClientOptions { instance: None, ..options };
        let client = Client::connect(&self.advertised[usize::from(node)], options).await.unwrap();
        client.open(namespace(&[block_bytes])).await.unwrap()
    }

    fn kill(&mut self, node: u8) {
        self.running[usize::from(node)].take().unwrap().kill();
    }

    async fn stop(&mut self, node: u8) {
        let mut server = self.running[usize::from(node)].take().unwrap();
        server.terminate();
        assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
    }

    /// What must hold when all is over.
    async fn check(&self, load: Load) {
        let Told { turns, wrong, failures, .. } = load.stop().await;
        assert_eq!(wrong, 0, "wrong bytes");
        assert!(turns.len() > 200, "the load worked: {} turns", turns.len());
        let slowest = turns.iter().map(|turn| turn.slowest).max().unwrap();
        assert!(slowest < CALL_MAX, "a call took {slowest:?}");
        let foreign: Vec<_> = turns.iter().filter(|turn| turn.foreign).copied().collect();
        assert!(ratio(&foreign) > 0.3, "others' conversations are found: {}", ratio(&foreign));
        assert!(failures.len() < turns.len(), "most calls are answered: {:?}", failures.first());
        for (node, server) in self.alive() {
            let quiet = async || {
                let client =
                    Client::connect(server.grpc(), ClientOptions::default()).await.unwrap();
                let stats = client.stats().await.unwrap();
                (stats.leases, stats.leased_bytes, stats.staging_bytes, stats.corrupt)
                    == (0, 0, 0, 0)
            };
            wait_until(&format!("node {node} holds nothing for anybody"), MEMBERS_WAIT, quiet)
                .await;
        }
    }
}

async fn members_of(server: &Server) -> usize {
    let Ok(client) = Client::connect(server.grpc(), ClientOptions::default()).await else {
        return 0;
    };
    client.stats().await.map_or(0, |_| client.members().list.len())
}

/// Until nearly all that was put is hit.
async fn until_warm(load: &Load) {
    let warm = async || {
        let turns = load.since(Instant::now() - WINDOW);
        turns.len() > 40 && ratio(&turns) > 0.97
    };
    wait_until("the load is warm", MEMBERS_WAIT, warm).await;
}

/// After a fault at `then`: the hits of the first moment are not fewer than what is lost with this share of the
/// nodes allows, and soon there are enough again.
async fn until_recovered(load: &Load, then: Instant) {
    let (within, least) = RECOVERY;
    let recovered = async || {
        let turns = load.since(Instant::now() - WINDOW);
        then.elapsed() >= WINDOW && turns.len() > 20 && ratio(&turns) >= least
    };
    wait_until("hits are back", within + WINDOW, recovered).await;
}

/// Finds the long prefix from a node; how many of its blocks are there, and what partial says.
async fn find_long(handle: &Handle) -> (u32, bool) {
    let asked = hashes(0..LONG_BLOCKS);
    let found = handle.lookup(&asked, LookupOptions::default()).await.unwrap();
    let far = found.runs.iter().all(|run| run.locality == Locality::Remote);
    assert!(found.prefix_blocks == 0 || far, "they are elsewhere: {:?}", found.runs);
    (found.prefix_blocks, found.partial)
}

async fn put_long(nodes: &Nodes, holder: u8) {
    let handle = nodes.handle(holder, LONG_BLOCK_BYTES).await;
    let session = handle.client().session("long").await.unwrap();
    let report = handle.put(&session, &batch(0..LONG_BLOCKS, &[LONG_BLOCK_BYTES])).await.unwrap();
    let stored = report.count(kvstrata::client::PutOutcome::Stored);
    assert_eq!(stored, u64::from(LONG_BLOCKS));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_takes_its_share_of_hits_and_a_prefix_held_elsewhere_stays_whole() {
    let name = "a_node_that_dies_takes_its_share_of_hits";
    let Some(mut nodes) = Nodes::start(name, NODES).await else { return };
    put_long(&nodes, 1).await;
    let asker = nodes.handle(0, LONG_BLOCK_BYTES).await;
    let found = async || find_long(&asker).await.0 == LONG_BLOCKS;
    wait_until("the long prefix is found from another node", MEMBERS_WAIT, found).await;
    let load = Load::start(ENGINES, &nodes.endpoints());
    until_warm(&load).await;

    let lost = load.share_of("node-3");
    let then = Instant::now();
    nodes.kill(3);
    // A node with more to do than it can says that not all was asked in time.
    let unchanged = async || match find_long(&asker).await {
        (LONG_BLOCKS, _) => true,
        (prefix, partial) => {
            assert!(partial, "a prefix held elsewhere is unchanged, but {prefix} blocks are left");
            false
        }
    };
    wait_until("a prefix held elsewhere is whole", MEMBERS_WAIT, unchanged).await;
    until_recovered(&load, then).await;
    let least = 1.0 - lost - 0.10;
    let all = ratio(&load.since(then));
    assert!(all >= least, "{all} of what was put was hit, {lost} of the engines were there");
    nodes.until_members(4).await;
    assert_eq!(find_long(&asker).await, (LONG_BLOCKS, false));
    // It can be read, too, every byte of it.
    let mut seen = Checked::from(0, LONG_BLOCK_BYTES);
    asker.get(&hashes(0..LONG_BLOCKS), GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!((seen.right, seen.wrong), (LONG_BLOCKS, 0));

    // Two more at once, of which one has the prefix.
    let then = Instant::now();
    nodes.kill(1);
    nodes.kill(4);
    let began = Instant::now();
    let (prefix, _partial) = find_long(&asker).await;
    assert!(began.elapsed() < CALL_MAX && (prefix == 0 || prefix == LONG_BLOCKS));
    until_recovered(&load, then).await;
    nodes.until_members(2).await;
    assert_eq!(find_long(&asker).await, (0, false), "nobody has it");
    nodes.check(load).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn partitions_and_flapping_links_cost_hits_and_nothing_else() {
    let name = "partitions_and_flapping_links_cost_hits";
    let Some(nodes) = Nodes::start(name, NODES).await else { return };
    let load = Load::start(ENGINES, &nodes.endpoints());
    until_warm(&load).await;

    // One way: what 2 sends does not reach 0 and 1.
    let then = Instant::now();
    nodes.net.cut(2, 0);
    nodes.net.cut(2, 1);
    until_recovered(&load, then).await;
    assert!(ratio(&load.since(then)) >= 0.7, "{}", ratio(&load.since(then)));
    nodes.net.heal(0);
    nodes.net.heal(1);
    nodes.until_members(5).await;

    // Both ways: 0 and 1 against 2, 3 and 4.
    let then = Instant::now();
    for (from, to) in [(0, 2), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4)] {
        nodes.net.cut(from, to);
        nodes.net.cut(to, from);
    }
    nodes.until_members_of([0, 1], 2).await;
    nodes.until_members_of([2, 3, 4], 3).await;
    until_recovered(&load, then).await;
    (0..NODES).for_each(|node| nodes.net.heal(node));
    nodes.until_members(5).await;

    // A link that goes down and up once a second.
    let then = Instant::now();
    for _ in 0..4 {
        for up in [false, true] {
            nodes.net.set_link(2, up);
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    }
    until_recovered(&load, then).await;
    nodes.until_members(5).await;

    // One that has become slow.
    let then = Instant::now();
    nodes.net.slow(3, "50mbit");
    until_recovered(&load, then).await;
    nodes.net.unslow(3);
    until_warm(&load).await;
    nodes.check(load).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_join_and_leave_under_load_and_one_is_far_away() {
    let name = "nodes_join_and_leave_under_load";
    let Some(mut nodes) = Nodes::start(name, 2).await else { return };
    // The third is 100 ms away from everybody who looks for it by its name.
    let (here, there) = (nodes.net.address_before(2), nodes.net.address(2));
    let _far = SlowPath::open(&here, &there, &[9400, 9402], Duration::from_millis(100)).await;
    nodes.advertised[2] = format!("{here}:9400");
    nodes.start_one(2).await;
    nodes.until_members(3).await;
    let near = [nodes.advertised[0].clone(), nodes.advertised[1].clone()].join(",");
    let load = Load::start(ENGINES, &near);
    until_warm(&load).await;

    // 3 to 5: a join loses nothing.
    let then = Instant::now();
    nodes.start_one(3).await;
    nodes.start_one(4).await;
    nodes.until_members(5).await;
    until_warm(&load).await;
    assert!(ratio(&load.since(then)) >= 0.95, "a join loses nothing: {}", ratio(&load.since(then)));

    // Every node once, one after another, as an upgrade does.
    for node in 0..NODES {
        let then = Instant::now();
        nodes.stop(node).await;
        nodes.start_one(node).await;
        nodes.until_members(5).await;
        until_recovered(&load, then).await;
    }
    until_warm(&load).await;

    // 5 to 3.
    let then = Instant::now();
    nodes.stop(3).await;
    nodes.stop(4).await;
    nodes.until_members(3).await;
    until_recovered(&load, then).await;
    until_warm(&load).await;
    nodes.check(load).await;
}
