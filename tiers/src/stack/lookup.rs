//! Lookup: one pass over the map, and pins on what it found.

use std::ops::Range;

use super::{PartBytes, Shared, Stack};
use crate::{
    block::{BlockKey, Hashes},
    dram::{Payload, slot_bytes},
    evict::EntryId,
    map::{Entry, Hashed, Map, Shard, chunks},
    namespace::Namespace,
    tier::{Run, Tier, TierCounts},
};

/// What a lookup should do besides finding the prefix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ask {
    /// Also report what is present behind the first gap.
    pub sparse: bool,
    /// Pin the head of the prefix, up to so many bytes.
    pub pin_bytes_max: Option<u64>,
}

/// A block that will not be evicted while this exists. Give it to [`super::Stack::unpin`] when done.
#[derive(Debug)]
pub struct Pin {
    /// The map entry, as [`Map::owner`] names it. It may be another block's by now.
    owner: u64,
    payload: Payload,
}

impl Pin {
    /// Bytes of memory that the pin holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        u64::try_from(self.payload.slot_bytes()).unwrap_or(0)
    }

    /// Views the pinned block as a part of itself, for tests of what a pin protects.
    #[must_use]
    pub fn contents(&self) -> PartBytes {
        PartBytes::whole(self.payload.clone())
    }
}

/// What a lookup found.
#[derive(Debug, Default)]
pub struct Answer {
    /// How many hashes were asked for.
    pub asked: u32,
    /// Leading blocks that are readable now.
    pub prefix_blocks: u32,
    /// The longest prefix of present or pending blocks.
    pub runs: Vec<Run>,
    /// Present runs behind the first gap, if asked for.
    pub sparse: Vec<Run>,
    /// The prefix by tier; the sum is `asked`.
    pub counts: TierCounts,
    /// Pins on the first k positions, k being their number.
    pub pins: Vec<Pin>,
    /// Bytes of memory that the pins hold.
    pub pinned_bytes: u64,
}

/// One position of a lookup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    tier: Tier,
    pending: bool,
    len: u32,
    id: EntryId,
}

impl Found {
    fn of(entry: &Entry, id: EntryId) -> Option<Self> {
        match entry.hottest() {
            Some(tier) => Some(Self { tier, pending: false, len: entry.len, id }),
            None => entry.is_pending().then_some(Self {
                tier: Tier::Dram,
                pending: true,
                len: entry.len,
                id,
            }),
        }
    }
}

/// What can be asked without leases, and counts for nothing.
impl Stack {
    /// As [`lookup`](Self::lookup) without leases, for those who ask what an engine would find: it does
    /// not count as a lookup of one.
    #[must_use]
    pub fn peek(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Answer {
        self.shared.lookup(namespace, hashes, Ask::default())
    }

    /// Which tiers have a block now, hot to cold.
    #[must_use]
    pub fn presence(&self, key: BlockKey) -> [bool; 3] {
        let at = self.shared.map.hashed(key.namespace, key.hash);
        let presence = |shard: &mut Shard| {
            let entry = shard.entry(at)?;
            let mut presence = [false; 3];
            for (has, tier) in presence.iter_mut().zip(Tier::ALL) {
                *has = entry.tiers().any(|known| known == tier);
            }
            Some(presence)
        };
        self.shared.map.with(at, presence).unwrap_or_default()
    }
}

impl Shared {
    pub(super) fn lookup(&self, namespace: &Namespace, hashes: Hashes<'_>, ask: Ask) -> Answer {
        let asked = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        let mut keys = Vec::with_capacity(hashes.len());
        let mut found = Vec::with_capacity(hashes.len());
        let mut builder = Runs::default();
        let mut list = hashes.iter();
        for range in chunks(hashes.len()) {
            let index = namespace.index();
            keys.extend(list.by_ref().take(range.len()).map(|hash| self.map.hashed(index, hash)));
            self.find(&keys, range.clone(), &mut found);
            for position in range {
                let found = found.get(position).copied().flatten();
                builder.add(u32::try_from(position).unwrap_or(u32::MAX), found);
            }
            if builder.gap && !ask.sparse {
                break;
            }
        }
        if !ask.sparse {
            builder.sparse.clear();
        }
        let mut answer = builder.answer(asked);
        if let Some(bytes_max) = ask.pin_bytes_max {
            let in_dram = answer.runs.iter().take_while(|r| r.tier == Tier::Dram && !r.pending);
            let head = in_dram.map(|run| run.end).last().unwrap_or(0);
            let head = found.get(..usize::try_from(head).unwrap_or(0)).unwrap_or_default();
            let head = within(head, bytes_max, namespace.layout().is_opaque());
            self.pin(&mut answer, keys.get(..head).unwrap_or_default(), &found, bytes_max);
        }
        answer
    }

    pub(super) fn bytes_by_tier(&self, namespace: &Namespace, hashes: Hashes<'_>) -> [u64; 3] {
        let keys = self.keys(namespace, hashes);
        let [mut dram, mut nvme, mut object] = [0_u64; 3];
        self.map.visit(&keys, |shard, _position, at| {
            let Some(entry) = shard.entry(at) else { return };
            match entry.hottest() {
                Some(Tier::Dram) => dram += u64::from(entry.len),
                Some(Tier::Nvme) => nvme += u64::from(entry.len),
                Some(Tier::Object) => object += u64::from(entry.len),
                None => {}
            }
        });
        [dram, nvme, object]
    }

    /// Looks up the keys of `range` and appends what is known of them.
    fn find(&self, keys: &[Hashed], range: Range<usize>, found: &mut Vec<Option<Found>>) {
        let chunk = keys.get(range.clone()).unwrap_or_default();
        found.resize(range.end, None);
        let places = found.get_mut(range).unwrap_or_default();
        self.map.visit(chunk, |shard, position, at| {
            let known = shard.find(at).and_then(|id| Found::of(shard.get(id)?, id));
            if let Some(place) = places.get_mut(position) {
                *place = known;
            }
        });
    }

    /// Pins what is still there of `keys`, up to `bytes_max`, and touches it tail first.
    fn pin(&self, answer: &mut Answer, keys: &[Hashed], found: &[Option<Found>], bytes_max: u64) {
        let age = self.map.ages(keys.len());
        let mut pins: Vec<Option<Pin>> = Vec::new();
        pins.resize_with(keys.len(), || None);
        self.map.visit(keys, |shard, position, at| {
            let Some(id) = found.get(position).copied().flatten().map(|found| found.id) else {
                return;
            };
            let Some(entry) = shard.get(id).filter(|entry| entry.key == at.key) else { return };
            let Some(payload) = entry.payload.clone() else { return };
            shard.touch(id, age + reversed(position, keys.len()));
            if let Some(place) = pins.get_mut(position) {
                *place = Some(Pin { owner: Map::owner(at, id), payload });
            }
        });
        // One that was evicted in between ends the head; the pins behind it are let go.
        let mut pinned = 0_u64;
        let fits = |pin: &Pin| {
            pinned = pinned.saturating_add(pin.bytes());
            pinned <= bytes_max
        };
        answer.pins = pins.into_iter().map_while(|pin| pin).take_while(fits).collect();
        answer.pinned_bytes = answer.pins.iter().map(Pin::bytes).sum();
    }

    /// Touches the pinned blocks tail first, then lets go of them.
    pub(super) fn unpin(&self, pins: Vec<Pin>) {
        let age = self.map.ages(pins.len());
        let shard_of = |pin: &Pin| Map::of_owner(pin.owner).0;
        self.map.visit_by(&pins, shard_of, |shard, position, pin| {
            let (_, id) = Map::of_owner(pin.owner);
            let current = shard.get(id).and_then(|entry| entry.payload.as_ref());
            if current.is_some_and(|payload| payload.is_same(&pin.payload)) {
                shard.touch(id, age + reversed(position, pins.len()));
            }
        });
        drop(pins);
    }

    /// Touches what is in the map, tail first; returns how many are in dram.
    pub(super) fn touch_keys(&self, keys: &[Hashed]) -> u32 {
        let age = self.map.ages(keys.len());
        let mut touched = 0;
        self.map.visit(keys, |shard, position, at| {
            let Some(id) = shard.find(at) else { return };
            shard.touch(id, age + reversed(position, keys.len()));
            touched += u32::from(shard.get(id).is_some_and(|entry| entry.payload.is_some()));
        });
        touched
    }
}

/// How many of the first blocks occupy at most `bytes_max` of memory together.
fn within(found: &[Option<Found>], bytes_max: u64, any_length: bool) -> usize {
    let mut bytes = 0_u64;
    let fits = |found: &&Option<Found>| {
        let slot = found.map_or(0, |found| slot_bytes(found.len, any_length));
        bytes = bytes.saturating_add(u64::try_from(slot).unwrap_or(u64::MAX));
        bytes <= bytes_max
    };
    found.iter().take_while(fits).count()
}

/// The age of a position within a list that is touched tail first.
fn reversed(position: usize, len: usize) -> u64 {
    u64::try_from(len.saturating_sub(position + 1)).unwrap_or(0)
}

/// Builds runs position by position.
#[derive(Debug, Default)]
struct Runs {
    prefix: Vec<Run>,
    sparse: Vec<Run>,
    gap: bool,
}

impl Runs {
    fn add(&mut self, position: u32, found: Option<Found>) {
        let Some(found) = found else {
            self.gap = true;
            return;
        };
        let runs = if self.gap { &mut self.sparse } else { &mut self.prefix };
        match runs.last_mut() {
            Some(run)
                if run.end == position
                    && run.tier == found.tier
                    && run.pending == found.pending =>
            {
                run.end += 1;
                run.bytes += u64::from(found.len);
            }
            _ => runs.push(Run {
                start: position,
                end: position + 1,
                tier: found.tier,
                pending: found.pending,
                bytes: u64::from(found.len),
            }),
        }
    }

    fn answer(self, asked: u32) -> Answer {
        let readable = self.prefix.iter().take_while(|run| !run.pending);
        Answer {
            asked,
            prefix_blocks: readable.map(|run| run.end).last().unwrap_or(0),
            counts: TierCounts::of_prefix(&self.prefix, asked),
            runs: self.prefix,
            sparse: self.sparse,
            ..Answer::default()
        }
    }
}
