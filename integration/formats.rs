//! What nodes ask one another, byte for byte: golden requests and answers, with more and with less in them, and a
//! real node that is asked in them.

use bytes::{Buf, BufMut, Bytes};
use kvstrata_proto::{
    peer::v1::{FilterRequest, FilterUpdate},
    v1::{Locality, LookupRequest, LookupResponse, PutOutcome, Run, Tier, TierCounts},
};
use prost::Message;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    codegen::http::uri::PathAndQuery,
    metadata::MetadataValue,
};

use crate::{
    harness::{CLUSTER_SECRET, SERVER_WAIT, Server, cluster_home, wait_until},
    wire::{Wire, hashes, namespace},
};

/// A field that no version has so far: number 999, three bytes.
const UNKNOWN: &str = "ba3e03313233";
const FILTER_REQUEST: &str = "08051009";
/// Generation 5, version 9, for 100 keys: eight bytes of a filter from byte 64 on, and the last.
const FILTER_PIECE: &str = "08051009186420402a08ffffffffffffffff3801";
/// Generation 5, version 10: one digest more.
const FILTER_ADDITION: &str = "0805100a320801000000000000003801";
/// A lookup in a namespace of one digit, of one hash of two bytes, at the member alone, for a reader.
const LOOKUP: &str = "0a01091202070830013a0168420a65752d63656e7472616c";
/// Two blocks asked for, both in dram of the member that answers.
const FOUND: &str = "080210021a0b1002180128013500000040220208023807";

fn bytes(text: &str) -> Vec<u8> {
    hex::decode(text).unwrap()
}

/// The message has these bytes, and is read from them also with a field more.
fn assert_golden<M: Message + Default + PartialEq + std::fmt::Debug>(message: &M, golden: &[u8]) {
    assert_eq!(hex::encode(message.encode_to_vec()), hex::encode(golden));
    let later = [golden, &bytes(UNKNOWN)].concat();
    for read in [golden, &later] {
        assert_eq!(M::decode(read).unwrap(), *message);
    }
    assert_eq!(M::decode(&[][..]).unwrap(), M::default(), "what is missing takes its default");
}

#[test]
fn what_nodes_ask_and_answer_has_golden_bytes() {
    assert_golden(&FilterRequest { generation: 5, version: 9 }, &bytes(FILTER_REQUEST));
    let piece = FilterUpdate {
        generation: 5,
        version: 9,
        keys: 100,
        offset: 64,
        words: vec![0xff; 8].into(),
        complete: true,
        ..FilterUpdate::default()
    };
    assert_golden(&piece, &bytes(FILTER_PIECE));
    let addition = FilterUpdate {
        generation: 5,
        version: 10,
        added: 1_u64.to_le_bytes().to_vec().into(),
        complete: true,
        ..FilterUpdate::default()
    };
    assert_golden(&addition, &bytes(FILTER_ADDITION));
    let lookup = LookupRequest {
        namespace_id: vec![9].into(),
        hashes: vec![7, 8].into(),
        local: true,
        reader_node: "h".to_owned(),
        reader_zone: "eu-central".to_owned(),
        ..LookupRequest::default()
    };
    assert_golden(&lookup, &bytes(LOOKUP));
    let run = Run {
        end: 2,
        tier: Tier::Dram.into(),
        locality: Locality::Local.into(),
        est_load_ms: 2.0,
        ..Run::default()
    };
    let found = LookupResponse {
        asked: 2,
        prefix_blocks: 2,
        runs: vec![run],
        counts: Some(TierCounts { dram: 2, ..TierCounts::default() }),
        members_epoch: 7,
        ..LookupResponse::default()
    };
    assert_golden(&found, &bytes(FOUND));
}

/// Bytes as they are.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// What a node answers another one of the cluster that asks in these bytes for a tenant.
async fn ask(server: &Server, path: &'static str, bytes: Vec<u8>) -> Result<Vec<Bytes>, Status> {
    let context = "kvstrata 2026-11 cluster token v1";
    let secret = [&CLUSTER_SECRET[..], b"kvstrata"].concat();
    let token = format!("Bearer {}", hex::encode(blake3::derive_key(context, &secret)));
    let mut request = Request::new(Bytes::from(bytes));
    request.metadata_mut().insert("authorization", MetadataValue::try_from(token).unwrap());
    request.metadata_mut().insert("kvstrata-tenant", MetadataValue::from_static("default"));
    let mut grpc = Grpc::new(server.channel().await);
    grpc.ready().await.unwrap();
    let path = PathAndQuery::from_static(path);
    let mut answer = grpc.server_streaming(request, path, Raw).await?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = answer.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

#[tokio::test]
async fn a_node_answers_what_a_later_and_an_earlier_version_asks() {
    let home = cluster_home();
    let server = Server::builder().dram("64MiB").home(home.path());
    let server = server.set("cluster.listen", "127.0.0.1:0").start().await;
    let mut wire = Wire::connect(&server, namespace("m")).await;
    assert_eq!(wire.put(&[1, 2]).await, [PutOutcome::Stored; 2]);
    let filter = "/kvstrata.peer.v1.Peer/Filter";
    let told = async |bytes: Vec<u8>| {
        let updates = ask(&server, filter, bytes).await.unwrap();
        updates.into_iter().map(|update| FilterUpdate::decode(update).unwrap()).collect::<Vec<_>>()
    };
    wait_until("it has a filter", SERVER_WAIT, async || !told(Vec::new()).await.is_empty()).await;
    // Nothing is known of generation 5: all of it is told.
    for request in [bytes(FILTER_REQUEST), [bytes(FILTER_REQUEST), bytes(UNKNOWN)].concat()] {
        let updates = told(request).await;
        let last = updates.last().unwrap();
        let words: usize = updates.iter().map(|update| update.words.len()).sum();
        assert!(last.complete && last.keys >= 4096 && words.is_multiple_of(64), "{last:?}");
    }
    let lookup = LookupRequest {
        namespace_id: wire.namespace_id.clone(),
        hashes: hashes([1, 2, 3]),
        local: true,
        ..LookupRequest::default()
    };
    let later = [lookup.encode_to_vec(), bytes(UNKNOWN)].concat();
    for request in [lookup.encode_to_vec(), later] {
        let answer = ask(&server, "/kvstrata.v1.BlockCache/Lookup", request).await.unwrap();
        let found = LookupResponse::decode(answer[0].clone()).unwrap();
        assert_eq!((found.asked, found.prefix_blocks, found.partial), (3, 2, false));
    }
    let unknown = ask(&server, "/kvstrata.peer.v1.Peer/Later", Vec::new()).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented, "{unknown}");
    drop(wire);
    server.stop(&[]).await;
}
