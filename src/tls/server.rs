//! What the listeners need: certificate, key, and the CA of clients.

use std::{fmt, path::PathBuf, sync::Arc};

use kvstrata_tiers::error::{Error, Result};
use parking_lot::RwLock;
use rustls::{
    RootCertStore, ServerConfig,
    server::{WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio_rustls::TlsAcceptor;

use super::{VERSIONS, certificates, key, protocols, provider};
use crate::{
    config::{self, PathText},
    metrics::{Door, Reloaded},
    reload::{Contents, Watched},
};

/// What all doors present; clones share it. Nobody gets through before files are loaded.
#[derive(Clone, Default)]
pub(crate) struct Tls {
    current: Arc<RwLock<Option<Doors>>>,
}

struct Doors {
    grpc: Arc<ServerConfig>,
    bulk: Arc<ServerConfig>,
    http: Arc<ServerConfig>,
    resp: Arc<ServerConfig>,
}

impl Tls {
    /// What is accepted at a door from now on.
    pub(super) fn acceptor(&self, door: Door) -> Option<TlsAcceptor> {
        let current = self.current.read();
        let doors = current.as_ref()?;
        let config = match door {
            Door::Grpc | Door::Admin => &doors.grpc,
            Door::Bulk => &doors.bulk,
            Door::Http => &doors.http,
            Door::Resp => &doors.resp,
        };
        Some(TlsAcceptor::from(Arc::clone(config)))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").finish_non_exhaustive()
    }
}

/// Loads the files of the configuration, if there are any, and what loads them again.
///
/// # Errors
/// `Invalid` with the settings, the paths and why.
pub(crate) fn watched(config: &config::Tls) -> Result<Option<(Tls, Watched)>> {
    let path = |path: &PathText| path.0.clone();
    let (Some(cert), Some(key)) = (config.cert_file.given(), config.key_file.given()) else {
        return Ok(None);
    };
    let mut files: Vec<(&'static str, PathBuf)> =
        vec![("tls.cert_file", path(cert)), ("tls.key_file", path(key))];
    files.extend(config.client_ca_file.given().map(|ca| ("tls.client_ca_file", path(ca))));
    let tls = Tls::default();
    let current = Arc::clone(&tls.current);
    let watched = Watched::open(Reloaded::Tls, files, move |contents| {
        *current.write() = Some(doors(contents)?);
        Ok(())
    })?;
    Ok(Some((tls, watched)))
}

fn doors(contents: &Contents) -> Result<Doors> {
    let (cert, private, client_ca) = match contents {
        [cert, private] => (cert, private, None),
        [cert, private, client_ca] => (cert, private, Some(client_ca)),
        _ => return Err(Error::invalid("tls: a certificate and a key are required")),
    };
    let verifier = client_ca.map(|pem| verifier(pem)).transpose()?;
    let door =
        |door, verifier: Option<&Arc<dyn ClientCertVerifier>>| -> Result<Arc<ServerConfig>> {
            let builder = ServerConfig::builder_with_provider(provider())
                .with_protocol_versions(VERSIONS)
                .map_err(|error| Error::invalid(format!("tls: {error}")))?;
            let builder = match verifier {
                Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
                None => builder.with_no_client_auth(),
            };
            let chain = certificates("tls.cert_file", cert)?;
            let mut config = builder
                .with_single_cert(chain, key("tls.key_file", private)?)
                .map_err(|error| Error::invalid(format!("certificate and key: {error}")))?;
            config.alpn_protocols = protocols(door);
            Ok(Arc::new(config))
        };
    Ok(Doors {
        grpc: door(Door::Grpc, verifier.as_ref())?,
        bulk: door(Door::Bulk, verifier.as_ref())?,
        http: door(Door::Http, None)?,
        resp: door(Door::Resp, verifier.as_ref())?,
    })
}

fn verifier(pem: &[u8]) -> Result<Arc<dyn ClientCertVerifier>> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("tls.client_ca_file", pem)? {
        roots
            .add(certificate)
            .map_err(|error| Error::invalid(format!("tls.client_ca_file: {error}")))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider())
        .build()
        .map_err(|error| Error::invalid(format!("tls.client_ca_file: {error}")))
}
