//! The main flow over the wire, against a real server.

use kvstrata_proto::v1::{PutOutcome, StatsRequest};

use crate::{
    harness::Server,
    wire::{Wire, namespace, payload},
};

#[tokio::test]
async fn what_was_put_is_found_and_read_back() {
    let server = Server::builder().dram("64MiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let blocks: Vec<u64> = (0..1000).collect();

    let before = wire.lookup(blocks.clone()).await;
    assert_eq!((before.asked, before.prefix_blocks), (1000, 0));
    assert_eq!(wire.put(&blocks).await, vec![PutOutcome::Stored; 1000]);
    assert_eq!(wire.put(&blocks).await, vec![PutOutcome::Duplicate; 1000]);

    let found = wire.lookup((0..1000).chain([5000, 1])).await;
    assert_eq!((found.asked, found.prefix_blocks), (1002, 1000));
    let counts = found.counts.unwrap();
    assert_eq!((counts.dram, counts.miss), (1000, 2));
    assert_eq!(found.runs.len(), 1);
    for (number, block) in blocks.iter().zip(wire.get(&blocks).await) {
        assert_eq!(block, Some(payload(*number)));
    }
    assert_eq!(wire.get(&[5000, 1]).await, [None, Some(payload(1))]);

    let stats = wire.client.stats(StatsRequest {}).await.unwrap().into_inner();
    let lookups = stats.lookups.unwrap();
    assert_eq!((lookups.asked, lookups.dram, lookups.miss), (2002, 1000, 1002));
    assert_eq!((stats.tiers[0].blocks, stats.tiers[0].get_blocks), (1000, 1001));
    assert_eq!(server.metric("kvstrata_put_blocks_total{outcome=\"stored\"}").await, 1000.0);
    drop(wire);
    server.stop(&[]).await;
}
