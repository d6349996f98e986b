//! `kvstrata replay` against a cluster behind TLS, for two tenants at once: every byte is right, nearly all
//! that could be found is, and nothing of the other tenant.

use std::process::{Output, Stdio};

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

/// A replay that is running.
struct Running {
    process: std::process::Child,
    _home: tempfile::TempDir,
}

impl Running {
    fn start(nodes: &Nodes, token: &str, instance: &str, arguments: &[&str]) -> Self {
        let home = tempfile::tempdir().unwrap();
        let endpoints: Vec<_> =
            (0..nodes.count()).map(|number| nodes.node(number).grpc().to_owned()).collect();
        let process = command(&home)
            .env("KVSTRATA_TOKEN", token)
            .args(["replay", "--json", "--instance", instance, "--endpoint", &endpoints.join(",")])
            .args(["--requests", &REQUESTS.to_string(), "--tls-ca", &nodes.files.text("ca")])
            .args(arguments)
            .arg(sample())
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

fn trace() -> Trace {
    let options = ReadOptions { requests_max: Some(REQUESTS), ..ReadOptions::default() };
    read(&sample(), &options).unwrap()
}

#[tokio::test]
async fn two_tenants_at_once_replay_over_nodes_that_speak_tls() {
    let mut nodes = Nodes::new(MODES[0]);
    for number in 0..3 {
        nodes.give(&format!("node-{number}"), &nodes.ca);
        let server = nodes.builder().dram("192MiB").start().await;
        nodes.take(server, "ca");
    }
    for number in 0..3 {
        nodes.wait_for(number, 3, 0).await;
    }
    let trace = trace();
    let most = unbounded_hits(&trace);
    let engines = ["--block-bytes", "1KiB", "--clients", "6"];
    let running = [
        Running::start(&nodes, A, "engine-a", &engines),
        Running::start(&nodes, B, "engine-b", &engines),
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
    for (token, instance) in [(A, "one-a"), (B, "one-b")] {
        let alone = Running::start(&nodes, token, instance, &["--block-bytes", "2KiB"]);
        let report = alone.end().await;
        let stored = report["put_outcomes"]["stored"].as_u64().unwrap();
        assert_eq!((hits(&report), stored), (most, u64::from(trace.blocks_unique())), "{instance}");
        assert_eq!(report["put_outcomes"]["duplicate"], 0, "{instance}");
    }
    nodes.stop(&["member"]).await;
}
