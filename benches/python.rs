//! What does the Python package cost, compared with the Rust client that it wraps?
//!
//! Gets of blocks of two sizes from dram over each path, by a Rust client into memory of its own, by
//! one that only counts what comes, and by a Python process into buffers of its own, in the same rounds
//! against the same server. CPU is that of client and server together. Not measured: puts, other network
//! than loopback.
//!
//! The package must be installed in `.venv` (scripts/test.sh does it), from the same profile as this:
//!
//! ```text
//! cargo bench --profile dev --bench python
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
    io::{BufRead, BufReader, Write},
    ops::Range,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use bytes::Bytes;
use harness::Server;
use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, HashList, MissReason,
    NamespaceSpec, Path, PiecePlace, PutBatch, PutOutcome,
};
use kvstrata_tiers::{
    namespace::{Identity, PartSpec},
    testing::pack,
};
use support::{cpu_seconds, median};
use tokio::time::Instant;

const TOTAL: usize = 512 << 20;
const ROUNDS: usize = 9;
const ROWS: [&str; 3] = ["Rust, into its memory", "Rust, counted", "Python, into its memory"];

#[tokio::main]
async fn main() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("bulk");
    let tcp = Server::builder().set("memory.limit", "1GiB").start().await;
    let unix = Server::builder().set("memory.limit", "1GiB").set("server.bulk_listen", "none");
    let unix = unix.set("server.bulk_unix", socket.to_str().unwrap()).start().await;
    for (name, server, path) in [
        ("gRPC", &tcp, Path::Grpc),
        ("bulk, TCP", &tcp, Path::Bulk),
        ("bulk, Unix", &unix, Path::Bulk),
    ] {
        for block_bytes in [2 << 20, 64 << 10] {
            Box::pin(compare(name, server, path, block_bytes)).await;
        }
    }
    tcp.stop(&[]).await;
    unix.stop(&[]).await;
}

async fn compare(name: &str, server: &Server, path: Path, block_bytes: usize) {
    let options = ClientOptions { path, ..ClientOptions::default() };
    let client = Client::connect(server.grpc(), options).await.unwrap();
    let handle = open(&client, block_bytes).await;
    let blocks = TOTAL / block_bytes;
    let hashes = HashList::of_full(pack(&(0..blocks as u64).collect::<Vec<_>>()).into());
    fill(&client, &handle, &hashes, block_bytes).await;
    let mut python = Python::start(server, path, block_bytes, &hashes);
    let mut lend = Lend { memory: vec![1; TOTAL], block_bytes, blocks: 0 };
    let process = server.process_id().to_string();
    let mut rows: [Vec<(f64, f64)>; 3] = Default::default();
    for round in 0..=ROUNDS {
        for (row, costs) in rows.iter_mut().enumerate() {
            let client = if row == 2 { python.child.id().to_string() } else { "self".into() };
            let cpu = || cpu_seconds(&client) + cpu_seconds(&process);
            let (began, before) = (Instant::now(), cpu());
            let seconds = match row {
                0 => {
                    lend.blocks = 0;
                    handle.get(&hashes, GetOptions::default(), &mut lend).await.unwrap();
                    assert_eq!(lend.blocks, blocks);
                    began.elapsed().as_secs_f64()
                }
                1 => {
                    let mut count = Count(0);
                    handle.get(&hashes, GetOptions::default(), &mut count).await.unwrap();
                    assert_eq!(count.0, blocks);
                    began.elapsed().as_secs_f64()
                }
                _ => tokio::task::block_in_place(|| python.get()),
            };
            // The first one is to warm up.
            if round > 0 {
                costs.push((seconds, cpu() - before));
            }
        }
    }
    let gigabytes = TOTAL as f64 / 1e9;
    println!("{name}, blocks of {block_bytes} bytes, medians of {ROUNDS} rounds:");
    let rate = |costs: &[(f64, f64)]| gigabytes / median(costs.iter().map(|cost| cost.0));
    for (row, costs) in ROWS.iter().zip(&rows) {
        let cpu = median(costs.iter().map(|cost| cost.1)) / gigabytes;
        let share = median(costs.iter().zip(&rows[0]).map(|(cost, first)| first.0 / cost.0));
        println!("{row:>26}{:>8.2} GB/s{share:>8.2}{cpu:>8.2} CPU s/GB", rate(costs));
    }
    handle.remove(&hashes).await.unwrap();
}

async fn open(client: &Client, block_bytes: usize) -> Handle {
    let identity = Identity {
        model: "python".into(),
        engine: "bench".into(),
        dtype: "bytes".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: block_bytes.try_into().unwrap() }],
        split: "none".into(),
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    client.open(NamespaceSpec::Engine(Box::new(identity))).await.unwrap()
}

async fn fill(client: &Client, handle: &Handle, hashes: &HashList, block_bytes: usize) {
    let session = client.session("bench").await.unwrap();
    let value = Bytes::from((0..=255).cycle().take(block_bytes).collect::<Vec<u8>>());
    let batch = PutBatch {
        hashes: hashes.clone(),
        parts: Vec::new(),
        values: vec![value; hashes.len()],
        parent: None,
        durable: false,
    };
    let stored = handle.put(&session, &batch).await.unwrap().count(PutOutcome::Stored);
    assert_eq!(stored, hashes.len() as u64);
}

/// Has blocks written into memory of its own.
struct Lend {
    memory: Vec<u8>,
    block_bytes: usize,
    blocks: usize,
}

impl GetSink for Lend {
    fn room(&mut self, place: PiecePlace) -> Option<&mut [u8]> {
        let start = place.position as usize * self.block_bytes + place.offset;
        self.memory.get_mut(start..start + place.bytes)
    }

    fn block(&mut self, _block: FetchedBlock<'_>) {
        self.blocks += 1;
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        panic!("{positions:?}: {reason:?}");
    }
}

/// Counts blocks and keeps nothing.
struct Count(usize);

impl GetSink for Count {
    fn block(&mut self, _block: FetchedBlock<'_>) {
        self.0 += 1;
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        panic!("{positions:?}: {reason:?}");
    }
}

/// The Python process.
struct Python {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Python {
    fn start(server: &Server, path: Path, block_bytes: usize, hashes: &HashList) -> Self {
        let mut child = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.venv/bin/python"))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/python_get_into.py"))
            .args([server.grpc(), if path == Path::Grpc { "grpc" } else { "bulk" }, "python"])
            .arg(block_bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut to = child.stdin.take().unwrap();
        writeln!(to, "{}", hex::encode(hashes.packed())).unwrap();
        let from = BufReader::new(child.stdout.take().unwrap());
        let mut python = Self { child, to, from };
        assert_eq!(python.line(), "ready");
        python
    }

    /// Gets all blocks once; returns the seconds that it took.
    fn get(&mut self) -> f64 {
        writeln!(self.to, "get").unwrap();
        let line = self.line();
        line.parse().unwrap_or_else(|_other| panic!("Python: {line}"))
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
