//! What a tenant may have and do holds on a server under load, and costs its neighbours nothing.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use kvstrata::client::{
    Client, GetOptions, Handle, LookupOptions, Path as Way, PutBatch, PutOutcome, Session,
    TenantStats,
};
use kvstrata_tiers::error::{Error, ErrorKind};
use tokio::time::{Instant, sleep};

use super::{A, B, Files, OPERATOR, assert_no_token, connect, metric};
use crate::{
    client::{Seen, batch, hashes, namespace},
    harness::{Builder, SERVER_WAIT, Server, wait_until},
};

const MIB: u64 = 1 << 20;
const BLOCK: u32 = 64 << 10;
const PARTS: [u32; 1] = [BLOCK];
/// Blocks of one batch: far less than a put may take from others.
const BATCH: u32 = 32;

/// A server that reads a tenants file.
fn limited(files: &Files, tenants: &str) -> Builder {
    files.write("tenants", tenants);
    files.tokens().set("auth.tenants_file", &files.text("tenants"))
}

/// A client of one tenant, by the name of its engine.
struct Side {
    client: Client,
    handle: Handle,
    session: Session,
}

impl Side {
    async fn open(server: &Server, token: &str, way: Way) -> Self {
        let client = connect(server, token, way).await;
        let handle = client.open(namespace(&PARTS)).await.unwrap();
        let session = client.session("side").await.unwrap();
        Self { client, handle, session }
    }

    /// Puts blocks in batches that are no chain; how many were stored.
    async fn put(&self, numbers: std::ops::Range<u32>, durable: bool) -> usize {
        let mut stored = 0;
        for from in numbers.clone().step_by(BATCH as usize) {
            let to = (from + BATCH).min(numbers.end);
            let batch = PutBatch { durable, ..batch(from..to, &PARTS) };
            stored += match self.handle.put(&self.session, &batch).await {
                Ok(report) => usize::try_from(report.count(PutOutcome::Stored)).unwrap(),
                Err(error) => refused(&error),
            };
        }
        stored
    }

    /// Puts blocks durably, each batch as often as it is refused for a full tier.
    async fn put_all(&self, numbers: std::ops::Range<u32>) {
        for from in numbers.clone().step_by(8) {
            let to = (from + 8).min(numbers.end);
            let batch = PutBatch { durable: true, ..batch(from..to, &PARTS) };
            let taken = [PutOutcome::Stored, PutOutcome::Duplicate];
            wait_until("they are on nvme", SERVER_WAIT, async || {
                let report = self.handle.put(&self.session, &batch).await;
                report.is_ok_and(|report| report.outcomes.iter().all(|one| taken.contains(one)))
            })
            .await;
        }
    }

    /// How many of the blocks come back, each with its own bytes.
    async fn hits(&self, numbers: std::ops::Range<u32>) -> usize {
        let mut seen = Seen::default();
        let options = GetOptions::default();
        self.handle.get(&hashes(numbers.clone()), options, &mut seen).await.unwrap();
        let expected = batch(numbers, &PARTS).values;
        for (position, bytes) in &seen.blocks {
            assert!(bytes[..] == expected[*position as usize][..], "wrong bytes at {position}");
        }
        seen.blocks.len()
    }

    /// What it is told of itself, and that it is told of nobody else.
    async fn told(&self) -> TenantStats {
        let mut stats = self.client.stats().await.unwrap();
        assert_eq!(stats.tenants.len(), 1);
        stats.tenants.remove(0)
    }

    async fn used(&self, tier: usize) -> u64 {
        self.told().await.tiers[tier].used_bytes
    }
}

/// Nothing was stored, and the client is told when to come again.
fn refused(error: &Error) -> usize {
    assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
    0
}

/// A neighbour puts ten times the memory while one reads what its floor holds.
async fn assert_floor_holds(way: Way) {
    const KEPT: u32 = 320;
    let files = Files::new();
    let server = limited(&files, "[a]\ndram_floor = \"24MiB\"\n").start().await;
    let quiet = Side::open(&server, A, way).await;
    let noisy = Side::open(&server, B, way).await;
    assert_eq!(quiet.put(0..KEPT, false).await, KEPT as usize);
    let last = 10 * 64 * 16;
    let over = AtomicBool::new(false);
    let puts = async {
        let stored = noisy.put(0..last, false).await;
        over.store(true, Ordering::Relaxed);
        stored
    };
    let reads = async {
        let (mut hits, mut asked) = (0, 0);
        while !over.load(Ordering::Relaxed) {
            hits += quiet.hits(0..KEPT).await;
            asked += KEPT as usize;
        }
        (hits, asked)
    };
    let (stored, (hits, asked)) = tokio::join!(puts, reads);
    assert!(asked >= KEPT as usize && hits == asked, "{hits} hits of {asked}");
    assert_eq!(quiet.hits(0..KEPT).await, KEPT as usize);
    assert!(stored * 10 >= last as usize * 9, "the neighbour was served: {stored} of {last}");
    assert_eq!(noisy.hits(last - BATCH..last).await, BATCH as usize);
    assert_told(&quiet, u64::from(KEPT * BLOCK)).await;
    drop((quiet, noisy));
    assert_no_token(&server.stop(&[]).await);
}

async fn assert_told(side: &Side, used: u64) {
    let told = side.told().await;
    assert_eq!((told.tenant.as_str(), told.tiers[0].floor_bytes), ("a", 24 * MIB));
    assert_eq!(told.tiers[0].used_bytes, used);
}

#[tokio::test]
async fn a_noisy_neighbour_takes_nothing_of_a_floor_over_grpc() {
    assert_floor_holds(Way::Grpc).await;
}

#[tokio::test]
async fn a_noisy_neighbour_takes_nothing_of_a_floor_over_the_bulk_port() {
    assert_floor_holds(Way::Bulk).await;
}

#[tokio::test]
async fn a_tenant_has_no_more_than_its_most_of_dram_and_of_nvme() {
    let (files, disk) = (Files::new(), tempfile::tempdir().unwrap());
    let tenants = "[b]\ndram_max = \"8MiB\"\nnvme_max = \"4MiB\"\n";
    let server = limited(&files, tenants).set("nvme.path", disk.path().to_str().unwrap());
    let server = server.set("nvme.capacity", "256MiB").start().await;
    let (quiet, greedy) =
        (Side::open(&server, A, Way::Bulk).await, Side::open(&server, B, Way::Bulk).await);
    assert_eq!(quiet.put(0..320, false).await, 320);
    let over = AtomicBool::new(false);
    let puts = async {
        let stored = greedy.put(0..1024, false).await;
        over.store(true, Ordering::Relaxed);
        stored
    };
    let watch = async {
        while !over.load(Ordering::Relaxed) {
            let used = greedy.used(0).await;
            assert!(used <= 8 * MIB, "{used}");
        }
    };
    let (stored, ()) = tokio::join!(puts, watch);
    assert!(stored > 900, "it makes way for itself: {stored}");
    assert_eq!(greedy.used(0).await, 8 * MIB, "blocks of one size fill it");
    assert_eq!(quiet.hits(0..320).await, 320);
    // The cleaner copies what it may, and no more: what waits for nvme is told so.
    assert_eq!(greedy.put(5000..5128, true).await, 0, "it has no room left there");
    assert_eq!(quiet.put(5000..5128, true).await, 128);
    let told = greedy.told().await;
    assert!(told.tiers[1].used_bytes <= 4 * MIB, "{told:?}");
    assert!(told.tiers[1].used_bytes + u64::from(BLOCK) > 4 * MIB, "{told:?}");
    assert!(told.tiers[1].refused_blocks >= 128, "{told:?}");
    assert_eq!((told.tiers[0].max_bytes, told.tiers[1].max_bytes), (Some(8 * MIB), Some(4 * MIB)));
    let series = "kvstrata_tenant_bytes{tenant=\"b\",tier=\"dram\"}";
    assert_eq!(metric(&server, None, series).await, 8.0 * MIB as f64);
    drop((quiet, greedy));
    server.stop(&[]).await;
}

#[tokio::test]
async fn reclaiming_flash_leaves_a_floor_to_whoever_is_quiet() {
    let (files, disk) = (Files::new(), tempfile::tempdir().unwrap());
    let tenants = "[a]\nnvme_floor = \"12MiB\"\ndram_max = \"2MiB\"\n";
    let server = limited(&files, tenants).set("nvme.path", disk.path().to_str().unwrap());
    let server = server.set("nvme.capacity", "64MiB").set("nvme.segment_bytes", "4MiB");
    // Floors are held by writing again, which a budget of writes ends.
    let server = server.set("nvme.daily_writes", "none");
    let server = server.start().await;
    let (quiet, noisy) =
        (Side::open(&server, A, Way::Bulk).await, Side::open(&server, B, Way::Bulk).await);
    quiet.put_all(0..128).await;
    // Its blocks lie between those of the other, so that every segment holds some of both.
    for from in (0..4096).step_by(256) {
        noisy.put_all(from..from + 256).await;
    }
    let kept = quiet.hits(0..128).await;
    assert!(kept >= 126, "{kept} of 128 are left");
    assert!(noisy.hits(4000..4096).await > 48, "the neighbour has the rest");
    assert!(metric(&server, None, "kvstrata_nvme_reclaimed_segments_total").await > 20.0);
    drop((quiet, noisy));
    server.stop(&[]).await;
}

#[tokio::test]
async fn quotas_change_with_their_file_and_a_bad_one_changes_nothing() {
    let files = Files::new();
    let server = limited(&files, "[a]\ndram_floor = \"4MiB\"\n").start().await;
    let side = Side::open(&server, A, Way::Grpc).await;
    let floor = async || side.told().await.tiers[0].floor_bytes;
    assert_eq!(floor().await, 4 * MIB);
    files.write("tenants", "[a]\ndram_floor = \"1GiB\"\n");
    let failed = "kvstrata_reloads_total{what=\"tenants\",outcome=\"failed\"}";
    wait_until(failed, SERVER_WAIT, async || metric(&server, None, failed).await == 1.0).await;
    assert_eq!(floor().await, 4 * MIB);
    files.write("tenants", "[a]\ndram_max = \"16MiB\"\n");
    wait_until("the next quota", SERVER_WAIT, async || floor().await == 0).await;
    assert_eq!(side.told().await.tiers[0].max_bytes, Some(16 * MIB));
    let log = server.stop(&["files changed and cannot be used"]).await;
    assert!(log.contains("dram_floor: 1073741824 bytes given"), "{log}");

    let bad = limited(&files, "[a]\ndram_floor = \"8MiB\"\ndram_max = \"4MiB\"\n");
    let (code, said) = bad.start_refused().await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("tenant a: dram_floor: 8388608 bytes given, 0 to 4194304"), "{said}");
}

/// Comes again when it is told to.
async fn refused_for_a_while(error: &Error) {
    let ErrorKind::Exhausted { retry_after } = error.kind() else { panic!("{error}") };
    sleep(retry_after).await;
}

/// Calls as often as it is let, and comes again when it is told to; counts what was let through.
async fn hammer(until: Instant, mut call: impl AsyncFnMut() -> Result<u64, Error>) -> (u64, u32) {
    let (mut passed, mut refused) = (0, 0);
    while Instant::now() < until {
        match call().await {
            Ok(count) => passed += count,
            Err(error) => {
                refused += 1;
                refused_for_a_while(&error).await;
            }
        }
    }
    (passed, refused)
}

/// So much in a time is what a rate allows, with what a full bucket holds, within a tenth; and most of it, although
/// whoever is told to come again comes late on a busy machine.
fn assert_rate(passed: u64, rate: u64, took: Duration) {
    let expected = rate as f64 * (took.as_secs_f64() + 1.0);
    let ratio = passed as f64 / expected;
    assert!((0.6..1.1).contains(&ratio), "{passed} in {took:?}, {expected} expected");
}

#[tokio::test]
async fn a_rate_of_requests_holds_and_slows_nobody_else() {
    const RATE: u64 = 100;
    let files = Files::new();
    let tenants = format!("[b]\nrequests_per_second = {RATE}\n");
    let server = limited(&files, &tenants).start().await;
    let (free, bound) =
        (Side::open(&server, A, Way::Grpc).await, Side::open(&server, B, Way::Grpc).await);
    let some = hashes(0..4);
    let ask = async |side: &Side| side.handle.lookup(&some, LookupOptions::default()).await;
    let start = Instant::now();
    let until = start + Duration::from_secs(5);
    let bounded = hammer(until, async || ask(&bound).await.map(|_| 1));
    let others = async {
        let (mut calls, mut slowest) = (0_u64, Duration::ZERO);
        while Instant::now() < until {
            let before = Instant::now();
            ask(&free).await.unwrap();
            slowest = slowest.max(before.elapsed());
            calls += 1;
        }
        (calls, slowest)
    };
    let ((passed, refused), (calls, slowest)) = tokio::join!(bounded, others);
    // Those that opened its namespace and session count.
    assert_rate(passed + 2, RATE, start.elapsed());
    assert!(refused > 0 && calls > 5 * passed, "{calls} calls beside {passed}");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    // Both paths and RESP count alike.
    // It has just used up what it may do.
    let told = loop {
        match bound.client.stats().await {
            Ok(mut stats) => break stats.tenants.remove(0),
            Err(error) => refused_for_a_while(&error).await,
        }
    };
    assert_eq!((told.requests_per_second, told.refused_for_bytes), (Some(RATE), 0));
    assert!(told.refused_for_requests >= u64::from(refused), "{told:?}");
    let series = "kvstrata_tenant_refused_requests_total{tenant=\"b\",limit=\"requests\"}";
    assert!(metric(&server, None, series).await >= f64::from(refused));
    drop((free, bound));
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_rate_of_bytes_holds_on_both_paths_together() {
    const RATE: u64 = 8 * MIB;
    let files = Files::new();
    let server = limited(&files, "[b]\nbytes_per_second = \"8MiB\"\n").start().await;
    let grpc = Side::open(&server, B, Way::Grpc).await;
    let bulk = Side::open(&server, B, Way::Bulk).await;
    let free = Side::open(&server, A, Way::Bulk).await;
    let start = Instant::now();
    let until = start + Duration::from_secs(5);
    let mut next = 0;
    let puts = hammer(until, async || {
        let from = next;
        next += 4;
        let report = grpc.handle.put(&grpc.session, &batch(from..from + 4, &PARTS)).await?;
        Ok(report.count(PutOutcome::Stored) as u64 * u64::from(BLOCK))
    });
    let gets = hammer(until, async || {
        let mut seen = Seen::default();
        bulk.handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await?;
        Ok(seen.blocks.len() as u64 * u64::from(BLOCK))
    });
    let others = async {
        let mut bytes = 0;
        free.put(0..64, false).await;
        while Instant::now() < until {
            bytes += free.hits(0..64).await as u64 * u64::from(BLOCK);
        }
        bytes
    };
    let ((put, put_refused), (got, get_refused), other) = tokio::join!(puts, gets, others);
    assert_rate(put + got, RATE, start.elapsed());
    assert!(put > 0 && got > 0 && put_refused > 0 && get_refused > 0, "{put} {got}");
    assert!(other > 2 * (put + got), "{other} bytes beside {}", put + got);
    drop((grpc, bulk, free));
    server.stop(&[]).await;
}

#[tokio::test]
async fn an_operator_is_told_of_all_who_have_a_quota() {
    let files = Files::new();
    let server = limited(&files, "[b]\ndram_max = \"8MiB\"\n").start().await;
    let side = Side::open(&server, A, Way::Grpc).await;
    assert_eq!(side.put(0..32, false).await, 32);
    let operator = connect(&server, OPERATOR, Way::Grpc).await.stats().await.unwrap();
    let named: Vec<_> = operator.tenants.iter().map(|one| one.tenant.as_str()).collect();
    assert_eq!(named, ["b"]);
    assert_eq!(side.used(0).await, 32 * u64::from(BLOCK));
    server.stop(&[]).await;
}
