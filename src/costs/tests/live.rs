//! Engines load while a disk is throttled and released, in paused time: what they are told before, and
//! which of them a router would take.

use std::sync::Arc;

use kvstrata_tiers::{
    checksum::part_checksum,
    namespace::{Identity, Namespace, NamespaceSpec, PartSpec},
    store::Checksums,
    testing::{Throttled, block_bytes, hash_of, pack},
};
use tokio::time::sleep;

use super::*;
use crate::{
    api::tests::node,
    auth::{Bearer, ONLY_TENANT},
    flow::{GetAsk, GetFlow, Step},
    node::Node,
    score::{Assessment, Candidate, Prefill, Segment, Settings, assess, pick},
};

/// Bytes of a block: more than dram has are on nvme, so that each load comes from there.
const BLOCK: u32 = 256 << 10;
const BLOCKS: u64 = 192;
/// The worked example: milliseconds of a block on nvme, and to its first byte; of the way from dram.
const NVME_MS: f64 = 2.0;
const SETUP_MS: f64 = 1.9;
const PATH_MS: f64 = 0.5;
const PREFILL_MS: f64 = 8.0;
/// What the blocks of nvme take while it is throttled: 8 of them as long as behind a queue of 40 ms.
const THROTTLED_MS: f64 = 7.0;
/// Within which routers must know.
const HALF_LIFE: Duration = Duration::from_secs(2);

/// A node with blocks on nvme, and an engine on its host.
struct Holder {
    node: Arc<Node>,
    nvme: Arc<Throttled>,
    namespace: Arc<Namespace>,
}

fn per_second(block_ms: f64) -> f64 {
    f64::from(BLOCK) * 1e3 / block_ms
}

fn millis(millis: f64) -> Duration {
    Duration::from_secs_f64(millis / 1e3)
}

impl Holder {
    fn new() -> Self {
        let blocks = Arc::new(MemoryStore::new(Tier::Nvme));
        let inner = Arc::clone(&blocks) as Arc<dyn BlockStore>;
        let nvme = Arc::new(Throttled::new(inner, millis(SETUP_MS), per_second(NVME_MS)));
        let node = Arc::new(node(vec![Arc::clone(&nvme) as Arc<dyn BlockStore>]));
        let identity = Identity {
            tenant: ONLY_TENANT.into(),
            model: "m".into(),
            engine: "test".into(),
            dtype: "u8".into(),
            block_tokens: 16,
            parts: vec![PartSpec { group: 0, rank: 0, bytes: BLOCK }],
            hash_algorithm: "blake3".into(),
            hash_bytes: 32,
            ..Identity::default()
        };
        let spec = NamespaceSpec::Engine(Box::new(identity));
        let namespace = node.namespaces.open(spec, false).unwrap().namespace;
        for number in 0..BLOCKS {
            let bytes = block_bytes(&namespace, number, 0, BLOCK as usize);
            let hash = hash_of(number);
            let sum = part_checksum(namespace.id(), &hash, 0, 0, &bytes);
            assert!(blocks.discover(&namespace, hash, &bytes, Checksums::One(sum)));
        }
        Self { node, nvme, namespace }
    }

    /// Loads blocks as an engine does that reads as fast as the path is; says what it would take before,
    /// and what it took.
    async fn load(&self, numbers: &[u64]) -> (Duration, Duration) {
        let hashes = pack(numbers);
        let packed = self.namespace.hashes(&hashes, numbers.len(), "hashes").unwrap();
        let bytes = self.node.stack.bytes_by_tier(&self.namespace, packed);
        let predicted = Tier::ALL
            .into_iter()
            .map(|tier| match at(bytes, tier) {
                0 => Duration::ZERO,
                bytes => self.node.costs.estimate(tier, NEAR, bytes),
            })
            .sum();
        let ask = GetAsk {
            namespace_id: self.namespace.id().as_bytes(),
            hashes: hashes.into(),
            parts: Vec::new(),
            lease: None,
            deadline_ms: 0,
            stop_at_miss: false,
            via: Via::Network,
        };
        let begin = Instant::now();
        let mut flow = GetFlow::begin(&self.node, &Bearer::anyone(), ask).unwrap();
        let mut blocks = 0;
        let mut owed = Duration::ZERO;
        while let Some(step) = flow.next().await.unwrap() {
            assert!(matches!(step, Step::Block(_)), "{step:?}");
            blocks += 1;
            owed += millis(PATH_MS);
            // Paused time goes on by whole milliseconds.
            if owed >= Duration::from_millis(1) {
                flow.hand();
                sleep(std::mem::take(&mut owed)).await;
                flow.resume();
            }
        }
        assert_eq!(blocks, numbers.len());
        (predicted, begin.elapsed())
    }

    /// Blocks `turn` to `turn + count - 1` of nvme, in turns of 8.
    fn cold(turn: u64, count: u64) -> Vec<u64> {
        let first = turn * 8 % BLOCKS;
        (first..first + count).collect()
    }
}

/// The candidates of the worked example: the first and the third have a holder with blocks in dram, the
/// others one with blocks on nvme.
fn candidates(dram: &Holder, nvme: &Holder) -> Vec<Assessment> {
    let cost = |holder: &Holder, tier| holder.node.costs.load_cost(tier, NEAR, u64::from(BLOCK));
    let segment = |blocks, tier, cost| Segment { blocks, tier, source: 0, cost };
    let in_dram = |blocks| segment(blocks, Tier::Dram, cost(dram, Tier::Dram));
    let on_nvme = |blocks| segment(blocks, Tier::Nvme, cost(nvme, Tier::Nvme));
    [(8, 12.0, in_dram(2)), (6, 4.0, on_nvme(2)), (2, 3.0, in_dram(6)), (0, 1.0, on_nvme(8))]
        .into_iter()
        .map(|(device_blocks, decode_blocks, segment)| {
            let candidate = Candidate {
                device_blocks,
                decode_blocks,
                queue_ms: 0.0,
                prefill: Prefill::linear(PREFILL_MS),
                segments: &[segment],
            };
            assess(10, &candidate, &Settings::default())
        })
        .collect()
}

/// The number of the one to take, 1 to 4.
fn winner(dram: &Holder, nvme: &Holder) -> usize {
    let costs: Vec<f64> = candidates(dram, nvme).iter().map(|one| one.cost).collect();
    pick(&costs, 0.0, 0.0).unwrap() + 1
}

fn median(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    ratios[ratios.len() / 2]
}

fn ratio((predicted, actual): (Duration, Duration)) -> f64 {
    predicted.as_secs_f64() / actual.as_secs_f64()
}

#[track_caller]
fn assert_foretold(ratios: Vec<f64>) {
    let (count, p50) = (ratios.len(), median(ratios));
    assert!(count >= 20 && (0.8..=1.25).contains(&p50), "p50 of {count}: {p50}");
}

#[tokio::test(start_paused = true)]
async fn a_router_leaves_a_disk_within_a_half_life_of_its_throttling_and_comes_back() {
    let (dram, nvme) = (Holder::new(), Holder::new());
    let warm: Vec<u64> = (0..32).collect();
    dram.load(&warm).await;
    for _ in 0..20 {
        dram.load(&warm).await;
    }
    let mut turn = 0;
    let mut free = Vec::new();
    // Of two sizes, so that the first byte is told from the rest.
    for _ in 0..40 {
        free.push(ratio(nvme.load(&Holder::cold(turn, 8)).await));
        nvme.load(&Holder::cold(turn + 1, 1)).await;
        turn += 2;
    }
    assert_foretold(free.split_off(10));
    let costs: Vec<f64> = candidates(&dram, &nvme).iter().map(|one| one.cost).collect();
    for (cost, row_c) in costs.iter().zip([12.125, 6.75, 5.375, 5.25]) {
        assert!((cost - row_c).abs() < 0.1, "{costs:?}");
    }
    assert_eq!(winner(&dram, &nvme), 4, "{costs:?}");

    nvme.nvme.throttle(per_second(THROTTLED_MS));
    let throttled_at = Instant::now();
    let mut throttled = Vec::new();
    while winner(&dram, &nvme) == 4 {
        throttled.push(ratio(nvme.load(&Holder::cold(turn, 8)).await));
        turn += 1;
        assert!(throttled_at.elapsed() < HALF_LIFE, "{:?}", candidates(&dram, &nvme));
    }
    assert_eq!(winner(&dram, &nvme), 3, "as row D says");
    for _ in 0..30 {
        throttled.push(ratio(nvme.load(&Holder::cold(turn, 8)).await));
        turn += 1;
        assert_eq!(winner(&dram, &nvme), 3);
    }
    assert_foretold(throttled);
    let w4 = candidates(&dram, &nvme)[3];
    assert!((w4.cost - 10.25).abs() < 0.25 && w4.credit_blocks > 0.0, "{w4:?}");

    nvme.nvme.throttle(per_second(NVME_MS));
    let released_at = Instant::now();
    let mut released = Vec::new();
    while winner(&dram, &nvme) != 4 {
        released.push(ratio(nvme.load(&Holder::cold(turn, 8)).await));
        turn += 1;
        assert!(released_at.elapsed() < HALF_LIFE, "{:?}", candidates(&dram, &nvme));
    }
    for _ in 0..30 {
        released.push(ratio(nvme.load(&Holder::cold(turn, 8)).await));
        turn += 1;
    }
    assert_foretold(released);
    assert_eq!(winner(&dram, &nvme), 4);
}

#[tokio::test(start_paused = true)]
async fn loads_at_a_time_are_foretold_too() {
    let holder = Holder::new();
    for clients in [1, 2, 4_u64] {
        let load = async |client: u64| {
            let mut ratios = Vec::new();
            for round in 0..30 {
                // What others have loaded a moment ago is in dram.
                let numbers = Holder::cold(round * 11 + client * 3, 8);
                ratios.push(ratio(holder.load(&numbers).await));
            }
            ratios.split_off(5)
        };
        let all = futures_util::future::join_all((0..clients).map(load)).await;
        assert_foretold(all.into_iter().flatten().collect());
    }
}

#[tokio::test(start_paused = true)]
async fn a_burst_is_not_herded_onto_one_disk() {
    let holders = [Holder::new(), Holder::new()];
    let picked = |reserve: bool| {
        let mut counts = [0; 2];
        for _ in 0..20 {
            let costs = holders.each_ref().map(|holder| {
                let cost = holder.node.costs.load_cost(Tier::Nvme, NEAR, u64::from(BLOCK));
                let segment = Segment { blocks: 8, tier: Tier::Nvme, source: 0, cost };
                let candidate = Candidate {
                    device_blocks: 0,
                    decode_blocks: 0.0,
                    queue_ms: 0.0,
                    prefill: Prefill::linear(PREFILL_MS),
                    segments: &[segment],
                };
                assess(10, &candidate, &Settings::default()).cost
            });
            let choice = pick(&costs, 0.0, 0.0).unwrap();
            counts[choice] += 1;
            if reserve {
                let loads = [(Tier::Nvme, 8 * u64::from(BLOCK))];
                let costs = &holders[choice].node.costs;
                costs.reserve("t", &loads, Duration::ZERO).unwrap();
            }
        }
        counts
    };
    assert_eq!(picked(false), [20, 0]);
    let counts = picked(true);
    assert!(counts[1] >= 4 && counts[0] >= counts[1], "until neither is worth it: {counts:?}");
}
