//! `kvstrata doctor` against real servers: a sound one, and one whose clients do what keeps caches from
//! working.

use std::time::Duration;

use serde_json::Value;

use crate::{
    fake::{Fake, Lie},
    harness::{SERVER_WAIT, Server, command, wait_until},
    wire::{Wire, namespace},
};

/// What doctor says of a server.
struct Said {
    findings: Vec<Value>,
    succeeded: bool,
}

impl Said {
    async fn of(server: &Server) -> Self {
        Self::of_all(server.grpc()).await
    }

    /// Of these endpoints.
    async fn of_all(endpoints: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut command = command(&directory);
        command.args(["doctor", "--json"]).env("KVSTRATA_ENDPOINT", endpoints);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let findings = serde_json::from_slice(&output.stdout).unwrap();
        Self { findings, succeeded: output.status.success() }
    }

    /// The level and the words of the findings about `what`.
    fn about(&self, what: &str) -> Vec<(String, String)> {
        let text = |finding: &Value, field: &str| finding[field].as_str().unwrap().to_owned();
        let these = self.findings.iter().filter(|finding| finding["what"] == what);
        these.map(|finding| (text(finding, "level"), text(finding, "seen"))).collect()
    }

    fn level(&self, what: &str) -> String {
        let about = self.about(what);
        assert_eq!(about.len(), 1, "{what}: {:?}", self.findings);
        about[0].0.clone()
    }
}

#[tokio::test]
async fn a_sound_server_is_said_to_be_sound_and_each_way_is_tried() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("bulk");
    let server = Server::builder()
        .dram("64MiB")
        .set("server.bulk_listen", "127.0.0.1:0")
        .set("server.bulk_unix", socket.to_str().unwrap())
        .set("server.shared_memory", "true")
        .start()
        .await;
    let mut engine = Wire::connect(&server, namespace("m")).await;
    engine.put(&[1, 2]).await;
    assert_eq!(engine.lookup([1, 2]).await.prefix_blocks, 2);

    let said = Said::of(&server).await;
    for way in ["gRPC", "bulk port", "shared memory"] {
        assert_eq!(said.level(way), "fine", "{:?}", said.about(way));
    }
    assert_eq!(said.level("server"), "fine");
    assert_eq!(said.level("bytes"), "fine");
    assert_eq!(said.level("tiers"), "note");
    assert_eq!(said.about("hits"), []);
    assert!(said.succeeded, "{:?}", said.findings);
    assert!(said.findings.iter().all(|finding| finding["level"] != "problem"));
    // What it stored to try the ways is gone again.
    let held = crate::wire::stats(&engine).await.index_blocks;
    assert_eq!(held, 2);
}

#[tokio::test]
async fn engines_with_other_roots_forgotten_leases_and_puts_without_hits_are_named() {
    let server = Server::builder().dram("64MiB").start().await;
    let mut first = Wire::connect(&server, namespace("m")).await;
    let numbers: Vec<u64> = (0..64).collect();
    first.put(&numbers).await;
    let mut seeded = namespace("m");
    seeded.hash_root = vec![2; 32].into();
    let mut second = Wire::connect(&server, seeded).await;
    second.lookup(1000..1064).await;
    let mut stray = Wire::connect(&server, namespace("stray")).await;
    stray.put(&numbers).await;
    stray.lookup(1000..1064).await;
    for _ in 0..16 {
        first.lookup_with_lease([1], Duration::from_millis(1)).await.unwrap();
    }
    let ended = async || server.metric("kvstrata_leases").await == 0.0;
    wait_until("no lease is in force", SERVER_WAIT, ended).await;

    let said = Said::of(&server).await;
    assert!(!said.succeeded);
    assert_eq!(said.level("hash root"), "problem");
    assert_eq!(said.level("leases"), "problem");
    let hits: Vec<_> = said.about("hits").into_iter().map(|(level, _)| level).collect();
    assert_eq!(hits, ["note", "problem"], "{:?}", said.findings);
    // The way that is not switched on is named, and is no problem.
    assert_eq!(said.level("shared memory"), "note");
}

/// A node of this name, with the secret that is kept in `home`.
async fn node(home: &std::path::Path, name: &str) -> Server {
    let builder = Server::builder().dram("64MiB").home(home);
    builder.set("node.name", name).set("node.zone", "z").start().await
}

#[tokio::test]
async fn every_endpoint_is_asked_and_what_differs_between_nodes_is_named() {
    let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = node(home.path(), "a").await;
    let second = node(home.path(), "b").await;
    let stranger = node(elsewhere.path(), "c").await;
    let mut seeded = namespace("m");
    seeded.hash_root = vec![2; 32].into();
    let _one = Wire::connect(&first, namespace("m")).await;
    let _other = Wire::connect(&second, seeded).await;

    let said = Said::of_all(&format!("{},{}", first.grpc(), second.grpc())).await;
    assert_eq!(said.about("member").len(), 2, "{:?}", said.findings);
    assert_eq!(said.level("secret"), "fine");
    // They share a model, not its root, and neither of them could know that.
    assert_eq!(said.level("hash root"), "problem");
    // Nobody has told them of one another.
    assert_eq!(said.level("lists"), "problem");

    let said = Said::of_all(&format!("{}, {}", first.grpc(), stranger.grpc())).await;
    assert_eq!(said.level("secret"), "problem");
    assert!(said.about("secret")[0].1.starts_with("c has another secret"), "{:?}", said.findings);
    assert!(said.about("hash root").is_empty(), "{:?}", said.findings);

    // The same node by the same address twice is one node.
    let said = Said::of_all(&format!("{0},{0}", first.grpc())).await;
    assert!(said.about("member").is_empty(), "{:?}", said.findings);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_does_not_answer_does_not_hide_the_others() {
    let home = tempfile::tempdir().unwrap();
    let first = node(home.path(), "a").await;
    // It speaks the contract, has no name, and ids of its own.
    let fake = Fake::start(Lie::None);
    let gone = "127.0.0.1:1";
    let said = Said::of_all(&format!("{},{},{gone}", first.grpc(), fake.endpoint())).await;
    assert!(!said.succeeded);
    let members = said.about("member");
    let levels: Vec<_> = members.iter().map(|(level, _)| level.as_str()).collect();
    assert_eq!(levels, ["fine", "fine", "problem"], "{members:?}");
    assert!(members[1].1.contains(&fake.endpoint()) && members[2].1.contains(gone), "{members:?}");
    let secret = said.about("secret");
    assert!(secret[0].1.contains(&fake.endpoint()), "{secret:?}");
    assert_eq!(said.level("gRPC"), "fine");
}
