//! Tables against a model of the map: whatever order things come in, what is found is right, and nothing
//! that could be found is missing.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;
use crate::schemes::{dynamo, llm_d, vllm};

const BLOCK_TOKENS: usize = 4;

/// What the map has.
#[derive(Debug, Default)]
struct Map(HashMap<BlockHash, Option<Description>>);

impl Blocks for Map {
    fn known(&self, hash: BlockHash, describe: bool) -> Known {
        match self.0.get(&hash) {
            None => Known::Gone,
            Some(description) => match description.clone().filter(|_| describe) {
                None => Known::There,
                Some(description) => Known::Described(description),
            },
        }
    }
}

impl Table {
    /// Looks at a block, and at all that have waited for it.
    fn refresh(&mut self, hash: BlockHash, blocks: &impl Blocks) -> Unindexed {
        let mut unindexed = self.look(hash, blocks);
        while self.is_due() {
            unindexed += self.go_on(2, blocks);
        }
        unindexed
    }
}

fn identity() -> Identity {
    Identity {
        model: "m".to_owned(),
        engine: "vllm".to_owned(),
        block_tokens: 4,
        hash_algorithm: "sha256_cbor".to_owned(),
        hash_bytes: 32,
        ..Identity::default()
    }
}

fn table_of(scheme: Scheme, most: u64) -> Table {
    let identity = identity();
    Table::new(scheme, &identity, Algorithm::of(&identity), Arc::new(Room::new(most)))
}

fn table(scheme: Scheme) -> Table {
    table_of(scheme, 1 << 20)
}

fn tokens(blocks: usize, first: u32) -> Vec<u32> {
    (first..).take(blocks * BLOCK_TOKENS).collect()
}

/// A chain with its descriptions, as vLLM hashes it.
fn chain(tokens: &[u32], cache_salt: &str) -> Vec<(BlockHash, Description)> {
    let root = vllm::root(vllm::Encoding::Cbor, None);
    let prompt = Prompt { tokens, lora: None, cache_salt };
    let hashes = vllm::chain(vllm::Encoding::Cbor, &root, BLOCK_TOKENS, &prompt).unwrap();
    let mut parent = None;
    let blocks = (0..).zip(hashes).zip(tokens.chunks(BLOCK_TOKENS));
    let described = blocks.map(|((position, hash), tokens)| {
        let hash = BlockHash::from_array(hash);
        let parent = parent.replace(hash);
        let lora_name = String::new();
        (hash, Description { parent, position, tokens: tokens.to_vec(), lora_name })
    });
    described.collect()
}

fn dynamo_names(tokens: &[u32]) -> Vec<u64> {
    dynamo::sequences(&dynamo::locals(BLOCK_TOKENS, tokens, dynamo::seed("", b"")))
}

#[test]
fn parts_of_hashes_need_no_description() {
    let mut table = table(Scheme::VllmU64);
    let tokens = tokens(3, 1);
    let chain = chain(&tokens, "");
    let mut map = Map(chain.iter().map(|(hash, _)| (*hash, None)).collect());
    for (hash, _) in &chain {
        assert_eq!(table.refresh(*hash, &map), Unindexed::default());
        let name = vllm::event_hash(hash.as_bytes()).unwrap();
        assert_eq!((table.block(name), table.name(hash)), (Some(hash), Some(name)));
    }
    assert_eq!(table.len(), 3);
    assert!(table.bytes() >= 3 * 40, "{}", table.bytes());
    map.0.remove(&chain[1].0);
    table.refresh(chain[1].0, &map);
    assert_eq!((table.len(), table.name(&chain[1].0)), (2, None));
    assert_eq!(table.room.used(), 2 * PART_BYTES);
}

#[test]
fn of_two_blocks_of_one_name_the_later_one_has_it_until_it_leaves() {
    let identity = Identity { hash_algorithm: "test".to_owned(), ..identity() };
    let said =
        Description { parent: None, position: 0, tokens: tokens(1, 1), lora_name: String::new() };
    for scheme in [Scheme::Dynamo, Scheme::VllmU64] {
        let mut table = Table::new(scheme, &identity, None, Arc::new(Room::new(1 << 20)));
        let [first, later] = [1, 2].map(|byte| {
            let mut bytes = [byte; 32];
            bytes[24..].fill(7);
            BlockHash::from_array(bytes)
        });
        let mut map = Map([first, later].map(|hash| (hash, Some(said.clone()))).into());
        table.refresh(first, &map);
        let name = table.name(&first).unwrap();
        table.refresh(later, &map);
        assert_eq!((table.block(name), table.name(&later)), (Some(&later), Some(name)));
        map.0.remove(&later);
        table.refresh(later, &map);
        assert_eq!(table.block(name), None);
        table.refresh(first, &map);
        assert_eq!((table.block(name), table.len()), (Some(&first), 1), "{scheme:?}");
    }
}

#[test]
fn short_hashes_are_named_by_their_own_end() {
    let identity = Identity { hash_bytes: 16, ..identity() };
    let room = Arc::new(Room::new(1 << 20));
    let mut table = Table::new(Scheme::VllmU64, &identity, None, room);
    let hash = BlockHash::new(&[[0; 8], 7_u64.to_be_bytes()].concat()).unwrap();
    table.refresh(hash, &Map([(hash, None)].into()));
    assert_eq!(table.block(7), Some(&hash));
}

#[test]
fn names_of_tokens_are_those_of_their_owners_in_whatever_order_blocks_come() {
    let tokens = tokens(5, 1);
    let chain = chain(&tokens, "");
    let map = Map(chain.iter().cloned().map(|(hash, said)| (hash, Some(said))).collect());
    for (scheme, names) in [
        (Scheme::Dynamo, dynamo_names(&tokens)),
        (Scheme::LlmD, llm_d::keys("m", BLOCK_TOKENS, &tokens)),
    ] {
        for order in [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]] {
            let mut table = table(scheme);
            for at in order {
                table.refresh(chain[at].0, &map);
            }
            let found: Vec<_> = names.iter().map(|name| table.block(*name).copied()).collect();
            let all: Vec<_> = chain.iter().map(|(hash, _)| Some(*hash)).collect();
            assert_eq!(found, all, "{scheme:?} {order:?}");
            assert!(table.waiting.is_empty());
        }
    }
}

#[test]
fn a_block_that_is_of_more_than_its_tokens_has_no_name_nor_has_what_is_behind_it() {
    let tokens = tokens(4, 1);
    let (plain, salted) = (chain(&tokens, ""), chain(&tokens, "tenant-a"));
    let blocks = plain.iter().chain(&salted).cloned();
    let map = Map(blocks.map(|(hash, said)| (hash, Some(said))).collect());
    let mut table = table(Scheme::Dynamo);
    let mut unlike = 0;
    for (hash, _) in salted.iter().chain(&plain) {
        unlike += table.refresh(*hash, &map).unlike;
    }
    let found = dynamo_names(&tokens).into_iter().map(|name| table.block(name).copied());
    assert!(found.eq(plain.iter().map(|(hash, _)| Some(*hash))));
    assert!(salted.iter().all(|(hash, _)| table.name(hash).is_none()));
    assert_eq!((unlike, table.waiting.len()), (4, 0));

    // The salt of a namespace is one that its tables know.
    let identity = Identity { cache_salt: b"tenant-a".to_vec(), ..identity() };
    let room = Arc::new(Room::new(1 << 20));
    let mut table = Table::new(Scheme::Dynamo, &identity, Algorithm::of(&identity), room);
    salted.iter().for_each(|(hash, _)| assert_eq!(table.refresh(*hash, &map).unlike, 0));
    let seed = dynamo::seed("", b"tenant-a");
    let names = dynamo::sequences(&dynamo::locals(BLOCK_TOKENS, &tokens, seed));
    assert_eq!(table.block(names[3]), Some(&salted[3].0));
}

#[test]
fn what_is_over_is_counted_and_fits_when_others_have_gone() {
    let tokens = tokens(8, 1);
    let chain = chain(&tokens, "");
    let mut map = Map(chain.iter().cloned().map(|(hash, said)| (hash, Some(said))).collect());
    for (scheme, bytes) in [(Scheme::Dynamo, TOKENS_BYTES), (Scheme::VllmU64, PART_BYTES)] {
        let mut table = table_of(scheme, 4 * bytes);
        let full: u64 = chain.iter().map(|(hash, _)| table.refresh(*hash, &map).full).sum();
        assert_eq!((table.len(), full, table.room.is_easy()), (4, 4, false), "{scheme:?}");
        let gone = map.0.remove(&chain[0].0).unwrap();
        table.refresh(chain[0].0, &map);
        assert!(table.room.is_easy());
        assert_eq!(table.refresh(chain[4].0, &map).full, 0);
        assert_eq!(table.refresh(chain[5].0, &map).full, 1);
        assert!(table.name(&chain[4].0).is_some());
        map.0.insert(chain[0].0, gone);
        let room = Arc::clone(&table.room);
        drop(table);
        assert_eq!(room.used(), 0, "{scheme:?}");
    }
}

#[test]
fn memory_is_no_more_than_the_room_counts() {
    let hash = |number: u64| {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_be_bytes());
        bytes[24..].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes());
        BlockHash::from_array(bytes)
    };
    let said = |number: u64, waits: bool| Description {
        parent: waits.then(|| hash(number + (1 << 40))),
        position: u32::from(waits),
        tokens: [u32::try_from(number).unwrap(); BLOCK_TOKENS].to_vec(),
        lora_name: "adapter".to_owned(),
    };
    for (scheme, waits, per_block) in [
        (Scheme::VllmU64, false, PART_BYTES),
        (Scheme::Dynamo, false, TOKENS_BYTES),
        (Scheme::Dynamo, true, TOKENS_BYTES),
    ] {
        let mut table = table_of(scheme, u64::MAX);
        for number in 0..60_000 {
            let map = Map([(hash(number), Some(said(number, waits)))].into());
            table.refresh(hash(number), &map);
            let (len, bytes) = (table.len() as u64, table.bytes() as u64);
            // Small ones are mostly what they will grow into.
            let is_checked = len > 100 && (len.is_power_of_two() || len % 7_168 < 3);
            assert!(!is_checked || bytes <= len * per_block, "{scheme:?}: {bytes} for {len}");
        }
        assert_eq!(table.len(), 60_000);
    }
}

#[test]
fn descriptions_that_cannot_be_right_give_no_name() {
    let tokens = tokens(2, 1);
    let chain = chain(&tokens, "");
    let mut map = Map(chain.iter().cloned().map(|(hash, said)| (hash, Some(said))).collect());
    let mut said = |at: usize, change: fn(&mut Description)| {
        change(map.0.get_mut(&chain[at].0).unwrap().as_mut().unwrap());
    };
    said(0, |said| said.tokens.truncate(3));
    said(1, |said| said.parent = None);
    let mut table = table(Scheme::Dynamo);
    for (hash, _) in &chain {
        assert_eq!(table.refresh(*hash, &map), Unindexed::default());
    }
    assert_eq!(table.len(), 0);
}

/// A step of a history, on one block of a small tree.
#[derive(Debug, Clone, Copy)]
enum Step {
    Put(usize),
    Describe(usize),
    Remove(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = (0..3, 0..12_usize).prop_map(|(kind, at)| match kind {
        0 => Step::Put(at),
        1 => Step::Describe(at),
        _ => Step::Remove(at),
    });
    proptest::collection::vec(step, 0..200)
}

proptest! {
    #[test]
    fn what_is_found_is_right_and_nothing_is_missing(steps in steps(), late in 0..7_usize) {
        // Two chains of four with the first two blocks in common, and one of their own.
        let fork = [tokens(2, 1), tokens(2, 100)].concat();
        let prompts = [tokens(4, 1), fork, tokens(4, 500)];
        let chains: Vec<_> = prompts.iter().map(|tokens| chain(tokens, "")).collect();
        let tree: Vec<_> = chains.concat();
        let truth: HashMap<_, _> = prompts.iter().zip(&chains).flat_map(|(tokens, chain)| {
            chain.iter().map(|(hash, _)| *hash).zip(dynamo_names(tokens))
        }).collect();

        let mut map = Map::default();
        let mut table = table(Scheme::Dynamo);
        let mut news = Vec::new();
        for step in steps {
            let at = match step {
                Step::Put(at) => {
                    map.0.entry(tree[at].0).or_insert(None);
                    at
                }
                Step::Describe(at) => {
                    if let Some(said) = map.0.get_mut(&tree[at].0) {
                        *said = Some(tree[at].1.clone());
                    }
                    at
                }
                Step::Remove(at) => {
                    map.0.remove(&tree[at].0);
                    at
                }
            };
            news.push(tree[at].0);
            if news.len() > late {
                // Others come between those that have waited.
                table.look(news.remove(0), &map);
                table.go_on(late % 2, &map);
            }
        }
        for hash in news {
            table.refresh(hash, &map);
        }
        table.go_on(usize::MAX, &map);

        let mut readable = HashSet::new();
        for (hash, said) in &tree {
            let is_known = map.0.get(hash).is_some_and(Option::is_some);
            if is_known && said.parent.is_none_or(|parent| readable.contains(&parent)) {
                readable.insert(*hash);
                prop_assert_eq!(table.block(truth[hash]), Some(hash), "not found");
            }
        }
        for (name, hash) in &table.names {
            prop_assert_eq!(truth[hash], *name);
            prop_assert!(map.0.contains_key(hash), "it has gone");
        }
        prop_assert!(table.places.keys().all(|hash| map.0.contains_key(hash)));
        let waiting: usize = table.waiting.values().map(Vec::len).sum();
        prop_assert_eq!(waiting + table.names.len(), table.places.len());
        map.0.clear();
        for (hash, _) in &tree {
            table.refresh(*hash, &map);
        }
        prop_assert_eq!((table.len(), table.names.len(), table.waiting.len()), (0, 0, 0));
        prop_assert_eq!(table.room.used(), 0);
    }
}
