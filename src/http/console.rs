//! The console page: three files that hold no data, and what they show, as JSON, for whoever may see it.
//!
//! The page asks for nothing from elsewhere and runs no script but its own; what it shows of clients is put
//! in as text. Where tokens are asked for, the page asks its reader for one and keeps it in memory.

use std::sync::Arc;

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};

use super::token_of;
use crate::{
    auth::Gate,
    console::{self, Phase},
    metrics::Door,
    node::Node,
    readiness::{Readiness, Status},
};

/// What the page may do: nothing but load its own parts and ask this node.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const PAGE: &str = include_str!("../console/page/page.html");
const SCRIPT: &str = include_str!("../console/page/page.js");
const CHARTS: &str = include_str!("../console/page/charts.js");
const STYLE: &str = include_str!("../console/page/page.css");

/// Whose state is shown, and to whom.
#[derive(Clone)]
struct Shown {
    node: Arc<Node>,
    gate: Gate,
    readiness: Readiness,
}

/// The routes.
pub(super) fn routes(node: Arc<Node>, gate: Gate, readiness: Readiness) -> Router {
    let page = || async { file("text/html; charset=utf-8", PAGE) };
    Router::new()
        .route("/", get(page))
        .route("/console", get(page))
        .route("/console/page.js", get(|| async { file("text/javascript; charset=utf-8", SCRIPT) }))
        .route(
            "/console/charts.js",
            get(|| async { file("text/javascript; charset=utf-8", CHARTS) }),
        )
        .route("/console/page.css", get(|| async { file("text/css; charset=utf-8", STYLE) }))
        .route("/console/state", get(state))
        .with_state(Shown { node, gate, readiness })
}

/// What every answer says: no type is guessed, nothing is kept, and no other site sees where one came from.
const GUARDS: [(HeaderName, &str); 4] = [
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::CACHE_CONTROL, "no-store"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CONTENT_SECURITY_POLICY, POLICY),
];

fn file(kind: &'static str, text: &'static str) -> Response {
    (GUARDS, [(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn state(State(shown): State<Shown>, headers: HeaderMap) -> Response {
    let bearer = match shown.gate.admit(Door::Http, token_of(&headers)) {
        Ok(bearer) => bearer,
        Err(refused) => {
            let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
            return (StatusCode::UNAUTHORIZED, GUARDS, scheme, format!("{refused}\n"))
                .into_response();
        }
    };
    let phase = match shown.readiness.status() {
        Status::Ready => Phase::Ready,
        Status::Draining => Phase::Draining,
        Status::Starting(_) => Phase::Starting,
    };
    match serde_json::to_vec(&console::State::of(&shown.node, &bearer, phase)) {
        Ok(json) => (GUARDS, [(header::CONTENT_TYPE, "application/json")], json).into_response(),
        Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, GUARDS, format!("{why}\n")).into_response(),
    }
}
