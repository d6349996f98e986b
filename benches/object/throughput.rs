//! Blocks of 2 MiB in packs of 32 MiB, against plain calls.

use std::fs;

use bytes::Bytes;
use kvstrata_tiers::{
    limits::{GIB, MIB},
    object::{OpLabel, OutcomeLabel, bucket::BucketConfig},
    testing::Draws,
};

use super::{
    node::{Node, Sizes},
    plain,
    server::S3Server,
    shared_data,
    support::median,
};

const BLOCK: usize = 2 << 20;
const BLOCKS: usize = 64;
const PACK: usize = 32 << 20;
const ROUNDS: usize = 5;
/// Requests under way of plain calls: as many as the tier has reads.
const DEPTH: usize = 8;
/// The same for objects of the size of a pack: all of them.
const PACKS_DEPTH: usize = BLOCKS * BLOCK / PACK;
/// Real blocks, one behind the other.
const SAMPLES: [&str; 3] = ["kv/agent_b16.kv", "kv/gpl3_b16.kv", "kv/pycode_b16.kv"];

/// What is written and read.
struct Load {
    name: &'static str,
    dtype: &'static str,
    blocks: Vec<Bytes>,
}

impl Load {
    fn of(name: &'static str, dtype: &'static str, bytes: Vec<u8>) -> Self {
        let bytes = Bytes::from(bytes);
        let blocks = (0..BLOCKS).map(|number| bytes.slice(number * BLOCK..(number + 1) * BLOCK));
        Self { name, dtype, blocks: blocks.collect() }
    }

    fn noise() -> Self {
        let mut draws = Draws::new(1);
        let words = std::iter::repeat_with(|| draws.draw().to_le_bytes());
        let bytes = words.take(BLOCKS * BLOCK / 8).flatten().collect();
        Self::of("bytes that do not compress", "u8", bytes)
    }

    fn real() -> Option<Self> {
        let paths = SAMPLES.iter().map(|name| shared_data::find("bench object", name));
        let paths = paths.collect::<Option<Vec<_>>>()?;
        let sample: Vec<u8> = paths.iter().flat_map(|path| fs::read(path).unwrap()).collect();
        let bytes = sample.iter().copied().cycle().take(BLOCKS * BLOCK).collect();
        Some(Self::of("real KV cache, bf16", "bfloat16", bytes))
    }

    /// The same bytes in pieces of the size of a pack.
    fn packs(&self) -> Vec<Bytes> {
        self.blocks.chunks(PACK / BLOCK).map(|blocks| blocks.concat().into()).collect()
    }
}

/// What one way took: seconds to write and to read, and requests of each.
#[derive(Debug, Clone, Copy)]
struct Taken {
    put: f64,
    get: f64,
    puts: u64,
    gets: u64,
}

pub(crate) async fn against_plain_calls(server: &S3Server) {
    let mib = (BLOCKS * BLOCK) >> 20;
    println!(
        "{BLOCKS} blocks of 2 MiB, packs of 32 MiB, medians of {ROUNDS} rounds of {mib} MiB;\n\
         MB/s of the blocks' bytes (of an object for each block), requests for a GiB"
    );
    for load in [Some(Load::noise()), Load::real()].into_iter().flatten() {
        measure(server, &load).await;
    }
}

async fn measure(server: &S3Server, load: &Load) {
    let packs = load.packs();
    let ways = [
        "floor: bare HTTP, 32 MiB objects",
        "object_store, an object a block",
        "object_store, 32 MiB objects",
        "tier, each pack in one request",
        "tier, packs in parts of 8 MiB",
    ];
    let mut taken: Vec<Vec<Taken>> = vec![Vec::new(); ways.len()];
    for round in 0..ROUNDS {
        let config = |way: usize| {
            let path = format!("{}/{round}/{way}", load.dtype);
            S3Server::config(server.s3, &path)
        };
        taken[0].push(bare(server, &config(0), &packs).await);
        taken[1].push(plainly(&config(1), &load.blocks, DEPTH).await);
        taken[2].push(plainly(&config(2), &packs, PACKS_DEPTH).await);
        taken[3].push(packed(config(3), 64 * MIB, load).await);
        taken[4].push(packed(config(4), 16 * MIB, load).await);
    }
    let speed = |rounds: &[Taken], of: fn(&Taken) -> f64| {
        (BLOCKS * BLOCK) as f64 / 1e6 / median(rounds.iter().map(of))
    };
    let (put, get) = (speed(&taken[1], |it| it.put), speed(&taken[1], |it| it.get));
    println!("{}:", load.name);
    for (way, rounds) in ways.iter().zip(&taken) {
        let (ours_put, ours_get) = (speed(rounds, |it| it.put), speed(rounds, |it| it.get));
        let for_a_gib = |count: u64| count * GIB / (BLOCKS * BLOCK) as u64;
        println!(
            "  {way:<34} put {ours_put:5.0} ({:.2}), {:>3} requests; get {ours_get:5.0} ({:.2}), \
             {:>3} requests",
            ours_put / put,
            for_a_gib(rounds[0].puts),
            ours_get / get,
            for_a_gib(rounds[0].gets),
        );
    }
}

async fn bare(server: &S3Server, config: &BucketConfig, objects: &[Bytes]) -> Taken {
    let client = plain::client(config);
    let put = plain::bare(&client, server.s3, objects, "PUT", PACKS_DEPTH).await;
    let get = plain::bare(&client, server.s3, objects, "GET", PACKS_DEPTH).await;
    Taken { put, get, puts: objects.len() as u64, gets: objects.len() as u64 }
}

async fn plainly(config: &BucketConfig, objects: &[Bytes], depth: usize) -> Taken {
    let client = plain::client(config);
    let put = plain::put(&client, objects, depth).await;
    let get = plain::get(&client, objects, depth).await;
    Taken { put, get, puts: objects.len() as u64, gets: objects.len() as u64 }
}

/// One node writes, another one, which has none of it, reads.
async fn packed(config: BucketConfig, multipart_above_bytes: u64, load: &Load) -> Taken {
    let config = BucketConfig { multipart_above_bytes, ..config };
    let sizes = Sizes { blocks: BLOCKS, block_bytes: BLOCK as u32, pack_bytes: PACK as u64 };
    let local = tempfile::tempdir().unwrap();
    let node = Node::start(config.clone(), local.path(), load.dtype, sizes).await;
    node.put(&load.blocks).await;
    let before = writes(&node);
    let put = node.pack(BLOCKS).await;
    let puts = writes(&node) - before;
    node.stop().await;

    let node = Node::start(config, local.path(), load.dtype, sizes).await;
    let gets = || node.requests.requests(OpLabel::Get, OutcomeLabel::Ok).get();
    let before = gets();
    let get = node.get(&load.blocks).await;
    let gets = gets() - before;
    node.stop().await;
    Taken { put, get, puts, gets }
}

/// Requests that write, whatever became of them, but for signs of life.
fn writes(node: &Node) -> u64 {
    let ops = [OpLabel::Put, OpLabel::Create, OpLabel::Part, OpLabel::Multipart];
    let outcomes = OutcomeLabel::ALL.iter();
    outcomes.flat_map(|how| ops.map(|op| node.requests.requests(op, *how).get())).sum()
}
