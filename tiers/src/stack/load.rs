//! Get: dram as it is, colder tiers through dram; every byte verified before it leaves.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
};

use parking_lot::Mutex;
use tokio::{
    sync::OwnedMutexGuard,
    time::{Instant, timeout_at},
};

use super::{Block, Promotions, Shared, remove::Gone, verbs::slot_bytes_of};
use crate::{
    block::BlockKey,
    dram::{BlockWriter, Payload, seal, slot_bytes},
    error::Result,
    map::{Checksums, Guest, Hashed, Location, Map, stored},
    metrics::EvictReason,
    namespace::Namespace,
    store::{BlockStore, Load, Wanted},
    tier::Tier,
};

/// Places at which a block is looked for on one tier: one that is moved again and again is not read.
const PLACES_MAX: usize = 3;

/// The outcome of a get.
#[derive(Debug)]
pub enum Fetch {
    /// Here it is.
    Hit(Block),
    /// A put of it is in flight.
    Pending,
    /// It failed verification and was quarantined.
    Corrupt,
    /// The tier did not answer before the deadline.
    Timeout,
    /// The tier is overloaded, or dram has no room to load into.
    Busy,
    /// It is not here.
    Miss,
}

/// What a load takes at most: of dram from others, without a bound if there is none, and of time.
pub(super) type Limits<'a> = (Option<&'a Promotions>, Instant);

/// A copy on a colder tier, as the map knows it.
struct ColdCopy {
    location: Location,
    len: u32,
    checksums: Checksums,
}

/// What the map says of a block that is to be read.
pub(super) enum Read {
    Dram(Block),
    Cold,
    Pending,
    Absent,
}

/// Whose turn it is with a block, and whether the one before has left something on a tier that it
/// should not have.
type Turns = Arc<tokio::sync::Mutex<bool>>;

/// What is under way: one for each block. A waiter looks again when the first one is done, and does it
/// itself if that one failed.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight(Mutex<HashMap<BlockKey, Turns>>);

impl SingleFlight {
    fn join(&self, key: BlockKey) -> Turns {
        Arc::clone(self.0.lock().entry(key).or_default())
    }

    fn leave(&self, key: BlockKey, flight: Turns) {
        let mut flights = self.0.lock();
        drop(flight);
        if flights.get(&key).is_some_and(|flight| Arc::strong_count(flight) == 1) {
            flights.remove(&key);
        }
    }

    /// Somebody has the turn of the block, or waits for it.
    pub(super) fn has(&self, key: BlockKey) -> bool {
        self.0.lock().contains_key(&key)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }
}

/// Leaves a flight when dropped, also when the work was cancelled. The last one to leave finds no
/// reference but that of the table.
pub(super) struct Flight<'a> {
    flights: &'a SingleFlight,
    key: BlockKey,
    flight: Option<Turns>,
}

/// The turn of a block. It ends before its place in the table is left.
pub(super) struct Turn<'a> {
    left: OwnedMutexGuard<bool>,
    _flight: Flight<'a>,
}

impl<'a> Flight<'a> {
    pub(super) fn join(flights: &'a SingleFlight, key: BlockKey) -> Self {
        Self { flights, key, flight: Some(flights.join(key)) }
    }

    fn turns(&self) -> Turns {
        self.flight.as_ref().map(Arc::clone).unwrap_or_default()
    }

    /// The turn of this one, if nobody has it.
    pub(super) fn try_turn(self) -> Result<Turn<'a>, Self> {
        match self.turns().try_lock_owned() {
            Ok(left) => Ok(Turn { left, _flight: self }),
            Err(_taken) => Err(self),
        }
    }

    /// Waits for the turn of this one.
    pub(super) async fn turn(self) -> Turn<'a> {
        Turn { left: self.turns().lock_owned().await, _flight: self }
    }
}

impl Turn<'_> {
    /// Whether something may be left on a tier that should not be.
    pub(super) fn is_left(&self) -> bool {
        *self.left
    }

    /// Tells those who wait.
    pub(super) fn leaves(&mut self, left: bool) {
        *self.left = left;
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.flights.leave(self.key, flight);
        }
    }
}

impl Shared {
    /// Reads the map. Touches nothing: one block's use says nothing of the order of its chain.
    pub(super) fn read(&self, namespace: &Arc<Namespace>, at: Hashed) -> Read {
        let (read, unread) = self.map.with(at, |shard| {
            let Some(id) = shard.find(at) else { return (Read::Absent, None) };
            let Some(entry) = shard.get_mut(id) else { return (Read::Absent, None) };
            let Some(payload) = entry.payload.clone() else {
                let read = match entry.hottest() {
                    Some(_) => Read::Cold,
                    None if entry.is_pending() => Read::Pending,
                    None => Read::Absent,
                };
                return (read, None);
            };
            let unread = std::mem::take(&mut entry.context);
            entry.note_read();
            let block = Block {
                namespace: Arc::clone(namespace),
                hash: at.key.hash,
                payload,
                checksums: entry.checksums.clone(),
                tier: Tier::Dram,
                is_guest: entry.guest != Guest::No,
                is_verified: false,
            };
            (Read::Dram(block), Some(unread))
        });
        if let (Read::Dram(block), Some(context)) = (&read, unread) {
            self.read_or_gone(context, slot_bytes_of(&block.payload));
        }
        read
    }

    /// Verifies the parts asked for (all if empty) of a dram copy; what fails is quarantined.
    pub(super) fn verified(&self, at: Hashed, mut block: Block, parts: &[u32]) -> Fetch {
        if block.verify(parts) {
            return Fetch::Hit(block);
        }
        self.quarantine(at, &block);
        Fetch::Corrupt
    }

    /// Takes a damaged dram copy out of use. A colder copy, if there is one, is read next time.
    pub(super) fn quarantine(&self, at: Hashed, block: &Block) {
        self.metrics.corrupt(block.tier).inc();
        self.corrupt_blocks.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            namespace = block.namespace.id().short(),
            hash = ?at.key.hash,
            tier = block.tier.name(),
            "block failed verification and was removed"
        );
        let evicted = self.map.with(at, |shard| {
            let id = shard.find(at)?;
            let payload = shard.get(id)?.payload.as_ref()?;
            if payload.is_same(&block.payload) { shard.take_out(id) } else { None }
        });
        if let Some(evicted) = evicted {
            self.settle(&evicted, EvictReason::Corrupt);
        }
    }

    /// Loads a block from the hottest colder tier into dram, once for all who ask meanwhile.
    pub(super) async fn load(
        &self,
        namespace: &Arc<Namespace>,
        at: Hashed,
        (promotions, deadline): Limits<'_>,
    ) -> Fetch {
        let turn = Flight::join(&self.flights, at.key).turn();
        let Ok(_turn) = timeout_at(deadline, turn).await else { return Fetch::Timeout };
        match self.read(namespace, at) {
            Read::Dram(block) => self.verified(at, block, &[]),
            Read::Pending => Fetch::Pending,
            Read::Absent => Fetch::Miss,
            Read::Cold => self.load_in_turn(namespace, at, (promotions, deadline)).await,
        }
    }

    /// Tries the colder tiers, hot to cold, until one delivers right bytes.
    async fn load_in_turn(
        &self,
        namespace: &Arc<Namespace>,
        at: Hashed,
        limits: Limits<'_>,
    ) -> Fetch {
        let mut worst = Fetch::Miss;
        for store in &self.cold {
            let mut tried = None;
            for _ in 0..PLACES_MAX {
                // Not there, but somewhere else by now: the tier has moved it.
                let copy = self.cold_copy(store.tier(), at);
                let Some(copy) = copy.filter(|copy| tried != Some(copy.location)) else { break };
                tried = Some(copy.location);
                match self.load_copy(store.as_ref(), namespace, (at, &copy), limits).await {
                    Fetch::Hit(block) => return Fetch::Hit(block),
                    outcome => worst = outcome,
                }
            }
        }
        worst
    }

    fn cold_copy(&self, tier: Tier, at: Hashed) -> Option<ColdCopy> {
        self.map.with(at, |shard| {
            let entry = shard.entry(at)?;
            let location = entry.cold(tier)?;
            Some(ColdCopy { location, len: entry.len, checksums: entry.checksums.clone() })
        })
    }

    /// Loads one copy into dram and verifies it.
    async fn load_copy(
        &self,
        store: &dyn BlockStore,
        namespace: &Arc<Namespace>,
        (at, copy): (Hashed, &ColdCopy),
        (promotions, deadline): Limits<'_>,
    ) -> Fetch {
        let slot = slot_bytes(copy.len, namespace.layout().is_opaque());
        let room = self.room_to_load(namespace, (slot, copy.len), promotions);
        let Some((writer, may_stay)) = room else { return Fetch::Busy };
        let read = self.load_from(store, namespace, at, copy.location, (writer, deadline));
        let payload = match read.await {
            Ok(payload) => payload,
            Err(outcome) => return outcome,
        };
        let (tier, checksums) = (store.tier(), copy.checksums.clone());
        let (namespace, is_guest) = (Arc::clone(namespace), tier == Tier::Object);
        let hash = at.key.hash;
        let mut block =
            Block { namespace, hash, payload, checksums, tier, is_guest, is_verified: false };
        if block.verify(&[]) {
            if may_stay {
                self.promote(at, slot, &block);
            }
            return Fetch::Hit(block);
        }
        self.metrics.corrupt(tier).inc();
        self.corrupt_blocks.fetch_add(1, Ordering::Relaxed);
        let namespace = *block.namespace.id();
        let wrong = Wanted { namespace, hash: at.key.hash, location: copy.location };
        if !store.is_damaged(&wrong) {
            return Fetch::Corrupt;
        }
        let forgotten = self.forget(store, &block.namespace, at, copy.location);
        match timeout_at(deadline, forgotten).await {
            Ok(()) => Fetch::Corrupt,
            Err(_elapsed) => Fetch::Timeout,
        }
    }

    /// Reads one block from one tier, within the deadline.
    async fn load_from(
        &self,
        store: &dyn BlockStore,
        namespace: &Namespace,
        at: Hashed,
        location: Location,
        (writer, deadline): (BlockWriter, Instant),
    ) -> Result<Payload, Fetch> {
        let wanted = Wanted { namespace: *namespace.id(), hash: at.key.hash, location };
        let len = u32::try_from(writer.len()).unwrap_or(u32::MAX);
        let loading = self.costs.begin(store.tier(), u64::from(len));
        match timeout_at(deadline, store.get(wanted, writer)).await {
            Ok(Ok(Load::Hit(writer))) => {
                loading.came();
                seal(vec![writer], len).map_err(|_lost| Fetch::Miss)
            }
            Ok(Ok(Load::Busy(_))) => Err(Fetch::Busy),
            Ok(Ok(Load::Miss)) => {
                self.drop_location(store.tier(), at, location);
                Err(Fetch::Miss)
            }
            Ok(Err(error)) => {
                loading.failed();
                if let Some(left_out) = self.failed_reads.turn() {
                    let tier = store.tier().name();
                    tracing::warn!(%error, tier, left_out, "tier failed to read a block");
                }
                Err(Fetch::Miss)
            }
            Err(_elapsed) => {
                loading.timed_out();
                Err(Fetch::Timeout)
            }
        }
    }

    /// Makes a loaded block resident, if it is still in the map and nobody was faster.
    fn promote(&self, at: Hashed, slot: usize, block: &Block) {
        let age = self.map.ages(1);
        self.map.with(at, |shard| {
            let Some(id) = shard.find(at) else { return };
            let Some(entry) = shard.get_mut(id) else { return };
            if entry.payload.is_some() || entry.hottest().is_none() {
                return;
            }
            // Removed and put with other bytes meanwhile: this is not what the entry speaks of.
            if entry.checksums != block.checksums || usize::try_from(entry.len) != Ok(block.len()) {
                return;
            }
            block.payload.set_owner(Map::owner(at, id));
            entry.payload = Some(block.payload.clone());
            // It left its context with dram.
            entry.note_read();
            entry.context = 0;
            if block.is_guest && entry.guest == Guest::No && entry.cold(Tier::Nvme).is_none() {
                entry.guest = Guest::Unused;
            }
            // Not in the order: its age does not count in the extent yet.
            entry.age = 0;
            shard.enter_order(id, (slot, block.namespace.account().lane()), at.code);
            shard.touch(id, age);
            shard.push(stored(at.key, Tier::Dram));
            self.count_resident(&block.payload);
        });
    }

    /// Takes note of a use of a block. One that dram has from the object tier is worth a copy on nvme
    /// when it is used again.
    pub(super) fn used(&self, at: Hashed, block: &Block) {
        let mut uses = 0;
        let stays = self.map.with(at, |shard| {
            let Some(entry) = shard.find(at).and_then(|id| shard.get_mut(id)) else { return false };
            uses = entry.note_use();
            if !block.is_guest {
                return false;
            }
            match entry.guest {
                Guest::No => false,
                Guest::Unused => {
                    entry.guest = Guest::Used;
                    false
                }
                Guest::Used if entry.payload.is_none() => false,
                Guest::Used => {
                    entry.guest = Guest::No;
                    true
                }
            }
        });
        self.popular.note(at.key, uses);
        if stays {
            self.demote_later(std::iter::once(at));
        }
    }

    /// Quarantines a colder copy: out of the map first, then off the tier.
    async fn forget(
        &self,
        store: &dyn BlockStore,
        namespace: &Namespace,
        at: Hashed,
        location: Location,
    ) {
        self.drop_location(store.tier(), at, location);
        // A tier that does not note it has said so in the log.
        drop(
            self.forget_copies(namespace, vec![Gone::from_tier(at, store.tier(), location)]).await,
        );
    }
}
