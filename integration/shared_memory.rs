//! Shared memory between a server and clients on its host.

use std::{fs, ops::Range, os::unix::fs::FileExt, path::Path as FilePath, time::Duration};

use kvstrata::client::{
    FetchedBlock, GetOptions, GetSink, Handle, MissReason, Path, PiecePlace, PutOutcome, Session,
};
use kvstrata_tiers::error::ErrorKind;
use tempfile::TempDir;
use tokio::task::JoinSet;

use crate::{
    bulk::{PARTS, assert_reads, connect},
    client::{Seen, batch, hashes, pattern},
    harness::{Builder, Server, wait_until},
};

const PINNED: &str = "kvstrata_shared_pinned_bytes";
const BLOCK: u32 = 1 << 20;

fn sharing(directory: &TempDir) -> Builder {
    let socket = directory.path().join("bulk");
    Server::builder()
        .set("server.bulk_unix", socket.to_str().unwrap())
        .set("server.shared_memory", "true")
}

async fn serve() -> (TempDir, Server) {
    let directory = tempfile::tempdir().unwrap();
    let server = sharing(&directory).dram("64MiB").start().await;
    (directory, server)
}

/// A client by shared memory, with eight blocks that it has put.
async fn with_blocks(server: &Server) -> (Handle, Session) {
    let (handle, session) = connect(server, Path::Shm, &[BLOCK]).await;
    let report = handle.put(&session, &batch(0..8, &[BLOCK])).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored; 8]);
    (handle, session)
}

#[tokio::test]
async fn what_was_put_by_shared_memory_is_read_by_it_and_over_every_other_path() {
    let directory = tempfile::tempdir().unwrap();
    let server = sharing(&directory).dram("512MiB").start().await;
    let (handle, session) = connect(&server, Path::Shm, &PARTS).await;
    let put = batch(0..6, &PARTS);
    let report = handle.put(&session, &put).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored; 6]);
    assert_eq!(handle.put(&session, &put).await.unwrap().outcomes, [PutOutcome::Duplicate; 6]);
    let bytes = 6 * PARTS.iter().sum::<u32>();
    assert_eq!(server.metric("kvstrata_put_bytes_total").await, f64::from(bytes));
    for path in [Path::Shm, Path::Auto, Path::Bulk, Path::Grpc] {
        let (handle, _session) = connect(&server, path, &PARTS).await;
        assert_reads(&handle, &put, 2).await;
    }
    assert_eq!(server.metric(PINNED).await, 0.0, "all were let go");
    drop((handle, session));
    server.stop(&[]).await;
}

/// Lends memory for each block.
struct Lent(Vec<Vec<u8>>, Vec<u32>);

impl GetSink for Lent {
    fn room(&mut self, place: PiecePlace) -> Option<&mut [u8]> {
        self.0[place.position as usize].get_mut(place.offset..place.offset + place.bytes)
    }

    fn block(&mut self, block: FetchedBlock<'_>) {
        assert!(block.pieces().is_empty(), "it lies in memory that was lent");
        self.1.push(block.position);
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        panic!("{positions:?}: {reason:?}");
    }
}

#[tokio::test]
async fn many_more_blocks_than_may_be_pinned_are_read_into_memory_of_the_callers() {
    let (_directory, server) = serve().await;
    let (handle, session) = connect(&server, Path::Shm, &[BLOCK]).await;
    let put = batch(0..40, &[BLOCK]);
    assert_eq!(handle.put(&session, &put).await.unwrap().outcomes, [PutOutcome::Stored; 40]);
    let mut lent = Lent(vec![vec![0; BLOCK as usize]; 40], Vec::new());
    handle.get(&put.hashes, GetOptions::default(), &mut lent).await.unwrap();
    assert!(lent.1.iter().copied().eq(0..40));
    assert!(lent.0.iter().eq(put.values.iter()), "bytes differ");
    drop((handle, session));
    server.stop(&[]).await;
}

#[tokio::test]
async fn it_must_be_switched_on_and_is_not_while_there_are_two_tenants() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("bulk");
    let plain = Server::builder().set("server.bulk_unix", socket.to_str().unwrap());
    let server = plain.dram("64MiB").start().await;
    let (handle, session) = connect(&server, Path::Shm, &[BLOCK]).await;
    let refused = handle.put(&session, &batch(0..1, &[BLOCK])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let (auto, auto_session) = connect(&server, Path::Auto, &[BLOCK]).await;
    let report = auto.put(&auto_session, &batch(0..1, &[BLOCK])).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored]);
    drop((handle, session, auto, auto_session));
    server.stop(&[]).await;
    let (status, log) = Server::builder().set("server.shared_memory", "true").start_refused().await;
    assert!(status != Some(0) && log.contains("server.bulk_unix"), "{log}");
}

/// Flips one bit of what begins with `bytes` in the dram of a server, `at` bytes behind the start.
fn damage(server: &Server, bytes: &[u8], at: u64) {
    let process = format!("/proc/{}", server.process_id());
    let maps = fs::read_to_string(format!("{process}/maps")).unwrap();
    let memory = format!("{process}/mem");
    let memory = fs::File::options().read(true).write(true).open(memory).unwrap();
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    for line in maps.lines().filter(|line| line.contains("kvstrata-arena")) {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let mut page = vec![0; 4096];
        for address in (number(start)..number(end)).step_by(4096) {
            memory.read_exact_at(&mut page, address).unwrap();
            if page == bytes[..4096] {
                let mut byte = [0];
                memory.read_exact_at(&mut byte, address + at).unwrap();
                memory.write_all_at(&[byte[0] ^ 4], address + at).unwrap();
                return;
            }
        }
    }
    panic!("the bytes are not in dram");
}

#[tokio::test]
async fn a_block_that_is_damaged_in_dram_is_a_miss_is_counted_and_leaves() {
    let (_directory, server) = serve().await;
    let (handle, session) = with_blocks(&server).await;
    damage(&server, &pattern(3, 0, BLOCK as usize), 700_001);
    let mut seen = Seen::default();
    let read = handle.get(&hashes(0..8), GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!((read.blocks(), read.corrupt_here), (7, 1));
    assert_eq!(seen.misses, [(3..4, MissReason::CorruptHere)]);
    let mut again = Seen::default();
    handle.get(&hashes(3..4), GetOptions::default(), &mut again).await.unwrap();
    assert_eq!(again.misses, [(0..1, MissReason::Absent)], "it has left");
    assert_eq!(server.metric("kvstrata_corrupt_blocks_total{tier=\"dram\"}").await, 1.0);
    drop((handle, session));
    server.log();
    server.kill();
}

#[tokio::test]
async fn a_client_reads_the_arena_and_cannot_write_it() {
    let (_directory, server) = serve().await;
    let (handle, session) = with_blocks(&server).await;
    handle.get(&hashes(0..8), GetOptions::default(), &mut Seen::default()).await.unwrap();
    let shown = format!("/proc/{}/fd", server.process_id());
    let mut arenas = 0;
    for entry in fs::read_dir(shown).unwrap().flatten() {
        let name = fs::read_link(entry.path()).unwrap_or_default();
        if name.to_string_lossy().contains("kvstrata-arena") {
            arenas += 1;
            assert_sealed(&entry.path());
        }
    }
    assert!(arenas > 0);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let ours: Vec<_> = maps.lines().filter(|line| line.contains("kvstrata-arena")).collect();
    assert!(!ours.is_empty() && ours.iter().all(|line| line.contains(" r--s ")), "{ours:?}");
    drop((handle, session));
    server.stop(&[]).await;
}

/// Whoever has such a descriptor can open it anew for writing, and then write nothing.
fn assert_sealed(file: &FilePath) {
    let file = fs::File::options().read(true).write(true).open(file).unwrap();
    let denied = |result: std::io::Result<()>| {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(1), "EPERM");
    };
    denied(file.write_all_at(b"x", 0));
    denied(file.set_len(0));
    denied(file.set_len(1 << 40));
}

#[tokio::test]
async fn a_server_that_is_killed_is_an_error_and_the_next_one_is_mapped_anew() {
    let directory = tempfile::tempdir().unwrap();
    let first = sharing(&directory).dram("64MiB").start().await;
    let (handle, _session) = with_blocks(&first).await;
    let mut seen = Seen::default();
    handle.get(&hashes(0..8), GetOptions::default(), &mut seen).await.unwrap();
    first.kill();
    let lost = handle.get(&hashes(0..8), GetOptions::default(), &mut seen).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Unavailable, "{lost}");
    let second = sharing(&directory).dram("64MiB").start().await;
    let (handle, session) = with_blocks(&second).await;
    let mut seen = Seen::default();
    handle.get(&hashes(0..8), GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!(seen.blocks.len(), 8);
    drop((handle, session));
    second.stop(&[]).await;
}

#[tokio::test]
async fn a_get_that_is_dropped_lets_go_of_its_blocks() {
    struct Stuck;
    impl GetSink for Stuck {
        fn block(&mut self, _block: FetchedBlock<'_>) {
            panic!("a sink that fails");
        }
        fn miss(&mut self, _positions: Range<u32>, _reason: MissReason) {}
    }
    let (_directory, server) = serve().await;
    let (handle, session) = with_blocks(&server).await;
    let failing = handle.clone();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let _never = failing.get(&hashes(0..8), GetOptions::default(), &mut Stuck).await;
    });
    assert!(tasks.join_next().await.unwrap().unwrap_err().is_panic());
    wait_until("its blocks are let go", Duration::from_secs(10), async || {
        server.metric(PINNED).await == 0.0
    })
    .await;
    let mut seen = Seen::default();
    handle.get(&hashes(0..8), GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!(seen.blocks.len(), 8);
    drop((handle, session));
    server.stop(&[]).await;
}
