//! What a client can do wrong: each gets a typed error that names field, value and range, or the
//! documented outcome, and the server goes on.

use bytes::Bytes;
use kvstrata_proto::v1::{
    LeaseRequest, LookupRequest, OpaqueNamespace, OpenRequest, Part, PartData, PutData, PutOffer,
    PutOutcome, PutRequest, ReleaseRequest, RenewRequest, open_request, put_request,
};
use prost::Message;
use tonic::{Code, Status, client::Grpc, codegen::http::uri::PathAndQuery, transport::Channel};
use tonic_prost::ProstCodec;

use crate::{
    harness::Server,
    wire::{BLOCK_BYTES, HASH_BYTES, Wire, hash, hashes, namespace, open, payload},
};

/// Fails unless the error has this code and its text holds all of these.
fn expect<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, texts: &[&str]) {
    let status = result.expect_err("must be refused");
    assert_eq!(status.code(), code, "{status}");
    for text in texts {
        assert!(status.message().contains(text), "{text:?} is not in {:?}", status.message());
    }
}

/// A server, a client with a session, and the check that both are well after what a test did.
struct Stage {
    server: Server,
    wire: Wire,
}

impl Stage {
    async fn new() -> Self {
        let server = Server::builder().dram("64MiB").start().await;
        let wire = Wire::connect(&server, namespace("m")).await;
        Self { server, wire }
    }

    async fn end(mut self, expected_in_log: &[&str]) {
        assert_eq!(self.wire.put(&[777]).await, [PutOutcome::Stored]);
        assert_eq!(self.wire.get(&[777]).await, [Some(payload(777))]);
        assert_eq!(self.server.metric("kvstrata_request_panics_total").await, 0.0);
        drop(self.wire);
        self.server.stop(expected_in_log).await;
    }

    async fn lookup(&mut self, request: LookupRequest) -> Result<(), Status> {
        self.wire.client.lookup(request).await.map(drop)
    }

    /// The error of an offer.
    async fn offer(&mut self, offer: PutOffer) -> Result<(), Status> {
        self.wire.put_stream(offer).await?.wanted().await.map(drop)
    }

    /// The error of these messages after a good offer of blocks 1 and 2, and then no more.
    async fn put(&mut self, messages: Vec<Option<put_request::Message>>) -> Result<(), Status> {
        let mut put = self.wire.put_stream(self.wire.offer([1, 2])).await?;
        put.wanted().await?;
        for message in messages {
            put.requests.send(PutRequest { message }).await.unwrap_or_default();
        }
        put.finish(2).await.map(drop)
    }
}

#[tokio::test]
async fn hashes_of_a_wrong_length_number_or_namespace() {
    let mut stage = Stage::new().await;
    let good = stage.wire.lookup_request([1]);
    let hashes_of = |packed: Vec<u8>| LookupRequest { hashes: packed.into(), ..good.clone() };

    let wrong = stage.lookup(hashes_of(vec![1; 33])).await;
    expect(wrong, Code::InvalidArgument, &["hashes", "33", "32"]);
    let none = stage.lookup(hashes_of(vec![])).await;
    expect(none, Code::InvalidArgument, &["hashes", "0 ", "1 to 131072"]);
    let many = stage.lookup(hashes_of(vec![1; 131_073 * HASH_BYTES])).await;
    expect(many, Code::InvalidArgument, &["hashes", "4194336", "1 to 131072"]);
    stage.lookup(hashes_of(vec![1; 131_072 * HASH_BYTES])).await.unwrap();

    let short = LookupRequest { namespace_id: vec![1; 5].into(), ..good.clone() };
    expect(stage.lookup(short).await, Code::InvalidArgument, &["namespace_id", "5", "32"]);
    let unknown = LookupRequest { namespace_id: vec![1; 32].into(), ..good };
    expect(stage.lookup(unknown).await, Code::NotFound, &["namespace_id"]);

    let offer = PutOffer { hashes: Bytes::new(), ..stage.wire.offer([1]) };
    expect(stage.offer(offer).await, Code::InvalidArgument, &["hashes", "0 ", "1 to 65536"]);
    let offer = stage.wire.offer(0..65_537);
    expect(stage.offer(offer).await, Code::InvalidArgument, &["hashes", "2097184", "1 to 65536"]);
    let get = stage.wire.get_request(0..65_537);
    let refused = stage.wire.read(get, 65_537).await;
    expect(refused, Code::InvalidArgument, &["hashes", "2097184", "1 to 65536"]);
    let get = stage.wire.get_request([]);
    expect(stage.wire.read(get, 0).await, Code::InvalidArgument, &["hashes", "0 "]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn a_part_of_another_length_or_not_declared() {
    let mut stage = Stage::new().await;
    let data = |parts| Some(put_request::Message::Data(PutData { parts }));
    let short = stage.wire.part(1, 2, vec![0; BLOCK_BYTES - 1]);
    let refused = stage.put(vec![data(vec![short])]).await;
    expect(refused, Code::FailedPrecondition, &["part 0 of index 1", "4095", "4096"]);
    let long = stage.wire.part(0, 1, vec![0; BLOCK_BYTES + 1]);
    let refused = stage.put(vec![data(vec![long])]).await;
    expect(refused, Code::FailedPrecondition, &["part 0 of index 0", "4097", "4096"]);

    let mut undeclared = stage.wire.part(0, 1, payload(1));
    undeclared.part = 7;
    let refused = stage.put(vec![data(vec![undeclared])]).await;
    expect(refused, Code::InvalidArgument, &["part", "7", "index 0"]);
    let offer = PutOffer { parts: vec![1], ..stage.wire.offer([1]) };
    expect(stage.offer(offer).await, Code::InvalidArgument, &["parts", "1 given", "0 to 0"]);
    let mut get = stage.wire.get_request([1]);
    get.parts = vec![0, 9];
    let refused = stage.wire.read(get, 1).await;
    expect(refused, Code::InvalidArgument, &["parts", "9 given", "0 to 0"]);

    let stray = stage.wire.part(2, 1, payload(1));
    let refused = stage.put(vec![data(vec![stray])]).await;
    expect(refused, Code::InvalidArgument, &["index", "2 given", "0 to 1"]);
    let mut gap = stage.wire.part(0, 1, payload(1));
    gap.offset = 8;
    gap.data.truncate(8);
    let refused = stage.put(vec![data(vec![gap])]).await;
    expect(refused, Code::InvalidArgument, &["offset", "8", "offset 0"]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn an_offer_whose_lists_do_not_fit_it() {
    let mut stage = Stage::new().await;
    let good = stage.wire.offer([1, 2]);
    let sums = PutOffer { checksums: vec![1, 2, 3], ..good.clone() };
    expect(stage.offer(sums).await, Code::InvalidArgument, &["checksums", "3 given", "0 or 2"]);
    let lengths = PutOffer { lengths: vec![5], ..good.clone() };
    expect(
        stage.offer(lengths).await,
        Code::InvalidArgument,
        &["lengths", "1 given", "0 required"],
    );
    let parent = PutOffer { parent: vec![1; 8].into(), ..good.clone() };
    expect(stage.offer(parent).await, Code::InvalidArgument, &["parent", "8 bytes", "32"]);
    let durable = PutOffer { durable: true, ..good };
    expect(stage.offer(durable).await, Code::Unimplemented, &["durable", "nvme"]);

    let opaque = OpaqueNamespace { name: "values".to_owned(), bytes_max: 100 };
    let kind = Some(open_request::Kind::Opaque(opaque));
    let request = OpenRequest { kind, ..OpenRequest::default() };
    let opened = stage.wire.client.open(request).await.unwrap().into_inner();
    assert_eq!(opened.block_bytes, 0);
    let long =
        PutOffer { namespace_id: opened.namespace_id, lengths: vec![101], ..stage.wire.offer([1]) };
    expect(stage.offer(long).await, Code::InvalidArgument, &["lengths", "101", "1 to 100"]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn messages_out_of_order() {
    let mut stage = Stage::new().await;
    let offer = put_request::Message::Offer(stage.wire.offer([3]));
    let refused = stage.put(vec![Some(offer)]).await;
    expect(refused, Code::InvalidArgument, &["offer", "second"]);
    expect(stage.put(vec![None]).await, Code::InvalidArgument, &["message", "offer or data"]);
    let data = PutRequest { message: Some(put_request::Message::Data(PutData::default())) };
    let mut responses =
        stage.wire.client.put(tokio_stream::iter([data])).await.unwrap().into_inner();
    expect(responses.message().await, Code::InvalidArgument, &["data", "offer"]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn sessions_leases_and_times() {
    let mut stage = Stage::new().await;
    let lease = |ttl_ms, bytes_max| Some(LeaseRequest { ttl_ms, bytes_max });
    let good = LookupRequest { lease: lease(0, 0), ..stage.wire.lookup_request([1]) };

    let none = LookupRequest { session_id: Bytes::new(), ..good.clone() };
    expect(stage.lookup(none).await, Code::InvalidArgument, &["session_id", "0 bytes", "16"]);
    let unknown = LookupRequest { session_id: vec![0; 16].into(), ..good.clone() };
    expect(stage.lookup(unknown).await, Code::Aborted, &["session_id", "open a new one"]);
    let long = LookupRequest { lease: lease(300_001, 0), ..good.clone() };
    let texts = ["lease.ttl_ms", "300001", "1 to 300000"];
    expect(stage.lookup(long).await, Code::InvalidArgument, &texts);
    let large = LookupRequest { lease: lease(0, 1 << 40), ..good };
    let texts = ["lease.bytes_max", "1099511627776", "0 to 33554432"];
    expect(stage.lookup(large).await, Code::InvalidArgument, &texts);

    let offer = PutOffer { session_id: vec![9; 16].into(), ..stage.wire.offer([1]) };
    expect(stage.offer(offer).await, Code::Aborted, &["session_id"]);
    let session_id = stage.wire.session_id.clone();
    let release = ReleaseRequest { session_id: session_id.clone(), lease_id: vec![1; 3].into() };
    let refused = stage.wire.client.release(release).await;
    expect(refused, Code::InvalidArgument, &["lease_id", "3 bytes", "16"]);
    let renew = RenewRequest { session_id, lease_id: vec![1; 16].into(), ttl_ms: 0 };
    expect(stage.wire.client.renew(renew).await, Code::Aborted, &["lease_id", "lookup again"]);
    let mut get = stage.wire.get_request([1]);
    get.deadline_ms = 600_001;
    let texts = ["deadline_ms", "600001", "0 to 600000"];
    expect(stage.wire.read(get, 1).await, Code::InvalidArgument, &texts);
    stage.end(&[]).await;
}

#[tokio::test]
async fn a_namespace_with_many_problems_names_them_all() {
    let mut stage = Stage::new().await;
    let mut bad = namespace("");
    bad.block_tokens = 0;
    bad.hash_bytes = 64;
    bad.parts = vec![Part { group: 0, rank: 0, bytes: 0 }];
    let texts = ["model", "block_tokens", "hash_bytes", "64", "8 to 32", "bytes"];
    expect(stage.wire.client.open(open(bad)).await, Code::InvalidArgument, &texts);
    let mut many = namespace("m");
    many.parts = (0..1025).map(|rank| Part { group: 0, rank, bytes: 8 }).collect();
    let refused = stage.wire.client.open(open(many)).await;
    expect(refused, Code::InvalidArgument, &["parts", "1025", "1024"]);
    let nothing = stage.wire.client.open(OpenRequest::default()).await;
    expect(nothing, Code::InvalidArgument, &["kind", "namespace or opaque"]);
    for (schemes, keep_tokens, texts) in [
        (vec!["vllm_u64", "md5"], true, ["hash_schemes", "\"md5\"", "vllm_u64, sglang_i64"]),
        (vec!["llm_d"], false, ["hash_schemes", "llm_d", "set keep_tokens"]),
    ] {
        let hash_schemes = schemes.into_iter().map(str::to_owned).collect();
        let wish = OpenRequest { hash_schemes, keep_tokens, ..open(namespace("m")) };
        expect(stage.wire.client.open(wish).await, Code::InvalidArgument, &texts);
    }
    let client = OpenRequest { instance: "x".repeat(257), ..open(namespace("m")) };
    let refused = stage.wire.client.open(client).await;
    expect(refused, Code::InvalidArgument, &["instance", "257", "0 to 256"]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn an_error_with_more_to_say_than_a_header_holds_still_arrives() {
    let mut stage = Stage::new().await;
    let mut bad = namespace("m");
    bad.parts = (0..1024).map(|rank| Part { group: 0, rank, bytes: 0 }).collect();
    let refused = stage.wire.client.open(open(bad)).await;
    expect(refused, Code::InvalidArgument, &["parts: (group 0, rank 0) has 0 bytes, 1 to "]);
    let mut get = stage.wire.get_request([1]);
    get.parts = vec![0; 1 << 20];
    let refused = stage.wire.read(get, 1).await;
    expect(refused, Code::InvalidArgument, &["parts: [0, 0, 0", " ..."]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn what_was_stored_before_a_bad_part_is_counted() {
    let mut stage = Stage::new().await;
    let (good, stray) = (stage.wire.part(0, 1, payload(1)), stage.wire.part(9, 2, payload(2)));
    let data = put_request::Message::Data(PutData { parts: vec![good, stray] });
    let refused = stage.put(vec![Some(data)]).await;
    expect(refused, Code::InvalidArgument, &["index", "9 given", "0 to 1"]);
    assert_eq!(stage.wire.get(&[1]).await, [Some(payload(1))]);
    let series = "kvstrata_put_blocks_total{outcome=\"stored\"}";
    assert_eq!(stage.server.metric(series).await, 1.0);
    assert_eq!(stage.server.metric("kvstrata_put_bytes_total").await, 4096.0);
    stage.end(&[]).await;
}

/// The most memory that a process has used, in bytes.
fn memory_peak(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn a_message_of_millions_of_parts_takes_no_more_memory_than_a_message() {
    let mut stage = Stage::new().await;
    let before = memory_peak(stage.server.process_id());
    // Two bytes each on the wire, sixty-four in memory.
    let parts = vec![PartData::default(); 4_000_000];
    let data = put_request::Message::Data(PutData { parts });
    let refused = stage.put(vec![Some(data)]).await;
    expect(refused, Code::InvalidArgument, &["data.parts", "4000000 given", "0 to 65536"]);
    let grown = memory_peak(stage.server.process_id()) - before;
    // The arena of 64 MiB is touched meanwhile.
    assert!(grown < (64 + 64) << 20, "grown by {} MiB", grown >> 20);
    stage.end(&[]).await;
}

/// `OpenRequest` with bytes where text belongs.
#[derive(Clone, PartialEq, Message)]
struct RawOpen {
    #[prost(message, optional, tag = "1")]
    namespace: Option<RawNamespace>,
}

#[derive(Clone, PartialEq, Message)]
struct RawNamespace {
    #[prost(bytes = "bytes", tag = "1")]
    model: Bytes,
}

/// Calls with a message of our own making.
async fn raw_call<M: Message + 'static>(
    channel: Channel,
    path: &'static str,
    message: M,
) -> Result<(), Status> {
    let mut grpc = Grpc::new(channel);
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<M, RawOpen>::default();
    let path = PathAndQuery::from_static(path);
    grpc.unary(tonic::Request::new(message), path, codec).await.map(drop)
}

#[tokio::test]
async fn text_that_is_not_utf_8_and_bytes_that_are_no_message() {
    let stage = Stage::new().await;
    let channel = stage.server.channel().await;
    let namespace = Some(RawNamespace { model: Bytes::from_static(b"\xFF\xFEmodel") });
    let path = "/kvstrata.v1.BlockCache/Open";
    let refused = raw_call(channel.clone(), path, RawOpen { namespace }).await;
    expect(refused, Code::InvalidArgument, &["model", "UTF-8"]);

    // A namespace id where the lookup has a string of hashes: field 4 is a message, not this text.
    #[derive(Clone, PartialEq, Message)]
    struct Garbage {
        #[prost(bytes = "bytes", tag = "4")]
        lease: Bytes,
    }
    let garbage = Garbage { lease: Bytes::from_static(b"\xFF\xFF\xFF\xFF") };
    let refused = raw_call(channel, "/kvstrata.v1.BlockCache/Lookup", garbage).await;
    expect(refused, Code::InvalidArgument, &["lease"]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn a_message_over_the_limit() {
    let mut stage = Stage::new().await;
    let huge = LookupRequest { hashes: vec![1; 9 << 20].into(), ..stage.wire.lookup_request([]) };
    let texts = ["length too large", "9437", "8388608"];
    expect(stage.lookup(huge).await, Code::InvalidArgument, &texts);
    let huge = PutOffer { hashes: vec![1; 9 << 20].into(), ..stage.wire.offer([1]) };
    expect(stage.offer(huge).await, Code::InvalidArgument, &texts);
    stage.end(&[]).await;
}

#[tokio::test]
async fn duplicate_hashes_in_one_call_are_one_block() {
    let mut stage = Stage::new().await;
    let mut put = stage.wire.put_stream(stage.wire.offer([1, 1, 2, 1])).await.unwrap();
    let wanted: Vec<_> = put.wanted().await.unwrap().iter().map(|r| (r.start, r.end)).collect();
    assert_eq!(wanted, [(0, 1), (2, 3)], "each once");
    put.send(stage.wire.part(0, 1, payload(1))).await;
    put.send(stage.wire.part(2, 2, payload(2))).await;
    let outcomes = put.finish(4).await.unwrap();
    use PutOutcome::{Pending, Stored};
    assert_eq!(outcomes, [Stored, Pending, Stored, Pending]);
    let answer = stage.wire.lookup([1, 1, 2, 1]).await;
    assert_eq!((answer.asked, answer.prefix_blocks), (4, 4));
    let (one, two) = (Some(payload(1)), Some(payload(2)));
    assert_eq!(stage.wire.get(&[1, 2, 1]).await, [one.clone(), two, one]);
    stage.end(&[]).await;
}

#[tokio::test]
async fn the_same_key_with_other_bytes_keeps_the_first() {
    let mut stage = Stage::new().await;
    assert_eq!(stage.wire.put(&[1]).await, [PutOutcome::Stored]);
    let other = stage.wire.part(0, 1, payload(2));
    let offer = PutOffer { checksums: vec![other.checksum], ..stage.wire.offer([1]) };
    let put = stage.wire.put_stream(offer).await.unwrap();
    let mut put = put;
    assert_eq!(put.wanted().await.unwrap(), []);
    put.send(other).await;
    expect(put.finish(1).await, Code::InvalidArgument, &["index", "0 given"]);
    let offer = PutOffer { checksums: vec![5], ..stage.wire.offer([1]) };
    let mut put = stage.wire.put_stream(offer).await.unwrap();
    assert_eq!(put.wanted().await.unwrap(), []);
    assert_eq!(put.finish(1).await.unwrap(), [PutOutcome::DuplicateDiffers]);
    assert_eq!(stage.wire.get(&[1]).await, [Some(payload(1))]);
    let series = "kvstrata_put_blocks_total{outcome=\"duplicate_differs\"}";
    assert_eq!(stage.server.metric(series).await, 2.0);
    stage.end(&[]).await;
}

#[tokio::test]
async fn bytes_that_do_not_match_their_checksum_are_never_stored() {
    let mut stage = Stage::new().await;
    let mut put = stage.wire.put_stream(stage.wire.offer([1])).await.unwrap();
    put.wanted().await.unwrap();
    let mut part = stage.wire.part(0, 1, payload(1));
    part.checksum ^= 1;
    put.send(part).await;
    assert_eq!(put.finish(1).await.unwrap(), [PutOutcome::Corrupt]);
    assert_eq!(stage.wire.get(&[1]).await, [None]);
    assert_eq!(stage.wire.put(&[1]).await, [PutOutcome::Stored], "and can be sent again");
    assert_eq!(hashes([1]), hash(1).as_slice());
    stage.end(&[]).await;
}
