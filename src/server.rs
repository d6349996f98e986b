//! The one place where components meet: builds them in order, serves, and leaves in order.
//!
//! Start: identity, memory, store, listeners, tasks, ready. End: [`drain`], within the grace; then, once
//! the process is asked to end, close the listeners, join the tasks. Liveness and metrics are served until
//! the last step.

mod drain;
mod wiring;

use std::{
    io,
    net::SocketAddr,
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};

use futures_util::{FutureExt, future::FusedFuture};
use kvstrata_tiers::{
    metrics::TierMetrics,
    namespace::NamespaceTable,
    nvme::{NvmeMetrics, NvmeStore, directory::Directory},
    object::ObjectStore,
    stack::Stack,
    store::BlockStore,
    tier::Tier,
};
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::{net::TcpListener, sync::Semaphore};
use tower::util::MapResponseLayer;
use tracing::{error, info, warn};

use crate::{
    addresses::{Addresses, listen, listen_admin, listen_bulk, listen_resp, member, node_name},
    api::{self, Calls, Framed, Guarded, incoming},
    bulk::{self, Bulk},
    client::ClientOptions,
    cluster::{self, membership::Gossip, second},
    config::{Config, Events, Problems},
    console,
    events::{
        publish::{self, Publishers},
        subscribe,
    },
    http,
    identity_file::{self, IdentityError},
    limits::{BULK_CONNECTIONS_MAX, CONNECTIONS_MAX},
    members::Roster,
    metrics::{self, Door, ServerMetrics, StoreGauges},
    node::Node,
    nvme::{self, NvmeError, NvmeTier},
    object::ObjectTier,
    readiness::{Latch, Readiness},
    resp, schemes,
    shm::Arena,
    tasks::Tasks,
    trust::Trust,
};

/// Time after the drain for connections to close and tasks to end: they have nothing left to do but
/// to write what nvme has accepted.
const CLOSE_GRACE: Duration = Duration::from_secs(6);
/// Time for connections to close after that: longer than a round trip, shorter than the above.
const CONNECTIONS_GRACE: Duration = Duration::from_secs(1);

/// Why a server did not start or had to stop.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The configuration cannot work on this machine.
    #[error(transparent)]
    Config(#[from] Problems),
    /// There is no secret.
    #[error(transparent)]
    Identity(#[from] IdentityError),
    /// Tokens or certificates cannot be used.
    #[error(transparent)]
    Trust(kvstrata_tiers::error::Error),
    /// The store did not open.
    #[error("open the store: {0}")]
    Store(#[from] kvstrata_tiers::error::Error),
    /// The nvme tier did not open.
    #[error(transparent)]
    Nvme(#[from] NvmeError),
    /// An address could not be listened on.
    #[error("{key}: listen on {address}: {source}")]
    Listen {
        /// The dotted key of the address.
        key: &'static str,
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The reflection service could not be built.
    #[error("build the reflection service: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// A Unix socket could not be listened on.
    #[error("{key}: listen on {path}: {source}")]
    ListenUnix {
        /// The dotted key of the path.
        key: &'static str,
        /// Its path.
        path: String,
        /// Why not.
        source: io::Error,
    },
    /// A task that must run ended.
    #[error("a critical task ended; the log says which")]
    Failed,
}

/// A server that is bound and built, but does not serve yet.
#[derive(Debug)]
pub struct Server {
    addresses: Addresses,
    drain_grace: Duration,
    /// How other members are reached.
    access: ClientOptions,
    events: Events,
    publishers: Publishers,
    grpc: Option<TcpListener>,
    http: Option<TcpListener>,
    bulk: Vec<bulk::Listener>,
    resp: Option<resp::Listener>,
    admin: Option<api::admin::Listener>,
    gossip: Option<Gossip>,
    /// What the Unix socket of the bulk port shows.
    arena: Option<Arena>,
    /// Bytes that large requests of the bulk port may take together.
    staging: u64,
    node: Arc<Node>,
    calls: Calls,
    trust: Trust,
    gauges: StoreGauges,
    registry: Arc<Registry>,
    readiness: Readiness,
    starting: Option<Latch>,
    nvme: Option<NvmeTier>,
    object: Option<ObjectTier>,
}

/// The colder tiers while their tasks run.
struct Colder {
    nvme: Arc<NvmeStore>,
    object: Option<Arc<ObjectStore>>,
    _directory: Directory,
}

impl Server {
    /// Builds the components and binds the listeners.
    ///
    /// # Errors
    /// If the configuration does not fit the machine, there is no secret, or an address is taken.
    ///
    /// # Cancel safety
    /// Safe: what was bound is closed.
    pub async fn bind(config: &Config) -> Result<Self, ServeError> {
        let readiness = Readiness::new();
        let starting = readiness.latch("listeners");
        let (secret, origin) = identity_file::load_or_generate(&config.identity)?;
        let gossip = wiring::gossip(config, &node_name(config), (&secret, origin)).await?;
        let namespaces = Arc::new(NamespaceTable::new(secret, config.identity.shared_tenant));
        let budget = wiring::budget(config)?;
        let (grpc, grpc_at) = listen("server.grpc_listen", config.server.grpc_listen).await?;
        let (http, http_at) = listen("server.http_listen", config.server.http_listen).await?;
        let mut registry = Registry::default();
        let ours = registry.sub_registry_with_prefix(metrics::PREFIX);
        let server_metrics = ServerMetrics::register(ours);
        let gauges = StoreGauges::register(ours);
        let mut trust = Trust::load(config, &server_metrics.trust).map_err(ServeError::Trust)?;
        wiring::know_nodes(&trust.gate, gossip.as_ref())?;
        let (bulk, bulk_at, bulk_port) = listen_bulk(config, grpc_at, &trust).await?;
        let (resp, resp_at) = listen_resp(config, &trust).await?.unzip();
        let (admin, admin_at) = listen_admin(config, &trust).await?.unzip();
        let publishers = wiring::publishers(config, &budget).await?;
        let tier_metrics = TierMetrics::register(&mut registry);
        let name = node_name(config);
        let nvme = nvme::open(config, &budget, &name, &namespaces, || {
            NvmeMetrics::register(&mut registry)
        })?;
        let object = wiring::open_object(config, &name, nvme.as_ref(), &namespaces, &mut registry)?;
        let colder = wiring::stores(nvme.as_ref(), object.as_ref());
        let stack = Stack::open(
            wiring::stack_config(&budget)?,
            Arc::clone(&namespaces),
            colder,
            tier_metrics,
        )?;

        trust.load_tenants(config, &stack).map_err(ServeError::Trust)?;
        let roster = Roster::alone(member(config, &name, (grpc_at, http_at), bulk_port));
        let namespaces = Arc::clone(&namespaces);
        let (trusted, stored) = ((roster, Arc::clone(trust.gate.rates())), (stack, namespaces));
        let node = wiring::node(config, &budget, trusted, stored, &server_metrics)?;
        Ok(Self {
            addresses: Addresses {
                grpc: grpc_at,
                http: http_at,
                bulk: bulk_at,
                resp: resp_at,
                admin: admin_at.flatten(),
                gossip: gossip.as_ref().map(|gossip| gossip.at),
            },
            access: wiring::access(config, gossip.as_ref()),
            gossip,
            drain_grace: config.server.drain_grace.0,
            events: config.events.clone(),
            publishers,
            grpc: Some(grpc),
            http: Some(http),
            bulk,
            resp,
            admin,
            arena: wiring::arena(config, &node)?,
            staging: budget.staging,
            node: Arc::new(node),
            calls: Calls::new(server_metrics),
            trust,
            gauges,
            registry: Arc::new(registry),
            readiness,
            starting: Some(starting),
            nvme,
            object,
        })
    }

    /// Where it can be reached, with the ports that were chosen.
    #[must_use]
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Serves until `shutdown` resolves, then drains; calls `ready` once when it serves. What is left
    /// to do then is to drop it, which closes the store and may wait for a disk.
    ///
    /// # Errors
    /// `Failed` if a critical task ended before.
    ///
    /// # Cancel safety
    /// Not safe: tasks would go on without anybody to join them.
    pub async fn serve(
        &mut self,
        shutdown: impl Future<Output = ()>,
        ready: impl FnOnce(Addresses),
    ) -> Result<(), ServeError> {
        self.trust.follow(&self.node.tasks);
        self.spawn_http();
        self.spawn_store_tasks();
        let mut shutdown = pin!(shutdown.fuse());
        let colder = self.start_colder(shutdown.as_mut()).await;
        self.node.schemes.opened_all(&self.node.namespaces);
        let tasks = self.node.tasks.clone();
        let failed = tasks.failed_token();
        // A future that has ended must not be asked again.
        if !shutdown.is_terminated() {
            self.serve_until(shutdown.as_mut(), ready).await?;
        }
        let Self { node, calls, readiness, access, .. } = &*self;
        drain::drain(node, (calls, readiness), access, self.drain_grace).await;
        if !shutdown.is_terminated() {
            // An operator has asked for the drain, and whoever has started the process will end it.
            tokio::select! {
                () = shutdown => {}
                () = failed.cancelled() => {}
            }
        }
        let late = match colder {
            Some(colder) => close(&tasks, &colder).await,
            None => tasks.shutdown(CLOSE_GRACE).await,
        };
        info!(tasks_late = late.len(), "stopped");
        if failed.is_cancelled() { Err(ServeError::Failed) } else { Ok(()) }
    }

    /// Serves until a shutdown, or until a critical task has ended.
    async fn serve_until(
        &mut self,
        shutdown: Pin<&mut impl Future<Output = ()>>,
        ready: impl FnOnce(Addresses),
    ) -> Result<(), ServeError> {
        self.spawn_grpc()?;
        self.spawn_bulk();
        if let Some(listener) = self.resp.take() {
            let (node, gate) = (Arc::clone(&self.node), self.trust.gate.clone());
            resp::start(listener, node, self.calls.clone(), gate);
        }
        subscribe::start(&self.events, &self.node);
        let publishers = std::mem::take(&mut self.publishers);
        publish::start(publishers, &self.node);
        let tasks = &self.node.tasks;
        let copies = second::run(Arc::clone(&self.node), self.access.clone(), tasks.stop_token());
        tasks.spawn("second holders", copies);
        self.starting = None;
        if let Some(gossip) = self.gossip.take() {
            self.node.membership.start(gossip, &self.node);
            cluster::follow_others(&self.node, self.access.clone());
        }
        if let Some(listener) = self.admin.take() {
            api::admin::start(listener, &self.node, &self.calls, &self.trust.gate);
        }
        let Addresses { grpc, http, bulk, resp, admin, gossip } = self.addresses;
        info!(%grpc, %http, ?bulk, ?resp, ?admin, ?gossip, node = self.node.name, "listening");
        ready(self.addresses);
        let failed = self.node.tasks.failed_token();
        tokio::select! {
            () = shutdown => {}
            () = self.node.drain.asked().cancelled() => info!("an operator has the node leave"),
            () = failed.cancelled() => warn!("the node leaves because a critical task ended"),
        }
        Ok(())
    }

    /// Starts the colder tiers and waits until nvme has found what is on the disk, or a shutdown. The
    /// object tier finds what is in the bucket while the node serves already.
    async fn start_colder(
        &mut self,
        shutdown: Pin<&mut impl Future<Output = ()>>,
    ) -> Option<Colder> {
        let NvmeTier { store, writer, directory } = self.nvme.take()?;
        let tasks = &self.node.tasks;
        tasks.spawn_thread_critical("nvme writer", writer.run());
        tokio::select! {
            // A shutdown that is due comes first, also before a disk that has little to be found.
            biased;
            () = shutdown => info!("shutdown before nvme had found what is on the disk"),
            recovered = store.recovered() => if recovered.is_none() {
                warn!("nvme writer ended before it had found what is on the disk");
            },
        }
        let object = self.object.take().map(|ObjectTier { store, tasks: work }| {
            tasks.spawn_critical("object tier", work.run());
            store
        });
        Some(Colder { nvme: store, object, _directory: directory })
    }

    fn spawn_grpc(&mut self) -> Result<(), ServeError> {
        let Some(listener) = self.grpc.take() else { return Ok(()) };
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(kvstrata_proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()?;
        let (health, following) = api::health(self.readiness.watch());
        let gate = &self.trust.gate;
        let router = api::transport()
            .layer(MapResponseLayer::new(api::correct_unreadable))
            .add_service(health)
            .add_service(Guarded::new(reflection, gate.clone()))
            .add_service(Guarded::new(
                Framed::new(Arc::clone(&self.node), self.calls.clone()),
                gate.clone(),
            ))
            .add_service(Guarded::for_nodes(
                api::peer::service(Arc::clone(&self.node), self.calls.clone()),
                gate.clone(),
            ))
            .add_service(Guarded::new(
                api::router::service(Arc::clone(&self.node), self.calls.clone()),
                gate.clone(),
            ));
        let open = self.node.metrics.connections.clone();
        let entry = self.trust.entry(Door::Grpc, incoming::plain_answer());
        let connections = incoming::connections(listener, entry, CONNECTIONS_MAX, open);
        let tasks = &self.node.tasks;
        let stop = tasks.stop_token();
        tasks.spawn_critical("grpc", async move {
            let serving = router.serve_with_incoming_shutdown(connections, stop.cancelled());
            let late = async {
                stop.cancelled().await;
                tokio::time::sleep(CONNECTIONS_GRACE).await;
            };
            tokio::select! {
                served = serving => if let Err(why) = served {
                    error!(error = %why, "gRPC listener failed");
                },
                () = late => info!("connections left open by clients are cut"),
            }
        });
        let stop = tasks.stop_token();
        tasks.spawn("health", async move {
            // Ends with the server; health has nothing to clean up.
            stop.run_until_cancelled(following).await;
        });
        Ok(())
    }

    fn spawn_bulk(&mut self) {
        let (node, calls) = (Arc::clone(&self.node), self.calls.clone());
        let members = node.roster.now();
        let instance = members.bulk().and_then(|port| port.instance.as_ref().try_into().ok());
        let instance = instance.unwrap_or_default();
        let kibibytes = usize::try_from(self.staging / 1024).unwrap_or(usize::MAX);
        let room = Arc::new(Semaphore::new(kibibytes.min(Semaphore::MAX_PERMITS)));
        let open = node.metrics.bulk_connections.clone();
        let places = incoming::Places::new(BULK_CONNECTIONS_MAX, open);
        let gate = self.trust.gate.clone();
        let arena = self.arena.take().map(Arc::new);
        let bulk = Arc::new(Bulk { node, calls, gate, instance, room, arena });
        for listener in self.bulk.drain(..) {
            let serving = bulk::serve(listener, Arc::clone(&bulk), places.clone());
            self.node.tasks.spawn_critical("bulk", serving);
        }
    }

    fn spawn_http(&mut self) {
        let Some(listener) = self.http.take() else { return };
        let (gauges, stack) = (self.gauges.clone(), self.node.stack.clone());
        let (costs, node) = (self.node.costs.clone(), Arc::clone(&self.node));
        let refresh = move || {
            gauges.show(&stack);
            node.metrics.tenants.show(node.namespaces.accounts(), &node.rates);
            costs.show();
            node.peers.show(&node.feed);
        };
        let (registry, gate) = (Arc::clone(&self.registry), self.trust.gate.clone());
        let routers = api::RouterService::new(Arc::clone(&self.node), self.calls.clone());
        let shown = (Arc::clone(&self.node), routers);
        let pages = http::router(self.readiness.clone(), registry, gate, refresh, shown);
        let entry = self.trust.entry(Door::Http, http::plain_answer());
        let tasks = &self.node.tasks;
        let stop = tasks.stop_token();
        tasks.spawn_critical("http", async move {
            let stopped = stop.clone().cancelled_owned();
            let listener = http::PageListener::new(listener, entry);
            let serving = axum::serve(listener, pages).with_graceful_shutdown(stopped);
            if let Err(why) = serving.await {
                error!(error = %why, "HTTP listener failed");
            }
        });
    }

    fn spawn_store_tasks(&self) {
        let tasks = &self.node.tasks;
        let (leases, stop) = (self.node.leases.clone(), tasks.stop_token());
        tasks.spawn_critical("lease sweeper", async move { leases.sweep(stop).await });
        let (changes, stop) = (self.node.changes.clone(), tasks.stop_token());
        tasks.spawn_critical("changes", async move { changes.run(stop).await });
        schemes::start(&self.node);
        console::start(&self.node);
        let stack = self.node.stack.clone();
        if stack.has_tier(Tier::Nvme) {
            let (stack, stop) = (stack.clone(), tasks.stop_token());
            tasks.spawn_critical("cleaner", async move { stack.clean(stop.cancelled()).await });
        }
        // Clearing memory takes a core for as long as there is memory: requests come first.
        tasks.spawn_idle(
            "pre-touch",
            move |stop| {
                while !stop.is_cancelled() && stack.pre_touch_step() {}
            },
        );
    }
}

/// Ends the tasks and the colder tiers, whose tasks end when what they have accepted is written.
async fn close(tasks: &Tasks, colder: &Colder) -> Vec<&'static str> {
    let object = async {
        if let Some(object) = &colder.object
            && let Err(error) = object.close().await
        {
            warn!(%error, "object tier not closed well: the next start finds what it left");
        }
    };
    let (late, closed, ()) = tokio::join!(tasks.shutdown(CLOSE_GRACE), colder.nvme.close(), object);
    if let Err(error) = closed {
        warn!(%error, "nvme not closed well: the next start reads what it left");
    }
    late
}

#[cfg(all(test, feature = "rocksdb"))]
mod tests;
