//! A router that asks a real node: what an engine has put there is found by the tokens of a prompt.

use kvstrata::{
    client::{Client, ClientOptions, HashList, NamespaceSpec, PutBatch, PutOutcome},
    schemes::{Algorithm, Prompt},
};
use kvstrata_tiers::{
    block::BlockHash,
    namespace::{Identity, PartSpec},
};
use serde_json::Value;

use super::{
    SOON, ask, completion,
    engine::{BLOCK_TOKENS, Engine},
    process::RouterProcess,
    system,
};
use crate::{
    client::pattern,
    harness::{Server, wait_until},
};

const BYTES: u32 = 4096;

/// Puts the first blocks of a prompt, as the engine at `instance` would.
async fn put(server: &Server, instance: &str, tokens: &[u32], blocks: usize) -> Client {
    let identity = Identity {
        model: "/models/test".into(),
        engine: "vllm".into(),
        dtype: "bf16".into(),
        block_tokens: u32::try_from(BLOCK_TOKENS).unwrap(),
        parts: vec![PartSpec { group: 0, rank: 0, bytes: BYTES }],
        hash_algorithm: "sha256_cbor".into(),
        hash_bytes: 32,
        ..Identity::default()
    };
    let prompt = Prompt { tokens, ..Prompt::default() };
    let hashes = Algorithm::of(&identity).unwrap().hashes(BLOCK_TOKENS, &prompt).unwrap();
    let hashes: Vec<_> = hashes.iter().take(blocks).collect();
    let hashes: Vec<_> = hashes.iter().map(|hash| BlockHash::new(&hash[..]).unwrap()).collect();
    let options = ClientOptions {
        instance: Some(instance.to_owned()),
        node: Some("n-b".to_owned()),
        ..ClientOptions::default()
    };
    let client = Client::connect(server.grpc(), options).await.unwrap();
    let handle = client.open(NamespaceSpec::Engine(Box::new(identity))).await.unwrap();
    let session = client.session("engine").await.unwrap();
    let values = (0..hashes.len()).map(|at| pattern(u32::try_from(at).unwrap(), 0, BYTES as usize));
    let batch = PutBatch {
        hashes: HashList::of(&hashes),
        values: values.collect(),
        parts: Vec::new(),
        parent: None,
        durable: false,
    };
    let report = handle.put(&session, &batch).await.unwrap();
    assert!(report.outcomes.iter().all(|outcome| *outcome == PutOutcome::Stored));
    client
}

#[tokio::test]
async fn what_a_node_has_is_found_by_the_tokens_of_a_prompt() {
    let server = Server::builder().dram("64MiB").start().await;
    let engines = [Engine::start(None), Engine::start(None)];
    let prompt = system('x') + "What is there?";
    let tokens: Vec<u32> = prompt.bytes().map(u32::from).collect();
    let _client = put(&server, &engines[1].address(), &tokens, 30).await;
    let both = [&engines[0], &engines[1]];
    let arguments = ["--kvstrata", server.grpc(), "--tiers-deadline", "5s"];
    let router = RouterProcess::start(&both, &arguments).await;
    let select = async || {
        let whole = router.post("/select", &completion(&prompt)).await;
        serde_json::from_str::<Value>(&whole.body).unwrap()
    };
    wait_until("the node answers", SOON, async || select().await["tiers"] == "found").await;
    // The engine that has put them, and so is known, loads; the other one would compute.
    let answer = select().await;
    assert_eq!(answer["engine"], "b", "{answer}");
    let taken = ask(&router, &prompt).await;
    assert_eq!((taken.route("engine"), taken.route("tiers")), ("b", "found"));
    assert_eq!((taken.route("dram"), taken.route("computed")), ("30", "10"));
    assert_eq!(ask(&router, &system('y')).await.route("tiers"), "nothing");
    router.stop(&[]);
    server.stop(&[]).await;
}
