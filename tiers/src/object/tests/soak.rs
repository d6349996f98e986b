//! A bucket of a bounded size under traffic many times as large: how large it is, what it costs, and how
//! many of the hits of an ideal cache of that size it has.
//!
//! The traffic is sessions that come back, the recent ones more often, with all their blocks and some
//! new ones. Beside it runs an exact LRU over the same references, which has the bucket's size and
//! neither packs nor a grace time. Time is paused and all draws are seeded, so that runs are alike.
//!
//! What is lost to an LRU is what is kept free: two packs, and what is dropped within the grace time. So
//! the smaller the bucket, in packs, the more: `KVSTRATA_SOAK_MIB` and `KVSTRATA_SOAK_SEED` make others.
//!
//! ```text
//! packs of 1 MiB, ten turnovers   64 MiB   96 MiB   256 MiB
//! hits, of all references         0.496    0.498    0.501
//! hits of the LRU                 0.509    0.507    0.506
//! bytes packed again, per byte    0.76     0.77     0.77
//! ```

use std::collections::{BTreeMap, HashMap, HashSet};

use super::*;
use crate::testing::Draws;

const BLOCK_BYTES: u32 = 4096;
/// Of a thousand turns, those that begin a session.
const NEW_SESSIONS: u64 = 300;
/// The longest session, in blocks.
const SESSION_BLOCKS_MAX: usize = 48;
/// Runs that nvme has.
const RUNS_MAX: usize = 2;

/// A cache of an exact size.
struct Ideal {
    blocks_max: usize,
    clock: u64,
    ages: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
}

impl Ideal {
    fn new(blocks_max: usize) -> Self {
        Self { blocks_max, clock: 0, ages: HashMap::new(), order: BTreeMap::new() }
    }

    /// Uses blocks, the last one first; returns how many were there.
    fn turn(&mut self, blocks: &[u64]) -> usize {
        let hits = blocks.iter().filter(|number| self.ages.contains_key(number)).count();
        for number in blocks.iter().rev() {
            self.clock += 1;
            if let Some(age) = self.ages.insert(*number, self.clock) {
                self.order.remove(&age);
            }
            self.order.insert(self.clock, *number);
            if self.order.len() > self.blocks_max {
                let (_, coldest) = self.order.pop_first().unwrap();
                self.ages.remove(&coldest);
            }
        }
        hits
    }
}

/// Sessions, the one used last at the end.
struct Traffic {
    draws: Draws,
    sessions: Vec<Vec<u64>>,
    sessions_max: usize,
    blocks: u64,
}

impl Traffic {
    /// All blocks of the next turn, in their order.
    fn turn(&mut self) -> Vec<u64> {
        let count = self.sessions.len() as u64;
        let mut session = if count == 0 || self.draws.chance(NEW_SESSIONS) {
            Vec::new()
        } else {
            // By the third power of an even draw, so that the recent ones come more often.
            let draw = self.draws.below(1000);
            let back = count * draw * draw * draw / 1_000_000_000;
            self.sessions.remove(usize::try_from(count - 1 - back).unwrap())
        };
        for _ in 0..4 + self.draws.below(8) {
            session.push(self.blocks);
            self.blocks += 1;
        }
        let blocks = session.clone();
        if session.len() < SESSION_BLOCKS_MAX {
            self.sessions.push(session);
        }
        if self.sessions.len() > self.sessions_max {
            self.sessions.remove(0);
        }
        blocks
    }
}

/// What a soak has seen.
#[derive(Debug, Default)]
struct Seen {
    references: usize,
    hits: usize,
    ideal_hits: usize,
    put_bytes: u64,
    largest_bytes: u64,
}

/// A node and what goes through it.
struct Soak {
    rig: Rig,
    node: Node,
    /// Blocks that nvme has in no run yet.
    unsealed: u64,
    runs: Vec<RunId>,
    seen: Seen,
}

impl Soak {
    fn new(capacity_bytes: u64) -> Self {
        let mut rig = Rig::new();
        rig.capacity_bytes = capacity_bytes;
        rig.delete_grace = Duration::from_secs(30);
        rig.dram_bytes = 4 << 20;
        let mut node = rig.start();
        node.namespace = node.fixture.namespace("soak", &[BLOCK_BYTES]).unwrap();
        Self { rig, node, unsealed: 0, runs: Vec::new(), seen: Seen::default() }
    }

    /// Reads what is there of some blocks, and puts the others.
    async fn turn(&mut self, blocks: &[u64]) {
        let node = &self.node;
        let reads = blocks.iter().map(async |number| {
            let parts = node.fixture.read(&node.namespace, *number).await?;
            let right = block_bytes(&node.namespace, *number, 0, BLOCK_BYTES as usize);
            assert_eq!(parts, [right], "block {number}");
            Some(*number)
        });
        let read = futures_util::future::join_all(reads).await;
        let hits: HashSet<u64> = read.into_iter().flatten().collect();
        self.seen.references += blocks.len();
        self.seen.hits += hits.len();
        let missing: Vec<u64> = blocks.iter().copied().filter(|n| !hits.contains(n)).collect();
        node.fixture.put(&node.namespace, &missing).unwrap();
        for number in &missing {
            let hash = hash_of(*number);
            node.fixture.stack.demote(&node.namespace, hash, Tier::Nvme).await.unwrap();
        }
        node.touch(blocks);
        self.unsealed += missing.len() as u64;
        self.seen.put_bytes += missing.len() as u64 * u64::from(BLOCK_BYTES);
        if self.unsealed * u64::from(BLOCK_BYTES) >= 1 << 20 {
            self.unsealed = 0;
            self.runs.push(node.runs.seal());
        }
        while self.runs.len() > RUNS_MAX {
            let oldest = self.runs.remove(0);
            while !self.node.runs.offers().contains(&oldest) {
                self.rig.pass(1).await;
            }
            self.node.runs.reclaim(oldest);
        }
    }

    async fn look(&mut self) {
        let bytes = self.rig.listed().await.iter().map(|(_, bytes)| bytes).sum();
        self.seen.largest_bytes = self.seen.largest_bytes.max(bytes);
        assert!(bytes <= self.rig.capacity_bytes, "{bytes} bytes are in the bucket");
    }
}

/// Runs traffic of so many turnovers of a bucket of so many bytes.
async fn soak(capacity_bytes: u64, turnovers: u64, seed: u64) -> Soak {
    let mut soak = Soak::new(capacity_bytes);
    let blocks_max = capacity_bytes / u64::from(BLOCK_BYTES);
    let mut ideal = Ideal::new(usize::try_from(blocks_max).unwrap());
    let sessions_max = usize::try_from(blocks_max / 8).unwrap();
    let draws = Draws::new(seed);
    let mut traffic = Traffic { draws, sessions: Vec::new(), sessions_max, blocks: 0 };
    let mut turn = 0_u64;
    while soak.seen.put_bytes < turnovers * capacity_bytes {
        let blocks = traffic.turn();
        soak.turn(&blocks).await;
        soak.seen.ideal_hits += ideal.turn(&blocks);
        soak.rig.pass(3).await;
        turn += 1;
        if turn.is_multiple_of(32) {
            soak.look().await;
        }
    }
    soak
}

#[tokio::test(start_paused = true)]
async fn a_bucket_of_a_tenth_of_the_traffic_stays_within_its_size_and_keeps_what_an_lru_would() {
    let number = |name| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let mib = number("KVSTRATA_SOAK_MIB").unwrap_or(64);
    let seed = number("KVSTRATA_SOAK_SEED").unwrap_or(1);
    let mut soak = soak(mib << 20, 10, seed).await;
    soak.look().await;
    let metrics = &soak.node.metrics;
    let (seen, packs) = (&soak.seen, metrics.packs_made.get());
    let share = |hits: usize| hits as f64 / seen.references as f64;
    let again = metrics.repacked_bytes.get();
    let new = metrics.stored_bytes.get() - again;
    let maintenance = soak.node.requests.sent_requests() - metrics.read_runs.get();
    println!(
        "SEED={seed} {mib} MiB, {} MiB put, at most {:.1} MiB in the bucket; of {} references {:.4} hit, \
         of an LRU {:.4}; {packs} packs of {new} bytes and {again} again; {maintenance} requests and {} \
         to read",
        seen.put_bytes >> 20,
        seen.largest_bytes as f64 / f64::from(1 << 20),
        seen.references,
        share(seen.hits),
        share(seen.ideal_hits),
        metrics.read_runs.get(),
    );
    assert!(share(seen.ideal_hits) > 0.2, "there is something to hit");
    assert!(share(seen.hits) >= share(seen.ideal_hits) - 0.02, "SEED={seed}");
    assert!(seen.largest_bytes >= (mib << 20) * 8 / 10, "the bucket is used");
    assert!(again <= new, "packing again is bounded by packing: {again} and {new}");
    // Uploading and deleting it, its share of the log and of the signs of life, and reading the footers
    // and some runs of those that it is made of.
    assert!(maintenance <= 10 * packs, "{maintenance} requests for {packs} packs");
    // Nothing is left over.
    soak.rig.pass(200).await;
    let listed: u64 = soak.rig.listed().await.iter().map(|(_, bytes)| bytes).sum();
    assert_eq!(listed, soak.node.store.usage().used_bytes);
}
