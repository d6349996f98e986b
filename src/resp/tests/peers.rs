//! Peers that are slow, silent, gone, or no clients at all.

use super::*;

#[tokio::test(start_paused = true)]
async fn what_is_no_command_ends_its_connection() {
    let stage = Stage::new();
    let many = format!("*{}\r\n", RESP_KEYS_MAX + 2);
    let line = "x".repeat(5000);
    let table = [
        "*x\r\n",
        "*-1\r\n",
        "*1\r\n:1\r\n",
        "*1\r\n$x\r\n",
        "*1\r\n$-1\r\n",
        "*2\r\n$3\r\nGET\r\n$999999999999\r\n",
        "*2\r\n$3\r\nGET\r\n$1\r\nabc\r\n",
        "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2\r\nvvvv\r\n",
        &many,
        &line,
    ];
    for (number, said) in (1..).zip(table) {
        let mut peer = stage.connect();
        peer.say(said).await;
        let told = peer.rest().await;
        assert!(
            told.starts_with("-ERR Protocol error: ") && told.ends_with("\r\n"),
            "{said}: {told}"
        );
        assert_eq!(stage.resp.node.metrics.resp.protocol_errors.get(), number);
    }
    for said in ["SET k\r\n", "GET\r\n", "GET a b\r\n", "MGET\r\n", "DEL\r\n", "EXISTS\r\n"] {
        let mut peer = stage.connect();
        peer.say(said).await;
        let told = peer.rest().await;
        assert!(told.starts_with("-ERR wrong number of arguments"), "{said}: {told}");
    }
    let mut browser = stage.connect();
    browser.say("POST / HTTP/1.1\r\nHost: localhost\r\n\r\nSET k v\r\n").await;
    assert_eq!(browser.rest().await, "");
    let mut peer = stage.connect();
    peer.ask(command(&["EXISTS", "k"]), ":0\r\n").await;
}

#[tokio::test(start_paused = true)]
async fn a_value_that_is_cut_is_not_stored_and_keeps_nobody_waiting() {
    let stage = Stage::new();
    let bytes = set("k", &value(1));
    // Within the value, before its last byte, and before the end of the command.
    for cut in [40, 5000, bytes.len() - 3, bytes.len() - 1] {
        let mut peer = stage.connect();
        let (said, _) = bytes.split_at(cut);
        peer.say(said).await;
        drop(peer);
    }
    let mut peer = stage.connect();
    sleep(Duration::from_millis(1)).await;
    peer.ask(command(&["GET", "k"]), "$-1\r\n").await;
    peer.ask(set("k", &value(2)), "+OK\r\n").await;
    peer.ask(command(&["GET", "k"]), bulk(&value(2))).await;
}

#[tokio::test(start_paused = true)]
async fn a_value_that_trickles_in_is_given_up() {
    let stage = Stage::new();
    let (mut slow, mut other) = (stage.connect(), stage.connect());
    let bytes = set("k", &value(1));
    let start = Instant::now();
    let trickling = async {
        for byte in &bytes {
            if slow.io.write_all(&[*byte]).await.is_err() {
                break;
            }
            sleep(Duration::from_millis(500)).await;
        }
    };
    trickling.await;
    assert!(
        start.elapsed() < BULK_FRAME_DEADLINE + Duration::from_secs(5),
        "{:?}",
        start.elapsed()
    );
    other.ask(set("k", &value(2)), "+OK\r\n").await;
    other.ask(command(&["GET", "k"]), bulk(&value(2))).await;
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_is_given_up_and_one_that_is_silent_is_not() {
    let stage = Stage::new();
    let (mut deaf, mut silent) = (stage.connect(), stage.connect());
    silent.ask(set("k", &value(1)), "+OK\r\n").await;
    let asked = command(&["GET", "k"]).repeat(20);
    deaf.say(&asked).await;
    sleep(BULK_FRAME_DEADLINE * 3).await;
    let mut heard = Vec::new();
    deaf.io.read_to_end(&mut heard).await.unwrap();
    assert!(heard.len() < 3 * VALUE_BYTES, "{} bytes of {}", heard.len(), 20 * VALUE_BYTES);
    sleep(Duration::from_secs(3600)).await;
    silent.ask(command(&["GET", "k"]), bulk(&value(1))).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_ends_connections_between_commands() {
    let stage = Stage::new();
    let (mut storing, mut idle) = (stage.connect(), stage.connect());
    idle.ask(set("k", &value(1)), "+OK\r\n").await;
    let bytes = set("l", &value(2));
    let (first, rest) = bytes.split_at(5000);
    storing.say(first).await;
    sleep(Duration::from_millis(1)).await;
    stage.resp.node.sessions.drain(Duration::from_secs(20));
    assert_eq!(idle.rest().await, "");
    // What has begun is finished.
    storing.ask(rest, "+OK\r\n").await;
    assert_eq!(storing.rest().await, "");
    timeout(Duration::from_secs(1), stage.resp.node.sessions.wait_none()).await.unwrap();
    let mut late = stage.connect();
    late.ask(set("m", &value(3)), "+OK\r\n").await;
    assert_eq!(stage.dropped(RespDrop::Room), 1);
    late.ask(command(&["GET", "l"]), bulk(&value(2))).await;
}
