//! The gRPC contract `kvstrata.v1`: wire to domain and back, and nothing else.
//!
//! One file per streaming call, one for the rest. Every limit is checked before memory is taken for
//! what it limits: messages by tonic, counts by `convert` and the namespace, bytes by the lease table
//! and the store. The generated trait is implemented in [`blocks`]; [`Node`] is what
//! it works on.

pub(crate) mod admin;
pub mod blocks;
mod bounded;
mod calls;
pub(crate) mod convert;
mod framed;
mod get;
mod guarded;
mod health;
pub mod incoming;
mod lookup;
pub(crate) mod peer;
mod put;
pub(crate) mod router;
mod stats;
pub mod status;
mod watched;

use std::sync::Arc;

pub(crate) use calls::Call;
pub use calls::{Calls, Observed};
pub use framed::Framed;
pub use guarded::Guarded;
pub(crate) use health::health;
pub(crate) use router::RouterService;
use tonic::{body::Body, codegen::http, transport::Server};

use crate::{
    auth::Bearer,
    limits::{
        HTTP2_CONNECTION_WINDOW_BYTES, HTTP2_FRAME_BYTES, HTTP2_STREAM_WINDOW_BYTES,
        HTTP2_STREAMS_MAX, KEEPALIVE_INTERVAL, KEEPALIVE_TIMEOUT, UNARY_DEADLINE,
    },
    node::Node,
};

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

/// Who has sent a request, as [`Guarded`] has found out: never from a field.
fn bearer_of<T>(request: &tonic::Request<T>) -> Result<Arc<Bearer>, tonic::Status> {
    let found = request.extensions().get::<Arc<Bearer>>().cloned();
    found.ok_or_else(|| tonic::Status::unauthenticated("token: nobody has asked for it"))
}

#[cfg(test)]
pub(crate) mod tests;
