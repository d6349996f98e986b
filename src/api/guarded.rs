//! Asks every request of a service for its token, and whether its tenant may ask now, before anything of it
//! is read.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{Context, Poll},
};

use futures_util::{
    FutureExt,
    future::{Either, Ready, ready},
};
use kvstrata_tiers::error::Result;
use tonic::{
    body::Body,
    codegen::{Service, http},
    server::NamedService,
};

use super::status;
use crate::{
    auth::{Bearer, Gate, TENANT_HEADER, bearer_token},
    metrics::Door,
};

/// Who gets through.
#[derive(Debug, Clone, Copy)]
enum Whom {
    /// Clients, and nodes that ask for a tenant.
    Clients,
    /// Nodes that ask for themselves.
    Nodes,
    /// Operators.
    Operators,
}

/// A service behind a gate. What gets through carries its bearer.
#[derive(Debug, Clone)]
pub struct Guarded<S> {
    inner: S,
    gate: Gate,
    whom: Whom,
}

impl<S> Guarded<S> {
    /// Puts `inner` behind `gate`. Nodes get through if they name the tenant they ask for.
    #[must_use]
    pub fn new(inner: S, gate: Gate) -> Self {
        Self { inner, gate, whom: Whom::Clients }
    }

    /// Puts `inner` behind `gate`, for the nodes of the cluster alone, who ask for themselves.
    #[must_use]
    pub fn for_nodes(inner: S, gate: Gate) -> Self {
        Self { inner, gate, whom: Whom::Nodes }
    }

    /// Puts `inner` behind `gate`, for operators alone.
    #[must_use]
    pub(crate) fn for_operators(inner: S, gate: Gate) -> Self {
        Self { inner, gate, whom: Whom::Operators }
    }

    fn admit(&self, token: Option<&[u8]>, tenant: Option<&[u8]>) -> Result<Arc<Bearer>> {
        match self.whom {
            Whom::Clients => self.gate.admit_for(Door::Grpc, token, tenant),
            Whom::Nodes => self.gate.admit_node(Door::Grpc, token),
            Whom::Operators => self.gate.admit_operator(Door::Admin, token),
        }
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
    type Future = Either<S::Future, Ready<std::result::Result<Self::Response, Infallible>>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<std::result::Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        let header = request.headers().get(http::header::AUTHORIZATION);
        let token = header.and_then(|header| bearer_token(header.as_bytes()));
        let tenant = request.headers().get(TENANT_HEADER).map(http::HeaderValue::as_bytes);
        let admitted = self.admit(token, tenant);
        let admitted = admitted.and_then(|bearer| bearer.rates().request().map(|()| bearer));
        match admitted {
            Ok(bearer) => {
                request.extensions_mut().insert(bearer);
                self.inner.call(request).left_future()
            }
            Err(refused) => ready(Ok(status::from_error(&refused).into_http())).right_future(),
        }
    }
}
