//! What an operator can decide, as plain data.
//!
//! One source order: defaults, then the file (TOML), then the environment (`KV_` and the upper-case
//! dotted key with `__` between levels, e.g. `KV_SERVER__GRPC_LISTEN`), then flags. A key that does
//! not exist is refused in every source, and every problem is reported at once ([`load`]).
//!
//! Nothing here is a handle: components are built from these values in `server`. Few knobs: a number
//! of which we cannot say when an operator would change it is a constant beside the code it limits.
//! No setting can be changed while the server runs; a restart is quick and drains first. The files that
//! `auth` and `tls` name may change, and are read again.

mod admin;
mod cluster;
mod events;
mod load;
mod nvme;
mod object;
mod publish;
mod trust;
mod units;
mod validate;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

pub use admin::AdminAddress;
pub use cluster::{Cluster, Seeds};
pub(crate) use events::tcp_address;
pub use events::{EventSource, EventSources, Events};
pub use load::{FileSource, Problem, Problems, Sources, env_sources, load};
pub use nvme::{Nvme, NvmeEngine, NvmePlan, NvmeSpace};
pub use object::{Object, ObjectAdmission, ObjectUrl};
pub use publish::{EventTarget, EventTargets, Router};
use serde::{Deserialize, Serialize};
pub use trust::{Auth, Tls};
pub use units::{Address, Auto, Maybe, Period, Size};
#[cfg(test)]
pub(crate) use validate::MEMORY_LIMIT_MIN;
pub(crate) use validate::is_endpoint;

/// How far the bulk port is above that of gRPC: HTTP is between them.
const BULK_PORT_ABOVE: u16 = 2;

/// Everything that can be configured. `docs/configuration.md` is tested against this.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Who this node is.
    pub node: Node,
    /// Where it listens, and how it leaves.
    pub server: Server,
    /// The other nodes.
    pub cluster: Cluster,
    /// The one memory knob.
    pub memory: Memory,
    /// The tier in memory.
    pub dram: Dram,
    /// The tier on nvme.
    pub nvme: Nvme,
    /// The tier in an object store.
    pub object: Object,
    /// What clients may be promised.
    pub lease: Lease,
    /// Where the key of all namespace ids is.
    pub identity: Identity,
    /// Who may come in.
    pub auth: Auth,
    /// How connections are encrypted.
    pub tls: Tls,
    /// Which engines are listened to, and which routers are told.
    pub events: Events,
    /// What is logged.
    pub log: Log,
}

/// Who this node is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Node {
    /// Name in member lists, stats and logs. Default `auto`: the host name, which is the pod name
    /// in a StatefulSet. Up to 253 characters without white space.
    pub name: Auto<String>,
    /// Availability zone, to prefer near copies. Default empty: unknown, nothing is preferred.
    pub zone: String,
    /// The machine that it runs on, as engines there call it: their loads cost less than those of
    /// others. Default `auto`: the host name. In a pod give the name of the Kubernetes node, here and to
    /// engines. Up to 253 characters without white space.
    pub host: Auto<String>,
    /// `host:port` that clients are told to reach this node's gRPC at. Default `auto`: the address
    /// listened on, or, listening on all of them, the node's name with the port.
    pub advertise: Auto<String>,
}

/// Where the server listens, and how it leaves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Server {
    /// Address of the gRPC contract. Default `127.0.0.1:9400`: engines of other hosts need tokens or
    /// [`Auth::allow_anonymous`]. Port 0 takes a free one, which is logged.
    pub grpc_listen: SocketAddr,
    /// Address of `/livez`, `/readyz` and `/metrics`. Default `127.0.0.1:9401`, as for gRPC. Port 0
    /// takes a free one, which is logged.
    pub http_listen: SocketAddr,
    /// Address of the bulk port, over which blocks move at line rate. Default `auto`: that of gRPC, two
    /// ports above it (or a free one, as that). `none`: no bulk port on TCP.
    pub bulk_listen: Auto<Maybe<Address>>,
    /// Path of a Unix socket with the same bulk port, for clients on this host. Default `none`. Who may
    /// connect is decided by its directory.
    pub bulk_unix: Maybe<PathText>,
    /// Whether clients of the Unix socket may map all of dram to read from it. Default `false`: whoever
    /// may connect then sees every block, so they must all trust one another. Not offered while there
    /// are tokens of several tenants.
    pub shared_memory: bool,
    /// Address of the RESP listener, for engines that know no other protocol. Default `none`: it is for
    /// them alone. On loopback or with TLS, unless [`resp_plain`](Self::resp_plain).
    pub resp_listen: Maybe<Address>,
    /// Whether the RESP listener may face other hosts without TLS. Default `false`: tokens and values
    /// would cross the network for everybody to read.
    pub resp_plain: bool,
    /// Where operators reach the node, to have it leave: a loopback address, on which an operator's token is
    /// asked for where there are tokens, or `unix:/PATH`, which this user and root can open. Default `auto`:
    /// loopback, four ports above that of gRPC (or a free one, as that). `none`: it leaves by SIGTERM only.
    pub admin_listen: Auto<Maybe<AdminAddress>>,
    /// Longest time between SIGTERM and the end for requests and sessions to finish, and for what is hottest to be
    /// handed over. Default `20s`: below the 30 s that Kubernetes waits. `0s` ends them at once.
    pub drain_grace: Period,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            grpc_listen: SocketAddr::from(([127, 0, 0, 1], 9400)),
            http_listen: SocketAddr::from(([127, 0, 0, 1], 9401)),
            bulk_listen: Auto::Auto,
            bulk_unix: Maybe::None,
            shared_memory: false,
            resp_listen: Maybe::None,
            resp_plain: false,
            admin_listen: Auto::Auto,
            drain_grace: Period(Duration::from_secs(20)),
        }
    }
}

impl Server {
    /// Whether other hosts can reach a listener.
    #[must_use]
    pub fn listens_beyond_loopback(&self) -> bool {
        let ours = [Some(self.grpc_listen), Some(self.http_listen)];
        let listens = [self.bulk_address(), self.resp_address()];
        ours.into_iter().chain(listens).flatten().any(|address| !address.ip().is_loopback())
    }

    /// Where the RESP listener is; none if there is none.
    #[must_use]
    pub fn resp_address(&self) -> Option<SocketAddr> {
        self.resp_listen.given().map(|address| address.0)
    }

    /// Where the bulk port listens on TCP; none if it does not.
    #[must_use]
    pub fn bulk_address(&self) -> Option<SocketAddr> {
        match &self.bulk_listen {
            Auto::Given(Maybe::None) => None,
            Auto::Given(Maybe::Given(address)) => Some(address.0),
            Auto::Auto => {
                let port = match self.grpc_listen.port() {
                    0 => 0,
                    port => port.checked_add(BULK_PORT_ABOVE)?,
                };
                Some(SocketAddr::new(self.grpc_listen.ip(), port))
            }
        }
    }
}

/// The one memory knob.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Memory {
    /// Memory that the whole process may use, in bytes; how it is divided is printed at start.
    /// Default `auto`: the limit of the cgroup (so that a container needs no setting), else half of
    /// the machine's memory. There is no 0; the least is 128MiB.
    pub limit: Auto<Size>,
}

/// The tier in memory.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dram {
    /// Bytes of block payload kept in memory. Default `auto`: what `memory.limit` leaves after
    /// all other shares. There is no 0; the least is 4MiB.
    pub capacity: Auto<Size>,
}

/// What clients may be promised.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Lease {
    /// How long a lease lasts when the client does not say. Default `30s`: longer than an engine
    /// takes from lookup to onload, short enough that a lost client costs little. There is no 0.
    pub ttl_default: Period,
    /// The longest lease a client may ask for; it can be renewed. Default `5m`. There is no 0.
    pub ttl_max: Period,
    /// Bytes that one session may hold under lease. Default `auto`: half of dram, so that one client
    /// cannot keep the others out. `0B` grants no lease at all.
    pub session_bytes_max: Auto<Size>,
}

impl Default for Lease {
    fn default() -> Self {
        Self {
            ttl_default: Period(Duration::from_secs(30)),
            ttl_max: Period(Duration::from_secs(300)),
            session_bytes_max: Auto::Auto,
        }
    }
}

/// Where the key of all namespace ids is.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Identity {
    /// File with the install's secret (64 hex digits), generated on the first start with mode 0600.
    /// Default `auto`: `kvstrata/identity` in the user's configuration directory, outside every data
    /// directory, because whoever has it can compute namespace ids. All nodes share one secret.
    pub secret_file: Auto<PathText>,
    /// Whether tenants that do not trust one another share this node. Default `false`. With `true`,
    /// namespaces with a hash algorithm that can be attacked are refused.
    pub shared_tenant: bool,
}

/// What is logged, to standard error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Log {
    /// `error`, `warn`, `info`, `debug` or `trace`, also per module: `info,kvstrata::api=debug`.
    /// Default `info`: changes of state, never one line per block.
    pub level: String,
    /// `text` for people, `json` for collectors. Default `text`.
    pub format: LogFormat,
}

impl Default for Log {
    fn default() -> Self {
        Self { level: "info".to_owned(), format: LogFormat::Text }
    }
}

/// The form of a log line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object per line.
    Json,
}

/// A path that can be written in a configuration file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathText(pub PathBuf);

impl std::str::FromStr for PathText {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(PathBuf::from(text)))
    }
}

impl std::fmt::Display for PathText {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.display().fmt(f)
    }
}
