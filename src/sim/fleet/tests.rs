//! Small fleets whose figures can be said in advance.

use super::*;
use crate::trace::generate::{GenerateOptions, generate};

fn setup(nodes: u32, engines: u32) -> Setup {
    Setup { nodes, engines, zones: 3, node_blocks: 1000, moves: 0.0, lost_at_ms: None, seed: 1 }
}

/// The same prompt again and again, a second apart, from any engine.
fn repeated(requests: usize) -> Trace {
    let prompt: Vec<u32> = (0..50).collect();
    Trace::of(&vec![&prompt[..]; requests])
}

#[test]
fn one_node_asks_nobody_and_finds_what_it_has() {
    let outcome = simulate(&repeated(10), &setup(1, 4), &|_| {}).unwrap();
    assert_eq!((outcome.asked_blocks, outcome.own_blocks, outcome.found_blocks), (500, 450, 450));
    assert_eq!((outcome.asking(), outcome.partial, outcome.nothing), (0, 0, 0));
    assert_eq!(outcome.by_rounds, [10]);
}

#[test]
fn what_one_node_has_the_others_find_a_second_later() {
    let outcome = simulate(&repeated(100), &setup(10, 40), &|_| {}).unwrap();
    assert!(outcome.own_blocks < outcome.found_blocks);
    assert_eq!(outcome.found_blocks, 99 * 50, "all but the first");
    // Until each home has it, one question finds all of it.
    assert_eq!(outcome.by_rounds.len(), 2);
    let missed = outcome.found_blocks - outcome.own_blocks;
    assert_eq!(outcome.asking(), missed / 50 + u64::from(outcome.nothing > 0));
    assert!(outcome.asking() <= 10 && outcome.members_quantile(1.0) <= FANOUT_ROUNDS_MAX * 4);
    assert!(outcome.engines.imbalance() <= 1.25, "{:?}", outcome.engines);
    assert_eq!((outcome.silent, outcome.partial), (0, 0));
}

#[test]
fn a_lost_node_is_silent_until_that_is_noticed_and_its_engines_move() {
    let lost = Setup { lost_at_ms: Some(50_000), ..setup(4, 16) };
    let whole = simulate(&repeated(100), &setup(4, 16), &|_| {}).unwrap();
    let outcome = simulate(&repeated(100), &lost, &|_| {}).unwrap();
    assert!((1..=5).contains(&outcome.engines_moved), "{}", outcome.engines_moved);
    // All nodes had the prompt by then, so nothing is lost that others do not have.
    assert_eq!(outcome.found_blocks, whole.found_blocks);
    assert_eq!(outcome, simulate(&repeated(100), &lost, &|_| {}).unwrap(), "equal seeds");
}

#[test]
fn a_generated_day_is_found_by_few_questions() {
    let options = GenerateOptions { sessions: 40, turns_max: 40, ..GenerateOptions::default() };
    let generated = generate(&options).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("day.jsonl");
    generated.write_file(&path).unwrap();
    let trace = crate::trace::read(&path, &crate::trace::ReadOptions::default()).unwrap();
    let setup = Setup { node_blocks: 1_000_000, moves: 0.2, ..setup(20, 40) };
    let outcome = simulate(&trace, &setup, &|_| {}).unwrap();
    let everything = crate::sim::unbounded_hits(&trace);
    assert!(outcome.found_blocks <= everything);
    let missed = everything - outcome.found_blocks;
    assert!(missed * 100 <= everything, "{missed} of {everything} not found");
    assert!(outcome.own_blocks < outcome.found_blocks, "sessions moved");
    assert!(outcome.asked_members() <= 3 * outcome.lookups);
    assert!(outcome.members_quantile(0.99) <= 12);
}

#[test]
fn what_cannot_be_is_refused_by_its_name() {
    for (wrong, field) in [
        (Setup { nodes: 0, ..setup(1, 1) }, "nodes"),
        (Setup { engines: 0, ..setup(1, 1) }, "engines"),
        (Setup { node_blocks: 0, ..setup(1, 1) }, "room"),
        (Setup { moves: 1.5, ..setup(1, 1) }, "moves"),
    ] {
        let refused = simulate(&repeated(1), &wrong, &|_| {}).unwrap_err().to_string();
        assert!(refused.starts_with(field), "{refused}");
    }
}
