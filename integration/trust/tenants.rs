//! Two tenants on one node: neither sees, gets, changes, removes or counts what is the other's, by any
//! verb and over every path, whatever ids it knows.

use std::time::Duration;

use kvstrata::client::{
    Client, ClientOptions, Description, GetOptions, Handle, Lease, LeaseAsk, LookupOptions,
    Path as Way, PutOutcome, Session,
    router::messages::{Candidate, LookupRequest, Prefill, Prompt, ScoreRequest, WatchRequest},
};
use kvstrata_tiers::error::{Error, ErrorKind};

use super::{A, B, Files, OPERATOR, assert_no_token, connect, metric, page};
use crate::{
    client::{Seen, batch, hash, hashes, namespace},
    harness::Server,
};

const PARTS: [u32; 1] = [4096];
const BLOCKS: u32 = 4;

/// A client of one tenant.
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

    fn ask(&self) -> LookupOptions<'_> {
        let ask = LeaseAsk { session: &self.session, ttl: Duration::ZERO, bytes_max: 0 };
        LookupOptions { lease: Some(ask), ..LookupOptions::default() }
    }
}

/// The error of each verb with a namespace that is not its client's.
async fn every_verb(handle: &Handle, session: &Session) -> Vec<(&'static str, Error)> {
    let some = hashes(0..BLOCKS);
    let (all, mut seen) = (GetOptions::default(), Seen::default());
    let errors = vec![
        ("lookup", handle.lookup(&some, LookupOptions::default()).await.unwrap_err()),
        ("get", handle.get(&some, all, &mut seen).await.unwrap_err()),
        ("put", handle.put(session, &batch(0..BLOCKS, &PARTS)).await.unwrap_err()),
        ("describe", handle.describe(&some, Description::default()).await.unwrap_err()),
        ("touch", handle.touch(&some).await.unwrap_err()),
        ("prefetch", handle.prefetch(&some).await.unwrap_err()),
        ("remove", handle.remove(&some).await.unwrap_err()),
    ];
    assert!(seen.blocks.is_empty());
    errors.into_iter().chain(every_question(handle).await).collect()
}

/// The error of each question of a router about a namespace that is not its client's.
async fn every_question(handle: &Handle) -> Vec<(&'static str, Error)> {
    let client = handle.client();
    let namespace_id = || handle.id().as_bytes().to_vec().into();
    let prompt =
        || Prompt { namespace_id: namespace_id(), hashes: vec![1; 32].into(), ..Prompt::default() };
    let lookup = LookupRequest { prompts: vec![prompt()], ..LookupRequest::default() };
    let candidates = vec![Candidate { instance: "a".to_owned(), ..Candidate::default() }];
    let prefill = Some(Prefill { linear_ms: 1.0, quadratic_ms: 0.0 });
    let score =
        ScoreRequest { prompt: Some(prompt()), candidates, prefill, ..ScoreRequest::default() };
    let watch = WatchRequest { namespace_id: namespace_id(), ..WatchRequest::default() };
    vec![
        ("router_lookup", client.router_lookup(lookup).await.unwrap_err()),
        ("router_score", client.router_score(score).await.unwrap_err()),
        ("router_watch", client.router_watch(watch).await.unwrap_err()),
    ]
}

/// A tenant that has learnt the id of another's namespace is told what it would be told of any id.
async fn assert_unknown(server: &Server, a: &Side, b: &Side) {
    let elsewhere = Server::builder().dram("64MiB").start().await;
    let anywhere = Client::connect(elsewhere.grpc(), ClientOptions::default()).await.unwrap();
    let never = anywhere.open(namespace(&PARTS)).await.unwrap();
    let (theirs, nobodys) = (a.handle.at(&b.client), never.at(&b.client));
    let foreign = every_verb(&theirs, &b.session).await;
    let unknown = every_verb(&nobodys, &b.session).await;
    for ((verb, foreign), (_, unknown)) in foreign.into_iter().zip(unknown) {
        assert_eq!(foreign.kind(), ErrorKind::UnknownNamespace, "{verb}: {foreign}");
        let told = foreign.to_string().replace(&a.handle.id().to_string(), "ID");
        let expected = unknown.to_string().replace(&never.id().to_string(), "ID");
        assert_eq!(told, expected, "{verb}");
        assert!(told.contains("ID"), "{verb}: {told}");
    }
    assert!(metric(server, None, "kvstrata_corrupt_blocks_total{tier=\"dram\"}").await == 0.0);
    assert_untold(a, b).await;
}

/// The same engine of another tenant starts with an empty cache, and what it does stays its own.
async fn assert_apart(a: &Side, b: &Side) {
    assert_ne!(a.handle.id(), b.handle.id());
    let some = hashes(0..BLOCKS);
    let found = b.handle.lookup(&some, LookupOptions::default()).await.unwrap();
    assert_eq!((found.prefix_blocks, found.counts.miss), (0, BLOCKS));
    let mut seen = Seen::default();
    let summary = b.handle.get(&some, GetOptions::default(), &mut seen).await.unwrap();
    assert_eq!((summary.missed, seen.blocks.len()), (u64::from(BLOCKS), 0));
    let prefetched = b.handle.prefetch(&some).await.unwrap();
    let counts = [
        b.handle.touch(&some).await.unwrap(),
        b.handle.describe(&some, Description::default()).await.unwrap(),
        b.handle.remove(&some).await.unwrap(),
        prefetched.in_dram,
        prefetched.started,
    ];
    assert_eq!(counts, [0; 5]);
    // No duplicate, although the other has the same block, and gone again before the other looks.
    let report = b.handle.put(&b.session, &batch(0..1, &PARTS)).await.unwrap();
    assert_eq!(report.outcomes, [PutOutcome::Stored]);
    assert_eq!(b.handle.remove(&hashes(0..1)).await.unwrap(), 1);
}

/// A router of one tenant is told nothing of what the other has of the same prompt.
async fn assert_untold(a: &Side, b: &Side) {
    let packed: Vec<u8> = (0..BLOCKS).flat_map(|number| *hash(number).as_bytes()).collect();
    let prompt = Prompt { model: "test".to_owned(), hashes: packed.into(), ..Prompt::default() };
    let question = LookupRequest { prompts: vec![prompt], ..LookupRequest::default() };
    let told = async |side: &Side| {
        let mut answer = side.client.router_lookup(question.clone()).await.unwrap();
        answer.answers.remove(0).prefixes
    };
    assert_eq!(told(b).await, []);
    assert_eq!(told(a).await[0].blocks, BLOCKS);
}

/// A session and a lease are their tenant's, whoever knows their ids.
async fn assert_owned(a: &Side, b: &Side, lease: &Lease) {
    let ended = |what: &str, error: Error| {
        assert_eq!(error.kind(), ErrorKind::LeaseExpired, "{what}: {error}");
    };
    ended("renew", b.client.renew(lease, Duration::from_secs(9)).await.unwrap_err());
    b.client.release(lease.clone()).await.unwrap();
    let put = b.handle.put(&a.session, &batch(0..1, &PARTS)).await;
    ended("put", put.unwrap_err());
    let ask = a.ask();
    ended("lookup", b.handle.lookup(&hashes(0..1), ask).await.unwrap_err());
    let mut seen = Seen::default();
    let under = GetOptions { lease: Some(lease), ..GetOptions::default() };
    ended("get", b.handle.get(&hashes(0..1), under, &mut seen).await.unwrap_err());
    // The lease is as it was.
    a.client.renew(lease, Duration::from_secs(9)).await.unwrap();
}

async fn assert_counts(server: &Server, a: &Side, b: &Side) {
    let ours = a.client.stats().await.unwrap();
    assert_eq!((ours.index_blocks, ours.namespaces.len()), (u64::from(BLOCKS), 1));
    assert_eq!(ours.namespaces[0].namespace_id, a.handle.id().to_string());
    let theirs = b.client.stats().await.unwrap();
    assert_eq!((theirs.index_blocks, theirs.sessions, theirs.leases), (0, 1, 0));
    assert_eq!((theirs.tiers.len(), theirs.index_bytes, theirs.leased_bytes), (0, 0, 0));
    assert_eq!(theirs.namespaces.len(), 1);
    assert_eq!(theirs.namespaces[0].namespace_id, b.handle.id().to_string());
    assert_eq!(theirs.lookups.asked, theirs.namespaces[0].lookups.asked);
    let node = connect(server, OPERATOR, Way::Grpc).await.stats().await.unwrap();
    assert_eq!((node.namespaces.len(), node.sessions, node.leases), (2, 2, 1));
    assert_eq!(node.index_blocks, u64::from(BLOCKS));
    assert_eq!(node.tiers.len(), 1);
}

async fn assert_matrix(way: Way) {
    let files = Files::new();
    let server = files.tokens().start().await;
    let a = Side::open(&server, A, way).await;
    let b = Side::open(&server, B, way).await;
    let put = a.handle.put(&a.session, &batch(0..BLOCKS, &PARTS)).await.unwrap();
    assert_eq!(put.outcomes, vec![PutOutcome::Stored; BLOCKS as usize]);
    let found = a.handle.lookup(&hashes(0..BLOCKS), a.ask()).await.unwrap();
    let lease = found.lease.unwrap();

    assert_unknown(&server, &a, &b).await;
    assert_apart(&a, &b).await;
    assert_owned(&a, &b, &lease).await;
    assert_counts(&server, &a, &b).await;

    // All that was the first one's is still there.
    let mut seen = Seen::default();
    let under = GetOptions { lease: Some(&lease), ..GetOptions::default() };
    let summary = a.handle.get(&hashes(0..BLOCKS), under, &mut seen).await.unwrap();
    assert_eq!(summary.missed, 0);
    let expected = batch(0..BLOCKS, &PARTS).values;
    assert!(
        seen.blocks.iter().map(|block| &block.1[..]).eq(expected.iter().map(|value| &value[..]))
    );
    drop((a, b));
    assert_no_token(&server.stop(&[]).await);
}

#[tokio::test]
async fn tenants_are_apart_over_grpc() {
    Box::pin(assert_matrix(Way::Grpc)).await;
}

#[tokio::test]
async fn tenants_are_apart_over_the_bulk_port() {
    Box::pin(assert_matrix(Way::Bulk)).await;
}

#[tokio::test]
async fn without_a_valid_token_nothing_is_answered_and_each_refusal_is_counted() {
    let files = Files::new();
    let server = files.tokens().start().await;
    let good = Side::open(&server, A, Way::Grpc).await;
    let wrong = format!("{A}x");
    for token in [None, Some(wrong.as_str())] {
        let reason = if token.is_some() { "wrong" } else { "missing" };
        let parsed = token.map(|token| token.parse().unwrap());
        let options = ClientOptions { token: parsed, ..ClientOptions::default() };
        let stranger = Client::connect(server.grpc(), options).await.unwrap();
        let mut refused = vec![
            stranger.open(namespace(&PARTS)).await.map(drop).unwrap_err(),
            stranger.session("stranger").await.map(drop).unwrap_err(),
            stranger.stats().await.map(drop).unwrap_err(),
        ];
        let verbs = every_verb(&good.handle.at(&stranger), &good.session).await;
        refused.extend(verbs.into_iter().map(|(_verb, error)| error));
        for error in &refused {
            assert_eq!(error.kind(), ErrorKind::Unauthenticated, "{error}");
            assert!(!error.to_string().contains(A), "{error}");
        }
        let (status, said) = page(&server, None, token, "/metrics").await;
        assert_eq!(status, 401, "{said}");
        for (door, count) in [("grpc", refused.len()), ("bulk", 0), ("http", 1)] {
            let series = format!(
                "kvstrata_unauthenticated_requests_total{{door=\"{door}\",reason=\"{reason}\"}}"
            );
            assert_eq!(metric(&server, None, &series).await, count as f64, "{series}");
        }
    }
    // A tenant's token is none for what concerns all of them; probes need none.
    assert_eq!(page(&server, None, Some(A), "/metrics").await.0, 401);
    for probe in ["/livez", "/readyz"] {
        assert_eq!(page(&server, None, None, probe).await.0, 200);
    }
    for question in ["/v1/router/lookup", "/v1/router/score", "/check_blocks"] {
        assert_eq!(server.post(question, "{}").await.0, 401);
    }
    good.handle.put(&good.session, &batch(0..1, &PARTS)).await.unwrap();
    drop(good);
    assert_no_token(&server.stop(&[]).await);
}
