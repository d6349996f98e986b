//! Who takes a prompt, mode by mode.

use super::*;
use crate::score::LoadCost;

fn offer(engine: usize) -> Offer {
    Offer {
        engine,
        device: 0,
        load: Load::default(),
        segments: Vec::new(),
        prefill: Prefill::linear(8.0),
        held: 0,
        turn: 0,
    }
}

fn taken(mode: Mode, offers: &[Offer]) -> usize {
    take(&weigh(mode, 10, offers)).unwrap().engine
}

fn segment(blocks: u32, tier: Tier, queue_ms: f64, setup_ms: f64, block_ms: f64) -> Segment {
    Segment { blocks, tier, source: 0, cost: LoadCost { queue_ms, setup_ms, block_ms } }
}

/// The worked example of the scores, with the same prompt under way nowhere.
fn example(queue_ms: f64) -> [Offer; 4] {
    let blocks = [12.0, 4.0, 3.0, 1.0];
    let device = [8, 6, 2, 0];
    let segments = [
        segment(2, Tier::Dram, 0.0, 0.0, 0.5),
        segment(2, Tier::Nvme, 0.0, 2.0, 2.0),
        segment(6, Tier::Dram, 0.0, 0.0, 0.5),
        segment(8, Tier::Nvme, queue_ms, 2.0, 2.0),
    ];
    std::array::from_fn(|at| Offer {
        device: device[at],
        load: Load { blocks: blocks[at], ..Load::default() },
        segments: vec![segments[at]],
        ..offer(at)
    })
}

#[test]
fn the_modes_take_whom_the_worked_example_says() {
    assert_eq!(taken(Mode::DeviceOnly, &example(0.0)), 1);
    assert_eq!(taken(Mode::Constants, &example(0.0)), 2);
    assert_eq!(taken(Mode::Timed, &example(0.0)), 3);
    // Its disk is busy now.
    assert_eq!(taken(Mode::Timed, &example(40.0)), 2);
    assert_eq!(taken(Mode::Constants, &example(40.0)), 2);
    assert_eq!(taken(Mode::LeastLoaded, &example(0.0)), 3);
    let choice = take(&weigh(Mode::Timed, 10, &example(0.0))).unwrap();
    assert_eq!((choice.device, choice.loaded, choice.computed), (0, [0, 8, 0], 2));
    assert_eq!((choice.prefill_ms, choice.ttft_ms), (16.0, 34.0));
}

#[test]
fn turns_go_round_and_load_counts_where_nothing_else_does() {
    let mut offers = [offer(0), offer(1), offer(2)];
    let mut order = Vec::new();
    for turn in 1..=6 {
        let engine = taken(Mode::RoundRobin, &offers);
        offers[engine].turn = turn;
        offers[engine].load.blocks = 1000.0;
        order.push(engine);
    }
    assert_eq!(order, [0, 1, 2, 0, 1, 2]);
    offers[1].load.blocks = 999.0;
    for mode in [Mode::LeastLoaded, Mode::DeviceOnly, Mode::Timed] {
        assert_eq!(taken(mode, &offers), 1, "{mode:?}");
    }
    offers[1].load.prefill_blocks = 2.0;
    assert_ne!(taken(Mode::Timed, &offers), 1);
}

#[test]
fn equals_are_taken_where_least_is_on_the_device() {
    let mut offers = [offer(0), offer(1), offer(2)];
    offers[0].held = 10;
    offers[1].turn = 5;
    assert_eq!(taken(Mode::Timed, &offers), 2);
    offers[2].held = 10;
    assert_eq!(taken(Mode::Timed, &offers), 1);
    assert!(take(&[]).is_none());
}

#[test]
fn prefill_times_are_learned_and_follow_what_changes() {
    let mut learned = Learned::default();
    let block_ms = |learned: Learned| learned.prefill(16).linear_ms;
    assert!((block_ms(learned) - 2.0).abs() < 1e-9);
    for _ in 0..20 {
        learned.learn(1600.0, 800.0);
        learned.learn(16.0, 500.0);
        learned.learn(1600.0, f64::NAN);
    }
    assert!((block_ms(learned) - 8.0).abs() < 0.1, "{learned:?}");
    for _ in 0..10 {
        learned.learn(1600.0, 100.0);
    }
    assert!(block_ms(learned) < 2.0, "{learned:?}");
}
