//! The worked example, to the last digit, and what holds for every candidate.

use kvstrata_tiers::tier::Tier;
use proptest::prelude::*;

use super::*;

const BLOCKS: u32 = 10;
const PREFILL_MS: f64 = 8.0;
const DECODE: [f64; 4] = [12.0, 4.0, 3.0, 1.0];
const DEVICE: [u32; 4] = [8, 6, 2, 0];

const HOST: LoadCost = LoadCost { queue_ms: 0.0, setup_ms: 0.0, block_ms: 0.5 };
const NVME: LoadCost = LoadCost { queue_ms: 0.0, setup_ms: 2.0, block_ms: 2.0 };
const OBJECT: LoadCost = LoadCost { queue_ms: 0.0, setup_ms: 30.0, block_ms: 4.0 };

fn segment(blocks: u32, tier: Tier, cost: LoadCost) -> Segment {
    Segment { blocks, tier, source: 0, cost }
}

/// W1 host+2, W2 disk+2, W3 host+6, W4 disk+8, the disk of W4 with a queue.
fn segments(queue_ms: f64) -> [Segment; 4] {
    let busy = LoadCost { queue_ms, ..NVME };
    [
        segment(2, Tier::Dram, HOST),
        segment(2, Tier::Nvme, NVME),
        segment(6, Tier::Dram, HOST),
        segment(8, Tier::Nvme, busy),
    ]
}

fn example(mode: Mode, queue_ms: f64) -> [Assessment; 4] {
    let segments = segments(queue_ms);
    let settings = Settings { mode, ..Settings::default() };
    std::array::from_fn(|at| {
        let candidate = Candidate {
            device_blocks: DEVICE[at],
            decode_blocks: DECODE[at],
            queue_ms: 0.0,
            prefill: Prefill::linear(PREFILL_MS),
            segments: &segments[at..=at],
        };
        assess(BLOCKS, &candidate, &settings)
    })
}

fn assert_row(row: &str, actual: [f64; 4], expected: [f64; 4]) {
    for (actual, expected) in actual.into_iter().zip(expected) {
        assert!((actual - expected).abs() < 1e-9, "{row}: {actual} is not {expected}");
    }
}

#[test]
fn the_worked_example_comes_out_in_every_cell() {
    let winner = |row: [Assessment; 4]| pick(&row.map(|a| a.cost), 0.0, 0.0).unwrap() + 1;

    let a = example(Mode::DeviceOnly, 0.0);
    assert_row("A", a.map(|a| a.cost), [14.0, 8.0, 11.0, 11.0]);
    assert_eq!(winner(a), 2);

    let b = example(Mode::Constants(Weights::DYNAMO), 0.0);
    assert_row("B", b.map(|a| a.cost), [12.5, 7.5, 6.5, 9.0]);
    assert_eq!(winner(b), 3);

    let c = example(Mode::Timed, 0.0);
    assert_row("C saved", c.map(|a| a.saved_ms), [15.0, 10.0, 45.0, 46.0]);
    assert_row("C credit", c.map(|a| a.credit_blocks), [1.875, 1.25, 5.625, 5.75]);
    assert_row("C cost", c.map(|a| a.cost), [12.125, 6.75, 5.375, 5.25]);
    assert_row("C score", c.map(|a| a.score), [0.9875, 0.725, 0.7625, 0.575]);
    assert_eq!(winner(c), 4);

    let d = example(Mode::Timed, 40.0);
    assert_row("D saved", d.map(|a| a.saved_ms), [15.0, 10.0, 45.0, 6.0]);
    assert_row("D credit", d.map(|a| a.credit_blocks), [1.875, 1.25, 5.625, 0.75]);
    assert_row("D cost", d.map(|a| a.cost), [12.125, 6.75, 5.375, 10.25]);
    assert_eq!(winner(d), 3);

    // Milliseconds to the first token: load, and prefill of what is left.
    assert_row("C time", c.map(|a| a.ttft_ms), [1.0, 22.0, 19.0, 34.0]);

    let costs = c.map(|a| a.cost);
    let rounded = |temperature| {
        let shares = probabilities(&costs, temperature);
        <[f64; 4]>::try_from(shares).unwrap().map(|share| (share * 1e4).round() / 1e4)
    };
    assert_row("softmax 1", rounded(1.0), [0.1166, 0.2549, 0.3114, 0.3171]);
    assert_row("softmax 0.5", rounded(0.5), [0.0493, 0.2354, 0.3512, 0.3642]);
}

#[test]
fn an_object_hit_counts_from_its_break_even_on() {
    let cold = |blocks| {
        let segments = [segment(blocks, Tier::Object, OBJECT)];
        let candidate = Candidate {
            device_blocks: 0,
            decode_blocks: 0.0,
            queue_ms: 0.0,
            prefill: Prefill::linear(PREFILL_MS),
            segments: &segments,
        };
        assess(BLOCKS, &candidate, &Settings::default())
    };
    let seven = cold(7);
    assert_eq!((seven.best_blocks, seven.found_blocks), (0, 7));
    assert_row(
        "7",
        [seven.saved_ms, seven.credit_blocks, seven.load_ms, seven.cost],
        [0.0, 0.0, 0.0, 10.0],
    );
    assert_row(
        "8 and 10",
        [cold(8).saved_ms, cold(8).credit_blocks, cold(10).saved_ms, cold(10).credit_blocks],
        [2.0, 0.25, 10.0, 1.25],
    );
    assert_row("cold", [cold(10).cost; 4], [8.75; 4]);
    let break_even = [HOST, NVME, OBJECT].map(|cost| break_even_blocks(PREFILL_MS, cost));
    assert_eq!(break_even, [Some(1), Some(1), Some(8)]);
    assert_eq!(break_even_blocks(4.0, OBJECT), None);
    assert_eq!(break_even_blocks(f64::NAN, OBJECT), None);
    assert!((constant_weight(10, PREFILL_MS, OBJECT) - 0.125).abs() < 1e-9);
    assert!(constant_weight(7, PREFILL_MS, OBJECT).abs() < 1e-9);
    assert!(constant_weight(0, PREFILL_MS, HOST).abs() < 1e-9);
}

#[test]
fn a_curve_is_the_sum_of_its_blocks_and_makes_late_blocks_worth_more() {
    let curve = Prefill { linear_ms: 2.0, quadratic_ms: 0.01 };
    assert!((curve.ms(0, 100) - 300.0).abs() < 1e-9);
    assert!((curve.ms(0, 40) + curve.ms(40, 100) - 300.0).abs() < 1e-9);
    assert!((curve.ms(100, 100)).abs() < 1e-9);
    let saved = |device_blocks| {
        let segments = [segment(50, Tier::Nvme, NVME)];
        let candidate = Candidate {
            device_blocks,
            decode_blocks: 0.0,
            queue_ms: 0.0,
            prefill: curve,
            segments: &segments,
        };
        assess(1000, &candidate, &Settings::default()).saved_ms
    };
    assert!((saved(0) - (125.0 - 102.0)).abs() < 1e-9);
    assert!(saved(500) > 10.0 * saved(0));
}

#[test]
fn candidates_that_cannot_be_compared_are_not_taken() {
    assert_eq!(pick(&[], 0.0, 0.5), None);
    assert_eq!(pick(&[f64::NAN, 3.0, f64::INFINITY], 0.0, 0.0), Some(1));
    assert_eq!(pick(&[f64::NAN, 3.0, f64::INFINITY], 1.0, 0.999_999), Some(1));
    assert_eq!(pick(&[f64::NAN], 1.0, 0.3), Some(0));
    assert_eq!(probabilities(&[2.0, 2.0], 0.7), [0.5, 0.5]);
    assert_eq!(
        [0.0, 0.49, 0.51, 0.999].map(|at| pick(&[2.0, 2.0], 1.0, at)),
        [Some(0), Some(0), Some(1), Some(1)]
    );
}

/// A candidate with its own segments.
#[derive(Debug, Clone)]
struct Any {
    prompt: u32,
    device: u32,
    prefill_ms: f64,
    quadratic_ms: f64,
    segments: Vec<Segment>,
    parallel: bool,
}

impl Any {
    fn assess(&self, mode: Mode) -> Assessment {
        let candidate = Candidate {
            device_blocks: self.device,
            decode_blocks: 3.0,
            queue_ms: 1.0,
            prefill: Prefill { linear_ms: self.prefill_ms, quadratic_ms: self.quadratic_ms },
            segments: &self.segments,
        };
        let parallel_loads = self.parallel;
        assess(self.prompt, &candidate, &Settings { mode, parallel_loads, ..Settings::default() })
    }

    fn timed(&self) -> Assessment {
        self.assess(Mode::Timed)
    }

    /// The best by trying every number of blocks.
    fn tried(&self) -> (u32, f64) {
        let prefill = Prefill { linear_ms: self.prefill_ms, quadratic_ms: self.quadratic_ms };
        let found = self.segments.iter().map(|s| s.blocks).sum::<u32>();
        let found = found.min(self.prompt - self.device.min(self.prompt));
        let mut best = (0, 0.0);
        for blocks in 1..=found {
            let mut left = blocks;
            let mut loads = std::collections::BTreeMap::new();
            for segment in &self.segments {
                let taken = segment.blocks.min(left);
                left -= taken;
                if taken > 0 {
                    let load = loads.entry(segment.source).or_insert((segment.cost, 0));
                    load.1 += taken;
                }
            }
            let each = loads.values().map(|(cost, blocks)| cost.ms(*blocks));
            let load: f64 = if self.parallel { each.fold(0.0, f64::max) } else { each.sum() };
            let saved = prefill.ms(self.device, self.device + blocks) - load;
            if saved > best.1 + 1e-9 {
                best = (blocks, saved);
            }
        }
        best
    }
}

fn any() -> impl Strategy<Value = Any> {
    let cost = (0.0..50.0, 0.0..40.0, 0.0..12.0)
        .prop_map(|(queue_ms, setup_ms, block_ms)| LoadCost { queue_ms, setup_ms, block_ms });
    let tier = prop_oneof![Just(Tier::Dram), Just(Tier::Nvme), Just(Tier::Object)];
    let costs = proptest::array::uniform3(cost);
    let pieces = proptest::collection::vec((1_u32..30, tier), 0..6);
    (0_u32..120, 0_u32..120, 0.1..10.0, prop_oneof![Just(0.0), 0.0..0.2], costs, pieces, any_bool())
        .prop_map(|(prompt, device, prefill_ms, quadratic_ms, costs, pieces, parallel)| {
            let of = |(blocks, tier): (u32, Tier)| {
                let source = Tier::ALL.iter().position(|known| *known == tier).unwrap();
                let cost = costs[source];
                Segment { blocks, tier, source: u32::try_from(source).unwrap(), cost }
            };
            let segments = pieces.into_iter().map(of).collect();
            let device = device.min(prompt);
            Any { prompt, device, prefill_ms, quadratic_ms, segments, parallel }
        })
}

fn any_bool() -> impl Strategy<Value = bool> {
    proptest::bool::ANY
}

proptest! {
    #[test]
    fn the_best_number_of_blocks_is_that_of_trying_them_all(any in any()) {
        let (blocks, saved) = any.tried();
        let timed = any.timed();
        prop_assert!((timed.saved_ms - saved).abs() < 1e-6, "{timed:?} against {saved}");
        prop_assert!(timed.best_blocks <= blocks || timed.saved_ms > saved, "{timed:?}: {blocks}");
    }

    #[test]
    fn without_tiers_it_is_the_published_cost(mut any in any()) {
        any.segments.clear();
        let cost = f64::from(any.prompt - any.device) + 3.0;
        for mode in [Mode::DeviceOnly, Mode::Constants(Weights::DYNAMO), Mode::Timed] {
            prop_assert!((any.assess(mode).cost - cost).abs() < 1e-9);
        }
    }

    #[test]
    fn credit_is_at_most_what_was_found(any in any()) {
        for mode in [Mode::Constants(Weights::DYNAMO), Mode::Timed] {
            let assessed = any.assess(mode);
            prop_assert!(assessed.credit_blocks >= 0.0);
            prop_assert!(assessed.credit_blocks <= f64::from(assessed.found_blocks) + 1e-9);
            prop_assert!(assessed.found_blocks <= any.prompt - any.device);
            prop_assert!((0.0..=1.0).contains(&assessed.score));
        }
    }

    #[test]
    fn credit_falls_with_what_loading_costs_and_grows_with_prefill(
        any in any(), more in 0.0..20.0_f64, which in 0_usize..3,
    ) {
        let credit = any.timed().credit_blocks;
        let mut slower = any.clone();
        for segment in &mut slower.segments {
            let cost = &mut segment.cost;
            *[&mut cost.queue_ms, &mut cost.setup_ms, &mut cost.block_ms][which] += more;
        }
        prop_assert!(slower.timed().credit_blocks <= credit + 1e-9);
        let linear = Any { quadratic_ms: 0.0, ..any };
        let dearer = Any { prefill_ms: linear.prefill_ms + more, ..linear.clone() };
        prop_assert!(dearer.timed().credit_blocks >= linear.timed().credit_blocks - 1e-9);
    }

    #[test]
    fn blocks_that_are_there_too_never_raise_the_cost(any in any(), blocks in 1_u32..30) {
        let mut longer = any.clone();
        if let Some(last) = longer.segments.last_mut() {
            last.blocks += blocks;
        }
        prop_assert!(longer.timed().cost <= any.timed().cost + 1e-9);
        let mut another = any.clone();
        another.segments.push(Segment { source: 9, ..segment(blocks, Tier::Object, OBJECT) });
        prop_assert!(another.timed().cost <= any.timed().cost + 1e-9);
    }

    #[test]
    fn what_loads_no_faster_than_prefill_gives_no_credit(mut any in any(), slower in 0.0..5.0_f64) {
        any.quadratic_ms = 0.0;
        any.parallel = false;
        for segment in &mut any.segments {
            segment.cost.block_ms = any.prefill_ms + slower;
        }
        let timed = any.timed();
        prop_assert!(timed.credit_blocks.abs() < 1e-9 && timed.best_blocks == 0, "{timed:?}");
    }

    #[test]
    fn the_first_of_the_cheapest_is_taken(
        costs in proptest::collection::vec(0_u8..4, 1..20), uniform in 0.0..1.0_f64,
    ) {
        let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
        let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
        let first = costs.iter().position(|cost| *cost <= least);
        prop_assert_eq!(pick(&costs, 0.0, uniform), first);
        let shares = probabilities(&costs, 0.5);
        prop_assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        prop_assert!(pick(&costs, 0.5, uniform).is_some_and(|at| shares[at] > 0.0));
    }
}
