//! What do gets and lookups cost in a cluster of 1, 2, 3 and 5 nodes on this machine: from the node that is asked, and
//! from another one that holds the blocks?
//!
//! Aggregate throughput of one client at each node, of blocks of 2 MiB over the bulk port, and CPU of all nodes and
//! clients together, in seconds per GB: nodes on one machine share its cores, so that the second says what a
//! cluster costs, and the first only that it does not get in its own way. Floor in the same round: as many
//! pairs of threads with a plain blocking TCP connection each. Lookups of 32,768 hashes, by one client: of blocks
//! that the asked node has, that another one has, and that nobody has.
//!
//! ```text
//! cargo bench --no-default-features --bench cluster
//! ```
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "bulk/floor.rs"]
#[allow(dead_code, reason = "shared with the bench of the bulk port, which uses all of it")]
mod floor;
#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "bulk/setup.rs"]
mod setup;
mod support;

use std::{net::UdpSocket, ops::Range, path::Path as File, time::Duration};

use bytes::Bytes;
use harness::{Server, wait_until};
use kvstrata::client::{
    FetchedBlock, GetOptions, GetSink, Handle, LookupOptions, MissReason, Path,
};
use setup::{connect, list, open, put};
use support::{Samples, cpu_seconds, median};
use tokio::{task::JoinSet, time::Instant};

const NODES: [usize; 4] = [1, 2, 3, 5];
const BLOCK_BYTES: u32 = 2 << 20;
/// Bytes that all nodes together hold.
const STORED: usize = 480 << 20;
/// How often they are got in a round: CPU is counted in steps of 10 ms.
const TIMES: usize = 3;
const ROUNDS: usize = 5;
const ASKED: u64 = 32_768;
const LOOKUPS: usize = 100;
/// Where numbers of blocks begin that nobody has.
const ABSENT: u64 = 1 << 40;
const WAIT: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() {
    for count in NODES {
        let home = tempfile::tempdir().unwrap();
        let nodes = start(count, home.path()).await;
        println!("{count} nodes, medians of {ROUNDS} rounds:");
        gets(&nodes).await;
        lookups(&nodes).await;
        for server in nodes {
            server.stop(&["node", "gossip", "member"]).await;
        }
    }
}

/// Nodes that have found each other.
async fn start(count: usize, home: &File) -> Vec<Server> {
    let bound: Vec<_> = (0..count).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
    let places: Vec<_> = bound.iter().map(|it| it.local_addr().unwrap().to_string()).collect();
    drop(bound);
    let mut nodes = Vec::new();
    for (number, place) in places.iter().enumerate() {
        let node = Server::builder()
            .home(home)
            .dram(&format!("{}MiB", (STORED >> 20) / count + 256))
            .set("node.name", &format!("node-{number}"))
            .set("cluster.listen", place)
            .set("cluster.seeds", &places.join(","));
        nodes.push(node.start().await);
    }
    for node in &nodes {
        let client = connect(node, Path::Auto).await;
        let found = async || {
            client.stats().await.unwrap();
            client.members().list.len() == count
        };
        wait_until("all nodes are members", WAIT, found).await;
    }
    nodes
}

/// Counts bytes and keeps nothing.
#[derive(Default)]
struct Sink(u64);

impl GetSink for Sink {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.0 += block.len() as u64;
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        panic!("{positions:?}: {reason:?}");
    }
}

/// A client at a node, with the numbers of the blocks that it gets.
struct Reader {
    handle: Handle,
    numbers: Range<u64>,
}

impl Reader {
    async fn read(&self) -> u64 {
        let hashes = list(self.numbers.clone());
        let mut sink = Sink::default();
        self.handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
        sink.0
    }
}

/// Each reads what the next node holds: a lookup says who that is. Nobody, where there is no other.
async fn readers_of_next(nodes: &[Server], local: &[Reader]) -> Vec<Reader> {
    let mut remote = Vec::new();
    for (number, node) in nodes.iter().enumerate().filter(|_| nodes.len() > 1) {
        let handle = open(&connect(node, Path::Bulk).await, "gets", BLOCK_BYTES).await;
        let numbers = local[(number + 1) % nodes.len()].numbers.clone();
        find_all(&handle, numbers.clone()).await;
        remote.push(Reader { handle, numbers });
    }
    remote
}

async fn gets(nodes: &[Server]) {
    let each = (STORED / BLOCK_BYTES as usize / nodes.len()) as u64;
    let value = Bytes::from(vec![7; BLOCK_BYTES as usize]);
    let mut local = Vec::new();
    for (number, node) in (0_u64..).zip(nodes) {
        let client = connect(node, Path::Bulk).await;
        let session = client.session("bench").await.unwrap();
        let handle = open(&client, "gets", BLOCK_BYTES).await;
        let numbers = number * each..(number + 1) * each;
        assert_eq!(put(&handle, &session, numbers.clone(), &value, false).await, each);
        local.push(Reader { handle, numbers });
    }
    let remote = readers_of_next(nodes, &local).await;
    let stored = vec![7; STORED];
    let mut rows = vec![("floor, TCP", Vec::new()), ("get, own node", Vec::new())];
    if !remote.is_empty() {
        rows.push(("get, another node", Vec::new()));
    }
    for _ in 0..ROUNDS {
        let floor = async {
            let case = (BLOCK_BYTES as usize, nodes.len(), TIMES);
            tokio::task::block_in_place(|| floor::run(&stored, case, false, floor::tcp_pair));
        };
        rows[0].1.push(cost(nodes, floor).await);
        rows[1].1.push(cost(nodes, read_all(&local)).await);
        if let Some((_, row)) = rows.get_mut(2) {
            row.push(cost(nodes, read_all(&remote)).await);
        }
    }
    let floor = rows[0].1.clone();
    println!("{:>20}{:>8}{:>8}{:>10}{:>8}", "", "GB/s", "ratio", "CPU s/GB", "ratio");
    for (name, row) in &rows {
        let of = |pick: fn(&(f64, f64)) -> f64| median(row.iter().map(pick));
        let ratio = |pick: fn(&(f64, f64)) -> f64| {
            median(row.iter().zip(&floor).map(|(cost, floor)| pick(cost) / pick(floor)))
        };
        println!(
            "{name:>20}{:>8.2}{:>8.2}{:>10.2}{:>8.2}",
            1.0 / of(|cost| cost.0),
            1.0 / ratio(|cost| cost.0),
            of(|cost| cost.1),
            ratio(|cost| cost.1)
        );
    }
}

/// Seconds, and seconds of CPU of this process and all nodes, for each GB of a round.
async fn cost(nodes: &[Server], work: impl Future<Output = ()>) -> (f64, f64) {
    let cpu = || {
        let nodes = nodes.iter().map(|node| cpu_seconds(&node.process_id().to_string()));
        cpu_seconds("self") + nodes.sum::<f64>()
    };
    let (started, before) = (Instant::now(), cpu());
    work.await;
    let gigabytes = (TIMES * STORED) as f64 / 1e9;
    (started.elapsed().as_secs_f64() / gigabytes, (cpu() - before) / gigabytes)
}

async fn read_all(readers: &[Reader]) {
    for _ in 0..TIMES {
        let mut reading = JoinSet::new();
        for reader in readers {
            let Reader { handle, numbers } = reader;
            let reader = Reader { handle: handle.clone(), numbers: numbers.clone() };
            reading.spawn(async move { reader.read().await });
        }
        let bytes: u64 = reading.join_all().await.into_iter().sum();
        let each = u64::from(BLOCK_BYTES);
        let expected: u64 =
            readers.iter().map(|it| (it.numbers.end - it.numbers.start) * each).sum();
        assert_eq!(bytes, expected);
    }
}

/// Asks until a lookup finds all of them.
async fn find_all(handle: &Handle, numbers: Range<u64>) {
    let hashes = list(numbers);
    let found = async || {
        let found = handle.lookup(&hashes, LookupOptions::default()).await.unwrap();
        found.prefix_blocks as usize == hashes.len()
    };
    wait_until("the blocks of another node are found", WAIT, found).await;
}

async fn lookups(nodes: &[Server]) {
    let value = Bytes::from(vec![1; 64]);
    let asking = open(&connect(&nodes[0], Path::Auto).await, "lookups", 64).await;
    let mut cases = vec![("nobody has", ABSENT..ABSENT + ASKED), ("it has", 0..ASKED)];
    cases.extend((nodes.len() > 1).then_some(("another has", ASKED..2 * ASKED)));
    for (node, numbers) in [(0, 0..ASKED), (1, ASKED..2 * ASKED)].into_iter().take(nodes.len()) {
        let client = connect(&nodes[node], Path::Auto).await;
        let session = client.session("bench").await.unwrap();
        let handle = open(&client, "lookups", 64).await;
        assert_eq!(put(&handle, &session, numbers.clone(), &value, false).await, ASKED);
        find_all(&asking, numbers).await;
    }
    for (name, numbers) in cases {
        let hashes = list(numbers.clone());
        let mut times = Vec::new();
        for _ in 0..LOOKUPS {
            let started = Instant::now();
            let found = asking.lookup(&hashes, LookupOptions::default()).await.unwrap();
            times.push(started.elapsed());
            let all = if numbers.start == ABSENT { 0 } else { ASKED };
            assert_eq!(u64::from(found.prefix_blocks), all, "{name}");
        }
        println!("lookup of {ASKED} that {name}: {}", Samples::from_durations(&times));
    }
}
