//! Published traces read to the numbers that are known of them.

use std::path::Path;

use kvstrata::{
    sim::unbounded_hits,
    trace::{Format, ReadOptions, Trace, read},
};

use crate::shared_data;

pub(crate) const CONVERSATION: &str = "traces/mooncake_conversation.jsonl.zst";
pub(crate) const CLAUDE_CODE: &str = "traces/claude_code_24h_shared.rle.jsonl.zst";

/// A shared trace for `test`, or `None` after saying that it is not there.
pub(crate) fn shared(test: &str, name: &str, options: &ReadOptions) -> Option<Trace> {
    let path = shared_data::find(test, name)?;
    Some(read(&path, options).expect("a published trace must read"))
}

#[test]
fn the_conversation_trace_has_its_known_counts() {
    let test = "the_conversation_trace_has_its_known_counts";
    let Some(trace) = shared(test, CONVERSATION, &ReadOptions::default()) else {
        return;
    };
    assert_eq!(trace.format(), Format::Mooncake);
    assert_eq!((trace.len(), trace.block_tokens()), (12_031, 512));
    assert_eq!((trace.references(), trace.blocks_unique()), (288_500, 182_790));
    assert_eq!(trace.repeats_dropped(), 0);
    assert_eq!(unbounded_hits(&trace), 105_710);
}

#[test]
fn the_claude_code_trace_has_its_known_counts() {
    let test = "the_claude_code_trace_has_its_known_counts";
    let Some(trace) = shared(test, CLAUDE_CODE, &ReadOptions::default()) else {
        return;
    };
    assert_eq!(trace.format(), Format::RunLength);
    assert_eq!((trace.len(), trace.sessions(), trace.block_tokens()), (46_218, 692, 64));
    assert_eq!((trace.references(), trace.blocks_unique()), (85_405_325, 3_117_979));
    assert_eq!(trace.repeats_dropped(), 0);
    let longest = trace.requests().map(|request| request.blocks_count()).max();
    assert_eq!(longest, Some(13_974));
    let share = unbounded_hits(&trace) as f64 / trace.references() as f64;
    assert!((share - 0.9635).abs() < 0.00005, "{share}");
}

#[test]
fn the_head_of_the_claude_code_trace_has_its_known_counts() {
    let test = "the_head_of_the_claude_code_trace_has_its_known_counts";
    let options = ReadOptions { requests_max: Some(6_000), ..ReadOptions::default() };
    let Some(trace) = shared(test, CLAUDE_CODE, &options) else {
        return;
    };
    assert_eq!((trace.len(), trace.blocks_unique()), (6_000, 484_807));
    assert_eq!(trace.references() / 10_000, 1_246);
}

/// The committed sample.
pub(crate) fn sample() -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/sample-trace.jsonl.zst");
    read(&path, &ReadOptions::default()).expect("the sample must read")
}
