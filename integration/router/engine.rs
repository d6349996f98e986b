//! An engine of OpenAI's interface that computes nothing and takes as long: so many milliseconds for each
//! block that neither its device nor the tiers have. It tokenises, publishes what it has and sends it again.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    hash::{DefaultHasher, Hash, Hasher},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::{
    net::TcpListener,
    runtime::Runtime,
    sync::{Notify, watch},
};

use crate::publisher::{Kept, Publisher, replayer};

pub(crate) const BLOCK_TOKENS: usize = 16;
/// For each block that is computed.
pub(crate) const PREFILL_MS: u64 = 5;
/// Tokens of an answer.
const ANSWER_TOKENS: usize = 4;

/// Blocks that tiers have, by the hashes of the engines.
pub(crate) type Store = Arc<Mutex<HashSet<u64>>>;

/// A running engine; dropping it kills it.
pub(crate) struct Engine {
    pub(crate) shared: Arc<Shared>,
    at: [SocketAddr; 3],
    store: Option<Store>,
    runtime: Option<Runtime>,
}

/// What tests look at while it runs.
#[derive(Default)]
pub(crate) struct Shared {
    device: Mutex<HashSet<u64>>,
    store: Option<Store>,
    published: Kept,
    count: watch::Sender<usize>,
    /// Batches that subscribers do not get.
    pub(crate) withheld: Mutex<HashSet<u64>>,
    /// Lets a gated answer go on by one token.
    pub(crate) gate: Notify,
    pub(crate) requests: AtomicU32,
    pub(crate) cancelled: AtomicU32,
    pub(crate) cannot_tokenise: AtomicBool,
    /// Headers of the last completion.
    pub(crate) headers: Mutex<HeaderMap>,
}

impl Engine {
    /// Starts one; with a store it offloads what it computes, and onloads.
    pub(crate) fn start(store: Option<Store>) -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self::start_at([any; 3], store)
    }

    fn start_at(at: [SocketAddr; 3], store: Option<Store>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let entered = runtime.enter();
        let [http, events, replays] = at.map(|at| {
            let listener = std::net::TcpListener::bind(at).unwrap();
            listener.set_nonblocking(true).unwrap();
            TcpListener::from_std(listener).unwrap()
        });
        let at = [&http, &events, &replays].map(|listener| listener.local_addr().unwrap());
        let shared = Arc::new(Shared { store: store.clone(), ..Shared::default() });
        let _serving = runtime.spawn(serve(http, Arc::clone(&shared)));
        let _publishing = runtime.spawn(publish(events, Arc::clone(&shared)));
        let kept = Kept::clone(&shared.published);
        let replays = Publisher { listener: replays };
        let _replaying = runtime.spawn(async move { replayer(replays, kept).join_all().await });
        drop(entered);
        Self { shared, at, store, runtime: Some(runtime) }
    }

    /// Kills it and starts another one at its place, which has nothing.
    pub(crate) fn restart(mut self) -> Self {
        self.kill();
        Self::start_at(self.at, self.store.clone())
    }

    /// Ends it as SIGKILL would: its connections are lost.
    pub(crate) fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // From within a test's runtime only this may be called.
            std::thread::spawn(move || runtime.shutdown_timeout(Duration::from_secs(5)))
                .join()
                .unwrap();
        }
    }

    /// `host:port` of its API.
    pub(crate) fn address(&self) -> String {
        self.at[0].to_string()
    }

    /// As a router is told of it.
    pub(crate) fn flag(&self, name: &str) -> String {
        let [http, events, replay] = self.at;
        format!(
            "http://{http},name={name},events=tcp://{events},replay=tcp://{replay},node=n-{name}"
        )
    }

    pub(crate) fn count(&self, counter: impl Fn(&Shared) -> &AtomicU32) -> u32 {
        counter(&self.shared).load(Ordering::SeqCst)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let routes = Router::new()
        .route("/health", get(|| async { StatusCode::OK }))
        .route("/v1/models", get(models))
        .route("/tokenize", post(tokenize))
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(complete))
        .with_state(shared);
    axum::serve(listener, routes).await.unwrap();
}

/// Publishes to whoever listens, from then on.
async fn publish(listener: TcpListener, shared: Arc<Shared>) {
    let publisher = Publisher { listener };
    let mut publishing = tokio::task::JoinSet::new();
    loop {
        let mut peer = publisher.subscriber().await;
        let mut count = shared.count.subscribe();
        let shared = Arc::clone(&shared);
        publishing.spawn(async move {
            let mut next = *count.borrow_and_update();
            while count.changed().await.is_ok() {
                let until = *count.borrow_and_update();
                let batches = shared.published.lock().unwrap()[next..until].to_vec();
                next = until;
                for (number, payload) in batches {
                    if !shared.withheld.lock().unwrap().contains(&number) {
                        peer.publish(number, &payload).await;
                    }
                }
            }
        });
    }
}

async fn models() -> Json {
    Json(json!({"object": "list", "data": [
        {"id": "test", "root": "/models/test", "parent": null},
        {"id": "adapter", "root": "/adapters/a", "parent": "test"},
    ]}))
}

async fn tokenize(State(shared): State<Arc<Shared>>, body: Bytes) -> Response {
    if shared.cannot_tokenise.load(Ordering::SeqCst) {
        return StatusCode::NOT_FOUND.into_response();
    }
    match tokens(&serde_json::from_slice(&body).unwrap()) {
        Some(tokens) => Json(json!({"count": tokens.len(), "tokens": tokens})).into_response(),
        None => StatusCode::BAD_REQUEST.into_response(),
    }
}

/// A byte is a token, a role one more.
fn tokens(body: &Value) -> Option<Vec<u32>> {
    let of_text = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    if let Some(prompt) = body.get("prompt") {
        return match prompt {
            Value::String(text) => Some(of_text(text)),
            tokens => serde_json::from_value(tokens.clone()).ok(),
        };
    }
    let messages = body.get("messages")?.as_array()?.iter();
    let message = |message: &Value| {
        let role = 1000 + u32::try_from(message["role"].as_str()?.len()).ok()?;
        Some([vec![role], of_text(message["content"].as_str()?)].concat())
    };
    messages.map(message).collect::<Option<Vec<_>>>().map(|messages| messages.concat())
}

/// The engine's hashes of the full blocks.
pub(crate) fn hashes(tokens: &[u32]) -> Vec<u64> {
    let mut parent = 7_u64;
    let next = |block: &[u32]| {
        let mut hasher = DefaultHasher::new();
        (parent, block).hash(&mut hasher);
        parent = hasher.finish() | 1;
        parent
    };
    tokens.chunks_exact(BLOCK_TOKENS).map(next).collect()
}

/// An answer.
struct Json(Value);

impl IntoResponse for Json {
    fn into_response(self) -> Response {
        ([("content-type", "application/json")], self.0.to_string()).into_response()
    }
}

/// Counts an answer that nobody waited for.
struct Answering(Arc<Shared>, bool);

impl Drop for Answering {
    fn drop(&mut self) {
        if !self.1 {
            self.0.cancelled.fetch_add(1, Ordering::SeqCst);
        }
    }
}

async fn complete(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let body: Value = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(why) => return (StatusCode::BAD_REQUEST, why.to_string()).into_response(),
    };
    *shared.headers.lock().unwrap() = headers;
    shared.requests.fetch_add(1, Ordering::SeqCst);
    let mut answering = Answering(Arc::clone(&shared), false);
    let tokens = tokens(&body).unwrap_or_default();
    let prefilled = prefill(&shared, &tokens).await;
    if body["stream"] != json!(true) {
        answering.1 = true;
        return Json(prefilled).into_response();
    }
    let gated = body["gated"] == json!(true);
    let parts = stream::unfold((answering, 0), move |(mut answering, token)| {
        let first = prefilled.clone();
        async move {
            if gated && (1..=ANSWER_TOKENS).contains(&token) {
                answering.0.gate.notified().await;
            }
            let data = match token {
                0 => first.to_string(),
                ANSWER_TOKENS => "[DONE]".to_owned(),
                token if token > ANSWER_TOKENS => return None,
                token => json!({ "token": token }).to_string(),
            };
            answering.1 = token == ANSWER_TOKENS;
            let event = format!("data: {data}\n\n");
            Some((Ok::<_, Infallible>(event), (answering, token + 1)))
        }
    });
    let head = [("content-type", "text/event-stream"), ("x-engine", "kept")];
    (head, Body::from_stream(parts)).into_response()
}

/// Takes as long as it should; returns where the blocks came from.
async fn prefill(shared: &Shared, tokens: &[u32]) -> Value {
    let hashes = hashes(tokens);
    let device = {
        let has = shared.device.lock().unwrap();
        hashes.iter().take_while(|hash| has.contains(hash)).count()
    };
    let loaded = shared.store.as_ref().map_or(0, |store| {
        let has = store.lock().unwrap();
        hashes[device..].iter().take_while(|hash| has.contains(hash)).count()
    });
    let computed = hashes.len() - device - loaded;
    tokio::time::sleep(Duration::from_millis(PREFILL_MS * computed as u64 + loaded as u64)).await;
    if device < hashes.len() {
        shared.device.lock().unwrap().extend(&hashes);
        shared.store.iter().for_each(|store| store.lock().unwrap().extend(&hashes));
        let tokens = &tokens[device * BLOCK_TOKENS..hashes.len() * BLOCK_TOKENS];
        let payload = stored(device.checked_sub(1).map(|at| hashes[at]), &hashes[device..], tokens);
        let mut published = shared.published.lock().unwrap();
        let number = published.len();
        published.push((number as u64, payload));
        shared.count.send_replace(number + 1);
    }
    json!({ "device": device, "loaded": loaded, "computed": computed })
}

/// A batch with one event, as vLLM writes it now.
fn stored(parent: Option<u64>, hashes: &[u64], tokens: &[u32]) -> Vec<u8> {
    let text =
        |text: &str| [&[0xd9, u8::try_from(text.len()).unwrap()][..], text.as_bytes()].concat();
    let number = |number: u64| [&[0xcf][..], &number.to_be_bytes()].concat();
    let list = |items: Vec<Vec<u8>>| {
        [&[0xdd][..], &u32::try_from(items.len()).unwrap().to_be_bytes(), &items.concat()].concat()
    };
    let fields: HashMap<&str, Vec<u8>> = HashMap::from([
        ("type", text("BlockStored")),
        ("block_hashes", list(hashes.iter().copied().map(number).collect())),
        ("parent_block_hash", parent.map_or(vec![0xc0], number)),
        ("token_ids", list(tokens.iter().map(|token| number(u64::from(*token))).collect())),
        ("block_size", vec![u8::try_from(BLOCK_TOKENS).unwrap()]),
        ("lora_id", vec![0xc0]),
        ("medium", text("GPU")),
        ("lora_name", vec![0xc0]),
    ]);
    let event = fields.into_iter().flat_map(|(name, value)| [text(name), value].concat());
    [&[0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x88][..], &event.collect::<Vec<_>>(), &[0]]
        .concat()
}
