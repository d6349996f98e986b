//! Durable puts: what is acknowledged survives a kill, and what cannot be is not acknowledged.

use std::time::Duration;

use kvstrata_proto::v1::PutOutcome;
use tokio::time::Instant;
use tonic::Code;

use super::{Home, ON_NVME, calls::may_trace, count_right, store};
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
async fn after_a_failed_sync_nothing_is_durable_and_what_was_stays() {
    let test = "after_a_failed_sync_nothing_is_durable_and_what_was_stays";
    if !may_trace(test) {
        return;
    }
    let home = Home::new();
    // Every thread's syncs fail from the 24th on: the start needs less, the puts below far more.
    let inject = ["strace", "-D", "-f", "--seccomp-bpf", "-o", "/dev/null", "-e"];
    let mut strace: Vec<String> = inject.map(str::to_owned).into();
    strace.push("inject=fdatasync:error=EIO:when=24+".to_owned());
    let builder = home.server().wrapped_in(strace).set("nvme.engine", "pread");
    let mut server = builder.start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let mut durable = 0;
    while wire.put_durable(&[durable]).await.unwrap() == [PutOutcome::Stored] {
        durable += 1;
        assert!(durable < 5000, "no sync failed");
    }
    assert!(durable > 0, "no sync succeeded");
    let read_only = "kvstrata_nvme_state{state=\"read_only\"}";
    assert_eq!(server.metric(read_only).await, 1.0);
    for number in durable + 1..durable + 20 {
        assert_eq!(wire.put_durable(&[number]).await.unwrap(), [PutOutcome::NotDurable]);
    }
    assert_eq!(count_right(&mut wire, 0..durable + 20).await as u64, durable + 20);
    drop(wire);
    // Nothing is waited for that cannot be written any more.
    let started = Instant::now();
    server.terminate();
    assert_eq!(server.exit_code().await, Some(0), "{}", server.log());
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(server.log().matches("read-only until the restart").count(), 1);

    let server = home.server().start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(count_right(&mut wire, 0..durable).await as u64, durable);
    store(&mut wire, durable + 20..durable + 40, true).await;
    drop(wire);
    server.stop(&[]).await;
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
