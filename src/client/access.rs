//! What a client shows, and what it asks the server to show: token and TLS, the same for gRPC and bulk.

use std::fmt;

use bytes::Bytes;
use hyper_util::rt::TokioIo;
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

use super::ClientOptions;
use crate::{auth::Token, metrics::Door, tls::Dialer};

/// A channel whose requests carry the token.
pub(super) type Carrier = InterceptedService<Channel, Bearing>;

/// See the module.
#[derive(Clone)]
pub(super) struct Access {
    token: Option<Token>,
    /// None: the connection is not encrypted.
    pub(super) dialer: Option<Dialer>,
}

/// Shows the token with each request.
#[derive(Clone)]
pub(super) struct Bearing(Option<MetadataValue<Ascii>>);

impl fmt::Debug for Bearing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bearing").finish_non_exhaustive()
    }
}

impl Interceptor for Bearing {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.0 {
            request.metadata_mut().insert("authorization", value.clone());
        }
        Ok(request)
    }
}

impl Access {
    /// What the options say; `secure` if the endpoint asks for TLS.
    ///
    /// # Errors
    /// `Invalid` with the file or name that cannot be used.
    pub(super) fn new(options: &ClientOptions, secure: bool) -> Result<Self> {
        let tls = options.tls.clone().or_else(|| secure.then(Default::default));
        let dialer = tls.as_ref().map(Dialer::new).transpose()?;
        Ok(Self { token: options.token.clone(), dialer })
    }

    /// The token as hello carries it; empty for none.
    pub(super) fn token(&self) -> Bytes {
        let token =
            self.token.as_ref().map(|token| Bytes::copy_from_slice(token.reveal().as_bytes()));
        token.unwrap_or_default()
    }

    /// Connects a channel to `host:port`.
    pub(super) async fn connect(
        &self,
        endpoint: &Endpoint,
        address: &str,
    ) -> Result<Channel, tonic::transport::Error> {
        let Some(dialer) = self.dialer.clone() else { return endpoint.connect().await };
        let address = address.to_owned();
        let connector = tower::service_fn(move |_uri| {
            let (dialer, address) = (dialer.clone(), address.clone());
            async move { dialer.connect(Door::Grpc, &address).await.map(TokioIo::new) }
        });
        endpoint.connect_with_connector(connector).await
    }

    /// What shows the token with each request of a channel.
    pub(super) fn bearing(&self) -> Result<Bearing> {
        let Some(token) = &self.token else { return Ok(Bearing(None)) };
        let value = MetadataValue::try_from(format!("Bearer {}", token.reveal()));
        // A token has no character that a header may not have.
        let mut value =
            value.map_err(|_may_quote_it| Error::invalid("token: not fit for a header"))?;
        value.set_sensitive(true);
        Ok(Bearing(Some(value)))
    }
}

/// `host:port` of an endpoint, and whether it asks for TLS.
///
/// # Errors
/// `Invalid` if it asks for none although the options are about it.
pub(super) fn address_of<'a>(
    endpoint: &'a str,
    options: &ClientOptions,
) -> Result<(&'a str, bool)> {
    match endpoint.split_once("://") {
        Some(("https", address)) => Ok((address.trim_end_matches('/'), true)),
        Some((scheme, _)) if options.tls.is_some() => Err(Error::invalid(format!(
            "endpoint: {scheme}:// given together with options of TLS, https:// required"
        ))),
        Some((_, address)) => Ok((address.trim_end_matches('/'), false)),
        None => Ok((endpoint, options.tls.is_some())),
    }
}

/// The error of a dialer, where that is what kept a channel from being connected.
pub(super) fn dialled(error: &tonic::transport::Error) -> Option<(ErrorKind, String)> {
    let mut source = std::error::Error::source(error);
    while let Some(error) = source {
        if let Some(ours) = error.downcast_ref::<Error>() {
            return Some((ours.kind(), ours.to_string()));
        }
        source = error.source();
    }
    None
}
