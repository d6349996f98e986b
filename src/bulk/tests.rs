//! Connections over a pipe, with time paused: what a peer may do, and what it may not.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_tiers::{
    block::BlockHash,
    checksum::part_checksum,
    namespace::{Identity, Namespace, NamespaceSpec, PartSpec},
    testing::{hash_of, pack},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::Semaphore,
    time::{Instant, sleep, timeout},
};

use super::{
    Bulk,
    body::{
        Get, Hello, Offer, Place, Refused, Want, Welcome, push_credit, push_results, read_miss,
        read_results,
    },
    connection,
    frame::{Header, Kind, VERSION, bare, push},
    input::Input,
};
use crate::{
    api::{Calls, tests::node},
    auth::{Bearer, Gate, ONLY_TENANT},
    costs::Via,
    limits::{
        BULK_CREDIT_BYTES_MIN, BULK_FRAME_DEADLINE, BULK_IDLE_MAX, BULK_REQUESTS_MAX,
        HELLO_DEADLINE, PUT_IDLE_MAX,
    },
    node::Node,
    session::SessionGuard,
};

mod shared;
mod tokens;

const BLOCK_BYTES: u32 = 256 << 10;
/// What the pipe holds in each direction: less than a block.
const PIPE_BYTES: usize = 64 << 10;
/// gRPC codes.
const INVALID: u32 = 3;
const DEADLINE: u32 = 4;
const CANCELLED: u32 = 1;
const EXHAUSTED: u32 = 8;

/// A server with a namespace and a session.
struct Stage {
    bulk: Arc<Bulk>,
    namespace: Arc<Namespace>,
    session: SessionGuard<Vec<kvstrata_tiers::stack::Pin>>,
}

/// The client's end of a connection.
struct Peer {
    from: Input<Box<dyn AsyncRead + Send + Unpin>>,
    to: Box<dyn AsyncWrite + Send + Unpin>,
}

fn spec() -> NamespaceSpec {
    NamespaceSpec::Engine(Box::new(Identity {
        tenant: ONLY_TENANT.to_owned(),
        model: "m".into(),
        engine: "vllm".into(),
        dtype: "bf16".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: BLOCK_BYTES }],
        hash_algorithm: "sha256".into(),
        hash_bytes: 32,
        ..Identity::default()
    }))
}

fn payload(number: u64) -> Vec<u8> {
    (0..BLOCK_BYTES / 8).flat_map(|at| (u64::from(at) * 31 + number).to_le_bytes()).collect()
}

impl Stage {
    fn new() -> Self {
        let node: Arc<Node> = Arc::new(node(Vec::new()));
        let calls = Calls::new(node.metrics.clone());
        let namespace = node.namespaces.open(spec(), false).unwrap().namespace;
        let (session, _events) =
            node.sessions.open("test".into(), Arc::new(Bearer::anyone())).unwrap();
        let room = Arc::new(Semaphore::new(1024));
        let gate = Gate::open(node.metrics.trust.clone());
        let bulk = Bulk { node, calls, gate, instance: [7; 16], room, arena: None };
        Self { bulk: Arc::new(bulk), namespace, session }
    }

    fn node(&self) -> &Node {
        &self.bulk.node
    }

    /// A connection that has said nothing yet.
    fn connect(&self) -> Peer {
        let (theirs, ours) = tokio::io::duplex(PIPE_BYTES);
        let (from, to) = tokio::io::split(ours);
        let by = (Via::Network, None);
        self.node().tasks.spawn("bulk", connection::run(Arc::clone(&self.bulk), from, to, by));
        let (from, to) = tokio::io::split(theirs);
        Peer { from: Input::new(Box::new(from)), to: Box::new(to) }
    }

    /// A connection in the name of the session.
    async fn greeted(&self, credit: u32) -> Peer {
        let peer = self.connect();
        self.greet(peer, credit).await
    }

    async fn greet(&self, mut peer: Peer, credit: u32) -> Peer {
        let session = *self.session.session().id().as_bytes();
        let hello = Hello { version: VERSION + 3, credit, session, token: Bytes::new() };
        peer.say(|out| hello.push(out)).await;
        let (header, body) = peer.hear().await.unwrap();
        assert_eq!(header.kind, Kind::Welcome);
        let welcome = Welcome::read(body).unwrap();
        assert_eq!((welcome.version, welcome.instance), (VERSION, [7; 16]));
        peer
    }

    fn hash(number: u64) -> BlockHash {
        hash_of(number)
    }

    fn checksum(&self, number: u64, bytes: &[u8]) -> u64 {
        part_checksum(self.namespace.id(), &Self::hash(number), 0, 0, bytes)
    }

    fn get(&self, numbers: Range<u64>, deadline_ms: u32) -> Get {
        let hashes = pack(&numbers.collect::<Vec<_>>()).into();
        let namespace = *self.namespace.id().as_bytes();
        Get { namespace, lease: [0; 16], deadline_ms, parts: Vec::new(), hashes }
    }

    fn offer(&self, numbers: Range<u64>) -> Offer {
        let checksums = numbers.clone().map(|number| self.checksum(number, &payload(number)));
        Offer {
            namespace: *self.namespace.id().as_bytes(),
            parent: Bytes::new(),
            checksums: checksums.collect(),
            hashes: pack(&numbers.collect::<Vec<_>>()).into(),
            parts: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// Puts blocks over a connection of its own; returns the outcomes.
    async fn put(&self, numbers: Range<u64>) -> Vec<(u32, u32, u32)> {
        let mut peer = self.greeted(BULK_CREDIT_BYTES_MIN).await;
        let offer = self.offer(numbers.clone());
        peer.say(|out| offer.push(out, 1, 0)).await;
        for (start, end) in peer.wanted().await {
            for position in start..end {
                let number = numbers.start + u64::from(position);
                peer.data(self, 1, position, number, &payload(number)).await;
            }
        }
        peer.say(|out| push(out, (Kind::Finish, 0), 1, 0, |_body| {})).await;
        peer.results().await
    }

    /// Nothing is left of what connections did.
    async fn is_clean(&self) -> bool {
        self.node().stack.usage().staging_bytes == 0
            && timeout(Duration::from_secs(1), self.bulk.calls.wait_none()).await.is_ok()
    }
}

impl Peer {
    async fn say(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let mut out = Vec::new();
        write(&mut out);
        self.to.write_all(&out).await.unwrap();
    }

    /// The next frame, without its payload; none at the end.
    async fn hear(&mut self) -> Option<(Header, Bytes)> {
        let header = self.from.header().await.ok()??;
        let body = self.from.body(&header).await.unwrap();
        Some((header, body))
    }

    async fn wanted(&mut self) -> Vec<(u32, u32)> {
        let (header, body) = self.hear().await.unwrap();
        assert_eq!(header.kind, Kind::Want, "{body:?}");
        Want::read(body).unwrap().ranges
    }

    async fn data(
        &mut self,
        stage: &Stage,
        request: u32,
        position: u32,
        number: u64,
        bytes: &[u8],
    ) {
        let checksum = stage.checksum(number, bytes);
        self.piece(
            request,
            Place { position, part: 0, offset: 0, part_bytes: BLOCK_BYTES, checksum },
            bytes,
        )
        .await;
    }

    async fn piece(&mut self, request: u32, place: Place, bytes: &[u8]) {
        let payload_bytes = u32::try_from(bytes.len()).unwrap();
        self.say(|out| place.push(out, (Kind::Data, 0), request, payload_bytes)).await;
        self.to.write_all(bytes).await.unwrap();
    }

    /// The results up to the end of a put.
    async fn results(&mut self) -> Vec<(u32, u32, u32)> {
        let mut results = Vec::new();
        loop {
            let (header, body) = self.hear().await.unwrap();
            match header.kind {
                Kind::Results => results.extend(read_results(body).unwrap()),
                Kind::End => return results,
                other => panic!("{other:?}: {body:?}"),
            }
        }
    }

    /// The blocks and misses up to the end of a get: bytes by position.
    async fn blocks(&mut self) -> Vec<(u32, Vec<u8>)> {
        let mut blocks: Vec<(u32, Vec<u8>)> = Vec::new();
        loop {
            let header = self.from.header().await.unwrap().unwrap();
            match header.kind {
                Kind::Block => {
                    let place = Place::read(&self.from.fixed(&header).await.unwrap());
                    let mut bytes = vec![0; header.payload_bytes as usize];
                    self.from.exactly(&mut bytes).await.unwrap();
                    match blocks.last_mut() {
                        Some((position, block)) if *position == place.position => {
                            block.extend(bytes);
                        }
                        _ => blocks.push((place.position, bytes)),
                    }
                    self.say(|out| push_credit(out, header.payload_bytes)).await;
                }
                Kind::Miss => {
                    let (start, end) = read_miss(self.from.body(&header).await.unwrap()).unwrap();
                    blocks.extend((start..end).map(|position| (position, Vec::new())));
                }
                Kind::End => return blocks,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Why the request or the connection was refused.
    async fn refusal(&mut self) -> (u32, Refused) {
        loop {
            let (header, body) = self.hear().await.expect("a reason before the end");
            if header.kind == Kind::Refused {
                return (header.request, Refused::read(body).unwrap());
            }
            let mut nowhere = vec![0; header.payload_bytes as usize];
            self.from.exactly(&mut nowhere).await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_that_were_put_are_read_back_with_little_credit_at_a_time() {
    let stage = Stage::new();
    assert_eq!(stage.put(0..5).await, [(0, 5, 1)]);
    assert_eq!(stage.put(3..6).await.iter().map(|(_, _, outcome)| *outcome).max(), Some(3));
    let mut peer = stage.greeted(BULK_CREDIT_BYTES_MIN).await;
    peer.say(|out| stage.get(0..8, 0).push(out, 9, 0)).await;
    let blocks = peer.blocks().await;
    let expected: Vec<_> = (0..6).map(|n| (u32::try_from(n).unwrap(), payload(n))).collect();
    assert_eq!(blocks[..6], expected[..]);
    assert_eq!(blocks[6..], [(6, Vec::new()), (7, Vec::new())]);
    drop(peer);
    assert!(stage.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn no_more_is_sent_than_there_is_credit_for_and_a_get_without_any_ends_in_time() {
    let stage = Stage::new();
    stage.put(0..5).await;
    let mut peer = stage.greeted(2 * BULK_CREDIT_BYTES_MIN).await;
    let start = Instant::now();
    peer.say(|out| stage.get(0..5, 2000).push(out, 9, 0)).await;
    let mut payload_bytes = 0;
    let refused = loop {
        let (header, body) = peer.hear().await.unwrap();
        if header.kind == Kind::Refused {
            break Refused::read(body).unwrap();
        }
        payload_bytes += header.payload_bytes;
        peer.from.exactly(&mut vec![0; header.payload_bytes as usize]).await.unwrap();
    };
    assert_eq!((payload_bytes, refused.code), (2 * BULK_CREDIT_BYTES_MIN, DEADLINE));
    assert!(start.elapsed() < Duration::from_secs(13), "{:?}", start.elapsed());
    // The connection goes on.
    peer.say(|out| push_credit(out, u32::MAX)).await;
    peer.say(|out| stage.get(0..1, 0).push(out, 10, 0)).await;
    assert_eq!(peer.blocks().await, [(0, payload(0))]);
    drop(peer);
    assert!(stage.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_does_not_read_is_closed_and_its_blocks_let_go() {
    let stage = Stage::new();
    stage.put(0..5).await;
    let mut peer = stage.greeted(u32::MAX).await;
    peer.say(|out| stage.get(0..5, 0).push(out, 9, 0)).await;
    sleep(BULK_FRAME_DEADLINE / 2).await;
    let waiting = timeout(Duration::from_secs(1), stage.bulk.calls.wait_none()).await;
    assert!(waiting.is_err(), "not before its time");
    sleep(BULK_FRAME_DEADLINE).await;
    assert!(stage.is_clean().await);
    assert_eq!(stage.node().stack.remove(&stage.namespace, hashes(&pack(&[0]))).await.unwrap(), 1);
}

fn hashes(packed: &[u8]) -> kvstrata_tiers::block::Hashes<'_> {
    kvstrata_tiers::block::Hashes::new(packed, 32).unwrap()
}

#[tokio::test(start_paused = true)]
async fn what_is_no_frame_ends_its_connection_with_a_reason() {
    let stage = Stage::new();
    let mut giant = bare(Kind::Finish, 1);
    giant[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut damaged = bare(Kind::Finish, 1);
    damaged[4] ^= 1;
    let mut server = Vec::new();
    push_results(&mut server, 1, std::iter::empty());
    let cases = [
        (b"GET / HTTP/1.1\r\nHost: kvstrata\r\n\r\n".to_vec(), ["\"KB\""; 2]),
        (giant, ["4294967295 bytes"; 2]),
        (damaged, ["not now", "checksum"]),
        (server, ["not for this side"; 2]),
    ];
    for (bytes, texts) in cases {
        for (greeted, text) in [false, true].into_iter().zip(texts) {
            let mut peer =
                if greeted { stage.greeted(BULK_CREDIT_BYTES_MIN).await } else { stage.connect() };
            peer.to.write_all(&bytes).await.unwrap();
            let (request, refused) = peer.refusal().await;
            assert_eq!((request, refused.code), (0, INVALID), "{}", refused.text);
            assert!(refused.text.contains(text), "{}", refused.text);
            assert!(peer.hear().await.is_none(), "closed");
        }
    }
    let mut peer = stage.connect();
    peer.say(|out| stage.get(0..1, 0).push(out, 1, 0)).await;
    assert!(peer.refusal().await.1.text.contains("Get"), "hello must come first");
    assert!(stage.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_says_nothing_or_too_little_is_closed_in_time() {
    let stage = Stage::new();
    let start = Instant::now();
    let mut silent = stage.connect();
    assert_eq!(silent.refusal().await.1.code, DEADLINE);
    assert!(start.elapsed() <= HELLO_DEADLINE + Duration::from_secs(1));

    let start = Instant::now();
    let mut slow = stage.greeted(BULK_CREDIT_BYTES_MIN).await;
    let mut offer = Vec::new();
    stage.offer(0..4).push(&mut offer, 1, 0);
    for byte in &offer {
        if slow.to.write_all(&[*byte]).await.is_err() {
            break;
        }
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(slow.refusal().await.1.code, DEADLINE);
    assert!(start.elapsed() <= BULK_FRAME_DEADLINE + Duration::from_secs(3));

    let start = Instant::now();
    let mut idle = stage.greeted(BULK_CREDIT_BYTES_MIN).await;
    assert!(idle.refusal().await.1.text.contains("no request"));
    assert!(start.elapsed() >= BULK_IDLE_MAX);
}

#[tokio::test(start_paused = true)]
async fn a_put_ends_with_its_connection_with_its_session_and_with_silence() {
    for how in ["connection", "session", "silence", "cancel"] {
        let stage = Stage::new();
        let mut peer = stage.greeted(BULK_CREDIT_BYTES_MIN).await;
        peer.say(|out| stage.offer(0..3).push(out, 1, 0)).await;
        assert_eq!(peer.wanted().await, [(0, 3)]);
        let half = &payload(0)[..1000];
        let checksum = stage.checksum(0, &payload(0));
        let place = Place { position: 0, part: 0, offset: 0, part_bytes: BLOCK_BYTES, checksum };
        peer.piece(1, place, half).await;
        assert_eq!(stage.put(0..1).await, [(0, 1, 5)], "pending");
        match how {
            "connection" => drop(peer),
            "silence" => {
                let (request, refused) = peer.refusal().await;
                assert_eq!((request, refused.code), (1, DEADLINE));
            }
            "cancel" => {
                peer.say(|out| push(out, (Kind::Cancel, 0), 1, 0, |_body| {})).await;
                let (request, refused) = peer.refusal().await;
                assert_eq!((request, refused.code), (1, CANCELLED));
            }
            _ => {
                let (node, session) = (Arc::clone(&stage.bulk.node), stage.session);
                drop(session);
                assert_eq!(peer.refusal().await.0, 0);
                let (session, _events) =
                    node.sessions.open("next".into(), Arc::new(Bearer::anyone())).unwrap();
                let stage = Stage { bulk: stage.bulk, namespace: stage.namespace, session };
                assert_eq!(stage.put(0..3).await, [(0, 3, 1)], "{how}");
                continue;
            }
        }
        sleep(Duration::from_millis(10)).await;
        assert_eq!(stage.put(0..3).await, [(0, 3, 1)], "{how}");
        assert!(stage.is_clean().await);
        assert!(PUT_IDLE_MAX < BULK_IDLE_MAX);
    }
}

#[tokio::test(start_paused = true)]
async fn damaged_bytes_are_not_stored_and_bytes_that_fit_nothing_refuse_their_put_only() {
    let stage = Stage::new();
    let mut peer = stage.greeted(BULK_CREDIT_BYTES_MIN).await;
    peer.say(|out| stage.offer(0..2).push(out, 1, 0)).await;
    peer.wanted().await;
    let mut damaged = payload(0);
    damaged[77] ^= 1;
    let checksum = stage.checksum(0, &payload(0));
    let place = Place { position: 0, part: 0, offset: 0, part_bytes: BLOCK_BYTES, checksum };
    peer.piece(1, place, &damaged).await;
    peer.data(&stage, 1, 1, 1, &payload(1)).await;
    peer.say(|out| push(out, (Kind::Finish, 0), 1, 0, |_body| {})).await;
    assert_eq!(peer.results().await, [(0, 1, 7), (1, 2, 1)]);

    peer.say(|out| stage.offer(4..6).push(out, 2, 0)).await;
    peer.wanted().await;
    let stray = Place { position: 9, part: 0, offset: 0, part_bytes: BLOCK_BYTES, checksum: 1 };
    peer.piece(2, stray, &payload(4)).await;
    // On its way before the refusal was read.
    peer.data(&stage, 2, 1, 5, &payload(5)).await;
    let (request, refused) = peer.refusal().await;
    assert_eq!((request, refused.code), (2, INVALID), "{}", refused.text);
    assert!(refused.text.contains("9 given"), "{}", refused.text);
    peer.say(|out| push_credit(out, u32::MAX)).await;
    peer.say(|out| stage.get(1..2, 0).push(out, 3, 0)).await;
    assert_eq!(peer.blocks().await, [(0, payload(1))]);
    assert_eq!(stage.put(4..6).await, [(0, 2, 1)]);
}

#[tokio::test(start_paused = true)]
async fn more_requests_than_allowed_are_refused_and_a_number_in_use_ends_the_connection() {
    let stage = Stage::new();
    stage.put(0..5).await;
    let mut peer = stage.greeted(BULK_CREDIT_BYTES_MIN).await;
    let most = u32::try_from(BULK_REQUESTS_MAX).unwrap();
    for request in 1..=most + 1 {
        peer.say(|out| stage.get(0..5, 0).push(out, request, 0)).await;
    }
    let (request, refused) = peer.refusal().await;
    assert_eq!((request, refused.code), (most + 1, EXHAUSTED));
    assert!(refused.retry_after_ms > 0);
    // All that there is credit for: nothing is half written after that.
    let (header, _place) = peer.hear().await.unwrap();
    assert_eq!((header.kind, header.payload_bytes), (Kind::Block, BLOCK_BYTES));
    peer.from.exactly(&mut vec![0; BLOCK_BYTES as usize]).await.unwrap();
    peer.say(|out| push(out, (Kind::Cancel, 0), 2, 0, |_body| {})).await;
    peer.say(|out| stage.get(0..1, 0).push(out, 3, 0)).await;
    let (request, refused) = peer.refusal().await;
    assert_eq!((request, refused.code), (0, INVALID), "{}", refused.text);
    assert!(stage.is_clean().await);
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_asks_no_more_is_still_answered() {
    let stage = Stage::new();
    stage.put(0..5).await;
    let mut peer = stage.greeted(u32::MAX).await;
    peer.say(|out| stage.get(0..5, 0).push(out, 9, 0)).await;
    peer.to.shutdown().await.unwrap();
    let mut positions = Vec::new();
    while let Some((header, body)) = peer.hear().await {
        if header.kind == Kind::Block {
            positions.push(Place::read(body.as_ref().try_into().unwrap()).position);
            peer.from.exactly(&mut vec![0; header.payload_bytes as usize]).await.unwrap();
        }
    }
    assert_eq!(positions, [0, 1, 2, 3, 4]);
    assert!(stage.is_clean().await);
}
