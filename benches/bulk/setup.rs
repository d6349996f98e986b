//! Clients, namespaces and puts of the benches that talk to a server.

use std::ops::Range;

use bytes::Bytes;
use kvstrata::client::{
    Client, ClientOptions, Handle, HashList, NamespaceSpec, Path, PutBatch, PutOutcome, Session,
};
use kvstrata_tiers::{
    namespace::{Identity, PartSpec},
    testing::{hash_of, pack},
};

use crate::harness::Server;

pub(crate) async fn connect(server: &Server, path: Path) -> Client {
    let options = ClientOptions { path, ..ClientOptions::default() };
    Client::connect(&format!("http://{}", server.grpc()), options).await.unwrap()
}

pub(crate) async fn open(client: &Client, model: &str, block_bytes: u32) -> Handle {
    let identity = Identity {
        model: model.into(),
        engine: "bench".into(),
        dtype: "bytes".into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: block_bytes }],
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    client.open(NamespaceSpec::Engine(Box::new(identity))).await.unwrap()
}

pub(crate) fn list(numbers: Range<u64>) -> HashList {
    HashList::of_full(pack(&numbers.collect::<Vec<_>>()).into())
}

/// Puts blocks of one value, on nvme if `durable`; returns how many were stored.
pub(crate) async fn put(
    handle: &Handle,
    session: &Session,
    numbers: Range<u64>,
    value: &Bytes,
    durable: bool,
) -> u64 {
    let parent = numbers.start.checked_sub(1).map(hash_of);
    let hashes = list(numbers);
    let values = vec![value.clone(); hashes.len()];
    let batch = PutBatch { hashes, parts: Vec::new(), values, parent, durable };
    handle.put(session, &batch).await.unwrap().count(PutOutcome::Stored)
}
