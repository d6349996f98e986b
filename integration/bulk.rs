//! The bulk port of real servers: gets and puts by the client, over TCP and over a Unix socket, and
//! peers that are none.

use std::time::Duration;

use kvstrata::client::{
    Client, ClientOptions, GetOptions, Handle, LookupOptions, NamespaceSpec, Path, PutBatch,
    PutOutcome, Session,
};
use kvstrata_tiers::error::ErrorKind;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

use crate::{
    client::{Seen, batch, hashes, namespace, pattern},
    harness::{Server, wait_until},
};

/// One part of a page, one of many pieces of a socket's buffer, one of several frames.
pub(crate) const PARTS: [u32; 3] = [4096, 300_000, 5 << 20];

pub(crate) async fn connect(server: &Server, path: Path, parts: &[u32]) -> (Handle, Session) {
    let options = ClientOptions { path, ..ClientOptions::default() };
    let client = Client::connect(server.grpc(), options).await.unwrap();
    let handle = client.open(namespace(parts)).await.unwrap();
    let session = client.session("bulk").await.unwrap();
    (handle, session)
}

/// Everything that is read is what was put, whole blocks and some parts of them.
pub(crate) async fn assert_reads(handle: &Handle, put: &PutBatch, misses: u32) {
    let count = u32::try_from(put.hashes.len()).unwrap();
    let mut all = Seen::default();
    let summary = handle.get(&hashes(0..count + misses), GetOptions::default(), &mut all).await;
    assert_eq!(summary.unwrap().missed, u64::from(misses));
    let expected = put.values.chunks(PARTS.len()).map(<[bytes::Bytes]>::concat);
    assert_eq!(all.blocks.len(), put.hashes.len());
    assert!(all.blocks.iter().map(|block| &block.1).eq(&expected.collect::<Vec<_>>()));
    let mut two = Seen::default();
    let chosen = GetOptions { parts: vec![0, 2], ..Default::default() };
    handle.get(&put.hashes, chosen, &mut two).await.unwrap();
    let expected = put.values.chunks(3).map(|block| [&*block[0], &*block[2]].concat());
    assert!(two.blocks.iter().map(|block| block.1.clone()).eq(expected), "a part differs");
}

async fn assert_round(server: &Server) {
    let (handle, session) = connect(server, Path::Bulk, &PARTS).await;
    let put = batch(0..6, &PARTS);
    let report = handle.put(&session, &put).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored; 6]);
    assert_eq!(handle.put(&session, &put).await.unwrap().outcomes, [PutOutcome::Duplicate; 6]);
    assert_reads(&handle, &put, 2).await;
    assert!(server.metric("kvstrata_bulk_connections").await >= 1.0);
    let bytes = 6 * PARTS.iter().sum::<u32>();
    assert_eq!(server.metric("kvstrata_put_bytes_total").await, f64::from(bytes));
    // The other path reads the same.
    let (grpc, _session) = connect(server, Path::Grpc, &PARTS).await;
    assert_reads(&grpc, &put, 0).await;
}

#[tokio::test]
async fn what_was_put_over_tcp_is_read_over_tcp_and_over_grpc() {
    let server = Server::builder().dram("512MiB").start().await;
    assert_round(&server).await;
    server.stop(&[]).await;
}

#[tokio::test]
async fn what_was_put_over_a_unix_socket_is_read_over_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("bulk");
    // What a server that was killed has left.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let server = Server::builder().dram("512MiB").set("server.bulk_listen", "none");
    let server = server.set("server.bulk_unix", path.to_str().unwrap()).start().await;
    assert_round(&server).await;
    server.stop(&[]).await;
    assert!(!path.exists(), "it goes away with the server");
}

#[tokio::test]
async fn a_socket_of_another_server_is_not_taken_for_this_one() {
    let directory = tempfile::tempdir().unwrap();
    let (path, moved) = (directory.path().join("bulk"), directory.path().join("moved"));
    let unix = |server: crate::harness::Builder| {
        server.dram("64MiB").set("server.bulk_unix", path.to_str().unwrap())
    };
    let first = unix(Server::builder()).start().await;
    std::fs::rename(&path, &moved).unwrap();
    let second = unix(Server::builder()).start().await;
    // The first one's clients find the second one's socket, and go on to TCP.
    let (handle, session) = connect(&first, Path::Bulk, &[4096]).await;
    handle.put(&session, &batch(0..4, &[4096])).await.unwrap();
    assert_eq!(first.metric("kvstrata_put_bytes_total").await, 4.0 * 4096.0);
    assert_eq!(second.metric("kvstrata_put_bytes_total").await, 0.0);
    drop((handle, session));
    second.stop(&[]).await;
    first.stop(&[]).await;
}

#[tokio::test]
async fn without_a_bulk_port_blocks_go_over_grpc_unless_that_is_ruled_out() {
    let server = Server::builder().dram("64MiB").set("server.bulk_listen", "none").start().await;
    let (handle, session) = connect(&server, Path::Auto, &[4096]).await;
    let report = handle.put(&session, &batch(0..4, &[4096])).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored; 4]);
    let (handle, session) = connect(&server, Path::Bulk, &[4096]).await;
    let refused = handle.put(&session, &batch(0..4, &[4096])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    drop(session);
    server.stop(&[]).await;
}

#[tokio::test]
async fn errors_have_the_kinds_that_they_have_over_grpc() {
    let server = Server::builder().dram("64MiB").start().await;
    let other = Server::builder().dram("64MiB").start().await;
    let (handle, session) = connect(&server, Path::Bulk, &[4096]).await;
    let stranger = connect(&other, Path::Bulk, &[4096]).await.0;
    let mut seen = Seen::default();
    let spec = NamespaceSpec::Opaque { name: "values".into(), bytes_max: 100 };
    let unknown = handle.client().open(spec).await.unwrap().at(stranger.client());
    let refused = unknown.get(&hashes(0..1), GetOptions::default(), &mut seen).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::UnknownNamespace, "{refused}");
    assert!(refused.to_string().contains("open the namespace again"), "{refused}");
    let durable = PutBatch { durable: true, ..batch(0..1, &[4096]) };
    let refused = handle.put(&session, &durable).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    let deadline = Some(Duration::from_secs(601));
    let late = GetOptions { deadline, ..GetOptions::default() };
    let refused = handle.get(&hashes(0..1), late, &mut seen).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
    drop(session);
    server.stop(&[]).await;
    other.stop(&[]).await;
}

#[tokio::test]
async fn durable_puts_are_on_nvme_when_they_are_answered() {
    let directory = tempfile::tempdir().unwrap();
    let nvme = directory.path().to_str().unwrap();
    let server = || {
        let server = Server::builder().dram("64MiB").home(directory.path());
        server.set("nvme.path", nvme).set("nvme.capacity", "256MiB").start()
    };
    let first = server().await;
    let parts = [1 << 20];
    let (handle, session) = connect(&first, Path::Bulk, &parts).await;
    let durable = PutBatch { durable: true, ..batch(0..40, &parts) };
    let report = handle.put(&session, &durable).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored; 40]);
    first.kill();
    let second = server().await;
    let (handle, session) = connect(&second, Path::Bulk, &parts).await;
    let mut seen = Seen::default();
    handle.get(&durable.hashes, GetOptions::default(), &mut seen).await.unwrap();
    let expected = (0..40).map(|number| pattern(number, 0, 1 << 20).to_vec());
    assert!(seen.blocks.iter().map(|block| block.1.clone()).eq(expected), "a block differs");
    drop(session);
    second.stop(&[]).await;
}

/// What a server says to bytes that are no frames, until it closes.
async fn answer_to(address: &str, bytes: &[u8]) -> String {
    let mut io = TcpStream::connect(address).await.unwrap();
    io.write_all(bytes).await.unwrap();
    let mut answer = Vec::new();
    timeout(Duration::from_secs(20), io.read_to_end(&mut answer))
        .await
        .unwrap()
        .unwrap_or_default();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test]
async fn peers_that_are_none_and_hundreds_that_say_nothing_keep_nobody_out() {
    let server = Server::builder().dram("64MiB").start().await;
    let before = server.status_bytes("RssAnon");
    let mut silent = Vec::new();
    for _ in 0..400 {
        silent.push(TcpStream::connect(server.bulk()).await.unwrap());
    }
    wait_until("the silent are counted", Duration::from_secs(10), async || {
        server.metric("kvstrata_bulk_connections").await == 400.0
    })
    .await;
    let http = answer_to(server.bulk(), b"GET / HTTP/1.1\r\nHost: kvstrata\r\n\r\n").await;
    assert!(http.contains("\"KB\" required"), "{http:?}");
    let giant = [b"KB\x03\0\x01\0\0\0".as_slice(), &[0xff; 16]].concat();
    let giant = answer_to(server.bulk(), &giant).await;
    assert!(giant.contains("4294967295 bytes given for Offer"), "{giant:?}");
    let (handle, session) = connect(&server, Path::Bulk, &[1 << 20]).await;
    let put = batch(0..8, &[1 << 20]);
    assert_eq!(handle.put(&session, &put).await.unwrap().outcomes, [PutOutcome::Stored; 8]);
    let found = handle.lookup(&put.hashes, LookupOptions::default()).await.unwrap();
    assert_eq!(found.prefix_blocks, 8);
    let grown = server.status_bytes("RssAnon").saturating_sub(before);
    assert!(grown < 64 << 20, "grown by {} MiB", grown >> 20);
    let start = Instant::now();
    wait_until("the silent are closed", Duration::from_secs(30), async || {
        server.metric("kvstrata_bulk_connections").await < 10.0
    })
    .await;
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    drop((silent, handle, session));
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_server_that_is_killed_is_an_error_at_once() {
    let server = Server::builder().dram("64MiB").start().await;
    let (auto, session) = connect(&server, Path::Auto, &[4096]).await;
    auto.put(&session, &batch(0..4, &[4096])).await.unwrap();
    let (bulk, _other) = connect(&server, Path::Bulk, &[4096]).await;
    let mut seen = Seen::default();
    for handle in [&auto, &bulk] {
        handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await.unwrap();
    }
    server.kill();
    let start = Instant::now();
    for handle in [&auto, &bulk] {
        let lost = handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await.unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Unavailable, "{lost}");
    }
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
}
