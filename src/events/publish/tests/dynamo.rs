//! A model of Dynamo's index, by its rules: an index for each tier, of edges from block to block, which are
//! walked from hot to cold, each from where the one before has ended; stores count; another block size, a hash
//! twice in an event or an unknown medium are silently something else.

use std::collections::{HashMap, HashSet};

use kvstrata_tiers::tier::Tier;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{
    super::{
        encode::{DYNAMO, Dialect, batch},
        ring::{Ring, RingLimits},
        shadow::TierSet,
    },
    ALL, BLOCK_TOKENS, Block, Line, Model, Random, Store, chain, happen, histories, prompts,
    read::{Read, read},
    short,
};

/// The seed of the hashes of tokens.
const SEED: u64 = 1337;
const TIERS: [(&str, Tier); 3] =
    [("CPU_PINNED", Tier::Dram), ("DISK", Tier::Nvme), ("EXTERNAL", Tier::Object)];

/// From the block before, by tokens.
type Edge = (Option<u64>, u64);

#[derive(Debug, Default)]
struct TierIndex {
    edges: HashMap<Edge, (u64, HashSet<usize>)>,
    by_hash: HashMap<(usize, u64), Edge>,
    counts: HashMap<(usize, u64), u32>,
}

#[derive(Debug, Default)]
pub(super) struct Indexer {
    tiers: HashMap<&'static str, TierIndex>,
}

impl Model for Indexer {
    const DIALECT: Dialect = DYNAMO;

    fn take(&mut self, worker: usize, payload: &[u8]) {
        let (events, _rank) = read(payload);
        for event in events {
            let tier = TIERS.iter().find(|(medium, _)| *medium == event.medium);
            let (medium, _) = tier.expect("it would be taken for the memory of a GPU");
            let index = self.tiers.entry(medium).or_default();
            match event.kind.as_str() {
                "BlockStored" => index.store(worker, &event),
                "BlockRemoved" => index.remove(worker, &event),
                other => panic!("{other} takes all of the worker from the index"),
            }
        }
    }

    fn check(&self, workers: usize, store: &Store, prompts: &[Vec<u32>]) -> usize {
        let mut found = 0;
        for prompt in prompts {
            let blocks = chain(prompt);
            let described = blocks.iter().take_while(|(key, _)| {
                let block = store.blocks.get(key);
                block.is_some_and(|block| !block.tiers.is_empty() && block.described.is_some())
            });
            let on: Vec<_> = described.map(|(key, _)| store.blocks[key].tiers).collect();
            for worker in 0..workers {
                let (mut at, mut last) = (0, None);
                for (medium, tier) in TIERS {
                    let start = at;
                    if let Some(index) = self.tiers.get(medium) {
                        while let Some(child) = index.child(last, prompt, at, worker) {
                            (at, last) = (at + 1, Some(child));
                        }
                    }
                    let expected = on[start..].iter().take_while(|on| on.has(tier)).count();
                    assert_eq!(at - start, expected, "on {medium} from {start}");
                }
                found += at;
            }
        }
        self.check_nothing_else(store);
        found
    }
}

impl TierIndex {
    fn store(&mut self, worker: usize, event: &Read) {
        let mut seen: HashSet<_> = event.parent.into_iter().collect();
        assert!(event.hashes.iter().all(|hash| seen.insert(*hash)), "it would be dropped");
        assert_eq!(event.block_size, BLOCK_TOKENS as usize, "it would not be taken");
        let mut parent = event.parent;
        let tokens = event.tokens.chunks_exact(event.block_size);
        assert_eq!(tokens.len(), event.hashes.len());
        for (hash, tokens) in event.hashes.iter().zip(tokens) {
            let count = self.counts.entry((worker, *hash)).or_default();
            *count += 1;
            let edge = (parent, local_hash(tokens));
            parent = Some(*hash);
            if *count > 1 {
                continue;
            }
            let (child, workers) =
                self.edges.entry(edge).or_insert_with(|| (*hash, HashSet::new()));
            // What was there before wins.
            if child == hash {
                workers.insert(worker);
                self.by_hash.insert((worker, *hash), edge);
            }
        }
    }

    fn remove(&mut self, worker: usize, event: &Read) {
        for hash in &event.hashes {
            if let Some(count) = self.counts.get_mut(&(worker, *hash)) {
                *count -= 1;
                if *count > 0 {
                    continue;
                }
                self.counts.remove(&(worker, *hash));
            }
            let Some(edge) = self.by_hash.remove(&(worker, *hash)) else { continue };
            let Some((_, workers)) = self.edges.get_mut(&edge) else { continue };
            workers.remove(&worker);
            if workers.is_empty() {
                self.edges.remove(&edge);
            }
        }
    }

    fn child(&self, from: Option<u64>, prompt: &[u32], at: usize, worker: usize) -> Option<u64> {
        let tokens = prompt.chunks_exact(BLOCK_TOKENS as usize).nth(at)?;
        let (child, workers) = self.edges.get(&(from, local_hash(tokens)))?;
        workers.contains(&worker).then_some(*child)
    }
}

impl Indexer {
    fn check_nothing_else(&self, store: &Store) {
        let on: HashMap<u64, TierSet> =
            store.blocks.iter().map(|(key, block)| (short(key), block.tiers)).collect();
        for (medium, tier) in TIERS {
            let Some(index) = self.tiers.get(medium) else { continue };
            assert!(index.counts.values().all(|count| *count == 1));
            for (_, hash) in index.by_hash.keys().chain(index.counts.keys()) {
                assert!(on[hash].has(tier), "{hash:x} is not on {medium}");
            }
        }
    }
}

fn local_hash(tokens: &[u32]) -> u64 {
    let bytes: Vec<_> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    xxh3_64_with_seed(&bytes, SEED)
}

#[test]
fn the_index_of_an_indexer_is_the_truth() {
    histories::<Indexer>();
}

/// Somebody who listens by numbers: asks for what it has missed, and takes nothing twice.
#[derive(Default)]
struct Listener {
    indexer: Indexer,
    last: Option<u64>,
    asked: u32,
}

impl Listener {
    fn hear(&mut self, message: &[u8], ring: &Ring, missed: &mut bool) {
        let (number, _) = parts(message);
        let next = self.last.map_or(0, |last| last + 1);
        if number > next {
            self.asked += 1;
            let replay = ring.from(next);
            *missed |= replay.incomplete;
            replay.messages.iter().for_each(|message| self.take(message));
        }
        if self.last.is_none_or(|last| number > last) {
            self.take(message);
        }
    }

    fn take(&mut self, message: &[u8]) {
        let (number, payload) = parts(message);
        self.indexer.take(0, payload);
        self.last = Some(number);
    }
}

/// Without frames, for a test.
fn parts(message: &[u8]) -> (u64, &[u8]) {
    let (number, payload) = message.split_first_chunk().unwrap();
    (u64::from_be_bytes(*number), payload)
}

/// What is said next, as it goes to a listener who loses some of it on the way; whether it has missed something
/// for good.
fn tell(
    line: &mut Line,
    store: &Store,
    ring: &mut Ring,
    listener: &mut Listener,
    mut loses: impl FnMut() -> bool,
) -> bool {
    let mut missed = false;
    for event in line.announcer.step(store, &ALL, 100) {
        line.note(&event);
        let message = ring.push(|number| {
            let payload = batch(DYNAMO, 0.0, std::slice::from_ref(&event), 0);
            [&number.to_be_bytes()[..], &payload].concat()
        });
        if !loses() {
            listener.hear(&message, ring, &mut missed);
        }
    }
    if missed {
        line.announcer.resync(store.blocks.keys().copied());
    }
    missed
}

/// Batches are lost on the way, asked for again, and now and then gone for good.
#[test]
fn what_is_lost_is_asked_for_again_or_everything_is() {
    let limits = RingLimits { batches: 12, bytes: 1 << 20 };
    let mut totals = (0, 0, 0);
    for seed in 0..60 {
        let mut random = Random(seed);
        let (mut store, prompts) = (Store::default(), prompts(&mut random));
        let mut line = Line::new(HashMap::new());
        let mut ring = Ring::new(1_000_000, limits);
        let mut listener = Listener::default();
        let (mut outage, mut calm_until) = (0_u64, 0);
        for round in 0..150 {
            let changed = happen(&mut store, &prompts, &mut random);
            changed.iter().for_each(|key| line.announcer.changed(*key));
            if random.below(50) == 0 {
                // Another process, in whose ring there is nothing, and whose numbers are higher.
                line = Line::new(std::mem::take(&mut line.noted));
                ring = Ring::new(1_000_000 * (round + 2), limits);
                line.announcer.resync(store.blocks.keys().copied());
            }
            // Nothing arrives for a while now and then, now and then for longer than it is kept.
            let loses = || {
                if outage == 0 && round >= calm_until && random.below(15) == 0 {
                    outage = random.below(25);
                }
                outage = outage.saturating_sub(1);
                outage > 0
            };
            if tell(&mut line, &store, &mut ring, &mut listener, loses) {
                totals.1 += 1;
                // What is said anew then is heard.
                calm_until = round + 12;
            }
        }
        // A last word, so that what was lost at the end is missed.
        let (key, described) = chain(&[1, 2, 3, 4]).remove(0);
        let tiers = TierSet::of(Tier::Dram);
        store.blocks.insert(key, Block { tiers, described: Some(described) });
        line.announcer.changed(key);
        while line.announcer.is_busy() {
            totals.1 += u32::from(tell(&mut line, &store, &mut ring, &mut listener, || false));
        }
        totals.2 += listener.asked;
        totals.0 += listener.indexer.check(1, &store, &prompts);
    }
    let (found, missed, asked) = totals;
    assert!(found > 500 && missed > 10 && asked > 100, "{totals:?}");
}
