//! The router's calls as JSON: `POST /v1/router/<verb>`, and `POST /check_blocks` as Dynamo asks it.
//!
//! Those that are answered by streams are answered by lines of JSON, which end when either side ends them.

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, Path, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::StreamExt;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::token_of;
use crate::{
    api::RouterService,
    auth::{Bearer, Gate},
    limits::MESSAGE_BYTES_MAX,
    metrics::Door,
    readiness::{Readiness, Status},
};

/// Who answers, and whom.
#[derive(Clone)]
struct Twins {
    service: RouterService,
    gate: Gate,
    readiness: Readiness,
}

/// The routes.
pub(super) fn routes(service: RouterService, gate: Gate, readiness: Readiness) -> Router {
    Router::new()
        .route("/v1/router/{verb}", post(call))
        .route("/check_blocks", post(check_blocks))
        .layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX))
        .with_state(Twins { service, gate, readiness })
}

impl Twins {
    fn admit(&self, headers: &HeaderMap) -> Result<Arc<Bearer>> {
        let bearer = self.gate.admit(Door::Http, token_of(headers))?;
        bearer.rates().request()?;
        match self.readiness.status() {
            Status::Ready => Ok(bearer),
            Status::Draining => Err(Error::new(ErrorKind::Unavailable, "this node is draining")),
            Status::Starting(_) => {
                Err(Error::new(ErrorKind::Unavailable, "this node is starting: try again"))
            }
        }
    }
}

async fn call(
    State(twins): State<Twins>,
    Path(verb): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let bearer = match twins.admit(&headers) {
        Ok(bearer) => bearer,
        Err(refused) => return failed(&refused),
    };
    if let Some(answered) = twins.service.json(&verb, &bearer, &body).await {
        return answer(answered);
    }
    match twins.service.json_lines(&verb, &bearer, &body).await {
        Some(Ok(lines)) => {
            let body = Body::from_stream(lines.map(Ok::<_, Infallible>));
            (StatusCode::OK, [(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
        }
        Some(Err(failure)) => failed(&failure),
        None => failed(&unknown()),
    }
}

async fn check_blocks(State(twins): State<Twins>, headers: HeaderMap, body: Bytes) -> Response {
    match twins.admit(&headers) {
        Ok(bearer) => answer(twins.service.check_blocks(&bearer, &body).await),
        Err(refused) => failed(&refused),
    }
}

fn answer(answered: Result<Vec<u8>>) -> Response {
    match answered {
        Ok(json) => {
            (StatusCode::OK, [(header::CONTENT_TYPE, "application/json")], json).into_response()
        }
        Err(failure) => failed(&failure),
    }
}

fn unknown() -> Error {
    let text = "no such call: there are lookup, score, reserve, release, report, watch and \
                watch_tiers";
    Error::new(ErrorKind::Unsupported, text)
}

fn failed(failure: &Error) -> Response {
    let status = match failure.kind() {
        ErrorKind::Invalid => StatusCode::BAD_REQUEST,
        ErrorKind::Unauthenticated => StatusCode::UNAUTHORIZED,
        ErrorKind::UnknownNamespace => StatusCode::NOT_FOUND,
        ErrorKind::LayoutMismatch | ErrorKind::LeaseExpired => StatusCode::CONFLICT,
        ErrorKind::Exhausted { .. } => StatusCode::TOO_MANY_REQUESTS,
        ErrorKind::Unavailable | ErrorKind::Cancelled => StatusCode::SERVICE_UNAVAILABLE,
        ErrorKind::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ErrorKind::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorKind::Corrupt | ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let json = (header::CONTENT_TYPE, "application/json");
    match failure.kind() {
        ErrorKind::Unauthenticated => {
            (status, [json, (header::WWW_AUTHENTICATE, "Bearer")], told(failure)).into_response()
        }
        _ => (status, [json], told(failure)).into_response(),
    }
}

fn told(failure: &Error) -> Vec<u8> {
    serde_json::json!({ "error": failure.to_string() }).to_string().into_bytes()
}
