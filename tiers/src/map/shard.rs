//! One shard of the map: entries, their eviction orders, their events. Always used under its lock.

use std::{collections::HashMap, sync::Arc};

use hashbrown::HashTable;

use super::{
    Hashed, code_of,
    entry::{Entry, Location, NO_CLASS, slot_bytes},
    removed,
};
use crate::{
    account::{Choice, Leaving, SHARED_LANE},
    block::{BlockHash, BlockKey},
    description::Description,
    dram::Payload,
    event::{Drained, EventRing, TierEvent},
    evict::{EntryId, Eviction, Lru},
    tier::Tier,
};

/// The eviction order of one slot size, for one tenant or for all that share a lane.
#[derive(Debug)]
struct Class {
    slot_bytes: usize,
    lane: u16,
    order: Box<dyn Eviction>,
}

/// Which blocks may leave: those of a slot size, or all, of whom `choice` says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Leavers<'a> {
    pub(crate) slot_bytes: Option<usize>,
    pub(crate) choice: &'a Choice<'a>,
}

impl Leavers<'_> {
    fn may_be_in(&self, class: &Class) -> bool {
        self.slot_bytes.is_none_or(|bytes| bytes == class.slot_bytes)
            && self.choice.may(class.lane, class.slot_bytes)
    }
}

/// A [`Description`] as the map keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Described {
    pub(crate) parent: Option<BlockHash>,
    pub(crate) position: u32,
    pub(crate) tokens: Box<[u32]>,
    /// Shared by blocks of the same adapter.
    pub(crate) lora_name: Arc<str>,
}

impl Described {
    /// With its tokens, or without.
    pub(crate) fn to_description(&self, with_tokens: bool) -> Description {
        Description {
            parent: self.parent,
            position: self.position,
            tokens: if with_tokens { self.tokens.to_vec() } else { Vec::new() },
            lora_name: self.lora_name.to_string(),
        }
    }
}

/// What an eviction took out of dram. Dropping the payload gives the memory back: do it after the
/// shard's lock has been let go.
#[derive(Debug)]
pub(crate) struct Evicted {
    pub(crate) key: BlockKey,
    pub(crate) len: u32,
    pub(crate) context: u32,
    /// The dram copy; `None` for the fragment of a block whose other parts never came.
    pub(crate) payload: Option<Payload>,
    /// Whether the entry has left the map, too (no colder copy).
    pub(crate) gone: bool,
    /// Held until dropped: parts of a fragment.
    fragment: Option<Box<super::Staging>>,
    /// Dropped last: by then the memory has gone back.
    _leaving: Option<Leaving>,
}

impl Evicted {
    /// Bytes of memory that the block, or what there was of it, occupied.
    pub(crate) fn slot_bytes(&self) -> u64 {
        slot_bytes(self.payload.as_ref(), self.fragment.as_deref())
    }
}

/// One shard.
#[derive(Debug)]
pub(crate) struct Shard {
    seed: u64,
    table: HashTable<EntryId>,
    slab: Vec<Option<Entry>>,
    vacant: Vec<EntryId>,
    classes: Vec<Class>,
    descriptions: HashMap<EntryId, Described>,
    /// The name in the last description: most have the same, and share it.
    lora_name: Arc<str>,
    pub(crate) events: EventRing,
}

fn index(id: EntryId) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

impl Shard {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            seed,
            table: HashTable::new(),
            slab: Vec::new(),
            vacant: Vec::new(),
            classes: Vec::new(),
            descriptions: HashMap::new(),
            lora_name: "".into(),
            events: EventRing::default(),
        }
    }

    /// The id of the entry with this key.
    pub(crate) fn find(&self, at: Hashed) -> Option<EntryId> {
        self.table.find(at.code, |id| self.get(*id).is_some_and(|e| e.key == at.key)).copied()
    }

    pub(crate) fn get(&self, id: EntryId) -> Option<&Entry> {
        self.slab.get(index(id))?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: EntryId) -> Option<&mut Entry> {
        self.slab.get_mut(index(id))?.as_mut()
    }

    /// The entry with this key.
    pub(crate) fn entry(&self, at: Hashed) -> Option<&Entry> {
        self.get(self.find(at)?)
    }

    /// Adds an entry; its key must not be in the map.
    pub(crate) fn insert(&mut self, at: Hashed, entry: Entry) -> EntryId {
        let id = match self.vacant.pop() {
            Some(id) => id,
            None => {
                self.slab.push(None);
                EntryId::try_from(self.slab.len() - 1).unwrap_or(EntryId::MAX)
            }
        };
        if let Some(place) = self.slab.get_mut(index(id)) {
            *place = Some(entry);
        }
        let (slab, seed) = (&self.slab, self.seed);
        self.table.insert_unique(at.code, id, |id| {
            let entry = slab.get(index(*id)).and_then(Option::as_ref);
            entry.map_or(0, |entry| code_of(seed, &entry.key))
        });
        id
    }

    /// Takes an entry out, with its place in the eviction order and its description.
    pub(crate) fn remove(&mut self, at: Hashed) -> Option<Entry> {
        let found = self.table.find_entry(at.code, |id| {
            self.slab.get(index(*id)).and_then(Option::as_ref).is_some_and(|e| e.key == at.key)
        });
        let (id, _) = found.ok()?.remove();
        self.leave_order(id);
        self.descriptions.remove(&id);
        self.vacant.push(id);
        self.slab.get_mut(index(id))?.take()
    }

    /// Puts an entry into the eviction order of its slot size and lane as the most recent one.
    pub(crate) fn enter_order(&mut self, id: EntryId, (slot_bytes, lane): (usize, u16), tag: u64) {
        let is_its = |class: &Class| class.slot_bytes == slot_bytes && class.lane == lane;
        let class = match self.classes.iter().position(is_its) {
            Some(class) => class,
            None => {
                let order = if lane == SHARED_LANE { Lru::new() } else { Lru::sparse() };
                self.classes.push(Class { slot_bytes, lane, order: Box::new(order) });
                self.classes.len() - 1
            }
        };
        let Some(entry) = self.get_mut(id) else { return };
        if entry.class != NO_CLASS {
            return;
        }
        entry.class = u16::try_from(class).unwrap_or(NO_CLASS);
        if let Some(class) = self.classes.get_mut(class) {
            class.order.insert(id, tag);
        }
    }

    /// Moves entries to the lanes that `lane_of` says for their namespaces, in their order.
    pub(crate) fn change_lanes(&mut self, lane_of: &dyn Fn(u32) -> u16) {
        let mut moving = Vec::new();
        for (id, entry) in (0..).zip(&self.slab) {
            let Some(entry) = entry else { continue };
            let Some(class) = self.classes.get(usize::from(entry.class)) else { continue };
            let lane = lane_of(entry.key.namespace);
            if lane != class.lane {
                let code = code_of(self.seed, &entry.key);
                moving.push((entry.age, id, (class.slot_bytes, lane), code));
            }
        }
        moving.sort_unstable();
        for (_, id, class, code) in moving {
            let Some(entry) = self.get_mut(id) else { continue };
            let before = std::mem::replace(&mut entry.class, NO_CLASS);
            if let Some(before) = self.classes.get_mut(usize::from(before)) {
                before.order.remove(id);
            }
            self.enter_order(id, class, code);
        }
    }

    fn leave_order(&mut self, id: EntryId) {
        let Some(entry) = self.get_mut(id) else { return };
        let class = std::mem::replace(&mut entry.class, NO_CLASS);
        if let Some(payload) = &entry.payload {
            payload.change_age(entry.age, 0);
        }
        if let Some(class) = self.classes.get_mut(usize::from(class)) {
            class.order.remove(id);
        }
    }

    /// Marks an entry as used at `age`.
    pub(crate) fn touch(&mut self, id: EntryId, age: u64) {
        let Some(entry) = self.get_mut(id) else { return };
        if let Some(payload) = &entry.payload {
            payload.change_age(entry.age, age);
        }
        entry.age = age;
        let class = usize::from(entry.class);
        if let Some(class) = self.classes.get_mut(class) {
            class.order.touch(id);
        }
    }

    /// The age of the block that would leave next among those that may.
    pub(crate) fn coldest(&mut self, leavers: Leavers<'_>, now: u64) -> Option<u64> {
        self.next_to_leave(leavers, now).map(|(age, _)| age)
    }

    /// As [`coldest`](Self::coldest), with the class it is in.
    fn next_to_leave(&mut self, leavers: Leavers<'_>, now: u64) -> Option<(u64, usize)> {
        (0..self.classes.len())
            .filter_map(|class| {
                self.classes.get(class).filter(|class| leavers.may_be_in(class))?;
                Some((self.coldest_in(class, now)?, class))
            })
            .min()
    }

    /// The age of the coldest evictable block of a class. Colder ones that are pinned are in use:
    /// they become the most recent, and are not passed over again by everybody who makes room.
    fn coldest_in(&mut self, class: usize, now: u64) -> Option<u64> {
        for _ in 0..self.classes.get(class)?.order.len() {
            let id = self.classes.get_mut(class)?.order.coldest()?;
            let entry = self.get(id)?;
            if entry.is_evictable() {
                return Some(entry.age);
            }
            self.touch(id, now);
        }
        None
    }

    /// Takes the coldest evictable block of those that may leave out of dram.
    pub(crate) fn evict(&mut self, leavers: Leavers<'_>, now: u64) -> Option<Evicted> {
        let (_, class) = self.next_to_leave(leavers, now)?;
        self.evict_of(class, leavers.choice, Entry::is_evictable)
    }

    /// Takes the coldest evictable block that no colder tier has out of the map, of those that may leave.
    pub(crate) fn evict_entry(&mut self, leavers: Leavers<'_>, now: u64) -> Option<Evicted> {
        let mut classes = Vec::new();
        for class in 0..self.classes.len() {
            if self.classes.get(class).is_some_and(|class| leavers.may_be_in(class)) {
                classes.extend(self.coldest_in(class, now).map(|age| (age, class)));
            }
        }
        classes.sort_unstable();
        let alone = |entry: &Entry| entry.is_evictable() && entry.cold == [None, None];
        classes.into_iter().find_map(|(_, class)| self.evict_of(class, leavers.choice, alone))
    }

    fn evict_of(
        &mut self,
        class: usize,
        choice: &Choice<'_>,
        evictable: impl Fn(&Entry) -> bool,
    ) -> Option<Evicted> {
        let Self { classes, slab, .. } = self;
        let class = classes.get_mut(class)?;
        let leaving = choice.begin(class.lane, class.slot_bytes)?;
        let id = class.order.evict(0, &mut |id| {
            slab.get(index(id)).and_then(Option::as_ref).is_some_and(&evictable)
        })?;
        if let Some(entry) = self.get_mut(id) {
            // The policy has let go of it already.
            entry.class = NO_CLASS;
            if let Some(payload) = &entry.payload {
                payload.change_age(entry.age, 0);
            }
        }
        self.take_from_dram(id, leaving)
    }

    /// Whether the block `id`, or what there is of it, is evictable and lies in `extent`.
    pub(crate) fn may_evict_from(&self, id: EntryId, extent: u32) -> bool {
        let entry = self.get(id).filter(|entry| entry.extent() == Some(extent));
        entry.is_some_and(Entry::is_evictable)
    }

    /// Takes the block `id` out of dram if it [may leave](Self::may_evict_from) `extent`, and `choice` says so.
    pub(crate) fn evict_from(
        &mut self,
        id: EntryId,
        extent: u32,
        choice: &Choice<'_>,
    ) -> Option<Evicted> {
        if !self.may_evict_from(id, extent) {
            return None;
        }
        let class = self.classes.get(usize::from(self.get(id)?.class))?;
        let leaving = choice.begin(class.lane, class.slot_bytes)?;
        self.leave_order(id);
        self.take_from_dram(id, leaving)
    }

    /// Takes the block `id` out of dram, whoever reads it.
    pub(crate) fn take_out(&mut self, id: EntryId) -> Option<Evicted> {
        self.leave_order(id);
        self.take_from_dram(id, None)
    }

    fn take_from_dram(&mut self, id: EntryId, leaving: Option<Leaving>) -> Option<Evicted> {
        let seed = self.seed;
        let entry = self.get_mut(id)?;
        let at = Hashed { key: entry.key, code: code_of(seed, &entry.key) };
        let payload = entry.payload.take();
        let fragment = entry.staging.take();
        let (len, context) = (entry.len, entry.context);
        let gone = entry.hottest().is_none();
        if payload.is_some() {
            self.events.push(removed(at.key, Tier::Dram));
        }
        if gone {
            self.remove(at);
        }
        Some(Evicted { key: at.key, len, context, payload, gone, fragment, _leaving: leaving })
    }

    /// Attaches what is known of a block's place in its chain; false if that was known.
    pub(crate) fn describe(&mut self, id: EntryId, description: Described) -> bool {
        if self.descriptions.get(&id) == Some(&description) {
            return false;
        }
        let mut description = description;
        if description.lora_name == self.lora_name {
            description.lora_name = Arc::clone(&self.lora_name);
        } else {
            self.lora_name = Arc::clone(&description.lora_name);
        }
        let readable = self.get(id).filter(|entry| entry.hottest().is_some());
        if let Some(key) = readable.map(|entry| entry.key) {
            self.events.push(TierEvent::Described { key });
        }
        self.descriptions.insert(id, description);
        true
    }

    /// Takes what is to be told to `feed`.
    pub(crate) fn drain_events(&mut self, feed: u64) -> Drained {
        match self.events.take(feed) {
            Some(events) => Drained::Events(events),
            None => Drained::Resync(self.readable()),
        }
    }

    /// What is known of a block's place in its chain.
    pub(crate) fn described(&self, id: EntryId) -> Option<&Described> {
        self.descriptions.get(&id)
    }

    pub(crate) fn push(&mut self, event: TierEvent) {
        self.events.push(event);
    }

    /// All readable copies, those of one block from hot to cold.
    pub(crate) fn readable(&self) -> Vec<(BlockKey, Tier)> {
        let entries = self.slab.iter().flatten();
        entries.flat_map(|entry| entry.tiers().map(|tier| (entry.key, tier))).collect()
    }

    /// Visits the readable blocks in dram: key, bytes, last use.
    pub(crate) fn in_dram(&self, visit: &mut dyn FnMut(BlockKey, u32, u64)) {
        for entry in self.slab.iter().flatten().filter(|entry| entry.payload.is_some()) {
            visit(entry.key, entry.len, entry.age);
        }
    }

    /// Visits the blocks that a colder tier has: namespace, place, bytes, last use.
    pub(crate) fn survey(&self, tier: Tier, visit: &mut dyn FnMut(u32, Location, u32, u64)) {
        for entry in self.slab.iter().flatten() {
            if let Some(location) = entry.cold(tier) {
                visit(entry.key.namespace, location, entry.len, entry.age);
            }
        }
    }

    /// Appends all copies on a tier of whose places `is_one` says so.
    pub(crate) fn copies_on(
        &self,
        tier: Tier,
        is_one: &mut dyn FnMut(Location) -> bool,
        found: &mut Vec<(BlockKey, Location)>,
    ) {
        for entry in self.slab.iter().flatten() {
            if let Some(location) = entry.cold(tier).filter(|location| is_one(*location)) {
                found.push((entry.key, location));
            }
        }
    }

    /// Appends the last use of what `tier` has among `count` entries from place `from` on; places
    /// beyond the last one are those from the first one on.
    pub(crate) fn ages_on(&self, tier: Tier, from: usize, count: usize, ages: &mut Vec<u64>) {
        let from = from % self.slab.len().max(1);
        let (before, after) = self.slab.split_at_checked(from).unwrap_or_default();
        let sampled = after.iter().chain(before).take(count).flatten();
        ages.extend(sampled.filter(|e| e.cold(tier).is_some()).map(|entry| entry.age));
    }

    /// Appends what is in dram and [lacks](Entry::lacks) a copy on `tier` among `count` entries from place `from` on, and
    /// whether it has been read. Returns the next place; `None` at the end.
    pub(crate) fn lacking(
        &self,
        tier: Tier,
        from: usize,
        count: usize,
        found: &mut Vec<(BlockKey, bool)>,
    ) -> Option<usize> {
        let places = self.slab.get(from..).unwrap_or_default().iter().take(count);
        let lacking = places.flatten().filter(|entry| entry.lacks(tier));
        found.extend(lacking.map(|entry| (entry.key, entry.context == 0)));
        let next = from.saturating_add(count);
        (next < self.slab.len()).then_some(next)
    }

    /// All entries.
    #[cfg(test)]
    pub(crate) fn entries(&self) -> impl Iterator<Item = (EntryId, &Entry)> {
        (0..).zip(&self.slab).filter_map(|(id, entry)| Some((id, entry.as_ref()?)))
    }

    /// Entries that stand in an eviction order.
    #[cfg(test)]
    pub(crate) fn ordered(&self) -> usize {
        self.classes.iter().map(|class| class.order.len()).sum()
    }

    /// Bytes of the slab and the table, not of the eviction orders.
    pub(crate) fn allocated_bytes(&self) -> usize {
        self.slab.capacity() * size_of::<Option<Entry>>() + self.table.allocation_size()
    }
}
