//! Lookups over several nodes: real processes that find each other, and one that is taken away.

use std::{net::UdpSocket, time::Duration};

use kvstrata_proto::v1::{Locality, LookupResponse, MemberList, PutOutcome};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::Instant;

use crate::{
    harness::{SERVER_WAIT, Server, cluster_home, wait_until},
    wire::{Wire, namespace, open},
};

/// Until what was put at one node is found from another: filters are asked each second.
const FOUND_WAIT: Duration = Duration::from_secs(30);
/// What a lookup may take whatever becomes of others: 20 ms for these, the rest for a busy machine.
const LOOKUP_LIMIT: Duration = Duration::from_millis(50);

/// Nodes of one cluster.
struct Nodes {
    servers: Vec<Server>,
    wires: Vec<Wire>,
    _home: tempfile::TempDir,
}

fn free_udp_port() -> u16 {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Nodes {
    /// So many that know each other's filters.
    async fn start(count: usize) -> Self {
        let home = cluster_home();
        let ports: Vec<_> = (0..count).map(|_| free_udp_port()).collect();
        let seeds: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let (mut servers, mut wires) = (Vec::new(), Vec::new());
        for (number, port) in ports.iter().enumerate() {
            let server = Server::builder()
                .home(home.path())
                .dram("32MiB")
                .set("node.name", &format!("node-{number}"))
                .set("cluster.listen", &format!("127.0.0.1:{port}"))
                .set("cluster.seeds", &seeds.join(","));
            servers.push(server.start().await);
        }
        for server in &servers {
            wires.push(Wire::connect(server, namespace("m")).await);
        }
        let nodes = Self { servers, wires, _home: home };
        for number in 0..count {
            wait_until("all know each other", SERVER_WAIT, || nodes.knows_all(number)).await;
        }
        nodes
    }

    async fn members(&self, number: usize) -> MemberList {
        let mut client = self.wires[number].client.clone();
        client.open(open(namespace("m"))).await.unwrap().into_inner().members.unwrap()
    }

    async fn knows_all(&self, number: usize) -> bool {
        let server = &self.servers[number];
        self.members(number).await.members.len() == self.servers.len()
            && server.metric("kvstrata_cluster_filter_unknown_members").await == 0.0
            && server.metric("kvstrata_cluster_filter_bytes{of=\"members\"}").await > 0.0
    }

    /// What one node calls another.
    async fn index_of(&self, other: usize, at: usize) -> u32 {
        let name = format!("node-{other}");
        let list = self.members(at).await.members;
        list.iter().find(|member| member.name == name).unwrap().index
    }

    /// Looks up until there are so many blocks.
    async fn found(&self, at: usize, numbers: std::ops::Range<u64>, prefix: u32) -> LookupResponse {
        let start = Instant::now();
        loop {
            let found = self.look_up(at, numbers.clone()).await;
            if found.prefix_blocks == prefix {
                return found;
            }
            assert!(start.elapsed() < FOUND_WAIT, "{found:?}\n{}", self.servers[at].log());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn look_up(&self, at: usize, numbers: std::ops::Range<u64>) -> LookupResponse {
        let wire = &self.wires[at];
        let request = wire.lookup_request(numbers);
        wire.client.clone().lookup(request).await.unwrap().into_inner()
    }

    async fn put(&mut self, at: usize, numbers: std::ops::Range<u64>) {
        let numbers: Vec<_> = numbers.collect();
        let stored = vec![PutOutcome::Stored; numbers.len()];
        assert_eq!(self.wires[at].put(&numbers).await, stored);
    }

    fn signal(&self, number: usize, signal: Signal) {
        let pid = i32::try_from(self.servers[number].process_id()).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }
}

/// `(start, end, holder, is remote)` of each run.
fn runs(found: &LookupResponse) -> Vec<(u32, u32, u32, bool)> {
    let remote = |run: &kvstrata_proto::v1::Run| run.locality() == Locality::Remote;
    found.runs.iter().map(|run| (run.start, run.end, run.holder, remote(run))).collect()
}

fn assert_sums(found: &LookupResponse) {
    let counts = found.counts.unwrap();
    let found_blocks = counts.dram + counts.nvme + counts.object + counts.pending;
    assert_eq!(found_blocks + counts.miss, found.asked);
}

#[tokio::test]
async fn a_prefix_is_found_wherever_it_was_put_and_merged_from_several_nodes() {
    let mut nodes = Nodes::start(3).await;
    nodes.put(0, 0..100).await;
    let found = nodes.found(1, 0..150, 100).await;
    let first = nodes.index_of(0, 1).await;
    assert_eq!(runs(&found), [(0, 100, first, true)]);
    assert!(!found.partial && found.runs[0].est_load_ms > 0.0);
    assert_sums(&found);
    // What only this node has is asked of nobody else.
    let mut local = nodes.wires[1].lookup_request(0..150);
    local.local = true;
    let alone = nodes.wires[1].client.lookup(local).await.unwrap().into_inner();
    assert_eq!((alone.prefix_blocks, alone.partial), (0, false));

    // A prefix of three nodes: 1 has the head and the tail, 2 what is between.
    nodes.put(1, 1000..1050).await;
    nodes.put(2, 1050..1100).await;
    nodes.put(1, 1100..1120).await;
    nodes.put(0, 1120..1130).await;
    let found = nodes.found(1, 1000..1200, 130).await;
    let third = nodes.index_of(2, 1).await;
    let expected =
        [(0, 50, 0, false), (50, 100, third, true), (100, 120, 0, false), (120, 130, first, true)];
    assert_eq!(runs(&found), expected);
    assert_sums(&found);
    // What is known to nobody is a miss, for sure.
    let missed = nodes.look_up(1, 5000..5100).await;
    assert_eq!((missed.prefix_blocks, missed.partial), (0, false));
    let server = &nodes.servers[1];
    assert!(server.metric("kvstrata_cluster_fanout_blocks_total").await >= 160.0);
    let answers = "kvstrata_cluster_fanout_answers_total";
    assert!(server.metric(&format!("{answers}{{outcome=\"found\"}}")).await >= 3.0);
    assert_eq!(server.metric(&format!("{answers}{{outcome=\"refused\"}}")).await, 0.0);
    // Of what a node asks another, that one counts nothing as asked by engines.
    let asked = nodes.servers[0].metric("kvstrata_lookup_asked_blocks_total").await;
    assert_eq!(asked, 0.0);
    for server in &nodes.servers {
        server.assert_quiet(&[]);
    }
}

#[tokio::test]
async fn a_holder_that_hangs_or_dies_costs_its_blocks_and_no_time() {
    let mut nodes = Nodes::start(3).await;
    nodes.put(1, 0..40).await;
    nodes.put(0, 40..100).await;
    nodes.found(1, 0..100, 100).await;
    nodes.signal(0, Signal::STOP);
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        let start = Instant::now();
        let found = nodes.look_up(1, 0..100).await;
        longest = longest.max(start.elapsed());
        assert_eq!(runs(&found), [(0, 40, 0, false)], "its own are there as ever");
        assert!(found.partial);
        assert_sums(&found);
    }
    assert!(longest < LOOKUP_LIMIT, "{longest:?}");
    let late =
        nodes.servers[1].metric("kvstrata_cluster_fanout_answers_total{outcome=\"late\"}").await;
    assert!((1.0..=3.0).contains(&late), "{late} of 20 lookups have waited");
    // It comes back, and so do its blocks.
    nodes.signal(0, Signal::CONT);
    let back = nodes.found(1, 0..100, 100).await;
    assert!(!back.partial);

    nodes.wires.remove(0);
    nodes.servers.remove(0).kill();
    let start = Instant::now();
    let found = {
        let request = nodes.wires[0].lookup_request(0..100);
        nodes.wires[0].client.lookup(request).await.unwrap().into_inner()
    };
    assert!(start.elapsed() < LOOKUP_LIMIT, "{:?}", start.elapsed());
    assert_eq!((found.prefix_blocks, found.partial), (40, true));
    assert_eq!(nodes.wires[0].get(&[0, 39]).await.len(), 2);
    let blocks = nodes.wires[0].get(&[0, 39]).await;
    assert!(blocks.iter().all(Option::is_some), "what is here is read as ever");
}
