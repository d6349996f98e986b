//! Who comes in, and what is whose.

use super::*;
use crate::metrics::{Door, Unproven};

const A: &str = "token-of-the-tenant-a-0123456789-abcdef";
const B: &str = "token-of-the-tenant-b-0123456789-abcdef";

fn asking() -> Stage {
    let node = Arc::new(node(Vec::new()));
    let gate = Gate::closed(node.metrics.trust.clone()).unwrap();
    gate.replace(format!("a {A}\nb {B}\n").as_bytes()).unwrap();
    Stage::with(node, gate)
}

fn refused(stage: &Stage, why: Unproven) -> u64 {
    stage.resp.node.metrics.trust.unauthenticated(Door::Resp, why)
}

#[tokio::test(start_paused = true)]
async fn whoever_shows_no_token_is_told_so_once() {
    let stage = asking();
    for said in
        [command(&["GET", "k"]), set("k", &value(1)), command(&["PING"]), b"INFO\r\n".to_vec()]
    {
        let mut peer = stage.connect();
        let before = refused(&stage, Unproven::Missing);
        peer.ask(&said, "-NOAUTH Authentication required.\r\n").await;
        assert_eq!(peer.rest().await, "");
        assert_eq!(refused(&stage, Unproven::Missing), before + 1);
    }
    for said in
        [vec!["AUTH", "wrong"], vec!["AUTH", A, "wrong"], vec!["HELLO", "3", "AUTH", "u", &A[1..]]]
    {
        let mut peer = stage.connect();
        let before = refused(&stage, Unproven::Wrong);
        peer.say(command(&said)).await;
        assert!(peer.rest().await.starts_with("-WRONGPASS "));
        assert_eq!(refused(&stage, Unproven::Wrong), before + 1);
    }
    let mut peer = stage.connect();
    peer.say(command(&["HELLO", "2"])).await;
    peer.ask("", "-NOAUTH HELLO").await;
}

#[tokio::test(start_paused = true)]
async fn tenants_do_not_see_each_others_values() {
    let stage = asking();
    let (mut a, mut b) = (stage.connect(), stage.connect());
    a.ask(command(&["AUTH", A]), "+OK\r\n").await;
    b.say(command(&["HELLO", "2", "AUTH", "default", B])).await;
    let mut greeting = Vec::new();
    while !greeting.ends_with(b"$7\r\nmodules\r\n*0\r\n") {
        greeting.push(b.io.read_u8().await.unwrap());
    }
    assert!(greeting.starts_with(b"*14\r\n$6\r\nserver\r\n"));
    for key in ["k", "m@01000100@0@aa"] {
        a.ask(set(key, &value(1)), "+OK\r\n").await;
        b.ask(command(&["GET", key]), "$-1\r\n").await;
        b.ask(command(&["EXISTS", key]), ":0\r\n").await;
        b.ask(command(&["DEL", key]), ":0\r\n").await;
        b.ask(set(key, &value(2)), "+OK\r\n").await;
        a.ask(command(&["GET", key]), bulk(&value(1))).await;
        b.ask(command(&["GET", key]), bulk(&value(2))).await;
        b.ask(command(&["DEL", key]), ":1\r\n").await;
        a.ask(command(&["EXISTS", key]), ":1\r\n").await;
    }
    a.ask(command(&["DBSIZE"]), ":2\r\n").await;
    b.ask(command(&["DBSIZE"]), ":0\r\n").await;
    // Another token on the same connection is another client.
    b.ask(command(&["AUTH", "name", A]), "+OK\r\n").await;
    b.ask(command(&["GET", "k"]), bulk(&value(1))).await;
}

#[tokio::test(start_paused = true)]
async fn a_token_that_is_gone_ends_its_connections() {
    let stage = asking();
    let (mut a, mut b) = (stage.connect(), stage.connect());
    a.ask(command(&["AUTH", A]), "+OK\r\n").await;
    b.ask(command(&["AUTH", B]), "+OK\r\n").await;
    b.ask(set("k", &value(1)), "+OK\r\n").await;
    stage.resp.gate.replace(format!("b {B}\n").as_bytes()).unwrap();
    assert_eq!(a.rest().await, "");
    b.ask(command(&["GET", "k"]), bulk(&value(1))).await;
}

#[tokio::test(start_paused = true)]
async fn whoever_should_show_a_token_may_not_be_silent() {
    let stage = asking();
    let mut peer = stage.connect();
    let start = Instant::now();
    assert_eq!(peer.rest().await, "");
    assert!(start.elapsed() < HELLO_DEADLINE * 2);
    let mut known = stage.connect();
    known.ask(command(&["AUTH", A]), "+OK\r\n").await;
    sleep(HELLO_DEADLINE * 100).await;
    known.ask(command(&["PING"]), "+PONG\r\n").await;
}
