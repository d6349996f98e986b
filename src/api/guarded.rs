//! Asks every request of a service for its token, before anything of it is read.

use std::{
    convert::Infallible,
    task::{Context, Poll},
};

use futures_util::{
    FutureExt,
    future::{Either, Ready, ready},
};
use tonic::{
    body::Body,
    codegen::{Service, http},
    server::NamedService,
};

use super::status;
use crate::{
    auth::{Gate, bearer_token},
    metrics::Door,
};

/// A service behind a gate. What gets through carries its bearer.
#[derive(Debug, Clone)]
pub struct Guarded<S> {
    inner: S,
    gate: Gate,
}

impl<S> Guarded<S> {
    /// Puts `inner` behind `gate`.
    #[must_use]
    pub fn new(inner: S, gate: Gate) -> Self {
        Self { inner, gate }
    }
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<http::Request<Body>> for Guarded<S>
where
    S: Service<http::Request<Body>, Response = http::Response<Body>, Error = Infallible>,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, Ready<Result<Self::Response, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let header = request.headers().get(http::header::AUTHORIZATION);
        let token = header.and_then(|header| bearer_token(header.as_bytes()));
        match self.gate.admit(Door::Grpc, token) {
            Ok(bearer) => {
                request.extensions_mut().insert(bearer);
                self.inner.call(request).left_future()
            }
            Err(refused) => ready(Ok(status::from_error(&refused).into_http())).right_future(),
        }
    }
}
