//! How long do the questions of routers take over the wire: where a prefix is, and whom to take?
//!
//! Not measured: what the answers are worth (`kvstrata simulate`), and loading. Floor: a lookup of an engine,
//! which has no candidates and no prices in it, in the same run.
//!
//! ```text
//! cargo bench --profile dev --bench router
//! ```
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "bulk/setup.rs"]
mod setup;
mod support;

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use harness::Server;
use kvstrata::client::{
    Client, ClientOptions, Handle, LookupOptions, Path,
    router::messages::{Candidate, LookupRequest, Prefill, Prompt, ScoreRequest},
};
use setup::{connect, list, open, put};
use support::Samples;
use tokio::time::Instant;

const MODEL: &str = "router";
const BLOCKS: u64 = 32_768;
const CANDIDATES: usize = 64;
/// Callers share connections, as the parts of a router do.
const CONNECTIONS: usize = 8;
/// Calls of each row, whoever many make them.
const CALLS: usize = 2048;

#[tokio::main]
async fn main() {
    let server = Server::builder().set("memory.limit", "1GiB").start().await;
    let client = connect(&server, Path::Grpc).await;
    let session = client.session("bench").await.unwrap();
    let handle = open(&client, MODEL, 64).await;
    let value = Bytes::from(vec![1; 64]);
    assert_eq!(put(&handle, &session, 0..BLOCKS, &value, false).await, BLOCKS);
    for candidate in 0..CANDIDATES {
        let options =
            ClientOptions { instance: Some(instance(candidate)), ..ClientOptions::default() };
        let engine = Client::connect(server.grpc(), options).await.unwrap();
        open(&engine, MODEL, 64).await;
    }
    let mut handles = Vec::new();
    for _ in 0..CONNECTIONS {
        handles.push(handle.at(&connect(&server, Path::Grpc).await));
    }
    for hashes in [100, 2000, BLOCKS] {
        for callers in [1, 64] {
            let calls = if hashes == BLOCKS { CALLS / 4 } else { CALLS };
            rows(&handles, hashes, callers, calls).await;
        }
    }
    drop((client, session, handle, handles));
    server.stop(&[]).await;
}

/// Measures every question about a prefix of so many blocks, asked by so many at a time.
async fn rows(handles: &[Handle], hashes: u64, callers: usize, calls: usize) {
    let list = list(0..hashes);
    let packed = list.packed();
    let prompt = || Prompt { model: MODEL.to_owned(), hashes: packed.clone(), ..Prompt::default() };
    let prefill = Some(Prefill { linear_ms: 2.0, quadratic_ms: 0.0 });
    let lookup = |instances| LookupRequest {
        prompts: vec![prompt()],
        instances,
        prefill,
        ..LookupRequest::default()
    };
    let one = || vec![candidate(0)];
    let all = || (0..CANDIDATES).map(candidate).collect::<Vec<_>>();
    let score = || ScoreRequest {
        prompt: Some(prompt()),
        candidates: all(),
        prefill,
        ..ScoreRequest::default()
    };
    let floor = measure(handles, callers, calls, async |handle| {
        let found = handle.lookup(&list, LookupOptions::default()).await.unwrap();
        assert_eq!(u64::from(found.prefix_blocks), hashes);
    });
    println!("{hashes} hashes, {callers} callers, engine's lookup: {}", floor.await);
    let asked = measure(handles, callers, calls, async |handle| {
        let answer = handle.client().router_lookup(lookup(one())).await.unwrap();
        assert_eq!(u64::from(answer.answers[0].instances[0].found_blocks), hashes);
    });
    println!("{hashes} hashes, {callers} callers, Lookup for 1: {}", asked.await);
    let asked = measure(handles, callers, calls, async |handle| {
        let answer = handle.client().router_lookup(lookup(all())).await.unwrap();
        assert_eq!(answer.answers[0].instances.len(), CANDIDATES);
    });
    println!("{hashes} hashes, {callers} callers, Lookup for {CANDIDATES}: {}", asked.await);
    let asked = measure(handles, callers, calls, async |handle| {
        let answer = handle.client().router_score(score()).await.unwrap();
        assert!(answer.scored.iter().all(|each| u64::from(each.found_blocks) == hashes));
    });
    println!("{hashes} hashes, {callers} callers, Score of {CANDIDATES}: {}", asked.await);
}

/// So many calls, made by so many callers one after another each.
async fn measure(
    handles: &[Handle],
    callers: usize,
    calls: usize,
    ask: impl AsyncFn(&Handle),
) -> Samples {
    let caller = async |number: usize| {
        let handle = &handles[number % handles.len()];
        let mut took: Vec<Duration> = Vec::with_capacity(calls / callers);
        ask(handle).await;
        for _ in 0..calls / callers {
            let started = Instant::now();
            ask(handle).await;
            took.push(started.elapsed());
        }
        took
    };
    let took = join_all((0..callers).map(caller)).await;
    Samples::from_durations(&took.concat())
}

fn instance(number: usize) -> String {
    format!("10.0.0.{number}:8000")
}

fn candidate(number: usize) -> Candidate {
    Candidate { instance: instance(number), ..Candidate::default() }
}
