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
///
/// A sink may lend memory of its own, and then bytes go there straight from the connection. They are
/// verified where they lie: they count once [`block`](Self::block) has been called for their position, and
/// are anything until then and after a miss.
pub trait GetSink {
    /// The memory for one piece, of exactly its length; none has it come with the block. The answer
    /// must be the same for all pieces of a part.
    fn room(&mut self, _place: PiecePlace) -> Option<&mut [u8]> {
        None
    }
    /// A whole, verified block.
    fn block(&mut self, block: FetchedBlock<'_>);
    /// The blocks at `positions` are not to be had.
    fn miss(&mut self, positions: Range<u32>, reason: MissReason);
}

/// Where a piece belongs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PiecePlace {
    /// Position of its block in the list that was asked for.
    pub position: u32,
    /// Which of the parts that were asked for, from 0 on.
    pub part: usize,
    /// Where it begins in its part, in bytes.
    pub offset: usize,
    /// Its length, in bytes.
    pub bytes: usize,
    /// Bytes of the whole part.
    pub part_bytes: usize,
}

/// One verified block: its parts in the order asked, each in one or more pieces, or in none if it lies
/// in the sink's own memory.
#[derive(Debug)]
pub struct FetchedBlock<'a> {
    /// Position in the list that was asked for.
    pub position: u32,
    /// Its hash.
    pub hash: BlockHash,
    /// Where the bytes were read from.
    pub tier: Tier,
    bytes: usize,
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

    /// Bytes of the parts asked for, wherever they lie.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes
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
    /// Of the blocks delivered, those that were read from other members than the client is at.
    pub remote: u64,
}

impl GetSummary {
    /// Blocks delivered.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.dram + self.nvme + self.object
    }

    pub(super) fn count(&mut self, tier: Tier, bytes: usize) {
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
        self.remote += other.remote;
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

/// What a piece says of itself.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) index: u32,
    pub(super) part: u32,
    pub(super) offset: usize,
    pub(super) bytes: usize,
    /// Bytes of the whole part; 0 if this is all of it.
    pub(super) part_bytes: usize,
    pub(super) checksum: u64,
}

/// A block of which something has come.
struct Current {
    hash: BlockHash,
    tier: Tier,
    /// Bytes of all its parts so far.
    bytes: usize,
    pieces: Vec<Bytes>,
    part_ends: Vec<usize>,
    /// Bytes of the current part that have come or are coming.
    received: usize,
    /// Bytes of all of it.
    whole: usize,
    checksum: u64,
    hasher: Option<PartHasher>,
    /// What has been read of the current part into a buffer of ours.
    buffer: Option<BytesMut>,
    damaged: bool,
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

    /// Takes the next piece, which has come in memory of its own.
    pub(super) fn piece(
        &mut self,
        piece: &Piece,
        data: Bytes,
        tier: Tier,
        sink: &mut impl GetSink,
    ) -> Result<()> {
        self.begin(piece, tier)?;
        match self.room(piece, sink) {
            Some(room) => {
                room.copy_from_slice(&data);
                self.landed(&data);
            }
            None => self.keep(data),
        }
        self.end(piece, sink);
        Ok(())
    }

    /// A piece comes: checks that it is the one that is due. Its bytes are then all
    /// [landed](Self::landed), [kept](Self::keep) or [filled](Self::filled) in, and then it
    /// [ends](Self::end).
    pub(super) fn begin(&mut self, piece: &Piece, tier: Tier) -> Result<()> {
        if piece.index != self.next {
            return Err(self.out_of_order("block", piece.index));
        }
        let hash = self.hashes.get(piece.index as usize);
        let hash = hash.ok_or_else(|| self.out_of_order("block", piece.index))?;
        let current = self.current.get_or_insert_with(|| Current::new(hash, tier));
        let Some((part, _)) = self.parts.get(current.part_ends.len()).copied() else {
            return Err(broken_contract(DOING, "more parts of a block than asked for"));
        };
        if piece.part != part || piece.offset != current.received {
            return Err(broken_contract(
                DOING,
                &format!(
                    "part {} at offset {} where part {part} at {} was due",
                    piece.part, piece.offset, current.received
                ),
            ));
        }
        current.begin(piece)
    }

    /// Where the sink wants the piece that has begun, if it has memory for it.
    pub(super) fn room<'s>(
        &mut self,
        piece: &Piece,
        sink: &'s mut impl GetSink,
    ) -> Option<&'s mut [u8]> {
        let (_, spec) = self.due()?;
        let current = self.current.as_mut()?;
        let place = PiecePlace {
            position: self.base + piece.index,
            part: current.part_ends.len(),
            offset: piece.offset,
            bytes: piece.bytes,
            part_bytes: current.whole,
        };
        let room = sink.room(place).filter(|room| room.len() == piece.bytes)?;
        current.hasher(self.namespace, spec);
        Some(room)
    }

    /// Bytes of the piece that has begun lie in the sink's memory now.
    pub(super) fn landed(&mut self, bytes: &[u8]) {
        if let Some(hasher) = self.hasher() {
            hasher.update(bytes);
        }
    }

    /// What hashes the piece that has begun, for whoever copies it into the sink's memory.
    pub(super) fn hasher(&mut self) -> Option<&mut PartHasher> {
        let (_, spec) = self.due()?;
        Some(self.current.as_mut()?.hasher(self.namespace, spec))
    }

    /// The [buffer](Self::buffer) for the piece that has begun, and what hashes it, for whoever copies it
    /// there.
    pub(super) fn hashed_buffer(&mut self) -> Option<(&mut BytesMut, &mut PartHasher)> {
        self.buffer()?;
        self.hasher()?;
        let current = self.current.as_mut()?;
        current.buffer.as_mut().zip(current.hasher.as_mut())
    }

    /// A buffer of ours that the piece that has begun is read into: one for each part, with room for
    /// all of it; one that has been used, if there is one.
    pub(super) fn buffer(&mut self) -> Option<&mut BytesMut> {
        let (current, spare) = (self.current.as_mut()?, &mut self.spare);
        let whole = current.whole;
        Some(current.buffer.get_or_insert_with(|| {
            let used = spare.pop().filter(|used| used.capacity() >= whole);
            let mut buffer = used.unwrap_or_else(|| BytesMut::with_capacity(whole));
            buffer.clear();
            buffer
        }))
    }

    /// So many more bytes of the piece that has begun lie in the buffer now. They are hashed while they
    /// are still in a core's cache.
    pub(super) fn filled(&mut self, bytes: usize) {
        if let (Some((_, spec)), Some(current)) = (self.due(), &mut self.current) {
            let buffer = current.buffer.take().unwrap_or_default();
            let start = buffer.len().saturating_sub(bytes);
            let latest = buffer.get(start..).unwrap_or_default();
            current.hasher(self.namespace, spec).update(latest);
            current.buffer = Some(buffer);
        }
    }

    /// All bytes of the piece that has begun, in memory of their own.
    pub(super) fn keep(&mut self, data: Bytes) {
        if let (Some((_, spec)), Some(current)) = (self.due(), &mut self.current) {
            current.keep(self.namespace, spec, data);
        }
    }

    /// The piece that has begun is complete.
    pub(super) fn end(&mut self, piece: &Piece, sink: &mut impl GetSink) {
        let (Some((_, spec)), Some(current)) = (self.due(), &mut self.current) else { return };
        current.checksum = piece.checksum;
        if current.received == current.whole {
            current.pieces.extend(current.buffer.take().map(BytesMut::freeze));
            self.end_part(spec, sink);
        }
    }

    /// Blocks so far whose bytes were not right when they had come.
    pub(super) fn damaged_blocks(&self) -> u64 {
        self.summary.corrupt_here
    }

    /// Nothing of the block that comes next has come yet.
    pub(super) fn is_between_blocks(&self) -> bool {
        self.current.is_none()
    }

    /// The part that comes next or has begun.
    fn due(&self) -> Option<(u32, PartSpec)> {
        self.parts.get(self.current.as_ref()?.part_ends.len()).copied()
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
            bytes: current.bytes,
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
            bytes: 0,
            pieces: Vec::with_capacity(1),
            part_ends: Vec::with_capacity(1),
            received: 0,
            whole: 0,
            checksum: 0,
            hasher: None,
            buffer: None,
            damaged: false,
        }
    }

    /// A piece comes: it must fit its part.
    fn begin(&mut self, piece: &Piece) -> Result<()> {
        self.received += piece.bytes;
        self.bytes += piece.bytes;
        self.whole = if piece.part_bytes == 0 { self.received } else { piece.part_bytes };
        if self.received > self.whole || self.whole as u64 > PART_BYTES_MAX {
            let (received, whole) = (self.received, self.whole);
            return Err(broken_contract(DOING, &format!("{received} of {whole} bytes of a part")));
        }
        Ok(())
    }

    /// Hashes the part as it comes.
    fn hasher(&mut self, namespace: &NamespaceId, spec: PartSpec) -> &mut PartHasher {
        let hash = self.hash;
        self.hasher.get_or_insert_with(|| PartHasher::new(namespace, &hash, spec.group, spec.rank))
    }

    /// Keeps a piece. Hashing starts with the second one, because most parts come whole and are
    /// hashed at once.
    fn keep(&mut self, namespace: &NamespaceId, spec: PartSpec, data: Bytes) {
        if self.pieces.len() > self.part_ends.last().copied().unwrap_or(0) {
            let earlier = self.hasher.is_none().then(|| self.pieces.last().cloned()).flatten();
            let hasher = self.hasher(namespace, spec);
            hasher.update(earlier.as_deref().unwrap_or_default());
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
