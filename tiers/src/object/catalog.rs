//! The packs of this node and its wards, in memory: in which object, and where in it, each block lies.
//!
//! A location names a pack by a number of this process, and the block by its place in the pack's
//! footer. Numbers are never used twice, so a location outlives nothing: what left is not found.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    num::NonZeroU64,
    sync::Arc,
};

use parking_lot::RwLock;

use super::{
    codec::Coding,
    format::{Footer, PackEntry},
    names::PackId,
};
use crate::{fields::checksum, key::IndexKey, map::Location};

/// Bits of a [`Location`] that count blocks within a pack.
const INDEX_BITS: u32 = 24;

/// Which pack, in this process: 1 for the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct PackNumber(u64);

impl PackNumber {
    /// The location of the pack's block at `index`; `None` for numbers that do not fit.
    pub(super) fn location(self, index: usize) -> Option<Location> {
        let index = u64::try_from(index).ok().filter(|index| index >> INDEX_BITS == 0)?;
        let number = Some(self.0).filter(|number| number >> (64 - INDEX_BITS) == 0)?;
        NonZeroU64::new((number << INDEX_BITS) | index).map(Location)
    }

    /// What a location names.
    pub(super) fn of(location: Location) -> (Self, usize) {
        let packed = location.0.get();
        let index = packed & ((1 << INDEX_BITS) - 1);
        (Self(packed >> INDEX_BITS), usize::try_from(index).unwrap_or(usize::MAX))
    }
}

/// What is the same for all blocks of a pack.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PackInfo {
    pub(super) id: PackId,
    /// The name of the object.
    pub(super) name: String,
    /// Bytes of the object.
    pub(super) bytes: u64,
    /// When it was made, in milliseconds since 1970.
    pub(super) created_unix_ms: u64,
    /// When this process made or found it, on the map's clock of touches.
    pub(super) made_at: u64,
}

/// Where a block lies in its pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) offset: u32,
    /// Bytes in the pack.
    pub(super) stored: u32,
    /// Bytes of the block.
    pub(super) len: u32,
    pub(super) coding: Coding,
}

/// A block that can be read.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub(super) number: PackNumber,
    pub(super) pack: Arc<PackInfo>,
    pub(super) slot: Slot,
}

#[derive(Debug)]
struct Pack {
    info: Arc<PackInfo>,
    slots: Box<[Slot]>,
    /// One bit for each slot: it is not read any more.
    dead: Box<[u64]>,
    live_blocks: u64,
    /// Bytes that these take in the pack.
    live_bytes: u64,
    /// Bytes that all its blocks take in the pack.
    data_bytes: u64,
}

impl Pack {
    fn new(info: PackInfo, footer: &Footer) -> Self {
        let slot = |entry: &PackEntry| Slot {
            offset: entry.offset,
            stored: entry.stored,
            len: entry.len,
            coding: entry.coding,
        };
        let slots: Box<[Slot]> = footer.entries.iter().map(slot).collect();
        let live_blocks = u64::try_from(slots.len()).unwrap_or(u64::MAX);
        let dead = vec![0; slots.len().div_ceil(64)].into_boxed_slice();
        let live_bytes = slots.iter().map(|slot| u64::from(slot.stored)).sum();
        let data_bytes = footer.data_bytes();
        let info = Arc::new(info);
        Self { info, slots, dead, live_blocks, live_bytes, data_bytes }
    }

    fn live(&self, index: usize) -> Option<Slot> {
        let dead = self.dead.get(index / 64)? >> (index % 64) & 1 == 1;
        self.slots.get(index).copied().filter(|_| !dead)
    }

    fn kill(&mut self, index: usize) -> bool {
        let Some(slot) = self.live(index) else { return false };
        if let Some(bits) = self.dead.get_mut(index / 64) {
            *bits |= 1 << (index % 64);
        }
        self.live_blocks -= 1;
        self.live_bytes -= u64::from(slot.stored);
        true
    }
}

/// A pack, as who collects sees it.
#[derive(Debug, Clone)]
pub(super) struct Summary {
    pub(super) number: PackNumber,
    pub(super) info: Arc<PackInfo>,
    /// Blocks that it was made with, or found.
    pub(super) blocks: usize,
    pub(super) live_blocks: u64,
    /// Bytes that these take in the pack.
    pub(super) live_bytes: u64,
    /// Bytes that all its blocks take in the pack.
    pub(super) data_bytes: u64,
}

/// A pack whose blocks are to be packed again.
#[derive(Debug)]
pub(super) struct Contents {
    pub(super) info: Arc<PackInfo>,
    /// Its live blocks, in the order of their places.
    pub(super) live: Vec<(Location, Slot)>,
}

/// Sums over all packs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) packs: u64,
    /// Bytes of the objects.
    pub(super) bytes: u64,
    pub(super) live_blocks: u64,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    packs: BTreeMap<PackNumber, Pack>,
    numbers: HashMap<PackId, PackNumber>,
    totals: Totals,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Catalog(RwLock<State>);

impl Catalog {
    /// Adds a pack, all of whose blocks are live.
    pub(super) fn insert(&self, info: PackInfo, footer: &Footer) -> PackNumber {
        let mut state = self.0.write();
        state.last += 1;
        let number = PackNumber(state.last);
        let pack = Pack::new(info, footer);
        state.totals.packs += 1;
        state.totals.bytes += pack.info.bytes;
        state.totals.live_blocks += pack.live_blocks;
        state.numbers.insert(pack.info.id, number);
        state.packs.insert(number, pack);
        number
    }

    /// Where to read a block.
    pub(super) fn resolve(&self, location: Location) -> Option<Stored> {
        let (number, index) = PackNumber::of(location);
        let state = self.0.read();
        let pack = state.packs.get(&number)?;
        let slot = pack.live(index)?;
        Some(Stored { number, pack: Arc::clone(&pack.info), slot })
    }

    /// A block is not read any more; false if it was not before.
    pub(super) fn kill(&self, location: Location) -> bool {
        let (number, index) = PackNumber::of(location);
        let mut state = self.0.write();
        let Some(pack) = state.packs.get_mut(&number) else { return false };
        let killed = pack.kill(index);
        state.totals.live_blocks -= u64::from(killed);
        killed
    }

    /// Leaves of a pack only the blocks that this footer has; returns where those were that go.
    pub(super) fn retain(&self, number: PackNumber, footer: &Footer) -> Vec<Location> {
        let left: HashSet<u32> = footer.entries.iter().map(|entry| entry.offset).collect();
        let state = self.0.read();
        let slots = state.packs.get(&number).map(|pack| pack.slots.iter()).unwrap_or_default();
        let gone = slots.enumerate().filter(|(_, slot)| !left.contains(&slot.offset));
        let gone: Vec<_> = gone.filter_map(|(index, _)| number.location(index)).collect();
        drop(state);
        gone.into_iter().filter(|location| self.kill(*location)).collect()
    }

    /// Takes a pack out: none of its blocks is read any more.
    pub(super) fn remove(&self, number: PackNumber) -> Option<Arc<PackInfo>> {
        let mut state = self.0.write();
        let pack = state.packs.remove(&number)?;
        state.numbers.remove(&pack.info.id);
        state.totals.packs -= 1;
        state.totals.bytes -= pack.info.bytes;
        state.totals.live_blocks -= pack.live_blocks;
        Some(pack.info)
    }

    /// What is in a pack, if it is there.
    pub(super) fn contents(&self, number: PackNumber) -> Option<Contents> {
        let state = self.0.read();
        let pack = state.packs.get(&number)?;
        let live = (0..pack.slots.len())
            .filter_map(|index| Some((number.location(index)?, pack.live(index)?)))
            .collect();
        Some(Contents { info: Arc::clone(&pack.info), live })
    }

    /// The number of a pack that is there.
    pub(super) fn number_of(&self, id: &PackId) -> Option<PackNumber> {
        self.0.read().numbers.get(id).copied()
    }

    /// The ordinal whose pack it is in; `None` if that is not there.
    pub(super) fn ordinal_of(&self, location: Location) -> Option<u32> {
        let (number, _) = PackNumber::of(location);
        self.0.read().packs.get(&number).map(|pack| pack.info.id.ordinal)
    }

    /// All packs of an ordinal, the oldest first.
    pub(super) fn packs_of(&self, ordinal: u32) -> Vec<Summary> {
        let state = self.0.read();
        let summary = |(number, pack): (&PackNumber, &Pack)| Summary {
            number: *number,
            info: Arc::clone(&pack.info),
            blocks: pack.slots.len(),
            live_blocks: pack.live_blocks,
            live_bytes: pack.live_bytes,
            data_bytes: pack.data_bytes,
        };
        let own = state.packs.iter().filter(|(_, pack)| pack.info.id.ordinal == ordinal);
        own.map(summary).collect()
    }

    pub(super) fn totals(&self) -> Totals {
        self.0.read().totals
    }
}

/// Tells blocks apart, in little memory.
pub(super) fn digest(key: &IndexKey) -> u64 {
    checksum(&[*key.namespace.as_bytes(), *key.hash.as_bytes()].concat())
}
