//! How a server leaves: SIGTERM on the real binary.

use std::time::Duration;

use kvstrata_proto::v1::{PutOutcome, session_event};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::{
    harness::{SERVER_WAIT, Server, wait_until},
    wire::{Wire, namespace, payload},
};

#[tokio::test]
async fn an_idle_server_leaves_at_once_with_0_and_a_quiet_log() {
    let mut server = Server::builder().dram("8MiB").start().await;
    assert_eq!(server.page("/livez").await, (200, "ok\n".to_owned()));
    assert_eq!(server.page("/readyz").await, (200, "ok\n".to_owned()));
    assert_eq!(server.page("/elsewhere").await.0, 404);
    let start = tokio::time::Instant::now();
    server.terminate();
    assert_eq!(server.exit_code().await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    server.assert_quiet(&[]);
}

#[tokio::test]
async fn a_drain_is_unready_first_tells_sessions_and_finishes_what_is_in_flight() {
    let mut server = Server::builder().dram("8MiB").set("server.drain_grace", "60s").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    let mut late = Wire::without_session(&server, namespace("m")).await;
    let mut put = wire.put_stream(wire.offer([1, 2])).await.unwrap();
    put.wanted().await.unwrap();
    put.send(wire.part(0, 1, payload(1))).await;
    let stored = "kvstrata_put_blocks_total{outcome=\"stored\"}";
    wait_until("block 1 is stored", SERVER_WAIT, async || server.metric(stored).await == 1.0).await;

    server.terminate();
    wait_until("/readyz says 503", SERVER_WAIT, async || server.page("/readyz").await.0 == 503)
        .await;
    assert_eq!(server.page("/livez").await.0, 200, "a drain is no reason to be killed");
    let event = wire.events.as_mut().unwrap().message().await.unwrap().unwrap().event;
    let Some(session_event::Event::Draining(draining)) = event else { panic!("{event:?}") };
    assert_eq!(draining.grace_ms, 60_000);

    assert_eq!(late.open_session().await.unwrap_err().code(), tonic::Code::Unavailable);
    let refused = "kvstrata_rpc_seconds_count{op=\"session\",outcome=\"unavailable\"}";
    assert_eq!(server.metric(refused).await, 1.0);
    let lease = wire.lookup_with_lease([1], Duration::from_secs(1)).await;
    assert_eq!(lease.unwrap_err().code(), tonic::Code::Unavailable);
    assert_eq!(wire.get(&[1]).await, [Some(payload(1))], "reads go on");
    put.send(wire.part(1, 2, payload(2))).await;
    assert_eq!(put.finish(2).await.unwrap(), [PutOutcome::Stored; 2]);

    let start = tokio::time::Instant::now();
    drop((wire, late));
    assert_eq!(server.exit_code().await, Some(0));
    assert!(start.elapsed() < Duration::from_secs(30), "ends when the last session does");
    server.assert_quiet(&[]);
}

#[tokio::test]
async fn a_client_that_stays_is_ended_when_the_grace_is_over() {
    let mut server =
        Server::builder().dram("8MiB").set("server.drain_grace", "100ms").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    server.terminate();
    assert_eq!(server.exit_code().await, Some(0));
    let events = wire.events.as_mut().unwrap();
    let told = events.message().await.unwrap().unwrap().event;
    assert!(matches!(told, Some(session_event::Event::Draining(_))), "{told:?}");
    assert!(events.message().await.is_ok_and(|event| event.is_none()), "ended, not cut");
    server.assert_quiet(&[]);
}

#[tokio::test]
async fn standard_health_follows_readiness_and_liveness_does_not() {
    let server = Server::builder().dram("8MiB").set("server.drain_grace", "60s").start().await;
    let wire = Wire::connect(&server, namespace("m")).await;
    let health = HealthClient::new(server.channel().await);
    let serving = async |service: &str| {
        let request = HealthCheckRequest { service: service.to_owned() };
        health.clone().check(request).await.unwrap().into_inner().status == 1
    };
    for service in ["", "kvstrata.v1.BlockCache", "liveness"] {
        wait_until(service, SERVER_WAIT, async || serving(service).await).await;
    }
    server.terminate();
    for service in ["", "kvstrata.v1.BlockCache"] {
        wait_until(service, SERVER_WAIT, async || !serving(service).await).await;
    }
    assert!(serving("liveness").await);
    drop(wire);
}
