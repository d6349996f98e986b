//! What can be asked of a router, besides what is asked of engines through it.

use std::sync::Arc;

use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use prometheus_client::{encoding::text, registry::Registry};
use serde_json::json;

use super::{
    Router,
    engine::Engine,
    proxy::{complete, pass_on, refusal, select},
};
use crate::{http::OPENMETRICS, readiness::Status};

/// The routes.
pub(super) fn routes(router: Arc<Router>, registry: Arc<Registry>) -> axum::Router {
    let shown = Arc::clone(&router);
    axum::Router::new()
        .route("/v1/completions", post(complete))
        .route("/v1/chat/completions", post(complete))
        .route("/select", post(select))
        .route("/engines", get(engines))
        .route("/health", get(health))
        .route("/metrics", get(move || async move { metrics(&shown, &registry) }))
        .fallback(pass_on)
        .with_state(router)
}

/// Whether to send requests here.
async fn health(State(router): State<Arc<Router>>) -> Response {
    if router.readiness.status() == Status::Draining {
        return refusal(StatusCode::SERVICE_UNAVAILABLE, "draining");
    }
    match router.engines.iter().any(Engine::is_up) {
        true => StatusCode::OK.into_response(),
        false => refusal(StatusCode::SERVICE_UNAVAILABLE, "no engine answers"),
    }
}

/// How the engines are.
async fn engines(State(router): State<Arc<Router>>) -> Response {
    let (blocks, sizes) = (router.devices.blocks(), router.devices.block_tokens());
    let engines: Vec<_> = router
        .engines
        .iter()
        .zip(blocks.into_iter().zip(sizes))
        .map(|(engine, (blocks, block_tokens))| {
            let load = engine.slots.load(&[]);
            json!({
                "engine": engine.spec.name,
                "url": format!("http://{}", engine.spec.authority),
                "up": engine.is_up(),
                "device_blocks": blocks,
                "block_tokens": block_tokens,
                "requests": load.requests,
                "prefills": load.prefills,
                "blocks_under_way": load.blocks,
                "prefill_ms_per_token": engine.learned().prefill(1).linear_ms,
            })
        })
        .collect();
    let kind = [(header::CONTENT_TYPE, "application/json")];
    (kind, serde_json::Value::from(engines).to_string()).into_response()
}

fn metrics(router: &Router, registry: &Registry) -> Response {
    for (engine, blocks) in router.engines.iter().zip(router.devices.blocks()) {
        let requests = engine.slots.load(&[]).requests;
        router.metrics.show_engine(&engine.spec.name, engine.is_up(), blocks, requests);
    }
    let mut page = String::new();
    match text::encode(&mut page, registry) {
        Ok(()) => ([(header::CONTENT_TYPE, OPENMETRICS)], page).into_response(),
        Err(why) => refusal(StatusCode::INTERNAL_SERVER_ERROR, &why.to_string()),
    }
}
