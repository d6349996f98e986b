//! Nodes that leave a cluster, or die: what they had hot is at others, and what is in flight ends whole.

use std::{net::UdpSocket, ops::Range, time::Duration};

use kvstrata::client::{
    Client, ClientOptions, GetOptions, Handle, LeaseAsk, LookupOptions, Path as Way, PutOutcome,
    Session,
};
use tokio::time::Instant;

use crate::{
    client::{Seen, batch, hashes, namespace, pattern},
    harness::{SERVER_WAIT, Server, cluster_home, command, wait_until},
};

pub(crate) const BLOCK_BYTES: u32 = 64 << 10;
pub(crate) const PARTS: [u32; 1] = [BLOCK_BYTES];
/// Less than the grace, more than a drain takes on a machine that is busy.
const GRACE: &str = "40s";

/// Nodes of one cluster, which know one another.
pub(crate) struct Cluster {
    nodes: Vec<Option<Server>>,
    home: tempfile::TempDir,
}

/// An engine's client at one node, and nowhere else.
struct Engine {
    handle: Handle,
    session: Session,
}

impl Cluster {
    pub(crate) async fn start(count: usize) -> Self {
        let home = cluster_home();
        let sockets: Vec<_> = (0..count).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let gossip: Vec<_> =
            sockets.iter().map(|socket| socket.local_addr().unwrap().to_string()).collect();
        drop(sockets);
        let mut nodes = Vec::new();
        for (number, listen) in gossip.iter().enumerate() {
            let server = Server::builder()
                .home(home.path())
                .dram("64MiB")
                .set("node.name", &format!("node-{number}"))
                .set("node.host", &format!("host-{number}"))
                .set("cluster.listen", listen)
                .set("cluster.seeds", &gossip.join(","))
                .set("server.drain_grace", GRACE);
            nodes.push(Some(server.start().await));
        }
        let cluster = Self { nodes, home };
        for number in 0..count {
            cluster.wait_for_members(number, count).await;
        }
        cluster
    }

    pub(crate) fn node(&self, number: usize) -> &Server {
        self.nodes[number].as_ref().unwrap()
    }

    pub(crate) fn take(&mut self, number: usize) -> Server {
        self.nodes[number].take().unwrap()
    }

    async fn wait_for_members(&self, number: usize, count: usize) {
        let what = format!("node {number} knows {count} members");
        wait_until(&what, SERVER_WAIT, async || {
            let client = self.client(number).await;
            client.open(namespace(&PARTS)).await.unwrap();
            client.members().list.len() == count
        })
        .await;
    }

    async fn client(&self, number: usize) -> Client {
        let options = ClientOptions { path: Way::Grpc, ..ClientOptions::default() };
        Client::connect(self.node(number).grpc(), options).await.unwrap()
    }

    async fn engine(&self, number: usize) -> Engine {
        let client = self.client(number).await;
        // With a session first a client stays where it is.
        let session = client.session("engine").await.unwrap();
        Engine { handle: client.open(namespace(&PARTS)).await.unwrap(), session }
    }

    /// `kvstrata drain` at a node, to its end.
    async fn drain(&self, number: usize) -> String {
        let mut drain = command(&self.home);
        drain.args(["drain", "--wait", "--admin", self.node(number).admin()]);
        let (send, receive) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || send.send(drain.output().unwrap()).unwrap_or_default());
        let output = receive.await.unwrap();
        let (said, why) = (output.stdout, String::from_utf8_lossy(&output.stderr).into_owned());
        assert_eq!(output.status.code(), Some(0), "{why}");
        String::from_utf8(said).unwrap()
    }

    /// Ends what is left; nothing loud was logged but what is `expected`.
    pub(crate) async fn stop(self, expected: &[&str]) {
        for node in self.nodes.into_iter().flatten() {
            node.stop(expected).await;
        }
    }
}

impl Engine {
    async fn put(&self, numbers: Range<u32>) {
        let count = numbers.len() as u64;
        let report = self.handle.put(&self.session, &batch(numbers, &PARTS)).await.unwrap();
        assert_eq!(report.count(PutOutcome::Stored), count);
    }

    /// How many of the first blocks are there: at this node only, or anywhere.
    async fn prefix(&self, numbers: Range<u32>, local: bool) -> u32 {
        let options = LookupOptions { local, ..LookupOptions::default() };
        self.handle.lookup(&hashes(numbers), options).await.unwrap().prefix_blocks
    }

    /// How many blocks come, every one with its own bytes.
    async fn get(&self, numbers: Range<u32>) -> usize {
        let mut seen = Seen::default();
        let got = self.handle.get(&hashes(numbers.clone()), GetOptions::default(), &mut seen).await;
        got.unwrap();
        assert_right(numbers.start, &seen)
    }
}

pub(crate) fn assert_right(first: u32, seen: &Seen) -> usize {
    for (position, bytes) in &seen.blocks {
        let number = first + position;
        let expected = pattern(number, 0, BLOCK_BYTES as usize);
        assert!(*bytes == expected, "block {number} has wrong bytes");
    }
    seen.blocks.len()
}

/// Blocks of the others that there are at their own tiers, added up.
async fn local_hits(cluster: &Cluster, at: &[usize], numbers: &Range<u32>) -> u32 {
    let mut hits = 0;
    for number in at {
        hits += cluster.engine(*number).await.prefix(numbers.clone(), true).await;
    }
    hits
}

#[tokio::test]
async fn what_was_hot_at_a_node_that_leaves_is_hit_at_others_and_without_a_drain_it_is_not() {
    let hot = 0..256;
    let mut ratios = Vec::new();
    for drains in [true, false] {
        let mut cluster = Cluster::start(3).await;
        let engine = cluster.engine(0).await;
        engine.put(1000..1128).await;
        engine.put(hot.clone()).await;
        assert_eq!(engine.get(hot.clone()).await, hot.len());
        assert_eq!(local_hits(&cluster, &[1, 2], &hot).await, 0);
        drop(engine);
        let mut leaver;
        if drains {
            let said = cluster.drain(0).await;
            assert!(said.trim_end().ends_with("others") && said.contains("drained"), "{said}");
            let taken = "kvstrata_drain_blocks_total{outcome=\"taken\"}";
            assert!(cluster.node(0).metric(taken).await >= 256.0, "{said}");
            let bytes = cluster.node(0).metric("kvstrata_drain_bytes_total").await;
            assert!(bytes >= 256.0 * f64::from(BLOCK_BYTES), "{bytes}");
            leaver = cluster.take(0);
            let start = Instant::now();
            leaver.terminate();
            assert_eq!(leaver.exit_code().await, Some(0));
            assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
            leaver.assert_quiet(&[]);
        } else {
            cluster.take(0).kill();
        }
        let hits = local_hits(&cluster, &[1, 2], &hot).await;
        ratios.push(f64::from(hits) / hot.len() as f64);
        if drains {
            // They are right, too.
            let mut right = 0;
            for number in [1, 2] {
                let engine = cluster.engine(number).await;
                if engine.prefix(hot.clone(), true).await > 0 {
                    right += engine.get(hot.clone()).await;
                }
            }
            assert_eq!(right, hot.len());
        }
        cluster.stop(&["member"]).await;
    }
    println!("hits kept: {:.2} with a drain, {:.2} without", ratios[0], ratios[1]);
    assert!(ratios[0] >= 0.95 && ratios[1] == 0.0, "{ratios:?}");
}

#[tokio::test]
async fn a_leased_get_that_is_in_flight_when_its_node_leaves_ends_whole() {
    let mut cluster = Cluster::start(2).await;
    let engine = cluster.engine(0).await;
    let numbers = 0..300;
    engine.put(numbers.clone()).await;
    let ask = LeaseAsk { session: &engine.session, ttl: Duration::from_secs(30), bytes_max: 0 };
    let options = LookupOptions { lease: Some(ask), local: true, ..LookupOptions::default() };
    let found = engine.handle.lookup(&hashes(numbers.clone()), options).await.unwrap();
    let lease = found.lease.unwrap();
    assert_eq!(lease.blocks as usize, numbers.len());
    let node = cluster.node(0);
    node.terminate();
    wait_until("it leaves", SERVER_WAIT, async || node.page("/readyz").await.0 == 503).await;
    let mut seen = Seen::default();
    let options = GetOptions { lease: Some(&lease), ..GetOptions::default() };
    engine.handle.get(&hashes(numbers.clone()), options, &mut seen).await.unwrap();
    assert_eq!(assert_right(0, &seen), numbers.len(), "{:?}", seen.misses);
    drop(engine);
    let mut leaver = cluster.take(0);
    let start = Instant::now();
    assert_eq!(leaver.exit_code().await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
    leaver.assert_quiet(&[]);
    assert_eq!(local_hits(&cluster, &[1], &numbers).await as usize, numbers.len());
    cluster.stop(&["member"]).await;
}

#[tokio::test]
async fn clients_that_go_on_through_a_leave_get_no_wrong_byte() {
    let mut cluster = Cluster::start(2).await;
    let engines = [cluster.engine(0).await, cluster.engine(1).await];
    for (engine, first) in engines.iter().zip([0, 10_000]) {
        engine.put(first..first + 100).await;
    }
    let node = cluster.node(0);
    node.terminate();
    let (mut got, mut refused) = (0, 0);
    for round in 1..=20_u32 {
        let first = round * 100;
        let put = batch(first..first + 20, &PARTS);
        for engine in &engines {
            // The one that leaves may refuse; the other one may not.
            refused += u32::from(engine.handle.put(&engine.session, &put).await.is_err());
            let mut seen = Seen::default();
            let wanted = hashes(first..first + 20);
            let get = engine.handle.get(&wanted, GetOptions::default(), &mut seen).await;
            if get.is_ok() {
                got += assert_right(first, &seen);
            }
        }
    }
    assert!(got >= 20 * 20, "{got} blocks came, {refused} puts were refused");
    let [leaving, staying] = engines;
    drop(leaving);
    let mut leaver = cluster.take(0);
    assert_eq!(leaver.exit_code().await, Some(0));
    leaver.assert_quiet(&[]);
    assert_eq!(staying.get(10_000..10_100).await, 100);
    assert!(staying.get(0..100).await >= 95, "handed over");
    drop(staying);
    cluster.stop(&["member"]).await;
}

#[tokio::test]
async fn what_is_read_often_is_at_a_second_node_and_outlives_the_first() {
    let mut cluster = Cluster::start(3).await;
    let engine = cluster.engine(0).await;
    let (hot, cold) = (0..48, 500..548);
    engine.put(hot.clone()).await;
    engine.put(cold.clone()).await;
    assert_eq!(engine.get(cold.clone()).await, cold.len());
    for _ in 0..10 {
        assert_eq!(engine.get(hot.clone()).await, hot.len());
    }
    wait_until("a second node has it", SERVER_WAIT, async || {
        local_hits(&cluster, &[1, 2], &hot).await as usize == hot.len()
    })
    .await;
    assert_eq!(local_hits(&cluster, &[1, 2], &cold).await, 0, "it was read once");
    let taken = "kvstrata_second_holder_blocks_total{outcome=\"taken\"}";
    assert!(cluster.node(0).metric(taken).await >= 48.0);
    drop(engine);
    cluster.take(0).kill();
    let mut right = 0;
    for number in [1, 2] {
        let engine = cluster.engine(number).await;
        if engine.prefix(hot.clone(), true).await > 0 {
            right += engine.get(hot.clone()).await;
        }
    }
    assert_eq!(right, hot.len());
    cluster.stop(&["member"]).await;
}

#[tokio::test]
async fn the_only_node_of_a_cluster_hands_nothing_over_and_leaves_as_ever() {
    let mut cluster = Cluster::start(1).await;
    let engine = cluster.engine(0).await;
    engine.put(0..32).await;
    drop(engine);
    let said = cluster.drain(0).await;
    assert!(said.contains("drained") && !said.contains("blocks"), "{said}");
    let again = cluster.drain(0).await;
    assert_eq!(again.lines().count(), 1, "{again}");
    let server = cluster.take(0);
    assert_eq!(server.metric("kvstrata_drain_bytes_total").await, 0.0);
    server.stop(&[]).await;
}
