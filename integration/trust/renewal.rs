//! All nodes of a cluster get other keys, of another CA, while a client reads: nothing that it reads fails,
//! and nodes go on reaching one another.

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use kvstrata::client::{Client, GetOptions, LeaseAsk, LookupOptions, Path as Way, TlsOptions};
use tokio::task::JoinSet;

use super::{
    A, Files,
    nodes::{MODES, Nodes, Side},
    options,
    pki::Ca,
};
use crate::{
    client::{Seen, hashes},
    cluster_drain::assert_right,
    harness::{SERVER_WAIT, wait_until},
};

/// Blocks at the node that is asked, which are leased, and those behind them, at another one.
const LEASED: Range<u32> = 0..24;
const READ: Range<u32> = 0..48;
/// For a lease that is renewed in each round: longer than a machine stands still.
const LEASE: Duration = Duration::from_secs(30);

/// A client that reads until it is told to stop; a read that is not whole ends it.
struct Reader {
    rounds: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    running: JoinSet<()>,
}

impl Reader {
    async fn begin(side: Side) -> Self {
        side.wait_for_prefix(&READ).await;
        let (rounds, stop) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let (counts, stops) = (Arc::clone(&rounds), Arc::clone(&stop));
        let mut running = JoinSet::new();
        running.spawn(async move {
            let ask = LeaseAsk { session: &side.session, ttl: LEASE, bytes_max: 0 };
            let options = LookupOptions { lease: Some(ask), ..LookupOptions::default() };
            let found = side.handle.lookup(&hashes(READ), options).await.unwrap();
            let mut lease = found.lease.unwrap();
            assert_eq!((found.prefix_blocks, lease.blocks), (48, 24));
            while !stops.load(Ordering::Relaxed) {
                let mut seen = Seen::default();
                let options = GetOptions { lease: Some(&lease), ..GetOptions::default() };
                side.handle.get(&hashes(READ), options, &mut seen).await.unwrap();
                assert_eq!(assert_right(0, &seen), READ.len(), "misses: {:?}", seen.misses);
                lease = side.client.renew(&lease, LEASE).await.unwrap();
                counts.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { rounds, stop, running }
    }

    /// Ends it; it must go on until then.
    async fn end(mut self) {
        let before = self.rounds.load(Ordering::Relaxed);
        wait_until("it reads on", SERVER_WAIT, async || {
            self.rounds.load(Ordering::Relaxed) > before + 5
        })
        .await;
        self.stop.store(true, Ordering::Relaxed);
        self.running.join_next().await.unwrap().unwrap();
    }
}

/// Whether a client that trusts this CA alone is let in by a node.
async fn is_known_by(nodes: &Nodes, number: usize, ca: &str, files: &Files) -> bool {
    let tls = TlsOptions { ca_file: Some(files.path(ca)), ..nodes.tls(number) };
    let client = Client::connect(nodes.node(number).grpc(), options(A, Way::Grpc, Some(tls))).await;
    match client {
        Ok(client) => client.stats().await.is_ok(),
        Err(_) => false,
    }
}

/// Waits until all nodes have loaded their files so often.
async fn reloaded(nodes: &Nodes, count: f64) {
    let series = "kvstrata_reloads_total{what=\"tls\",outcome=\"ok\"}";
    for number in 0..nodes.count() {
        wait_until("files are loaded", SERVER_WAIT, async || {
            nodes.metric(number, series).await >= count
        })
        .await;
    }
}

/// Puts certificates of the next CA in the place of all, as docs/operations.md says: both CAs are trusted meanwhile.
async fn renew(nodes: &mut Nodes) {
    let next = Ca::new();
    let (before, after) = (nodes.ca.pem(), next.pem());
    nodes.files.write("before", &before);
    nodes.files.write("after", &after);
    for number in 0..nodes.count() {
        nodes.trust(number, "before");
    }
    nodes.files.write("ca", &format!("{before}{after}"));
    reloaded(nodes, 1.0).await;
    for number in 0..nodes.count() {
        nodes.give(&format!("node-{number}"), &next);
    }
    nodes.give("client", &next);
    for number in 0..nodes.count() {
        wait_until("the next certificate", SERVER_WAIT, async || {
            is_known_by(nodes, number, "after", &nodes.files).await
        })
        .await;
        nodes.trust(number, "after");
    }
    nodes.files.write("ca", &after);
    reloaded(nodes, 3.0).await;
    for number in 0..nodes.count() {
        assert!(!is_known_by(nodes, number, "before", &nodes.files).await, "node {number}");
    }
    nodes.ca = next;
}

#[tokio::test]
async fn all_keys_change_while_a_client_reads_and_nodes_call_one_another() {
    let mut nodes = Nodes::start(3, MODES[1]).await;
    nodes.put(0, LEASED).await;
    nodes.put(1, 24..48).await;
    let reader = Reader::begin(nodes.side(0, A, Way::Bulk).await).await;
    renew(&mut nodes).await;
    // What is new is found, by nodes that know one another and by one that comes with the next certificate.
    nodes.put(1, 200..224).await;
    nodes.wait_for_blocks(2, 200..224).await;
    nodes.give("node-3", &nodes.ca);
    let server = nodes.builder().start().await;
    nodes.take(server, "after");
    for number in 0..4 {
        nodes.wait_for(number, 4, 0).await;
    }
    nodes.put(3, 300..324).await;
    for number in 0..3 {
        nodes.wait_for_blocks(number, 300..324).await;
    }
    nodes.wait_for_blocks(3, 200..224).await;
    reader.end().await;
    nodes.stop(&["member"]).await;
}
