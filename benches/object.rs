//! What do packs cost and bring on a real S3 server, against an object for each block, and how long does
//! a node take that finds a million blocks in its bucket?
//!
//! Floor: plain HTTP requests of presigned URLs to the same server in the same round, an object of the
//! size of a pack each. Beside it `object_store` as every other cache uses it: an object for each block.
//! Not measured: a store behind a network, whose answers take tens of milliseconds; codings alone
//! (benches/codec.rs).
//!
//! ```text
//! cargo bench --profile dev --bench object -- all          (or: throughput, restart)
//! ```
//! The dev profile is optimised. Needs SeaweedFS (scripts/python-tools.sh), and 10 GB in `TMPDIR`.
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "object/content.rs"]
mod content;
#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "object/node.rs"]
mod node;
#[path = "object/plain.rs"]
mod plain;
#[path = "object/restart.rs"]
mod restart;
#[path = "../integration/object/server.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod server;
#[path = "../integration/shared_data.rs"]
mod shared_data;
#[path = "../integration/skipped.rs"]
mod skipped;
mod support;
#[path = "object/throughput.rs"]
mod throughput;

use std::sync::Arc;

use kvstrata_tiers::object::{
    ObjectMetrics,
    bucket::{Bucket, BucketConfig},
};
use prometheus_client::registry::Registry;

fn bucket(config: BucketConfig) -> Arc<Bucket> {
    Bucket::open(config, ObjectMetrics::register(&mut Registry::default())).unwrap()
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let parts: Vec<String> =
        std::env::args().skip(1).filter(|part| !part.starts_with('-')).collect();
    let wanted = |part: &str| parts.iter().any(|given| given == part || given == "all");
    if !["all", "throughput", "restart"].into_iter().any(wanted) {
        println!("name a part: all, throughput, restart");
        return;
    }
    let server = runtime.block_on(server::S3Server::of_all_tests("bench object"));
    let Some(server) = server else { return };
    if wanted("throughput") {
        runtime.block_on(throughput::against_plain_calls(server));
    }
    if wanted("restart") {
        runtime.block_on(restart::of_a_million_blocks(server));
    }
}
