//! How fast do blocks move, over gRPC, the bulk port on TCP and its Unix socket, and by shared memory, and
//! what do they cost? And is a batch faster in two halves, on two connections?
//! Blocks of 64 KiB, 2 MiB and 16 MiB, by one client and by four with a connection each; a batch get of
//! 64 blocks; and whether blocks exist, one by one and a thousand at once.
//!
//! Floors in the same round: two threads and a plain blocking connection for each client, TCP or Unix,
//! the same bytes from as much memory as the server has them in; and the same with one block sent again
//! and again, which never leaves the cache; for shared memory a thread for each client that copies the same
//! bytes, block by block, by `memcpy`. CPU is that of client and server together, in seconds per
//! GB. Not measured: other network than loopback.
//!
//! ```text
//! cargo bench --no-default-features --bench bulk [-- NAME...]    only ways whose names have one of these
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
mod floor;
#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "bulk/setup.rs"]
mod setup;
mod support;

use std::{hint::black_box, ops::Range, sync::Arc};

use bytes::Bytes;
use harness::Server;
use kvstrata::client::{
    Client, FetchedBlock, GetOptions, GetSink, LookupOptions, MissReason, Path, Session,
};
use setup::{connect, list, open, put};
use support::{Samples, cpu_seconds, median};
use tokio::{task::JoinSet, time::Instant};

/// Lengths of a block.
const BLOCK_BYTES: [u32; 3] = [64 << 10, 2 << 20, 16 << 20];
/// Bytes that are stored, all clients together.
const STORED: usize = 512 << 20;
/// How often they are got in a round: CPU is counted in steps of 10 ms.
const TIMES: usize = 3;
const ROUNDS: usize = 5;
/// Blocks of a batch get, and how many of them are measured.
const BATCH: u64 = 64;
const BATCHES: usize = 50;
const CLIENTS: [usize; 2] = [1, 4];
/// Blocks of 16 MiB need extents as large, which a smaller dram does not have.
const LIMIT: &str = "2GiB";

#[tokio::main]
async fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|one| name.contains(one));
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("bulk");
    let server = Server::builder().set("memory.limit", LIMIT).start().await;
    let unix = Server::builder().set("memory.limit", LIMIT).set("server.bulk_listen", "none");
    let unix = unix.set("server.bulk_unix", socket.to_str().unwrap()).start().await;
    let shared = directory.path().join("shared");
    let here = Server::builder().set("memory.limit", LIMIT).set("server.bulk_listen", "none");
    let here = here.set("server.bulk_unix", shared.to_str().unwrap());
    let here = here.set("server.shared_memory", "true").start().await;
    let mut ways = Vec::new();
    for (name, server, path, at_once) in [
        ("gRPC", &server, Path::Grpc, 1),
        ("bulk, TCP", &server, Path::Bulk, 1),
        ("bulk, TCP, halves", &server, Path::Bulk, 2),
        ("bulk, Unix", &unix, Path::Bulk, 1),
        ("shm", &here, Path::Shm, 1),
    ] {
        if !is_wanted(name) {
            continue;
        }
        let mut clients = Vec::new();
        for _ in 0..CLIENTS[1] {
            let client = connect(server, path).await;
            let session = client.session("bench").await.unwrap();
            clients.push((client, Arc::new(session)));
        }
        ways.push(Way { name, clients, at_once, process: server.process_id().to_string() });
    }
    let stored = vec![7; STORED];
    for block_bytes in BLOCK_BYTES {
        for clients in CLIENTS {
            let name = format!("{} KiB, {clients} clients", block_bytes >> 10);
            if is_wanted(&name) || !wanted.iter().any(|one| one.contains("KiB")) {
                Box::pin(transfers(&ways, &stored, (block_bytes, clients))).await;
            }
        }
    }
    for way in &ways {
        let (name, (client, session)) = (way.name, way.clients[0].clone());
        let asking = async move { small(name, &client, &session).await };
        side_by_side(std::iter::once(Box::pin(asking))).await;
    }
    drop(ways);
    server.stop(&[]).await;
    unix.stop(&[]).await;
    here.stop(&[]).await;
}

/// One way that blocks can take, with its clients.
struct Way {
    name: &'static str,
    clients: Vec<(Client, Arc<Session>)>,
    /// Into how many gets a client cuts its share; all are under way at once, each on a connection of its own.
    at_once: usize,
    process: String,
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

/// Seconds and CPU seconds for one GB.
#[derive(Clone, Copy)]
struct Cost {
    seconds: f64,
    cpu: f64,
}

async fn cost<T>(process: &str, bytes: usize, work: impl Future<Output = T>) -> Cost {
    let cpu = || cpu_seconds("self") + cpu_seconds(process);
    let (started, before) = (Instant::now(), cpu());
    black_box(work.await);
    let gigabytes = bytes as f64 / 1e9;
    let (seconds, used) = (started.elapsed().as_secs_f64(), cpu() - before);
    Cost { seconds: seconds / gigabytes, cpu: used / gigabytes }
}

/// Its name, how it connects or that it copies, and whether it sends one block again and again.
type Floor = (&'static str, Option<fn() -> floor::Pair>, bool);

const FLOORS: [Floor; 5] = [
    ("floor, TCP", Some(floor::tcp_pair), false),
    ("floor, Unix", Some(floor::unix_pair), false),
    ("floor, memcpy", None, false),
    ("floor, TCP, cached", Some(floor::tcp_pair), true),
    ("floor, Unix, cached", Some(floor::unix_pair), true),
];

/// The floor that a way is compared with.
fn floor_of(name: &str) -> usize {
    match name {
        _ if name.contains("Unix") => 1,
        _ if name.contains("shm") || name.contains("memcpy") => 2,
        _ => 0,
    }
}

async fn transfers(ways: &[Way], stored: &[u8], (block_bytes, clients): (u32, usize)) {
    let of_ways =
        ways.iter().flat_map(|way| [format!("get, {}", way.name), format!("put, {}", way.name)]);
    let names: Vec<_> = FLOORS.iter().map(|(name, ..)| (*name).to_owned()).chain(of_ways).collect();
    let mut rows: Vec<Vec<Cost>> = vec![Vec::new(); names.len()];
    for round in 0..ROUNDS {
        for (row, (_, pair, cached)) in rows.iter_mut().zip(FLOORS) {
            let case = (block_bytes as usize, clients, TIMES);
            let floor = async {
                tokio::task::block_in_place(|| match pair {
                    Some(pair) => floor::run(stored, case, cached, pair),
                    None => floor::copy(stored, case),
                });
            };
            row.push(cost("0", TIMES * STORED, floor).await);
        }
        for (at, way) in ways.iter().enumerate() {
            let model = format!("{block_bytes}, {clients} clients, {round}");
            let (gets, puts) = transfer(way, (block_bytes, clients), &model).await;
            rows[FLOORS.len() + 2 * at].push(gets);
            rows[FLOORS.len() + 2 * at + 1].push(puts);
        }
    }
    println!("blocks of {} KiB, {clients} clients, medians of {ROUNDS}:", block_bytes >> 10);
    println!("{:>20}{:>8}{:>8}{:>8}{:>10}{:>8}", "", "GB/s", "best", "ratio", "CPU s/GB", "ratio");
    for (name, row) in names.iter().zip(&rows) {
        // Each with the floor of its own round: a machine that others use changes from round to round.
        let floor = &rows[floor_of(name)];
        let rounds = || row.iter().zip(floor);
        let best = row.iter().map(|cost| 1.0 / cost.seconds).fold(0.0, f64::max);
        println!(
            "{name:>20}{:>8.2}{best:>8.2}{:>8.2}{:>10.3}{:>8.2}",
            median(row.iter().map(|cost| 1.0 / cost.seconds)),
            median(rounds().map(|(cost, floor)| floor.seconds / cost.seconds)),
            median(row.iter().map(|cost| cost.cpu)),
            median(rounds().map(|(cost, floor)| cost.cpu / floor.cpu)),
        );
    }
}

/// Puts blocks and gets them, an equal share by each client; returns the costs, gets first.
async fn transfer(way: &Way, (block_bytes, clients): (u32, usize), model: &str) -> (Cost, Cost) {
    let value = Bytes::from((0..=255).cycle().take(block_bytes as usize).collect::<Vec<u8>>());
    let share = (STORED / block_bytes as usize / clients / way.at_once) as u64;
    let mut shares = Vec::new();
    let clients = way.clients.iter().take(clients);
    let cut = clients.flat_map(|client| std::iter::repeat_n(client, way.at_once));
    for ((client, session), number) in cut.zip(0..) {
        let handle = open(client, model, block_bytes).await;
        shares.push((handle, Arc::clone(session), number * share..(number + 1) * share));
    }
    let puts = shares.iter().cloned().map(|(handle, session, numbers)| {
        let value = value.clone();
        async move { assert_eq!(put(&handle, &session, numbers, &value, false).await, share) }
    });
    let puts = cost(&way.process, STORED, side_by_side(puts)).await;
    let gets = shares.iter().cloned().map(|(handle, _, numbers)| async move {
        let hashes = list(numbers.clone());
        for _ in 0..TIMES {
            let mut sink = Sink::default();
            handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
            assert_eq!(sink.0, share * u64::from(block_bytes));
        }
    });
    let gets = cost(&way.process, TIMES * STORED, side_by_side(gets)).await;
    for (handle, _, numbers) in &shares {
        handle.remove(&list(numbers.clone())).await.unwrap();
    }
    (gets, puts)
}

/// Runs each on the threads of the runtime, as an engine does.
async fn side_by_side<W: Future<Output = ()> + Send + 'static>(works: impl Iterator<Item = W>) {
    let all: JoinSet<()> = works.collect();
    all.join_all().await;
}

/// Batch gets of small blocks, and questions whether blocks exist.
async fn small(name: &str, client: &Client, session: &Session) {
    for block_bytes in [64 << 10, 2 << 20] {
        let handle = open(client, &format!("batch of {block_bytes}"), block_bytes).await;
        let value = Bytes::from(vec![1; block_bytes as usize]);
        assert_eq!(put(&handle, session, 0..BATCH, &value, false).await, BATCH);
        let hashes = list(0..BATCH);
        let mut times = Vec::new();
        for _ in 0..BATCHES {
            let (started, mut sink) = (Instant::now(), Sink::default());
            handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
            times.push(started.elapsed());
        }
        let (kib, samples) = (block_bytes >> 10, Samples::from_durations(&times));
        println!("{name}: get of {BATCH} blocks of {kib} KiB: {samples}");
        handle.remove(&hashes).await.unwrap();
    }
    let handle = open(client, &format!("exists by {name}"), 64).await;
    assert_eq!(put(&handle, session, 0..1000, &Bytes::from(vec![1; 64]), false).await, 1000);
    for asked in [1, 1000] {
        let hashes = list(0..asked);
        let mut times = Vec::new();
        for _ in 0..1000 {
            let started = Instant::now();
            let found = handle.lookup(&hashes, LookupOptions::default()).await.unwrap();
            times.push(started.elapsed());
            assert_eq!(u64::from(found.prefix_blocks), asked);
        }
        println!("{name}: exists x{asked}: {}", Samples::from_durations(&times));
    }
}
