//! Tokens and certificates that change while traffic flows.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use kvstrata::client::{
    Client, GetOptions, Handle, Path as Way, Session, SessionState, TlsOptions,
};
use kvstrata_tiers::error::ErrorKind;
use tokio::task::JoinSet;

use super::{A, B, Files, OPERATOR, assert_no_token, metric, options, pki::Ca};
use crate::{
    client::{Seen, batch, hashes, namespace},
    harness::{SERVER_WAIT, Server, wait_until},
};

/// The token that takes the place of the first one.
const NEXT: &str = "tenant-a-next--0123456789-0123456789";
const PARTS: [u32; 1] = [4096];

/// A client that gets a block over and over; a call that fails ends it.
struct Traffic {
    rounds: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    running: JoinSet<()>,
}

struct Caller {
    client: Client,
    handle: Handle,
    session: Session,
}

impl Caller {
    async fn open(server: &Server, token: &str, way: Way, tls: Option<TlsOptions>) -> Self {
        let client = Client::connect(server.grpc(), options(token, way, tls)).await.unwrap();
        let handle = client.open(namespace(&PARTS)).await.unwrap();
        let session = client.session("caller").await.unwrap();
        handle.put(&session, &batch(0..4, &PARTS)).await.unwrap();
        Self { client, handle, session }
    }

    async fn get(&self) -> kvstrata_tiers::error::Result<()> {
        let mut seen = Seen::default();
        self.handle.get(&hashes(0..4), GetOptions::default(), &mut seen).await?;
        assert_eq!(seen.blocks.len(), 4);
        Ok(())
    }

    fn traffic(self) -> Traffic {
        let (rounds, stop) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (counts, stops) = (Arc::clone(&rounds), Arc::clone(&stop));
        let mut running = JoinSet::new();
        running.spawn(async move {
            while !stops.load(Ordering::Relaxed) {
                self.get().await.unwrap();
                counts.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            assert_eq!(self.session.state(), SessionState::Open);
        });
        Traffic { rounds, stop, running }
    }
}

impl Traffic {
    fn rounds(&self) -> u32 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Ends it; it must go on until then, and nothing may have failed.
    async fn end(mut self) {
        let before = self.rounds();
        let rounds = Arc::clone(&self.rounds);
        wait_until("traffic flows", SERVER_WAIT, async || {
            rounds.load(Ordering::Relaxed) > before + 10
        })
        .await;
        self.stop.store(true, Ordering::Relaxed);
        self.running.join_next().await.unwrap().unwrap();
    }
}

/// Waits until files were loaded, or found to be of no use, so often.
async fn reloaded(
    server: &Server,
    ca: Option<&std::path::Path>,
    what: &str,
    outcome: &str,
    count: f64,
) {
    let series = format!("kvstrata_reloads_total{{what=\"{what}\",outcome=\"{outcome}\"}}");
    wait_until(&series, SERVER_WAIT, async || metric(server, ca, &series).await >= count).await;
    assert_eq!(metric(server, ca, &series).await, count);
}

/// The lines of the file that stay.
fn others() -> String {
    format!("b {B}\nops {OPERATOR} operator\n")
}

/// A second token of the tenant lets in beside the first; returns the traffic of its client.
async fn assert_joined(server: &Server, files: &Files, old: &Caller, way: Way) -> Traffic {
    old.get().await.unwrap();
    files.write("tokens", &format!("a {A}\na {NEXT}\n{}", others()));
    reloaded(server, None, "tokens", "ok", 1.0).await;
    let next = Caller::open(server, NEXT, way, None).await;
    // What one has put the other finds.
    assert_eq!(next.handle.id(), old.handle.id());
    old.get().await.unwrap();
    assert_eq!(old.session.state(), SessionState::Open);
    next.traffic()
}

/// A client whose token is gone is let go, and so is what it had.
async fn assert_let_go(old: &Caller) {
    wait_until("the session ends", SERVER_WAIT, async || {
        matches!(old.session.state(), SessionState::Ended(_))
    })
    .await;
    let refused = old.client.stats().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthenticated, "{refused}");
    // The first one may meet a connection that is being closed.
    let kinds = [old.get().await, old.get().await].map(|got| got.unwrap_err().kind());
    assert!(matches!(kinds[0], ErrorKind::Unauthenticated | ErrorKind::Unavailable), "{kinds:?}");
    assert_eq!(kinds[1], ErrorKind::Unauthenticated);
}

/// A file that cannot be used changes nothing; a token that comes back may be somebody else's.
async fn assert_reused(server: &Server, files: &Files, old: &Caller) {
    files.write("tokens", "a short\n");
    reloaded(server, None, "tokens", "failed", 1.0).await;
    files.write("tokens", &format!("a {NEXT}\n{}c {A}\n", others()));
    reloaded(server, None, "tokens", "ok", 3.0).await;
    assert!(old.client.stats().await.unwrap().namespaces.is_empty());
}

async fn assert_tokens_rotate(way: Way) {
    let files = Files::new();
    let server = files.tokens().start().await;
    let old = Caller::open(&server, A, way, None).await;
    let bystander = Caller::open(&server, B, way, None).await.traffic();
    let next = assert_joined(&server, &files, &old, way).await;
    files.write("tokens", &format!("a {NEXT}\n{}", others()));
    reloaded(&server, None, "tokens", "ok", 2.0).await;
    assert_let_go(&old).await;
    assert_reused(&server, &files, &old).await;
    next.end().await;
    bystander.end().await;
    drop(old);
    let log = server.stop(&["files changed and cannot be used"]).await;
    assert_no_token(&log);
    assert!(!log.contains(NEXT), "a token is in the log");
    assert!(log.contains("line 1: token: 5 characters given"), "{log}");
}

#[tokio::test]
async fn tokens_change_while_traffic_flows_over_grpc() {
    assert_tokens_rotate(Way::Grpc).await;
}

#[tokio::test]
async fn tokens_change_while_traffic_flows_over_bulk() {
    assert_tokens_rotate(Way::Bulk).await;
}

#[tokio::test]
async fn certificates_change_while_traffic_flows() {
    let (first, second) = (Files::new(), Files::new());
    Ca::new().give(&first);
    Ca::new().give(&second);
    let server = first.tls().start().await;
    let grpc = Caller::open(&server, A, Way::Grpc, Some(first.trusting())).await.traffic();
    let bulk = Caller::open(&server, A, Way::Bulk, Some(first.trusting())).await.traffic();

    for name in ["cert", "key"] {
        first.write(name, &std::fs::read_to_string(second.path(name)).unwrap());
    }
    let ca = second.path("ca");
    let refused = async |files: &Files| {
        let options = options(A, Way::Grpc, Some(files.trusting()));
        Client::connect(server.grpc(), options).await.err().map(|error| error.kind())
    };
    wait_until("the next certificate", SERVER_WAIT, async || refused(&second).await.is_none())
        .await;
    assert_eq!(refused(&first).await, Some(ErrorKind::Unauthenticated));
    reloaded(&server, Some(&ca), "tls", "ok", 1.0).await;

    // One that cannot be used changes nothing.
    first.write("key", "no key");
    reloaded(&server, Some(&ca), "tls", "failed", 1.0).await;
    assert_eq!(refused(&second).await, None);
    // Nor do files that are gone.
    std::fs::remove_file(first.path("cert")).unwrap();
    reloaded(&server, Some(&ca), "tls", "failed", 2.0).await;
    let late = Caller::open(&server, A, Way::Bulk, Some(second.trusting())).await;
    late.get().await.unwrap();

    for traffic in [grpc, bulk] {
        traffic.end().await;
    }
    drop(late);
    assert_no_token(&server.stop(&["files changed and cannot be used"]).await);
}

#[tokio::test]
async fn a_client_takes_a_ca_that_has_changed_with_its_next_connection() {
    let (first, second, own) = (Files::new(), Files::new(), Files::new());
    Ca::new().give(&first);
    Ca::new().give(&second);
    let text = |files: &Files, name: &str| std::fs::read_to_string(files.path(name)).unwrap();
    own.write("ca", &text(&first, "ca"));
    let server = first.tls().start().await;
    let caller = Caller::open(&server, A, Way::Bulk, Some(own.trusting())).await;
    for name in ["cert", "key"] {
        first.write(name, &text(&second, name));
    }
    wait_until("the next certificate", SERVER_WAIT, async || {
        let options = options(A, Way::Grpc, Some(second.trusting()));
        Client::connect(server.grpc(), options).await.is_ok()
    })
    .await;
    // A session has connections of its own.
    let put = async || {
        let session = caller.client.session("next").await.unwrap();
        let put = caller.handle.put(&session, &batch(0..4, &PARTS)).await;
        put.map(drop).map_err(|error| error.kind())
    };
    assert_eq!(put().await, Err(ErrorKind::Unauthenticated));
    own.write("ca", &text(&second, "ca"));
    assert_eq!(put().await, Ok(()));
    own.write("ca", "no certificate");
    assert_eq!(put().await, Ok(()), "one that cannot be used changes nothing");
    caller.get().await.unwrap();
    server.stop(&[]).await;
}
