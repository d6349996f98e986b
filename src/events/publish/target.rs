//! One router, or rather one worker of one router: what it is told, and those who listen.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use kvstrata_tiers::{block::BlockKey, stack::Stack};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use tracing::{info, warn};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    announce::{Announcer, Blocks, Described, Gates},
    encode::{DYNAMO, Dialect, Event, LLM_D, batch},
    journal::Journal,
    peers::Peers,
    ring::{Ring, RingLimits},
    scope,
    shadow::TierSet,
    world::World,
};
use crate::{
    config::{EventTarget, Router},
    events::zmtp,
    limits::{
        PUBLISH_BACKLOG_BYTES, PUBLISH_BATCH_BLOCKS, PUBLISH_BATCH_EVENTS, PUBLISH_KEPT_BATCHES,
        PUBLISH_SETTLE_AFTER, PUBLISH_STEP_BLOCKS,
    },
    metrics::{PublishMetrics, ResyncReason, RouterEvent, RouterLabel, Shown},
    node::Node,
};

/// The numbers of batches begin with the time, and leave room for a million of them in each millisecond.
const NUMBERS_PER_MILLISECOND: u64 = 1 << 20;

/// See the module.
#[derive(Debug)]
pub(super) struct Target {
    wish: EventTarget,
    worker: Option<String>,
    dialect: Dialect,
    rank: u32,
    label: RouterLabel,
    announcer: Announcer,
    gates: Gates,
    /// Somebody listens: what changes is told.
    listening: bool,
    /// When what was withdrawn before was settled.
    settled: Instant,
    journal: Option<Journal>,
    metrics: PublishMetrics,
    shown: Shown,
    /// Shared with those who serve connections.
    pub(super) door: Door,
}

/// What one target may take.
#[derive(Debug, Clone, Default)]
pub(super) struct Room {
    /// Where it notes what it has said, if it does.
    pub(super) folder: Option<PathBuf>,
    /// Bytes that are kept to be sent again.
    pub(super) kept_bytes: usize,
    /// Blocks that it may announce.
    pub(super) blocks: usize,
}

/// What connections need of a target; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Door {
    /// Those who listen.
    pub(super) peers: Peers,
    /// What they can ask for again.
    pub(super) ring: Arc<Mutex<Ring>>,
}

/// The blocks of a node.
struct Known<'a> {
    world: &'a World,
    stack: &'a Stack,
    node: &'a Node,
}

impl Blocks for Known<'_> {
    fn tiers(&self, key: &BlockKey) -> TierSet {
        self.world.tiers(key)
    }

    fn described(&self, key: &BlockKey) -> Option<Described> {
        let namespace = self.node.namespaces.by_index(key.namespace)?;
        let found = self.stack.description(&namespace, key.hash)?;
        let wanted = usize::try_from(namespace.block_tokens()).ok()?;
        let placed = match found.parent {
            None => found.position == 0,
            Some(parent) => found.position > 0 && parent != key.hash,
        };
        let whole = found.tokens.len() == wanted && placed;
        let (parent, tokens, lora_name) = (found.parent, found.tokens, found.lora_name);
        whole.then_some(Described { parent, tokens, lora_name })
    }
}

impl Target {
    /// A target of this worker, which is the one that the configuration names, or was found. `now_millis` since
    /// 1970; what it was told before is in the folder of `room`, if it is noted.
    ///
    /// # Blocking
    /// Reads what is noted.
    pub(super) fn new(
        wish: &EventTarget,
        worker: Option<String>,
        room: &Room,
        now_millis: u64,
        metrics: &PublishMetrics,
        wake: &Arc<Notify>,
    ) -> Self {
        let (dialect, rank, label) = match &wish.router {
            Router::Dynamo { rank, .. } => (DYNAMO, *rank, RouterLabel::Dynamo),
            Router::LlmD { array, .. } => (Dialect { map: !*array, ..LLM_D }, 0, RouterLabel::LlmD),
        };
        let topic = topic(wish, worker.as_deref());
        let (journal, told) = room.folder.as_deref().map_or((None, Vec::new()), |folder| {
            let name = format!("{wish} {}", worker.as_deref().unwrap_or_default());
            open_journal(folder, xxh3_64(name.as_bytes()))
        });
        // Nobody asks again where nobody can.
        let asks = matches!(&wish.router, Router::Dynamo { replay: Some(_), .. });
        let batches = if asks { PUBLISH_KEPT_BATCHES } else { 0 };
        let limits = RingLimits { batches, bytes: room.kept_bytes };
        let first = now_millis.saturating_mul(NUMBERS_PER_MILLISECOND);
        Self {
            gates: wish.from_blocks,
            wish: wish.clone(),
            worker,
            dialect,
            rank,
            label,
            announcer: Announcer::new(told, room.blocks),
            listening: false,
            settled: Instant::now(),
            journal,
            shown: metrics.shown(label),
            metrics: metrics.clone(),
            door: Door {
                peers: Peers::new(&topic, Arc::clone(wake)),
                ring: Arc::new(Mutex::new(Ring::new(first, limits))),
            },
        }
    }

    /// Whether this is the target of a found worker.
    pub(super) fn is_of(&self, wish: &EventTarget, worker: &str) -> bool {
        self.wish == *wish && self.worker.as_deref() == Some(worker)
    }

    /// From how many blocks on it wants to be told of chains.
    pub(super) fn wished_gates(&self) -> &Gates {
        &self.wish.from_blocks
    }

    /// A block is somewhere else, or more is known of it.
    pub(super) fn changed(&mut self, key: BlockKey) {
        if self.listening {
            self.announcer.changed(key);
        }
    }

    /// Looks who has opened what, and how the tiers are.
    pub(super) fn look(&mut self, node: &Node, world: &World, gates: Gates) {
        let scope = scope::of(node, &self.wish, self.worker.as_deref());
        let mut news: Vec<u32> = Vec::new();
        for (namespace, terms) in scope {
            if self.announcer.set_terms(namespace, terms) {
                news.push(namespace);
            }
        }
        let before = std::mem::replace(&mut self.gates, gates);
        let all = before.iter().zip(&gates).any(|(before, now)| before.is_none() != now.is_none());
        if !self.listening {
            return;
        }
        if all || !news.is_empty() {
            let keys = world.keys().filter(|key| all || news.contains(&key.namespace));
            keys.for_each(|key| self.announcer.changed(key));
        } else if before != gates {
            self.announcer.reconsider();
        }
    }

    /// Says what there is to be said, as long as those who listen keep up; whether there is more.
    pub(super) fn step(&mut self, node: &Node, world: &World, seconds: f64) -> bool {
        self.meet(world);
        let Door { peers, .. } = &self.door;
        if peers.take_cut() {
            self.metrics.record_cut(self.label);
        }
        let mut more = false;
        if self.listening && self.announcer.is_busy() && peers.backlog() < PUBLISH_BACKLOG_BYTES {
            let blocks = Known { world, stack: &node.stack, node };
            let events = self.announcer.step(&blocks, &self.gates, PUBLISH_STEP_BLOCKS);
            self.send(&events, seconds);
            more = self.announcer.is_busy();
        }
        self.settle();
        self.shown.announced.set(self.announcer.announced());
        self.shown.withheld.set(self.announcer.pending());
        more
    }

    /// Whether all that there was to say was said, and taken by those who listen.
    pub(super) fn is_silent(&self) -> bool {
        !self.listening || (!self.announcer.is_busy() && self.door.peers.backlog() == 0)
    }

    /// Whatever was sent a while ago has arrived if nothing waits: a connection that does not take what is sent
    /// ends sooner. As long as somebody is gone who may come back, what it has missed is kept, if there is room.
    fn settle(&mut self) {
        let now = Instant::now();
        let due = now.duration_since(self.settled) >= PUBLISH_SETTLE_AFTER;
        let peers = &self.door.peers;
        let heard = self.listening && peers.backlog() == 0 && peers.are_all_here();
        if !due || !(heard || self.announcer.must_settle()) {
            return;
        }
        self.settled = now;
        let settled = self.announcer.settle();
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.settle(settled)
        {
            self.give_up_journal(&error);
        }
    }

    fn give_up_journal(&mut self, error: &io::Error) {
        warn!(%error, "what routers are told is not noted any more: a restart cannot withdraw it");
        self.journal = None;
    }

    /// Begins anew for those who have begun to listen, or have missed something for good.
    fn meet(&mut self, world: &World) {
        let peers = &self.door.peers;
        let (arrived, missed) = (peers.take_arrived(), peers.take_missed());
        let listeners = peers.listening();
        self.shown.listeners.set(listeners);
        self.listening = listeners > 0;
        if !self.listening {
            // Whoever comes is told all.
            self.announcer.pause();
        } else if arrived || missed {
            let reason = if arrived { ResyncReason::Subscribed } else { ResyncReason::Missed };
            info!(topic = topic(&self.wish, self.worker.as_deref()), "a router is told everything");
            self.metrics.record_resync(self.label, reason);
            self.announcer.resync(world.keys());
            self.settled = Instant::now();
        }
    }

    fn send(&mut self, events: &[Event], seconds: f64) {
        if events.is_empty() {
            return;
        }
        if let Some(journal) = &mut self.journal
            && let Err(error) = journal.note(events)
        {
            self.give_up_journal(&error);
        }
        for events in batches(events) {
            let payload = batch(self.dialect, seconds, events, self.rank);
            let topic = self.door.peers.topic();
            let message = self
                .door
                .ring
                .lock()
                .push(|number| zmtp::message(&[topic, &number.to_be_bytes(), &payload]));
            self.door.peers.publish(&message);
        }
        for event in events {
            let kind = match event {
                Event::Stored(_) => RouterEvent::Stored,
                Event::Removed { .. } => RouterEvent::Removed,
            };
            self.metrics.record_event(self.label, kind, event.tier(), event.hashes().len());
        }
    }
}

/// Cuts events into batches.
fn batches(events: &[Event]) -> impl Iterator<Item = &[Event]> {
    let mut rest = events;
    std::iter::from_fn(move || {
        let mut blocks = 0;
        let fits = rest.iter().take(PUBLISH_BATCH_EVENTS).take_while(|event| {
            blocks += event.hashes().len();
            blocks <= PUBLISH_BATCH_BLOCKS
        });
        let count = fits.count().max(1).min(rest.len());
        let (batch, behind) = rest.split_at_checked(count)?;
        rest = behind;
        (!batch.is_empty()).then_some(batch)
    })
}

/// Dynamo knows the worker by the address; llm-d by the topic.
fn topic(wish: &EventTarget, worker: Option<&str>) -> String {
    match &wish.router {
        Router::Dynamo { .. } => String::new(),
        Router::LlmD { pod, .. } => {
            let pod = pod.as_deref().or(worker).unwrap_or_default();
            format!("kv@{pod}@{}", wish.model)
        }
    }
}

fn open_journal(folder: &Path, name: u64) -> (Option<Journal>, Vec<(u64, TierSet)>) {
    let path = folder.join(format!("{name:016x}.shadow"));
    match Journal::open(&path) {
        Ok((journal, told)) => (Some(journal), told),
        Err(error) => {
            let path = path.display().to_string();
            warn!(%error, path, "what routers are told cannot be noted: a restart cannot withdraw it");
            (None, Vec::new())
        }
    }
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::tier::Tier;

    use super::*;

    #[test]
    fn batches_are_bounded_and_lose_nothing() {
        let event = |blocks: usize| Event::Removed { tier: Tier::Dram, hashes: vec![0; blocks] };
        let events: Vec<_> = [1000, 20, 10, 2000].into_iter().chain([1; 40]).map(event).collect();
        let cut: Vec<_> = batches(&events).map(<[Event]>::len).collect();
        assert_eq!(cut, [2, 1, 1, 16, 16, 8]);
        assert_eq!(batches(&[]).count(), 0);
    }
}
