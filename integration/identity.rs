//! Identity over the wire: namespaces that differ in one field share nothing, and clients that
//! differ only in the hash root are told so.

use kvstrata_proto::v1::{Namespace, Part, PutOutcome, StatsRequest};
use tonic::Code;

use crate::{
    harness::Server,
    wire::{Wire, namespace, open},
};

/// The namespace of the test with one field changed, for each field.
fn variants() -> Vec<(&'static str, Namespace)> {
    let changed = |change: fn(&mut Namespace)| {
        let mut namespace = namespace("m");
        change(&mut namespace);
        namespace
    };
    vec![
        ("model", changed(|n| n.model = "other".to_owned())),
        ("weights", changed(|n| n.weights = "revision-2".to_owned())),
        ("engine", changed(|n| n.engine = "sglang".to_owned())),
        ("layout", changed(|n| n.layout = "paged-2".to_owned())),
        ("dtype", changed(|n| n.dtype = "fp16".to_owned())),
        ("block_tokens", changed(|n| n.block_tokens = 32)),
        ("parts.group", changed(|n| n.parts = vec![Part { group: 1, rank: 0, bytes: 4096 }])),
        ("parts.rank", changed(|n| n.parts = vec![Part { group: 0, rank: 1, bytes: 4096 }])),
        ("parts.bytes", changed(|n| n.parts = vec![Part { group: 0, rank: 0, bytes: 2048 }])),
        ("split", changed(|n| n.split = "heads".to_owned())),
        ("hash_algorithm", changed(|n| n.hash_algorithm = "sha256".to_owned())),
        ("hash_root", changed(|n| n.hash_root = vec![2; 32].into())),
        ("lora", changed(|n| n.lora = vec![3; 32].into())),
        ("cache_salt", changed(|n| n.cache_salt = vec![4; 8].into())),
    ]
}

#[tokio::test]
async fn namespaces_that_differ_in_one_field_share_nothing() {
    let server = Server::builder().dram("64MiB").start().await;
    let mut first = Wire::connect(&server, namespace("m")).await;
    assert_eq!(first.put(&[1, 2]).await, [PutOutcome::Stored; 2]);
    let mut same = Wire::without_session(&server, namespace("m")).await;
    assert_eq!(same.namespace_id, first.namespace_id);
    assert_eq!(same.lookup([1, 2]).await.prefix_blocks, 2);
    for (field, other) in variants() {
        let mut other = Wire::without_session(&server, other).await;
        assert_ne!(other.namespace_id, first.namespace_id, "{field}");
        assert_eq!(other.lookup([1, 2]).await.prefix_blocks, 0, "{field}");
        assert_eq!(other.get(&[1, 2]).await, [None, None], "{field}");
    }
    // The one field that is part of how hashes are written: 16 of 32 bytes are another hash.
    let mut short = namespace("m");
    short.hash_bytes = 16;
    let mut short = Wire::without_session(&server, short).await;
    let mut request = short.lookup_request([]);
    request.hashes = crate::wire::hash(1)[..16].to_vec().into();
    assert_eq!(short.client.lookup(request).await.unwrap().into_inner().prefix_blocks, 0);
}

#[tokio::test]
async fn another_hash_root_is_told_to_the_client_the_log_the_stats_and_the_metrics() {
    let server = Server::builder().dram("8MiB").start().await;
    let mut client = server.client().await;
    let first = client.open(open(namespace("m"))).await.unwrap().into_inner();
    assert!(first.warnings.is_empty(), "{:?}", first.warnings);
    let metric = "kvstrata_hash_root_mismatches";
    assert_eq!(server.metric(metric).await, 0.0);

    let mut other = namespace("m");
    other.hash_root = vec![2; 32].into();
    let second = client.open(open(other)).await.unwrap().into_inner();
    assert!(second.warnings.iter().any(|text| text.contains("root")), "{:?}", second.warnings);
    assert_eq!(server.metric(metric).await, 1.0);
    let stats = client.stats(StatsRequest {}).await.unwrap().into_inner();
    assert_eq!(stats.warnings.len(), 1);
    assert!(stats.warnings[0].contains('m') && stats.warnings[0].contains("root"));
    let roots: Vec<_> = stats.namespaces.iter().map(|n| n.hash_root.clone()).collect();
    assert_eq!(roots, ["0101010101010101", "0202020202020202"]);
    drop(client);
    let log = "namespace needs attention";
    assert!(server.log().contains(log));
    server.stop(&[log]).await;
}

#[tokio::test]
async fn an_id_means_the_same_after_a_restart_with_the_same_secret_only() {
    let secret = tempfile::tempdir().unwrap();
    let path = secret.path().join("identity");
    let path = path.to_str().unwrap();
    let id = async |builder: crate::harness::Builder| {
        let server = builder.dram("8MiB").start().await;
        Wire::without_session(&server, namespace("m")).await.namespace_id
    };
    let first = id(Server::builder().set("identity.secret_file", path)).await;
    let again = id(Server::builder().set("identity.secret_file", path)).await;
    let other = id(Server::builder()).await;
    assert_eq!(first, again);
    assert_ne!(first, other);
}

#[tokio::test]
async fn a_shared_node_refuses_hashes_that_can_be_attacked() {
    let server = Server::builder().dram("8MiB").set("identity.shared_tenant", "true").start().await;
    let mut weak = namespace("m");
    weak.hash_algorithm = "xxhash".to_owned();
    let refused = server.client().await.open(open(weak)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("hash_algorithm"), "{refused}");
}
