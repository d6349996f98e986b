//! What the data paths and the calls work on: one node's store, with what its clients own.

use std::sync::Arc;

use kvstrata_tiers::{
    error::Result,
    namespace::{Namespace, NamespaceTable},
    stack::{Pin, Stack},
};
use tokio::{sync::Semaphore, time::Instant};

use crate::{
    advice::Advice,
    auth::{Bearer, RateTable},
    changes::Changes,
    cluster::{feed::Feed, membership::Membership, peers::Peers},
    console::Console,
    costs::{Costs, Locality, Via},
    drain::Drain,
    events::subscribe::Subscriptions,
    id::SessionId,
    lease::LeaseTable,
    members::Roster,
    metrics::ServerMetrics,
    openers::Openers,
    schemes::Schemes,
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
    /// The members of the cluster, as they change.
    pub roster: Roster,
    /// The others, as lookups reach them.
    pub peers: Peers,
    /// What these are told of the blocks here.
    pub feed: Feed,
    /// How that is known, and what the others are told.
    pub membership: Membership,
    /// The store.
    pub stack: Stack,
    /// What changes in it, for those who tell others.
    pub changes: Changes,
    /// What loading from it costs.
    pub costs: Costs,
    /// The names that others have for its blocks.
    pub schemes: Schemes,
    /// The namespaces.
    pub namespaces: Arc<NamespaceTable>,
    /// What tenants may do in a second, and have done.
    pub rates: Arc<RateTable>,
    /// Who opened them.
    pub openers: Openers,
    /// What is kept for routers.
    pub advice: Advice,
    /// What engines have told of blocks.
    pub(crate) told: Subscriptions,
    /// The leases.
    pub leases: Leases,
    /// The sessions.
    pub sessions: Sessions,
    /// What is kept for the console.
    pub(crate) console: Console,
    /// The server's metrics.
    pub metrics: ServerMetrics,
    /// How it leaves.
    pub drain: Drain,
    /// Background work.
    pub tasks: Tasks,
    /// Bounds the prefetches that run at a time.
    pub prefetches: Arc<Semaphore>,
    /// Bounds the blocks that all of them load at a time, so that tiers have turns left for gets.
    pub prefetch_loads: Arc<Semaphore>,
    /// When the server started.
    pub started: Instant,
}

impl Node {
    /// The namespace with this id, if it is the tenant's: those of others do not exist for it.
    pub(crate) fn namespace(&self, bearer: &Bearer, id: &[u8]) -> Result<Arc<Namespace>> {
        self.namespaces.get_for(bearer.tenant(), id)
    }

    /// How far the blocks of a namespace travel: as it was told by whoever opened it last.
    pub(crate) fn locality_of(&self, namespace: &Namespace, via: Via) -> Locality {
        self.costs.note_via(via);
        self.openers
            .with_latest(namespace.index(), |node, zone| self.costs.locality_of(via, node, zone))
    }

    /// The open session with this id, if it is the tenant's: those of others do not exist for it.
    pub(crate) fn session(&self, bearer: &Bearer, id: SessionId) -> Result<Arc<Session>> {
        self.sessions.find(bearer.tenant(), id)
    }
}
