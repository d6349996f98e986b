//! The gRPC contract `kvstrata.v1`: wire to domain and back, and nothing else.
//!
//! One file per streaming call, one for the rest. Every limit is checked before memory is taken for
//! what it limits: messages by tonic, counts by `convert` and the namespace, bytes by the lease table
//! and the store. The generated trait is implemented in [`blocks`]; [`Node`] is what it works on.

pub mod blocks;
mod bounded;
mod calls;
mod convert;
mod delivered;
mod durable;
mod framed;
mod get;
pub mod incoming;
mod put;
mod stats;
pub mod status;
mod watched;

use std::{sync::Arc, time::Duration};

pub use calls::{Calls, Observed};
pub use framed::Framed;
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    namespace::NamespaceTable,
    stack::{Pin, Stack},
};
use tokio::{sync::Semaphore, time::Instant};
use tonic::{body::Body, codegen::http, transport::Server};

use crate::{
    lease::LeaseTable,
    limits::{
        HTTP2_CONNECTION_WINDOW_BYTES, HTTP2_FRAME_BYTES, HTTP2_STREAM_WINDOW_BYTES,
        HTTP2_STREAMS_MAX, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, UNARY_DEADLINE,
    },
    metrics::ServerMetrics,
    session::SessionTable,
    tasks::Tasks,
};

/// The leases of a server: what they hold are pins of the store.
pub type Leases = LeaseTable<Vec<Pin>>;
/// The sessions of a server.
pub type Sessions = SessionTable<Vec<Pin>>;

/// What the calls work on.
#[derive(Debug)]
pub struct Node {
    /// Name in member lists and stats.
    pub name: String,
    /// The members of the cluster; this one alone for now.
    pub members: wire::MemberList,
    /// The store.
    pub stack: Stack,
    /// The namespaces.
    pub namespaces: Arc<NamespaceTable>,
    /// The leases.
    pub leases: Leases,
    /// The sessions.
    pub sessions: Sessions,
    /// The server's metrics.
    pub metrics: ServerMetrics,
    /// Background work.
    pub tasks: Tasks,
    /// Bounds the prefetches that run at a time.
    pub prefetches: Arc<Semaphore>,
    /// Bounds the blocks that all of them load at a time, so that tiers have turns left for gets.
    pub prefetch_loads: Arc<Semaphore>,
    /// When the server started.
    pub started: Instant,
}

/// A transport with our windows, frames, keepalive and deadlines.
pub fn transport() -> Server {
    Server::builder()
        .max_frame_size(HTTP2_FRAME_BYTES)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(HTTP2_STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
        .timeout(UNARY_DEADLINE)
}

/// Corrects the code of a request that could not be read, see [`status::of_unreadable`].
pub fn correct_unreadable(mut response: http::Response<Body>) -> http::Response<Body> {
    let Some(failed) = tonic::Status::from_header_map(response.headers()) else { return response };
    let code = status::of_unreadable(failed.code(), failed.message());
    if code != failed.code() {
        let value = http::HeaderValue::from(i32::from(code));
        response.headers_mut().insert("grpc-status", value);
    }
    response
}

/// The tenant of a request, from its authenticated identity, never from a field.
///
/// There is one tenant until authentication comes; every call already asks here.
fn tenant_of<T>(_request: &tonic::Request<T>) -> String {
    "default".to_owned()
}

/// A time given in milliseconds, 0 taking the default.
fn period(
    field: &str,
    given_ms: u32,
    default: Duration,
    max: Duration,
) -> kvstrata_tiers::error::Result<Duration> {
    let given = Duration::from_millis(u64::from(given_ms));
    if given.is_zero() {
        return Ok(default);
    }
    if given > max {
        return Err(kvstrata_tiers::error::Error::invalid(format!(
            "{field}: {given_ms} given, 0 to {} allowed, 0 takes {}",
            max.as_millis(),
            default.as_millis()
        )));
    }
    Ok(given)
}

#[cfg(test)]
mod tests;
