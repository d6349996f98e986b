//! What routers ask, over gRPC and as JSON.

use std::time::Duration;

use kvstrata::client::{
    Client, ClientOptions, Handle, Session,
    router::messages::{
        Candidate, LookupRequest, LookupResponse, Prefill, Prompt, ScoreRequest, ScoreResponse,
        WatchRequest, watch_update::Update,
    },
};
use kvstrata_tiers::error::ErrorKind;
use serde_json::{Value, json};

use crate::{
    client::{batch, hash, hashes, namespace},
    harness::Server,
};

const PARTS: [u32; 1] = [4096];

/// An engine with some blocks in a server's dram.
struct Engine {
    client: Client,
    handle: Handle,
    session: Session,
}

impl Engine {
    async fn start(server: &Server, instance: &str) -> Self {
        let options =
            ClientOptions { instance: Some(instance.to_owned()), ..ClientOptions::default() };
        let client = Client::connect(server.grpc(), options).await.unwrap();
        let handle = client.open(namespace(&PARTS)).await.unwrap();
        let session = client.session("engine").await.unwrap();
        Self { client, handle, session }
    }

    async fn put(&self, numbers: std::ops::Range<u32>) {
        self.handle.put(&self.session, &batch(numbers, &PARTS)).await.unwrap();
    }
}

fn prompt(numbers: std::ops::Range<u32>) -> Prompt {
    let hashes: Vec<u8> = numbers.flat_map(|number| *hash(number).as_bytes()).collect();
    Prompt { model: "test".to_owned(), hashes: hashes.into(), ..Prompt::default() }
}

fn candidate(instance: &str, device_blocks: u32) -> Candidate {
    Candidate { instance: instance.to_owned(), device_blocks, ..Candidate::default() }
}

#[tokio::test]
async fn grpc_and_json_say_the_same() {
    let server = Server::builder().dram("16MiB").start().await;
    let engine = Engine::start(&server, "10.0.0.1:8000").await;
    engine.put(0..8).await;
    let prefill = Some(Prefill { linear_ms: 20.0, quadratic_ms: 0.0 });
    let lookup = LookupRequest { prompts: vec![prompt(0..10)], prefill, ..Default::default() };
    let told = engine.client.router_lookup(lookup.clone()).await.unwrap();
    let answer = &told.answers[0];
    assert_eq!((answer.total_blocks, answer.prefixes[0].blocks), (10, 8));
    assert_eq!(answer.prefixes[0].block_tokens, 16);
    let instance = &answer.instances[0];
    assert_eq!((instance.instance.as_str(), instance.found_blocks), ("10.0.0.1:8000", 8));
    assert!(instance.saved_ms > 100.0, "{instance:?}");
    let (status, body) =
        server.post("/v1/router/lookup", &serde_json::to_string(&lookup).unwrap()).await;
    assert_eq!(status, 200, "{body}");
    let json: LookupResponse = serde_json::from_str(&body).unwrap();
    assert_eq!(json.epoch, told.epoch);
    assert_eq!(json.answers[0].prefixes, told.answers[0].prefixes);
    assert_eq!(json.answers[0].instances[0].found_blocks, 8);

    let candidates = vec![candidate("10.0.0.2:8000", 5), candidate("10.0.0.1:8000", 1)];
    let prompt = Some(prompt(0..10));
    let score = ScoreRequest { prompt, candidates, prefill, ..Default::default() };
    let told = engine.client.router_score(score.clone()).await.unwrap();
    assert_eq!((told.instance.as_str(), told.taken), ("10.0.0.1:8000", 1));
    assert_eq!((told.scored[0].found_blocks, told.scored[1].found_blocks), (0, 7));
    let (status, body) =
        server.post("/v1/router/score", &serde_json::to_string(&score).unwrap()).await;
    assert_eq!(status, 200, "{body}");
    let json: ScoreResponse = serde_json::from_str(&body).unwrap();
    assert_eq!((json.taken, json.scored.len()), (1, 2));
    server.stop(&[]).await;
}

/// What is wrong with a request, and the field that the refusal must name.
fn mistakes() -> Vec<(&'static str, Value, &'static str)> {
    let prompt = json!({"model": "test", "hashes": "A".repeat(44)});
    let both = json!({"model": "test", "hashes": "AAAA", "hashes64": ["1"]});
    let nowhere = json!({"hashes": "AAAA"});
    let one = |prompt: Value| json!({"prompts": [prompt]});
    let score = |with: Value| {
        let mut request = json!({"prompt": prompt, "candidates": [{"instance": "a"}], "prefill": {"linearMs": 1}});
        let fields = with.as_object().unwrap().clone();
        request.as_object_mut().unwrap().extend(fields);
        request
    };
    vec![
        ("lookup", json!({}), "prompts: 0 given, 1 to 64 allowed"),
        ("lookup", one(nowhere), "prompt.model"),
        ("lookup", one(both), "exactly one of hashes, hashes64 and token_ids"),
        ("lookup", one(json!({"model": "m"})), "exactly one of"),
        ("lookup", json!({"prompts": [prompt], "deadlineMs": 60_000}), "deadline_ms: 60000 given"),
        ("lookup", json!({"prompts": [prompt], "instances": [{}]}), "instances[0]"),
        ("lookup", json!({"prompts": [prompt], "prefill": {"linearMs": -1}}), "prefill.linear_ms"),
        ("lookup", json!({"prompt": 1}), "body"),
        ("score", score(json!({"candidates": []})), "candidates: 0 given, 1 to 1024 allowed"),
        ("score", score(json!({"prefill": null})), "candidates[0].prefill"),
        ("score", score(json!({"temperature": "NaN"})), "temperature: NaN given"),
        ("score", score(json!({"reserveMs": 3_600_000})), "reserve_ms: 3600000 given"),
        ("score", score(json!({"prompt": null})), "prompt: nothing given"),
    ]
}

#[tokio::test]
async fn what_cannot_work_is_refused_by_name() {
    let server = Server::builder().dram("8MiB").start().await;
    let engine = Engine::start(&server, "a").await;
    for (verb, request, field) in mistakes() {
        let (status, body) = server.post(&format!("/v1/router/{verb}"), &request.to_string()).await;
        assert_eq!(status, 400, "{request}: {body}");
        let error: Value = serde_json::from_str(&body).unwrap();
        let error = error["error"].as_str().unwrap();
        assert!(error.contains(field), "{request}: {error}");
    }
    assert_eq!(server.post("/v1/router/nothing", "{}").await.0, 501);
    assert_eq!(server.page("/v1/router/lookup").await.0, 405);
    // The same over gRPC, and what is right goes on to work.
    let refused = engine.client.router_lookup(LookupRequest::default()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let good = LookupRequest { prompts: vec![prompt(0..1)], ..Default::default() };
    engine.client.router_lookup(good).await.unwrap();
    assert!(
        server.metric("kvstrata_rpc_seconds_count{op=\"router_lookup\",outcome=\"ok\"}").await
            >= 1.0
    );
    server.stop(&[]).await;
}

#[tokio::test]
async fn a_watcher_follows_until_the_server_stops_and_does_not_hold_it_up() {
    let server = Server::builder().dram("16MiB").start().await;
    let engine = Engine::start(&server, "a").await;
    engine.put(0..5).await;
    let mut updates = engine.client.router_watch(WatchRequest::default()).await.unwrap();
    let mut blocks = 0;
    loop {
        match updates.next().await.unwrap().update.unwrap() {
            Update::Reset(_) => blocks = 0,
            Update::Blocks(told) => blocks += told.tiers.len(),
            Update::SnapshotEnd(end) => break assert_eq!((blocks, end.blocks), (5, 5)),
        }
    }
    engine.handle.remove(&hashes(0..1)).await.unwrap();
    let Update::Blocks(told) = updates.next().await.unwrap().update.unwrap() else { panic!() };
    assert_eq!((&told.tiers[..], told.hashes.len()), (&[0][..], 32));
    drop(engine);
    let start = tokio::time::Instant::now();
    server.stop(&[]).await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let ended = updates.next().await.unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::Unavailable, "{ended}");
}
