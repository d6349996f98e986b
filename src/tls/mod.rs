//! TLS for everything that listens on TCP, and for whoever connects to it: the only room that names
//! rustls.
//!
//! ```text
//! gRPC, bulk, HTTP, RESP  ->  Stream: the handshake is made by whoever first reads or writes
//! client            ->  Dialer: one for gRPC and bulk
//! ```
//! - TLS 1.3 alone: every client is ours or a recent one. The protocol of each door is agreed on
//!   (ALPN), so that a client of one is not taken for a client of another.
//! - A certificate that has changed is used by the next connection; those that are open stay.
//! - A client that speaks no TLS is told so at once, in its own protocol.
//! - Probes and metrics come from kubelet and Prometheus, which have no certificate of ours: the CA of
//!   clients is asked for by gRPC, bulk and RESP only.

mod client;
mod generate;
mod server;
mod stream;

use kvstrata_tiers::error::{Error, Result};
use rustls::{
    SupportedProtocolVersion,
    crypto::{CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    version::TLS13,
};

pub use self::client::TlsOptions;
pub(crate) use self::{
    client::Dialer,
    generate::{Generated, write_private},
    server::{Tls, watched},
    stream::{Entry, Stream},
};
use crate::metrics::Door;

/// The versions that are spoken.
static VERSIONS: &[&SupportedProtocolVersion] = &[&TLS13];

fn provider() -> std::sync::Arc<CryptoProvider> {
    std::sync::Arc::new(aws_lc_rs::default_provider())
}

/// The protocol that is spoken at a door, as both sides name it; clients of RESP name none.
fn protocols(door: Door) -> Vec<Vec<u8>> {
    let name = match door {
        Door::Grpc | Door::Admin => "h2",
        Door::Bulk => "kvstrata-bulk",
        Door::Http => "http/1.1",
        Door::Resp => return Vec::new(),
    };
    vec![name.as_bytes().to_vec()]
}

/// The certificates in a PEM text.
fn certificates(field: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let read: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match read {
        Ok(found) if !found.is_empty() => Ok(found),
        Ok(_) => Err(Error::invalid(format!("{field}: no certificate found, PEM required"))),
        Err(error) => Err(Error::invalid(format!("{field}: a certificate is broken: {error}"))),
    }
}

/// The private key in a PEM text. What is wrong with it is not told in detail: it might be quoted.
fn key(field: &str, pem: &[u8]) -> Result<PrivateKeyDer<'static>> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|_may_quote_it| {
        Error::invalid(format!(
            "{field}: no private key found, PEM required (PKCS8, PKCS1 or SEC1)"
        ))
    })
}
