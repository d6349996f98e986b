//! Puts the pieces of a get back together and verifies them.
//!
//! The server streams parts in the order asked, large ones in several pieces. A block reaches the
//! sink only when all its parts are complete and verified; anything else about it is one miss. A
//! stream that leaves the order is a broken contract and ends the get: nothing is guessed.

use std::ops::{AddAssign, Range};

use bytes::{Bytes, BytesMut};
use kvstrata_proto::v1;
use kvstrata_tiers::{
    block::BlockHash,
    checksum::{PartHasher, part_checksum},
    error::{Error, Result},
    limits::PART_BYTES_MAX,
    namespace::{NamespaceId, PartSpec},
    tier::Tier,
};

use super::{HashList, status::broken_contract};
use crate::bulk::body::Place;

const DOING: &str = "get";
/// Buffers that are kept to be used again.
const SPARE_MAX: usize = 4;

/// Why a block was not delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MissReason {
    /// It is on no tier.
    Absent,
    /// A put of it is in flight.
    Pending,
    /// Its stored bytes failed verification at the server and were quarantined.
    Corrupt,
    /// Its bytes failed verification here: they were damaged on the way.
    CorruptHere,
    /// The tier did not answer within the deadline.
    Timeout,
    /// The tier is overloaded, or dram has no room to load into.
    Busy,
}

/// Receives what a get delivers, in the order asked. Each position is reported exactly once, except
/// that nothing is reported after the end of a get that failed or stopped at a miss.
pub trait GetSink {
    /// A whole, verified block.
    fn block(&mut self, block: FetchedBlock<'_>);
    /// The blocks at `positions` are not to be had.
    fn miss(&mut self, positions: Range<u32>, reason: MissReason);
}

/// One verified block: its parts in the order asked, each in one or more pieces.
#[derive(Debug)]
pub struct FetchedBlock<'a> {
    /// Position in the list that was asked for.
    pub position: u32,
    /// Its hash.
    pub hash: BlockHash,
    /// Where the bytes were read from.
    pub tier: Tier,
    pieces: &'a [Bytes],
    part_ends: &'a [usize],
}

impl FetchedBlock<'_> {
    /// The pieces of each part, in the order of the parts asked for.
    pub fn parts(&self) -> impl Iterator<Item = &[Bytes]> {
        let starts = std::iter::once(0).chain(self.part_ends.iter().copied());
        let ranges = starts.zip(self.part_ends.iter().copied());
        ranges.map(|(start, end)| self.pieces.get(start..end).unwrap_or_default())
    }

    /// All pieces, part after part.
    #[must_use]
    pub fn pieces(&self) -> &[Bytes] {
        self.pieces
    }

    /// Bytes of the parts asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pieces.iter().map(Bytes::len).sum()
    }

    /// Whether it has no bytes, which only a value in an opaque namespace may.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a get delivered, in blocks; the blocks and the misses sum to what was asked, unless it
/// stopped at a miss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GetSummary {
    /// Blocks delivered from dram.
    pub dram: u64,
    /// Blocks delivered from nvme.
    pub nvme: u64,
    /// Blocks delivered from the object store.
    pub object: u64,
    /// Bytes delivered.
    pub bytes: u64,
    /// Blocks not delivered, all reasons together.
    pub missed: u64,
    /// Of these, blocks whose bytes failed verification here.
    pub corrupt_here: u64,
}

impl GetSummary {
    /// Blocks delivered.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.dram + self.nvme + self.object
    }

    fn count(&mut self, tier: Tier, bytes: usize) {
        match tier {
            Tier::Dram => self.dram += 1,
            Tier::Nvme => self.nvme += 1,
            Tier::Object => self.object += 1,
        }
        self.bytes += bytes as u64;
    }
}

impl AddAssign for GetSummary {
    fn add_assign(&mut self, other: Self) {
        self.dram += other.dram;
        self.nvme += other.nvme;
        self.object += other.object;
        self.bytes += other.bytes;
        self.missed += other.missed;
        self.corrupt_here += other.corrupt_here;
    }
}

/// The state of one get stream: the next position, and what has come of its block.
pub(super) struct Assembler<'a> {
    namespace: &'a NamespaceId,
    parts: &'a [(u32, PartSpec)],
    hashes: HashList,
    /// Added to positions, because a long list is fetched in several requests.
    base: u32,
    next: u32,
    current: Option<Current>,
    summary: GetSummary,
    /// Buffers that nobody has kept, to be used again.
    spare: Vec<BytesMut>,
}

/// A block of which something has come.
struct Current {
    hash: BlockHash,
    tier: Tier,
    pieces: Vec<Bytes>,
    part_ends: Vec<usize>,
    received: usize,
    checksum: u64,
    hasher: Option<PartHasher>,
    /// The part that is being read into a buffer of ours.
    open: Option<Open>,
    damaged: bool,
}

/// A part that is hashed as it is read, while each of its pieces is still in a core's cache.
pub(super) struct Open {
    /// What has been read; has room for all of the part.
    buffer: BytesMut,
    hasher: PartHasher,
}

impl Open {
    /// Where the next bytes of the part go.
    pub(super) fn room(&mut self) -> &mut BytesMut {
        &mut self.buffer
    }

    /// Takes the latest `bytes` into account.
    pub(super) fn took(&mut self, bytes: usize) {
        let start = self.buffer.len().saturating_sub(bytes);
        self.hasher.update(self.buffer.get(start..).unwrap_or_default());
    }
}

impl<'a> Assembler<'a> {
    pub(super) fn new(
        namespace: &'a NamespaceId,
        parts: &'a [(u32, PartSpec)],
        (base, hashes): (u32, HashList),
    ) -> Self {
        let summary = GetSummary::default();
        let spare = Vec::new();
        Self { namespace, parts, hashes, base, next: 0, current: None, summary, spare }
    }

    /// Takes the next piece.
    pub(super) fn piece(
        &mut self,
        piece: v1::PartData,
        tier: Tier,
        sink: &mut impl GetSink,
    ) -> Result<()> {
        let place = Place {
            position: piece.index,
            part: piece.part,
            offset: piece.offset,
            part_bytes: piece.part_bytes,
            checksum: piece.checksum,
        };
        let (whole, spec) = self.check(&place, piece.data.len(), tier)?;
        if let Some(current) = &mut self.current {
            current.take(self.namespace, spec, piece.data);
            if current.received == whole {
                self.end_part(spec, sink);
            }
        }
        Ok(())
    }

    /// Makes room for the next piece, which is then read, and [ended](Self::end_piece).
    pub(super) fn begin_piece(
        &mut self,
        place: &Place,
        bytes: usize,
        tier: Tier,
    ) -> Result<Option<&mut Open>> {
        let (whole, spec) = self.check(place, bytes, tier)?;
        let Some(current) = &mut self.current else { return Ok(None) };
        if place.offset == 0 {
            let hasher = PartHasher::new(self.namespace, &current.hash, spec.group, spec.rank);
            // Used ones first.
            let spare = self.spare.pop().filter(|spare| spare.capacity() >= whole);
            let mut buffer = spare.unwrap_or_else(|| BytesMut::with_capacity(whole));
            buffer.clear();
            current.open = Some(Open { buffer, hasher });
        }
        Ok(current.open.as_mut())
    }

    /// The piece has been read.
    pub(super) fn end_piece(&mut self, place: &Place, sink: &mut impl GetSink) {
        let Some(current) = &mut self.current else { return };
        if current.received < place.part_bytes as usize {
            return;
        }
        let spec = self.parts.get(current.part_ends.len()).map(|(_, spec)| *spec);
        if let (Some(open), Some(spec)) = (current.open.take(), spec) {
            current.pieces.push(open.buffer.freeze());
            current.hasher = Some(open.hasher);
            self.end_part(spec, sink);
        }
    }

    /// Checks that a piece is the one that is due, and counts it; returns the bytes of its part.
    fn check(&mut self, place: &Place, bytes: usize, tier: Tier) -> Result<(usize, PartSpec)> {
        if place.position != self.next {
            return Err(self.out_of_order("block", place.position));
        }
        let hash = self.hashes.get(place.position as usize);
        let hash = hash.ok_or_else(|| self.out_of_order("block", place.position))?;
        let current = self.current.get_or_insert_with(|| Current::new(hash, tier));
        let Some((part, spec)) = self.parts.get(current.part_ends.len()).copied() else {
            return Err(broken_contract(DOING, "more parts of a block than asked for"));
        };
        if place.part != part || place.offset as usize != current.received {
            return Err(broken_contract(
                DOING,
                &format!(
                    "part {} at offset {} where part {part} at {} was due",
                    place.part, place.offset, current.received
                ),
            ));
        }
        let received = current.received.saturating_add(bytes);
        let whole = match place.part_bytes as usize {
            0 => received,
            part_bytes => part_bytes,
        };
        if received > whole || whole as u64 > PART_BYTES_MAX {
            return Err(broken_contract(DOING, &format!("{received} of {whole} bytes of a part")));
        }
        (current.received, current.checksum) = (received, place.checksum);
        Ok((whole, spec))
    }

    /// Takes a range of misses.
    pub(super) fn miss(&mut self, miss: &v1::GetMiss, sink: &mut impl GetSink) -> Result<()> {
        // A block may turn out unreadable after its first parts were sent.
        self.current = None;
        let inside = miss.end > miss.start && miss.end as usize <= self.hashes.len();
        if miss.start != self.next || !inside {
            return Err(self.out_of_order("miss", miss.start));
        }
        self.summary.missed += u64::from(miss.end - miss.start);
        self.next = miss.end;
        sink.miss(self.base + miss.start..self.base + miss.end, reason_of(miss.reason()));
        Ok(())
    }

    /// Ends the stream; with `stopped` the rest was not wanted after a miss.
    pub(super) fn finish(self, stopped: bool) -> Result<GetSummary> {
        let complete = self.next as usize == self.hashes.len();
        if self.current.is_none() && (complete || (stopped && self.summary.missed > 0)) {
            return Ok(self.summary);
        }
        Err(broken_contract(
            DOING,
            &format!("the stream ended after {} of {} blocks", self.next, self.hashes.len()),
        ))
    }

    fn end_part(&mut self, spec: PartSpec, sink: &mut impl GetSink) {
        let Some(mut current) = self.current.take() else { return };
        current.end_part(self.namespace, spec);
        if current.part_ends.len() < self.parts.len() {
            self.current = Some(current);
            return;
        }
        let position = self.base + self.next;
        self.next += 1;
        if current.damaged {
            self.summary.missed += 1;
            self.summary.corrupt_here += 1;
            return sink.miss(position..position + 1, MissReason::CorruptHere);
        }
        let block = FetchedBlock {
            position,
            hash: current.hash,
            tier: current.tier,
            pieces: &current.pieces,
            part_ends: &current.part_ends,
        };
        self.summary.count(block.tier, block.len());
        sink.block(block);
        let unkept = current.pieces.into_iter().filter_map(|piece| piece.try_into_mut().ok());
        self.spare.extend(unkept.take(SPARE_MAX.saturating_sub(self.spare.len())));
    }

    fn out_of_order(&self, what: &str, index: u32) -> Error {
        let (next, asked) = (self.next, self.hashes.len());
        broken_contract(DOING, &format!("{what} {index} came where {next} of {asked} was due"))
    }
}

impl Current {
    fn new(hash: BlockHash, tier: Tier) -> Self {
        Self {
            hash,
            tier,
            pieces: Vec::with_capacity(1),
            part_ends: Vec::with_capacity(1),
            received: 0,
            checksum: 0,
            hasher: None,
            open: None,
            damaged: false,
        }
    }

    /// Keeps a piece. Hashing starts with the second one, because most parts come whole and are hashed
    /// at once.
    fn take(&mut self, namespace: &NamespaceId, spec: PartSpec, data: Bytes) {
        if self.pieces.len() > self.part_ends.last().copied().unwrap_or(0) {
            let hash = self.hash;
            let earlier = self.pieces.last();
            let hasher = self.hasher.get_or_insert_with(|| {
                let mut hasher = PartHasher::new(namespace, &hash, spec.group, spec.rank);
                hasher.update(earlier.map_or(&[], |piece| piece));
                hasher
            });
            hasher.update(&data);
        }
        self.pieces.push(data);
    }

    fn end_part(&mut self, namespace: &NamespaceId, spec: PartSpec) {
        let computed = match self.hasher.take() {
            Some(hasher) => hasher.checksum(),
            None => {
                let whole = self.pieces.last().map_or(&[][..], |piece| piece);
                part_checksum(namespace, &self.hash, spec.group, spec.rank, whole)
            }
        };
        self.damaged |= computed != self.checksum;
        self.part_ends.push(self.pieces.len());
        self.received = 0;
    }
}

fn reason_of(wire: v1::MissReason) -> MissReason {
    match wire {
        v1::MissReason::Absent | v1::MissReason::Unspecified => MissReason::Absent,
        v1::MissReason::Pending => MissReason::Pending,
        v1::MissReason::Corrupt => MissReason::Corrupt,
        v1::MissReason::Timeout => MissReason::Timeout,
        v1::MissReason::Busy => MissReason::Busy,
    }
}

#[cfg(test)]
#[path = "assemble_tests.rs"]
mod tests;
