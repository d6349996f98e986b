//! Pieces of parts on their way into the arena.

use crate::{
    checksum::PartHasher,
    dram::BlockWriter,
    error::{Error, Result},
};

/// Some bytes of one part.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    /// Position in the offer.
    pub position: u32,
    /// Index of the declared part.
    pub part: u32,
    /// Where in the part the bytes go.
    pub offset: u32,
    /// The bytes.
    pub data: &'a [u8],
    /// Checksum of the whole part.
    pub checksum: u64,
    /// Length of the whole part; 0 if this piece is the whole part.
    pub part_bytes: u32,
}

/// Where some bytes of one part go.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Position in the offer.
    pub position: u32,
    /// Index of the declared part.
    pub part: u32,
    /// Where in the part the bytes go.
    pub offset: u32,
    /// How many there are.
    pub bytes: u32,
    /// Checksum of the whole part.
    pub checksum: u64,
    /// Length of the whole part; 0 if these bytes are the whole part.
    pub part_bytes: u32,
}

impl Span {
    /// The length of the whole part.
    pub(super) fn whole(&self) -> u64 {
        match self.part_bytes {
            0 => u64::from(self.offset) + u64::from(self.bytes),
            bytes => u64::from(bytes),
        }
    }
}

/// What came of bytes that were to be written in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Filled {
    /// How many were written; none if there is no room for the block.
    pub bytes: usize,
    /// The outcome when all offered parts of the position are done: its bytes are not wanted any more.
    pub outcome: Option<PutOutcome>,
}

/// What became of one position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PutOutcome {
    /// Readable from dram.
    Stored,
    /// The offered parts are here; other parts of the block are missing.
    PartStored,
    /// There was no room that may be taken, or the block was removed meanwhile.
    Refused,
    /// The bytes did not match their checksum.
    Corrupt,
}

/// A part being written.
#[derive(Debug)]
pub(super) struct Writing {
    writer: BlockWriter,
    written: usize,
    /// Of what is written, as it came: it was still in a core's cache.
    hasher: PartHasher,
}

impl Writing {
    pub(super) fn new(writer: BlockWriter, hasher: PartHasher) -> Self {
        Self { writer, written: 0, hasher }
    }

    /// The whole part has been taken.
    pub(super) fn is_whole(&self) -> bool {
        self.written == self.writer.len()
    }

    /// Lets the memory go, written or not.
    pub(super) fn into_writer(self) -> BlockWriter {
        self.writer
    }

    /// The checksum of what has been written.
    pub(super) fn checksum(&self) -> u64 {
        self.hasher.checksum()
    }

    /// Lets bytes be written behind those before them; returns how many were.
    pub(super) fn fill(
        &mut self,
        span: &Span,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<usize> {
        let offset = usize::try_from(span.offset).unwrap_or(usize::MAX);
        let bytes = usize::try_from(span.bytes).unwrap_or(usize::MAX);
        let end = offset.saturating_add(bytes);
        let len = self.writer.len();
        if offset != self.written || end > len || bytes == 0 {
            return Err(Error::invalid(format!(
                "offset: {offset} with {bytes} bytes given for part {} of index {}, offset {} with 1 \
                 to {} bytes required",
                span.part,
                span.position,
                self.written,
                len - self.written,
            )));
        }
        let filled = self.writer.bytes_mut().get_mut(offset..end).map_or(0, fill).min(bytes);
        self.written += filled;
        self.hasher.update(self.writer.bytes().get(offset..self.written).unwrap_or_default());
        Ok(filled)
    }
}
