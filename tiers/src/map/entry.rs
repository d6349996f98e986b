//! What the map knows of one block.

use std::num::NonZeroU64;

use crate::{
    block::BlockKey,
    dram::{BlockWriter, Payload},
    tier::Tier,
};

/// Where a colder tier keeps a block: an opaque number that only this tier understands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Location(pub NonZeroU64);

/// The checksums of a block's parts, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Checksums {
    /// A block of one part.
    One(u64),
    /// A block of several parts. A thin box, because most entries are of the other kind.
    Many(Box<Vec<u64>>),
}

impl Checksums {
    /// Takes the checksums of all parts.
    #[must_use]
    pub fn new(sums: Vec<u64>) -> Self {
        match sums.as_slice() {
            [one] => Self::One(*one),
            _ => Self::Many(Box::new(sums)),
        }
    }

    /// The checksums of all parts, in order.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        match self {
            Self::One(sum) => std::slice::from_ref(sum),
            Self::Many(sums) => sums,
        }
    }

    /// The checksum of `part`.
    #[must_use]
    pub fn get(&self, part: usize) -> Option<u64> {
        self.as_slice().get(part).copied()
    }
}

/// The put batch that has claimed a part.
pub(crate) type BatchId = u64;

/// One part of a block that is not complete yet.
#[derive(Debug)]
pub(crate) enum StagedPart {
    /// Nobody has put it; the memory is there once any part of the block was written.
    Absent(Option<BlockWriter>),
    /// A batch is about to write it, or writing it.
    Claimed(BatchId, Option<BlockWriter>),
    /// Written and verified.
    Done(BlockWriter, u64),
}

impl StagedPart {
    pub(crate) fn is_claimed(&self) -> bool {
        match self {
            Self::Claimed(..) => true,
            Self::Absent(_) | Self::Done(..) => false,
        }
    }

    pub(crate) fn is_claimed_by(&self, batch: BatchId) -> bool {
        match self {
            Self::Claimed(owner, _) => *owner == batch,
            Self::Absent(_) | Self::Done(..) => false,
        }
    }
}

/// A block whose parts are arriving.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) parts: Vec<StagedPart>,
    /// Whether the parts have memory. All of it is one slot.
    has_memory: bool,
}

impl Staging {
    pub(crate) fn new(parts: usize) -> Self {
        Self { parts: (0..parts).map(|_| StagedPart::Absent(None)).collect(), has_memory: false }
    }

    pub(crate) fn has_claims(&self) -> bool {
        self.parts.iter().any(StagedPart::is_claimed)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.iter().all(|part| match part {
            StagedPart::Absent(_) => true,
            StagedPart::Claimed(..) | StagedPart::Done(..) => false,
        })
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.parts.iter().all(|part| match part {
            StagedPart::Done(..) => true,
            StagedPart::Absent(_) | StagedPart::Claimed(..) => false,
        })
    }

    /// The memory of the parts, but for those that are being written.
    pub(crate) fn writers(&self) -> impl Iterator<Item = &BlockWriter> {
        self.parts.iter().filter_map(|part| match part {
            StagedPart::Absent(writer) | StagedPart::Claimed(_, writer) => writer.as_ref(),
            StagedPart::Done(writer, _) => Some(writer),
        })
    }

    /// Puts the memory of the block under its parts; drops it if another batch was first.
    pub(crate) fn install(&mut self, writers: Vec<BlockWriter>) {
        if std::mem::replace(&mut self.has_memory, true) {
            return;
        }
        for (part, writer) in self.parts.iter_mut().zip(writers) {
            match part {
                StagedPart::Absent(place) | StagedPart::Claimed(_, place) => *place = Some(writer),
                StagedPart::Done(..) => {}
            }
        }
    }
}

/// Bytes of memory that a block, sealed or in parts, occupies.
pub(super) fn slot_bytes(payload: Option<&Payload>, staging: Option<&Staging>) -> u64 {
    let sealed = payload.map(Payload::slot_bytes);
    let bytes = sealed.or_else(|| Some(staging?.writers().next()?.slot_bytes()));
    bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0)
}

/// A block that is in dram because it was loaded from the object tier: whether it has been used since.
/// The second use says that it is worth a copy on nvme.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Guest {
    /// It is none, or no longer.
    No,
    Unused,
    Used,
}

/// The bit of a block that was read.
const READ: u8 = 0x80;
/// Uses are counted up to here, in the bits that are left.
const USES_MAX: u8 = 0x7f;

/// The block is in no eviction order.
pub(crate) const NO_CLASS: u16 = u16::MAX;

/// One block of the map.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) key: BlockKey,
    /// Bytes of the whole block.
    pub(crate) len: u32,
    /// Last use, on the map's clock of touches; 0 before the first.
    pub(crate) age: u64,
    /// The dram copy, readable.
    pub(crate) payload: Option<Payload>,
    /// Parts that are arriving; never together with any readable copy.
    pub(crate) staging: Option<Box<Staging>>,
    pub(crate) checksums: Checksums,
    /// Where the nvme and the object tier have it.
    pub(crate) cold: [Option<Location>; 2],
    /// The put context that stored its first part, until the block has been read; 0 for none. It counts
    /// the block while dram has it.
    pub(crate) context: u32,
    /// How it was read since it was put or found: [`READ`], and how often it was used, up to [`USES_MAX`].
    reads: u8,
    pub(crate) guest: Guest,
    /// Index of the eviction order it is in, within its shard.
    pub(crate) class: u16,
}

/// Sized so that the whole index entry stays below 200 bytes a block (benches/lookup.rs).
const _: () = assert!(size_of::<Option<Entry>>() <= 112);

impl Entry {
    pub(crate) fn new(key: BlockKey, len: u32) -> Self {
        Self {
            key,
            len,
            age: 0,
            payload: None,
            staging: None,
            checksums: Checksums::One(0),
            cold: [None, None],
            context: 0,
            reads: 0,
            guest: Guest::No,
            class: NO_CLASS,
        }
    }

    /// It is read.
    pub(crate) fn note_read(&mut self) {
        self.reads |= READ;
    }

    /// Whether it was read since it was put or found.
    pub(crate) fn was_read(&self) -> bool {
        self.reads & READ != 0
    }

    /// It is used by a whole request, whose ranks may read it each; returns how often it was used by now.
    pub(crate) fn note_use(&mut self) -> u8 {
        let uses = (self.reads & USES_MAX).saturating_add(1).min(USES_MAX);
        self.reads = self.reads & READ | uses;
        uses
    }

    /// The hottest tier that has a readable copy.
    pub(crate) fn hottest(&self) -> Option<Tier> {
        self.tiers().next()
    }

    /// No copy can be read, and a put of it is in flight. A fragment whose writers have gone will not
    /// become readable by waiting.
    pub(crate) fn is_pending(&self) -> bool {
        let claimed = self.staging.as_ref().is_some_and(|staging| staging.has_claims());
        claimed && self.hottest().is_none()
    }

    /// All tiers that have a readable copy, hot to cold.
    pub(crate) fn tiers(&self) -> impl Iterator<Item = Tier> + use<> {
        let [nvme, object] = self.cold.map(|location| location.is_some());
        let has = [self.payload.is_some(), nvme, object];
        Tier::ALL.into_iter().zip(has).filter_map(|(tier, has)| has.then_some(tier))
    }

    /// Bytes of memory that the block, or what there is of it, occupies.
    pub(crate) fn slot_bytes(&self) -> u64 {
        slot_bytes(self.payload.as_ref(), self.staging.as_deref())
    }

    /// The number of the arena extent that the block, or what there is of it, lies in.
    pub(crate) fn extent(&self) -> Option<u32> {
        let fragment = || Some(self.staging.as_ref()?.writers().next()?.extent());
        self.payload.as_ref().map(Payload::extent).or_else(fragment)
    }

    /// Whether its dram memory may be taken: readable and read by nobody, or an abandoned fragment.
    pub(crate) fn is_evictable(&self) -> bool {
        match (&self.payload, &self.staging) {
            (Some(payload), _) => !payload.is_shared(),
            (None, Some(staging)) => !staging.has_claims(),
            (None, None) => false,
        }
    }

    /// Whether the cleaner should copy it to `tier` without being asked: dram has it and the tier does
    /// not, nor has it come from the object tier just for one use.
    pub(crate) fn lacks(&self, tier: Tier) -> bool {
        let is_guest = self.guest != Guest::No && self.cold(Tier::Object).is_some();
        self.payload.is_some() && self.cold(tier).is_none() && !is_guest
    }

    /// Where a colder tier has it.
    pub(crate) fn cold(&self, tier: Tier) -> Option<Location> {
        let [nvme, object] = self.cold;
        match tier {
            Tier::Dram => None,
            Tier::Nvme => nvme,
            Tier::Object => object,
        }
    }

    /// The place of a colder tier's location.
    pub(crate) fn cold_mut(&mut self, tier: Tier) -> Option<&mut Option<Location>> {
        let [nvme, object] = &mut self.cold;
        match tier {
            Tier::Dram => None,
            Tier::Nvme => Some(nvme),
            Tier::Object => Some(object),
        }
    }
}
