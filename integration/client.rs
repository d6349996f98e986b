//! The client against a server that lies: never a wrong byte, always a typed error.

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use kvstrata::client::{
    Client, ClientOptions, Description, FetchedBlock, GetOptions, GetSink, Handle, HashList,
    LeaseAsk, LookupOptions, MissReason, NamespaceSpec, PutBatch, PutOutcome, Session,
    SessionState,
};
use kvstrata_tiers::{
    block::BlockHash,
    error::ErrorKind,
    namespace::{Identity, PartSpec},
};

use crate::{
    fake::{Fake, Lie},
    harness::{Server, wait_until},
};

/// What a get delivered.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) blocks: Vec<(u32, Vec<u8>)>,
    pub(crate) misses: Vec<(Range<u32>, MissReason)>,
}

impl GetSink for Seen {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.blocks.push((block.position, block.pieces().concat()));
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        self.misses.push((positions, reason));
    }
}

/// A namespace of vLLM's kind with these part lengths.
pub(crate) fn namespace(part_bytes: &[u32]) -> NamespaceSpec {
    let part = |(rank, bytes): (u32, &u32)| PartSpec { group: 0, rank, bytes: *bytes };
    NamespaceSpec::Engine(Box::new(Identity {
        tenant: String::new(),
        model: "test".into(),
        engine: "vllm".into(),
        dtype: "bf16".into(),
        block_tokens: 16,
        parts: (0..).zip(part_bytes).map(part).collect(),
        hash_algorithm: "sha256".into(),
        hash_bytes: 32,
        weights: String::new(),
        layout: String::new(),
        split: "none".into(),
        hash_root: Vec::new(),
        lora: Vec::new(),
        cache_salt: Vec::new(),
    }))
}

pub(crate) fn hash(number: u32) -> BlockHash {
    let mut bytes = [0xA5; 32];
    bytes[..4].copy_from_slice(&number.to_le_bytes());
    BlockHash::new(&bytes).unwrap()
}

pub(crate) fn hashes(numbers: Range<u32>) -> HashList {
    HashList::of(&numbers.map(hash).collect::<Vec<_>>())
}

/// Bytes in which every position is different from its neighbours and from other blocks.
pub(crate) fn pattern(number: u32, part: u32, len: usize) -> Bytes {
    let salt = u64::from(number) << 40 | u64::from(part) << 32;
    let words = (0..len.div_ceil(8) as u64)
        .flat_map(|word| (salt + word).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes());
    words.take(len).collect::<Vec<_>>().into()
}

pub(crate) fn batch(numbers: Range<u32>, part_bytes: &[u32]) -> PutBatch {
    let values = numbers.clone().flat_map(|number| {
        (0..).zip(part_bytes).map(move |(part, len)| pattern(number, part, *len as usize))
    });
    PutBatch {
        values: values.collect(),
        hashes: hashes(numbers),
        parts: Vec::new(),
        parent: None,
        durable: false,
    }
}

struct Setup {
    fake: Fake,
    handle: Handle,
    session: Session,
}

async fn setup(lie: Lie, part_bytes: &[u32]) -> Setup {
    let fake = Fake::start(Lie::None);
    let options = ClientOptions { call_deadline: Duration::from_secs(2), ..Default::default() };
    let client = Client::connect(&fake.endpoint(), options).await.unwrap();
    let handle = client.open(namespace(part_bytes)).await.unwrap();
    let session = client.session("test").await.unwrap();
    let report = handle.put(&session, &batch(0..4, part_bytes)).await.unwrap();
    assert_eq!(report.count(PutOutcome::Stored), 4);
    fake.lie(lie);
    Setup { fake, handle, session }
}

async fn get(setup: &Setup, numbers: Range<u32>) -> (kvstrata_tiers::error::Result<()>, Seen) {
    let mut seen = Seen::default();
    let result = setup.handle.get(&hashes(numbers), GetOptions::default(), &mut seen).await;
    (result.map(drop), seen)
}

#[tokio::test]
async fn parts_of_all_sizes_come_back_byte_for_byte() {
    let lengths = [3 * (1 << 20) + 5, 1, 4096, 100_000];
    let setup = setup(Lie::None, &lengths).await;
    let (result, seen) = get(&setup, 0..5).await;
    result.unwrap();
    for (number, (position, bytes)) in (0..4).zip(&seen.blocks) {
        let expected: Vec<u8> = (0..)
            .zip(lengths)
            .flat_map(|(part, len)| pattern(number, part, len as usize))
            .collect();
        assert!(*position == number && *bytes == expected, "block {number} differs");
    }
    assert_eq!((seen.blocks.len(), seen.misses.as_slice()), (4, &[(4..5, MissReason::Absent)][..]));
}

#[tokio::test]
async fn batches_over_the_limits_are_split_in_order() {
    let setup = setup(Lie::None, &[64]).await;
    let report = setup.handle.put(&setup.session, &batch(10..60, &[64])).await.unwrap();
    assert_eq!((report.outcomes.len(), report.sent_bytes), (50, 50 * 64));
    let (result, seen) = get(&setup, 10..60).await;
    result.unwrap();
    let expected: Vec<_> = (0..50).map(|at| (at, pattern(at + 10, 0, 64).to_vec())).collect();
    assert_eq!(seen.blocks, expected);
    let lookup = setup.handle.lookup(&hashes(10..70), LookupOptions::default()).await.unwrap();
    assert_eq!((lookup.prefix_blocks, lookup.counts.miss), (50, 10));
}

#[tokio::test]
async fn a_flipped_byte_is_a_miss_for_its_block_only() {
    let setup = setup(Lie::FlippedByte, &[4096, 2 << 20]).await;
    let (result, seen) = get(&setup, 0..3).await;
    result.unwrap();
    assert_eq!(seen.misses, [(1..2, MissReason::CorruptHere)]);
    assert_eq!(seen.blocks.iter().map(|block| block.0).collect::<Vec<_>>(), [0, 2]);
}

#[tokio::test]
async fn the_bytes_of_another_block_are_a_miss() {
    let setup = setup(Lie::SwappedBlocks, &[4096]).await;
    let (result, seen) = get(&setup, 0..3).await;
    result.unwrap();
    assert_eq!(seen.misses.len(), 2);
    assert_eq!(seen.blocks, [(2, pattern(2, 0, 4096).to_vec())]);
}

#[tokio::test]
async fn a_stream_out_of_order_or_too_short_is_an_error() {
    for lie in [Lie::SwappedOrder, Lie::ShortStream] {
        let setup = setup(lie, &[4096]).await;
        let (result, _) = get(&setup, 0..3).await;
        assert_eq!(result.unwrap_err().kind(), ErrorKind::Internal, "{lie:?}");
    }
}

#[tokio::test]
async fn what_came_before_a_failure_was_delivered() {
    let setup = setup(Lie::BrokenStream, &[4096]).await;
    let (result, seen) = get(&setup, 0..3).await;
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(seen.blocks, [(0, pattern(0, 0, 4096).to_vec())]);
}

#[tokio::test]
async fn counts_that_do_not_sum_are_an_error() {
    let setup = setup(Lie::WrongSum, &[64]).await;
    let result = setup.handle.lookup(&hashes(0..3), LookupOptions::default()).await;
    assert_eq!(result.unwrap_err().kind(), ErrorKind::Internal);
}

#[tokio::test]
async fn the_servers_delay_arrives_with_the_error() {
    let refusing = setup(Lie::NoRoom, &[64]).await;
    let error = refusing.handle.put(&refusing.session, &batch(9..12, &[64])).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_millis(70)));
    refusing.fake.lie(Lie::Overloaded);
    let error = refusing.handle.lookup(&hashes(0..1), LookupOptions::default()).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_millis(250)));
}

#[tokio::test]
async fn a_silent_server_is_a_timeout() {
    let setup = setup(Lie::Silence, &[64]).await;
    let error = setup.handle.lookup(&hashes(0..1), LookupOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

#[tokio::test]
async fn a_dead_server_is_a_fast_error_that_says_what_to_do() {
    let Setup { fake, handle, session } = setup(Lie::None, &[64]).await;
    let endpoint = fake.endpoint();
    drop(fake);
    let mut session = session;
    while !matches!(session.changed().await, SessionState::Ended(_)) {}
    let started = tokio::time::Instant::now();
    let error = handle.lookup(&hashes(0..1), LookupOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let error = Client::connect(&endpoint, ClientOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("kvstrata serve"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
}

#[tokio::test]
async fn wrong_input_never_reaches_the_wire() {
    let setup = setup(Lie::None, &[64, 32]).await;
    let mut wrong = batch(0..2, &[64, 32]);
    wrong.values[3] = Bytes::from_static(b"short");
    let error = setup.handle.put(&setup.session, &wrong).await.unwrap_err().to_string();
    assert!(error.contains("position 1, part 1: 5 bytes given, exactly 32"), "{error}");
    let short = HashList::new(Bytes::from_static(&[0; 16]), 16).unwrap();
    let error = setup.handle.lookup(&short, LookupOptions::default()).await.unwrap_err();
    assert!(error.to_string().contains("exactly 32 declared"), "{error}");
    let options = GetOptions { parts: vec![2], ..Default::default() };
    let error = setup.handle.get(&hashes(0..1), options, &mut Seen::default()).await.unwrap_err();
    assert!(error.to_string().contains("2 given, 0 to 1 declared"), "{error}");
}

#[tokio::test]
async fn a_session_hears_of_a_drain() {
    let mut setup = setup(Lie::None, &[64]).await;
    let draining = SessionState::Draining(Duration::from_millis(1234));
    while setup.session.state() != draining {
        setup.session.changed().await;
    }
}

/// The client of one engine rank against a real server.
async fn rank(server: &Server, parts: &[u32]) -> (Handle, Session) {
    let client = Client::connect(server.grpc(), ClientOptions::default()).await.unwrap();
    let handle = client.open(namespace(parts)).await.unwrap();
    let session = client.session("rank").await.unwrap();
    (handle, session)
}

#[tokio::test]
async fn parts_put_by_separate_clients_make_one_block() {
    let parts = [4096, 100, 2 << 20];
    let server = Server::builder().dram("256MiB").start().await;
    let whole = batch(0..8, &parts);
    for part in 0..3 {
        let (handle, session) = rank(&server, &parts).await;
        let found = handle.lookup(&whole.hashes, LookupOptions::default()).await.unwrap();
        assert_eq!(found.prefix_blocks, 0, "a block is present only with all its parts");
        let values = whole.values.iter().skip(part as usize).step_by(3).cloned().collect();
        let share = PutBatch { parts: vec![part], values, ..whole.clone() };
        let report = handle.put(&session, &share).await.unwrap();
        let outcome = if part == 2 { PutOutcome::Stored } else { PutOutcome::PartStored };
        assert_eq!(report.outcomes, [outcome; 8]);
    }
    let (handle, session) = rank(&server, &parts).await;
    let mut all = Seen::default();
    handle.get(&whole.hashes, GetOptions::default(), &mut all).await.unwrap();
    let expected = whole.values.chunks(3).map(<[Bytes]>::concat).zip(0..).map(|(b, n)| (n, b));
    assert!(all.blocks.iter().cloned().eq(expected), "a block differs");
    let mut two = Seen::default();
    let chosen = GetOptions { parts: vec![0, 2], ..Default::default() };
    handle.get(&whole.hashes, chosen, &mut two).await.unwrap();
    let expected = whole.values.chunks(3).map(|block| [&*block[0], &*block[2]].concat());
    assert!(two.blocks.iter().map(|block| block.1.clone()).eq(expected), "a part differs");
    drop(session);
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_lease_is_granted_renewed_and_given_back() {
    let server = Server::builder().dram("64MiB").start().await;
    let (handle, session) = rank(&server, &[4096]).await;
    handle.put(&session, &batch(0..10, &[4096])).await.unwrap();
    let ask = LeaseAsk { session: &session, ttl: Duration::from_secs(5), bytes_max: 4 * 4096 };
    let options = LookupOptions { lease: Some(ask), ..LookupOptions::default() };
    let found = handle.lookup(&hashes(0..12), options).await.unwrap();
    let lease = found.lease.unwrap();
    assert_eq!((found.prefix_blocks, lease.blocks, lease.bytes), (10, 4, 4 * 4096));
    let client = handle.client();
    let renewed = client.renew(&lease, Duration::from_secs(20)).await.unwrap();
    assert!(renewed.deadline > lease.deadline);
    assert_eq!(client.stats().await.unwrap().leases, 1);
    client.release(lease.clone()).await.unwrap();
    client.release(lease.clone()).await.unwrap();
    assert_eq!(client.stats().await.unwrap().leases, 0);
    let error = client.renew(&lease, Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseExpired, "{error}");
    assert!(error.to_string().contains("do the lookup again"), "{error}");
    drop(session);
    server.stop(&[]).await;
}

#[tokio::test]
async fn the_small_verbs_reach_a_server() {
    let server = Server::builder().dram("64MiB").start().await;
    let (handle, session) = rank(&server, &[4096]).await;
    handle.put(&session, &batch(0..10, &[4096])).await.unwrap();
    assert_eq!(handle.touch(&hashes(0..12)).await.unwrap(), 10);
    let prefetched = handle.prefetch(&hashes(0..12)).await.unwrap();
    assert_eq!((prefetched.in_dram, prefetched.started), (10, 0));
    let what = Description { position: 0, ..Default::default() };
    assert_eq!(handle.describe(&hashes(0..10), what).await.unwrap(), 10);
    assert_eq!(handle.remove(&hashes(0..3)).await.unwrap(), 3);
    let found = handle.lookup(&hashes(0..10), LookupOptions::default()).await.unwrap();
    assert_eq!((found.prefix_blocks, found.counts.miss), (0, 10));
    assert_eq!(handle.client().members().list.len(), 1);
    drop(session);
    server.stop(&[]).await;
}

#[tokio::test]
async fn the_end_of_a_session_frees_its_leases() {
    let server = Server::builder().dram("64MiB").start().await;
    let (handle, session) = rank(&server, &[4096]).await;
    handle.put(&session, &batch(0..10, &[4096])).await.unwrap();
    let ask = LeaseAsk { session: &session, ttl: Duration::ZERO, bytes_max: 0 };
    let options = LookupOptions { lease: Some(ask), ..LookupOptions::default() };
    handle.lookup(&hashes(0..10), options).await.unwrap().lease.unwrap();
    drop(session);
    wait_until("the lease is free", Duration::from_secs(10), async || {
        let stats = handle.client().stats().await.unwrap();
        (stats.sessions, stats.leases, stats.leased_bytes) == (0, 0, 0)
    })
    .await;
    server.stop(&[]).await;
}

#[tokio::test]
async fn an_unknown_namespace_says_open_it() {
    let (first, second) = (Server::builder().start().await, Server::builder().start().await);
    let (handle, _session) = rank(&first, &[4096]).await;
    let client = Client::connect(second.grpc(), ClientOptions::default()).await.unwrap();
    let stranger = handle.at(&client);
    let error = stranger.lookup(&hashes(0..1), LookupOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnknownNamespace, "{error}");
}

#[tokio::test]
async fn a_session_with_a_server_that_is_gone_is_an_error_at_once() {
    let server = Server::builder().dram("64MiB").start().await;
    let client = Client::connect(server.grpc(), ClientOptions::default()).await.unwrap();
    drop(client.session("test").await.unwrap());
    server.kill();
    for not_asked in [false, true] {
        let lost = client.session("test").await.unwrap_err();
        assert_eq!(lost.kind(), ErrorKind::Unavailable, "{lost}");
        assert_eq!(lost.to_string().contains("it is not asked for"), not_asked, "{lost}");
    }
}
