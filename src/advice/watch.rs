//! Watch: what is on which tier, as a snapshot and then as it changes.
//!
//! What is told of a block is where it is when it is told, not what happened to it: so nothing has to be
//! kept for a watcher, and one that has seen the latest update of a block knows where it is. Whoever does
//! not keep up gets a reset and a new snapshot, never a gap. When the node is asked to leave, it gets a reset and
//! a snapshot of nothing.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use kvstrata_tiers::{
    block::BlockKey,
    error::{Error, ErrorKind, Result},
    event::TierEvent,
    limits::SHARDS,
    namespace::{Namespace, NamespaceSpec},
};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    auth::Bearer,
    changes::{Change, Changed, Follower},
    limits::{RETRY_AFTER_COUNT, ROUTER_UPDATE_BLOCKS},
    node::Node,
    schemes::Scheme,
};

/// What is watched.
#[derive(Debug)]
pub(crate) enum Range {
    /// All that is the tenant's.
    All,
    /// The namespaces of this model.
    Model(String),
    /// The namespace with this id.
    Namespace(Bytes),
}

/// News for a watcher.
#[derive(Debug)]
pub(crate) enum Update {
    /// Forget everything: a snapshot follows.
    Reset(&'static str),
    /// Where these blocks are now.
    Blocks(Blocks),
    /// What follows are changes; so many blocks were in the snapshot.
    SnapshotEnd(u64),
}

/// Where blocks of one namespace are now.
#[derive(Debug)]
pub(crate) struct Blocks {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) names: Names,
    /// For each, 1 for dram, 2 for nvme, 4 for object, or their sum; 0 if it is gone.
    pub(crate) tiers: Vec<u8>,
}

/// What blocks are called.
#[derive(Debug)]
pub(crate) enum Names {
    /// The engine's hashes, packed.
    Own(Vec<u8>),
    /// By a scheme of 64 bits.
    Short(Vec<u64>),
}

/// One watcher.
#[derive(Debug)]
pub(crate) struct Watcher {
    node: Arc<Node>,
    tenant: Box<str>,
    range: Range,
    scheme: Option<Scheme>,
    follower: Follower,
    /// Shards whose part of the snapshot has been told.
    told: [bool; SHARDS],
    snapshot_blocks: u64,
    ready: VecDeque<Update>,
    /// Namespaces that were asked about: they never change.
    known: HashMap<u32, Option<Arc<Namespace>>>,
    /// It was told that nothing can be loaded from here any more, and there is nothing to be told after that.
    has_left: bool,
    _place: OwnedSemaphorePermit,
}

impl Node {
    /// Begins to watch.
    ///
    /// # Errors
    /// `UnknownNamespace` for one that was named, `Exhausted` if there are too many watchers, `Unsupported`
    /// for a scheme whose names are not made of the engine's hashes.
    pub(crate) fn watch(
        self: &Arc<Self>,
        bearer: &Bearer,
        range: Range,
        scheme: Option<Scheme>,
    ) -> Result<Watcher> {
        if let Range::Namespace(id) = &range {
            self.namespace(bearer, id)?;
        }
        if scheme.is_some_and(Scheme::is_of_tokens) {
            let text = "hash_scheme: one of tokens given; watch by NATIVE, VLLM_U64 or SGLANG_I64, or take \
                        the events that are published for such routers";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let Ok(place) = Arc::clone(&self.advice.watchers).try_acquire_owned() else {
            let kind = ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT };
            return Err(Error::new(kind, "watch: too many routers follow already"));
        };
        Ok(Watcher {
            node: Arc::clone(self),
            tenant: bearer.tenant().into(),
            range,
            scheme,
            follower: self.changes.follow(),
            told: [false; SHARDS],
            snapshot_blocks: 0,
            ready: VecDeque::from([Update::Reset("a snapshot follows")]),
            known: HashMap::new(),
            has_left: false,
            _place: place,
        })
    }
}

impl Watcher {
    /// The next news; waits for it.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn next(&mut self) -> Update {
        loop {
            if let Some(update) = self.ready.pop_front() {
                return update;
            }
            if self.has_left {
                return std::future::pending().await;
            }
            let leaves = self.node.drain.asked().clone();
            tokio::select! {
                biased;
                () = leaves.cancelled() => {
                    self.has_left = true;
                    let nothing = [Update::Reset("this node leaves"), Update::SnapshotEnd(0)];
                    self.ready.extend(nothing);
                }
                change = self.follower.next() => self.take(&change),
            }
        }
    }

    fn take(&mut self, change: &Change) {
        match &change.what {
            Changed::Events(events) => {
                let keys: HashSet<BlockKey> = events.iter().filter_map(moved).collect();
                self.tell(keys.into_iter().collect());
            }
            Changed::Resync(held) => {
                let Some(told) = self.told.get_mut(change.shard) else { return };
                if std::mem::replace(told, true) {
                    return self.reset();
                }
                // A block is named once for each tier that has it, one after another.
                let mut keys: Vec<BlockKey> = held.iter().map(|(key, _)| *key).collect();
                keys.dedup();
                self.snapshot_blocks += self.tell(keys);
                if self.told.iter().all(|told| *told) {
                    self.ready.push_back(Update::SnapshotEnd(self.snapshot_blocks));
                }
            }
        }
    }

    /// It did not keep up: what it has not been told is not told any more.
    fn reset(&mut self) {
        self.follower = self.node.changes.follow();
        self.told = [false; SHARDS];
        self.snapshot_blocks = 0;
        self.ready.push_back(Update::Reset("changes came faster than they were read"));
    }

    /// Tells where these are now; returns how many are watched.
    fn tell(&mut self, mut keys: Vec<BlockKey>) -> u64 {
        keys.sort_unstable_by_key(|key| key.namespace);
        let mut count = 0;
        for same in keys.chunk_by(|a, b| a.namespace == b.namespace) {
            let index = same.first().map(|key| key.namespace);
            let Some(namespace) = index.and_then(|index| self.namespace(index)) else { continue };
            for keys in same.chunks(ROUTER_UPDATE_BLOCKS) {
                let tiers = keys.iter().map(|key| bits(self.node.stack.presence(*key)));
                let (tiers, names) = (tiers.collect(), self.names(&namespace, keys));
                let blocks = Blocks { namespace: Arc::clone(&namespace), names, tiers };
                self.ready.push_back(Update::Blocks(blocks));
                count += u64::try_from(keys.len()).unwrap_or(u64::MAX);
            }
        }
        count
    }

    fn names(&self, namespace: &Namespace, keys: &[BlockKey]) -> Names {
        let hashes = keys.iter().map(|key| {
            let hash = key.hash.as_bytes();
            hash.get(..namespace.hash_bytes()).unwrap_or(hash)
        });
        match self.scheme {
            None => Names::Own(hashes.flatten().copied().collect()),
            Some(scheme) => {
                let name = |hash| scheme.of_hash(hash).unwrap_or_default();
                Names::Short(hashes.map(name).collect())
            }
        }
    }

    /// The namespace with this index, if it is watched.
    fn namespace(&mut self, index: u32) -> Option<Arc<Namespace>> {
        let (node, tenant, range) = (&self.node, &self.tenant, &self.range);
        let find = || {
            let namespace = node.namespaces.by_index(index)?;
            let is_meant = match (range, namespace.spec()) {
                (Range::All, _) => true,
                (Range::Model(model), NamespaceSpec::Engine(identity)) => identity.model == *model,
                (Range::Model(_), NamespaceSpec::Opaque { .. }) => false,
                (Range::Namespace(id), _) => id.as_ref() == namespace.id().as_bytes(),
            };
            (is_meant && namespace.tenant() == tenant.as_ref()).then_some(namespace)
        };
        self.known.entry(index).or_insert_with(find).clone()
    }
}

/// The block that is on other tiers than before.
fn moved(event: &TierEvent) -> Option<BlockKey> {
    match event {
        TierEvent::Stored { key, .. } | TierEvent::Removed { key, .. } => Some(*key),
        TierEvent::Described { .. } => None,
    }
}

fn bits(presence: [bool; 3]) -> u8 {
    let [dram, nvme, object] = presence.map(u8::from);
    dram | nvme << 1 | object << 2
}
