//! `/livez`, `/readyz` and `/metrics` for kubelet and Prometheus; the router's calls as JSON (`twins`); the
//! page for people (`console`).
//!
//! Liveness says only that the process answers: it never depends on a peer, a tier or the load,
//! because a restart heals none of those. Readiness says whether to send work here.

mod console;
mod twins;

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
    serve::Listener,
};
use prometheus_client::{encoding::text, registry::Registry};
use tokio::net::TcpListener;

use crate::{
    api::{
        RouterService,
        incoming::{Acceptor, Connection},
    },
    auth::{Gate, bearer_token},
    metrics::Door,
    node::Node,
    readiness::{Readiness, Status},
    tls::Entry,
};

/// The OpenMetrics content type.
pub(crate) const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a reader of pages is told that speaks no TLS.
pub(crate) fn plain_answer() -> Vec<u8> {
    let text = "this port speaks TLS: use https://\n";
    let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n";
    format!("{head}content-length: {}\r\n\r\n{text}", text.len()).into_bytes()
}

/// What the pages show.
#[derive(Clone)]
struct Pages {
    readiness: Readiness,
    registry: Arc<Registry>,
    gate: Gate,
    refresh: Arc<dyn Fn() + Send + Sync>,
}

/// The routes; `refresh` is called before a page of metrics is made. Metrics are of all tenants: where
/// `gate` asks for tokens, that of an operator is wanted for them.
pub(crate) fn router(
    readiness: Readiness,
    registry: Arc<Registry>,
    gate: Gate,
    refresh: impl Fn() + Send + Sync + 'static,
    (node, routers): (Arc<Node>, RouterService),
) -> Router {
    let twins = twins::routes(routers, gate.clone(), readiness.clone());
    let console = console::routes(node, gate.clone(), readiness.clone());
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Pages { readiness, registry, gate, refresh: Arc::new(refresh) })
        .merge(twins)
        .merge(console)
}

/// Where readers of pages come in: few at a time, and none that says nothing for long.
#[derive(Debug)]
pub struct PageListener(Acceptor);

impl PageListener {
    /// Accepts from `listener` what begins as `entry` says.
    #[must_use]
    pub(crate) fn new(listener: TcpListener, entry: Entry) -> Self {
        Self(Acceptor::of_pages(listener, entry))
    }
}

impl Listener for PageListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        self.0.next_reader().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

async fn readyz(State(pages): State<Pages>) -> impl IntoResponse {
    match pages.readiness.status() {
        Status::Ready => (StatusCode::OK, "ok\n".to_owned()),
        Status::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned()),
        Status::Starting(waiting) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("waiting for {}\n", waiting.join(", ")))
        }
    }
}

/// The token that a request shows, if it does.
fn token_of(headers: &HeaderMap) -> Option<&[u8]> {
    bearer_token(headers.get(header::AUTHORIZATION)?.as_bytes())
}

async fn metrics(State(pages): State<Pages>, headers: HeaderMap) -> Response {
    if let Err(refused) = pages.gate.admit_operator(Door::Http, token_of(&headers)) {
        let scheme = [(header::WWW_AUTHENTICATE, "Bearer")];
        return (StatusCode::UNAUTHORIZED, scheme, format!("{refused}\n")).into_response();
    }
    (pages.refresh)();
    let mut page = String::new();
    match text::encode(&mut page, &pages.registry) {
        Ok(()) => (StatusCode::OK, [(header::CONTENT_TYPE, OPENMETRICS)], page).into_response(),
        Err(why) => {
            let plain = [(header::CONTENT_TYPE, "text/plain")];
            (StatusCode::INTERNAL_SERVER_ERROR, plain, format!("{why}\n")).into_response()
        }
    }
}
