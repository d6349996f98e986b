//! The connecting side: one way to reach both the gRPC and the bulk port of a server.

use std::{fmt, io, path::PathBuf, sync::Arc};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use rustls::{ClientConfig, RootCertStore, pki_types::ServerName};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tracing::{info, warn};

use super::{VERSIONS, certificates, key, protocols, provider};
use crate::{
    metrics::{Door, Reloaded},
    reload::{Contents, Watched},
};

/// How a client makes sure whom it speaks to, and shows who it is. Files that have changed are taken by the
/// next connection that is made; those that cannot be used are logged, and what was loaded before stays.
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
    current: Arc<RwLock<Option<Doors>>>,
    /// None: no files were named.
    watched: Option<Arc<Mutex<Watched>>>,
    name: Option<ServerName<'static>>,
}

struct Doors {
    grpc: Arc<ClientConfig>,
    bulk: Arc<ClientConfig>,
    http: Arc<ClientConfig>,
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
        let name = options.server_name.clone().map(|name| server_name(&name)).transpose()?;
        let has_ca = options.ca_file.is_some();
        let mut files: Vec<_> =
            options.ca_file.iter().map(|path| ("tls CA file", path.clone())).collect();
        if let Some((cert, key)) = &options.client {
            files.push(("tls client certificate", cert.clone()));
            files.push(("tls client key", key.clone()));
        }
        let current = Arc::new(RwLock::new(None));
        let loaded = Arc::clone(&current);
        let load = move |contents: &Contents| {
            *loaded.write() = Some(Doors::new(contents, has_ca)?);
            Ok(())
        };
        if files.is_empty() {
            load(&[])?;
            return Ok(Self { current, watched: None, name });
        }
        let watched = Watched::open(Reloaded::Tls, files, load)?;
        Ok(Self { current, watched: Some(Arc::new(Mutex::new(watched))), name })
    }

    /// Takes files that have changed.
    async fn renew(&self) {
        let Some(watched) = self.watched.clone() else { return };
        // A file system may hang; the other tasks of this thread should not.
        let looking = tokio::task::spawn_blocking(move || watched.lock().look_once());
        match looking.await {
            Ok(Some(Ok(()))) => info!("files of TLS changed and were loaded"),
            Ok(Some(Err(error))) => {
                warn!(%error, "files of TLS changed and cannot be used, what was loaded before stays");
            }
            Ok(None) | Err(_) => {}
        }
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
        self.renew().await;
        let config = self.current.read().as_ref().map(|doors| doors.of(door));
        let config = config.ok_or_else(|| Error::invalid("tls: nothing was loaded"))?;
        let unreached = |error| Error::new(ErrorKind::Unavailable, doing()).because(error);
        let io = TcpStream::connect(address).await.map_err(unreached)?;
        io.set_nodelay(true).map_err(unreached)?;
        let connecting = TlsConnector::from(config).connect(name, io).await;
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

impl Doors {
    /// From the CA, if there is one, and the certificate and key of the client, if there are any.
    fn new(contents: &Contents, has_ca: bool) -> Result<Self> {
        let (ca, client) = contents.split_at(usize::from(has_ca).min(contents.len()));
        let roots = Arc::new(roots(ca.first().map(Vec::as_slice))?);
        let door = |door| -> Result<Arc<ClientConfig>> {
            let builder = ClientConfig::builder_with_provider(provider())
                .with_protocol_versions(VERSIONS)
                .map_err(|error| Error::invalid(format!("tls: {error}")))?
                .with_root_certificates(Arc::clone(&roots));
            let mut config = match client {
                [cert, private] => {
                    let chain = certificates("tls client certificate", cert)?;
                    builder
                        .with_client_auth_cert(chain, key("tls client key", private)?)
                        .map_err(|error| Error::invalid(format!("tls client: {error}")))?
                }
                _ => builder.with_no_client_auth(),
            };
            config.alpn_protocols = protocols(door);
            Ok(Arc::new(config))
        };
        Ok(Self { grpc: door(Door::Grpc)?, bulk: door(Door::Bulk)?, http: door(Door::Http)? })
    }

    fn of(&self, door: Door) -> Arc<ClientConfig> {
        Arc::clone(match door {
            Door::Grpc | Door::Admin => &self.grpc,
            Door::Bulk => &self.bulk,
            // Clients of ours do not speak RESP.
            Door::Http | Door::Resp => &self.http,
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

/// Those of a PEM text, or those that the system trusts.
fn roots(ca: Option<&[u8]>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match ca {
        Some(pem) => {
            for certificate in certificates("tls CA file", pem)? {
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
