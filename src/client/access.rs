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
use crate::{
    auth::{TENANT_HEADER, TENANT_MARK, Token},
    metrics::Door,
    tls::Dialer,
};

/// A channel whose requests carry the token.
pub(super) type Carrier = InterceptedService<Channel, Bearing>;

/// See the module.
#[derive(Clone)]
pub(super) struct Access {
    token: Option<Token>,
    /// The tenant that a node asks for.
    acting_for: Option<String>,
    /// None: the connection is not encrypted.
    pub(super) dialer: Option<Dialer>,
}

/// Shows the token with each request, and for whom it is.
#[derive(Clone)]
pub(super) struct Bearing {
    token: Option<MetadataValue<Ascii>>,
    tenant: Option<MetadataValue<Ascii>>,
}

impl fmt::Debug for Bearing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bearing").finish_non_exhaustive()
    }
}

impl Interceptor for Bearing {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(value) = &self.token {
            request.metadata_mut().insert("authorization", value.clone());
        }
        if let Some(value) = &self.tenant {
            request.metadata_mut().insert(TENANT_HEADER, value.clone());
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
        let acting_for = options.acting_for.clone();
        Ok(Self { token: options.token.clone(), acting_for, dialer })
    }

    /// The token as hello carries it; empty for none.
    pub(super) fn token(&self) -> Bytes {
        let mut field = self.token.as_ref().map_or_else(Vec::new, |token| token.reveal().into());
        if let Some(tenant) = &self.acting_for {
            field.push(TENANT_MARK);
            field.extend_from_slice(tenant.as_bytes());
        }
        field.into()
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
        // Neither has a character that a header may not have.
        let unfit = |what: &str| Error::invalid(format!("{what}: not fit for a header"));
        let shown = |token: &Token| -> Result<MetadataValue<Ascii>> {
            let value = MetadataValue::try_from(format!("Bearer {}", token.reveal()));
            let mut value = value.map_err(|_may_quote_it| unfit("token"))?;
            value.set_sensitive(true);
            Ok(value)
        };
        let named = |tenant: &String| -> Result<MetadataValue<Ascii>> {
            MetadataValue::try_from(tenant).map_err(|_tenant| unfit("acting_for"))
        };
        Ok(Bearing {
            token: self.token.as_ref().map(shown).transpose()?,
            tenant: self.acting_for.as_ref().map(named).transpose()?,
        })
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
