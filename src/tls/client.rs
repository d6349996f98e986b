//! The connecting side: one way to reach both the gRPC and the bulk port of a server.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::{VERSIONS, certificates, key, protocols, provider};
use crate::metrics::Door;

/// How a client makes sure whom it speaks to, and shows who it is. The files are read once, when it
/// connects first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsOptions {
    /// PEM file with the CA that the server's certificate must be of. `None`: those that the system
    /// trusts.
    pub ca_file: Option<PathBuf>,
    /// PEM files with a certificate of this client and its key, for servers that ask for one.
    pub client: Option<(PathBuf, PathBuf)>,
    /// The name that the certificate must be for, if it is not the host that is connected to.
    pub server_name: Option<String>,
}

/// Makes connections to a server encrypted; clones share what they trust.
#[derive(Clone)]
pub(crate) struct Dialer {
    grpc: Arc<ClientConfig>,
    bulk: Arc<ClientConfig>,
    http: Arc<ClientConfig>,
    name: Option<ServerName<'static>>,
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dialer").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Dialer {
    /// Reads what the options name.
    ///
    /// # Errors
    /// `Invalid` with the file or name and what is wrong with it.
    pub(crate) fn new(options: &TlsOptions) -> Result<Self> {
        let roots = Arc::new(roots(options.ca_file.as_deref())?);
        let name = options.server_name.clone().map(|name| server_name(&name)).transpose()?;
        let door = |door| -> Result<Arc<ClientConfig>> {
            let builder = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(VERSIONS)
                .map_err(|error| Error::invalid(format!("tls: {error}")))?
                .with_root_certificates(Arc::clone(&roots));
            let mut config = match &options.client {
                None => builder.with_no_client_auth(),
                Some((cert, private)) => {
                    let chain = certificates("tls client certificate", &read(cert)?)?;
                    let private = key("tls client key", &read(private)?)?;
                    builder
                        .with_client_auth_cert(chain, private)
                        .map_err(|error| Error::invalid(format!("tls client: {error}")))?
                }
            };
            config.alpn_protocols = protocols(door);
            Ok(Arc::new(config))
        };
        Ok(Self { grpc: door(Door::Grpc)?, bulk: door(Door::Bulk)?, http: door(Door::Http)?, name })
    }

    /// Connects to a door of a server at `host:port`.
    ///
    /// # Errors
    /// `Unavailable` if it is not reached or speaks no TLS, `Unauthenticated` if its certificate does not
    /// show that it is the server meant.
    ///
    /// # Cancel safety
    /// Safe: the connection is closed.
    pub(crate) async fn connect(&self, door: Door, address: &str) -> Result<TlsStream<TcpStream>> {
        let doing = || format!("connect to {address} by TLS");
        let host = address.rsplit_once(':').map_or(address, |(host, _port)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = self.name.clone().map_or_else(|| server_name(host), Ok)?;
        let config = match door {
            Door::Grpc => &self.grpc,
            Door::Bulk => &self.bulk,
            Door::Http => &self.http,
            // Clients of ours do not speak it.
            Door::Resp => return Err(Error::new(ErrorKind::Unsupported, doing())),
        };
        let unreached = |error| Error::new(ErrorKind::Unavailable, doing()).because(error);
        let io = TcpStream::connect(address).await.map_err(unreached)?;
        io.set_nodelay(true).map_err(unreached)?;
        let connecting = TlsConnector::from(Arc::clone(config)).connect(name, io).await;
        connecting.map_err(|error| match cause(&error) {
            Some(rustls::Error::InvalidCertificate(_)) => {
                Error::new(ErrorKind::Unauthenticated, doing()).because(error)
            }
            Some(rustls::Error::InvalidMessage(_)) => {
                let text = format!("{}: does the server speak TLS?", doing());
                Error::new(ErrorKind::Unavailable, text).because(error)
            }
            _ => unreached(error),
        })
    }
}

fn cause(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

fn server_name(host: &str) -> Result<ServerName<'static>> {
    ServerName::try_from(host.to_owned()).map_err(|_no_more_to_say| {
        Error::invalid(format!("tls server name: {host:?} given, a host name or address required"))
    })
}

fn roots(ca_file: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match ca_file {
        Some(path) => {
            for certificate in certificates("tls CA file", &read(path)?)? {
                let broken = |error| Error::invalid(format!("tls CA file: {error}"));
                roots.add(certificate).map_err(broken)?;
            }
        }
        None => {
            // What cannot be read of them is as if it were not trusted.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            if roots.is_empty() {
                return Err(Error::invalid("tls: the system trusts no CA; give a CA file"));
            }
        }
    }
    Ok(roots)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path)
        .map_err(|error| Error::invalid(format!("tls: read {}", path.display())).because(error))
}
