//! What lookups say that a load takes, against what it takes, while the disk is throttled and released,
//! and how soon a router takes an engine that needs no disk, and the other one again.
//!
//! A real server whose reads a cgroup (v1, blkio) throttles: needs root.

use std::{fs, os::unix::fs::MetadataExt, path::Path, time::Duration};

use bytes::Bytes;
use kvstrata::client::{
    Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, HashList, LookupOptions,
    MissReason, NamespaceSpec, PutBatch,
};
use kvstrata::score::{Candidate, LoadCost, Prefill, Segment, Settings, assess, pick};
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
/// Milliseconds that an engine takes to prefill a block: a free disk saves most of it, a throttled one
/// nothing.
const PREFILL_MS: f64 = 10.0;
/// Another engine has so many of the blocks in dram, at so many milliseconds each.
const OTHER: (u32, f64) = (18, 0.5);
/// Within which a router must know: the half-life of what is measured.
const HALF_LIFE: Duration = Duration::from_secs(2);
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
        let since = Instant::now();
        let mut known = None;
        let mut ratios = Vec::new();
        for _ in 0..LOADS {
            let (predicted, actual) = load(&handle, next).await;
            if takes_disk(predicted) == (limit == 0) {
                known.get_or_insert(since.elapsed().saturating_sub(actual));
            }
            ratios.push(predicted.as_secs_f64() / actual.as_secs_f64());
            next = (next + LOAD) % BLOCKS;
        }
        let known = known.unwrap();
        println!("  {name:<10} {}, known after {:.2} s", shown(&ratios), known.as_secs_f64());
        let p50 = median(ratios.iter().copied());
        assert!((0.8..=1.25).contains(&p50), "p50 {p50:.2} is not within 0.8 to 1.25");
        assert!(known <= HALF_LIFE, "known after {known:?} only");
        all.extend(ratios);
    }
    println!("  {:<10} {}", "all", shown(&all));
    server.stop(&[]).await;
}

/// Whether a router takes the engine whose blocks are on the disk, which are all of the prompt, or the one
/// that has fewer of them in dram.
fn takes_disk(load: Duration) -> bool {
    let block_ms = load.as_secs_f64() * 1e3 / LOAD as f64;
    let candidates = [(Tier::Dram, OTHER), (Tier::Nvme, (LOAD as u32, block_ms))];
    let costs = candidates.map(|(tier, (blocks, block_ms))| {
        let cost = LoadCost { queue_ms: 0.0, setup_ms: 0.0, block_ms };
        let candidate = Candidate {
            device_blocks: 0,
            decode_blocks: 0.0,
            queue_ms: 0.0,
            prefill: Prefill::linear(PREFILL_MS),
            segments: &[Segment { blocks, tier, source: 0, cost }],
        };
        assess(LOAD as u32, &candidate, &Settings::default()).cost
    });
    pick(&costs, 0.0, 0.0) == Some(1)
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

/// Loads one run; predicted and actual.
async fn load(handle: &Handle, first: u64) -> (Duration, Duration) {
    let numbers: Vec<u64> = (first..first + LOAD).collect();
    let hashes = HashList::of_full(pack(&numbers).into());
    let found = handle.lookup(&hashes, LookupOptions::default()).await.unwrap();
    let cold = found.runs.iter().filter(|run| run.tier == Tier::Nvme);
    let blocks: u32 = cold.map(|run| run.end - run.start).sum();
    assert_eq!(u64::from(blocks), LOAD, "all of it is on nvme only: {:?}", found.runs);
    let predicted = found.runs.iter().map(|run| run.est_load).sum();
    let mut counter = Counter(0);
    let started = Instant::now();
    handle.get(&hashes, GetOptions::default(), &mut counter).await.unwrap();
    assert_eq!(counter.0, LOAD * u64::from(BLOCK));
    (predicted, started.elapsed())
}
