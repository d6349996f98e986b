//! What clients own, and what is left of it when they go: nothing.

use std::time::Duration;

use kvstrata_proto::v1::{
    PutData, PutOutcome, PutRequest, ReleaseRequest, RenewRequest,
    block_cache_client::BlockCacheClient, put_request,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, transport::Endpoint};

use crate::{
    harness::{SERVER_WAIT, Server, wait_until},
    wire::{Wire, namespace, payload, stats, wait_nothing_left},
};

/// Longer than any wait here, so that an expired lease cannot pass for a freed one.
const TTL: Duration = Duration::from_secs(300);

#[tokio::test]
async fn a_client_that_vanishes_mid_put_and_mid_lease_leaves_nothing() {
    let server = Server::builder().dram("64MiB").start().await;
    let observer = Wire::without_session(&server, namespace("m")).await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(wire.put(&[1, 2, 3]).await, [PutOutcome::Stored; 3]);
    let leased = wire.lookup_with_lease([1, 2, 3], TTL).await.unwrap();
    assert_eq!(leased.lease.unwrap().blocks, 3);
    let mut put = wire.put_stream(wire.offer([4, 5])).await.unwrap();
    put.wanted().await.unwrap();
    let mut half = wire.part(0, 4, payload(4));
    half.data.truncate(1000);
    put.send(half).await;
    wait_until("the put is pending", SERVER_WAIT, async || {
        let pending = stats(&observer).await;
        pending.staging_bytes > 0 && pending.leases == 1
    })
    .await;
    let mut other = Wire::connect(&server, namespace("m")).await;
    assert_eq!(other.lookup([4, 5]).await.counts.unwrap().pending, 2);

    // The connection goes away without a word, as when the process is killed.
    drop((wire, put));
    wait_until("the claims are given up", SERVER_WAIT, async || {
        let counts = other.client.clone().lookup(other.lookup_request([4, 5])).await;
        counts.unwrap().into_inner().counts.unwrap().miss == 2
    })
    .await;
    assert_eq!(other.put(&[4, 5]).await, [PutOutcome::Stored; 2]);
    drop(other);
    wait_nothing_left(&observer).await;
    drop(observer);
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_put_ends_with_its_session_although_its_stream_lives() {
    let server = Server::builder().dram("64MiB").start().await;
    let observer = Wire::without_session(&server, namespace("m")).await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let mut put = wire.put_stream(wire.offer([1])).await.unwrap();
    put.wanted().await.unwrap();
    wire.events = None;
    let ended = put.responses.message().await.unwrap_err();
    assert_eq!(ended.code(), Code::Cancelled, "{ended}");
    wait_nothing_left(&observer).await;
    let refused = wire.put_stream(wire.offer([1])).await.unwrap().wanted().await.unwrap_err();
    assert_eq!(refused.code(), Code::Aborted, "{refused}");
}

#[tokio::test]
async fn a_put_whose_responses_nobody_reads_ends_with_its_session_too() {
    let server = Server::builder().dram("64MiB").start().await;
    let observer = Wire::without_session(&server, namespace("m")).await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    // Room for one byte of responses: the second one, that block 1 is here, waits for a reader.
    let narrow = Endpoint::new(format!("http://{}", server.grpc())).unwrap();
    let narrow = narrow.initial_stream_window_size(1).connect().await.unwrap();
    let mut stuck = BlockCacheClient::new(narrow);
    let (requests, receiver) = mpsc::channel(1);
    let message = Some(put_request::Message::Offer(wire.offer([1, 2])));
    requests.send(PutRequest { message }).await.unwrap();
    let unread = stuck.put(ReceiverStream::new(receiver)).await.unwrap();
    let parts = vec![wire.part(0, 1, payload(1))];
    let message = Some(put_request::Message::Data(PutData { parts }));
    requests.send(PutRequest { message }).await.unwrap();
    let counts = async || {
        let found = observer.client.clone().lookup(observer.lookup_request([1, 2])).await;
        let counts = found.unwrap().into_inner().counts.unwrap();
        (counts.dram, counts.pending, counts.miss)
    };
    wait_until("half is stored", SERVER_WAIT, async || counts().await == (1, 1, 0)).await;
    wire.events = None;
    let limit = Duration::from_secs(10);
    wait_until("the rest is given up", limit, async || counts().await == (1, 0, 1)).await;
    drop((unread, requests));
}

#[tokio::test]
async fn a_leased_block_survives_eviction_pressure_and_others_do_not() {
    let server = Server::builder().dram("16MiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let ours: Vec<u64> = (0..100).collect();
    assert_eq!(wire.put(&ours).await, vec![PutOutcome::Stored; 100]);
    let leased = wire.lookup_with_lease(0..50, TTL).await.unwrap().lease.unwrap();
    assert_eq!(leased.blocks, 50);

    let mut other = Wire::connect(&server, namespace("other")).await;
    for batch in 1..=16 {
        let blocks: Vec<u64> = (batch * 1000..batch * 1000 + 1000).collect();
        other.put(&blocks).await;
        other.get(&blocks).await;
    }
    assert_eq!(wire.lookup(0..50).await.prefix_blocks, 50, "promised and kept");
    for (number, block) in (0..50).zip(wire.get(&ours[..50]).await) {
        assert_eq!(block, Some(payload(number)));
    }
    let unleased = wire.get(&ours[50..]).await;
    assert!(unleased.iter().all(Option::is_none), "16 times dram was put, nobody promised these");

    let lease_id = leased.lease_id.clone();
    let session_id = wire.session_id.clone();
    let release = ReleaseRequest { session_id: session_id.clone(), lease_id: lease_id.clone() };
    wire.client.release(release.clone()).await.unwrap();
    wire.client.release(release).await.unwrap();
    let renew = RenewRequest { session_id, lease_id: lease_id.clone(), ttl_ms: 0 };
    assert_eq!(wire.client.renew(renew).await.unwrap_err().code(), Code::Aborted);
    let mut under_lease = wire.get_request([0]);
    under_lease.session_id = wire.session_id.clone();
    under_lease.lease_id = lease_id;
    assert_eq!(wire.read(under_lease, 1).await.unwrap_err().code(), Code::Aborted);
    for batch in 20..=36 {
        let blocks: Vec<u64> = (batch * 1000..batch * 1000 + 1000).collect();
        other.put(&blocks).await;
        other.get(&blocks).await;
    }
    assert_eq!(wire.lookup(0..50).await.prefix_blocks, 0, "no promise outlives its release");
}

#[tokio::test]
async fn a_lookup_without_lease_extends_no_protection() {
    let server = Server::builder().dram("16MiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    wire.put(&(0..100).collect::<Vec<_>>()).await;
    let mut other = Wire::connect(&server, namespace("other")).await;
    for batch in 1..=16 {
        let blocks: Vec<u64> = (batch * 1000..batch * 1000 + 1000).collect();
        other.put(&blocks).await;
        other.get(&blocks).await;
        wire.lookup(0..100).await;
    }
    assert_eq!(wire.lookup(0..100).await.prefix_blocks, 0, "asked all the time, and still evicted");
    assert_eq!(stats(&wire).await.leases, 0);
}

#[tokio::test]
async fn ten_thousand_abandoned_leases_leave_nothing() {
    let server = Server::builder().dram("128MiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    wire.put(&[1]).await;
    let ttl = Duration::from_secs(5);
    let mut granted = 0;
    for _ in 0..10_000 {
        let lease = wire.lookup_with_lease([1], ttl).await.unwrap().lease;
        granted += lease.map_or(0, |lease| lease.blocks);
    }
    assert_eq!(granted, 10_000);
    wait_until("all leases expired", SERVER_WAIT, async || {
        let stats = stats(&wire).await;
        (stats.leases, stats.leased_bytes) == (0, 0)
    })
    .await;
    let expired = server.metric("kvstrata_leases_ended_total{reason=\"expired\"}").await;
    assert_eq!(expired, 10_000.0);
    assert_eq!(server.metric("kvstrata_leased_bytes").await, 0.0);
    assert_eq!(wire.get(&[1]).await, [Some(payload(1))], "the end of a promise frees no memory");
    drop(wire);
    server.stop(&[]).await;
}

#[tokio::test]
async fn leases_stop_at_the_sessions_bound_and_say_how_far_they_go() {
    let server =
        Server::builder().dram("64MiB").set("lease.session_bytes_max", "40KiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    wire.put(&(0..20).collect::<Vec<_>>()).await;
    let lease = wire.lookup_with_lease(0..20, TTL).await.unwrap().lease.unwrap();
    assert_eq!((lease.blocks, lease.bytes), (10, 40_960));
    assert_eq!(wire.lookup_with_lease(0..20, TTL).await.unwrap().lease, None);
}

#[tokio::test]
async fn connections_do_not_keep_probes_out_where_few_files_are_allowed() {
    let server = Server::builder().dram("8MiB").open_files(128).start().await;
    let mut open = Vec::new();
    for _ in 0..300 {
        open.push(tokio::net::TcpStream::connect(server.grpc()).await.unwrap());
    }
    wait_until("all are accepted", SERVER_WAIT, async || {
        server.metric("kvstrata_connections").await == 300.0
    })
    .await;
    drop(open);
    server.stop(&[]).await;
}
