//! Pages on their way to the disk, in large writes from buffers that are used again.

use super::aligned::{AlignedBuf, PAGE};

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
    filling: Option<AlignedBuf>,
    at: usize,
    /// Bytes that are in no buffer yet.
    left: u64,
    chunk_bytes: u64,
}

impl Chunks {
    /// For `total` bytes, a multiple of a page: writes of one to two times [`WRITE_BYTES`], or one
    /// that is shorter.
    pub(super) fn of(total: u64) -> Self {
        let count = (total / WRITE_BYTES).max(1);
        let chunk_bytes = total.div_ceil(count).next_multiple_of(PAGE);
        Self { filling: None, at: 0, left: total, chunk_bytes }
    }

    /// Adds bytes; buffers that are full go to `out`.
    pub(super) fn push(
        &mut self,
        mut bytes: &[u8],
        spare: &mut Buffers,
        out: &mut Vec<AlignedBuf>,
    ) {
        while !bytes.is_empty() {
            if self.filling.is_none() {
                debug_assert!(self.left > 0, "more bytes than were announced");
                let next = self.left.min(self.chunk_bytes);
                self.left -= next;
                self.at = 0;
                self.filling = Some(spare.take(usize::try_from(next).unwrap_or(0)));
            }
            let Some(buffer) = &mut self.filling else { return };
            let room = buffer.len() - self.at;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            if let Some(place) = buffer.get_mut(self.at..self.at + now.len()) {
                place.copy_from_slice(now);
            }
            self.at += now.len();
            bytes = later;
            if self.at == buffer.len() {
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

    #[test]
    fn bytes_come_out_as_they_went_in_by_large_writes() {
        for total in [1_u64, 300, 511, 512, 513, 1000, 1023, 1024, 5000] {
            let bytes: Vec<u8> =
                (0..total * PAGE).map(|at| u8::try_from(at % 253).unwrap()).collect();
            let (mut spare, mut out) = (Buffers::default(), Vec::new());
            let mut chunks = Chunks::of(total * PAGE);
            for piece in bytes.chunks(100_000) {
                chunks.push(piece, &mut spare, &mut out);
            }
            assert!(chunks.is_complete());
            assert_eq!(
                out.iter().flat_map(|chunk| chunk.iter()).copied().collect::<Vec<u8>>(),
                bytes
            );
            let least = (total * PAGE).min(WRITE_BYTES);
            for chunk in &out {
                let len = u64::try_from(chunk.len()).unwrap();
                assert!(len * 10 >= least * 9 && len < 2 * WRITE_BYTES + PAGE, "{total}: {len}");
            }
        }
    }
}
