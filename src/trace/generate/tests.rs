//! A generated trace has the shape it promises.

use std::collections::HashMap;

use super::*;
use crate::{
    sim::{ratio, unbounded_hits},
    trace::{ReadOptions, Trace, read_from},
};

fn text(options: &GenerateOptions) -> Vec<u8> {
    let mut text = Vec::new();
    generate(options).unwrap().write(&mut text).unwrap();
    text
}

fn trace(options: &GenerateOptions) -> Trace {
    read_from(&text(options)[..], "generated", &ReadOptions::default()).unwrap()
}

/// Milliseconds between uses of a block, over all references, ascending.
fn reuse_times(trace: &Trace) -> Vec<u64> {
    let mut last = vec![u64::MAX; trace.blocks_unique() as usize];
    let mut times = Vec::new();
    for request in trace.requests() {
        for block in request.blocks() {
            let before = std::mem::replace(&mut last[block as usize], request.timestamp_ms);
            if before != u64::MAX {
                times.push(request.timestamp_ms - before);
            }
        }
    }
    times.sort_unstable();
    times
}

#[test]
fn equal_options_give_equal_bytes_and_other_seeds_do_not() {
    let options = GenerateOptions { sessions: 20, ..GenerateOptions::default() };
    assert_eq!(text(&options), text(&options));
    assert_ne!(text(&options), text(&GenerateOptions { seed: 2, ..options }));
}

#[test]
fn a_day_looks_like_real_coding_agents() {
    let generated = generate(&GenerateOptions::default()).unwrap();
    let trace = trace(&GenerateOptions::default());
    assert_eq!(trace.len(), generated.requests());
    assert_eq!(trace.references(), generated.references());
    assert_eq!(u64::from(trace.blocks_unique()), generated.blocks_unique());
    assert_eq!(trace.repeats_dropped(), 0);

    let hits = ratio(unbounded_hits(&trace), trace.references());
    let input: u64 = trace.requests().map(|request| u64::from(request.input_tokens)).sum();
    let output: u64 = trace.requests().map(|request| u64::from(request.output_tokens)).sum();
    let mut turns = HashMap::new();
    for request in trace.requests() {
        *turns.entry(request.session).or_insert(0) += 1;
    }
    let times = reuse_times(&trace);
    let (median, p99) = (times[times.len() / 2], times[times.len() / 100 * 99]);
    let longest = turns.values().max().copied().unwrap();
    let shape = format!(
        "{trace:?}: hits {hits:.4}, input to output {}, longest session {longest}, reuse p50 {median} ms p99 \
         {p99} ms max {} ms",
        input / output,
        times.last().unwrap()
    );
    println!("{shape}");
    assert!((0.94..0.99).contains(&hits), "{shape}");
    assert!((80..=125).contains(&(input / output)), "{shape}");
    assert!((10_000..40_000).contains(&median), "{shape}");
    assert!((800_000..3_400_000).contains(&p99), "{shape}");
    assert!(*times.last().unwrap() > 8 * 3_600_000, "{shape}");
    assert!(longest > 1000, "{shape}");
}

#[test]
fn heavy_sessions_go_from_64k_to_480k_tokens_in_five_turns() {
    let trace = trace(&GenerateOptions { sessions: 200, ..GenerateOptions::default() });
    let mut contexts: HashMap<u32, Vec<u32>> = HashMap::new();
    for request in trace.requests() {
        contexts.entry(request.session.unwrap()).or_default().push(request.input_tokens);
    }
    let heavy = contexts.values().filter(|tokens| {
        tokens.len() >= 5
            && (60_000..70_000).contains(&tokens[0])
            && (455_000..=500_000).contains(&tokens[4])
    });
    assert!(heavy.count() >= 5);
    assert!(trace.requests().all(|request| request.input_tokens <= 500_000));
}

#[test]
fn a_block_has_one_predecessor() {
    let trace = trace(&GenerateOptions { sessions: 60, ..GenerateOptions::default() });
    let mut predecessors = vec![None; trace.blocks_unique() as usize];
    for request in trace.requests() {
        let mut before = u32::MAX;
        for block in request.blocks() {
            let known = predecessors[block as usize].get_or_insert(before);
            assert_eq!(*known, before);
            before = block;
        }
    }
}

#[test]
fn options_out_of_range_are_all_named() {
    let options = GenerateOptions { sessions: 0, tools: 65, ..GenerateOptions::default() };
    let error = generate(&options).unwrap_err().to_string();
    assert!(error.contains("sessions: 0 given, 1 to 100000 allowed"), "{error}");
    assert!(error.contains("tools: 65 given, 1 to 64 allowed"), "{error}");
}
