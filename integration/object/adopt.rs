//! `kvstrata adopt` on a real S3 server: a node is gone for good, and another serves what it stored.

use std::{
    net::SocketAddr,
    process::{Command, Output, Stdio},
};

use super::{
    server::{BUCKET, S3Server},
    tier::{SEALED, builder, connect, filled, wait_found},
};
use crate::{
    harness::{SERVER_WAIT, Server, command, wait_until},
    nvme::{Home, count_right},
};

pub(super) const ADOPTIONS: &str = "kvstrata_object_adoptions_total";

/// The command, for the nodes whose packs are at `path`.
pub(super) fn adopt(endpoint: SocketAddr, path: &str, arguments: &[&str]) -> Command {
    let mut command = command(&tempfile::tempdir().unwrap());
    for setting in S3Server::environment(endpoint) {
        let (name, value) = setting.split_once('=').unwrap();
        command.env(name, value);
    }
    let url = format!("object.url=s3://{BUCKET}/{path}");
    command.args(["adopt", "--set", "nvme.path=/nowhere", "--set", &url]).args(arguments);
    command
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned()
}

/// The node with the ordinal 5, which has nothing of its own yet.
async fn start_fifth(home: &Home, s3: &S3Server, path: &str) -> Server {
    builder(home, s3.s3, path).set("node.name", "node-5").start().await
}

#[tokio::test]
async fn a_node_that_is_gone_for_good_is_replaced_by_another_until_it_is_back() {
    let test = "a_node_that_is_gone_for_good_is_replaced_by_another_until_it_is_back";
    let Some(s3) = S3Server::of_all_tests(test).await else { return };
    let (home, server, wire) = filled(s3, test).await;
    drop(wire);
    server.kill();

    let refused = adopt(s3.s3, test, &["--ordinal", "0"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("held by \"node-a\", alive"), "{}", said(&refused));
    let unknown = adopt(s3.s3, test, &["--ordinal", "77"]).output().unwrap();
    assert_eq!(unknown.status.code(), Some(64));
    assert!(said(&unknown).contains("ordinals there: 0"), "{}", said(&unknown));

    let mut adopting = adopt(s3.s3, test, &["--ordinal", "0", "--force"]);
    let adopting = adopting.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let fifth_home = home.beside();
    let fifth = start_fifth(&fifth_home, s3, test).await;
    let adopted = tokio::task::spawn_blocking(|| adopting.wait_with_output().unwrap());
    let adopted = said(&adopted.await.unwrap());
    assert!(adopted.contains("ordinal 0: node-5 has adopted it:"), "{adopted}");
    assert!(!adopted.contains(" 0 packs") && !adopted.contains(" 0 blocks"), "{adopted}");
    wait_until("the packs are adopted", SERVER_WAIT, async || fifth.metric(ADOPTIONS).await >= 1.0)
        .await;
    let mut wire = connect(&fifth).await;
    assert_eq!(count_right(&mut wire, 0..SEALED).await as u64, SEALED);
    assert!(fifth.metric("kvstrata_object_read_run_blocks_total").await >= SEALED as f64);
    assert_eq!(fifth.metric("kvstrata_object_packs_made_total").await, 0.0);
    drop(wire);

    // Back after all, without its disk.
    std::fs::remove_dir_all(home.tier()).unwrap();
    let back = builder(&home, s3.s3, test).start().await;
    wait_found(&back, SEALED).await;
    let mut wire = connect(&back).await;
    assert_eq!(count_right(&mut wire, 0..SEALED).await as u64, SEALED);
    drop(wire);
    back.stop(&[]).await;
    fifth.stop(&[]).await;
}

#[test]
fn what_cannot_be_adopted_is_said() {
    let run = |arguments: &[&str]| {
        let mut command = command(&tempfile::tempdir().unwrap());
        let output = command.arg("adopt").args(arguments).output().unwrap();
        (output.status.code(), said(&output))
    };
    for (arguments, told) in [
        (vec!["--ordinal", "1"], "object.url"),
        (vec![], "--ordinal <N>"),
        (vec!["--ordinal", "many"], "invalid digit"),
        (vec!["--ordinal", "1", "--set", "cluster.name=A"], "cluster.name"),
    ] {
        let (code, said) = run(&arguments);
        assert_eq!(code, Some(64), "{arguments:?}: {said}");
        assert!(said.contains(told), "{arguments:?}: {said}");
    }
}
