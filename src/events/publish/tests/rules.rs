//! What is said, and in which order.

use std::collections::{HashMap, HashSet};

use kvstrata_tiers::{block::BlockKey, tier::Tier};

use super::{
    super::{
        announce::{Announcer, Described, Gates, Terms},
        encode::Event,
        shadow::TierSet,
    },
    ALL, BLOCK_TOKENS, Block, Line, Store, chain, short, terms,
};

fn announcer() -> Announcer {
    Line::new(HashMap::new()).announcer
}

/// All that is said, of so many blocks at a time.
fn drain(announcer: &mut Announcer, store: &Store, gates: &Gates, limit: usize) -> Vec<Event> {
    let mut events = Vec::new();
    for _ in 0..100_000 {
        if !announcer.is_busy() {
            return events;
        }
        events.extend(announcer.step(store, gates, limit));
    }
    panic!("it does not come to an end");
}

fn filled(blocks: u32, tiers: &[Tier]) -> (Store, Vec<BlockKey>) {
    let prompt: Vec<u32> = (0..blocks * BLOCK_TOKENS).collect();
    let mut store = Store::default();
    let mut keys = Vec::new();
    for (key, described) in chain(&prompt) {
        let tiers = tiers.iter().fold(TierSet::NONE, |set, tier| set.with(TierSet::of(*tier)));
        store.blocks.insert(key, Block { tiers, described: Some(described) });
        keys.push(key);
    }
    (store, keys)
}

#[test]
fn a_long_chain_comes_root_first_in_events_of_256_whatever_came_first() {
    for backwards in [false, true] {
        for limit in [10_000, 100, 7, 1] {
            let (store, mut keys) = filled(600, &[Tier::Dram, Tier::Nvme]);
            if backwards {
                keys.reverse();
            }
            let mut announcer = announcer();
            keys.iter().for_each(|key| announcer.changed(*key));
            let events = drain(&mut announcer, &store, &ALL, limit);
            let mut known: HashSet<u64> = HashSet::new();
            let mut blocks = 0;
            for event in &events {
                let Event::Stored(stored) = event else { panic!("{event:?}") };
                assert!(stored.hashes.len() <= 256);
                assert_eq!(stored.tokens.len(), stored.hashes.len() * 4);
                assert!(stored.parent.is_none_or(|parent| known.contains(&parent)));
                known.extend(&stored.hashes);
                blocks += stored.hashes.len();
            }
            assert_eq!((blocks, announcer.announced()), (1200, 600), "{backwards} {limit}");
            if limit == 10_000 {
                assert_eq!(events.len(), 6, "{backwards}");
            }
        }
    }
}

#[test]
fn what_hangs_in_the_air_waits_and_what_was_said_stays_when_its_head_leaves() {
    let (mut store, keys) = filled(6, &[Tier::Nvme]);
    let mut announcer = announcer();
    let head = std::mem::take(store.blocks.get_mut(&keys[1]).unwrap());
    keys.iter().for_each(|key| announcer.changed(*key));
    assert_eq!(drain(&mut announcer, &store, &ALL, 100).len(), 1);
    assert_eq!((announcer.announced(), announcer.pending()), (1, 4));
    store.blocks.insert(keys[1], head);
    announcer.changed(keys[1]);
    assert_eq!(drain(&mut announcer, &store, &ALL, 100).len(), 1);
    assert_eq!((announcer.announced(), announcer.pending()), (6, 0));
    // Its head leaves: that alone is said, and what is new behind the gap waits.
    let head = std::mem::take(store.blocks.get_mut(&keys[0]).unwrap());
    announcer.changed(keys[0]);
    let gone = [Event::Removed { tier: Tier::Nvme, hashes: vec![short(&keys[0])] }];
    assert_eq!(drain(&mut announcer, &store, &ALL, 100), gone);
    store.blocks.insert(keys[0], head);
    announcer.changed(keys[0]);
    assert_eq!(drain(&mut announcer, &store, &ALL, 100).len(), 1);
    assert_eq!(announcer.announced(), 6);
}

#[test]
fn short_chains_are_announced_when_they_have_grown() {
    let gates = [Some(1), Some(8), None];
    let (store, keys) = filled(20, &[Tier::Nvme, Tier::Object]);
    let mut announcer = announcer();
    for (count, expected) in [(7, 0), (8, 8), (9, 9), (20, 20)] {
        keys[..count].iter().for_each(|key| announcer.changed(*key));
        let mut grown = Store::default();
        grown.blocks.extend(keys[..count].iter().map(|key| (*key, store.blocks[key].clone())));
        let events = drain(&mut announcer, &grown, &gates, 1000);
        assert!(events.iter().all(|event| event.tier() == Tier::Nvme), "{events:?}");
        assert_eq!(announcer.announced(), expected, "{count}");
        assert_eq!(announcer.pending(), count - expected);
    }
    // A tier that is unwell is withdrawn, and announced again: with the chain that hangs on it.
    for (gates, expected) in [([Some(1), None, None], 0), (gates, 20)] {
        keys.iter().for_each(|key| announcer.changed(*key));
        drain(&mut announcer, &store, &gates, 1000);
        assert_eq!(announcer.announced(), expected);
    }
    // What is announced elsewhere does not make a chain longer.
    let gates = [Some(1), Some(8), Some(30)];
    keys.iter().for_each(|key| announcer.changed(*key));
    let events = drain(&mut announcer, &store, &gates, 1000);
    assert!(events.is_empty(), "{events:?}");
    // Its head comes back alone.
    let mut without = Store::default();
    without.blocks.extend(keys[1..].iter().map(|key| (*key, store.blocks[key].clone())));
    announcer.changed(keys[0]);
    drain(&mut announcer, &without, &gates, 1000);
    announcer.changed(keys[0]);
    drain(&mut announcer, &store, &gates, 1000);
    assert_eq!(announcer.announced(), 20);
}

#[test]
fn many_short_chains_behind_a_head_that_wait_cost_no_endless_work() {
    let (mut store, keys) = filled(1, &[Tier::Object]);
    let mut announcer = announcer();
    announcer.changed(keys[0]);
    for branch in 0..500 {
        let prompt: Vec<u32> = (0..4).chain([branch + 100; 8]).collect();
        for (key, described) in chain(&prompt).split_off(1) {
            let tiers = TierSet::of(Tier::Object);
            store.blocks.insert(key, Block { tiers, described: Some(described) });
            announcer.changed(key);
        }
    }
    let gates = [Some(1), Some(1), Some(4)];
    assert!(drain(&mut announcer, &store, &gates, 16).is_empty());
    assert_eq!(announcer.pending(), 1001);
    announcer.reconsider();
    drain(&mut announcer, &store, &ALL, 16);
    assert_eq!((announcer.announced(), announcer.pending()), (1001, 0));
}

#[test]
fn chains_that_go_round_in_circles_are_left_alone() {
    let (mut store, keys) = filled(3, &[Tier::Dram]);
    let circle =
        Described { parent: Some(keys[2].hash), tokens: vec![0; 4], lora_name: String::new() };
    store.blocks.get_mut(&keys[0]).unwrap().described = Some(circle);
    let mut announcer = announcer();
    keys.iter().for_each(|key| announcer.changed(*key));
    assert!(drain(&mut announcer, &store, &ALL, 10).is_empty());
    // Also when one of them was known to be something else.
    let (whole, _) = filled(3, &[Tier::Dram]);
    keys.iter().for_each(|key| announcer.changed(*key));
    drain(&mut announcer, &whole, &ALL, 10);
    for block in store.blocks.values_mut() {
        block.tiers = block.tiers.with(TierSet::of(Tier::Nvme));
    }
    keys.iter().for_each(|key| announcer.changed(*key));
    drain(&mut announcer, &store, &ALL, 10);
    assert_eq!(announcer.announced(), 3);
}

#[test]
fn a_namespace_that_a_worker_has_left_is_withdrawn() {
    let (store, keys) = filled(5, &[Tier::Dram]);
    let mut announcer = announcer();
    keys.iter().for_each(|key| announcer.changed(*key));
    drain(&mut announcer, &store, &ALL, 100);
    assert!(!announcer.set_terms(0, terms()));
    assert!(announcer.set_terms(0, Terms { open: false, ..terms() }));
    keys.iter().for_each(|key| announcer.changed(*key));
    let events = drain(&mut announcer, &store, &ALL, 100);
    assert!(matches!(&events[..], [Event::Removed { hashes, .. }] if hashes.len() == 5));
    assert_eq!(announcer.announced(), 0);
}

#[test]
fn no_more_is_announced_than_may_be() {
    let (mut store, keys) = filled(10, &[Tier::Dram]);
    let mut announcer = Announcer::new(Vec::new(), 6);
    announcer.set_terms(0, terms());
    keys.iter().for_each(|key| announcer.changed(*key));
    drain(&mut announcer, &store, &ALL, 100);
    assert_eq!((announcer.announced(), announcer.pending()), (6, 0));
    // What is announced may come to be elsewhere, too.
    for block in store.blocks.values_mut() {
        block.tiers = block.tiers.with(TierSet::of(Tier::Nvme));
    }
    keys.iter().for_each(|key| announcer.changed(*key));
    let events = drain(&mut announcer, &store, &ALL, 100);
    assert!(matches!(&events[..], [Event::Stored(run)] if run.hashes.len() == 6), "{events:?}");
    for key in &keys[..2] {
        store.blocks.remove(key);
        announcer.changed(*key);
    }
    keys[6..].iter().for_each(|key| announcer.changed(*key));
    drain(&mut announcer, &store, &ALL, 100);
    assert_eq!(announcer.announced(), 6);
}

#[test]
fn what_was_withdrawn_is_withdrawn_again_until_it_is_settled() {
    let (mut store, keys) = filled(3, &[Tier::Dram]);
    let mut announcer = announcer();
    keys.iter().for_each(|key| announcer.changed(*key));
    drain(&mut announcer, &store, &ALL, 100);
    let gone = store.blocks.remove(&keys[2]).unwrap();
    announcer.changed(keys[2]);
    drain(&mut announcer, &store, &ALL, 100);
    let withdraws = |announcer: &mut Announcer, store: &Store| {
        announcer.resync(store.blocks.keys().copied());
        let events = drain(announcer, store, &ALL, 100);
        let Some(Event::Removed { hashes, .. }) = events.first() else { panic!("{events:?}") };
        let different: HashSet<_> = hashes.iter().collect();
        assert_eq!(hashes.len(), 2 * different.len());
        different.len()
    };
    assert_eq!(withdraws(&mut announcer, &store), 3);
    assert_eq!(announcer.settle(), []);
    assert_eq!(withdraws(&mut announcer, &store), 3);
    assert_eq!(announcer.settle(), []);
    // What is announced again is not settled.
    assert_eq!(announcer.settle(), [(short(&keys[2]), TierSet::of(Tier::Dram))]);
    assert_eq!(withdraws(&mut announcer, &store), 2);
    store.blocks.insert(keys[2], gone);
    announcer.changed(keys[2]);
    drain(&mut announcer, &store, &ALL, 100);
    assert_eq!(announcer.announced(), 3);
}
