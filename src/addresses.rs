//! Where a node listens, and what it tells others of it.

use std::net::SocketAddr;

use bytes::Bytes;
use serde::Serialize;
use tokio::net::TcpListener;

use crate::{
    bulk,
    config::{Auto, Config, PathText},
    id,
    members::{BulkPort, Member, Members, this_machine},
    metrics::Door,
    resp,
    server::ServeError,
    trust::Trust,
};

/// Where a server can be reached: what `--print-addresses` prints.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Addresses {
    /// The gRPC contract.
    pub grpc: SocketAddr,
    /// `/livez`, `/readyz`, `/metrics`.
    pub http: SocketAddr,
    /// The bulk port, if it listens on TCP.
    pub bulk: Option<SocketAddr>,
    /// The RESP listener, if there is one.
    pub resp: Option<SocketAddr>,
}

/// Listens on TCP.
pub(crate) async fn listen(
    key: &'static str,
    address: SocketAddr,
) -> Result<(TcpListener, SocketAddr), ServeError> {
    let failed = |source| ServeError::Listen { key, address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// The name of this node.
pub(crate) fn node_name(config: &Config) -> String {
    match &config.node.name {
        Auto::Given(name) => name.clone(),
        Auto::Auto => this_machine(),
    }
}

/// The machine that this node runs on.
pub(crate) fn host_name(config: &Config) -> String {
    match &config.node.host {
        Auto::Given(host) => host.clone(),
        Auto::Auto => this_machine(),
    }
}

/// Listens on the bulk port; returns its address on TCP, and what clients are told of it.
pub(crate) async fn listen_bulk(
    config: &Config,
    grpc: SocketAddr,
    trust: &Trust,
) -> Result<(Vec<bulk::Listener>, Option<SocketAddr>, Option<BulkPort>), ServeError> {
    let (mut listeners, mut bound) = (Vec::new(), None);
    if let Some(address) = config.server.bulk_address() {
        let (listener, at) = listen("server.bulk_listen", address).await?;
        let entry = trust.entry(Door::Bulk, bulk::plain_answer());
        listeners.push(bulk::Listener::Tcp(listener, entry));
        bound = Some(at);
    }
    let instance: [u8; 16] = id::random_bytes()?;
    let instance = Bytes::copy_from_slice(&instance);
    let mut port = BulkPort { tcp: String::new(), unix: String::new(), instance };
    if let Some(PathText(path)) = config.server.bulk_unix.given() {
        let failed = |source| ServeError::ListenUnix { path: path.display().to_string(), source };
        listeners.push(bulk::listen_unix(path).await.map_err(failed)?);
        port.unix = path.display().to_string();
    }
    if let Some(at) = bound {
        let (host, _) = advertised(config, &node_name(config), grpc);
        port.tcp = format!("{host}:{}", at.port());
    }
    let port = (!listeners.is_empty()).then_some(port);
    Ok((listeners, bound, port))
}

/// Listens for RESP, if that is asked for.
pub(crate) async fn listen_resp(
    config: &Config,
    trust: &Trust,
) -> Result<Option<(resp::Listener, SocketAddr)>, ServeError> {
    let Some(address) = config.server.resp_address() else { return Ok(None) };
    let (tcp, at) = listen("server.resp_listen", address).await?;
    let entry = trust.entry(Door::Resp, resp::plain_answer());
    Ok(Some((resp::Listener { tcp, entry }, at)))
}

/// The host that clients reach this node at, and its `host:port` of gRPC.
fn advertised(config: &Config, name: &str, listening: SocketAddr) -> (String, String) {
    let endpoint = match &config.node.advertise {
        Auto::Given(endpoint) => endpoint.clone(),
        Auto::Auto if listening.ip().is_unspecified() => format!("{name}:{}", listening.port()),
        Auto::Auto => listening.to_string(),
    };
    let host = endpoint.rsplit_once(':').map_or(endpoint.as_str(), |(host, _port)| host);
    (host.to_owned(), endpoint)
}

/// The cluster of this one node.
pub(crate) fn members(
    config: &Config,
    name: &str,
    listening: SocketAddr,
    bulk: Option<BulkPort>,
) -> Members {
    let (_host, endpoint) = advertised(config, name, listening);
    let (name, zone, host) = (name.to_owned(), config.node.zone.clone(), host_name(config));
    let member = Member { index: 0, name, endpoint, zone, host, bulk };
    Members { epoch: 1, answering: 0, list: vec![member] }
}
