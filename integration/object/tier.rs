//! Whole nodes with an object tier on a real S3 server: what is left when everything else is lost.

use std::{fs, net::SocketAddr, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    proxy::{Fault, Proxy},
    server::{BUCKET, S3Server},
};
use crate::{
    harness::{Builder, SERVER_WAIT, Server, wait_until},
    nvme::{Home, count_right, remove, store},
    wire::{Wire, namespace_of},
};

const BLOCK: usize = 64 << 10;
/// Blocks put: 20 MiB, in segments of 4 MiB.
const BLOCKS: u64 = 320;
/// Those that are in sealed segments for sure.
pub(super) const SEALED: u64 = 240;
/// Blocks asked for while the store fails in one way.
const ASKED: usize = 17;
/// A store that is back is noticed within the longest pause of the breaker, 30 s.
const RECOVERY: Duration = Duration::from_secs(45);
/// How long the tier lets a read take.
const READ_DEADLINE: Duration = Duration::from_secs(10);
/// What a busy machine may add to it.
const SLACK: Duration = Duration::from_secs(5);
const IN_PACKS: &str = "kvstrata_object_packed_blocks_total";
const MADE: &str = "kvstrata_object_packs_made_total";
const NAMED: &str = "kvstrata_object_named_packs_total";
const FOUND: &str = "kvstrata_object_blocks";

/// A node whose packs are at `path` of the bucket behind `endpoint`.
pub(super) fn builder(home: &Home, endpoint: SocketAddr, path: &str) -> Builder {
    let environment = S3Server::environment(endpoint);
    let wrapper = ["env".to_owned()].into_iter().chain(environment).collect();
    home.server()
        .wrapped_in(wrapper)
        .set("memory.limit", "1GiB")
        .set("nvme.daily_writes", "none")
        .set("object.url", &format!("s3://{BUCKET}/{path}"))
        .set("object.admission", "all")
        .set("object.pack_bytes", "2MiB")
}

async fn start(home: &Home, endpoint: SocketAddr, path: &str) -> Server {
    builder(home, endpoint, path).start().await
}

pub(super) async fn connect(server: &Server) -> Wire {
    Wire::connect(server, namespace_of("m", BLOCK)).await
}

/// A node that has stored blocks, with all that is sealed of them in packs.
pub(super) async fn filled(s3: &S3Server, path: &str) -> (Home, Server, Wire) {
    let home = Home::new();
    let server = start(&home, s3.s3, path).await;
    let mut wire = connect(&server).await;
    store(&mut wire, 0..BLOCKS, false).await;
    wait_packed(&server, SEALED).await;
    (home, server, wire)
}

/// Waits until all sealed blocks are in packs, and those in the log.
async fn wait_packed(server: &Server, blocks: u64) {
    wait_until("all packs are named", SERVER_WAIT, async || {
        let made = server.metric(MADE).await;
        server.metric(IN_PACKS).await >= blocks as f64 && server.metric(NAMED).await >= made
    })
    .await;
}

pub(super) async fn wait_found(server: &Server, blocks: u64) {
    wait_until("the packs are found", SERVER_WAIT, async || {
        server.metric(FOUND).await >= blocks as f64
    })
    .await;
}

pub(super) fn lose_disk(home: &Home) {
    fs::remove_dir_all(home.tier()).unwrap();
}

#[tokio::test]
async fn a_node_that_loses_its_disk_finds_its_blocks_in_the_bucket() {
    let test = "a_node_that_loses_its_disk_finds_its_blocks_in_the_bucket";
    let Some(s3) = S3Server::of_all_tests(test).await else { return };
    let (home, server, mut wire) = filled(s3, test).await;
    assert_eq!(remove(&mut wire, 0..20).await, 20);
    drop(wire);
    server.kill();
    lose_disk(&home);

    let server = start(&home, s3.s3, test).await;
    wait_found(&server, SEALED - 20).await;
    let mut wire = connect(&server).await;
    assert_eq!(count_right(&mut wire, 0..20).await, 0, "they were removed");
    assert_eq!(count_right(&mut wire, 20..SEALED).await as u64, SEALED - 20);
    let runs = server.metric("kvstrata_object_read_runs_total").await;
    let blocks = server.metric("kvstrata_object_read_run_blocks_total").await;
    assert!(blocks >= (SEALED - 20) as f64, "{blocks} were read from the bucket");
    assert!(runs * 4.0 <= blocks, "{runs} requests for {blocks} blocks");
    assert_eq!(server.metric("kvstrata_corrupt_blocks_total{tier=\"object\"}").await, 0.0);
    drop(wire);
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_bucket_that_fails_in_any_way_costs_hits_and_nothing_else() {
    let test = "a_bucket_that_fails_in_any_way_costs_hits_and_nothing_else";
    let Some(s3) = S3Server::of_all_tests(test).await else { return };
    let (home, server, wire) = filled(s3, test).await;
    drop(wire);
    server.stop(&[]).await;
    lose_disk(&home);

    let proxy = Proxy::start(s3.s3);
    let server = start(&home, proxy.address, test).await;
    wait_found(&server, SEALED).await;
    let mut wire = connect(&server).await;
    for (first, (faults, least)) in (0..).zip(FAULTS) {
        // Far apart in their packs, so that each is a request.
        let blocks = || (first..SEALED).step_by(FAULTS.len()).take(ASKED);
        let (before, began) = (proxy.requests(), Instant::now());
        proxy.fail_mixed(faults);
        let hits = count_right(&mut wire, blocks()).await;
        let (took, requests) = (began.elapsed(), proxy.requests() - before);
        proxy.heal();
        assert!(hits >= least, "{faults:?}: {hits} of {ASKED}");
        assert!(took < READ_DEADLINE + SLACK, "{faults:?}: {took:?}");
        assert!(requests > 1, "{faults:?}: {requests} requests");
        // What was missed is there when the store is well again.
        let deadline = Instant::now() + RECOVERY;
        while count_right(&mut wire, blocks()).await < ASKED {
            assert!(Instant::now() < deadline, "{faults:?}: it does not recover");
            sleep(Duration::from_millis(100)).await;
        }
    }
    // Counted when they end, so that those which are given up count a little later.
    let asked = server.metric("kvstrata_object_asked_requests_total").await;
    let sent = proxy.requests() as f64;
    assert!(sent <= 2.0 * asked, "{sent} requests for {asked}");
    assert!(server.metric("kvstrata_object_retried_requests_total").await > 0.0);
    let peak = server.status_bytes("VmHWM");
    assert!(peak < 512 << 20, "{peak} bytes at the most");
    assert_eq!(count_right(&mut wire, 0..SEALED).await as u64, SEALED);
    assert_eq!(server.metric("kvstrata_object_breaker_open").await, 0.0);
    drop(wire);
    server.stop(&["object", "tier failed to read a block"]).await;
}

/// What happens to each request, or to so many in a thousand, and the least hits of [`ASKED`] blocks.
/// Those at once leave a request in three as it is, or late.
const FAULTS: [(&[(Fault, u64)], usize); 14] = [
    (
        &[
            (Fault::Status(503), 100),
            (Fault::Status(429), 50),
            (Fault::Reset, 150),
            (Fault::SlowClose, 300),
            (Fault::Latency, 350),
            (Fault::Whole, 10),
            (Fault::WrongBody, 10),
            (Fault::Stalled, 10),
            (Fault::Status(403), 10),
        ],
        4,
    ),
    (&[(Fault::Status(503), 100)], 12),
    (&[(Fault::Status(429), 50)], 12),
    (&[(Fault::Reset, 150)], 12),
    // Eight at a time.
    (&[(Fault::Latency, 1000)], 8),
    (&[(Fault::SlowClose, 1000)], 0),
    (&[(Fault::Reset, 1000)], 0),
    (&[(Fault::Cut, 1000)], 0),
    (&[(Fault::Shorter, 1000)], 0),
    (&[(Fault::Whole, 1000)], 0),
    (&[(Fault::WrongBody, 1000)], 0),
    (&[(Fault::Status(403), 1000)], 0),
    (&[(Fault::Stalled, 1000)], 0),
    (&[(Fault::Status(503), 1000)], 0),
];
