//! The reference router as a process, in front of engines that take real time, with and without tiers.

mod captured;
mod engine;
mod process;
mod real;
mod tiers;

use std::{sync::atomic::Ordering, time::Duration};

use serde_json::{Value, json};

use crate::{harness::wait_until, router::tiers::Tiers};
use engine::{BLOCK_TOKENS, Engine, PREFILL_MS, Store};
use process::{RouterProcess, Whole};

const SOON: Duration = Duration::from_secs(30);
const SYSTEM_BLOCKS: usize = 40;

/// A system prompt of so many blocks.
fn system(letter: char) -> String {
    letter.to_string().repeat(SYSTEM_BLOCKS * BLOCK_TOKENS)
}

fn completion(prompt: &str) -> Value {
    json!({ "model": "test", "prompt": prompt, "stream": true })
}

async fn ask(router: &RouterProcess, prompt: &str) -> Whole {
    let whole = router.post("/v1/completions", &completion(prompt)).await;
    assert_eq!((whole.status, whole.complete), (200, true), "{whole:?}");
    whole
}

#[tokio::test]
async fn prompts_go_where_their_beginning_is() {
    let engines = [Engine::start(None), Engine::start(None)];
    let router = RouterProcess::start(&[&engines[0], &engines[1]], &[]).await;
    let first = ask(&router, &(system('x') + "Who are you?")).await;
    assert_eq!((first.route("engine"), first.route("mode")), ("a", "timed"));
    assert_eq!((first.blocks("computed"), first.route("computed")), (40, "40"));
    assert!(first.first >= Duration::from_millis(40 * PREFILL_MS), "{first:?}");
    router.wait_blocks("a", 40).await;
    // The same system prompt: there is little left to do, on the engine that has it.
    let second = ask(&router, &(system('x') + "And what is this, if I may ask?")).await;
    assert_eq!((second.route("engine"), second.route("device")), ("a", "40"));
    assert_eq!((second.blocks("device"), second.blocks("computed")), (40, 1));
    assert!(second.first < first.first / 2, "{:?} after {:?}", second.first, first.first);
    // Another one goes elsewhere.
    let other = ask(&router, &(system('y') + "Who are you?")).await;
    assert_eq!((other.route("engine"), other.blocks("computed")), ("b", 40));
    router.wait_blocks("b", 40).await;
    let other = ask(&router, &(system('y') + "?")).await;
    assert_eq!((other.route("engine"), other.blocks("computed")), ("b", 0));
    // So do chats, and tokens.
    let chat = |content: &str| {
        let message = |role, content| json!({ "role": role, "content": content });
        let messages = [message("system", system('z').as_str()), message("user", content)];
        json!({ "model": "test", "messages": messages, "stream": true })
    };
    let first = router.post("/v1/chat/completions", &chat("one")).await;
    let engine = first.route("engine").to_owned();
    let blocks = if engine == "a" { 81 } else { 80 };
    router.wait_blocks(&engine, blocks).await;
    let second = router.post("/v1/chat/completions", &chat("two")).await;
    assert_eq!((second.route("engine"), second.blocks("computed")), (engine.as_str(), 0));
    let tokens: Vec<u32> = system('x').bytes().map(u32::from).collect();
    let tokens = json!({ "model": "test", "prompt": tokens, "stream": true });
    let third = router.post("/v1/completions", &tokens).await;
    assert_eq!((third.route("engine"), third.blocks("device")), ("a", 40));
    // A salt keeps prompts apart, an adapter too: of these engines each computes all the same.
    for body in [
        json!({ "model": "test", "prompt": system('x'), "cache_salt": "s" }),
        json!({ "model": "adapter", "prompt": system('x') }),
    ] {
        let apart = router.post("/v1/completions", &body).await;
        assert_eq!((apart.status, apart.route("device")), (200, "0"), "{apart:?}");
    }
    router.stop(&[]);
}

#[tokio::test]
async fn a_worker_that_was_restarted_loads_its_prefix_from_the_tiers() {
    let store = Store::default();
    let tiers = Tiers::start(&store);
    let mut engine = Engine::start(Some(Store::clone(&store)));
    let at = tiers.address.to_string();
    let router =
        RouterProcess::start(&[&engine], &["--kvstrata", &at, "--tiers-deadline", "5s"]).await;
    let prompt = system('x') + "What is left?";
    // Until it is connected, it is decided without.
    wait_until("kvstrata is asked", SOON, async || {
        ["nothing", "found"].contains(&ask(&router, "a prompt of one block").await.route("tiers"))
    })
    .await;
    let first = ask(&router, &prompt).await;
    assert_eq!((first.route("nvme"), first.blocks("computed")), ("0", 40));
    engine = engine.restart();
    wait_until("the engine's blocks are forgotten", SOON, async || {
        router.engines().await[0]["device_blocks"] == 0
    })
    .await;
    router.wait_up(1).await;
    let second = ask(&router, &prompt).await;
    assert_eq!((second.route("tiers"), second.route("device")), ("found", "0"));
    assert_eq!((second.route("nvme"), second.route("computed")), ("40", "0"));
    assert_eq!((second.blocks("loaded"), second.blocks("computed")), (40, 0));
    assert!(second.first < first.first / 2, "{:?} after {:?}", second.first, first.first);
    // kvstrata is told who loads, so that it brings it nearer and counts it.
    wait_until("kvstrata is told", SOON, async || !tiers.state.lock().unwrap().told.is_empty())
        .await;
    {
        let state = tiers.state.lock().unwrap();
        let told = &state.told[0];
        let prompt = told.prompt.as_ref().unwrap();
        assert_eq!((prompt.model.as_str(), prompt.token_ids.len()), ("/models/test", 653));
        let address = engine.address();
        assert_eq!((told.prefetch, told.candidates[0].instance.as_str()), (true, address.as_str()));
        assert_eq!(told.candidates[0].node, "n-a");
        assert!((50..=10_000).contains(&told.reserve_ms), "{told:?}");
        let asked = state.asked.last().unwrap();
        assert_eq!(asked.instances[0].instance, address);
    }
    drop(engine);
    router.stop(&["engine left out"]);
}

#[tokio::test]
async fn the_busy_tier_of_the_winner_makes_another_one_win() {
    let store = Store::default();
    let tiers = Tiers::start(&store);
    let engines = [Engine::start(None), Engine::start(None)];
    let at = tiers.address.to_string();
    let both = [&engines[0], &engines[1]];
    let router = RouterProcess::start(&both, &["--kvstrata", &at, "--tiers-deadline", "5s"]).await;
    // One engine has half of the prompt and is busy with 10 blocks besides; the tiers have all of it.
    let half = "x".repeat(20 * BLOCK_TOKENS);
    assert_eq!(ask(&router, &half).await.route("engine"), "a");
    router.wait_blocks("a", 20).await;
    let busy = half + &"b".repeat(10 * BLOCK_TOKENS);
    let busy = json!({ "model": "test", "prompt": busy, "stream": true, "gated": true });
    let mut busy = router.send("POST", "/v1/completions", &busy.to_string()).await;
    busy.wait_for("computed").await;
    router.wait_blocks("a", 30).await;
    store.lock().unwrap().extend(engine::hashes(&vec![u32::from(b'x'); 40 * BLOCK_TOKENS]));
    let select = async |queue_ms: f64| {
        tiers.change(|state| state.queue_ms = queue_ms);
        let whole = router.post("/select", &completion(&system('x'))).await;
        let answer: Value = serde_json::from_str(&whole.body).unwrap();
        assert_eq!(answer["tiers"], "found", "{answer}");
        answer
    };
    let quick = select(0.0).await;
    let slow = select(10_000.0).await;
    let of = |answer: &Value, name: &str| {
        let engines = answer["engines"].as_array().unwrap();
        engines.iter().find(|engine| engine["engine"] == name).unwrap().clone()
    };
    // Quick tiers are worth as much as a device; slow ones are not counted.
    assert_eq!(
        (of(&quick, "a")["nvme"].as_u64(), of(&quick, "b")["nvme"].as_u64()),
        (Some(20), Some(40))
    );
    assert_eq!(
        (of(&slow, "a")["nvme"].as_u64(), of(&slow, "b")["nvme"].as_u64()),
        (Some(0), Some(0))
    );
    assert_eq!((of(&slow, "a")["device"].as_u64(), slow["engine"].as_str()), (Some(20), Some("a")));
    assert_eq!(quick["engine"], "b", "{quick}");
    // An engine that kvstrata does not know has nothing there.
    tiers.change(|state| state.knows = false);
    let unknown = router.post("/select", &completion(&system('x'))).await;
    assert!(unknown.body.contains("\"tiers\":\"nothing\""), "{unknown:?}");
    drop(busy);
    router.stop(&[]);
}

#[tokio::test]
async fn requests_keep_flowing_without_kvstrata() {
    let store = Store::default();
    let tiers = Tiers::start(&store);
    let engine = Engine::start(Some(Store::clone(&store)));
    let at = tiers.address.to_string();
    let router = RouterProcess::start(&[&engine], &["--kvstrata", &at]).await;
    wait_until("kvstrata is asked", SOON, async || {
        ask(&router, "a prompt of one block").await.route("tiers") == "found"
    })
    .await;
    tiers.change(|state| state.silent = true);
    let late = ask(&router, &(system('x') + "?")).await;
    assert_eq!((late.route("tiers"), late.route("mode")), ("late", "timed"));
    drop(tiers);
    for _ in 0..20 {
        let without = ask(&router, &(system('x') + "?")).await;
        assert!(["failed", "late"].contains(&without.route("tiers")), "{without:?}");
        assert_eq!(without.blocks("device"), 40);
    }
    assert!(router.metric("kvstrata_router_tier_lookups_total{answer=\"late\"}").await >= 1.0);
    let ok = router.metric("kvstrata_router_requests_total{outcome=\"ok\"}").await;
    assert!(ok >= 22.0, "{ok} requests");
    router.stop(&[]);
}

#[tokio::test]
async fn an_engine_that_dies_is_left_out_and_comes_back() {
    let (mut first, second) = (Engine::start(None), Engine::start(None));
    let router = RouterProcess::start(&[&first, &second], &[]).await;
    let body = json!({ "model": "test", "prompt": system('x'), "stream": true, "gated": true });
    let mut answer = router.send("POST", "/v1/completions", &body.to_string()).await;
    answer.wait_for("computed").await;
    router.wait_blocks("a", 40).await;
    first.kill();
    let cut = answer.whole().await;
    assert_eq!((cut.route("engine"), cut.complete), ("a", false), "{cut:?}");
    // At once, whatever is known of the dead one.
    for _ in 0..3 {
        let next = ask(&router, &system('x')).await;
        assert_eq!(next.route("engine"), "b");
    }
    assert_eq!(second.count(|shared| &shared.requests), 3);
    router.wait_up(1).await;
    let _first = first.restart();
    router.wait_up(2).await;
    router.wait_blocks("a", 0).await;
    let other = ask(&router, &system('y')).await;
    assert_eq!(other.route("engine"), "a");
    assert_eq!(router.metric("kvstrata_router_requests_total{outcome=\"broken\"}").await, 1.0);
    router.stop(&["engine left out"]);
}

#[tokio::test]
async fn answers_pass_as_they_come_and_a_client_that_goes_ends_them() {
    let engine = Engine::start(None);
    let router = RouterProcess::start(&[&engine], &[]).await;
    let body = json!({ "model": "test", "prompt": "hello", "stream": true, "gated": true });
    let mut answer = router.send("POST", "/v1/completions", &body.to_string()).await;
    answer.wait_for("computed").await;
    for token in 1..4 {
        assert!(!answer.has(&format!("\"token\":{token}")));
        engine.shared.gate.notify_one();
        answer.wait_for(&format!("\"token\":{token}")).await;
    }
    engine.shared.gate.notify_one();
    let whole = answer.whole().await;
    assert!(whole.complete && whole.body.ends_with("data: [DONE]\n\n"), "{whole:?}");
    assert!(whole.head.contains("text/event-stream") && whole.head.contains("x-engine: kept"));
    assert_eq!(engine.shared.headers.lock().unwrap()["x-mine"], "passed");
    // A client that goes in the middle of an answer, and one that goes before it begins.
    let mut answer = router.send("POST", "/v1/completions", &body.to_string()).await;
    answer.wait_for("computed").await;
    drop(answer);
    let cancelled = async |count| {
        wait_until("the engine is told", SOON, async || {
            engine.count(|shared| &shared.cancelled) == count
        })
        .await;
    };
    cancelled(1).await;
    let long =
        json!({ "model": "test", "prompt": "z".repeat(BLOCK_TOKENS * 2000), "stream": true });
    let long = long.to_string();
    let waiting = router.send("POST", "/v1/completions", &long);
    assert!(tokio::time::timeout(Duration::from_millis(500), waiting).await.is_err());
    cancelled(2).await;
    let series = "kvstrata_router_requests_total{outcome=\"cancelled\"}";
    wait_until("both are counted", SOON, async || router.metric(series).await == 2.0).await;
    assert_eq!(router.engines().await[0]["requests"], 0);
    router.stop(&[]);
}

#[tokio::test]
async fn what_was_missed_of_events_is_asked_for_and_a_new_start_forgets() {
    let engine = Engine::start(None);
    engine.shared.withheld.lock().unwrap().extend([1, 2]);
    let router = RouterProcess::start(&[&engine], &[]).await;
    for letter in ['a', 'b', 'c'] {
        ask(&router, &system(letter)).await;
    }
    router.wait_blocks("a", 40).await;
    ask(&router, &system('d')).await;
    router.wait_blocks("a", 160).await;
    let batches = async |outcome: &str| {
        router.metric(&format!("kvstrata_event_batches_total{{outcome=\"{outcome}\"}}")).await
    };
    assert_eq!((batches("replayed").await, batches("lost").await), (2.0, 0.0));
    assert_eq!(ask(&router, &system('b')).await.route("device"), "40");
    // A router that comes later asks for all that was.
    let later = RouterProcess::start(&[&engine], &[]).await;
    ask(&later, &system('e')).await;
    later.wait_blocks("a", 200).await;
    later.stop(&[]);
    let engine = engine.restart();
    wait_until("it is forgotten", SOON, async || router.engines().await[0]["device_blocks"] == 0)
        .await;
    router.wait_up(1).await;
    let again = ask(&router, &system('b')).await;
    assert_eq!((again.route("device"), again.blocks("computed")), ("0", 40));
    drop(engine);
    router.stop(&["engine left out"]);
}

#[tokio::test]
async fn modes_that_know_less_choose_by_less() {
    let engines = [Engine::start(None), Engine::start(None)];
    let both = [&engines[0], &engines[1]];
    let router = RouterProcess::start(&both, &["--mode", "round-robin"]).await;
    let mut order = String::new();
    for _ in 0..4 {
        order.push_str(ask(&router, &system('x')).await.route("engine"));
    }
    assert_eq!(order, "abab");
    router.stop(&[]);
    // An engine that cannot tokenise is no reason to refuse, nor is a body that nobody can read.
    let router = RouterProcess::start(&both, &["--mode", "device-only"]).await;
    engines.iter().for_each(|engine| engine.shared.cannot_tokenise.store(true, Ordering::SeqCst));
    let blind = ask(&router, &system('y')).await;
    assert_eq!((blind.route("mode"), blind.route("device")), ("least-loaded", "0"));
    let refused = router.send("POST", "/v1/completions", "{").await.whole().await;
    assert_eq!((refused.status, refused.route("mode")), (400, "least-loaded"));
    assert_eq!(router.metric("kvstrata_router_blind_total").await, 2.0);
    // What is no completion goes to any of them.
    let models = router.get("/v1/models").await;
    assert!(models.body.contains("/models/test"), "{models:?}");
    assert_eq!(router.get("/v1/nothing").await.status, 404);
    router.stop(&[]);
}

#[tokio::test]
async fn a_stop_lets_answers_end_and_mistakes_are_named() {
    let engine = Engine::start(None);
    let mut router = RouterProcess::start(&[&engine], &[]).await;
    assert_eq!(router.get("/health").await.status, 200);
    let body = json!({ "model": "test", "prompt": "hello", "stream": true, "gated": true });
    let mut answer = router.send("POST", "/v1/completions", &body.to_string()).await;
    answer.wait_for("computed").await;
    router.terminate();
    wait_until("it drains", SOON, async || router.log().contains("drain started")).await;
    for token in 1..4 {
        engine.shared.gate.notify_one();
        answer.wait_for(&format!("\"token\":{token}")).await;
    }
    engine.shared.gate.notify_one();
    let whole = answer.whole().await;
    assert!(whole.complete && whole.body.contains("[DONE]"), "{whole:?}");
    let (code, log) = router.ended();
    assert_eq!(code, Some(0), "{log}");
    let home = tempfile::tempdir().unwrap();
    for (arguments, named) in [
        (&["--engine", "h:1"][..], "http://HOST:PORT"),
        (&["--engine", "http://h:1", "--engine", "http://h:1"], "given twice"),
        (&[], "--engine"),
        (&["--engine", "http://h:1", "--mode", "fast"], "round-robin"),
    ] {
        let output = crate::harness::command(&home).arg("router").args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
    }
}

#[tokio::test]
async fn nobody_to_ask_is_said_and_every_family_is_documented() {
    let engine = Engine::start(None);
    let router = RouterProcess::start(&[&engine], &[]).await;
    drop(engine);
    router.wait_up(0).await;
    let refused = router.post("/v1/completions", &completion("hello")).await;
    assert_eq!(refused.status, 503);
    assert!(refused.body.contains("no engine answers"), "{refused:?}");
    assert_eq!(
        (router.get("/health").await.status, router.get("/v1/models").await.status),
        (503, 503)
    );
    assert_eq!(router.metric("kvstrata_router_requests_total{outcome=\"nobody\"}").await, 1.0);
    let page = router.get("/metrics").await.body;
    let families = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let families: Vec<_> = families.map(|(name, kind)| format!("| `{name}` | {kind} |")).collect();
    let docs = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/router.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let missing: Vec<_> = families.iter().filter(|family| !docs.contains(*family)).collect();
    assert!(missing.is_empty() && families.len() > 10, "not in docs/router.md: {missing:#?}");
    let documented = docs.lines().filter(|line| line.starts_with("| `kvstrata_")).count();
    assert_eq!(documented, families.len(), "docs/router.md has families that are not there");
    router.stop(&["engine left out"]);
}
