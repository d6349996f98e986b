//! What routers ask, over gRPC and as JSON.

use std::time::Duration;

use kvstrata::client::{
    Client, ClientOptions, Description, Handle, NamespaceSpec, Session,
    router::messages::{
        Candidate, HashScheme, HeldBytes, LoadReport, Locality, LookupRequest, LookupResponse,
        Prefill, Prompt, ReleaseRequest, ReportRequest, ReserveRequest, ScoreRequest,
        ScoreResponse, Tier, WatchRequest, WatchTiersRequest, watch_update::Update,
    },
};
use kvstrata::schemes::dynamo;
use kvstrata_tiers::{error::ErrorKind, namespace::Wishes};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::timeout,
};

use crate::{
    client::{batch, hash, hashes, namespace},
    harness::{SERVER_WAIT, Server, command, wait_until},
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

pub(crate) fn prompt(numbers: std::ops::Range<u32>) -> Prompt {
    let hashes: Vec<u8> = numbers.flat_map(|number| *hash(number).as_bytes()).collect();
    Prompt { model: "test".to_owned(), hashes: hashes.into(), ..Prompt::default() }
}

pub(crate) fn candidate(instance: &str, device_blocks: u32) -> Candidate {
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
    let prompt = json!({"model": "test", "hashes": format!("{}=", "A".repeat(43))});
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
    // It may be told that all is gone before it ends.
    let ended = loop {
        match updates.next().await {
            Ok(told) => assert!(!matches!(told.update, Some(Update::Blocks(_))), "{told:?}"),
            Err(ended) => break ended,
        }
    };
    assert_eq!(ended.kind(), ErrorKind::Unavailable, "{ended}");
}

/// An answer that comes line by line.
struct Lines(BufReader<TcpStream>);

impl Lines {
    async fn of(server: &Server, verb: &str, body: &Value) -> Self {
        let mut io = TcpStream::connect(server.http()).await.unwrap();
        let body = body.to_string();
        let head = format!("POST /v1/router/{verb} HTTP/1.1\r\nhost: x\r\n");
        let request = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        io.write_all(request.as_bytes()).await.unwrap();
        Self(BufReader::new(io))
    }

    /// The next message; none at the end. What is around them is no JSON.
    async fn next(&mut self) -> Option<Value> {
        loop {
            let mut line = String::new();
            if timeout(SERVER_WAIT, self.0.read_line(&mut line)).await.unwrap().unwrap_or(0) == 0 {
                return None;
            }
            if line.starts_with('{') {
                return Some(serde_json::from_str(&line).unwrap());
            }
        }
    }
}

#[tokio::test]
async fn what_is_streamed_comes_as_lines_of_json_too() {
    let server = Server::builder().dram("16MiB").start().await;
    let engine = Engine::start(&server, "a").await;
    engine.put(0..5).await;
    let mut costs = Lines::of(&server, "watch_tiers", &json!({})).await;
    let told = costs.next().await.unwrap();
    assert_eq!(told["tiers"][0]["tier"], "TIER_DRAM", "{told}");
    let mut watch = Lines::of(&server, "watch", &json!({"model": "test"})).await;
    let held = loop {
        let told = watch.next().await.unwrap();
        if let Some(end) = told.get("snapshotEnd") {
            break end["blocks"].clone();
        }
    };
    assert_eq!(held, "5");
    engine.put(5..6).await;
    // One byte, 1: in dram.
    assert_eq!(watch.next().await.unwrap()["blocks"]["tiers"], "AQ==");
    let (status, why) = server.post("/v1/router/watch_tiers", "{\"intervalMs\":1}").await;
    assert!(status == 400 && why.contains("interval_ms"), "{status}: {why}");
    drop(engine);
    let start = tokio::time::Instant::now();
    server.stop(&[]).await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    // It may be told that all is gone before it ends.
    while let Some(told) = watch.next().await {
        assert!(told.get("blocks").is_none(), "{told}");
    }
    while costs.next().await.is_some() {}
}

#[tokio::test]
async fn what_is_reserved_is_in_the_next_answer_until_it_is_released_or_over() {
    let server = Server::builder().dram("16MiB").start().await;
    let engine = Engine::start(&server, "a").await;
    engine.put(0..8).await;
    let client = &engine.client;
    let prefill = Some(Prefill { linear_ms: 20.0, quadratic_ms: 0.0 });
    let queue = async || {
        let lookup = LookupRequest { prompts: vec![prompt(0..8)], prefill, ..Default::default() };
        let answer = client.router_lookup(lookup).await.unwrap();
        let told = answer.tiers.iter().find(|cost| cost.tier() == Tier::Dram).unwrap();
        (answer.answers[0].instances[0].segments[0].queue_ms, told.queued_bytes)
    };
    assert_eq!(queue().await, (0.0, 0));
    let bytes = 1 << 30;
    let load = HeldBytes { holder: String::new(), tier: Tier::Dram.into(), bytes };
    let request = ReserveRequest { loads: vec![load], ttl_ms: 30_000 };
    let reserved = client.router_reserve(request.clone()).await.unwrap();
    assert_eq!((reserved.reservation_id.len(), reserved.ttl_ms), (16, 30_000));
    let (queue_ms, queued) = queue().await;
    assert!(queue_ms > 50.0 && queued == bytes, "{queue_ms} ms, {queued} bytes");
    let reservation_id = reserved.reservation_id;
    for _ in 0..2 {
        let request = ReleaseRequest { reservation_id: reservation_id.clone() };
        client.router_release(request).await.unwrap();
    }
    assert_eq!(queue().await, (0.0, 0));
    client.router_reserve(ReserveRequest { ttl_ms: 50, ..request.clone() }).await.unwrap();
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert_eq!(queue().await, (0.0, 0));
    // A score reserves what the one that is taken would load, and a report ends it.
    let candidates = vec![candidate("a", 2)];
    let prompt = Some(prompt(0..8));
    let score =
        ScoreRequest { prompt, candidates, prefill, reserve_ms: 30_000, ..Default::default() };
    let told = client.router_score(score).await.unwrap();
    assert_eq!((told.scored[0].best_blocks, told.reservation_id.len()), (6, 16));
    assert_eq!(queue().await.1, 6 * 4096);
    let report = LoadReport {
        locality: Locality::SameNode.into(),
        tier: Tier::Dram.into(),
        bytes: 6 * 4096,
        predicted_ms: 2.0,
        actual_ms: 2.0,
        reservation_id: told.reservation_id,
        ..LoadReport::default()
    };
    let taken = client.router_report(ReportRequest { loads: vec![report] }).await.unwrap();
    assert_eq!((taken, queue().await.1), (1, 0));
    let elsewhere = HeldBytes { holder: "another".to_owned(), ..request.loads[0].clone() };
    let request = ReserveRequest { loads: vec![elsewhere], ttl_ms: 30_000 };
    client.router_reserve(request).await.unwrap();
    assert_eq!(queue().await.1, 0, "the disk of another node");
    server.stop(&[]).await;
}

#[tokio::test]
async fn prompts_are_found_by_other_names_and_by_their_tokens() {
    const TOKENS: u32 = 8 * 16;
    let server = Server::builder().dram("16MiB").start().await;
    let client = Client::connect(server.grpc(), ClientOptions::default()).await.unwrap();
    let wishes = Wishes {
        keep_tokens: true,
        hash_schemes: ["dynamo", "sglang_i64"].map(str::to_owned).into(),
    };
    let NamespaceSpec::Engine(mut identity) = namespace(&PARTS) else { panic!() };
    // By this nobody can make hashes of tokens: the index has to.
    identity.hash_algorithm = "blake3".to_owned();
    let handle = client.open_with(NamespaceSpec::Engine(identity), wishes).await.unwrap();
    let session = client.session("engine").await.unwrap();
    handle.put(&session, &batch(0..8, &PARTS)).await.unwrap();
    let tokens: Vec<u32> = (0..TOKENS).collect();
    let what = Description { tokens: &tokens, ..Description::default() };
    assert_eq!(handle.describe(&hashes(0..8), what).await.unwrap(), 8);
    let blocks = async |prompt: Prompt| {
        let request = LookupRequest {
            prompts: vec![Prompt { model: "test".to_owned(), ..prompt }],
            ..LookupRequest::default()
        };
        let answer = client.router_lookup(request).await.unwrap().answers.remove(0);
        let blocks = answer.prefixes.first().map_or(0, |prefix| prefix.blocks);
        (blocks, answer.unresolved_blocks, answer.total_blocks)
    };
    let by_tokens = |count: u32| Prompt { token_ids: (0..count).collect(), ..Prompt::default() };
    // The index is fed by what changes: a moment later it has them.
    wait_until("the index has the blocks", SERVER_WAIT, async || {
        blocks(by_tokens(TOKENS)).await.0 == 8
    })
    .await;
    assert_eq!(blocks(by_tokens(TOKENS + 16 + 3)).await, (8, 1, 9));
    let locals = dynamo::locals(16, &tokens, dynamo::seed("", b""));
    let named = |scheme: HashScheme, hashes64| Prompt {
        hash_scheme: scheme.into(),
        hashes64,
        ..Prompt::default()
    };
    assert_eq!(blocks(named(HashScheme::DynamoLocal, locals.clone())).await, (8, 0, 8));
    let sequences = dynamo::sequences(&locals);
    assert_eq!(blocks(named(HashScheme::DynamoSequence, sequences)).await, (8, 0, 8));
    let short = |number: u32| u64::from_be_bytes(hash(number).as_bytes()[..8].try_into().unwrap());
    let short = (0..5).map(short).collect();
    assert_eq!(blocks(named(HashScheme::SglangI64, short)).await, (5, 0, 5));
    let mut strange = locals.clone();
    strange[3] = 77;
    assert_eq!(blocks(named(HashScheme::DynamoLocal, strange)).await, (3, 5, 8));

    let check = async |hashes: &[u64]| {
        let (status, body) =
            server.post("/check_blocks", &json!({"block_hashes": hashes}).to_string()).await;
        assert_eq!(status, 200, "{body}");
        serde_json::from_str::<Value>(&body).unwrap()
    };
    assert_eq!(check(&locals).await, json!({"ranges": [[0, 8]]}));
    assert_eq!(check(&locals[1..]).await, json!({"ranges": []}));
    assert_eq!(check(&[]).await, json!({"ranges": []}));
    // Not wished for: nothing would ever be found by it.
    let keys = named(HashScheme::LlmD, vec![1, 2]);
    let prompts = vec![Prompt { model: "test".to_owned(), ..keys }];
    let request = LookupRequest { prompts, ..LookupRequest::default() };
    let refused = client.router_lookup(request).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("llm_d"), "{refused}");
    drop((handle, session, client));
    server.stop(&[]).await;
}

#[tokio::test]
async fn what_loading_costs_is_told_at_once_and_when_it_changes() {
    let server = Server::builder().dram("16MiB").start().await;
    let engine = Engine::start(&server, "a").await;
    let client = &engine.client;
    let mut updates = client.router_watch_tiers(WatchTiersRequest::default()).await.unwrap();
    let first = updates.next().await.unwrap();
    let dram: Vec<_> = first.tiers.iter().filter(|cost| cost.tier() == Tier::Dram).collect();
    assert_eq!(dram.len(), first.tiers.len(), "it has no other tier");
    assert_eq!(dram.len(), 4, "at each distance");
    assert!(dram.iter().all(|cost| cost.bandwidth > 1e8 && cost.assumed && cost.queued_bytes == 0));
    let load = HeldBytes { holder: String::new(), tier: Tier::Dram.into(), bytes: 1000 };
    let start = tokio::time::Instant::now();
    client.router_reserve(ReserveRequest { loads: vec![load], ttl_ms: 0 }).await.unwrap();
    loop {
        let update = updates.next().await.unwrap();
        if update.tiers.iter().all(|cost| cost.queued_bytes == 1000) {
            break;
        }
    }
    assert!(start.elapsed() < Duration::from_millis(900), "{:?}", start.elapsed());
    let request = WatchTiersRequest { interval_ms: 10 };
    let refused = client.router_watch_tiers(request).await.unwrap_err();
    assert!(refused.to_string().contains("interval_ms: 10 given"), "{refused}");
    drop((engine, updates));
    server.stop(&[]).await;
}

/// The blocks of JSON in a page, in order.
fn blocks_of(page: &str) -> Vec<Value> {
    let blocks = page.split("```json\n").skip(1).filter_map(|rest| rest.split_once("\n```"));
    blocks.map(|(block, _rest)| serde_json::from_str(block).unwrap()).collect()
}

/// Whether an answer is what the page says, but for what is measured, and who answers when.
fn assert_alike(path: &str, told: &Value, written: &Value) {
    match (told, written) {
        (Value::Object(told), Value::Object(written)) => {
            let keys = |object: &serde_json::Map<String, Value>| {
                object.keys().cloned().collect::<Vec<_>>()
            };
            assert_eq!(keys(told), keys(written), "{path}");
            for (key, told) in told {
                assert_alike(&format!("{path}.{key}"), told, &written[key]);
            }
        }
        (Value::Array(told), Value::Array(written)) => {
            assert_eq!(told.len(), written.len(), "{path}");
            for (at, (told, written)) in told.iter().zip(written).enumerate() {
                assert_alike(&format!("{path}[{at}]"), told, written);
            }
        }
        _ => {
            let field = path.rsplit('.').next().unwrap();
            let varies = [
                "epoch",
                "namespaceId",
                "node",
                "holder",
                "creditBlocks",
                "cost",
                "score",
                "reservationId",
            ];
            if varies.contains(&field) || field.ends_with("Ms") || field == "bandwidth" {
                assert_eq!(told.is_string(), written.is_string(), "{path}");
            } else {
                assert_eq!(told, written, "{path}");
            }
        }
    }
}

#[tokio::test]
async fn the_examples_of_the_page_are_what_a_node_says() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/routers.md");
    let page = std::fs::read_to_string(page).unwrap();
    let server = Server::builder().dram("16MiB").start().await;
    let engine = Engine::start(&server, "10.0.0.1:8000").await;
    engine.put(0..3).await;
    let blocks = blocks_of(&page);
    let [lookup, found, score, taken] = &blocks[..] else { panic!("{} blocks", blocks.len()) };
    for (verb, request, written) in [("lookup", lookup, found), ("score", score, taken)] {
        let (status, told) = server.post(&format!("/v1/router/{verb}"), &request.to_string()).await;
        assert_eq!(status, 200, "{told}");
        let mut told: Value = serde_json::from_str(&told).unwrap();
        // The page shows one distance of four.
        if let Some(Value::Array(tiers)) = told.get_mut("tiers") {
            tiers.truncate(1);
        }
        assert_alike(verb, &told, written);
    }
    drop(engine);
    server.stop(&[]).await;
}

#[tokio::test]
async fn weights_for_other_routers_are_printed_from_what_is_measured() {
    let server = Server::builder().dram("16MiB").start().await;
    let print = |model: &str| {
        let arguments = ["router-config", "dynamo", "--prefill-tokens-per-second", "8000"];
        let where_and_what = ["--endpoint", server.grpc(), "--model", model];
        let directory = tempfile::tempdir().unwrap();
        let mut command = command(&directory);
        let output = command.args(arguments).args(where_and_what).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.success(), text(output.stdout), text(output.stderr))
    };
    let (worked, _, said) = print("test");
    assert!(!worked && said.contains("no blocks of test"), "{said}");
    let engine = Engine::start(&server, "a").await;
    engine.put(0..8).await;
    let (worked, printed, said) = print("test");
    assert!(worked, "{said}");
    assert!(printed.contains("(512 blocks of 4096 bytes)"), "{printed}");
    assert!(printed.contains("\n--router-host-cache-hit-weight 1.00\n"), "{printed}");
    drop(engine);
    server.stop(&[]).await;
}
