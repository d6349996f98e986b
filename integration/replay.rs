//! Replay through a live server process: exact hits, right bytes, and failures that are noticed.

use std::{
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use kvstrata::{
    sim::{Policy, simulate, unbounded_hits},
    trace::{ReadOptions, read},
};
use serde_json::Value;
use tokio::time::Instant;

use crate::{
    client::pattern,
    fake::{Fake, Lie},
    harness::{SERVER_WAIT, command},
    shared_data,
    traces::{CLAUDE_CODE, CONVERSATION},
};

const KV_SAMPLE: &str = "kv/agent_b16.kv";
/// Blocks that the sample's requests name, and how many of them were named before.
const SAMPLE_REFERENCES: u64 = 490_625;
const SAMPLE_HITS: u64 = 449_394;
/// Replays keep up to 800 MiB of blocks and two busy processes each.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// How a replay ended.
pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) report: Value,
    pub(crate) errors: String,
}

impl Ended {
    pub(crate) fn number(&self, pointer: &str) -> u64 {
        self.report.pointer(pointer).and_then(Value::as_u64).unwrap()
    }

    fn hits(&self) -> u64 {
        self.number("/hits_dram")
    }

    /// Every replay of an honest server must pass this.
    fn assert_right(&self) {
        assert_eq!(self.code, Some(0), "{}", self.errors);
        let answered = ["/hits_dram", "/hits_nvme", "/hits_object", "/pending", "/misses"];
        let answered: u64 = answered.iter().map(|name| self.number(name)).sum();
        assert_eq!(answered, self.number("/references"));
        let bytes = self.hits() * self.number("/block_bytes");
        assert_eq!((self.number("/checked_bytes"), self.number("/wrong_bytes")), (bytes, 0));
        for name in ["/put_outcomes/duplicate_differs", "/lease_failures", "/corrupt_blocks"] {
            assert_eq!(self.number(name), 0, "{name}");
        }
    }
}

/// Runs `kvstrata replay --json`; what it leaves behind in its directory fails the test.
pub(crate) fn replay(trace: &Path, arguments: &[&str]) -> Ended {
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let output = command(&directory)
        .env("TMPDIR", directory.path())
        .args(["replay", "--json"])
        .arg(trace)
        .args(arguments)
        .output()
        .unwrap();
    let left: Vec<_> = fs::read_dir(directory.path()).unwrap().collect();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(left.is_empty(), "left behind: {left:?}\n{errors}");
    Ended {
        code: output.status.code(),
        report: serde_json::from_slice(&output.stdout).unwrap_or_default(),
        errors,
    }
}

pub(crate) fn sample() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/sample-trace.jsonl.zst")
}

#[test]
fn our_sample_has_its_known_hits() {
    let trace = read(&sample(), &ReadOptions::default()).unwrap();
    let ended =
        replay(&sample(), &["--block-bytes", "1KiB", "--dram", "128MiB", "--memory", "1GiB"]);
    ended.assert_right();
    assert_eq!((ended.number("/references"), ended.hits()), (SAMPLE_REFERENCES, SAMPLE_HITS));
    assert_eq!(unbounded_hits(&trace), SAMPLE_HITS);
    assert_eq!(ended.number("/put_outcomes/stored"), u64::from(trace.blocks_unique()));
}

#[test]
fn sampled_bytes_are_checked_too() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("blocks.kv");
    fs::write(&file, pattern(1, 0, 100_000)).unwrap();
    let file = file.to_str().unwrap();
    let arguments = ["--kv-sample", file, "--block-bytes", "4KiB", "--requests", "60"];
    let ended = replay(&sample(), &arguments);
    ended.assert_right();
    assert!(ended.hits() > 0);
}

#[test]
fn a_server_with_tokens_and_tls_passes_over_every_path() {
    let trace = read(&sample(), &ReadOptions { requests_max: Some(60), ..Default::default() });
    let expected = unbounded_hits(&trace.unwrap());
    for path in ["grpc", "bulk", "shm"] {
        let arguments = ["--tls", "--path", path, "--block-bytes", "16KiB", "--requests", "60"];
        let ended = replay(&sample(), &[arguments.as_slice(), &["--dram", "256MiB"]].concat());
        ended.assert_right();
        assert_eq!(ended.hits(), expected, "{path}");
    }
}

#[test]
fn real_kv_blocks_come_back_unchanged() {
    let test = "real_kv_blocks_come_back_unchanged";
    let (Some(trace), Some(sample)) =
        (shared_data::find(test, CONVERSATION), shared_data::find(test, KV_SAMPLE))
    else {
        return;
    };
    // One 16-token block of SmolLM2-135M in bf16: 30 layers x K and V x 16 x 3 x 64 x 2 bytes.
    let arguments = ["--kv-sample", sample.to_str().unwrap(), "--block-bytes", "368640B"];
    let limits = ["--requests", "150", "--dram", "1536MiB", "--memory", "3GiB", "--clients", "2"];
    let ended = replay(&trace, &[arguments.as_slice(), &limits].concat());
    ended.assert_right();
    assert!(ended.hits() > 0);
}

#[test]
fn conversation_hits_are_exact_with_one_client_and_enough_dram() {
    let test = "conversation_hits_are_exact_with_one_client_and_enough_dram";
    let Some(trace) = shared_data::find(test, CONVERSATION) else { return };
    let ended = replay(&trace, &["--block-bytes", "4KiB", "--dram", "768MiB", "--memory", "2GiB"]);
    ended.assert_right();
    assert_eq!((ended.hits(), ended.number("/references")), (105_710, 288_500));
    assert_eq!(ended.number("/evicted_blocks"), 0);
}

#[test]
fn eight_clients_lose_almost_no_hits_and_no_byte() {
    let test = "eight_clients_lose_almost_no_hits_and_no_byte";
    let Some(trace) = shared_data::find(test, CONVERSATION) else { return };
    let sizes = ["--block-bytes", "4KiB", "--dram", "768MiB", "--memory", "2GiB"];
    let ended = replay(&trace, &[sizes.as_slice(), &["--clients", "8"]].concat());
    ended.assert_right();
    assert!(ended.hits() <= 105_710);
    assert!(ended.hits() * 1000 >= 105_710 * 999, "{} hits", ended.hits());
}

#[test]
fn a_small_dram_hits_what_planning_says() {
    let test = "a_small_dram_hits_what_planning_says";
    let Some(path) = shared_data::find(test, CONVERSATION) else { return };
    // A tenth of the 182,790 distinct blocks is 71.4 MiB; dram comes in whole extents.
    let ended = replay(&path, &["--block-bytes", "4KiB", "--dram", "72MiB", "--memory", "1GiB"]);
    ended.assert_right();
    let trace = read(&path, &ReadOptions::default()).unwrap();
    let capacity = ended.number("/opt/capacity_blocks");
    assert!(capacity.abs_diff(18_279) < 400, "{capacity} blocks");
    let planned = simulate(&trace, Policy::Lru, u32::try_from(capacity).unwrap()).hit_ratio();
    let live = ended.report["hit_ratio"].as_f64().unwrap();
    assert!((live - planned).abs() <= 0.005, "live {live:.4}, planned {planned:.4}");
    assert!(ended.report["ratio_to_opt"].as_f64().unwrap() <= 1.0);
}

#[test]
fn the_head_of_claude_code_is_right_in_long_lookups() {
    let test = "the_head_of_claude_code_is_right_in_long_lookups";
    let Some(path) = shared_data::find(test, CLAUDE_CODE) else { return };
    let arguments = ["--requests", "300", "--block-bytes", "4KiB"];
    let ended =
        replay(&path, &[arguments.as_slice(), &["--dram", "256MiB", "--memory", "1GiB"]].concat());
    ended.assert_right();
    let options = ReadOptions { requests_max: Some(300), ..ReadOptions::default() };
    let trace = read(&path, &options).unwrap();
    assert_eq!(ended.hits(), unbounded_hits(&trace));
    assert!(ended.number("/lookup_hashes_max") > 10_000);
}

#[test]
fn every_lie_of_a_server_is_noticed() {
    for (lie, noticed) in [
        (Lie::ForgedByte, "wrong bytes: "),
        (Lie::FlippedByte, "failed verification at the client: "),
        (Lie::BrokenPromise, "promised under a lease and not delivered: "),
        (Lie::AlwaysMiss, "stored by the only client and not found"),
        (Lie::FoundAndGone, "blocks found and gone, although nothing was evicted: "),
        (Lie::Differs, "duplicate_differs: "),
        (Lie::WrongSum, "broke the contract"),
        (Lie::ShortStream, "broke the contract"),
    ] {
        let fake = Fake::start(lie);
        let endpoint = fake.endpoint();
        let arguments = ["--endpoint", &endpoint, "--block-bytes", "64B", "--requests", "4"];
        let ended = replay(&sample(), &arguments);
        assert_eq!(ended.code, Some(1), "{lie:?}");
        assert!(ended.errors.contains(noticed), "{lie:?}: {}", ended.errors);
    }
}

#[test]
fn a_server_that_always_misses_is_noticed_by_many_clients_too() {
    let fake = Fake::start(Lie::AlwaysMiss);
    let endpoint = fake.endpoint();
    let arguments = ["--endpoint", &endpoint, "--block-bytes", "64B", "--requests", "4"];
    let ended = replay(&sample(), &[arguments.as_slice(), &["--clients", "4"]].concat());
    assert_eq!(ended.code, Some(1));
    assert!(ended.errors.contains("blocks stored again"), "{}", ended.errors);
}

#[test]
fn an_honest_fake_passes() {
    let fake = Fake::start(Lie::None);
    let endpoint = fake.endpoint();
    let arguments = ["--endpoint", &endpoint, "--block-bytes", "64B", "--requests", "4"];
    replay(&sample(), &arguments).assert_right();
}

/// The process that `parent` started.
fn child_of(parent: u32) -> rustix::process::Pid {
    let started = Instant::now();
    while started.elapsed() < SERVER_WAIT {
        // The replay starts its server on any of its threads.
        let children = fs::read_dir(format!("/proc/{parent}/task")).unwrap().map(|thread| {
            fs::read_to_string(thread.unwrap().path().join("children")).unwrap_or_default()
        });
        let found: String = children.collect();
        if let Some(pid) = found.split_whitespace().next() {
            return rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
        }
    }
    panic!("{parent} started no process");
}

#[test]
fn a_server_that_dies_ends_the_replay_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let mut replay = command(&directory)
        .env("TMPDIR", directory.path())
        .args(["replay", "--block-bytes", "4KiB", "--dram", "256MiB", "--memory", "1GiB"])
        .arg(sample())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let server = child_of(replay.id());
    // Whoever opens a namespace was told where, and that it is ready: one that dies before has not started.
    let log = || {
        let mut folders = fs::read_dir(directory.path()).unwrap();
        let log = folders.next().map(|folder| folder.unwrap().path().join("server.log"));
        log.and_then(|log| fs::read_to_string(log).ok()).unwrap_or_default()
    };
    let started = Instant::now();
    while !log().contains("namespace opened") {
        assert!(started.elapsed() < SERVER_WAIT, "{}", log());
    }
    rustix::process::kill_process(server, rustix::process::Signal::KILL).unwrap();
    let killed = Instant::now();
    let mut errors = String::new();
    replay.stderr.take().unwrap().read_to_string(&mut errors).unwrap();
    assert_eq!(replay.wait().unwrap().code(), Some(1));
    assert!(killed.elapsed() < Duration::from_secs(10), "{:?}", killed.elapsed());
    assert!(errors.contains("signal: 9"), "{errors}");
}

#[test]
fn a_server_that_does_not_start_is_told_with_its_log() {
    let ended = replay(&sample(), &["--dram", "1GiB", "--memory", "512MiB"]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.errors.contains("its log ends with"), "{}", ended.errors);
    let ended = replay(&sample(), &["--clients", "0"]);
    assert_eq!(ended.code, Some(64));
    assert!(ended.errors.contains("--clients: 0 given, 1 to 1024"), "{}", ended.errors);
}
