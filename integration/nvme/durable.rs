//! Durable puts: what is acknowledged survives a kill, and what cannot be is not acknowledged.

use kvstrata_proto::v1::PutOutcome;
use tonic::Code;

use super::{Home, ON_NVME, count_right, store};
use crate::{
    harness::Server,
    wire::{Wire, namespace, namespace_of},
};

#[tokio::test]
async fn what_a_durable_put_has_stored_survives_a_kill_right_after() {
    let home = Home::new();
    let mut stored = 0;
    for round in 1..4 {
        let server = home.server().start().await;
        let mut wire = Wire::connect(&server, namespace("m")).await;
        assert_eq!(count_right(&mut wire, 0..stored).await as u64, stored, "start {round}");
        let more = stored..stored + 100 * round;
        store(&mut wire, more.clone(), true).await;
        stored = more.end;
        server.kill();
    }
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let counts = wire.lookup(0..stored).await.counts.unwrap();
    assert_eq!(u64::from(counts.nvme), stored, "{counts:?}");
    assert_eq!(count_right(&mut wire, 0..stored).await as u64, stored);
    drop(wire);
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_duplicate_of_what_was_in_dram_only_becomes_durable() {
    let home = Home::new();
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    store(&mut wire, 0..200, false).await;
    let numbers: Vec<u64> = (0..220).collect();
    let outcomes = wire.put_durable(&numbers).await.unwrap();
    assert_eq!(outcomes[..200], [PutOutcome::Duplicate; 200]);
    assert_eq!(outcomes[200..], [PutOutcome::Stored; 20]);
    server.kill();
    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(count_right(&mut wire, numbers).await, 220);
}

#[tokio::test]
async fn what_nvme_cannot_take_is_not_durable_and_readable_all_the_same() {
    let home = Home::new();
    let server = home.server().set("nvme.segment_bytes", "1MiB").start().await;
    let mut wire = Wire::connect(&server, namespace_of("large", 1 << 20)).await;
    let outcomes = wire.put_durable(&[1, 2]).await.unwrap();
    assert_eq!(outcomes, [PutOutcome::NotDurable; 2], "a block and its header need more");
    assert_eq!(count_right(&mut wire, [1, 2]).await, 2);
    assert_eq!(server.metric(ON_NVME).await, 0.0);
    let refused = "kvstrata_put_blocks_total{outcome=\"not_durable\"}";
    assert_eq!(server.metric(refused).await, 2.0);
    let mut small = Wire::connect(&server, namespace("small")).await;
    store(&mut small, 0..10, true).await;
    drop((wire, small));
    server.stop(&["nvme does not take all demotions"]).await;
}

#[tokio::test]
async fn without_the_tier_a_durable_put_is_unimplemented_and_nothing_is_stored() {
    let server = Server::builder().dram("8MiB").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let refused = wire.put_durable(&[1]).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unimplemented);
    assert!(refused.message().contains("nvme"), "{refused}");
    assert_eq!(count_right(&mut wire, [1]).await, 0);
    drop(wire);
    server.stop(&[]).await;
}
