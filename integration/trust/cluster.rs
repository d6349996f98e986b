//! Nodes that call one another over TLS, for two tenants: whom they believe, and whom they do not.

use std::{collections::BTreeMap, ops::Range};

use kvstrata::client::{
    Client, ClientOptions, Locality, LookupOptions, Path as Way, TlsOptions,
    router::{
        Updates,
        messages::{LookupRequest, Prompt, WatchRequest, WatchUpdate, watch_update::Update},
    },
};
use kvstrata_tiers::error::ErrorKind;

use super::{
    A, B, assert_no_token,
    nodes::{MODES, Nodes, Side},
    options,
    pki::{Ca, expired},
};
use crate::{
    client::{hash, hashes, namespace},
    cluster_drain::PARTS,
    harness::{CLUSTER_SECRET, SERVER_WAIT, home_of, wait_until},
};

const BLOCKS: Range<u32> = 0..24;
/// What nodes say of others that leave before them.
const LEAVING: &[&str] = &["member"];

/// What a router is told of a tenant's blocks at one node.
struct Watched(Updates<WatchUpdate>);

impl Watched {
    /// Begins, and has the snapshot of nothing.
    async fn begin(side: &Side) -> Self {
        let mut updates = side.client.router_watch(WatchRequest::default()).await.unwrap();
        loop {
            match updates.next().await.unwrap().update.unwrap() {
                Update::Reset(_) => {}
                Update::SnapshotEnd(end) => break assert_eq!(end.blocks, 0),
                Update::Blocks(told) => panic!("{told:?}"),
            }
        }
        Self(updates)
    }

    /// Is told of these blocks next, in whatever order, and of no others.
    async fn assert_next(&mut self, numbers: Range<u32>) {
        let mut told = Vec::new();
        while told.len() < numbers.len() {
            let next = tokio::time::timeout(SERVER_WAIT, self.0.next()).await.unwrap();
            if let Update::Blocks(blocks) = next.unwrap().update.unwrap() {
                told.extend(blocks.hashes.chunks(32).map(<[u8]>::to_vec));
            }
        }
        let mut expected: Vec<_> = numbers.map(|number| hash(number).as_bytes().to_vec()).collect();
        told.sort_unstable();
        expected.sort_unstable();
        assert_eq!(told, expected);
    }
}

/// Blocks of one tenant at the first node are found and read at each by that tenant, over every path.
async fn assert_found(nodes: &Nodes) {
    for number in 0..nodes.count() {
        for way in [Way::Grpc, Way::Bulk] {
            let side = nodes.side(number, A, way).await;
            side.wait_for_prefix(&BLOCKS).await;
            let found = side.lookup(&BLOCKS).await;
            let locality = if number == 0 { Locality::Local } else { Locality::Remote };
            assert!(found.runs.iter().all(|run| run.locality == locality), "{:?}", found.runs);
            let got = side.get(BLOCKS).await;
            let remote = if number == 0 { 0 } else { BLOCKS.len() as u64 };
            assert_eq!((got.blocks(), got.remote), (BLOCKS.len() as u64, remote), "{way:?}");
        }
    }
}

/// The other tenant, which names the same blocks, finds and gets nothing at any node.
async fn assert_nothing(nodes: &Nodes) {
    let packed: Vec<u8> = BLOCKS.flat_map(|number| *hash(number).as_bytes()).collect();
    let prompt = Prompt { model: "test".to_owned(), hashes: packed.into(), ..Prompt::default() };
    let question = LookupRequest { prompts: vec![prompt], ..LookupRequest::default() };
    for number in 0..nodes.count() {
        for way in [Way::Grpc, Way::Bulk] {
            let side = nodes.side(number, B, way).await;
            let sparse = LookupOptions { sparse: true, ..LookupOptions::default() };
            let found = side.handle.lookup(&hashes(BLOCKS), sparse).await.unwrap();
            assert_eq!((found.prefix_blocks, found.counts.miss), (0, 24), "node {number}");
            assert!(found.runs.is_empty() && found.sparse.is_empty(), "{found:?}");
            let got = side.get(BLOCKS).await;
            assert_eq!((got.blocks(), got.missed), (0, 24), "node {number}");
            let told = side.client.router_lookup(question.clone()).await.unwrap();
            assert!(told.answers.iter().all(|answer| answer.prefixes.is_empty()), "{told:?}");
        }
    }
}

/// The first that each is told of is its own.
async fn assert_told_of_own(sides: &[Side], watched: &mut [Watched]) {
    for (own, (side, watched)) in (1000..).zip(sides.iter().zip(watched)) {
        side.put(own..own + 1).await;
        watched.assert_next(own..own + 1).await;
    }
}

async fn assert_two_tenants(mode: &'static str) {
    let nodes = Nodes::start(3, mode).await;
    let a = nodes.side(0, A, Way::Grpc).await;
    let mut told = Watched::begin(&a).await;
    let (mut others, mut untold) = (Vec::new(), Vec::new());
    for number in 0..nodes.count() {
        let side = nodes.side(number, B, Way::Grpc).await;
        untold.push(Watched::begin(&side).await);
        others.push(side);
    }
    a.put(BLOCKS).await;
    told.assert_next(BLOCKS).await;
    assert_found(&nodes).await;
    assert_nothing(&nodes).await;
    assert_told_of_own(&others, &mut untold).await;
    drop((a, others, told, untold));
    for log in nodes.stop(LEAVING).await {
        assert_no_token(&log);
    }
}

#[tokio::test]
async fn two_tenants_share_nodes_that_trust_one_another_by_a_ca_of_peers() {
    Box::pin(assert_two_tenants(MODES[0])).await;
}

#[tokio::test]
async fn two_tenants_share_nodes_that_show_one_another_certificates() {
    Box::pin(assert_two_tenants(MODES[1])).await;
}

#[tokio::test]
async fn a_node_with_a_certificate_of_another_ca_is_not_believed_and_the_rest_works_on() {
    for mode in MODES {
        let mut nodes = Nodes::start(2, mode).await;
        let stranger = Ca::new();
        nodes.files.write("stranger", &stranger.pem());
        nodes.give("node-2", &stranger);
        let server = nodes.builder().start().await;
        nodes.take(server, "stranger");
        // Gossip knows it, and nobody knows what it has. It may call others where they ask for no certificate.
        for number in [0, 1] {
            nodes.wait_for(number, 3, 1).await;
        }
        nodes.wait_for(2, 3, if mode == MODES[0] { 0 } else { 2 }).await;
        nodes.put(1, BLOCKS).await;
        nodes.put(2, 100..124).await;
        let failures = "kvstrata_tls_failures_total{door=\"grpc\"}";
        let before = nodes.metric(2, failures).await;
        wait_until("both have called it again", SERVER_WAIT, async || {
            nodes.metric(2, failures).await >= before + 3.0
        })
        .await;
        nodes.wait_for_blocks(0, BLOCKS).await;
        assert_unheard(&nodes, 100..124).await;
        if mode == MODES[1] {
            assert!(nodes.metric(0, failures).await >= 1.0, "nor is it let in");
        }
        nodes.stop(LEAVING).await;
    }
}

/// Nodes 0 and 1 find nothing of these blocks, and say that there may be more.
async fn assert_unheard(nodes: &Nodes, numbers: Range<u32>) {
    for number in [0, 1] {
        let side = nodes.side(number, A, Way::Auto).await;
        let found = side.lookup(&numbers).await;
        assert_eq!((found.prefix_blocks, found.partial), (0, true), "node {number}");
        assert_eq!(side.get(numbers.clone()).await.blocks(), 0, "node {number}");
    }
}

#[tokio::test]
async fn a_node_whose_certificate_has_expired_is_not_believed_until_it_has_another() {
    let mut nodes = Nodes::new(MODES[1]);
    nodes.give("node-0", &nodes.ca);
    nodes.add().await;
    nodes.put(0, 100..124).await;
    nodes.write("node-0", nodes.ca.issue(expired));
    let connect = async || {
        let options = options(A, Way::Grpc, Some(nodes.tls(0)));
        Client::connect(nodes.node(0).grpc(), options).await.map_err(|error| error.to_string())
    };
    wait_until("its certificate has expired", SERVER_WAIT, async || {
        connect().await.is_err_and(|error| error.contains("expired"))
    })
    .await;
    for number in [1, 2] {
        nodes.give(&format!("node-{number}"), &nodes.ca);
        nodes.add().await;
    }
    for number in [1, 2] {
        nodes.wait_for(number, 3, 1).await;
    }
    nodes.put(1, BLOCKS).await;
    nodes.wait_for_blocks(2, BLOCKS).await;
    for number in [1, 2] {
        let side = nodes.side(number, A, Way::Auto).await;
        let found = side.lookup(&(100..124)).await;
        assert_eq!((found.prefix_blocks, found.partial), (0, true), "node {number}");
    }
    nodes.give("node-0", &nodes.ca);
    for number in [1, 2] {
        nodes.wait_for(number, 3, 0).await;
        nodes.wait_for_blocks(number, 100..124).await;
    }
    nodes.stop(LEAVING).await;
}

/// What nodes of this secret show one another, as docs/formats.md says.
fn token_of(secret: [u8; 32], cluster: &str) -> String {
    let context = "kvstrata 2026-11 cluster token v1";
    hex::encode(blake3::derive_key(context, &[&secret, cluster.as_bytes()].concat()))
}

#[tokio::test]
async fn a_node_with_another_secret_is_never_a_member() {
    let mut nodes = Nodes::start(2, MODES[0]).await;
    let other = [0x5f; 32];
    let home = home_of(other);
    nodes.give("node-2", &nodes.ca);
    let server = nodes.builder().home(home.path()).start().await;
    nodes.take(server, "ca");
    nodes.put(2, 100..124).await;
    let forged = "kvstrata_cluster_datagrams_total{outcome=\"forged\"}";
    wait_until("it was heard and refused", SERVER_WAIT, async || {
        nodes.metric(0, forged).await >= 5.0
    })
    .await;
    nodes.wait_for(2, 1, 0).await;
    for number in [0, 1] {
        nodes.wait_for(number, 2, 0).await;
        let found = nodes.side(number, A, Way::Auto).await.lookup(&(100..124)).await;
        assert_eq!((found.prefix_blocks, found.partial), (0, false), "nobody that could have more");
    }
    nodes.put(1, BLOCKS).await;
    nodes.wait_for_blocks(0, BLOCKS).await;
    // Nor is its word taken where gossip is not asked.
    let said: BTreeMap<_, _> = [other, CLUSTER_SECRET]
        .into_iter()
        .map(|secret| (secret, token_of(secret, "kvstrata")))
        .collect();
    for (secret, token) in said {
        let way = ClientOptions { acting_for: Some("a".to_owned()), ..ClientOptions::default() };
        let TlsOptions { ca_file, .. } = nodes.tls(0);
        let tls = Some(TlsOptions { ca_file, ..TlsOptions::default() });
        let options = ClientOptions { token: Some(token.parse().unwrap()), tls, ..way };
        let client = Client::connect(nodes.node(0).grpc(), options).await.unwrap();
        let opened = client.open(namespace(&PARTS)).await.map(drop).map_err(|error| error.kind());
        let expected = if secret == other { Err(ErrorKind::Unauthenticated) } else { Ok(()) };
        assert_eq!(opened, expected);
    }
    nodes.stop(LEAVING).await;
}
