//! Get: dram as it is, colder tiers through dram; every byte verified before it leaves.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, atomic::Ordering},
};

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::{Shared, verbs::slot_bytes_of};
use crate::{
    block::{BlockHash, BlockKey},
    checksum::part_checksum,
    dram::{BlockWriter, Payload, seal, slot_bytes},
    error::Result,
    map::{Checksums, Hashed, Location, Map, removed, stored},
    metrics::EvictReason,
    namespace::Namespace,
    store::{BlockStore, Load, Outgoing, Wanted},
    tier::Tier,
};

/// A readable block. Its memory stays as it is while this exists.
#[derive(Debug, Clone)]
pub struct Block {
    namespace: Arc<Namespace>,
    payload: Payload,
    checksums: Checksums,
    tier: Tier,
}

impl Block {
    /// The tier it was read from.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Bytes of the whole block.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a block is never empty")]
    pub fn len(&self) -> usize {
        self.payload.as_ref().len()
    }

    /// One declared part, without copying.
    #[must_use]
    pub fn part(&self, part: u32) -> Option<PartBytes> {
        let part = usize::try_from(part).ok()?;
        let range = self.namespace.layout().range(part, self.len())?;
        let checksum = self.checksums.get(part)?;
        Some(PartBytes { payload: self.payload.clone(), range, checksum })
    }
}

/// The bytes of one part in the arena, with their checksum. Holding it pins the block.
#[derive(Debug, Clone)]
pub struct PartBytes {
    payload: Payload,
    range: Range<usize>,
    checksum: u64,
}

impl PartBytes {
    /// A whole block, without its checksums.
    pub(super) fn whole(payload: Payload) -> Self {
        let range = 0..payload.as_ref().len();
        Self { payload, range, checksum: 0 }
    }

    /// The checksum made where the bytes entered.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.checksum
    }
}

impl AsRef<[u8]> for PartBytes {
    fn as_ref(&self) -> &[u8] {
        self.payload.as_ref().get(self.range.clone()).unwrap_or_default()
    }
}

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

/// What the map says of a block that is to be read.
pub(super) enum Read {
    Dram(Block),
    Cold,
    Pending,
    Absent,
}

/// Loads under way: one for each block. A waiter looks again when the first one is done, and loads
/// itself if that one failed.
#[derive(Debug, Default)]
pub(crate) struct SingleFlight(Mutex<HashMap<BlockKey, Arc<tokio::sync::Mutex<()>>>>);

impl SingleFlight {
    fn join(&self, key: BlockKey) -> Arc<tokio::sync::Mutex<()>> {
        Arc::clone(self.0.lock().entry(key).or_default())
    }

    fn leave(&self, key: BlockKey, flight: Arc<tokio::sync::Mutex<()>>) {
        let mut flights = self.0.lock();
        drop(flight);
        if flights.get(&key).is_some_and(|flight| Arc::strong_count(flight) == 1) {
            flights.remove(&key);
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.0.lock().len()
    }
}

/// Leaves a flight when dropped, also when the load was cancelled. It has the only reference of its
/// reader, so that the last one to leave finds none but that of the table.
struct Flight<'a> {
    flights: &'a SingleFlight,
    key: BlockKey,
    flight: Option<Arc<tokio::sync::Mutex<()>>>,
}

impl<'a> Flight<'a> {
    fn join(flights: &'a SingleFlight, key: BlockKey) -> Self {
        Self { flights, key, flight: Some(flights.join(key)) }
    }

    /// Waits for the turn of this reader.
    async fn turn(&self) -> Option<tokio::sync::MutexGuard<'_, ()>> {
        match &self.flight {
            Some(flight) => Some(flight.lock().await),
            None => None,
        }
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
                let claimed = entry.staging.as_ref().is_some_and(|staging| staging.has_claims());
                let read = match (entry.hottest(), claimed) {
                    (Some(_), _) => Read::Cold,
                    (None, true) => Read::Pending,
                    (None, false) => Read::Absent,
                };
                return (read, None);
            };
            let unread = std::mem::take(&mut entry.context);
            let block = Block {
                namespace: Arc::clone(namespace),
                payload,
                checksums: entry.checksums.clone(),
                tier: Tier::Dram,
            };
            (Read::Dram(block), Some(unread))
        });
        if let (Read::Dram(block), Some(context)) = (&read, unread) {
            self.read_or_gone(context, slot_bytes_of(&block.payload));
        }
        read
    }

    /// Verifies the parts asked for (all if empty) of a dram copy; what fails is quarantined.
    pub(super) fn verified(&self, at: Hashed, block: Block, parts: &[u32]) -> Fetch {
        if block.is_right(&at.key.hash, parts) {
            return Fetch::Hit(block);
        }
        self.quarantine(at, &block);
        Fetch::Corrupt
    }

    /// Takes a damaged dram copy out of use. A colder copy, if there is one, is read next time.
    fn quarantine(&self, at: Hashed, block: &Block) {
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
        deadline: Instant,
    ) -> Fetch {
        let flight = Flight::join(&self.flights, at.key);
        let Ok(turn) = timeout_at(deadline, flight.turn()).await else { return Fetch::Timeout };
        let fetch = match self.read(namespace, at) {
            Read::Dram(block) => self.verified(at, block, &[]),
            Read::Pending => Fetch::Pending,
            Read::Absent => Fetch::Miss,
            Read::Cold => self.load_in_turn(namespace, at, deadline).await,
        };
        drop(turn);
        drop(flight);
        fetch
    }

    /// Tries the colder tiers, hot to cold, until one delivers right bytes.
    async fn load_in_turn(
        &self,
        namespace: &Arc<Namespace>,
        at: Hashed,
        deadline: Instant,
    ) -> Fetch {
        let mut worst = Fetch::Miss;
        for store in &self.cold {
            let found = self.map.with(at, |shard| {
                let id = shard.find(at)?;
                let entry = shard.get_mut(id)?;
                let location = (*entry.cold_mut(store.tier())?)?;
                Some((location, entry.len, entry.checksums.clone()))
            });
            let Some((location, len, checksums)) = found else { continue };
            let slot = slot_bytes(len, namespace.layout().is_opaque());
            let Some(mut room) = self.make_room(slot, &[len], 0) else { return Fetch::Busy };
            let Some(writer) = room.pop() else { return Fetch::Busy };
            let started = Instant::now();
            match self.load_from(store.as_ref(), namespace, at, location, (writer, deadline)).await
            {
                Ok(payload) => {
                    let tier = store.tier();
                    let block =
                        Block { namespace: Arc::clone(namespace), payload, checksums, tier };
                    if !block.is_right(&at.key.hash, &[]) {
                        self.metrics.corrupt(tier).inc();
                        self.corrupt_blocks.fetch_add(1, Ordering::Relaxed);
                        let forgotten = self.forget(store.as_ref(), namespace, at, location);
                        if timeout_at(deadline, forgotten).await.is_err() {
                            return Fetch::Timeout;
                        }
                        worst = Fetch::Corrupt;
                        continue;
                    }
                    self.costs.record(tier, u64::from(len), started.elapsed());
                    self.promote(at, slot, &block);
                    return Fetch::Hit(block);
                }
                Err(outcome) => worst = outcome,
            }
        }
        worst
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
        match timeout_at(deadline, store.get(wanted, writer)).await {
            Ok(Ok(Load::Hit(writer))) => seal(vec![writer], len).map_err(|_lost| Fetch::Miss),
            Ok(Ok(Load::Busy(_))) => Err(Fetch::Busy),
            Ok(Ok(Load::Miss)) => {
                self.drop_location(store.tier(), at, location);
                Err(Fetch::Miss)
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, tier = store.tier().name(), "tier failed to read a block");
                Err(Fetch::Miss)
            }
            Err(_elapsed) => Err(Fetch::Timeout),
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
            // Not in the order: its age does not count in the extent yet.
            entry.age = 0;
            shard.enter_order(id, slot, at.code);
            shard.touch(id, age);
            shard.push(stored(at.key, Tier::Dram));
            self.count_resident(&block.payload);
        });
    }

    /// Drops what a colder tier no longer has.
    fn drop_location(&self, tier: Tier, at: Hashed, location: Location) {
        let gone = self.map.with(at, |shard| {
            let id = shard.find(at)?;
            let place = shard.get_mut(id)?.cold_mut(tier)?;
            if *place != Some(location) {
                return None;
            }
            *place = None;
            shard.push(removed(at.key, tier));
            let entry = shard.get(id)?;
            if entry.hottest().is_some() || entry.staging.is_some() {
                None
            } else {
                shard.remove(at)
            }
        });
        if let Some(entry) = gone {
            self.map.count(false);
            self.count_gone(at.key.namespace, entry.len);
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
        let wanted = Wanted { namespace: *namespace.id(), hash: at.key.hash, location };
        if let Err(error) = store.remove(&[wanted]).await {
            tracing::warn!(%error, tier = store.tier().name(), "damaged block stays on its tier");
        }
    }

    /// Copies a dram block to a colder tier.
    pub(super) async fn demote(
        &self,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        tier: Tier,
    ) -> Result<bool> {
        let Some(store) = self.cold.iter().find(|store| store.tier() == tier) else {
            return Ok(false);
        };
        let at = self.map.hashed(namespace.index(), hash);
        // One at a time for each block: a second copy would be on the tier and in no map.
        let flight = Flight::join(&self.demotions, at.key);
        let _turn = flight.turn().await;
        let block = self.map.with(at, |shard| {
            let entry = shard.get_mut(shard.find(at)?)?;
            let is_there = entry.cold_mut(tier).is_some_and(|place| place.is_some());
            Some((entry.payload.clone()?, entry.checksums.clone(), is_there))
        });
        let Some((payload, checksums, is_there)) = block else { return Ok(false) };
        if is_there {
            return Ok(true);
        }
        let outgoing = Outgoing {
            namespace: Arc::clone(namespace),
            hash,
            payload,
            checksums,
            urgency: crate::store::Urgency::Background,
            reused: false,
        };
        let payload = outgoing.payload.clone();
        let location = store.put(outgoing).await?;
        let kept = self.map.with(at, |shard| {
            let Some(entry) = shard.find(at).and_then(|id| shard.get_mut(id)) else { return false };
            // Removed and put again meanwhile: the copy is not of what is here now.
            if !entry.payload.as_ref().is_some_and(|now| now.is_same(&payload)) {
                return false;
            }
            let Some(place) = entry.cold_mut(tier) else { return false };
            *place = Some(location);
            shard.push(stored(at.key, tier));
            true
        });
        if kept {
            self.metrics.stored(tier).inc();
        } else {
            let unwanted = Wanted { namespace: *namespace.id(), hash, location };
            store.remove(&[unwanted]).await?;
        }
        Ok(kept)
    }
}

impl Block {
    fn is_right(&self, hash: &BlockHash, parts: &[u32]) -> bool {
        let id = self.namespace.id();
        let declared = (0_u32..).zip(self.namespace.layout().parts());
        let mut asked = declared.filter(|(part, _)| parts.is_empty() || parts.contains(part));
        asked.all(|(part, spec)| {
            self.part(part).is_some_and(|bytes| {
                part_checksum(id, hash, spec.group, spec.rank, bytes.as_ref()) == bytes.checksum
            })
        })
    }
}
