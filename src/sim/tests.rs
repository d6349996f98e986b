//! The simulators against plain models.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;

/// Chained traces: a request is a path in a small tree, and a block is a path from the root.
fn chained() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let path = prop::collection::vec(0_u8..3, 1..8);
    prop::collection::vec(path, 1..40).prop_map(|paths| {
        let mut names = HashMap::new();
        let name = |path: &[u8], names: &mut HashMap<Vec<u8>, u32>| {
            let next = u32::try_from(names.len()).unwrap();
            *names.entry(path.to_vec()).or_insert(next)
        };
        let chain = |path: &Vec<u8>, names: &mut HashMap<Vec<u8>, u32>| {
            (1..=path.len()).map(|end| name(&path[..end], names)).collect()
        };
        paths.iter().map(|path| chain(path, &mut names)).collect()
    })
}

fn trace_of(requests: &[Vec<u32>]) -> Trace {
    let views: Vec<&[u32]> = requests.iter().map(Vec::as_slice).collect();
    Trace::of(&views)
}

fn model_lru(requests: &[Vec<u32>], capacity: usize) -> Outcome {
    let (mut hits, mut insertions, mut references) = (0, 0, 0);
    let mut order: Vec<u32> = Vec::new(); // coldest first
    for request in requests {
        references += request.len() as u64;
        hits += request.iter().take_while(|block| order.contains(block)).count() as u64;
        insertions += request.iter().filter(|block| !order.contains(block)).count() as u64;
        for block in request.iter().rev() {
            if order.contains(block) {
                order.retain(|other| other != block);
            } else {
                if order.len() == capacity {
                    order.remove(0);
                }
            }
            order.push(*block);
        }
    }
    Outcome { references, hits, insertions }
}

fn model_opt(requests: &[Vec<u32>], capacity: usize) -> Outcome {
    let (mut hits, mut insertions, mut references) = (0, 0, 0);
    let mut kept: BTreeMap<u32, (usize, usize)> = BTreeMap::new(); // block -> next use, depth
    for (position, request) in requests.iter().enumerate() {
        references += request.len() as u64;
        hits += request.iter().take_while(|block| kept.contains_key(block)).count() as u64;
        let before = kept.clone();
        for (depth, block) in request.iter().enumerate() {
            let later = requests.iter().enumerate().skip(position + 1);
            let next = later.filter(|(_, other)| other.contains(block)).map(|(at, _)| at).next();
            match next {
                Some(next) => kept.insert(*block, (next, depth)),
                None => kept.remove(block),
            };
        }
        while kept.len() > capacity {
            let last = kept.iter().max_by_key(|(_, due)| **due).map(|(block, _)| *block).unwrap();
            kept.remove(&last);
        }
        insertions += kept.keys().filter(|block| !before.contains_key(block)).count() as u64;
    }
    Outcome { references, hits, insertions }
}

#[test]
fn hits_of_a_tier_are_counted_in_stretches() {
    // The tail of the first request is pushed out of the hot tier by the second.
    let trace = Trace::of(&[&[0, 1, 2, 3], &[8, 9], &[0, 1, 2, 3], &[0, 1, 2, 3, 4]]);
    let outcome = simulate_tiers(&trace, &[4, 10]);
    assert_eq!(outcome.hits, [6, 2]);
    assert_eq!(outcome.stretches, [2, 1]);
}

proptest! {
    #[test]
    fn lru_and_opt_equal_their_models(requests in chained(), capacity in 0_u32..40) {
        let trace = trace_of(&requests);
        let lru = simulate(&trace, Policy::Lru, capacity);
        if capacity > 0 {
            prop_assert_eq!(lru, model_lru(&requests, capacity as usize));
        }
        let opt = simulate(&trace, Policy::Opt, capacity);
        prop_assert_eq!(opt, model_opt(&requests, capacity as usize));
        prop_assert_eq!(opt.hits, opt_hits(&trace, capacity));
    }

    #[test]
    fn no_policy_hits_more_than_opt(requests in chained(), capacity in 0_u32..40) {
        let trace = trace_of(&requests);
        let opt = opt_hits(&trace, capacity);
        let unbounded = unbounded_hits(&trace);
        prop_assert!(opt <= unbounded);
        for policy in [Policy::Lru, Policy::S3Fifo, Policy::Arc] {
            prop_assert!(simulate(&trace, policy, capacity).hits <= opt, "{policy}");
            prop_assert_eq!(simulate(&trace, policy, trace.blocks_unique()).hits, unbounded);
        }
        prop_assert_eq!(opt_hits(&trace, trace.blocks_unique()), unbounded);
    }

    #[test]
    fn opt_bounds_also_traces_without_chains(
        requests in prop::collection::vec(prop::collection::vec(0_u32..12, 0..8), 1..30),
        capacity in 0_u32..12,
    ) {
        let trace = trace_of(&requests);
        let opt = opt_hits(&trace, capacity);
        for policy in [Policy::Lru, Policy::S3Fifo, Policy::Arc] {
            prop_assert!(simulate(&trace, policy, capacity).hits <= opt, "{policy}");
        }
    }

    #[test]
    fn tiers_split_the_hits_of_the_largest(
        requests in chained(),
        dram in 0_u32..10,
        nvme in 0_u32..10,
    ) {
        let trace = trace_of(&requests);
        let capacities = [dram, dram + nvme, trace.blocks_unique()];
        let split = simulate_tiers(&trace, &capacities);
        let mut sum = 0;
        for (hits, capacity) in split.hits.iter().zip(capacities) {
            sum += hits;
            prop_assert_eq!(sum, simulate(&trace, Policy::Lru, capacity).hits);
        }
        prop_assert_eq!(sum + split.misses(), trace.references());
    }

    #[test]
    fn a_sweep_gives_what_single_runs_give(requests in chained()) {
        let trace = trace_of(&requests);
        let cells: Vec<_> =
            Policy::ALL.into_iter().flat_map(|policy| [(policy, 2), (policy, 9)]).collect();
        let done = std::sync::atomic::AtomicU64::new(0);
        let count = |references| {
            done.fetch_add(references, std::sync::atomic::Ordering::Relaxed);
        };
        let outcomes = sweep(&trace, &cells, &count).unwrap();
        for ((policy, capacity), outcome) in cells.iter().zip(&outcomes) {
            prop_assert_eq!(*outcome, simulate(&trace, *policy, *capacity));
        }
        prop_assert_eq!(done.into_inner(), trace.references() * cells.len() as u64);
    }
}

#[test]
fn a_gap_ends_the_prefix() {
    // Capacity 2 keeps the two heads; 3 and 4 are gone, then 9 pushes out the deeper head.
    let trace = Trace::of(&[&[1, 2, 3, 4], &[1, 2, 3, 4], &[9], &[1, 2]]);
    let outcome = simulate(&trace, Policy::Lru, 2);
    assert_eq!(outcome.hits, 2 + 1);
}
