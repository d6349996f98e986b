//! Pieces of parts on their way into the arena.

use crate::{
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

/// A part being written.
#[derive(Debug)]
pub(super) struct Writing {
    writer: BlockWriter,
    written: usize,
}

impl Writing {
    pub(super) fn new(writer: BlockWriter) -> Self {
        Self { writer, written: 0 }
    }

    /// The whole part has been taken.
    pub(super) fn is_whole(&self) -> bool {
        self.written == self.writer.len()
    }

    /// Lets the memory go, written or not.
    pub(super) fn into_writer(self) -> BlockWriter {
        self.writer
    }

    /// Copies a piece behind those before it.
    pub(super) fn take(&mut self, piece: &Piece<'_>) -> Result<()> {
        let offset = usize::try_from(piece.offset).unwrap_or(usize::MAX);
        let end = offset.saturating_add(piece.data.len());
        let len = self.writer.len();
        if offset != self.written || end > len || piece.data.is_empty() {
            return Err(Error::invalid(format!(
                "offset: {offset} with {} bytes given for part {} of index {}, offset {} with 1 to \
                 {} bytes required",
                piece.data.len(),
                piece.part,
                piece.position,
                self.written,
                len - self.written,
            )));
        }
        if let Some(place) = self.writer.bytes_mut().get_mut(offset..end) {
            place.copy_from_slice(piece.data);
        }
        self.written = end;
        Ok(())
    }
}
