//! What a server is made of: one node of all its components, of which nothing was asked yet.

use std::sync::Arc;

use kvstrata_tiers::{
    namespace::NamespaceTable, nvme::NvmeStore, object::ObjectStore, stack::Stack,
    store::BlockStore,
};
use prometheus_client::registry::Registry;
use tokio::{sync::Semaphore, time::Instant};

use super::ServeError;
use crate::{
    addresses::{host_name, node_name},
    advice::Advice,
    budget::Budget,
    changes::Changes,
    config::Config,
    costs::{Costs, Place},
    events::subscribe::Subscriptions,
    lease::LeaseLimits,
    limits::{LEASED_SHARE_DIVISOR, PREFETCH_LOADS_MAX, PREFETCHES_MAX},
    members::Members,
    metrics::ServerMetrics,
    node::{Leases, Node, Sessions},
    nvme::NvmeTier,
    object::{self, Below, ObjectTier},
    openers::Openers,
    schemes::Schemes,
    shm::Arena,
    tasks::Tasks,
};

/// The node that works on a store with its namespaces.
pub(super) fn node(
    config: &Config,
    budget: &Budget,
    members: Members,
    (stack, namespaces): (Stack, Arc<NamespaceTable>),
    metrics: &ServerMetrics,
) -> Result<Node, ServeError> {
    let leases = leases(lease_limits(config, budget), metrics, &stack);
    Ok(Node {
        name: node_name(config),
        members,
        changes: Changes::new(stack.clone()),
        costs: Costs::new(stack.clone(), place(config), metrics.costs.clone()),
        schemes: Schemes::new(budget.schemes, metrics.schemes.clone()),
        stack,
        namespaces,
        openers: Openers::default(),
        advice: Advice::new()?,
        told: Subscriptions::new(&config.events),
        sessions: Sessions::new(leases.clone(), metrics.clone()),
        leases,
        tasks: Tasks::new(),
        prefetches: Arc::new(Semaphore::new(PREFETCHES_MAX)),
        prefetch_loads: Arc::new(Semaphore::new(PREFETCH_LOADS_MAX)),
        started: Instant::now(),
        metrics: metrics.clone(),
    })
}

/// The colder tiers, hot to cold.
pub(super) fn stores(
    nvme: Option<&NvmeTier>,
    object: Option<&ObjectTier>,
) -> Vec<Arc<dyn BlockStore>> {
    let nvme = nvme.map(|tier| Arc::<NvmeStore>::clone(&tier.store) as Arc<dyn BlockStore>);
    let object = object.map(|tier| Arc::<ObjectStore>::clone(&tier.store) as Arc<dyn BlockStore>);
    nvme.into_iter().chain(object).collect()
}

/// The object tier, if there is one.
pub(super) fn open_object(
    config: &Config,
    node: &str,
    nvme: Option<&NvmeTier>,
    namespaces: &Arc<NamespaceTable>,
    registry: &mut Registry,
) -> Result<Option<ObjectTier>, ServeError> {
    // Without nvme the configuration allows none.
    let Some(NvmeTier { store, directory, .. }) = nvme else { return Ok(None) };
    Ok(object::open(config, node, Below { nvme: store, directory, namespaces }, registry)?)
}

/// What clients on this host are shown, if they are.
pub(super) fn arena(config: &Config, node: &Node) -> Result<Option<Arena>, ServeError> {
    let pinned_bytes = node.metrics.shared_pinned_bytes.clone();
    let shown = config.server.shared_memory.then(|| Arena::new(&node.stack, pinned_bytes));
    Ok(shown.transpose()?)
}

/// Where this node is, for those who are told what loading from it costs.
fn place(config: &Config) -> Place {
    let Config { server, node, .. } = config;
    let shared_memory = server.shared_memory && server.bulk_unix.given().is_some();
    Place { node: host_name(config), zone: node.zone.clone(), shared_memory }
}

/// No leases yet; what they hold is given back to the store.
fn leases(limits: LeaseLimits, metrics: &ServerMetrics, stack: &Stack) -> Leases {
    let giver = stack.clone();
    Leases::new(limits, metrics.clone(), move |pins| giver.unpin(pins))
}

fn lease_limits(config: &Config, budget: &Budget) -> LeaseLimits {
    let given = config.lease.session_bytes_max.given();
    LeaseLimits {
        ttl_default: config.lease.ttl_default.0,
        ttl_max: config.lease.ttl_max.0,
        session_bytes_max: given.map_or(budget.dram / 2, |bytes| bytes.0),
        total_bytes_max: budget.dram / LEASED_SHARE_DIVISOR * 3,
    }
}
