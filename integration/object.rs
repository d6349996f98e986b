//! The door to the object store, against a real S3 server.
//!
//! - [`conformance`]: lengths, ranges, parts, lists over many pages, and conditional writes that race.
//! - [`faults`]: the same through a proxy that breaks requests in every way a network and a store can.
//! - [`azure`]: the conformance on Azurite, on demand.
//! - [`adopt`]: a node that is gone, and the one that serves its packs.
//! - [`kills`]: nodes that are killed at chosen requests to the bucket, and two for one ordinal.
//! - [`tier`]: whole nodes over it, that lose their disks, are killed, and meet a store that fails.
//!
//! The server is SeaweedFS from `.venv`, one for all tests of the process ([`server`]); where it is not
//! installed the tests say that they were skipped.

mod adopt;
mod azure;
mod conformance;
mod faults;
mod kills;
mod proxy;
mod server;
mod tier;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_tiers::{
    object::{
        ObjectMetrics,
        bucket::{Bucket, BucketConfig},
    },
    testing::Draws,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

/// Time for a request that works: the machine may be building something else.
const PATIENCE: Duration = Duration::from_secs(60);

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

fn bucket(config: BucketConfig) -> Arc<Bucket> {
    Bucket::open(config, ObjectMetrics::register(&mut Registry::default())).unwrap()
}

/// Bytes that can be made again.
fn bytes(seed: u64, len: usize) -> Bytes {
    let mut draws = Draws::new(seed);
    let words = std::iter::repeat_with(|| draws.draw().to_le_bytes());
    words.flatten().take(len).collect::<Vec<u8>>().into()
}
