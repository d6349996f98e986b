//! A server that listens to engines: a publisher of ours, that drops, starts anew and replays, and what
//! was captured from a real one.

use std::time::Duration;

use kvstrata::client::{Client, ClientOptions, HashList, PutBatch, PutOutcome};
use kvstrata_tiers::block::BlockHash;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::{
    client::{namespace, pattern},
    harness::{Server, wait_until},
    publisher::{Kept, Publisher, replayer},
    shared_data,
};

const SOON: Duration = Duration::from_secs(30);
const BLOCK_TOKENS: u32 = 16;

fn hash(number: u64) -> [u8; 32] {
    let words = [7, number * 3 + 1, 9, number + 100].map(u64::to_be_bytes);
    words.concat().try_into().unwrap()
}

/// The hash as most engines publish it.
fn short(number: u64) -> Vec<u8> {
    [&[0xcf], &hash(number)[24..]].concat()
}

fn whole(number: u64) -> Vec<u8> {
    [&[0xc4, 32], &hash(number)[..]].concat()
}

/// A batch with blocks that follow one another.
fn batch(numbers: std::ops::Range<u64>, hash: impl Fn(u64) -> Vec<u8>) -> Vec<u8> {
    let text = |text: &str| [&[0xd9, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    let count = u16::try_from(numbers.end - numbers.start).unwrap();
    let mut event = vec![0x95];
    event.extend(text("BlockStored"));
    event.push(0xdc);
    event.extend(count.to_be_bytes());
    event.extend(numbers.clone().flat_map(&hash));
    event.extend(numbers.start.checked_sub(1).map_or_else(|| vec![0xc0], &hash));
    event.push(0xdc);
    event.extend((count * 16).to_be_bytes());
    event.extend(vec![1; usize::from(count) * 16]);
    event.push(u8::try_from(BLOCK_TOKENS).unwrap());
    [&[0x93, 0xcb, 0x41, 0xda, 0, 0, 0, 0, 0, 0, 0x91][..], &event, &[0]].concat()
}

async fn listening(sources: &str) -> Server {
    Server::builder().dram("64MiB").set("events.subscribe", sources).start().await
}

async fn put(server: &Server, numbers: std::ops::Range<u64>) {
    const BYTES: u32 = 4096;
    let client = Client::connect(server.grpc(), ClientOptions::default()).await.unwrap();
    let handle = client.open(namespace(&[BYTES])).await.unwrap();
    let session = client.session("events").await.unwrap();
    let blocks: Vec<_> =
        numbers.clone().map(|number| BlockHash::new(&hash(number)).unwrap()).collect();
    let value = |number| pattern(u32::try_from(number).unwrap(), 0, BYTES as usize);
    let batch = PutBatch {
        hashes: HashList::of(&blocks),
        values: numbers.map(value).collect(),
        parts: Vec::new(),
        parent: None,
        durable: false,
    };
    let report = handle.put(&session, &batch).await.unwrap();
    assert!(report.outcomes.iter().all(|outcome| *outcome == PutOutcome::Stored));
}

async fn batches(server: &Server, outcome: &str) -> f64 {
    let series = format!("kvstrata_event_batches_total{{outcome=\"{outcome}\"}}");
    server.metric(&series).await
}

async fn wait_batches(server: &Server, outcome: &str, count: f64) {
    let what = format!("{count} batches {outcome}");
    wait_until(&what, SOON, async || batches(server, outcome).await >= count).await;
    assert_eq!(batches(server, outcome).await, count, "{outcome}");
}

async fn wait_described(server: &Server, count: f64) {
    let series = "kvstrata_event_described_blocks_total";
    wait_until("blocks described", SOON, async || server.metric(series).await >= count).await;
    assert_eq!(server.metric(series).await, count);
}

#[tokio::test]
async fn blocks_are_described_before_and_after_they_are_put() {
    for publish in [short, whole] {
        let publisher = Publisher::bind().await;
        let server = listening(&format!("{},model=test", publisher.address())).await;
        let mut peer = publisher.subscriber().await;
        peer.publish(0, &batch(0..40, publish)).await;
        wait_batches(&server, "taken", 1.0).await;
        put(&server, 0..60).await;
        wait_described(&server, 40.0).await;
        peer.publish(1, &batch(40..70, publish)).await;
        wait_described(&server, 60.0).await;
        assert_eq!(server.metric("kvstrata_event_told_blocks_total").await, 70.0);
        assert_eq!(server.metric("kvstrata_event_sources").await, 1.0);
        server.stop(&[]).await;
    }
}

#[tokio::test]
async fn what_was_missed_is_asked_for_and_what_is_gone_is_counted() {
    let (publisher, replays) = (Publisher::bind().await, Publisher::bind().await);
    let sources = format!("{},model=test,replay={}", publisher.address(), replays.address());
    let kept = Kept::default();
    let replaying = replayer(replays, Kept::clone(&kept));
    let server = listening(&sources).await;
    put(&server, 0..50).await;
    let mut peer = publisher.subscriber().await;
    // What came before we did: the first two are gone.
    let one = |number: u64| (number, batch(number..number + 1, whole));
    kept.lock().unwrap().extend((2..10).map(one));
    peer.publish(10, &one(10).1).await;
    wait_batches(&server, "replayed", 8.0).await;
    wait_batches(&server, "lost", 2.0).await;
    wait_batches(&server, "taken", 1.0).await;
    // A gap, which the engine fills, one that comes twice, and one that is none.
    kept.lock().unwrap().extend((10..20).map(one));
    peer.publish(18, &one(18).1).await;
    peer.publish(18, &one(18).1).await;
    peer.publish(19, b"no batch").await;
    peer.publish(20, &one(20).1).await;
    wait_batches(&server, "replayed", 15.0).await;
    wait_batches(&server, "repeated", 1.0).await;
    wait_batches(&server, "broken", 1.0).await;
    wait_batches(&server, "taken", 3.0).await;
    // The connection is lost, not the engine: it is asked for all that it has.
    drop(peer);
    let mut peer = publisher.subscriber().await;
    kept.lock().unwrap().push(one(21));
    peer.publish(22, &one(22).1).await;
    wait_batches(&server, "replayed", 34.0).await;
    wait_batches(&server, "lost", 2.0).await;
    // The engine starts anew, and its chain from the beginning: all of it can be described now.
    drop(peer);
    *kept.lock().unwrap() = vec![(0, batch(0..23, whole)), (1, batch(23..24, whole))];
    let mut peer = publisher.subscriber().await;
    peer.publish(2, &batch(24..50, whole)).await;
    wait_batches(&server, "replayed", 36.0).await;
    wait_described(&server, 50.0).await;
    drop(replaying);
    server.stop(&[]).await;
}

#[tokio::test]
async fn engines_that_come_late_or_speak_something_else_are_tried_again() {
    let publisher = Publisher::bind().await;
    let address = publisher.address();
    drop(publisher);
    let server = listening(&format!("{address},model=test")).await;
    let listener = TcpListener::bind(address.strip_prefix("tcp://").unwrap()).await.unwrap();
    let (mut wrong, _) = listener.accept().await.unwrap();
    wrong.write_all(&[b'x'; 64]).await.unwrap();
    let mut rest = Vec::new();
    drop(wrong.read_to_end(&mut rest).await);
    let publisher = Publisher { listener };
    put(&server, 0..3).await;
    let mut peer = publisher.subscriber().await;
    peer.publish(0, &batch(0..3, short)).await;
    wait_described(&server, 3.0).await;
    server.stop(&[]).await;
}

#[tokio::test]
async fn what_was_captured_from_an_engine_reads() {
    let test = "what_was_captured_from_an_engine_reads";
    let Some(samples) = shared_data::find(test, "../vllm/kv_events_samples") else { return };
    for kind in ["native_gpu", "raw_bytes_hashes", "offloading_self_describing"] {
        let mut files: Vec<_> = std::fs::read_dir(samples.join(kind)).unwrap().collect();
        files.retain(|file| file.as_ref().unwrap().path().extension().unwrap() == "bin");
        let mut files: Vec<_> = files.into_iter().map(|file| file.unwrap().path()).collect();
        files.sort();
        let publisher = Publisher::bind().await;
        let server = listening(&format!("{},model=test", publisher.address())).await;
        let mut peer = publisher.subscriber().await;
        let mut told = 0;
        for (number, file) in (0..).zip(&files) {
            peer.publish(number, &std::fs::read(file).unwrap()).await;
            told += told_in(&std::fs::read_to_string(file.with_extension("json")).unwrap());
        }
        assert!(files.len() > 3 && told > 10, "{kind}: {} files, {told} blocks", files.len());
        let count = f64::from(u32::try_from(files.len()).unwrap());
        wait_batches(&server, "taken", count).await;
        assert_eq!(batches(&server, "broken").await, 0.0, "{kind}");
        let counted = server.metric("kvstrata_event_told_blocks_total").await;
        assert_eq!(counted, f64::from(told), "{kind}");
    }
}

/// How many blocks a batch tells of, as its capturer has decoded it.
fn told_in(json: &str) -> u32 {
    let sample: serde_json::Value = serde_json::from_str(json).unwrap();
    let events = sample["decoded"][1].as_array().unwrap();
    let stored = events.iter().filter(|event| event["type"] == "BlockStored");
    let blocks = stored.map(|event| event["block_hashes"].as_array().unwrap().len()).sum::<usize>();
    u32::try_from(blocks).unwrap()
}
