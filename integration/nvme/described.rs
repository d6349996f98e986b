//! What was described of blocks, and the hash schemes that their namespace wishes: both survive a kill, so
//! that routers can be told of blocks, and find them by names of their own, as soon as the server is back.

use std::{fs, ops::Range};

use kvstrata_proto::v1::{DescribeRequest, OpenRequest};

use super::{Home, ON_NVME, remove, store, wait_copied};
use crate::{
    harness::{SERVER_WAIT, Server, wait_until},
    wire::{Wire, hash, hashes, namespace, open},
};

const BLOCK_TOKENS: u32 = 16;

/// The namespace with names of tokens and of parts of hashes.
async fn connect(server: &Server) -> Wire {
    let request = OpenRequest {
        keep_tokens: true,
        hash_schemes: ["dynamo", "vllm_u64"].map(str::to_owned).to_vec(),
        ..open(namespace("m"))
    };
    let opened = server.client().await.open(request).await.unwrap().into_inner();
    let wire = Wire::connect(server, namespace("m")).await;
    assert_eq!(opened.namespace_id, wire.namespace_id, "wishes are no part of the identity");
    wire
}

/// Describes blocks of one chain, all of which must be there.
async fn describe(wire: &mut Wire, numbers: Range<u32>) {
    let (first, last) = (u64::from(numbers.start), u64::from(numbers.end));
    let request = DescribeRequest {
        namespace_id: wire.namespace_id.clone(),
        hashes: hashes(first..last),
        parent: first.checked_sub(1).map(|before| hash(before).to_vec()).unwrap_or_default().into(),
        position: numbers.start,
        tokens: (numbers.start * BLOCK_TOKENS..numbers.end * BLOCK_TOKENS).collect(),
        lora_name: String::new(),
    };
    let described = wire.client.describe(request).await.unwrap().into_inner().described;
    assert_eq!(described, numbers.end - numbers.start);
}

/// Waits until so many blocks have names of tokens, and so many have those of parts of hashes.
async fn has_names(server: &Server, dynamo: f64, vllm: f64) {
    wait_until("all names are there", SERVER_WAIT, async || {
        let entries = async |scheme: &str| {
            let series = format!("kvstrata_scheme_index_entries{{scheme=\"{scheme}\"}}");
            server.metric(&series).await
        };
        (entries("dynamo").await, entries("vllm_u64").await) == (dynamo, vllm)
    })
    .await;
}

#[tokio::test]
async fn descriptions_and_wishes_survive_a_kill_and_leave_with_their_blocks() {
    let home = Home::new();
    let server = home.server().start().await;
    let mut wire = connect(&server).await;
    store(&mut wire, 0..60, false).await;
    describe(&mut wire, 0..20).await;
    wait_copied(&server, 60.0).await;
    // The first of these had not been copied yet, perhaps; these have.
    let series = "kvstrata_nvme_described_blocks_total";
    let before = server.metric(series).await;
    describe(&mut wire, 20..40).await;
    wait_until("they are written", SERVER_WAIT, async || {
        server.metric(series).await >= before + 20.0
    })
    .await;
    has_names(&server, 40.0, 60.0).await;
    assert_eq!(remove(&mut wire, 35..40).await, 5);
    has_names(&server, 35.0, 55.0).await;
    server.kill();

    // Nobody opens the namespace.
    let server = home.server().start().await;
    has_names(&server, 35.0, 55.0).await;
    let bytes = server.metric("kvstrata_scheme_index_bytes{scheme=\"dynamo\"}").await;
    assert!((35.0 * 40.0..1e6).contains(&bytes), "{bytes}");
    assert_eq!(server.metric("kvstrata_nvme_undescribed_blocks_total").await, 0.0);
    // The chain can go on from there.
    let mut wire = connect(&server).await;
    store(&mut wire, 35..38, true).await;
    describe(&mut wire, 35..38).await;
    has_names(&server, 38.0, 58.0).await;
    server.stop(&[]).await;

    // With the index the descriptions are lost; blocks and wishes are in the segments.
    fs::remove_dir_all(home.tier().join("index")).unwrap();
    let server = home.server().start().await;
    assert_eq!(server.metric(ON_NVME).await, 58.0);
    has_names(&server, 0.0, 58.0).await;
    let mut wire = connect(&server).await;
    describe(&mut wire, 0..38).await;
    has_names(&server, 38.0, 58.0).await;
    server.stop(&["index"]).await;
}

#[tokio::test]
async fn the_first_client_after_a_restart_decides_what_is_kept() {
    let home = Home::new();
    let server = home.server().start().await;
    let mut wire = connect(&server).await;
    store(&mut wire, 0..10, true).await;
    describe(&mut wire, 0..10).await;
    has_names(&server, 10.0, 10.0).await;
    server.stop(&[]).await;
    let server = home.server().start().await;
    has_names(&server, 10.0, 10.0).await;
    let plain = Wire::without_session(&server, namespace("m")).await;
    has_names(&server, 0.0, 0.0).await;
    // A later one is told what it will not get.
    let request = OpenRequest { keep_tokens: true, ..open(namespace("m")) };
    let opened = plain.client.clone().open(request).await.unwrap().into_inner();
    assert!(opened.warnings.iter().any(|it| it.contains("keep_tokens")), "{:?}", opened.warnings);
    server.stop(&[]).await;
}
