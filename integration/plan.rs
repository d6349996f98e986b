//! Simulated hit ratios against the known ones.

use kvstrata::{
    sim::{Policy, simulate},
    trace::{ReadOptions, Trace},
};

use crate::traces::{CLAUDE_CODE, CONVERSATION, shared};

fn percent(trace: &Trace, percent: f64) -> u32 {
    (f64::from(trace.blocks_unique()) * percent / 100.0).round() as u32
}

/// (capacity in percent, policy, known hit ratio, tolerance)
type Known = (f64, Policy, f64, f64);

fn check(trace: &Trace, known: &[Known]) {
    for (capacity, policy, expected, tolerance) in known {
        let got = simulate(trace, *policy, percent(trace, *capacity)).hit_ratio();
        println!("{capacity} {policy} {got:.4} {expected}");
    }
    for (capacity, policy, expected, tolerance) in known {
        let got = simulate(trace, *policy, percent(trace, *capacity)).hit_ratio();
        assert!((got - expected).abs() <= *tolerance, "{policy} at {capacity} %: {got:.4}");
    }
}

#[test]
fn the_conversation_trace_has_its_known_hit_ratios() {
    let test = "the_conversation_trace_has_its_known_hit_ratios";
    let Some(trace) = shared(test, CONVERSATION, &ReadOptions::default()) else {
        return;
    };
    use Policy::{Arc, Lru, Opt, S3Fifo};
    let mut known = Vec::new();
    for (c, o, l, s, a) in [
        (0.5, 0.1829, 0.0440, 0.0549, 0.0492),
        (1., 0.2464, 0.0525, 0.0749, 0.0650),
        (2., 0.3142, 0.0793, 0.1069, 0.0909),
        (5., 0.3664, 0.1958, 0.1862, 0.2101),
        (10., 0.3664, 0.2789, 0.2445, 0.2843),
        (25., 0.3664, 0.3535, 0.3445, 0.3355),
        (50., 0.3664, 0.3631, 0.3619, 0.3627),
    ] {
        known.extend([
            (c, Opt, o, 0.0005),
            (c, Lru, l, 0.0005),
            (c, S3Fifo, s, 0.02),
            (c, Arc, a, 0.02),
        ]);
    }
    check(&trace, &known);
}
