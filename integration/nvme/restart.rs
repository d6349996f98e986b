//! Warm restarts: what was put is there again, found without reading it.

use std::{fs, time::Duration};

use kvstrata_proto::v1::{LookupResponse, Tier};

use super::{Home, ON_NVME, QUEUED, count_right, remove, store, wait_copied};
use crate::{
    harness::Server,
    wire::{BLOCK_BYTES, Wire, namespace, namespace_of},
};

/// Bytes of the blocks of most tests here.
const LARGE: usize = 64 << 10;

/// Asks for blocks of which all must be on one tier; returns the answer.
async fn all_on(wire: &mut Wire, blocks: u64, tier: Tier) -> LookupResponse {
    let answer = wire.lookup(0..blocks).await;
    assert_eq!(u64::from(answer.prefix_blocks), blocks, "{answer:?}");
    assert!(answer.runs.iter().all(|run| run.tier() == tier), "{:?}", answer.runs);
    answer
}

/// What a restart must bring back: all of `blocks`, on nvme, to be loaded into dram.
async fn assert_warm(server: &Server, blocks: u64) {
    let mut wire = Wire::connect(server, namespace_of("m", LARGE)).await;
    let answer = all_on(&mut wire, blocks, Tier::Nvme).await;
    for run in answer.runs {
        assert!(run.est_load_ms > 0.0 && run.est_load_ms < 60_000.0, "{}", run.est_load_ms);
    }
    assert_eq!(count_right(&mut wire, 0..blocks).await as u64, blocks);
    all_on(&mut wire, blocks, Tier::Dram).await;
}

#[tokio::test]
async fn after_a_sigterm_everything_is_found_on_nvme_and_promoted_when_it_is_read() {
    let home = Home::new();
    let blocks = 500;
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace_of("m", LARGE)).await;
    store(&mut wire, 0..blocks, false).await;
    wait_copied(&server, 500.0).await;
    drop(wire);
    server.stop(&[]).await;
    let server = home.server().start().await;
    assert_eq!(server.metric("kvstrata_nvme_recovered_blocks_total").await, 500.0);
    assert_warm(&server, blocks).await;
    server.stop(&[]).await;
}

#[tokio::test]
async fn after_a_kill_everything_is_found_but_what_was_removed() {
    let home = Home::new();
    let blocks = 400;
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace_of("m", LARGE)).await;
    store(&mut wire, 0..blocks + 100, false).await;
    wait_copied(&server, 500.0).await;
    assert_eq!(remove(&mut wire, blocks..blocks + 100).await, 100);
    server.kill();
    let server = home.server().start().await;
    assert_eq!(server.metric(ON_NVME).await, 400.0);
    assert_warm(&server, blocks).await;
    let mut wire = Wire::connect(&server, namespace_of("m", LARGE)).await;
    assert_eq!(wire.lookup(0..blocks + 100).await.counts.unwrap().miss, 100);
    assert_eq!(count_right(&mut wire, blocks..blocks + 100).await, 0);
    // Twice over: a removal is not lost when what it removed has left the log, either.
    store(&mut wire, blocks..blocks + 50, true).await;
    assert_eq!(remove(&mut wire, blocks..blocks + 25).await, 25);
    server.kill();
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace_of("m", LARGE)).await;
    assert_eq!(count_right(&mut wire, blocks..blocks + 25).await, 0);
    assert_eq!(count_right(&mut wire, blocks + 25..blocks + 50).await, 25);
}

#[tokio::test]
async fn a_sigterm_right_after_a_put_loses_nothing_of_it() {
    // Small blocks, which take the disk longer than the wire: most of them wait when it comes.
    let (home, blocks) = (Home::new(), 6000);
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let numbers: Vec<u64> = (0..blocks).collect();
    wire.put(&numbers).await;
    let waiting = server.metric(QUEUED).await;
    drop(wire);
    server.stop(&[]).await;
    assert!(waiting > 0.0, "nothing waited: this shows nothing");
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(wire.lookup(0..blocks).await.counts.unwrap().nvme, 6000);
    assert_eq!(count_right(&mut wire, 0..blocks).await, 6000);
}

#[tokio::test]
async fn a_sigterm_without_grace_does_not_wait_for_the_disk() {
    let (home, blocks) = (Home::new(), 6000);
    let mut server = home.server().set("server.drain_grace", "0s").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    wire.put(&(0..blocks).collect::<Vec<u64>>()).await;
    let started = tokio::time::Instant::now();
    server.terminate();
    assert_eq!(server.exit_code().await, Some(0));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let found = server.metric(ON_NVME).await;
    assert_eq!(count_right(&mut wire, 0..blocks).await as f64, found);
    assert!(wire.block_bytes == BLOCK_BYTES && found < 6000.0, "all {found} were copied");
}

/// A counter of `/proc/PID/io`.
fn io(server: &Server, field: &str) -> u64 {
    let io = fs::read_to_string(format!("/proc/{}/io", server.process_id())).unwrap();
    let line = io.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(": "));
    line.unwrap().parse().unwrap()
}

/// All that the process has read so far: by calls, and by whom or what for it came from a disk.
/// Direct reads count twice.
fn read_bytes(server: &Server) -> u64 {
    io(server, "rchar") + io(server, "read_bytes")
}

#[tokio::test]
async fn a_start_reads_less_than_a_percent_of_what_is_stored() {
    let (home, blocks) = (Home::new(), 4096);
    // With calls that the kernel counts for the process: what io_uring reads is in no `rchar`.
    let builder = || home.server().set("nvme.engine", "pread");
    let server = builder().start().await;
    // What every start reads: configuration, `/proc`, pages of the program.
    let constant = read_bytes(&server);
    let mut wire = Wire::connect(&server, namespace_of("m", LARGE)).await;
    store(&mut wire, 0..blocks, true).await;
    server.kill();
    let server = builder().start().await;
    let read = read_bytes(&server);
    assert_eq!(server.metric(ON_NVME).await, 4096.0);
    let stored = blocks * LARGE as u64;
    assert!(read.saturating_sub(constant) < stored / 100, "{read} of {stored}, {constant} always");
    let segments = server.metric("kvstrata_nvme_recovery_read_bytes_total").await;
    assert!(segments < stored as f64 / 100.0, "{segments} bytes of segments");
    let mut wire = Wire::connect(&server, namespace_of("m", LARGE)).await;
    let some = (0..blocks).step_by(61);
    assert_eq!(count_right(&mut wire, some.clone()).await, some.count());
}
