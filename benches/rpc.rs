//! What does an engine see over the wire: lookups of 32,768 hashes, gets and puts of 2 MiB blocks, and
//! how much memory does a node use whose arena is full?
//!
//! Gets and puts go over gRPC, over the bulk port on TCP and over its Unix socket, by one client and by
//! four with a connection each. Floor: two threads and a plain blocking connection for each client, TCP
//! or Unix, the same bytes in the same round. CPU is that of client and server together, in seconds per
//! GB. Not measured: other network than loopback.
//!
//! ```text
//! cargo bench --bench rpc
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

#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
mod support;

use std::{
    hint::black_box,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    ops::Range,
    os::unix::net::UnixStream,
    time::Duration,
};

use bytes::Bytes;
use futures_util::future::join_all;
use harness::Server;
use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, HashList, LeaseAsk,
    LookupOptions, MissReason, NamespaceSpec, Path, PutBatch, PutOutcome, Session,
};
use kvstrata_tiers::{
    namespace::{Identity, PartSpec},
    testing::{hash_of, pack},
};
use support::{Samples, cpu_seconds, median};
use tokio::time::Instant;

const BLOCK_BYTES: u32 = 2 << 20;
const BLOCKS: usize = 256;
const ASKED: u64 = 32_768;
const LOOKUPS: usize = 200;
const ROUNDS: usize = 5;
const LIMIT: &str = "1GiB";
const LIMIT_BYTES: u64 = 1 << 30;

#[tokio::main]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("bulk");
    let server = Server::builder().set("memory.limit", LIMIT).start().await;
    let unix = Server::builder().set("memory.limit", LIMIT).set("server.bulk_listen", "none");
    let unix = unix.set("server.bulk_unix", socket.to_str().unwrap()).start().await;
    let client = connect(&server, Path::Auto).await;
    let session = client.session("bench").await.unwrap();
    lookups(&client, &session).await;
    let mut ways = Vec::new();
    for (name, server, path) in [
        ("gRPC", &server, Path::Grpc),
        ("bulk, TCP", &server, Path::Bulk),
        ("bulk, Unix", &unix, Path::Bulk),
    ] {
        let mut clients = Vec::new();
        for _ in 0..CLIENTS_MAX {
            let client = connect(server, path).await;
            let session = client.session("bench").await.unwrap();
            clients.push((client, session));
        }
        ways.push(Way { name, clients, process: server.process_id().to_string() });
    }
    for clients in [1, CLIENTS_MAX] {
        Box::pin(transfers(&ways, clients)).await;
    }
    drop(ways);
    memory(&client, &session, &server).await;
    drop((client, session));
    server.stop(&[]).await;
    unix.stop(&[]).await;
}

/// The most clients at a time.
const CLIENTS_MAX: usize = 4;

/// One way that blocks can take, with its clients.
struct Way {
    name: &'static str,
    clients: Vec<(Client, Session)>,
    process: String,
}

async fn connect(server: &Server, path: Path) -> Client {
    let options = ClientOptions { path, ..ClientOptions::default() };
    Client::connect(&format!("http://{}", server.grpc()), options).await.unwrap()
}

async fn open(client: &Client, model: &str, block_bytes: u32) -> Handle {
    let identity = Identity {
        model: model.into(),
        engine: "bench".into(),
        dtype: "bytes".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: block_bytes }],
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    client.open(NamespaceSpec::Engine(Box::new(identity))).await.unwrap()
}

fn list(numbers: Range<u64>) -> HashList {
    HashList::of_full(pack(&numbers.collect::<Vec<_>>()).into())
}

/// Puts blocks of one value; returns how many were stored.
async fn put(handle: &Handle, session: &Session, numbers: Range<u64>, value: &Bytes) -> u64 {
    let parent = numbers.start.checked_sub(1).map(hash_of);
    let hashes = list(numbers);
    let values = vec![value.clone(); hashes.len()];
    let batch = PutBatch { hashes, parts: Vec::new(), values, parent, durable: false };
    handle.put(session, &batch).await.unwrap().count(PutOutcome::Stored)
}

async fn lookups(client: &Client, session: &Session) {
    let handle = open(client, "lookups", 64).await;
    let value = Bytes::from(vec![1; 64]);
    assert_eq!(put(&handle, session, 0..ASKED, &value).await, ASKED);
    let hashes = list(0..ASKED);
    for leased in [false, true] {
        let (mut lookups, mut releases) = (Vec::new(), Vec::new());
        for _ in 0..LOOKUPS {
            let ask = LeaseAsk { session, ttl: Duration::ZERO, bytes_max: 0 };
            let options = LookupOptions { lease: leased.then_some(ask), sparse: false };
            let started = Instant::now();
            let found = handle.lookup(&hashes, options).await.unwrap();
            lookups.push(started.elapsed());
            assert_eq!(u64::from(found.prefix_blocks), ASKED);
            if let Some(lease) = found.lease {
                let started = Instant::now();
                client.release(lease).await.unwrap();
                releases.push(started.elapsed());
            }
        }
        let name = if leased { "with lease" } else { "without lease" };
        println!("lookup of {ASKED} over gRPC, {name}: {}", Samples::from_durations(&lookups));
        if leased {
            println!("  its release: {}", Samples::from_durations(&releases));
        }
    }
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

/// Seconds and CPU seconds of one thing.
#[derive(Clone, Copy)]
struct Cost {
    seconds: f64,
    cpu: f64,
}

async fn cost<T>(process: &str, work: impl Future<Output = T>) -> Cost {
    let cpu = || cpu_seconds("self") + cpu_seconds(process);
    let (started, before) = (Instant::now(), cpu());
    black_box(work.await);
    Cost { seconds: started.elapsed().as_secs_f64(), cpu: cpu() - before }
}

async fn transfers(ways: &[Way], clients: usize) {
    let names =
        ways.iter().flat_map(|way| [format!("get, {}", way.name), format!("put, {}", way.name)]);
    let names: Vec<_> =
        ["blocking TCP", "blocking Unix"].map(String::from).into_iter().chain(names).collect();
    let mut rows: Vec<Vec<Cost>> = vec![Vec::new(); names.len()];
    for round in 0..ROUNDS {
        for (row, pair) in rows.iter_mut().zip([tcp_pair as fn() -> Pair, unix_pair]) {
            let floor = async { tokio::task::block_in_place(|| floor(clients, pair)) };
            row.push(cost("0", floor).await);
        }
        for (at, way) in ways.iter().enumerate() {
            let (gets, puts) = transfer(way, clients, &format!("{clients} clients, {round}")).await;
            rows[2 + 2 * at].push(gets);
            rows[3 + 2 * at].push(puts);
        }
    }
    println!(
        "{BLOCKS} blocks of {BLOCK_BYTES} bytes, {clients} clients, medians of {ROUNDS} rounds:"
    );
    println!(
        "{:>16}{:>10}{:>14}{:>12}{:>12}",
        "", "GB/s", "of its floor", "CPU s/GB", "of its own"
    );
    let gigabytes = TOTAL as f64 / 1e9;
    let of = |row: &[Cost]| {
        let seconds = median(row.iter().map(|cost| cost.seconds));
        (gigabytes / seconds, median(row.iter().map(|cost| cost.cpu)) / gigabytes)
    };
    for (name, row) in names.iter().zip(&rows) {
        let (rate, cpu) = of(row);
        let (floor, floor_cpu) = of(&rows[usize::from(name.contains("Unix"))]);
        println!(
            "{name:>16}{rate:>10.2}{:>14.2}{cpu:>12.2}{:>12.2}",
            rate / floor,
            cpu / floor_cpu
        );
    }
}

/// All bytes of one round.
const TOTAL: u64 = BLOCK_BYTES as u64 * BLOCKS as u64;

/// Puts blocks and gets them, an equal share by each client; returns the costs, gets first.
async fn transfer(way: &Way, clients: usize, model: &str) -> (Cost, Cost) {
    let value = Bytes::from((0..=255).cycle().take(BLOCK_BYTES as usize).collect::<Vec<u8>>());
    let share = (BLOCKS / clients) as u64;
    let mut shares = Vec::new();
    for ((client, session), number) in way.clients.iter().take(clients).zip(0..) {
        let handle = open(client, model, BLOCK_BYTES).await;
        shares.push((handle, session, number * share..(number + 1) * share));
    }
    let puts = shares.iter().map(|(handle, session, numbers)| async {
        assert_eq!(put(handle, session, numbers.clone(), &value).await, share);
    });
    let puts = cost(&way.process, Box::pin(join_all(puts))).await;
    let gets = shares.iter().map(|(handle, _, numbers)| async {
        let mut sink = Sink::default();
        let hashes = list(numbers.clone());
        handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
        assert_eq!(sink.0, share * u64::from(BLOCK_BYTES));
    });
    let gets = cost(&way.process, Box::pin(join_all(gets))).await;
    for (handle, _, numbers) in &shares {
        handle.remove(&list(numbers.clone())).await.unwrap();
    }
    (gets, puts)
}

/// The two ends of a connection.
type Pair = (Box<dyn Write + Send>, Box<dyn Read + Send>);

fn tcp_pair() -> Pair {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (Box::new(to), Box::new(listener.accept().unwrap().0))
}

fn unix_pair() -> Pair {
    let (to, from) = UnixStream::pair().unwrap();
    (Box::new(to), Box::new(from))
}

/// Moves all bytes in writes of one block through plain blocking connections, an equal share through
/// each.
fn floor(clients: usize, pair: fn() -> Pair) {
    std::thread::scope(|scope| {
        for _ in 0..clients {
            let (mut to, mut from) = pair();
            scope.spawn(move || {
                let block = vec![7; BLOCK_BYTES as usize];
                for _ in 0..BLOCKS / clients {
                    to.write_all(&block).unwrap();
                }
            });
            scope.spawn(move || {
                let mut block = vec![0; BLOCK_BYTES as usize];
                for _ in 0..BLOCKS / clients {
                    from.read_exact(&mut block).unwrap();
                    black_box(&block);
                }
            });
        }
    });
}

/// Fills the arena twice over with blocks of two sizes and looks at the server's memory.
async fn memory(client: &Client, session: &Session, server: &Server) {
    let capacity = client.stats().await.unwrap().tiers[0].capacity_bytes;
    for (model, block_bytes) in [("large", 2 << 20), ("small", 16 << 10)] {
        let handle = open(client, model, block_bytes).await;
        let value = Bytes::from(vec![3; block_bytes as usize]);
        let blocks = 2 * capacity / u64::from(block_bytes);
        let batch = (64 << 20) / u64::from(block_bytes);
        for start in (0..blocks).step_by(usize::try_from(batch).unwrap()) {
            // Read again, so that the context may grow past its share.
            put(&handle, session, start..start + batch, &value).await;
            let hashes = list(start..start + batch);
            let mut sink = Ignore;
            handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
        }
        let used = client.stats().await.unwrap().tiers[0].used_bytes;
        let (all, heap) = (server.status_bytes("VmRSS"), server.status_bytes("RssAnon"));
        println!(
            "memory.limit {LIMIT}, dram {} MiB, {:.1} % of it in use by {model} blocks: RSS {} MiB \
             ({:.1} % of the limit), of which heap {} MiB",
            capacity >> 20,
            used as f64 * 100.0 / capacity as f64,
            all >> 20,
            all as f64 * 100.0 / LIMIT_BYTES as f64,
            heap >> 20
        );
    }
}

struct Ignore;

impl GetSink for Ignore {
    fn block(&mut self, _block: FetchedBlock<'_>) {}

    fn miss(&mut self, _positions: Range<u32>, _reason: MissReason) {}
}
