//! What does a lookup of 32,768 hashes cost over the wire, and how much memory does a node use whose
//! arena is full? How fast blocks move is what the bench `bulk` measures.
//!
//! ```text
//! cargo bench --profile dev --bench rpc
//! ```
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "bulk/setup.rs"]
mod setup;
mod support;

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use harness::Server;
use kvstrata::client::{
    Client, FetchedBlock, GetOptions, GetSink, LeaseAsk, LookupOptions, MissReason, Path, Session,
};
use setup::{connect, list, open, put};
use support::Samples;
use tokio::time::Instant;

const ASKED: u64 = 32_768;
const LOOKUPS: usize = 200;
const LIMIT: &str = "1GiB";
const LIMIT_BYTES: u64 = 1 << 30;

#[tokio::main]
async fn main() {
    let server = Server::builder().set("memory.limit", LIMIT).start().await;
    let client = connect(&server, Path::Auto).await;
    let session = client.session("bench").await.unwrap();
    lookups(&client, &session).await;
    memory(&client, &session, &server).await;
    drop((client, session));
    server.stop(&[]).await;
}

async fn lookups(client: &Client, session: &Session) {
    let handle = open(client, "lookups", 64).await;
    let value = Bytes::from(vec![1; 64]);
    assert_eq!(put(&handle, session, 0..ASKED, &value, false).await, ASKED);
    let hashes = list(0..ASKED);
    for leased in [false, true] {
        let (mut lookups, mut releases) = (Vec::new(), Vec::new());
        for _ in 0..LOOKUPS {
            let ask = LeaseAsk { session, ttl: Duration::ZERO, bytes_max: 0 };
            let options =
                LookupOptions { lease: leased.then_some(ask), ..LookupOptions::default() };
            let started = Instant::now();
            let found = handle.lookup(&hashes, options).await.unwrap();
            lookups.push(started.elapsed());
            assert_eq!(u64::from(found.prefix_blocks), ASKED);
            if let Some(lease) = found.lease {
                let started = Instant::now();
                client.release(lease).await.unwrap();
                releases.push(started.elapsed());
            }
        }
        let name = if leased { "with lease" } else { "without lease" };
        println!("lookup of {ASKED} over gRPC, {name}: {}", Samples::from_durations(&lookups));
        if leased {
            println!("  its release: {}", Samples::from_durations(&releases));
        }
    }
}

/// Fills the arena twice over with blocks of two sizes and looks at the server's memory.
async fn memory(client: &Client, session: &Session, server: &Server) {
    let capacity = client.stats().await.unwrap().tiers[0].capacity_bytes;
    for (model, block_bytes) in [("large", 2 << 20), ("small", 16 << 10)] {
        let handle = open(client, model, block_bytes).await;
        let value = Bytes::from(vec![3; block_bytes as usize]);
        let blocks = 2 * capacity / u64::from(block_bytes);
        let batch = (64 << 20) / u64::from(block_bytes);
        for start in (0..blocks).step_by(usize::try_from(batch).unwrap()) {
            // Read again, so that the context may grow past its share.
            put(&handle, session, start..start + batch, &value, false).await;
            let hashes = list(start..start + batch);
            let mut sink = Ignore;
            handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
        }
        let used = client.stats().await.unwrap().tiers[0].used_bytes;
        let (all, heap) = (server.status_bytes("VmRSS"), server.status_bytes("RssAnon"));
        println!(
            "memory.limit {LIMIT}, dram {} MiB, {:.1} % of it in use by {model} blocks: RSS {} MiB \
             ({:.1} % of the limit), of which heap {} MiB",
            capacity >> 20,
            used as f64 * 100.0 / capacity as f64,
            all >> 20,
            all as f64 * 100.0 / LIMIT_BYTES as f64,
            heap >> 20
        );
    }
}

struct Ignore;

impl GetSink for Ignore {
    fn block(&mut self, _block: FetchedBlock<'_>) {}

    fn miss(&mut self, _positions: Range<u32>, _reason: MissReason) {}
}
