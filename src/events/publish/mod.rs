//! Tells routers where the blocks are that their workers can load, in the routers' own dialects.
//!
//! ```text
//! changes of the tiers -> world: where all blocks are -> for each target:
//!     scope: what its worker has opened      gate: which tiers, from how many blocks on
//!     announce: what is to be said, against what was said (shadow, journal)
//!     encode: in its dialect -> ring: numbered and kept -> peers: those who listen, each with its queue
//! ```
//! A target is one worker of one router. Dynamo connects to an address for each worker; llm-d's endpoint picker
//! listens, and is connected to once for each. A block is announced when it is described with its tokens, its
//! namespace keeps them, the worker has opened that, and everything before it is announced: routers drop what
//! hangs in the air.
//!
//! Nothing is said while nobody listens, and everything to whoever begins to: withdrawn first, because a router
//! that was here before counts. All of it is one task with what it knows; connections have tasks of their own,
//! for which it never waits. A router that is slow slows what it and its siblings are told; one that stands
//! still is cut off.
//!
//! Why not the engine's own publisher: its numbers are its own, and a gap in them costs the router what it
//! knows of the engine's memory.

mod announce;
mod encode;
mod gate;
mod journal;
mod peers;
mod ring;
mod runs;
mod scope;
mod shadow;
mod target;
mod world;

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use tokio::{
    io::AsyncWriteExt,
    net::TcpListener,
    sync::Notify,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};
use tracing::{debug, info, warn};

use self::{
    gate::Wards,
    target::{Door, Room, Target},
    world::World,
};
use crate::{
    changes::{Change, Changed, Follower},
    config::{Auto, Config, EventTarget, Maybe, Router},
    drain::Farewell,
    events::zmtp::{Connection, Heard, Kind, message, pong},
    limits::{
        EVENT_RETRY, PUBLISH_ENTRY_BYTES, PUBLISH_KEPT_SHARE_DIVISOR, PUBLISH_LOOK_INTERVAL,
        PUBLISH_PEERS_MAX, PUBLISH_TARGETS_MAX, PUBLISH_WORKERS_EXPECTED,
        PUBLISH_WORLD_SHARE_DIVISOR, PUBLISH_WRITE_DEADLINE,
    },
    metrics::PublishMetrics,
    node::Node,
};

/// The folder of what was told, in that of nvme.
const STATE: &str = "kvstrata-events";

/// What was configured, with the addresses that it listens on.
#[derive(Debug, Default)]
pub(crate) struct Publishers {
    targets: Vec<(EventTarget, Option<Listening>)>,
    room: Room,
}

/// What listens for the routers of one target.
#[derive(Debug)]
struct Listening {
    publisher: TcpListener,
    replay: Option<TcpListener>,
}

/// Listens where the configuration says; `bytes` are there for all that is kept.
///
/// # Errors
/// The address that cannot be listened on, and why.
pub(crate) async fn bind(
    config: &Config,
    bytes: u64,
) -> Result<Publishers, (SocketAddr, io::Error)> {
    let events = &config.events;
    let wishes = events.publish.given().map_or(&[][..], |targets| &targets.0);
    let mut targets = Vec::new();
    for wish in wishes {
        let listening = match &wish.router {
            Router::Dynamo { listen, replay, .. } => {
                let publisher = bind_one(*listen).await?;
                let replay = match replay {
                    Some(replay) => Some(bind_one(*replay).await?),
                    None => None,
                };
                Some(Listening { publisher, replay })
            }
            Router::LlmD { .. } => None,
        };
        targets.push((wish.clone(), listening));
    }
    let folder = match &events.publish_state {
        Auto::Auto => config.nvme.path.given().map(|path| path.0.join(STATE)),
        Auto::Given(Maybe::None) => None,
        Auto::Given(Maybe::Given(path)) => Some(path.0.clone()),
    };
    Ok(Publishers { room: Room { folder, ..room(&targets, bytes) }, targets })
}

/// What each target may take.
fn room(targets: &[(EventTarget, Option<Listening>)], bytes: u64) -> Room {
    let expected = targets.iter().map(|(wish, _)| match (&wish.router, &wish.worker) {
        (Router::LlmD { .. }, None) => PUBLISH_WORKERS_EXPECTED,
        (Router::LlmD { .. } | Router::Dynamo { .. }, _) => 1,
    });
    let expected = expected.sum::<u64>().max(1);
    let kept = bytes / PUBLISH_KEPT_SHARE_DIVISOR;
    let entries = bytes - kept - bytes / PUBLISH_WORLD_SHARE_DIVISOR;
    let each = |bytes: u64| usize::try_from(bytes / expected).unwrap_or(usize::MAX);
    Room { folder: None, kept_bytes: each(kept), blocks: each(entries / PUBLISH_ENTRY_BYTES) }
}

async fn bind_one(address: SocketAddr) -> Result<TcpListener, (SocketAddr, io::Error)> {
    TcpListener::bind(address).await.map_err(|error| (address, error))
}

/// Publishes until the tasks of the node should end.
pub(crate) fn start(publishers: Publishers, node: &Arc<Node>) {
    if publishers.targets.is_empty() {
        return;
    }
    let publishing = Publisher::new(publishers, Arc::clone(node));
    let stop = node.tasks.stop_token();
    // What is noted is written to disk, and a resync takes a core for a while.
    node.tasks.spawn_thread_critical("router events", async move {
        stop.run_until_cancelled(publishing.run()).await;
    });
}

/// The one task.
struct Publisher {
    node: Arc<Node>,
    metrics: PublishMetrics,
    room: Room,
    /// Targets of whoever opens namespaces.
    open_to_all: Vec<EventTarget>,
    targets: Vec<Target>,
    world: World,
    wards: Wards,
    wake: Arc<Notify>,
    /// Held until every router was told that nothing can be loaded from here any more; none once the node leaves
    /// and they were.
    farewell: Option<Farewell>,
}

impl Publisher {
    fn new(publishers: Publishers, node: Arc<Node>) -> Self {
        let mut publisher = Self {
            metrics: node.metrics.publish.clone(),
            farewell: Some(node.drain.farewell()),
            node,
            room: publishers.room,
            open_to_all: Vec::new(),
            targets: Vec::new(),
            world: World::default(),
            wards: Wards::default(),
            wake: Arc::new(Notify::new()),
        };
        for (wish, listening) in publishers.targets {
            match (&wish.router, &wish.worker) {
                (Router::LlmD { .. }, None) => publisher.open_to_all.push(wish),
                (Router::LlmD { .. } | Router::Dynamo { .. }, worker) => {
                    publisher.add(&wish, worker.clone(), listening);
                }
            }
        }
        publisher
    }

    fn add(&mut self, wish: &EventTarget, worker: Option<String>, listening: Option<Listening>) {
        let target = Target::new(wish, worker, &self.room, now_millis(), &self.metrics, &self.wake);
        let (door, metrics) = (target.door.clone(), self.metrics.clone());
        self.targets.push(target);
        if let Router::LlmD { connect, .. } = &wish.router {
            self.spawn(seek(connect.clone(), door.clone()));
        }
        let Some(Listening { publisher, replay }) = listening else { return };
        self.spawn(welcome(publisher, Arc::clone(&self.node), door.clone()));
        if let Some(replay) = replay {
            self.spawn(answer(replay, Arc::clone(&self.node), door, metrics));
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let stop = self.node.tasks.stop_token();
        self.node.tasks.spawn("router events", async move {
            stop.run_until_cancelled(task).await.unwrap_or_default();
        });
    }

    async fn run(mut self) {
        let mut follower = self.node.changes.follow();
        let mut looks = interval(PUBLISH_LOOK_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let wake = Arc::clone(&self.wake);
        let leaves = self.node.drain.asked().clone();
        let mut is_leaving = false;
        loop {
            tokio::select! {
                () = leaves.cancelled(), if !is_leaving => {
                    is_leaving = true;
                    self.look();
                }
                change = follower.next() => self.take(change, &mut follower),
                () = wake.notified() => {}
                _ = looks.tick() => self.look(),
            }
            self.step();
            if is_leaving && self.targets.iter().all(Target::is_silent) {
                self.farewell = None;
            }
        }
    }

    /// Takes what has changed, and what has besides.
    fn take(&mut self, first: Change, follower: &mut Follower) {
        let Self { world, targets, .. } = self;
        let mut next = Some(first);
        while let Some(Change { shard, what }) = next {
            let changed = |key| targets.iter_mut().for_each(|target| target.changed(key));
            match what {
                Changed::Events(events) => world.apply(shard, &events, changed),
                Changed::Resync(all) => world.replace(shard, &all, changed),
            }
            next = follower.try_next();
        }
    }

    /// Looks who has opened what, and how the tiers are.
    fn look(&mut self) {
        for wish in self.open_to_all.clone() {
            for worker in scope::workers(&self.node, &wish) {
                let known = self.targets.iter().any(|target| target.is_of(&wish, &worker));
                if !known && self.targets.len() < PUBLISH_TARGETS_MAX {
                    info!(worker, "a router is told what a worker can load that was met");
                    self.add(&wish, Some(worker), None);
                }
            }
        }
        self.wards.look(&self.node.costs, Instant::now());
        let is_leaving = self.node.drain.asked().is_cancelled();
        for target in &mut self.targets {
            // What is to go is worth nothing to a router that looks ahead: all of it is withdrawn.
            let gates =
                if is_leaving { [None; 3] } else { self.wards.gates(target.wished_gates()) };
            target.look(&self.node, &self.world, gates);
        }
    }

    /// Each target has its turn; if one has more to say, there will be another one soon.
    fn step(&mut self) {
        let seconds = now().as_secs_f64();
        let mut more = false;
        for target in &mut self.targets {
            more |= target.step(&self.node, &self.world, seconds);
        }
        if more {
            self.wake.notify_one();
        }
    }
}

/// The time of day, for events and for the numbers of batches.
#[expect(clippy::disallowed_methods, reason = "routers are told the time of day")]
fn now() -> std::time::Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn now_millis() -> u64 {
    u64::try_from(now().as_millis()).unwrap_or(u64::MAX)
}

/// Connects to somebody who listens, again and again.
async fn seek(address: String, door: Door) {
    let (first, longest) = EVENT_RETRY;
    let mut pause = first;
    loop {
        match Connection::open(&address, Kind::Publisher).await {
            Ok(connection) => {
                pause = first;
                info!(address, "a router is told where blocks are");
                door.peers.serve(connection).await;
                info!(address, "router lost");
            }
            Err(error) => debug!(address, %error, "router not reached"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

/// Serves those who connect to listen.
async fn welcome(listener: TcpListener, node: Arc<Node>, door: Door) {
    accept(listener, &node, Kind::Publisher, move |connection| {
        let peers = door.peers.clone();
        async move { peers.serve(connection).await }
    })
    .await;
}

/// Serves those who ask for batches again.
async fn answer(listener: TcpListener, node: Arc<Node>, door: Door, metrics: PublishMetrics) {
    accept(listener, &node, Kind::Router, move |connection| {
        let (door, metrics) = (door.clone(), metrics.clone());
        async move {
            if let Err(error) = replay(connection, &door, &metrics).await {
                debug!(%error, "a router asks for nothing any more");
            }
        }
    })
    .await;
}

/// Accepts connections, a bounded number of them at a time.
async fn accept<F: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    node: &Node,
    kind: Kind,
    serve: impl Fn(Connection) -> F + Clone + Send + 'static,
) {
    let places = Arc::new(tokio::sync::Semaphore::new(PUBLISH_PEERS_MAX));
    while let Ok(place) = Arc::clone(&places).acquire_owned().await {
        let io = match listener.accept().await {
            Ok((io, _peer)) => io,
            Err(error) => {
                warn!(%error, "a router cannot be accepted");
                sleep(EVENT_RETRY.0).await;
                continue;
            }
        };
        let (serve, stop) = (serve.clone(), node.tasks.stop_token());
        let serving = async move {
            match Connection::accept(io, kind).await {
                Ok(connection) => serve(connection).await,
                Err(error) => debug!(%error, "somebody who connected is no router"),
            }
            drop(place);
        };
        node.tasks.spawn("router events", async move {
            stop.run_until_cancelled(serving).await.unwrap_or_default();
        });
    }
}

/// Sends batches again, from the number on that was asked for, as often as it is asked.
async fn replay(connection: Connection, door: &Door, metrics: &PublishMetrics) -> io::Result<()> {
    let (mut receiver, mut sender) = connection.split();
    loop {
        let frames = match receiver.hear().await? {
            Heard::Message(frames) => frames,
            Heard::Ping(context) => {
                sender.write_all(&pong(&context)).await?;
                continue;
            }
        };
        let Some((asked, address)) = frames.split_last() else { continue };
        let Ok(number) = asked.as_slice().try_into().map(u64::from_be_bytes) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no number is asked for"));
        };
        metrics.gap_requests.inc();
        let replay = door.ring.lock().from(number);
        if replay.incomplete {
            door.peers.has_missed();
        }
        let address: Vec<&[u8]> = address.iter().map(Vec::as_slice).collect();
        let before = more(&address);
        let end = message(&[door.peers.topic(), &u64::MAX.to_be_bytes(), b""]);
        for batch in replay.messages.into_iter().chain([end.into()]) {
            let sending = async {
                sender.write_all(&before).await?;
                sender.write_all(&batch).await
            };
            timeout(PUBLISH_WRITE_DEADLINE, sending)
                .await
                .map_err(|_elapsed| io::Error::from(io::ErrorKind::TimedOut))??;
        }
    }
}

/// Frames that others follow.
fn more(frames: &[&[u8]]) -> Vec<u8> {
    // The last frame of a message says that nothing follows: an empty one has two bytes.
    let mut bytes = message(&[frames, &[b""]].concat());
    bytes.truncate(bytes.len().saturating_sub(2));
    bytes
}

#[cfg(test)]
mod tests;
