//! Clusters small enough to follow by hand, and what holds of all of them.

use kvstrata_tiers::tier::Tier;
use proptest::prelude::*;

use super::*;
use crate::{
    score::{Prefill, Weights},
    trace::{ReadOptions, Trace, read_from},
};

const MS: Rate = Rate { setup_ms: 0.0, block_ms: 1.0 };

/// Two engines on two nodes; 10 ms for each block, dram 1 ms, of the other node 2 ms; nothing else.
fn small() -> Setup {
    let dram = TierSetup {
        capacity_blocks: 1000,
        local: MS,
        remote: Rate { setup_ms: 0.0, block_ms: 2.0 },
    };
    Setup {
        workers: 2,
        workers_per_node: 1,
        prefill: Prefill::linear(10.0),
        device_blocks: 1000,
        slots: 4,
        decode_token_ms: 1.0,
        tiers: [dram, TierSetup::NONE, TierSetup::NONE],
        loading: Loading::Paying,
        report_ms: 1.0,
        decode_weight: 0.0,
        weights: Weights::DYNAMO,
        speedup: 1.0,
        seed: 7,
    }
}

fn outcome(trace: &Trace, setup: &Setup, mode: Mode) -> Outcome {
    run(trace, setup, mode, &mut |_| {}).unwrap()
}

/// A trace of requests of sessions, each at a time in ms with its blocks, and 5 tokens of answer.
fn sessions(requests: &[(u64, u32, &[u32])]) -> Trace {
    let line = |(ms, session, blocks): &(u64, u32, &[u32])| {
        let ids = serde_json::to_string(blocks).unwrap();
        let tokens = 512 * blocks.len();
        format!(
            r#"{{"timestamp":{ms},"session":{session},"input_length":{tokens},"output_length":5,"hash_ids":{ids}}}"#
        )
    };
    let lines: Vec<String> = requests.iter().map(line).collect();
    read_from(lines.join("\n").as_bytes(), "t", &ReadOptions::default()).unwrap()
}

#[test]
fn a_small_case_is_as_by_hand() {
    // One second apart, so that nothing waits: 4 new blocks on the first engine; the same on the other,
    // from the first one's dram; then 1 more than the first engine has.
    let trace = Trace::of(&[&[0, 1, 2, 3], &[0, 1, 2, 3], &[0, 1, 2, 3, 4]]);
    let found = outcome(&trace, &small(), Mode::RoundRobin);
    assert_eq!(found.first_token_ms, [4.0 * 2.0, 10.0, 4.0 * 10.0]);
    assert_eq!((found.asked_blocks, found.computed_blocks), (13, 5));
    assert_eq!(
        (found.device_blocks, found.local_blocks, found.remote_blocks),
        (4, [0; 3], [4, 0, 0])
    );
    assert_eq!(found.busy_ms.iter().sum::<f64>(), 50.0);
    assert_eq!(found.end_ms, 2000.0 + 10.0 + 1.0);
    assert_eq!(
        (found.mean_ms(), found.quantile_ms(0.5), found.quantile_ms(0.99)),
        (58.0 / 3.0, 10.0, 40.0)
    );
    assert!((found.within(10.0) - 2.0 / 3.0).abs() < 1e-9);

    // By what devices have, all goes to one engine; the other's dram is never read.
    let found = outcome(&trace, &small(), Mode::DeviceOnly);
    assert_eq!(found.first_token_ms, [0.0, 10.0, 40.0]);
    assert_eq!((found.device_blocks, found.computed_blocks), (8, 5));
}

#[test]
fn prompts_wait_for_the_engine_for_loads_and_for_slots() {
    let alone = Setup { workers: 1, slots: 1, ..small() };
    // All at once: 30 ms of prefill and 5 ms of decoding each, one after another.
    let trace = sessions(&[(0, 0, &[0, 1, 2]), (0, 1, &[3, 4, 5]), (0, 2, &[6, 7, 8])]);
    assert_eq!(outcome(&trace, &alone, Mode::Timed).first_token_ms, [30.0, 65.0, 100.0]);
    let slots = Setup { slots: 2, ..alone.clone() };
    assert_eq!(outcome(&trace, &slots, Mode::Timed).first_token_ms, [30.0, 60.0, 90.0]);

    // A device that holds nothing: what was computed comes back from dram, one load behind another. A
    // prompt that comes meanwhile is computed first, and they wait for the engine.
    let small = Setup { device_blocks: 0, slots: 9, ..alone };
    let mut requests: Vec<(u64, u32, &[u32])> =
        vec![(0, 0, &[0, 1, 2]), (100, 1, &[0, 1, 2]), (100, 2, &[0, 1, 2])];
    let found = outcome(&sessions(&requests), &small, Mode::Timed);
    assert_eq!(found.first_token_ms, [3.0, 6.0, 30.0]);
    requests.push((101, 3, &[9]));
    let found = outcome(&sessions(&requests), &small, Mode::Timed);
    assert_eq!(found.first_token_ms, [10.0, 11.0, 11.0, 30.0]);
    assert_eq!((found.local_blocks, found.computed_blocks), ([6, 0, 0], 4));
}

#[test]
fn what_takes_longer_to_load_than_to_compute_is_computed_unless_all_is_loaded() {
    let slow = TierSetup { local: Rate { setup_ms: 100.0, block_ms: 1.0 }, ..small().tiers[0] };
    let setup = Setup {
        workers: 1,
        device_blocks: 0,
        tiers: [slow, TierSetup::NONE, TierSetup::NONE],
        ..small()
    };
    let trace = Trace::of(&[&[0, 1, 2], &[0, 1, 2]]);
    let paying = outcome(&trace, &setup, Mode::Timed);
    assert_eq!((paying.first_token_ms, paying.computed_blocks), (vec![30.0, 30.0], 6));
    let all = outcome(&trace, &Setup { loading: Loading::All, ..setup }, Mode::Timed);
    assert_eq!((all.first_token_ms, all.computed_blocks), (vec![30.0, 103.0], 3));
}

#[test]
fn a_request_of_a_session_waits_for_the_answer_before_it() {
    let trace =
        sessions(&[(0, 0, &[0, 1]), (1, 0, &[0, 1, 2]), (2, 0, &[0, 1, 2, 3]), (3, 1, &[9])]);
    let setup = Setup { workers: 1, ..small() };
    let found = outcome(&trace, &setup, Mode::RoundRobin);
    // 20 ms, then 10 ms each as only the new block is missing. The other session's 10 ms fall between.
    assert_eq!(found.first_token_ms, [10.0, 15.0, 20.0, 27.0]);
    assert_eq!((found.device_blocks, found.computed_blocks), (5, 5));
}

#[test]
fn timed_goes_where_loading_is_quicker_than_prefill_elsewhere() {
    // Engine 0 has computed a long prompt and is busy with another. The next one like the first waits
    // for neither: the other engine loads it from the first one's dram.
    let long: Vec<u32> = (0..50).collect();
    let busy: Vec<u32> = (100..200).collect();
    let trace = sessions(&[(0, 0, &long), (1000, 1, &busy), (1001, 2, &long), (1002, 3, &busy)]);
    let timed = outcome(&trace, &small(), Mode::Timed);
    assert_eq!(
        timed.remote_blocks[0] + timed.local_blocks[0] + timed.device_blocks,
        50,
        "{timed:?}"
    );
    assert_eq!(timed.computed_blocks, 250);
}

#[test]
fn setups_out_of_range_are_refused_by_name() {
    let trace = Trace::of(&[&[0]]);
    let cases = [
        (Setup { workers: 0, ..small() }, "workers: 0 given, 1 to 1024"),
        (Setup { workers: 1025, ..small() }, "workers: 1025"),
        (Setup { workers_per_node: 0, ..small() }, "workers per node: 0"),
        (Setup { slots: 0, ..small() }, "slots: 0"),
        (Setup { speedup: f64::NAN, ..small() }, "speedup: NaN"),
        (Setup { report_ms: 0.0, ..small() }, "report: 0 ms"),
        (Setup { decode_weight: -1.0, ..small() }, "decode weight: -1"),
        (Setup { prefill: Prefill::linear(-2.0), ..small() }, "time: -2 ms"),
    ];
    for (setup, expected) in cases {
        let error = run(&trace, &setup, Mode::Timed, &mut |_| {}).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert!("fastest".parse::<Mode>().unwrap_err().to_string().contains("first-token allowed"));
}

/// Chains of blocks, each a path in a small tree; a block is named by its path from the root.
fn chains() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let path = prop::collection::vec(0_u32..3, 1..8);
    let chain = |path: &Vec<u32>| {
        path.iter()
            .scan(1, |name, step| {
                *name = *name * 3 + step;
                Some(*name)
            })
            .collect::<Vec<u32>>()
    };
    prop::collection::vec(path.prop_map(move |path| chain(&path)), 1..50)
}

/// Requests of some sessions within half a second.
fn load() -> impl Strategy<Value = Trace> {
    let whens = prop::collection::vec((0_u64..500, 0_u32..6), 50);
    (chains(), whens).prop_map(|(chains, whens)| {
        let requests = whens.iter().zip(&chains);
        let requests = requests.map(|((ms, session), chain)| (*ms, *session, chain.as_slice()));
        sessions(&requests.collect::<Vec<_>>())
    })
}

fn tier() -> impl Strategy<Value = TierSetup> {
    let rate =
        || (0.0..5.0, 0.0..12.0).prop_map(|(setup_ms, block_ms)| Rate { setup_ms, block_ms });
    (0_u32..60, rate(), rate()).prop_map(|(capacity_blocks, local, remote)| TierSetup {
        capacity_blocks,
        local,
        remote,
    })
}

fn setup() -> impl Strategy<Value = Setup> {
    let tiers = prop::array::uniform3(tier());
    let loading = prop_oneof![Just(Loading::Paying), Just(Loading::All)];
    (1_u32..6, 1_u32..4, 0_u32..40, 1_u32..4, tiers, loading, 0.0..1.0_f64, any::<u64>()).prop_map(
        |(workers, workers_per_node, device_blocks, slots, tiers, loading, quadratic_ms, seed)| {
            Setup {
                workers,
                workers_per_node,
                prefill: Prefill { linear_ms: 10.0, quadratic_ms },
                device_blocks,
                slots,
                tiers,
                loading,
                decode_weight: 1.0,
                speedup: 2.0,
                seed,
                ..small()
            }
        },
    )
}

fn mode() -> impl Strategy<Value = Mode> {
    prop::sample::select(Mode::ALL.to_vec())
}

proptest! {
    #[test]
    fn what_was_asked_was_on_the_device_loaded_or_computed(
        trace in load(), setup in setup(), mode in mode(),
    ) {
        let found = outcome(&trace, &setup, mode);
        let loaded: u64 = Tier::ALL.iter().map(|tier| found.loaded_blocks(*tier)).sum();
        prop_assert_eq!(found.asked_blocks, trace.references());
        prop_assert_eq!(found.device_blocks + loaded + found.computed_blocks, found.asked_blocks);
        prop_assert_eq!(found.first_token_ms.len(), trace.len());
        prop_assert!(found.computed_blocks >= u64::from(trace.blocks_unique()));
        prop_assert!(found.first_token_ms.iter().all(|ms| *ms >= 0.0));
        prop_assert_eq!(found.remote_blocks[2], 0);
    }

    #[test]
    fn equal_seeds_give_equal_outcomes(trace in load(), setup in setup()) {
        let cells: Vec<_> = Mode::ALL.map(|mode| (setup.clone(), mode)).to_vec();
        let requests = std::sync::atomic::AtomicUsize::new(0);
        let progress = |done| { requests.fetch_add(done, std::sync::atomic::Ordering::Relaxed); };
        let together = compare(&trace, &cells, &progress).unwrap();
        prop_assert_eq!(requests.into_inner(), trace.len() * cells.len());
        for ((setup, mode), together) in cells.iter().zip(together) {
            prop_assert_eq!(outcome(&trace, setup, *mode), together);
        }
    }

    #[test]
    fn without_tiers_all_costs_are_the_published_one(trace in load(), setup in setup()) {
        let setup = Setup { tiers: [TierSetup::NONE; 3], ..setup };
        let known = outcome(&trace, &setup, Mode::DeviceOnly);
        for mode in [Mode::Constants, Mode::Timed] {
            prop_assert_eq!(&outcome(&trace, &setup, mode), &known);
        }
    }

    #[test]
    fn tiers_that_take_no_time_leave_each_block_to_be_computed_once(
        requests in chains(), setup in setup(), mode in mode(),
    ) {
        let at_once = Rate { setup_ms: 0.0, block_ms: 0.0 };
        let all = TierSetup { capacity_blocks: 100_000, local: at_once, remote: at_once };
        let with = Setup { tiers: [all, TierSetup::NONE, TierSetup::NONE], ..setup.clone() };
        let without = Setup { tiers: [TierSetup::NONE; 3], ..setup };
        // A second apart: nobody waits for anybody.
        let requests: Vec<&[u32]> = requests.iter().map(Vec::as_slice).collect();
        let trace = Trace::of(&requests);
        let with = outcome(&trace, &with, mode);
        prop_assert_eq!(with.computed_blocks, u64::from(trace.blocks_unique()));
        let without = outcome(&trace, &without, mode);
        for (with, without) in with.first_token_ms.iter().zip(&without.first_token_ms) {
            prop_assert!(*with <= without + 1e-6);
        }
    }
}
