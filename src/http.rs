//! `/livez`, `/readyz` and `/metrics` for kubelet and Prometheus.
//!
//! Liveness says only that the process answers: it never depends on a peer, a tier or the load,
//! because a restart heals none of those. Readiness says whether to send work here.

use std::{io, net::SocketAddr, sync::Arc};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::get,
    serve::Listener,
};
use prometheus_client::{encoding::text, registry::Registry};
use tokio::net::TcpListener;

use crate::{
    api::incoming::{Acceptor, Connection},
    readiness::{Readiness, Status},
};

/// The OpenMetrics content type.
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What the pages show.
#[derive(Clone)]
struct Pages {
    readiness: Readiness,
    registry: Arc<Registry>,
    refresh: Arc<dyn Fn() + Send + Sync>,
}

/// The routes; `refresh` is called before a page of metrics is made.
pub fn router(
    readiness: Readiness,
    registry: Arc<Registry>,
    refresh: impl Fn() + Send + Sync + 'static,
) -> Router {
    Router::new()
        .route("/livez", get(|| async { "ok\n" }))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Pages { readiness, registry, refresh: Arc::new(refresh) })
}

/// Where readers of pages come in, see [`Acceptor::of_pages`].
#[derive(Debug)]
pub struct PageListener(Acceptor);

impl PageListener {
    /// Accepts from `listener`.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self(Acceptor::of_pages(listener))
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

async fn metrics(State(pages): State<Pages>) -> impl IntoResponse {
    (pages.refresh)();
    let mut page = String::new();
    match text::encode(&mut page, &pages.registry) {
        Ok(()) => (StatusCode::OK, [(header::CONTENT_TYPE, OPENMETRICS)], page),
        Err(why) => {
            let plain = [(header::CONTENT_TYPE, "text/plain")];
            (StatusCode::INTERNAL_SERVER_ERROR, plain, format!("{why}\n"))
        }
    }
}
