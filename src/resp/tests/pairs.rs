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
    assert_eq!(stage.spaces(), ["resp/lmcache/m@2@1@bfloat16@"]);
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

#[tokio::test(start_paused = true)]
async fn what_is_left_of_evicted_pairs_costs_no_whole_ones() {
    let stage = Stage::new();
    let mut peer = stage.connect();
    let chunk = |number: u32, half: &str| format!("m@2@1@{number:x}@half{half}");
    let node = &stage.resp.node;
    let fits = node.stack.usage().dram_capacity_bytes / u64::try_from(VALUE_BYTES).unwrap();
    let fits = u32::try_from(fits).unwrap();
    for number in 0..5 * fits {
        peer.ask(set(&chunk(number, "kv_bytes"), &value(1)), "+OK\r\n").await;
        peer.ask(set(&chunk(number, "metadata"), &[1; 28]), "+OK\r\n").await;
    }
    let mut found = 0;
    for number in 0..5 * fits {
        let key = chunk(number, "metadata");
        peer.say(command(&["EXISTS", &key])).await;
        let mut answer = [0; 4];
        peer.io.read_exact(&mut answer).await.unwrap();
        found += u32::from(&answer == b":1\r\n");
    }
    let torn = node.metrics.resp.torn_reads.get();
    assert!(found * 4 >= fits * 3 && torn * 4 < u64::from(fits), "{found} of {fits}, {torn} torn");
}
