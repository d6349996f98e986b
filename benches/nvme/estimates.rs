//! What lookups say that a load takes, against what it takes, while the disk is throttled and released.
//!
//! A real server whose reads a cgroup (v1, blkio) throttles: needs root.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use bytes::Bytes;
use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, HashList, LookupOptions,
    MissReason, NamespaceSpec, PutBatch,
};
use kvstrata_tiers::{
    namespace::{Identity, PartSpec},
    testing::pack,
    tier::Tier,
};
use tokio::time::Instant;

use super::{harness::Server, support::median, tier::directory};

const BLOCK: u32 = 1 << 20;
/// Blocks on nvme: far more than dram holds, so that each load comes from the disk.
const BLOCKS: u64 = 1536;
/// Blocks of one load.
const LOAD: u64 = 24;
const LOADS: usize = 40;
/// Bytes a second that a throttled disk reads.
const THROTTLED: u64 = 100_000_000;

/// A cgroup with one process in it.
struct Throttle {
    directory: String,
    device: String,
}

impl Throttle {
    fn new(process: u32, on: &Path) -> Self {
        let device = fs::metadata(on).unwrap().dev();
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let directory = format!("/sys/fs/cgroup/blkio/kvstrata-bench-{process}");
        fs::create_dir(&directory).unwrap_or_else(|error| panic!("make {directory}: {error}"));
        fs::write(format!("{directory}/cgroup.procs"), process.to_string()).unwrap();
        Self { directory, device: format!("{major}:{minor}") }
    }

    /// 0: not at all.
    fn set(&self, bytes_per_second: u64) {
        let rule = format!("{} {bytes_per_second}", self.device);
        fs::write(format!("{}/blkio.throttle.read_bps_device", self.directory), rule).unwrap();
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.set(0);
        // Fails while the server lives; it is empty when that has ended.
        drop(fs::remove_dir(&self.directory));
    }
}

struct Counter(u64);

impl GetSink for Counter {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.0 += block.len() as u64;
    }

    fn miss(&mut self, positions: std::ops::Range<u32>, reason: MissReason) {
        panic!("{positions:?}: {reason:?}");
    }
}

pub(crate) async fn while_throttled() {
    let directory = directory();
    let server = Server::builder()
        .dram("64MiB")
        .set("nvme.path", directory.path().to_str().unwrap())
        .set("nvme.capacity", "4GiB")
        .set("nvme.daily_writes", "none")
        .start()
        .await;
    let throttle = Throttle::new(server.process_id(), directory.path());
    let endpoint = format!("http://{}", server.grpc());
    let client = Client::connect(&endpoint, ClientOptions::default()).await.unwrap();
    let handle = fill(&client).await;
    println!("predicted / actual load of {LOAD} blocks of 1 MiB from nvme, p50 (p10 to p90):");
    let mut all = Vec::new();
    let mut next = 0;
    for (name, limit) in [("free", 0), ("throttled", THROTTLED), ("released", 0)] {
        throttle.set(limit);
        let mut ratios = Vec::new();
        for _ in 0..LOADS {
            ratios.push(load(&handle, next).await);
            next = (next + LOAD) % BLOCKS;
        }
        println!("  {name:<10} {}", shown(&ratios));
        all.extend(ratios);
    }
    println!("  {:<10} {}", "all", shown(&all));
    let p50 = median(all.into_iter());
    assert!((0.8..=1.25).contains(&p50), "p50 {p50:.2} is not within 0.8 to 1.25");
    server.stop(&[]).await;
}

fn shown(ratios: &[f64]) -> String {
    let mut sorted = ratios.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| sorted[((sorted.len() - 1) as f64 * share) as usize];
    format!("{:.2} ({:.2} to {:.2})", at(0.5), at(0.1), at(0.9))
}

async fn fill(client: &Client) -> Handle {
    let identity = Identity {
        model: "estimates".into(),
        engine: "bench".into(),
        dtype: "bytes".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: BLOCK }],
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    let handle = client.open(NamespaceSpec::Engine(Box::new(identity))).await.unwrap();
    let session = client.session("bench").await.unwrap();
    let bytes = Bytes::from(vec![5; BLOCK as usize]);
    for first in (0..BLOCKS).step_by(16) {
        let numbers: Vec<u64> = (first..first + 16).collect();
        let batch = PutBatch {
            hashes: HashList::of_full(pack(&numbers).into()),
            parts: Vec::new(),
            values: vec![bytes.clone(); 16],
            parent: None,
            durable: true,
        };
        handle.put(&session, &batch).await.unwrap();
    }
    handle
}

/// Loads one run; predicted over actual.
async fn load(handle: &Handle, first: u64) -> f64 {
    let numbers: Vec<u64> = (first..first + LOAD).collect();
    let hashes = HashList::of_full(pack(&numbers).into());
    let found = handle.lookup(&hashes, LookupOptions::default()).await.unwrap();
    let cold = found.runs.iter().filter(|run| run.tier == Tier::Nvme);
    let blocks: u32 = cold.map(|run| run.end - run.start).sum();
    assert_eq!(u64::from(blocks), LOAD, "all of it is on nvme only: {:?}", found.runs);
    let predicted: f64 = found.runs.iter().map(|run| run.est_load.as_secs_f64()).sum();
    let mut counter = Counter(0);
    let started = Instant::now();
    handle.get(&hashes, GetOptions::default(), &mut counter).await.unwrap();
    assert_eq!(counter.0, LOAD * u64::from(BLOCK));
    predicted / started.elapsed().as_secs_f64()
}
