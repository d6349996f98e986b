//! The bulk port under what peers, memory and machines do to it: thousands of connections, bytes that
//! are damaged in dram, a server that goes away and comes back.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::FileExt,
    time::Duration,
};

use kvstrata::{
    client::{GetOptions, Handle, MissReason, Path, PutOutcome},
    limits::BULK_CONNECTIONS_MAX,
};
use kvstrata_tiers::error::ErrorKind;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{io::AsyncReadExt, net::TcpStream, task::JoinSet, time::Instant};

use crate::{
    bulk::connect,
    client::{Seen, batch, hashes, namespace, pattern},
    harness::{Server, wait_until},
    skipped,
};

/// Connections of one hostile host.
const HOSTILE: usize = 10_000;
/// What a connection that says nothing may cost the server, in bytes.
const SILENT_BYTES_MAX: u64 = 16 << 10;

/// Lets this process open as many files as the test takes; false if it may not.
fn open_files(needed: u64) -> bool {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return true;
    }
    let raised = Rlimit { current: Some(needed), ..limit };
    limit.maximum.is_none_or(|maximum| maximum >= needed)
        && setrlimit(Resource::Nofile, raised).is_ok()
}

async fn read(handle: &Handle, count: u32) -> Seen {
    let mut seen = Seen::default();
    handle.get(&hashes(0..count), GetOptions::default(), &mut seen).await.unwrap();
    seen
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_connections_cost_a_bounded_memory_and_keep_nobody_out() {
    if !open_files(HOSTILE as u64 + 500) {
        return skipped::say("ten_thousand_connections", "open files", "10,500 needed");
    }
    let server = Server::builder().dram("64MiB").open_files(6000).start().await;
    let (known, session) = connect(&server, Path::Bulk, &[1 << 20]).await;
    let put = batch(0..8, &[1 << 20]);
    assert_eq!(known.put(&session, &put).await.unwrap().outcomes, [PutOutcome::Stored; 8]);
    assert_eq!(read(&known, 8).await.blocks.len(), 8);
    let before = server.status_bytes("RssAnon");
    let mut hostile = JoinSet::new();
    for _ in 0..HOSTILE {
        let address = server.bulk().to_owned();
        hostile.spawn(async move {
            // Those that are closed come again, and those that the kernel has no place for knock on.
            loop {
                let Ok(mut io) = TcpStream::connect(&address).await else { continue };
                drop(io.read_to_end(&mut Vec::new()).await);
            }
        });
    }
    // On a slow machine the first ones are closed for their silence before the last ones come.
    let many = f64::from(u32::try_from(BULK_CONNECTIONS_MAX / 2).unwrap());
    wait_until("half of the places are taken", Duration::from_secs(60), async || {
        server.metric("kvstrata_bulk_connections").await >= many
    })
    .await;
    let start = Instant::now();
    for _ in 0..10 {
        assert_eq!(read(&known, 8).await.blocks.len(), 8, "whoever is connected is served");
    }
    let (new, _session) = connect(&server, Path::Auto, &[1 << 20]).await;
    assert_eq!(read(&new, 8).await.blocks.len(), 8, "whoever comes is served over gRPC");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let grown = server.status_bytes("RssAnon").saturating_sub(before);
    let allowed = SILENT_BYTES_MAX * BULK_CONNECTIONS_MAX as u64;
    assert!(grown < allowed, "grown by {} MiB", grown >> 20);
    drop(hostile);
    let (later, _session) = connect(&server, Path::Bulk, &[1 << 20]).await;
    wait_until("the places are free", Duration::from_secs(30), async || {
        let mut seen = Seen::default();
        let got = later.get(&hashes(0..8), GetOptions::default(), &mut seen).await;
        got.is_ok() && seen.blocks.len() == 8
    })
    .await;
    drop((known, new, later, session));
    server.stop(&[]).await;
}

/// Flips one bit in the dram of a server, where its arena has `bytes`, `at` bytes behind their start.
fn damage(server: &Server, bytes: &[u8], at: u64) {
    let process = format!("/proc/{}", server.process_id());
    for entry in fs::read_dir(format!("{process}/fd")).unwrap().flatten() {
        let name = fs::read_link(entry.path()).unwrap_or_default();
        if !name.to_string_lossy().contains("kvstrata-arena") {
            continue;
        }
        let arena = OpenOptions::new().read(true).write(true).open(entry.path()).unwrap();
        let mut page = vec![0; 4096];
        for offset in (0..arena.metadata().unwrap().len()).step_by(4096) {
            arena.read_exact_at(&mut page, offset).unwrap();
            if page == bytes[..4096] {
                let mut byte = [0];
                arena.read_exact_at(&mut byte, offset + at).unwrap();
                arena.write_all_at(&[byte[0] ^ 4], offset + at).unwrap();
                return;
            }
        }
    }
    panic!("the bytes are not in dram");
}

#[tokio::test]
async fn a_block_that_is_damaged_in_dram_is_a_miss_wherever_the_damage_is() {
    const BYTES: u32 = 1 << 20;
    let server = Server::builder().dram("64MiB").start().await;
    let mut corrupt = 0.0;
    for path in [Path::Bulk, Path::Grpc] {
        // In the first of several frames, in a later one, and in the last.
        for at in [0, 600_000, u64::from(BYTES) - 1] {
            let (handle, session) = connect(&server, path, &[BYTES]).await;
            let put = batch(0..3, &[BYTES]);
            handle.put(&session, &put).await.unwrap();
            damage(&server, &pattern(1, 0, BYTES as usize), at);
            let seen = read(&handle, 3).await;
            assert_eq!(seen.misses, [(1..2, MissReason::Corrupt)], "{path:?}, {at}");
            let right =
                [0, 2].map(|number: u32| (number, pattern(number, 0, BYTES as usize).to_vec()));
            assert!(seen.blocks == right, "{path:?}, {at}: the others are right");
            corrupt += 1.0;
            let series = "kvstrata_corrupt_blocks_total{tier=\"dram\"}";
            assert_eq!(server.metric(series).await, corrupt);
            let seen = read(&handle, 3).await;
            assert_eq!(seen.misses, [(1..2, MissReason::Absent)], "it is out of use");
            handle.put(&session, &put).await.unwrap();
            assert_eq!(read(&handle, 3).await.blocks.len(), 3);
            handle.remove(&put.hashes).await.unwrap();
        }
    }
    server.stop(&["block failed verification and was removed"]).await;
}

#[tokio::test]
async fn a_server_that_is_away_costs_no_time_and_is_found_when_it_is_back() {
    let home = tempfile::tempdir().unwrap();
    let builder = || Server::builder().dram("64MiB").home(home.path());
    let server = builder().start().await;
    let grpc = server.grpc().to_owned();
    let (handle, session) = connect(&server, Path::Auto, &[4096]).await;
    handle.put(&session, &batch(0..4, &[4096])).await.unwrap();
    assert_eq!(read(&handle, 4).await.blocks.len(), 4);
    server.kill();
    let (start, mut seen) = (Instant::now(), Seen::default());
    for _ in 0..2000 {
        let lost = handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await.unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Unavailable, "{lost}");
    }
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    let back = builder().set("server.grpc_listen", &grpc).start().await;
    let client = handle.client();
    wait_until("it is found", Duration::from_secs(20), async || {
        client.open(namespace(&[4096])).await.is_ok()
    })
    .await;
    let session = client.session("again").await.unwrap();
    handle.put(&session, &batch(0..4, &[4096])).await.unwrap();
    assert_eq!(read(&handle, 4).await.blocks.len(), 4);
    assert!(back.metric("kvstrata_bulk_connections").await >= 1.0, "the bulk port is used again");
    drop(session);
    back.stop(&[]).await;
}
