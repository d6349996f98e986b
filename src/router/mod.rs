//! The reference router: a reverse proxy of OpenAI's completions in front of engines, which sends each
//! prompt to the engine that needs least for it.
//!
//! ```text
//! client -> proxy -> plan: tokens, chain ----> devices   what engines publish (events)
//!              |           what could be done   tiers    what kvstrata says
//!              |     decide: score, pick        slots    what is under way
//!              v
//!           upstream -> engine, its answer passed on as it comes
//! ```
//! Invariants
//! - A request never waits for kvstrata longer than the deadline, and never fails for it: without an answer it is decided by
//!   devices and load. Without tokens it is decided by load. Without load, by turn.
//! - What engine and client say to each other is passed on byte by byte, as it comes; that a client has
//!   gone ends the request at the engine.
//! - A request is sent a second time only if the first engine has seen nothing of it.
//!
//! It knows kvstrata as any router could: by the router contract, through the client. It keeps nothing: a
//! second one beside it, or a restart, knows what engines tell from then on.
//!
//! Why not a library for gateways: what a gateway needs besides (identity, quotas, retries by policy) is not what is shown here, which is
//! how tiers belong into the decision.

mod chain;
mod decide;
mod devices;
mod engine;
mod kvstrata;
mod listen;
mod metrics;
mod pages;
mod plan;
mod proxy;
mod request;
mod slots;
mod spec;
mod tiers;
mod tokens;
mod upstream;
mod watched;

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::{net::TcpListener, sync::Semaphore, time::timeout};
use tracing::{info, warn};

pub(crate) use self::{
    decide::Mode,
    spec::{ENGINES_MAX, EngineSpec},
};
use self::{
    devices::Devices, engine::Engine, kvstrata::Kvstrata, listen::ClientListener,
    metrics::RouterMetrics, tiers::Tiers, tokens::Tokens, upstream::Upstream,
};
use crate::{
    client::ClientOptions,
    events::subscribe::{Listener, batch::Batch, follow},
    metrics::EventMetrics,
    readiness::Readiness,
    tasks::Tasks,
};

/// Requests at a time, of all clients: each may hold a body while its engine is chosen.
const REQUESTS_MAX: usize = 4096;
/// For requests that are under way when the router should end: long answers take minutes, and
/// Kubernetes gives half a minute unless told otherwise.
const DRAIN_GRACE: Duration = Duration::from_secs(25);
/// For tasks to end after that.
const CLOSE_GRACE: Duration = Duration::from_secs(2);

/// What a router is started with.
#[derive(Debug)]
pub(crate) struct Setup {
    /// Where it listens.
    pub(crate) listen: SocketAddr,
    /// The engines.
    pub(crate) engines: Vec<EngineSpec>,
    /// How they are chosen.
    pub(crate) mode: Mode,
    /// The server whose tiers are asked, if there is one, and how.
    pub(crate) tiers: Option<(String, ClientOptions)>,
    /// How long it may take to answer.
    pub(crate) tiers_deadline: Duration,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Router {
    engines: Vec<Engine>,
    devices: Devices,
    mode: Mode,
    tiers: Option<Arc<dyn Tiers>>,
    tiers_deadline: Duration,
    upstream: Upstream,
    tokens: Tokens,
    /// The number of the last decision. Held while one is made, so that each sees those before it.
    turn: Mutex<u64>,
    places: Arc<Semaphore>,
    metrics: RouterMetrics,
    readiness: Readiness,
    tasks: Tasks,
}

impl Router {
    /// Everything, at rest.
    fn new(setup: &Setup, tiers: Option<Arc<dyn Tiers>>, registry: &mut Registry) -> Self {
        let upstream = Upstream::new();
        let names = setup.engines.iter().map(|spec| spec.name.clone());
        Self {
            metrics: RouterMetrics::register(registry, names),
            engines: setup.engines.iter().cloned().map(Engine::new).collect(),
            devices: Devices::new(setup.engines.len()),
            mode: setup.mode,
            tiers,
            tiers_deadline: setup.tiers_deadline,
            tokens: Tokens::new(upstream.clone()),
            upstream,
            turn: Mutex::new(0),
            places: Arc::new(Semaphore::new(REQUESTS_MAX)),
            readiness: Readiness::new(),
            tasks: Tasks::new(),
        }
    }

    /// Has engines watched and listened to.
    fn start(self: &Arc<Self>) {
        for (number, engine) in self.engines.iter().enumerate() {
            let (router, stop) = (Arc::clone(self), self.tasks.stop_token());
            self.tasks.spawn("engine", async move {
                let Some(engine) = router.engines.get(number) else { return };
                stop.run_until_cancelled(engine.watch(&router.upstream)).await.unwrap_or_default();
            });
            let Some(endpoint) = engine.spec.events.clone() else { continue };
            let listener = DeviceListener { router: Arc::clone(self), engine: number };
            let stop = self.tasks.stop_token();
            self.tasks.spawn("events", async move {
                stop.run_until_cancelled(follow(endpoint, listener)).await.unwrap_or_default();
            });
        }
    }
}

/// Notes what one engine tells of its device.
struct DeviceListener {
    router: Arc<Router>,
    engine: usize,
}

impl Listener for DeviceListener {
    fn take(&mut self, batch: &Batch) {
        let wanted = self.router.engines.get(self.engine).and_then(|engine| engine.spec.rank);
        if wanted.is_some() && batch.rank.is_some() && wanted != batch.rank {
            return;
        }
        let took = self.router.devices.take(self.engine, batch);
        self.metrics().told_blocks.inc_by(took.told);
        self.metrics().described_blocks.inc_by(took.placed);
    }

    fn lost(&mut self) {
        self.router.devices.forget(self.engine);
    }

    fn metrics(&self) -> &EventMetrics {
        &self.router.metrics.events
    }
}

/// Runs a router until `shutdown` resolves, then lets what is under way end; calls `ready` once with the
/// address when it listens.
///
/// # Errors
/// The address could not be listened on.
///
/// # Cancel safety
/// Not safe: requests under way would be cut.
pub(crate) async fn run(
    setup: Setup,
    shutdown: impl Future<Output = ()>,
    ready: impl FnOnce(SocketAddr),
) -> io::Result<()> {
    let listener = TcpListener::bind(setup.listen).await?;
    let deadline = setup.tiers_deadline;
    let tiers = setup.tiers.clone();
    let tiers = tiers.map(|(at, options)| Arc::new(Kvstrata::new(at, options, deadline)));
    let mut registry = Registry::default();
    let asked = tiers.clone().map(|tiers| tiers as Arc<dyn Tiers>);
    let router = Arc::new(Router::new(&setup, asked, &mut registry));
    router.start();
    if let Some(tiers) = tiers {
        let stop = router.tasks.stop_token();
        router.tasks.spawn("kvstrata", async move {
            stop.run_until_cancelled(tiers.connect()).await.unwrap_or_default();
        });
    }
    let at = listener.local_addr()?;
    let listener = ClientListener::new(listener, router.metrics.connections.clone());
    info!(%at, engines = setup.engines.len(), mode = setup.mode.name(), "router listens");
    let pages = pages::routes(Arc::clone(&router), Arc::new(registry));
    let tasks = router.tasks.clone();
    let closing = tasks.stop_token().child_token();
    let stop = closing.clone();
    let serving = axum::serve(listener, pages)
        .with_graceful_shutdown(async move { stop.cancelled_owned().await });
    let mut serving = std::pin::pin!(async { serving.await });
    ready(at);
    tokio::select! {
        served = &mut serving => return served,
        () = shutdown => {}
    }
    router.readiness.drain();
    closing.cancel();
    info!(grace_ms = DRAIN_GRACE.as_millis(), "drain started");
    if timeout(DRAIN_GRACE, serving).await.is_err() {
        warn!("grace is over, requests under way are cut");
    }
    tasks.shutdown(CLOSE_GRACE).await;
    info!("stopped");
    Ok(())
}
