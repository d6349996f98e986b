//! The publisher against models of its routers: whatever is lost, restarted or late, their index is the truth.

mod dynamo;
mod llm_d;
mod read;
mod rules;

use std::collections::HashMap;

use kvstrata_tiers::{
    block::{BlockHash, BlockKey},
    tier::Tier,
};

use super::{
    announce::{Announcer, Blocks, Described, Gates, Terms},
    encode::{Dialect, Event, batch},
    shadow::TierSet,
};

const BLOCK_TOKENS: u32 = 4;
/// More than there are.
const MOST: usize = 100_000;
const ALL: Gates = [Some(1), Some(1), Some(1)];

/// What is in the tiers.
#[derive(Debug, Default)]
struct Store {
    blocks: HashMap<BlockKey, Block>,
}

#[derive(Debug, Clone, Default)]
struct Block {
    tiers: TierSet,
    described: Option<Described>,
}

impl Blocks for Store {
    fn tiers(&self, key: &BlockKey) -> TierSet {
        self.blocks.get(key).map_or(TierSet::NONE, |block| block.tiers)
    }

    fn described(&self, key: &BlockKey) -> Option<Described> {
        self.blocks.get(key)?.described.clone()
    }
}

impl Store {
    /// Those of a prompt's blocks from the root on that are somewhere.
    fn prefix(&self, prompt: &[u32]) -> Vec<TierSet> {
        let tiers = chain(prompt).into_iter().map(|(key, _)| self.tiers(&key));
        tiers.take_while(|tiers| !tiers.is_empty()).collect()
    }
}

/// The hash of the block at the end of this prompt; a tenth of them are small numbers.
fn hash_of(prompt: &[u32]) -> BlockHash {
    let bytes: Vec<_> = prompt.iter().flat_map(|token| token.to_be_bytes()).collect();
    let digest = xxhash_rust::xxh3::xxh3_64(&bytes);
    let short = if digest.is_multiple_of(10) { digest % 1_000_000_007 } else { digest };
    let mut hash = [7; 32];
    hash[24..].copy_from_slice(&short.to_be_bytes());
    BlockHash::from_array(hash)
}

fn short(key: &BlockKey) -> u64 {
    u64::from_be_bytes(*key.hash.as_bytes().last_chunk().unwrap())
}

/// The blocks of a prompt, with what is known of them.
fn chain(prompt: &[u32]) -> Vec<(BlockKey, Described)> {
    let size = BLOCK_TOKENS as usize;
    let key = |blocks: usize| BlockKey { namespace: 0, hash: hash_of(&prompt[..blocks * size]) };
    let block = |number: usize| {
        let parent = (number > 0).then(|| key(number).hash);
        let tokens = prompt[number * size..(number + 1) * size].to_vec();
        (key(number + 1), Described { parent, tokens, lora_name: String::new() })
    };
    (0..prompt.len() / size).map(block).collect()
}

fn terms() -> Terms {
    Terms {
        block_tokens: BLOCK_TOKENS,
        hash_bytes: 32,
        first_bits: false,
        salt: String::new(),
        open: true,
    }
}

/// Numbers by a seed.
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % most
    }

    fn pick(&mut self, count: usize) -> usize {
        usize::try_from(self.below(u64::try_from(count).unwrap())).unwrap()
    }
}

/// Prompts that share prefixes: a tree.
fn prompts(random: &mut Random) -> Vec<Vec<u32>> {
    let mut prompts: Vec<Vec<u32>> = Vec::new();
    for _ in 0..12 {
        let mut prompt = Vec::new();
        if !prompts.is_empty() && random.below(4) > 0 {
            let from = &prompts[random.pick(prompts.len())];
            let blocks = random.pick(from.len() / BLOCK_TOKENS as usize + 1);
            prompt = from[..blocks * BLOCK_TOKENS as usize].to_vec();
        }
        let more = 1 + random.below(40);
        for _ in 0..more * u64::from(BLOCK_TOKENS) {
            prompt.push(u32::try_from(random.below(150_000)).unwrap());
        }
        prompts.push(prompt);
    }
    prompts
}

/// One thing that happens in the tiers; returns the blocks that it was about.
fn happen(store: &mut Store, prompts: &[Vec<u32>], random: &mut Random) -> Vec<BlockKey> {
    let blocks = chain(&prompts[random.pick(prompts.len())]);
    let start = random.pick(blocks.len());
    let end = (start + 1 + random.pick(30)).min(blocks.len());
    // Mostly whole chains, as engines put them.
    let range = if random.below(3) > 0 { 0..end } else { start..end };
    let tier = TierSet::of(Tier::ALL[random.pick(3)]);
    let act = random.below(10);
    for (key, described) in &blocks[range.clone()] {
        let block = store.blocks.entry(*key).or_default();
        match act {
            0..5 => {
                block.tiers = block.tiers.with(tier);
                block.described = Some(described.clone());
            }
            // It is known later what they are.
            5 => block.tiers = block.tiers.with(tier),
            6 => block.described = Some(described.clone()),
            7 | 8 => block.tiers = block.tiers.without(tier),
            _ => block.tiers = TierSet::NONE,
        }
    }
    blocks[range].iter().map(|(key, _)| *key).collect()
}

/// A router, as far as its index goes.
trait Model: Default {
    const DIALECT: Dialect;
    /// Takes a batch of this worker.
    fn take(&mut self, worker: usize, payload: &[u8]);
    /// Its index is what is in the tiers, for every worker.
    fn check(&self, workers: usize, store: &Store, prompts: &[Vec<u32>]) -> usize;
}

/// One worker of one router: what it is told, and what that may have heard.
struct Line {
    announcer: Announcer,
    /// What is on disk.
    noted: HashMap<u64, TierSet>,
}

impl Line {
    fn new(noted: HashMap<u64, TierSet>) -> Self {
        let mut announcer =
            Announcer::new(noted.iter().map(|(key, on)| (*key, *on)).collect(), MOST);
        announcer.set_terms(0, terms());
        Self { announcer, noted }
    }

    fn note(&mut self, event: &Event) {
        for hash in event.hashes() {
            let tier = TierSet::of(event.tier());
            let on = self.noted.entry(*hash).or_default();
            match event {
                Event::Stored(_) => *on = on.with(tier),
                // It may not be heard.
                Event::Removed { .. } => {}
            }
        }
    }
}

/// A history by a seed: what happens in the tiers, and to the connections, the node and the router.
fn history<M: Model>(seed: u64, gates: &Gates) -> usize {
    const WORKERS: usize = 3;
    let mut random = Random(seed);
    let (mut store, prompts) = (Store::default(), prompts(&mut random));
    let mut model = M::default();
    let mut lines: Vec<Line> = (0..WORKERS).map(|_| Line::new(HashMap::new())).collect();
    for _ in 0..60 {
        let changed = happen(&mut store, &prompts, &mut random);
        for line in &mut lines {
            changed.iter().for_each(|key| line.announcer.changed(*key));
        }
        // In any order, and not each of them each time.
        for _ in 0..WORKERS {
            let worker = random.pick(WORKERS);
            let limit = 1 + random.pick(200);
            speak(&mut model, &mut lines[worker], worker, &store, gates, (limit, &mut random));
        }
        let worker = random.pick(WORKERS);
        let line = &mut lines[worker];
        match random.below(12) {
            // The connection was lost with what was on its way, or somebody has come late.
            0 => line.announcer.resync(store.blocks.keys().copied()),
            // The node has started anew: dram is empty, the rest is found again.
            1 => {
                for block in store.blocks.values_mut() {
                    block.tiers = block.tiers.without(TierSet::of(Tier::Dram));
                }
                for line in &mut lines {
                    *line = Line::new(std::mem::take(&mut line.noted));
                    line.announcer.resync(store.blocks.keys().copied());
                }
            }
            // The router has.
            2 => {
                model = M::default();
                for line in &mut lines {
                    line.announcer.resync(store.blocks.keys().copied());
                }
            }
            // Nobody listens for a while.
            3 => {
                line.announcer.pause();
                let changed = happen(&mut store, &prompts, &mut random);
                for line in &mut lines {
                    changed.iter().for_each(|key| line.announcer.changed(*key));
                }
                lines[worker].announcer.resync(store.blocks.keys().copied());
            }
            _ => {}
        }
    }
    for (worker, line) in lines.iter_mut().enumerate() {
        while line.announcer.is_busy() {
            speak(&mut model, line, worker, &store, gates, (500, &mut Random(1)));
        }
    }
    model.check(WORKERS, &store, &prompts)
}

/// Says what is next. Now and then the connection is lost in the middle of it: what is behind that is not
/// heard, and all is said again.
fn speak<M: Model>(
    model: &mut M,
    line: &mut Line,
    worker: usize,
    store: &Store,
    gates: &Gates,
    (limit, random): (usize, &mut Random),
) {
    let events = line.announcer.step(store, gates, limit);
    events.iter().for_each(|event| line.note(event));
    let heard = if limit < 500 && random.below(20) == 0 {
        random.pick(events.len() + 1)
    } else {
        events.len()
    };
    for event in &events[..heard] {
        model.take(worker, &batch(M::DIALECT, 1.0, std::slice::from_ref(event), 0));
    }
    if heard < events.len() {
        line.announcer.resync(store.blocks.keys().copied());
    }
}

fn histories<M: Model>() {
    let mut entries = 0;
    for seed in 0..150 {
        let found = std::panic::catch_unwind(|| history::<M>(seed, &ALL));
        entries += found.unwrap_or_else(|_| panic!("SEED={seed}"));
    }
    // A publisher that says nothing would be right, too.
    assert!(entries > 20_000, "{entries} entries");
}
