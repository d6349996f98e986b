//! The metrics: documented, summing up, and no others.

use std::{collections::BTreeSet, path::Path};

use kvstrata_proto::v1::GetRequest;

use crate::{
    harness::Server,
    wire::{Wire, namespace},
};

/// Names and types of the families on a page of OpenMetrics text.
fn families(page: &str) -> BTreeSet<(String, String)> {
    page.lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|line| line.split_once(' '))
        .map(|(name, kind)| (name.to_owned(), kind.to_owned()))
        .collect()
}

#[tokio::test]
async fn every_family_is_documented_and_no_other_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let server = Server::builder().dram("8MiB").set("nvme.path", path);
    let bucket = format!("file://{path}/bucket");
    let server = server.set("nvme.capacity", "64MiB").set("object.url", &bucket).start().await;
    let (status, page) = server.page("/metrics").await;
    assert_eq!(status, 200);
    assert!(page.ends_with("# EOF\n"));
    // Those of tenants are only there where tenants have quotas.
    let mut found = families(&page);
    found.extend(families(&crate::trust::page_with_quotas().await));
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let documented: BTreeSet<_> = std::fs::read_to_string(path)
        .unwrap()
        .lines()
        .filter_map(|line| line.strip_prefix("| `"))
        .filter_map(|row| row.split_once("` | "))
        .filter_map(|(name, rest)| Some((name.to_owned(), rest.split_once(" |")?.0.to_owned())))
        .collect();
    assert_eq!(documented, found);
}

#[tokio::test]
async fn lookups_by_answer_sum_to_what_was_asked() {
    let server = Server::builder().dram("8MiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    wire.put(&[1, 2, 3]).await;
    let mut put = wire.put_stream(wire.offer([4])).await.unwrap();
    put.wanted().await.unwrap();
    wire.lookup(1..10).await;
    wire.lookup([50, 1, 2]).await;
    let answer = async |name: &str| {
        server.metric(&format!("kvstrata_lookup_blocks_total{{answer=\"{name}\"}}")).await
    };
    assert_eq!(answer("dram").await, 3.0);
    assert_eq!(answer("pending").await, 1.0);
    assert_eq!(answer("miss").await, 8.0);
    assert_eq!(server.metric("kvstrata_lookup_asked_blocks_total").await, 12.0);
    let request = GetRequest { deadline_ms: 50, ..wire.get_request([1, 2, 9, 4]) };
    wire.read(request, 4).await.unwrap();
    assert_eq!(server.metric("kvstrata_get_blocks_total{tier=\"dram\"}").await, 2.0);
    let missed = async |reason: &str| {
        server.metric(&format!("kvstrata_get_missed_blocks_total{{reason=\"{reason}\"}}")).await
    };
    assert_eq!((missed("pending").await, missed("absent").await), (1.0, 1.0));
}
