//! `kvstrata replay` against a cluster behind TLS, for two tenants at once: every byte is right, nearly all
//! that could be found is, and nothing of the other tenant.
//!
//! `KVSTRATA_REPLAY_TRACE` names a trace of which all requests are replayed, `KVSTRATA_REPLAY_DRAM` what each node
//! has for it: room for the blocks of both tenants, at every node.

use std::{
    env,
    path::PathBuf,
    process::{Output, Stdio},
};

use kvstrata::{
    sim::unbounded_hits,
    trace::{ReadOptions, Trace, read},
};
use serde_json::Value;

use super::{
    A, B,
    nodes::{MODES, Nodes},
};
use crate::{harness::command, replay::sample};

/// Requests of the sample: enough that sessions come back, few enough for a machine that is busy.
const REQUESTS: usize = 200;
/// Of what could be found, engines with other homes miss what was put a moment before.
const HITS_MIN: f64 = 0.6;

/// What is replayed.
struct Plan {
    file: PathBuf,
    requests: Option<usize>,
    dram: String,
}

impl Plan {
    fn new() -> Self {
        let dram = env::var("KVSTRATA_REPLAY_DRAM").unwrap_or_else(|_| "192MiB".to_owned());
        match env::var_os("KVSTRATA_REPLAY_TRACE") {
            Some(file) => Self { file: file.into(), requests: None, dram },
            None => Self { file: sample(), requests: Some(REQUESTS), dram },
        }
    }

    fn trace(&self) -> Trace {
        let options = ReadOptions { requests_max: self.requests, ..ReadOptions::default() };
        read(&self.file, &options).unwrap()
    }
}

/// A replay that is running.
struct Running {
    process: std::process::Child,
    _home: tempfile::TempDir,
}

impl Running {
    fn start(nodes: &Nodes, plan: &Plan, (token, instance): (&str, &str), how: &[&str]) -> Self {
        let home = tempfile::tempdir().unwrap();
        let endpoints: Vec<_> =
            (0..nodes.count()).map(|number| nodes.node(number).grpc().to_owned()).collect();
        let mut replay = command(&home);
        replay
            .env("KVSTRATA_TOKEN", token)
            .args(["replay", "--json", "--instance", instance, "--endpoint", &endpoints.join(",")])
            .args(["--tls-ca", &nodes.files.text("ca")])
            .args(how)
            .arg(&plan.file);
        if let Some(requests) = plan.requests {
            replay.args(["--requests", &requests.to_string()]);
        }
        let process = replay
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { process, _home: home }
    }

    /// Waits for its end; what every replay must say is checked.
    async fn end(self) -> Value {
        let Self { process, _home } = self;
        let (send, receive) = tokio::sync::oneshot::channel();
        std::thread::spawn(move || {
            send.send(process.wait_with_output().unwrap()).unwrap_or_default();
        });
        let Output { status, stdout, stderr } = receive.await.unwrap();
        assert_eq!(status.code(), Some(0), "{}", String::from_utf8_lossy(&stderr));
        let report: Value = serde_json::from_slice(&stdout).unwrap();
        let number = |name: &str| report[name].as_u64().unwrap();
        for name in ["wrong_bytes", "corrupt_blocks", "lease_failures", "gone_blocks"] {
            assert_eq!(number(name), 0, "{name}: {report}");
        }
        assert_eq!(report["put_outcomes"]["duplicate_differs"], 0);
        let found = hits(&report) * number("block_bytes");
        assert!((1..=found).contains(&number("checked_bytes")), "{report}");
        report
    }
}

fn hits(report: &Value) -> u64 {
    report["hits_dram"].as_u64().unwrap()
}

#[tokio::test]
async fn two_tenants_at_once_replay_over_nodes_that_speak_tls() {
    let (plan, mut nodes) = (Plan::new(), Nodes::new(MODES[0]));
    for number in 0..3 {
        nodes.give(&format!("node-{number}"), &nodes.ca);
        let server = nodes.builder().dram(&plan.dram).start().await;
        nodes.take(server, "ca");
    }
    for number in 0..3 {
        nodes.wait_for(number, 3, 0).await;
    }
    let trace = plan.trace();
    let most = unbounded_hits(&trace);
    let engines = ["--block-bytes", "1KiB", "--clients", "6"];
    let running = [
        Running::start(&nodes, &plan, (A, "engine-a"), &engines),
        Running::start(&nodes, &plan, (B, "engine-b"), &engines),
    ];
    for running in running {
        let report = running.end().await;
        let found = hits(&report);
        let ratio = found as f64 / most as f64;
        println!("{found} of {most} hits, {} of them on other nodes", report["hits_remote"]);
        assert!((HITS_MIN..=1.0).contains(&ratio), "{found} of {most}");
        assert!(report["hits_remote"].as_u64().unwrap() > 0, "{report}");
    }
    // One engine each finds exactly what it has put itself, though the other has put the same before.
    for one in [(A, "one-a"), (B, "one-b")] {
        let report = Running::start(&nodes, &plan, one, &["--block-bytes", "512B"]).end().await;
        let stored = report["put_outcomes"]["stored"].as_u64().unwrap();
        assert_eq!((hits(&report), stored), (most, u64::from(trace.blocks_unique())), "{one:?}");
        assert_eq!(report["put_outcomes"]["duplicate"], 0, "{one:?}");
    }
    nodes.stop(&["member"]).await;
}
