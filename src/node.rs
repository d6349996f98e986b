//! What the data paths and the calls work on: one node's store, with what its clients own.

use std::sync::Arc;

use kvstrata_tiers::{
    error::Result,
    namespace::{Namespace, NamespaceTable},
    stack::{Pin, Stack},
};
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    auth::Bearer,
    events::subscribe::Subscriptions,
    id::SessionId,
    lease::LeaseTable,
    metrics::ServerMetrics,
    openers::Openers,
    session::{Session, SessionTable},
    tasks::Tasks,
};

/// The leases of a server: what they hold are pins of the store.
pub type Leases = LeaseTable<Vec<Pin>>;
/// The sessions of a server.
pub type Sessions = SessionTable<Vec<Pin>>;

/// What the calls work on.
#[derive(Debug)]
pub struct Node {
    /// Name in member lists and stats.
    pub name: String,
    /// The members of the cluster; this one alone for now.
    pub members: Members,
    /// The store.
    pub stack: Stack,
    /// The namespaces.
    pub namespaces: Arc<NamespaceTable>,
    /// Who opened them.
    pub openers: Openers,
    /// What engines have told of blocks.
    pub(crate) told: Subscriptions,
    /// The leases.
    pub leases: Leases,
    /// The sessions.
    pub sessions: Sessions,
    /// The server's metrics.
    pub metrics: ServerMetrics,
    /// Background work.
    pub tasks: Tasks,
    /// Bounds the prefetches that run at a time.
    pub prefetches: Arc<Semaphore>,
    /// Bounds the blocks that all of them load at a time, so that tiers have turns left for gets.
    pub prefetch_loads: Arc<Semaphore>,
    /// When the server started.
    pub started: Instant,
}

/// The members of the cluster, as clients are told.
#[derive(Debug, Clone, Default)]
pub struct Members {
    /// Grows with every change.
    pub epoch: u64,
    /// Index of this node.
    pub this: u32,
    /// Every node.
    pub list: Vec<Member>,
}

/// One member of the cluster.
#[derive(Debug, Clone)]
pub struct Member {
    /// Stable within one list.
    pub index: u32,
    /// StatefulSet pod name or host name.
    pub name: String,
    /// `host:port` of the gRPC contract.
    pub endpoint: String,
    /// Empty when unknown.
    pub zone: String,
    /// Its bulk port; none if it has none.
    pub bulk: Option<BulkPort>,
}

/// Where a member's bulk port is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BulkPort {
    /// `host:port`; empty if it does not listen on TCP.
    pub tcp: String,
    /// Path of the Unix socket on the member's host; empty if there is none.
    pub unix: String,
    /// What its welcome will say, so that a client knows whom it has reached.
    pub instance: [u8; 16],
}

impl Node {
    /// The namespace with this id, if it is the tenant's: those of others do not exist for it.
    pub(crate) fn namespace(&self, bearer: &Bearer, id: &[u8]) -> Result<Arc<Namespace>> {
        self.namespaces.get_for(bearer.tenant(), id)
    }

    /// The open session with this id, if it is the tenant's: those of others do not exist for it.
    pub(crate) fn session(&self, bearer: &Bearer, id: SessionId) -> Result<Arc<Session>> {
        self.sessions.find(bearer.tenant(), id)
    }
}
