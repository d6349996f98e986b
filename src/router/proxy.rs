//! A request from its first byte to its answer.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header, request},
    response::{IntoResponse, Response},
};
use serde_json::json;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::{
    Router,
    decide::{self, Choice},
    engine::Engine,
    metrics::Outcome,
    plan::Plan,
    upstream::Unanswered,
    watched::UnderWay,
};

/// The longest body of a request: two million tokens as numbers.
const BODY_BYTES_MAX: usize = 32 << 20;
/// What is said of the decision.
const ROUTE: HeaderName = HeaderName::from_static("x-kvstrata-route");
/// The rank that vLLM should take, of those behind one address.
const RANK: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// A completion: goes to the engine that needs least for it.
pub(super) async fn complete(State(router): State<Arc<Router>>, request: Request) -> Response {
    let begun = Instant::now();
    let Ok(place) = Arc::clone(&router.places).try_acquire_owned() else {
        router.metrics.record(Outcome::Full);
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "too many requests at a time");
    };
    let (head, body) = request.into_parts();
    let Ok(body) = to_bytes(body, BODY_BYTES_MAX).await else {
        router.metrics.record(Outcome::Refused);
        return refusal(StatusCode::PAYLOAD_TOO_LARGE, "the body did not come, or is too long");
    };
    let plan = router.plan(&body).await;
    let place = Arc::new(place);
    let mut tried = Vec::new();
    loop {
        let Some((choice, slot)) = router.choose(&plan, &tried) else {
            router.metrics.record(Outcome::Nobody);
            return refusal(StatusCode::SERVICE_UNAVAILABLE, "no engine answers");
        };
        if tried.is_empty() {
            router.metrics.decision_seconds.observe(begun.elapsed().as_secs_f64());
        } else {
            router.metrics.retried.inc();
        }
        router.tell_tiers(&plan, &choice);
        let mut under_way = UnderWay {
            router: Arc::clone(&router),
            choice,
            slot,
            unit: plan.unit(),
            streams: plan.stream,
            sent: Instant::now(),
            outcome: Some(Outcome::Cancelled),
            at_end: Outcome::Ok,
            _place: Arc::clone(&place),
        };
        match router.send(choice.engine, &head, body.clone()).await {
            Ok(mut response) => {
                if !response.status().is_success() {
                    under_way.at_end = Outcome::Refused;
                }
                router.say(&plan, &choice, &mut response);
                return response.map(|body| under_way.watch(body));
            }
            Err(Unanswered::Unreached(why)) => {
                debug!(%why, "engine not reached, trying another one");
                under_way.outcome = None;
                router.lost(choice.engine);
                tried.push(choice.engine);
            }
            Err(why) => {
                warn!(%why, "engine lost before it answered");
                under_way.outcome = Some(Outcome::Broken);
                router.lost(choice.engine);
                return refusal(StatusCode::BAD_GATEWAY, "the engine was lost before it answered");
            }
        }
    }
}

/// What an engine would be chosen for, without asking it.
pub(super) async fn select(State(router): State<Arc<Router>>, body: Bytes) -> Response {
    let plan = router.plan(&body).await;
    let choices = router.weigh(&plan, &[]);
    let Some(taken) = decide::take(&choices) else {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "no engine answers");
    };
    let name = |engine: usize| router.engines.get(engine).map(|one| one.spec.name.as_str());
    let engines: Vec<_> = choices
        .iter()
        .map(|choice| {
            let [dram, nvme, object] = choice.loaded;
            json!({
                "engine": name(choice.engine),
                "device": choice.device,
                "dram": dram,
                "nvme": nvme,
                "object": object,
                "computed": choice.computed,
                "cost": choice.cost,
                "ttft_ms": choice.ttft_ms,
            })
        })
        .collect();
    let answer = json!({
        "engine": name(taken.engine),
        "mode": plan.mode.name(),
        "tiers": plan.tiers.name(),
        "blocks": plan.blocks,
        "block_tokens": plan.unit(),
        "engines": engines,
    });
    ([(header::CONTENT_TYPE, "application/json")], answer.to_string()).into_response()
}

/// Anything else that engines can be asked: goes to the one that has least to do.
pub(super) async fn pass_on(State(router): State<Arc<Router>>, request: Request) -> Response {
    let up = router.engines.iter().enumerate().filter(|(_, engine)| engine.is_up());
    let idlest = up.min_by_key(|(_, engine)| engine.slots.load(&[]).requests);
    let Some((at, engine)) = idlest else {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "no engine answers");
    };
    match router.upstream.send(&engine.spec.authority, request).await {
        Ok(response) => response,
        Err(why) => {
            warn!(%why, "request not passed on");
            router.lost(at);
            refusal(StatusCode::BAD_GATEWAY, "the engine was lost before it answered")
        }
    }
}

impl Router {
    /// Sends a completion as it came.
    async fn send(
        &self,
        engine: usize,
        head: &request::Parts,
        body: Bytes,
    ) -> Result<Response, Unanswered> {
        let Some(engine) = self.engines.get(engine) else { return Err(Unanswered::Late) };
        let mut request = Request::new(Body::from(body));
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = head.uri.clone();
        *request.headers_mut() = head.headers.clone();
        if let Some(rank) = engine.spec.rank {
            request.headers_mut().insert(RANK, HeaderValue::from(rank));
        }
        self.upstream.send(&engine.spec.authority, request).await
    }

    fn lost(&self, engine: usize) {
        self.engines.get(engine).into_iter().for_each(Engine::unreached);
    }

    /// Says in a header what was decided and why.
    fn say(&self, plan: &Plan, choice: &Choice, response: &mut Response) {
        let Some(engine) = self.engines.get(choice.engine) else { return };
        let [dram, nvme, object] = choice.loaded;
        let text = format!(
            "engine={}; mode={}; tiers={}; blocks={}; device={}; dram={dram}; nvme={nvme}; \
             object={object}; computed={}; ttft_ms={:.1}",
            engine.spec.name,
            plan.mode.name(),
            plan.tiers.name(),
            plan.blocks,
            choice.device,
            choice.computed,
            choice.ttft_ms,
        );
        // Names are of letters that may stand in a header.
        if let Ok(value) = HeaderValue::try_from(text) {
            response.headers_mut().insert(ROUTE, value);
        }
    }
}

/// An error as OpenAI's clients read it.
pub(super) fn refusal(status: StatusCode, why: &str) -> Response {
    let body =
        json!({ "error": { "message": why, "type": "router_error", "code": status.as_u16() } });
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (status, kind, body.to_string()).into_response()
}
