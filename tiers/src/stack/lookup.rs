//! Lookup: one pass over the map, and pins on what it found.

use super::{Shared, load::PartBytes};
use crate::{
    block::Hashes,
    dram::Payload,
    map::{Entry, Hashed, chunks},
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
    at: Hashed,
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
}

impl Found {
    fn of(entry: &Entry) -> Option<Self> {
        match entry.hottest() {
            Some(tier) => Some(Self { tier, pending: false, len: entry.len }),
            // A fragment whose writers have gone will not become readable by waiting.
            None => entry
                .staging
                .as_ref()
                .is_some_and(|staging| staging.has_claims())
                .then_some(Self { tier: Tier::Dram, pending: true, len: entry.len }),
        }
    }
}

impl Shared {
    pub(super) fn lookup(&self, namespace: &Namespace, hashes: Hashes<'_>, ask: Ask) -> Answer {
        let asked = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        let mut keys = Vec::with_capacity(hashes.len());
        let mut builder = Runs::default();
        let mut list = hashes.iter();
        for range in chunks(hashes.len()) {
            let start = range.start;
            let index = namespace.index();
            keys.extend(list.by_ref().take(range.len()).map(|hash| self.map.hashed(index, hash)));
            let chunk = keys.get(range).unwrap_or_default();
            for (found, position) in self.find(chunk).into_iter().zip(start..) {
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
            self.pin(&mut answer, &keys, bytes_max);
        }
        answer
    }

    fn find(&self, keys: &[Hashed]) -> Vec<Option<Found>> {
        let mut found = vec![None; keys.len()];
        self.map.visit(keys, |shard, position, at| {
            if let Some(place) = found.get_mut(position) {
                *place = shard.entry(at).and_then(Found::of);
            }
        });
        found
    }

    /// Pins the head of the prefix that is in dram, and touches it tail first.
    fn pin(&self, answer: &mut Answer, keys: &[Hashed], bytes_max: u64) {
        let in_dram = answer.runs.iter().take_while(|run| run.tier == Tier::Dram && !run.pending);
        let head = in_dram.map(|run| run.end).last().unwrap_or(0);
        let keys = keys.get(..usize::try_from(head).unwrap_or(0)).unwrap_or_default();
        let age = self.map.ages(keys.len());
        let mut pins: Vec<Option<Pin>> = keys.iter().map(|_| None).collect();
        self.map.visit(keys, |shard, position, at| {
            let Some(id) = shard.find(at) else { return };
            let payload = shard.get(id).and_then(|entry| entry.payload.clone());
            shard.touch(id, age + reversed(position, keys.len()));
            if let (Some(payload), Some(place)) = (payload, pins.get_mut(position)) {
                *place = Some(Pin { at, payload });
            }
        });
        // One that was evicted in between ends the head; the pins behind it are let go.
        for pin in pins {
            let Some(pin) = pin else { break };
            let bytes = answer.pinned_bytes.saturating_add(pin.bytes());
            if bytes > bytes_max {
                break;
            }
            answer.pinned_bytes = bytes;
            answer.pins.push(pin);
        }
    }

    pub(super) fn unpin(&self, pins: Vec<Pin>) {
        let keys: Vec<Hashed> = pins.iter().map(|pin| pin.at).collect();
        self.touch_keys(&keys);
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
