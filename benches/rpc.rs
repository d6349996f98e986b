//! What does an engine see over the wire: lookups of 32,768 hashes, gets and puts of 2 MiB blocks, and
//! how much memory does a node use whose arena is full?
//!
//! Floor: two threads and a plain blocking TCP connection, the same bytes in the same round. CPU is
//! that of client and server together, in seconds per GB. Not measured: other network than loopback,
//! more than one client.
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
    time::Duration,
};

use bytes::Bytes;
use harness::Server;
use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, HashList, LeaseAsk,
    LookupOptions, MissReason, NamespaceSpec, PutBatch, PutOutcome, Session,
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
    let server = Server::builder().set("memory.limit", LIMIT).start().await;
    let process = server.process_id().to_string();
    let client =
        Client::connect(&format!("http://{}", server.grpc()), ClientOptions::default()).await;
    let client = client.unwrap();
    let session = client.session("bench").await.unwrap();
    lookups(&client, &session).await;
    Box::pin(transfers(&client, &session, &process)).await;
    memory(&client, &session, &server).await;
    drop((client, session));
    server.stop(&[]).await;
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

async fn transfers(client: &Client, session: &Session, process: &str) {
    let total = u64::from(BLOCK_BYTES) * BLOCKS as u64;
    let value = Bytes::from((0..=255).cycle().take(BLOCK_BYTES as usize).collect::<Vec<u8>>());
    let mut rows: [Vec<Cost>; 3] = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        let handle = open(client, &format!("transfers {round}"), BLOCK_BYTES).await;
        let stored = put(&handle, session, 0..BLOCKS as u64, &value);
        let puts = Box::pin(async { assert_eq!(stored.await, BLOCKS as u64) });
        let puts = cost(process, puts).await;
        let hashes = list(0..BLOCKS as u64);
        let gets = cost(process, async {
            let mut sink = Sink::default();
            handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
            assert_eq!(sink.0, total);
        });
        let gets = gets.await;
        let floor = cost("0", async { tokio::task::block_in_place(|| tcp(total)) }).await;
        for (row, cost) in rows.iter_mut().zip([floor, gets, puts]) {
            row.push(cost);
        }
        handle.remove(&hashes).await.unwrap();
    }
    println!("{BLOCKS} blocks of {BLOCK_BYTES} bytes, medians of {ROUNDS} rounds:");
    println!("{:>16}{:>10}{:>14}{:>12}", "", "GB/s", "of the floor", "CPU s/GB");
    let floor = median(rows[0].iter().map(|cost| cost.seconds));
    for (name, row) in ["blocking TCP", "get", "put"].into_iter().zip(&rows) {
        let seconds = median(row.iter().map(|cost| cost.seconds));
        let cpu = median(row.iter().map(|cost| cost.cpu));
        let gigabytes = total as f64 / 1e9;
        println!(
            "{name:>16}{:>10.2}{:>14.2}{:>12.2}",
            gigabytes / seconds,
            floor / seconds,
            cpu / gigabytes
        );
    }
}

/// Moves `total` bytes in writes of one block through a blocking connection between two threads.
fn tcp(total: u64) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let writer = std::thread::spawn(move || {
        let mut to = TcpStream::connect(address).unwrap();
        let block = vec![7; BLOCK_BYTES as usize];
        for _ in 0..total / u64::from(BLOCK_BYTES) {
            to.write_all(&block).unwrap();
        }
    });
    let (mut from, _) = listener.accept().unwrap();
    let mut block = vec![0; BLOCK_BYTES as usize];
    for _ in 0..total / u64::from(BLOCK_BYTES) {
        from.read_exact(&mut block).unwrap();
        black_box(&block);
    }
    writer.join().unwrap();
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
