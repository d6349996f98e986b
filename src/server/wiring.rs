//! What a server is made of: one node of all its components, of which nothing was asked yet.

use std::sync::Arc;

use kvstrata_tiers::{
    namespace::{NamespaceTable, Secret},
    nvme::NvmeStore,
    object::ObjectStore,
    stack::{Stack, StackConfig},
    store::BlockStore,
};
use prometheus_client::registry::Registry;
use tokio::{net::UdpSocket, sync::Semaphore, time::Instant};
use tracing::{info, warn};

use super::ServeError;
use crate::{
    addresses::{gossip_advertised, host_name, node_name},
    advice::Advice,
    auth::{Gate, RateTable},
    budget::{Budget, Machine},
    changes::Changes,
    client::{ClientOptions, TlsOptions},
    cluster::{
        feed::Feed,
        keys::ClusterKeys,
        membership::{Gossip, Membership},
        peers::Peers,
    },
    config::{Address, Config, Maybe, PathText, Problems, Tls},
    console::Console,
    costs::{Costs, Place},
    drain::Drain,
    events::{
        publish::{self, Publishers},
        subscribe::Subscriptions,
    },
    id,
    identity_file::Origin,
    lease::LeaseLimits,
    limits::{LEASED_SHARE_DIVISOR, PREFETCH_LOADS_MAX, PREFETCHES_MAX},
    members::Roster,
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
    (roster, rates): (Roster, Arc<RateTable>),
    (stack, namespaces): (Stack, Arc<NamespaceTable>),
    metrics: &ServerMetrics,
) -> Result<Node, ServeError> {
    let leases = leases(lease_limits(config, budget), metrics, &stack);
    Ok(Node {
        name: node_name(config),
        roster,
        peers: Peers::new(budget.filters_of_members(), metrics.fanout.clone()),
        feed: Feed::new(budget.index_blocks_max()),
        membership: Membership::default(),
        changes: Changes::new(stack.clone()),
        costs: Costs::new(stack.clone(), place(config), metrics.costs.clone()),
        schemes: Schemes::new(budget.schemes, metrics.schemes.clone()),
        stack,
        namespaces,
        rates,
        openers: Openers::default(),
        advice: Advice::new()?,
        told: Subscriptions::new(&config.events),
        sessions: Sessions::new(leases.clone(), metrics.clone()),
        leases,
        drain: Drain::default(),
        console: Console::new(metrics),
        tasks: Tasks::new(),
        prefetches: Arc::new(Semaphore::new(PREFETCHES_MAX)),
        prefetch_loads: Arc::new(Semaphore::new(PREFETCH_LOADS_MAX)),
        started: Instant::now(),
        metrics: metrics.clone(),
    })
}

/// The socket of gossip, if there is to be any, with the keys that the nodes of a cluster know one another by.
pub(super) async fn gossip(
    config: &Config,
    name: &str,
    (secret, origin): (&Secret, Origin),
) -> Result<Option<Gossip>, ServeError> {
    let Some(&Address(address)) = config.cluster.listen.given() else { return Ok(None) };
    if origin == Origin::Generated {
        warn!(
            "this node has made a new identity secret, and nodes with different ones never meet: give all nodes of \
             the cluster the same file in identity.secret_file"
        );
    }
    let failed = |source| ServeError::Listen { key: "cluster.listen", address, source };
    let socket = UdpSocket::bind(address).await.map_err(failed)?;
    let at = socket.local_addr().map_err(failed)?;
    let cluster = config.cluster.name.clone();
    Ok(Some(Gossip {
        socket,
        at,
        advertise: gossip_advertised(config, name, at),
        keys: ClusterKeys::derive(secret, &cluster),
        cluster,
        seeds: config.cluster.seeds.given().map_or_else(Vec::new, |seeds| seeds.0.clone()),
    }))
}

/// Lets the other nodes in, if there may be any.
pub(super) fn know_nodes(gate: &Gate, gossip: Option<&Gossip>) -> Result<(), ServeError> {
    if let Some(gossip) = gossip {
        gate.know_nodes(&gossip.keys.token)?;
    }
    Ok(())
}

/// How the memory of this machine is divided.
pub(super) fn budget(config: &Config) -> Result<Budget, ServeError> {
    let budget =
        Budget::divide(config, Machine::detect()).map_err(|problem| Problems(vec![problem]))?;
    for line in budget.to_string().lines() {
        info!("{line}");
    }
    Ok(budget)
}

/// The publishers of the configuration, bound.
pub(super) async fn publishers(config: &Config, budget: &Budget) -> Result<Publishers, ServeError> {
    let bound = publish::bind(config, budget.events).await;
    let key = "events.publish";
    bound.map_err(|(address, source)| ServeError::Listen { key, address, source })
}

/// How much the store may take.
pub(super) fn stack_config(budget: &Budget) -> Result<StackConfig, ServeError> {
    Ok(StackConfig {
        dram_bytes: budget.dram,
        index_blocks_max: budget.index_blocks_max(),
        seed: id::random_seed()?,
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

/// How this node reaches other members.
pub(super) fn access(config: &Config, gossip: Option<&Gossip>) -> ClientOptions {
    let token = gossip.map(|gossip| gossip.keys.token.clone());
    let path = |file: &Maybe<PathText>| file.given().map(|file| file.0.clone());
    let Tls { cert_file, key_file, client_ca_file, .. } = &config.tls;
    // Members speak TLS as this node does; where clients show certificates, a node shows its own.
    let tls = path(cert_file).map(|cert| {
        let ca_file = config.tls.peer_ca().map(|file| file.0.clone());
        let client = client_ca_file.given().and_then(|_| Some((cert, path(key_file)?)));
        TlsOptions { ca_file, client, server_name: None }
    });
    ClientOptions { name: node_name(config), token, tls, ..ClientOptions::default() }
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
