//! Who is in the cluster, by gossip: what this node says of itself, and the member list that it makes of the rest.
//!
//! ```text
//!   seeds -> chitchat <- sealed datagrams          node: sessions, engines, tiers
//!               | who lives, what they say           | each second, if it has changed
//!               v                                    v
//!            [view] -> roster (epoch) -> sessions, lookups      "about", "load"
//! ```
//! A process is known by the name of its node and by when it started, its *incarnation*: a restart is another process
//! of the same name, and takes its place at once. One that is silent leaves the list by the failure detector, whose
//! window of one interval makes it a timeout in effect: [`SUSPECTED_AFTER`] intervals of half a second, a little more
//! where heartbeats come rarely. That is two to three seconds: a stall of one second is none, and a kill is known
//! before clients have run into more than a few deadlines.
//!
//! Nothing in here is waited for: a node serves whether there are others or not, and a cluster whose gossip is cut is
//! nodes that are alone.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fmt, io,
    net::SocketAddr,
    sync::Arc,
    time::Duration,
};

use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, NodeState, spawn_chitchat,
};
use tokio::{
    net::UdpSocket,
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::{error, info, warn};

use super::{
    about::{ABOUT_KEY, LOAD_KEY, Load, TierLoad, say_about, say_load},
    keys::ClusterKeys,
    seeds::{Seeds, look_up},
    transport::SealedTransport,
    view::{Alive, Seen, View},
};
use crate::{
    id::random_bytes,
    limits::{
        GOSSIP_INTERVAL, LEAVE_TOLD_AT_ONCE, LOAD_INTERVAL, NAME_TWICE_AFTER, SEEDS_ASK_INTERVAL,
        SEEDS_UNSETTLED_INTERVAL,
    },
    members::{Member, Roster},
    metrics::ClusterMetrics,
    node::Node,
    object::now_unix_ms,
};

/// Intervals of silence after which a member is not listed any more.
const SUSPECTED_AFTER: f64 = 5.0;
/// What an interval between heartbeats is taken for, in a mean of which the last one is a sixth.
const HEARTBEAT_EXPECTED: Duration = Duration::from_millis(500);
/// Longer intervals are gaps, and do not make the detector more patient.
const HEARTBEAT_LONGEST: Duration = Duration::from_secs(1);
/// Time for which processes that have gone are remembered, and asked now and then whether they are back: longer than
/// a partition that a person mends, short enough that one that restarts all the time leaves not many of them.
const REMEMBERED: Duration = Duration::from_secs(600);

/// Where a node gossips, before it does.
#[derive(Debug)]
pub(crate) struct Gossip {
    /// Bound.
    pub(crate) socket: UdpSocket,
    /// The address that it is bound to.
    pub(crate) at: SocketAddr,
    /// `host:port` that the others reach it at.
    pub(crate) advertise: String,
    /// The name of the cluster.
    pub(crate) cluster: String,
    pub(crate) seeds: Vec<String>,
    pub(crate) keys: ClusterKeys,
}

/// What others are told of this node beyond what it says by itself, and what they say of their loads. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Membership {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    draining: watch::Sender<bool>,
    loads: watch::Sender<Arc<BTreeMap<u32, Load>>>,
}

/// The task of a node that gossips.
struct Gossiping {
    node: Arc<Node>,
    own: Member,
    shared: Arc<Shared>,
    chitchat: Arc<ChitchatHandle>,
    view: View,
    /// What was said last.
    load: Load,
    /// Names that several have, since when.
    twice: HashMap<String, Instant>,
}

impl Membership {
    /// Says that this node will go away: at once to some others, who tell the rest. Once said it stays so.
    pub fn leave(&self) {
        self.shared.draining.send_replace(true);
    }

    /// What the other members have to do, by their index in the roster.
    #[must_use]
    pub fn loads(&self) -> Arc<BTreeMap<u32, Load>> {
        Arc::clone(&self.shared.loads.borrow())
    }

    /// Starts to gossip.
    pub(crate) fn start(&self, gossip: Gossip, node: &Arc<Node>) {
        let stop = node.tasks.stop_token();
        let gossiping = gossip_on(gossip, Arc::clone(node), Arc::clone(&self.shared));
        node.tasks.spawn_critical("gossip", async move {
            // Chitchat ends when its handle is dropped.
            stop.run_until_cancelled(gossiping).await;
        });
    }
}

/// Gossips until gossip ends by itself, which it should not.
async fn gossip_on(gossip: Gossip, node: Arc<Node>, shared: Arc<Shared>) {
    let Some((chitchat, seeds)) = begin(gossip, &node).await else { return };
    let chitchat = Arc::new(chitchat);
    let asking = ask_seeds(seeds, Arc::clone(&chitchat), node.metrics.cluster.clone());
    let own = node.roster.now().own().cloned().unwrap_or_default();
    let task = Gossiping {
        node,
        own,
        shared,
        chitchat: Arc::clone(&chitchat),
        view: View::default(),
        load: Load::default(),
        twice: HashMap::new(),
    };
    tokio::select! {
        () = asking => {}
        () = task.run() => {}
        ended = chitchat.termination_watcher() => error!(?ended, "gossip ended by itself"),
    }
}

/// Finds the address that the others are told, and starts chitchat; none if it cannot start.
async fn begin(gossip: Gossip, node: &Node) -> Option<(ChitchatHandle, Seeds)> {
    let Gossip { socket, at, advertise, cluster, seeds, keys } = gossip;
    let advertised = resolve_own(&advertise, at).await;
    let boot = match random_bytes() {
        Ok(boot) => boot,
        Err(error) => {
            error!(%error, "gossip cannot start");
            return None;
        }
    };
    let id = ChitchatId::new(node.name.clone(), now_unix_ms(), advertised);
    let config = ChitchatConfig {
        chitchat_id: id,
        cluster_id: cluster,
        gossip_interval: GOSSIP_INTERVAL,
        listen_addr: at,
        // Ours are resolved more often than chitchat would.
        seed_nodes: Vec::new(),
        failure_detector_config: FailureDetectorConfig::new(
            SUSPECTED_AFTER,
            1,
            HEARTBEAT_LONGEST,
            HEARTBEAT_EXPECTED,
            REMEMBERED,
        ),
        marked_for_deletion_grace_period: REMEMBERED,
        catchup_callback: None,
        extra_liveness_predicate: None,
    };
    let own = node.roster.now().own().cloned().unwrap_or_default();
    let said = vec![
        (ABOUT_KEY.to_owned(), say_about(&own)),
        (LOAD_KEY.to_owned(), say_load(&Load::default())),
    ];
    let metrics = node.metrics.cluster.clone();
    let transport = SealedTransport::new((socket, at), keys, boot, metrics);
    match spawn_chitchat(config, said, &transport).await {
        Ok(chitchat) => {
            info!(%advertised, seeds = seeds.len(), "gossip started");
            Some((chitchat, Seeds::new(seeds, at.is_ipv4())))
        }
        Err(error) => {
            error!(%error, "gossip cannot start");
            None
        }
    }
}

/// The address of `advertise`, for as long as that takes: a pod's own name may resolve later than it runs.
async fn resolve_own(advertise: &str, at: SocketAddr) -> SocketAddr {
    let mut is_told = false;
    loop {
        let found = look_up(advertise.to_owned()).await.and_then(|found| {
            // What listens on IPv6 is reached by either.
            let reachable = found.into_iter().find(|found| found.is_ipv4() || !at.is_ipv4());
            reachable.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
        });
        match found {
            Ok(found) => return found,
            Err(error) if !is_told => {
                warn!(
                    advertise, %error,
                    "this node's own address of gossip does not resolve, so it stays alone; it is tried again \
                     for ever, or set cluster.advertise to host:port that the others reach it at"
                );
                is_told = true;
            }
            Err(_told) => {}
        }
        sleep(SEEDS_UNSETTLED_INTERVAL).await;
    }
}

/// Asks seeds that are no members, for ever.
async fn ask_seeds(mut seeds: Seeds, chitchat: Arc<ChitchatHandle>, metrics: ClusterMetrics) {
    let mut asked_at = None::<Instant>;
    loop {
        let known: HashSet<_> = chitchat
            .with_chitchat(|chitchat| {
                chitchat.live_nodes().map(|id| id.gossip_advertise_addr).collect()
            })
            .await;
        // Those who are alone ask more often.
        let is_alone = known.len() <= 1;
        if is_alone || asked_at.is_none_or(|at| at.elapsed() >= SEEDS_UNSETTLED_INTERVAL) {
            for seed in seeds.next_asked(&known, look_up).await {
                if let Err(error) = chitchat.gossip(seed) {
                    warn!(%error, "gossip has ended");
                    return;
                }
            }
            asked_at = Some(Instant::now());
            metrics.seeds_unresolved.set(gauge(seeds.unresolved()));
        }
        sleep(SEEDS_ASK_INTERVAL).await;
    }
}

impl Gossiping {
    async fn run(mut self) {
        let mut living = self.chitchat.chitchat().lock().await.live_nodes_watcher();
        let mut draining = self.shared.draining.subscribe();
        let mut ticks = interval(LOAD_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                changed = living.changed() => if changed.is_err() { return },
                changed = draining.changed() => {
                    if changed.is_err() { return }
                    self.say_load().await;
                    self.tell_at_once().await;
                }
                _ = ticks.tick() => self.say_load().await,
            }
            let nodes = living.borrow_and_update().clone();
            self.show(&nodes);
        }
    }

    /// Says the load, if it is another than was said.
    async fn say_load(&mut self) {
        let load = load_of(&self.node, *self.shared.draining.borrow());
        if load == self.load {
            return;
        }
        let said = say_load(&load);
        (self.own.engines, self.own.draining) = (load.engines, load.draining);
        self.load = load;
        self.chitchat
            .with_chitchat(|chitchat| chitchat.self_node_state().set(LOAD_KEY, &said))
            .await;
    }

    /// Has some others hear now what has changed.
    async fn tell_at_once(&self) {
        let own = self.chitchat.chitchat_id();
        let told: Vec<_> = self
            .chitchat
            .with_chitchat(|chitchat| {
                let others = chitchat.live_nodes().filter(|id| *id != own);
                others.take(LEAVE_TOLD_AT_ONCE).map(|id| id.gossip_advertise_addr).collect()
            })
            .await;
        for address in told {
            if let Err(error) = self.chitchat.gossip(address) {
                warn!(%error, "gossip has ended");
                return;
            }
        }
    }

    /// Makes the list of those that live.
    fn show(&mut self, nodes: &BTreeMap<ChitchatId, NodeState>) {
        let own = self.chitchat.chitchat_id();
        let alive = nodes.iter().filter(|(id, _)| *id != own).map(|(id, state)| Alive {
            name: &id.node_id,
            generation: id.generation_id,
            about: state.get(ABOUT_KEY),
            load: state.get(LOAD_KEY),
        });
        let Seen { list, loads, left_out, twice } = self.view.list(self.own.clone(), alive);
        let metrics = &self.node.metrics.cluster;
        metrics.members.set(gauge(list.len()));
        metrics.left_out.set(gauge(left_out));
        self.shared.loads.send_replace(Arc::new(loads));
        tell_changes(&self.node.roster, &list);
        self.node.roster.replace(list);
        let epoch = self.node.roster.now().epoch;
        metrics.epoch.set(i64::try_from(epoch).unwrap_or(i64::MAX));
        self.warn_of(twice);
    }

    /// Of two nodes with one name, once that is no restart.
    fn warn_of(&mut self, twice: Vec<String>) {
        let now = Instant::now();
        self.twice.retain(|name, _since| twice.contains(name));
        for name in twice {
            self.twice.entry(name).or_insert(now);
        }
        let lasting = self.twice.iter().filter(|(_, since)| since.elapsed() >= NAME_TWICE_AFTER);
        let lasting: Vec<_> = lasting.map(|(name, _)| name.as_str()).collect();
        let metric = &self.node.metrics.cluster.names_twice;
        if gauge(lasting.len()) > metric.get() {
            let names = lasting.join(", ");
            warn!(
                names,
                "several nodes have one name, and all but one of each are not seen: set node.name"
            );
        }
        metric.set(gauge(lasting.len()));
    }
}

impl fmt::Debug for Gossiping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gossiping").field("own", &self.own).finish_non_exhaustive()
    }
}

/// Logs who has come and who has gone.
fn tell_changes(roster: &Roster, list: &[Member]) {
    let before = roster.now();
    for member in list {
        if before.member(member.index).is_none() {
            let Member { index, name, endpoint, version, .. } = member;
            info!(index, name, endpoint, version, "member found");
        }
    }
    for member in &before.list {
        if list.iter().all(|listed| listed.index != member.index) {
            info!(index = member.index, name = member.name, "member gone");
        }
    }
}

/// What a node has to do now.
fn load_of(node: &Node, draining: bool) -> Load {
    let dram = node.stack.usage();
    let dram = ("dram", dram.dram_capacity_bytes, dram.dram_used_bytes);
    let colder = node.stack.colder_usage().into_iter();
    let colder = colder.map(|(tier, usage)| (tier.name(), usage.capacity_bytes, usage.used_bytes));
    let tier = |(tier, capacity, used): (&str, u64, u64)| TierLoad {
        tier: tier.to_owned(),
        capacity,
        used,
    };
    Load {
        engines: node.openers.engines(),
        sessions: u64::try_from(node.sessions.count()).unwrap_or(u64::MAX),
        draining: draining || node.sessions.is_draining(),
        tiers: std::iter::once(dram).chain(colder).map(tier).collect(),
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
