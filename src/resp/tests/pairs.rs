//! Two values of a chunk, of which each is nothing without the other.

use super::*;

const BYTES: &str = "m@2@1@5a@bfloat16kv_bytes";
const METADATA: &str = "m@2@1@5a@bfloat16metadata";

async fn store(peer: &mut Peer, number: u8) {
    peer.ask(set(BYTES, &value(number)), "+OK\r\n").await;
    peer.ask(set(METADATA, &[number; 28]), "+OK\r\n").await;
}

async fn assert_pair(peer: &mut Peer, number: u8) {
    peer.ask(command(&["EXISTS", METADATA, BYTES]), ":2\r\n").await;
    peer.ask(command(&["GET", METADATA]), bulk(&[number; 28])).await;
    peer.ask(command(&["GET", BYTES]), bulk(&value(number))).await;
}

async fn assert_nothing(peer: &mut Peer) {
    peer.ask(command(&["EXISTS", METADATA, BYTES]), ":0\r\n").await;
    for key in [METADATA, BYTES] {
        peer.ask(command(&["GET", key]), "$-1\r\n").await;
        peer.ask(command(&["STRLEN", key]), ":0\r\n").await;
    }
    peer.ask(command(&["MGET", METADATA, BYTES]), "*2\r\n$-1\r\n$-1\r\n").await;
}

#[tokio::test(start_paused = true)]
async fn both_are_there_or_neither() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    for gone in [METADATA, BYTES] {
        peer.ask(set(BYTES, &value(1)), "+OK\r\n").await;
        assert_nothing(&mut peer).await;
        peer.ask(set(METADATA, &[1; 28]), "+OK\r\n").await;
        assert_pair(&mut peer, 1).await;
        peer.ask(command(&["DEL", gone]), ":1\r\n").await;
        assert_nothing(&mut peer).await;
        peer.ask(command(&["DEL", METADATA, BYTES]), ":1\r\n").await;
    }
    assert!(stage.resp.node.metrics.resp.torn_reads.get() > 10);
    assert_eq!(stage.spaces(), ["resp/lmcache/m@2@1@bfloat16"]);
}

#[tokio::test(start_paused = true)]
async fn metadata_without_bytes_is_dropped() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    peer.ask(set(METADATA, &[1; 28]), "+OK\r\n").await;
    assert_eq!(stage.dropped(RespDrop::Torn), 1);
    store(&mut peer, 2).await;
    assert_pair(&mut peer, 2).await;
}

#[tokio::test(start_paused = true)]
async fn a_pair_is_of_one_making_whatever_is_left_of_another() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    store(&mut peer, 1).await;
    // While both are here, they stay.
    store(&mut peer, 2).await;
    assert_pair(&mut peer, 1).await;
    for (gone, number) in [(METADATA, 3), (BYTES, 4)] {
        peer.ask(command(&["DEL", gone]), ":1\r\n").await;
        store(&mut peer, number).await;
        assert_pair(&mut peer, number).await;
    }
}

#[tokio::test(start_paused = true)]
async fn two_that_store_one_pair_at_once_leave_a_whole_one() {
    let stage = Stage::new();
    let (mut first, mut second) = (stage.connect(), stage.connect());
    // The first one stops within its value; the second one says all.
    let bytes = set(BYTES, &value(1));
    let (said, rest) = bytes.split_at(5000);
    first.say(said).await;
    store(&mut second, 1).await;
    assert_nothing(&mut second).await;
    first.ask(rest, "+OK\r\n").await;
    assert_nothing(&mut second).await;
    first.ask(set(METADATA, &[1; 28]), "+OK\r\n").await;
    assert_pair(&mut second, 1).await;
}
