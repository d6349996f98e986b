//! What a router is told of a cluster by any one of its nodes: real processes, one of which dies.

use std::{ops::Range, time::Duration};

use kvstrata::client::{
    Client, ClientOptions, Handle, Path as Way, Session,
    router::messages::{
        InstanceAnswer, Locality, LookupRequest, LookupResponse, Prefill, ReserveRequest,
        ScoreRequest, Tier,
    },
};
use tokio::time::Instant;

use crate::{
    advice::{candidate, prompt},
    client::{batch, namespace},
    cluster_drain::{BLOCK_BYTES, Cluster, PARTS},
    harness::{SERVER_WAIT, wait_until},
};

/// What an answer may take whatever becomes of others: 20 ms for these, the rest for a busy machine.
const ANSWER_LIMIT: Duration = Duration::from_millis(100);
const PREFILL: Option<Prefill> = Some(Prefill { linear_ms: 20.0, quadratic_ms: 0.0 });

/// An engine on the host of a node, at home there.
struct Engine {
    client: Client,
    handle: Handle,
    session: Session,
}

impl Engine {
    async fn start(cluster: &Cluster, number: usize, instance: &str) -> Self {
        let options = ClientOptions {
            instance: Some(instance.to_owned()),
            node: Some(format!("host-{number}")),
            path: Way::Grpc,
            ..ClientOptions::default()
        };
        let client = Client::connect(cluster.node(number).grpc(), options).await.unwrap();
        let session = client.session("engine").await.unwrap();
        let handle = client.open(namespace(&PARTS)).await.unwrap();
        Self { client, handle, session }
    }

    async fn put(&self, numbers: Range<u32>) {
        self.handle.put(&self.session, &batch(numbers, &PARTS)).await.unwrap();
    }

    /// What a router is told that asks at this engine's node.
    async fn told(&self, numbers: Range<u32>) -> LookupResponse {
        let prompts = vec![prompt(numbers)];
        let request = LookupRequest { prompts, prefill: PREFILL, ..LookupRequest::default() };
        self.client.router_lookup(request).await.unwrap()
    }
}

/// `(start, end, tier, holder)` of each run.
fn runs(told: &LookupResponse) -> Vec<(u32, u32, Tier, &str)> {
    let prefixes = told.answers[0].prefixes.iter();
    let runs = prefixes.flat_map(|prefix| &prefix.runs);
    runs.map(|run| (run.start, run.end, run.tier(), run.holder.as_str())).collect()
}

fn knows(told: &LookupResponse, name: &str) -> bool {
    told.answers[0].instances.iter().any(|known| known.instance == name)
}

fn instance<'a>(told: &'a LookupResponse, name: &str) -> &'a InstanceAnswer {
    told.answers[0].instances.iter().find(|known| known.instance == name).unwrap()
}

#[tokio::test]
async fn any_node_tells_a_router_what_all_have_and_what_loading_it_costs_each_engine() {
    let mut cluster = Cluster::start(3).await;
    let (a, b) = (Engine::start(&cluster, 0, "a").await, Engine::start(&cluster, 1, "b").await);
    b.put(0..40).await;
    // Filters are told each second, and who has opened what with them.
    wait_until("the first node knows of the second", SERVER_WAIT, async || {
        let told = a.told(0..50).await;
        runs(&told) == [(0, 40, Tier::Dram, "node-1")] && knows(&told, "b")
    })
    .await;
    let told = a.told(0..50).await;
    assert!(!told.partial, "{told:?}");
    assert_eq!(told.answers[0].prefixes[0].runs[0].bytes, 40 * u64::from(BLOCK_BYTES));
    let (far, near) = (instance(&told, "a"), instance(&told, "b"));
    for (each, locality) in [(far, Locality::Remote), (near, Locality::SameNode)] {
        let [segment] = &each.segments[..] else { panic!("{each:?}") };
        assert_eq!((segment.holder.as_str(), segment.tier()), ("node-1", Tier::Dram));
        let is_near = [Locality::SameNode, Locality::SharedMemory].contains(&segment.locality());
        assert_eq!(is_near, locality == Locality::SameNode, "{segment:?}");
        assert!(segment.est_load_ms > 0.0 && each.credit_blocks > 0.0, "{each:?}");
    }
    assert_eq!(far.segments[0].locality(), Locality::Remote);
    assert!(far.load_ms > near.load_ms, "{far:?} {near:?}");
    assert!(far.credit_blocks < near.credit_blocks);
    // What the second one says of itself is what the first says of it.
    wait_until("the second node knows of the first", SERVER_WAIT, async || {
        knows(&b.told(0..50).await, "a")
    })
    .await;
    let itself = b.told(0..50).await;
    let said = &instance(&itself, "a").segments[0];
    let shares = said.est_load_ms / far.segments[0].est_load_ms;
    assert!((0.5..2.0).contains(&shares), "{said:?} {:?}", far.segments[0]);

    let candidates = vec![candidate("a", 0), candidate("b", 0), candidate("unknown", 0)];
    let ask = ScoreRequest {
        prompt: Some(prompt(0..50)),
        candidates,
        prefill: PREFILL,
        ..ScoreRequest::default()
    };
    let scored = a.client.router_score(ask.clone()).await.unwrap();
    assert_eq!((scored.instance.as_str(), scored.partial), ("b", false), "{scored:?}");
    assert_eq!([0, 1, 2].map(|at| scored.scored[at].found_blocks), [40, 40, 0]);
    assert!(scored.scored[0].credit_blocks > 0.0);
    let body = serde_json::to_string(&ask).unwrap();
    let (status, body) = cluster.node(0).post("/v1/router/score", &body).await;
    assert!(status == 200 && body.contains("\"instance\":\"b\""), "{body}");

    what_is_on_two_nodes_is_reserved_where_it_is(&a, &b).await;
    cluster.take(1).kill();
    a_node_that_died_costs_its_blocks_and_no_time(&a).await;
    drop((a, b));
    cluster.stop(&["member"]).await;
}

async fn what_is_on_two_nodes_is_reserved_where_it_is(a: &Engine, b: &Engine) {
    a.put(100..110).await;
    b.put(110..130).await;
    wait_until("both have their share", SERVER_WAIT, async || {
        let expected = [(0, 10, Tier::Dram, "node-0"), (10, 30, Tier::Dram, "node-1")];
        runs(&a.told(100..140).await) == expected
    })
    .await;
    let ask = ScoreRequest {
        prompt: Some(prompt(100..140)),
        candidates: vec![candidate("a", 0)],
        prefill: PREFILL,
        reserve_ms: 30_000,
        prefetch: true,
        ..ScoreRequest::default()
    };
    // What is brought takes the place of what is reserved: without that, a tenth of it waits here.
    let scored = a.client.router_score(ScoreRequest { prefetch: false, ..ask }).await.unwrap();
    assert_eq!((scored.scored[0].best_blocks, scored.reservation_id.len()), (30, 16));
    let told = a.told(100..140).await;
    let waits = told.tiers.iter().find(|cost| cost.tier() == Tier::Dram).unwrap().queued_bytes;
    assert_eq!(waits, 10 * u64::from(BLOCK_BYTES));
    let nothing = ReserveRequest::default();
    assert!(a.client.router_reserve(nothing).await.is_err(), "it is refused as ever");
}

async fn a_node_that_died_costs_its_blocks_and_no_time(a: &Engine) {
    for _ in 0..20 {
        let start = Instant::now();
        let told = a.told(100..140).await;
        assert!(start.elapsed() < ANSWER_LIMIT, "{:?}", start.elapsed());
        assert_eq!(runs(&told), [(0, 10, Tier::Dram, "node-0")], "its own are there as ever");
        assert!(instance(&told, "a").credit_blocks > 0.0);
    }
    wait_until("it has left", SERVER_WAIT, async || {
        let told = a.told(0..50).await;
        runs(&told).is_empty() && !told.partial && knows(&told, "a") && !knows(&told, "b")
    })
    .await;
}
