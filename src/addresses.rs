//! Where a node listens, and what it tells others of it.

use std::{io, net::SocketAddr, path::Path};

use bytes::Bytes;
use serde::Serialize;
use tokio::net::TcpListener;

use crate::{
    api::admin,
    bulk,
    config::{AdminAddress, Auto, Config, PathText},
    id,
    members::{BulkPort, Member, this_machine},
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
    /// The admin listener, if it listens on TCP.
    pub admin: Option<SocketAddr>,
    /// Gossip, over UDP, if there is any.
    pub gossip: Option<SocketAddr>,
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
        let failed = |source| unix_failed("server.bulk_unix", path, source);
        let (listener, file) = bulk::listen_unix(path).await.map_err(failed)?;
        listeners.push(bulk::Listener::Unix(listener, file));
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

/// Listens for operators, if that is asked for; returns its address on TCP.
pub(crate) async fn listen_admin(
    config: &Config,
    trust: &Trust,
) -> Result<Option<(admin::Listener, Option<SocketAddr>)>, ServeError> {
    const KEY: &str = "server.admin_listen";
    match config.server.admin_address() {
        None => Ok(None),
        Some(AdminAddress::Tcp(address)) => {
            let (tcp, at) = listen(KEY, address).await?;
            Ok(Some((admin::Listener::Tcp(tcp, trust.plain_entry(Door::Admin)), Some(at))))
        }
        Some(AdminAddress::Unix(path)) => {
            let failed = |source| unix_failed(KEY, &path, source);
            let (unix, file) = bulk::listen_unix(&path).await.map_err(failed)?;
            admin::keep_private(&file).map_err(failed)?;
            Ok(Some((admin::Listener::Unix(unix, file), None)))
        }
    }
}

fn unix_failed(key: &'static str, path: &Path, source: io::Error) -> ServeError {
    ServeError::ListenUnix { key, path: path.display().to_string(), source }
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

/// The `host:port` that other nodes reach this one's gossip at.
pub(crate) fn gossip_advertised(config: &Config, name: &str, listening: SocketAddr) -> String {
    match &config.cluster.advertise {
        Auto::Given(endpoint) => endpoint.clone(),
        Auto::Auto if listening.ip().is_unspecified() => {
            let (host, _) = advertised(config, name, listening);
            format!("{host}:{}", listening.port())
        }
        Auto::Auto => listening.to_string(),
    }
}

/// What others are told of this node.
pub(crate) fn member(
    config: &Config,
    name: &str,
    (grpc, http): (SocketAddr, SocketAddr),
    bulk: Option<BulkPort>,
) -> Member {
    let (host, endpoint) = advertised(config, name, grpc);
    Member {
        name: name.to_owned(),
        endpoint,
        zone: config.node.zone.clone(),
        host: host_name(config),
        bulk,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        http: format!("{host}:{}", http.port()),
        ..Member::default()
    }
}
