//! TLS on each listener: what gets through, and what is told to whom does not.

use std::time::Duration;

use kvstrata::client::{
    Client, ClientOptions, GetOptions, LookupOptions, Path as Way, PutOutcome, TlsOptions,
};
use kvstrata_tiers::error::{Error, ErrorKind};
use rcgen::SanType;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{Instant, timeout},
};

use super::{
    A, Files, OPERATOR, ask, assert_no_token, metric, options, page,
    pki::{Ca, expired},
};
use crate::{
    client::{Seen, batch, hashes, namespace},
    harness::{SERVER_WAIT, Server, wait_until},
};

/// A part of a page, and one of several frames.
const PARTS: [u32; 2] = [4096, 5 << 20];
/// What is told at once is told within this, on a machine that builds something else.
const AT_ONCE: Duration = Duration::from_secs(5);

/// Puts blocks and gets them, over one path.
async fn assert_round(server: &Server, way: Way, tls: TlsOptions) {
    let client = Client::connect(server.grpc(), options(A, way, Some(tls))).await.unwrap();
    let handle = client.open(namespace(&PARTS)).await.unwrap();
    let session = client.session("tls").await.unwrap();
    let start = if way == Way::Bulk { 0 } else { 4 };
    let put = batch(start..start + 4, &PARTS);
    let report = handle.put(&session, &put).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored; 4]);
    let mut seen = Seen::default();
    handle.get(&hashes(start..start + 4), GetOptions::default(), &mut seen).await.unwrap();
    let expected: Vec<_> = put.values.chunks(PARTS.len()).map(<[bytes::Bytes]>::concat).collect();
    assert!(seen.blocks.iter().map(|block| block.1.to_vec()).eq(expected), "{way:?}: bytes differ");
}

#[tokio::test]
async fn every_listener_speaks_tls() {
    let files = Files::new();
    Ca::new().give(&files);
    let server = files.tls().dram("512MiB").start().await;
    let ca = files.path("ca");
    for way in [Way::Grpc, Way::Bulk] {
        assert_round(&server, way, files.trusting()).await;
    }
    let bytes = 8 * PARTS.iter().sum::<u32>();
    assert_eq!(metric(&server, Some(&ca), "kvstrata_put_bytes_total").await, f64::from(bytes));
    assert!(metric(&server, Some(&ca), "kvstrata_bulk_connections").await >= 0.0);
    assert_eq!(page(&server, Some(&ca), None, "/readyz").await, (200, "ok\n".to_owned()));
    assert_eq!(page(&server, Some(&ca), Some(A), "/metrics").await.0, 401);
    for door in ["grpc", "bulk", "http"] {
        let series = format!("kvstrata_tls_failures_total{{door=\"{door}\"}}");
        assert_eq!(metric(&server, Some(&ca), &series).await, 0.0, "{door}");
    }
    assert_no_token(&server.stop(&[]).await);
}

/// At least so many failures are counted at a door; a client knows of its own before the server does.
async fn assert_counted(server: &Server, files: &Files, door: &str, failures: f64) {
    let series = format!("kvstrata_tls_failures_total{{door=\"{door}\"}}");
    let counted = async || metric(server, Some(&files.path("ca")), &series).await >= failures;
    wait_until(&series, SERVER_WAIT, counted).await;
}

/// Why a client does not get in, which it learns at once.
async fn refusal(endpoint: &str, options: ClientOptions) -> Error {
    let start = Instant::now();
    let error = match Client::connect(endpoint, options).await {
        Ok(client) => client.stats().await.unwrap_err(),
        Err(error) => error,
    };
    assert!(start.elapsed() < AT_ONCE, "{:?}: {error}", start.elapsed());
    error
}

#[tokio::test]
async fn a_client_of_another_ca_or_for_another_name_does_not_get_in() {
    let (files, other) = (Files::new(), Files::new());
    let (ca, stranger) = (Ca::new(), Ca::new());
    ca.give(&files);
    stranger.give(&other);
    let server = files.tls().start().await;
    let by = |tls| options(A, Way::Grpc, Some(tls));
    let error = refusal(server.grpc(), by(other.trusting())).await;
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
    assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    let misnamed = TlsOptions { server_name: Some("other.example".into()), ..files.trusting() };
    let error = refusal(server.grpc(), by(misnamed)).await;
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
    assert!(error.to_string().contains("other.example"), "{error}");
    assert_counted(&server, &files, "grpc", 2.0).await;
    // The system's CAs do not know this one.
    let secure = format!("https://{}", server.grpc());
    let error = refusal(&secure, options(A, Way::Grpc, None)).await;
    assert!(matches!(error.kind(), ErrorKind::Unauthenticated | ErrorKind::Invalid), "{error}");
    Client::connect(&secure, by(files.trusting())).await.unwrap().stats().await.unwrap();
    server.stop(&[]).await;
}

#[tokio::test]
async fn an_expired_certificate_is_refused_and_one_for_another_name_wants_that_name() {
    let (files, ca) = (Files::new(), Ca::new());
    ca.give(&files);
    let (cert, key) = ca.issue(expired);
    files.write("cert", &cert);
    files.write("key", &key);
    let server = files.tls().start().await;
    let by = |tls| options(A, Way::Grpc, Some(tls));
    let error = refusal(server.grpc(), by(files.trusting())).await;
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
    assert!(error.to_string().contains("expired"), "{error}");
    server.stop(&[]).await;

    let (cert, key) = ca.issue(|params| {
        params.subject_alt_names = vec![SanType::DnsName("kv.example".try_into().unwrap())];
    });
    files.write("cert", &cert);
    files.write("key", &key);
    let server = files.tls().dram("512MiB").start().await;
    let error = refusal(server.grpc(), by(files.trusting())).await;
    assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
    let named = TlsOptions { server_name: Some("kv.example".into()), ..files.trusting() };
    assert_round(&server, Way::Bulk, named).await;
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_plain_client_is_told_at_once_in_its_own_protocol() {
    let files = Files::new();
    Ca::new().give(&files);
    let server = files.tls().dram("512MiB").start().await;
    let error = refusal(server.grpc(), options(A, Way::Grpc, None)).await;
    assert!(error.to_string().contains("https://"), "{error}");

    let io = TcpStream::connect(server.http()).await.unwrap();
    let told = timeout(AT_ONCE, ask(io, None, "/livez")).await.unwrap();
    assert_eq!(told, (400, "this port speaks TLS: use https://\n".to_owned()));

    let mut io = TcpStream::connect(server.bulk()).await.unwrap();
    io.write_all(b"KB hello").await.unwrap();
    let mut told = Vec::new();
    timeout(AT_ONCE, io.read_to_end(&mut told)).await.unwrap().unwrap();
    let told = String::from_utf8_lossy(&told).into_owned();
    assert!(told.starts_with("KB") && told.contains("this port speaks TLS"), "{told}");
    for door in ["grpc", "bulk", "http"] {
        assert_counted(&server, &files, door, 1.0).await;
    }
    assert_round(&server, Way::Grpc, files.trusting()).await;
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_client_of_tls_is_told_that_a_plain_server_is_none() {
    let files = Files::new();
    Ca::new().give(&files);
    let server = files.tokens().start().await;
    let error = refusal(server.grpc(), options(A, Way::Grpc, Some(files.trusting()))).await;
    assert!(error.to_string().contains("does the server speak TLS?"), "{error}");
    let plain = format!("http://{}", server.grpc());
    let error = refusal(&plain, options(A, Way::Grpc, Some(files.trusting()))).await;
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("https:// required"), "{error}");
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_server_with_a_ca_of_clients_wants_their_certificates_but_not_for_pages() {
    let (files, stranger) = (Files::new(), Ca::new());
    let ca = Ca::new();
    ca.give(&files);
    let give = |name: &str, of: &Ca| {
        let (cert, key) = of.issue(|_params| {});
        files.write(&format!("{name}-cert"), &cert);
        files.write(&format!("{name}-key"), &key);
        let client = (files.path(&format!("{name}-cert")), files.path(&format!("{name}-key")));
        TlsOptions { client: Some(client), ..files.trusting() }
    };
    let (known, unknown) = (give("known", &ca), give("unknown", &stranger));
    let late = give("late", &ca);
    let (cert, key) = ca.issue(expired);
    files.write("late-cert", &cert);
    files.write("late-key", &key);
    let server = files.tls().dram("512MiB").set("tls.client_ca_file", &files.text("ca"));
    let server = server.start().await;
    for way in [Way::Grpc, Way::Bulk] {
        assert_round(&server, way, known.clone()).await;
    }
    for tls in [files.trusting(), unknown, late.clone()] {
        let error = refusal(server.grpc(), options(A, Way::Grpc, Some(tls))).await;
        assert!(
            matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unauthenticated),
            "{error}"
        );
    }
    assert_eq!(page(&server, Some(&files.path("ca")), Some(OPERATOR), "/metrics").await.0, 200);
    // A channel may try again.
    assert_counted(&server, &files, "grpc", 3.0).await;
    // Renewed, the same files let in.
    give("late", &ca);
    let renewed = Client::connect(server.grpc(), options(A, Way::Grpc, Some(late))).await.unwrap();
    renewed.stats().await.unwrap();
    server.stop(&[]).await;
}

#[tokio::test]
async fn whoever_begins_no_handshake_keeps_nobody_out() {
    let files = Files::new();
    Ca::new().give(&files);
    let server = files.tls().start().await;
    let mut silent = Vec::new();
    for address in [server.grpc(), server.bulk(), server.http()] {
        for _ in 0..20 {
            let mut io = TcpStream::connect(address).await.unwrap();
            // The beginning of a record that never goes on.
            io.write_all(&[0x16, 3, 1, 2, 0]).await.unwrap();
            silent.push(io);
        }
    }
    let client = options(A, Way::Grpc, Some(files.trusting()));
    let client = Client::connect(server.grpc(), client).await.unwrap();
    let handle = client.open(namespace(&PARTS)).await.unwrap();
    handle.lookup(&hashes(0..1), LookupOptions::default()).await.unwrap();
    assert_eq!(page(&server, Some(&files.path("ca")), None, "/livez").await.0, 200);
    drop(silent);
    server.stop(&[]).await;
}
