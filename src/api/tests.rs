//! The calls over a pipe instead of a network, with time paused: what only the clock shows.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use hyper_util::rt::TokioIo;
use kvstrata_proto::v1::{
    Namespace, OpenRequest, Part, PutOffer, PutRequest, PutResponse, SessionEvent, SessionRequest,
    block_cache_client::BlockCacheClient, open_request, put_request, put_response, session_event,
};
use kvstrata_tiers::{
    metrics::TierMetrics,
    namespace::{NamespaceTable, Secret},
    stack::{Stack, StackConfig},
    store::BlockStore,
};
use prometheus_client::registry::Registry;
use tokio::{
    sync::{Semaphore, mpsc},
    time::Instant,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Streaming,
    transport::{Channel, Endpoint},
};

use super::*;
use crate::{
    advice::Advice,
    auth::Gate,
    changes::Changes,
    cluster::{feed::Feed, membership::Membership, peers::Peers},
    console::Console,
    costs::{Costs, Place},
    drain::Drain,
    events::subscribe::Subscriptions,
    lease::LeaseLimits,
    limits::{PREFETCH_LOADS_MAX, PREFETCHES_MAX, PUT_IDLE_MAX, PUTS_PER_SESSION_MAX},
    members::{Member, Roster},
    metrics::ServerMetrics,
    node::{Leases, Sessions},
    openers::Openers,
    schemes::Schemes,
    tasks::Tasks,
};

mod cold;
mod durable;

pub(crate) fn node(cold: Vec<Arc<dyn BlockStore>>) -> Node {
    let mut registry = Registry::default();
    let metrics = ServerMetrics::register(&mut registry);
    let namespaces = Arc::new(NamespaceTable::new(Secret::new([7; 32]), false));
    let config = StackConfig { dram_bytes: 16 << 20, index_blocks_max: 10_000, seed: 1 };
    let tiers = TierMetrics::register(&mut registry);
    let stack = Stack::open(config, Arc::clone(&namespaces), cold, tiers).unwrap();
    let limits = LeaseLimits {
        ttl_default: Duration::from_secs(30),
        ttl_max: Duration::from_secs(300),
        session_bytes_max: 8 << 20,
        total_bytes_max: 12 << 20,
    };
    let giver = stack.clone();
    let leases = Leases::new(limits, metrics.clone(), move |pins| giver.unpin(pins));
    Node {
        name: "test".to_owned(),
        roster: Roster::alone(Member::default()),
        peers: Peers::new(1 << 20, metrics.fanout.clone()),
        feed: Feed::new(10_000),
        membership: Membership::default(),
        changes: Changes::new(stack.clone()),
        costs: Costs::new(stack.clone(), Place::default(), metrics.costs.clone()),
        schemes: Schemes::new(1 << 20, metrics.schemes.clone()),
        stack,
        namespaces,
        rates: Arc::default(),
        openers: Openers::default(),
        advice: Advice::new().unwrap(),
        told: Subscriptions::default(),
        sessions: Sessions::new(leases.clone(), metrics.clone()),
        leases,
        console: Console::new(&metrics),
        metrics,
        drain: Drain::default(),
        tasks: Tasks::new(),
        prefetches: Arc::new(Semaphore::new(PREFETCHES_MAX)),
        prefetch_loads: Arc::new(Semaphore::new(PREFETCH_LOADS_MAX)),
        started: Instant::now(),
    }
}

/// Serves a node over a pipe; returns it with a client.
async fn serve() -> (Arc<Node>, BlockCacheClient<Channel>) {
    serve_over(Vec::new()).await
}

/// As [`serve`], with these colder tiers.
async fn serve_over(cold: Vec<Arc<dyn BlockStore>>) -> (Arc<Node>, BlockCacheClient<Channel>) {
    let node = Arc::new(node(cold));
    let calls = Calls::new(node.metrics.clone());
    let (ours, theirs) = tokio::io::duplex(1 << 20);
    let router = transport().add_service(Guarded::new(
        Framed::new(Arc::clone(&node), calls),
        Gate::open(node.metrics.trust.clone()),
    ));
    let incoming = stream::iter([Ok::<_, std::io::Error>(ours)]).chain(stream::pending());
    node.tasks.spawn("grpc", async move { router.serve_with_incoming(incoming).await.unwrap() });
    let mut pipe = Some(TokioIo::new(theirs));
    let connector = tower::service_fn(move |_uri| {
        let pipe = pipe.take().ok_or_else(|| std::io::Error::other("one connection only"));
        async move { pipe }
    });
    let endpoint = Endpoint::from_static("http://pipe");
    let channel = endpoint.connect_with_connector(connector).await.unwrap();
    (node, BlockCacheClient::new(channel))
}

/// An open session of a client with an open namespace.
struct Client {
    client: BlockCacheClient<Channel>,
    offer: PutOffer,
    _events: Streaming<SessionEvent>,
}

impl Client {
    async fn new(mut client: BlockCacheClient<Channel>) -> Self {
        let namespace = Namespace {
            model: "m".to_owned(),
            weights: "1".to_owned(),
            engine: "vllm".to_owned(),
            layout: "1".to_owned(),
            dtype: "bf16".to_owned(),
            block_tokens: 16,
            parts: vec![Part { group: 0, rank: 0, bytes: 4096 }],
            split: "none".to_owned(),
            hash_algorithm: "sha256".to_owned(),
            hash_bytes: 32,
            ..Namespace::default()
        };
        let kind = Some(open_request::Kind::Namespace(namespace));
        let opened = client.open(OpenRequest { kind, ..OpenRequest::default() }).await.unwrap();
        let mut events = client.session(SessionRequest::default()).await.unwrap().into_inner();
        let event = events.message().await.unwrap().unwrap().event;
        let Some(session_event::Event::Opened(session)) = event else { panic!("{event:?}") };
        let offer = PutOffer {
            session_id: session.session_id,
            namespace_id: opened.into_inner().namespace_id,
            hashes: vec![5; 32].into(),
            ..PutOffer::default()
        };
        Self { client, offer, _events: events }
    }

    /// Opens a put; it stays open while the sender lives.
    async fn put(&mut self) -> (mpsc::Sender<PutRequest>, Streaming<PutResponse>) {
        let (send, receive) = mpsc::channel(1);
        let message = Some(put_request::Message::Offer(self.offer.clone()));
        send.send(PutRequest { message }).await.unwrap();
        let responses = self.client.put(ReceiverStream::new(receive)).await.unwrap();
        (send, responses.into_inner())
    }
}

/// The number of ranges wanted.
async fn wanted(responses: &mut Streaming<PutResponse>) -> usize {
    match responses.message().await.unwrap().unwrap().message {
        Some(put_response::Message::Wanted(wanted)) => wanted.ranges.len(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_put_is_ended_and_gives_up_its_claims() {
    let (node, client) = serve().await;
    let mut client = Client::new(client).await;
    let start = Instant::now();
    let (_silent, mut responses) = client.put().await;
    assert_eq!(wanted(&mut responses).await, 1);
    let (_second, mut meanwhile) = client.put().await;
    assert_eq!(wanted(&mut meanwhile).await, 0, "pending: another put has it");

    let ended = responses.message().await.unwrap_err();
    assert_eq!(ended.code(), tonic::Code::DeadlineExceeded, "{ended}");
    assert!((PUT_IDLE_MAX..PUT_IDLE_MAX * 2).contains(&start.elapsed()), "{:?}", start.elapsed());
    let (_third, mut responses) = client.put().await;
    assert_eq!(wanted(&mut responses).await, 1, "free again");
    assert_eq!(node.sessions.count(), 1, "the session lives on");
}

#[tokio::test(start_paused = true)]
async fn puts_of_one_session_are_bounded() {
    let (_node, client) = serve().await;
    let mut client = Client::new(client).await;
    let mut open = Vec::new();
    for number in 0..PUTS_PER_SESSION_MAX {
        let (send, mut responses) = client.put().await;
        assert_eq!(wanted(&mut responses).await, usize::from(number == 0));
        open.push((send, responses));
    }
    let (_send, mut responses) = client.put().await;
    let refused = responses.message().await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused}");
    assert!(refused.metadata().get(status::RETRY_AFTER_KEY).is_some());
    open.pop();
    tokio::time::sleep(Duration::from_millis(1)).await;
    let (_send, mut responses) = client.put().await;
    assert_eq!(wanted(&mut responses).await, 0);
}
