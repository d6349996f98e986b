//! A model of the index of llm-d's endpoint picker, by its rules: a parent must be known, stores count, entries of
//! one block are few, and a block in any tier continues a chain.

use std::collections::{HashMap, VecDeque};

use xxhash_rust::xxh3::xxh3_64;

use super::{
    super::encode::{Dialect, LLM_D},
    BLOCK_TOKENS, Model, Store, histories,
    read::{Read, read},
};

/// Entries of one block: the least used one leaves.
const POD_CACHE_SIZE: usize = 10;

/// A worker and a tier.
type Entry = (usize, String);

#[derive(Debug, Default)]
pub(super) struct Picker<const MAP: bool> {
    /// The picker's own keys, which it makes of tokens, by the engine's.
    engine_keys: HashMap<u64, u64>,
    pods: HashMap<u64, VecDeque<Entry>>,
    counts: HashMap<(Entry, u64), u32>,
}

impl<const MAP: bool> Model for Picker<MAP> {
    const DIALECT: Dialect = Dialect { map: MAP, ..LLM_D };

    fn take(&mut self, worker: usize, payload: &[u8]) {
        let (events, _rank) = read(payload);
        for event in events {
            let medium = event.medium.to_lowercase();
            let tier = if medium.is_empty() { "gpu".to_owned() } else { medium };
            match event.kind.as_str() {
                "BlockStored" => self.store(&(worker, tier), &event),
                "BlockRemoved" => self.remove(&(worker, tier), &event),
                other => panic!("{other} takes more from the index than ours"),
            }
        }
    }

    fn check(&self, workers: usize, store: &Store, prompts: &[Vec<u32>]) -> usize {
        let mut found = 0;
        for prompt in prompts {
            let expected = store.prefix(prompt);
            let known = expected.len();
            let keys = request_keys(0, prompt);
            for worker in 0..workers {
                let prefix = keys.iter().map(|key| self.tiers(*key, worker));
                let prefix: Vec<_> = prefix.take_while(|tiers| !tiers.is_empty()).collect();
                // Blocks that are not described yet are not known to it.
                let described = super::chain(prompt).into_iter().take(known);
                let described =
                    described.take_while(|(key, _)| store.blocks[key].described.is_some());
                assert_eq!(prefix.len(), described.count());
                for (tiers, expected) in prefix.iter().zip(&expected) {
                    let mut names: Vec<_> =
                        expected.iter().map(|tier| tier.name().to_owned()).collect();
                    names.sort();
                    assert_eq!(*tiers, names);
                }
                found += prefix.len();
            }
        }
        self.check_nothing_else(store);
        found
    }
}

impl<const MAP: bool> Picker<MAP> {
    fn store(&mut self, entry: &Entry, event: &Read) {
        for hash in &event.hashes {
            *self.counts.entry((entry.clone(), *hash)).or_default() += 1;
        }
        // A parent of 0 is none.
        let parent = match event.parent.filter(|parent| *parent != 0) {
            None => 0,
            Some(parent) => match self.engine_keys.get(&parent) {
                Some(key) => *key,
                // Without a word.
                None => return,
            },
        };
        let keys = request_keys(parent, &event.tokens);
        assert_eq!(keys.len(), event.hashes.len());
        for (hash, key) in event.hashes.iter().zip(keys) {
            self.engine_keys.insert(*hash, key);
            let pods = self.pods.entry(key).or_default();
            pods.retain(|known| known != entry);
            pods.push_back(entry.clone());
            if pods.len() > POD_CACHE_SIZE {
                pods.pop_front();
            }
        }
    }

    fn remove(&mut self, entry: &Entry, event: &Read) {
        for hash in &event.hashes {
            if let Some(count) = self.counts.get_mut(&(entry.clone(), *hash)) {
                *count -= 1;
                if *count > 0 {
                    continue;
                }
                self.counts.remove(&(entry.clone(), *hash));
            }
            let Some(key) = self.engine_keys.get(hash).copied() else { continue };
            let Some(pods) = self.pods.get_mut(&key) else { continue };
            pods.retain(|known| known != entry);
            if pods.is_empty() {
                self.pods.remove(&key);
                self.engine_keys.remove(hash);
            }
        }
    }

    fn tiers(&self, key: u64, worker: usize) -> Vec<String> {
        let entries = self.pods.get(&key).into_iter().flatten();
        let mut tiers: Vec<_> =
            entries.filter(|(pod, _)| *pod == worker).map(|(_, tier)| tier.clone()).collect();
        tiers.sort();
        tiers
    }

    /// What is in the index is in the tiers; and every count is that of one announcement.
    fn check_nothing_else(&self, store: &Store) {
        let on: HashMap<u64, _> =
            store.blocks.iter().map(|(key, block)| (super::short(key), block.tiers)).collect();
        for (hash, key) in &self.engine_keys {
            for (_, tier) in self.pods.get(key).into_iter().flatten() {
                assert!(on[hash].iter().any(|on| on.name() == tier), "{hash:x} is not on {tier}");
            }
        }
        assert!(self.counts.values().all(|count| *count == 1));
        for ((_, tier), hash) in self.counts.keys() {
            assert!(on[hash].iter().any(|on| on.name() == tier), "{hash:x} was told of {tier}");
        }
    }
}

/// The picker's keys of whole blocks.
fn request_keys(parent: u64, tokens: &[u32]) -> Vec<u64> {
    let mut key = parent;
    let blocks = tokens.chunks_exact(BLOCK_TOKENS as usize);
    let next = |tokens: &[u32]| {
        let bytes = tokens.iter().flat_map(|token| token.to_be_bytes());
        key = xxh3_64(&key.to_be_bytes().into_iter().chain(bytes).collect::<Vec<_>>());
        key
    };
    blocks.map(next).collect()
}

#[test]
fn the_index_of_an_endpoint_picker_is_the_truth() {
    histories::<Picker<true>>();
}

#[test]
fn it_is_so_with_events_by_place() {
    histories::<Picker<false>>();
}

#[test]
fn entries_of_the_engine_itself_are_left_alone() {
    let mut picker = Picker::<true>::default();
    let tokens: Vec<u32> = (0..8).collect();
    let gpu = Read { hashes: vec![11, 12], tokens: tokens.clone(), ..Read::default() };
    picker.store(&(0, "gpu".to_owned()), &gpu);
    for worker in 0..3 {
        for tier in ["dram", "nvme", "object"] {
            picker.store(&(worker, tier.to_owned()), &gpu);
        }
    }
    for tier in ["dram", "nvme", "object"] {
        picker.remove(&(0, tier.to_owned()), &gpu);
    }
    for key in request_keys(0, &tokens) {
        assert_eq!(picker.tiers(key, 0), ["gpu"]);
        assert_eq!(picker.tiers(key, 2).len(), 3);
    }
}
