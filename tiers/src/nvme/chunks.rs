//! Pages on their way to the disk, in large writes: from the blocks themselves, and for what is between
//! them from buffers that are used again.

use std::ops::Range;

use super::{
    aligned::{AlignedBuf, PAGE},
    gather::Gather,
};
use crate::store::Payload;

/// Bytes of one write: large enough for the disk's full speed, small enough that reads get in.
const WRITE_BYTES: u64 = 2 << 20;
/// A buffer: a write has at most twice its bytes.
const BUFFER_BYTES: usize = 4 << 20;
/// Buffers kept for the next writes.
const SPARE_MAX: usize = 4;

/// Buffers that were written and can be filled again.
#[derive(Debug, Default)]
pub(super) struct Buffers(Vec<AlignedBuf>);

impl Buffers {
    fn take(&mut self, bytes: usize) -> AlignedBuf {
        let mut buffer = match self.0.pop() {
            Some(spare) if bytes <= spare.allocated() => spare,
            Some(_) | None => AlignedBuf::zeroed(bytes.max(BUFFER_BYTES)),
        };
        buffer.resize_within(bytes);
        buffer
    }

    /// Takes a buffer back.
    pub(super) fn give(&mut self, buffer: AlignedBuf) {
        if self.0.len() < SPARE_MAX && buffer.allocated() == BUFFER_BYTES {
            self.0.push(buffer);
        }
    }
}

/// Cuts a known number of bytes into evenly long, page-aligned writes.
pub(super) struct Chunks {
    filling: Option<Gather>,
    /// Bytes that `filling` will have.
    goal: usize,
    /// Bytes that are in no write yet.
    left: u64,
    chunk_bytes: u64,
}

impl Chunks {
    /// For `total` bytes, a multiple of a page: writes of one to two times [`WRITE_BYTES`], or one
    /// that is shorter.
    pub(super) fn of(total: u64) -> Self {
        let count = (total / WRITE_BYTES).max(1);
        let chunk_bytes = total.div_ceil(count).next_multiple_of(PAGE);
        Self { filling: None, goal: 0, left: total, chunk_bytes }
    }

    /// Adds bytes by a copy; writes that are full go to `out`.
    pub(super) fn push(&mut self, bytes: &[u8], spare: &mut Buffers, out: &mut Vec<Gather>) {
        self.add(bytes.len(), spare, out, |gather, range| {
            gather.copy(bytes.get(range).unwrap_or_default());
        });
    }

    /// Adds the first `bytes`, whole pages, of a block, without a copy, where what came before it are
    /// whole pages; writes that are full go to `out`.
    pub(super) fn lend(
        &mut self,
        block: &Payload,
        bytes: usize,
        spare: &mut Buffers,
        out: &mut Vec<Gather>,
    ) {
        self.add(bytes, spare, out, |gather, range| gather.lend(block, range));
    }

    fn add(
        &mut self,
        bytes: usize,
        spare: &mut Buffers,
        out: &mut Vec<Gather>,
        mut put: impl FnMut(&mut Gather, Range<usize>),
    ) {
        let mut at = 0;
        while at < bytes {
            let filling = self.filling.get_or_insert_with(|| {
                debug_assert!(self.left > 0, "more bytes than were announced");
                let next = self.left.min(self.chunk_bytes);
                self.left -= next;
                self.goal = usize::try_from(next).unwrap_or(0);
                Gather::empty(spare.take(self.goal))
            });
            let end = bytes.min(at + self.goal - filling.len());
            if end == at {
                return;
            }
            put(filling, at..end);
            at = end;
            if filling.len() == self.goal {
                out.extend(self.filling.take());
            }
        }
    }

    /// Whether all that was announced has come.
    pub(super) fn is_complete(&self) -> bool {
        self.left == 0 && self.filling.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{nvme::aligned::PAGE_BYTES, testing::Arena};

    #[test]
    fn bytes_come_out_as_they_went_in_by_large_writes() {
        let arena = Arena::new(128 << 20).unwrap();
        for total in [1_u64, 300, 511, 512, 513, 1000, 1023, 1024, 5000] {
            let bytes: Vec<u8> =
                (0..total * PAGE).map(|at| u8::try_from(at % 253).unwrap()).collect();
            let (mut spare, mut out) = (Buffers::default(), Vec::new());
            let mut chunks = Chunks::of(total * PAGE);
            for (number, piece) in bytes.chunks(25 * PAGE_BYTES).enumerate() {
                if number % 2 == 0 {
                    piece.chunks(9999).for_each(|some| chunks.push(some, &mut spare, &mut out));
                } else {
                    let block = arena.sealed(piece).unwrap();
                    chunks.lend(&block, piece.len(), &mut spare, &mut out);
                }
            }
            assert!(chunks.is_complete());
            let all: Vec<&[u8]> = out.iter().flat_map(Gather::slices).collect();
            assert!(all.iter().all(|slice| slice.len().is_multiple_of(PAGE_BYTES)), "{total}");
            assert_eq!(all.concat(), bytes, "{total}");
            let least = (total * PAGE).min(WRITE_BYTES);
            for chunk in &out {
                let len = u64::try_from(chunk.len()).unwrap();
                assert!(len * 10 >= least * 9 && len < 2 * WRITE_BYTES + PAGE, "{total}: {len}");
            }
        }
    }
}
