//! The `simulate` command, and what it finds on published traces.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::Value;

use crate::{
    shared_data,
    traces::{CLAUDE_CODE, CONVERSATION},
};

/// All modes, in the order of tables.
const MODES: [&str; 6] =
    ["round-robin", "least-loaded", "device-only", "constants", "timed", "first-token"];

fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/sample-trace.jsonl.zst")
}

fn simulate(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvstrata")).arg("simulate").args(args).output().unwrap()
}

fn simulate_ok(args: &[&str]) -> String {
    let output = simulate(args);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The rows of the first trace at the first speed.
fn rows(args: &[&str]) -> Vec<Value> {
    let text = simulate_ok(&[args, &["--json"]].concat());
    let report: Value = serde_json::from_str(&text).unwrap();
    report["traces"][0]["loads"][0]["rows"].as_array().unwrap().clone()
}

fn number(rows: &[Value], mode: &str, field: &str) -> f64 {
    let row = rows.iter().find(|row| row["mode"] == mode).unwrap();
    row[field].as_f64().unwrap()
}

#[test]
fn simulate_needs_no_flags_and_gives_the_same_again() {
    let path = sample();
    let path = path.to_str().unwrap();
    let text = simulate_ok(&[path]);
    assert_eq!(text, simulate_ok(&[path]));
    for expected in ["qwen3-32b", "at 1 times the speed", "at 2 times the speed", "407 requests"] {
        assert!(text.contains(expected), "{expected} missing in\n{text}");
    }
    for mode in MODES {
        assert_eq!(text.matches(mode).count(), 2, "{mode} in\n{text}");
    }
}

#[test]
fn all_blocks_come_from_somewhere_and_tiers_leave_less_to_compute() {
    let path = sample();
    let path = path.to_str().unwrap();
    let with = rows(&[path, "--speedup", "2"]);
    let without = rows(&[path, "--speedup", "2", "--no-tiers"]);
    for mode in MODES {
        let share = |field| number(&with, mode, field);
        let sum = share("device") + share("dram") + share("nvme") + share("object");
        assert!((sum + share("computed") - 1.0).abs() < 1e-9, "{mode}");
        assert!(share("mean_ms") <= share("p99_ms") && share("busy") <= share("busiest"));
        assert!(share("dram") > 0.0 && number(&without, mode, "dram") == 0.0);
        let computed = number(&without, mode, "recomputed_tokens");
        assert!(share("recomputed_tokens") < computed, "{mode}");
    }
    let known = without.iter().find(|row| row["mode"] == "device-only").unwrap();
    for mode in ["constants", "timed"] {
        let row = without.iter().find(|row| row["mode"] == mode).unwrap();
        assert_eq!(row["mean_ms"], known["mean_ms"], "{mode} without tiers");
    }
}

#[test]
fn simulate_draws_traces_side_by_side() {
    let path = sample();
    let path = path.to_str().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let charts = folder.path().join("charts");
    simulate_ok(&[path, path, "--speedup", "1,2,4", "--svg", charts.to_str().unwrap()]);
    for (name, expected) in [("first-token.svg", "p99"), ("sources.svg", "computed")] {
        let svg = std::fs::read_to_string(charts.join(name)).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains(expected), "{name}");
        assert!(svg.contains("first-token") && svg.contains("width=\"1240\""), "{name}");
    }
}

#[test]
fn simulate_refuses_what_it_cannot_use_and_says_why() {
    let path = sample();
    let path = path.to_str().unwrap();
    let cases: [(&[&str], &str); 13] = [
        (&["/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
        (&[path, "--modes", "fastest"], "first-token allowed"),
        (&[path, "--speedup", "0"], "speedup: 0 given, above 0"),
        (&[path, "--workers", "0"], "workers: 0 given, 1 to 1024"),
        (&[path, "--model", "llama-3-70b"], "--prefill-rate"),
        (&[path, "--prefill-rate", "0"], "prefill rate: 0 given, above 0"),
        (&[path, "--decode-rate=-1"], "decode rate: -1 given"),
        (&[path, "--decode-weight=-1"], "decode weight: -1 given"),
        (&[path, "--tiers", "ram=1%"], "dram=CAPACITY"),
        (&[path, "--bandwidth", "disk=1GB"], "place: disk=1GB given"),
        (&[path, "--bandwidth", "nvme=0"], "bandwidth: 0 given"),
        (&[path, "--setup", "nvme=soon"], "setup: soon given"),
        (&[path, "--weights", "dram=2"], "weights: 2 given, 0 to 1"),
    ];
    for (args, expected) in cases {
        let output = simulate(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains(expected), "{args:?}: {error}");
    }
}

/// The mean and the p99 of each mode, in the order of `modes`, each at most a hundredth above the next.
fn assert_order(rows: &[Value], measure: &str, modes: &[&str]) {
    for pair in modes.windows(2) {
        let [less, more] = [pair[0], pair[1]].map(|mode| number(rows, mode, measure));
        assert!(less <= 1.01 * more, "{measure}: {} {less:.0}, {} {more:.0}", pair[0], pair[1]);
    }
}

#[test]
fn modes_rank_as_documented_on_conversations() {
    let test = "modes_rank_as_documented_on_conversations";
    let Some(path) = shared_data::find(test, CONVERSATION) else { return };
    let rows = rows(&[path.to_str().unwrap(), "--speedup", "2"]);
    let order = ["first-token", "timed", "constants", "device-only", "least-loaded", "round-robin"];
    assert_order(&rows, "mean_ms", &order);
    assert_order(&rows, "p99_ms", &["timed", "least-loaded", "round-robin"]);
}

#[test]
fn modes_rank_as_documented_on_coding_agents() {
    let test = "modes_rank_as_documented_on_coding_agents";
    let Some(path) = shared_data::find(test, CLAUDE_CODE) else { return };
    let args = [path.to_str().unwrap(), "--speedup", "4", "--requests", "12000"];
    let rows = rows(&args);
    for measure in ["mean_ms", "p99_ms"] {
        assert_order(&rows, measure, &["timed", "constants", "least-loaded", "round-robin"]);
        assert_order(&rows, measure, &["timed", "device-only", "least-loaded"]);
    }
}
