//! Pages on their way to the disk, in large writes.

use super::aligned::{AlignedBuf, PAGE_BYTES};

const PAGE: u64 = PAGE_BYTES as u64;
/// Bytes of one write: large enough for the disk's full speed, small enough that reads get in.
const WRITE_BYTES: u64 = 2 << 20;

/// Bytes on their way into evenly long, page-aligned writes.
pub(super) struct Chunks {
    full: Vec<AlignedBuf>,
    filling: AlignedBuf,
    at: usize,
    left: u64,
    chunk_bytes: u64,
}

impl Chunks {
    /// For `total` bytes, a multiple of a page: writes of one to two times [`WRITE_BYTES`], or one
    /// that is shorter.
    pub(super) fn of(total: u64) -> Self {
        let count = (total / WRITE_BYTES).max(1);
        let chunk_bytes = total.div_ceil(count).next_multiple_of(PAGE);
        let mut chunks = Self {
            full: Vec::new(),
            filling: AlignedBuf::zeroed(0),
            at: 0,
            left: total,
            chunk_bytes,
        };
        chunks.next();
        chunks
    }

    fn next(&mut self) {
        let bytes = self.left.min(self.chunk_bytes);
        self.left -= bytes;
        let next = AlignedBuf::zeroed(usize::try_from(bytes).unwrap_or(0));
        let full = std::mem::replace(&mut self.filling, next);
        self.at = 0;
        if !full.is_empty() {
            self.full.push(full);
        }
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = self.filling.len() - self.at;
            if room == 0 {
                debug_assert!(self.left > 0, "more bytes than were announced");
                if self.left == 0 {
                    return;
                }
                self.next();
                continue;
            }
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            if let Some(place) = self.filling.get_mut(self.at..self.at + now.len()) {
                place.copy_from_slice(now);
            }
            self.at += now.len();
            bytes = later;
        }
    }

    pub(super) fn finish(mut self) -> Vec<AlignedBuf> {
        debug_assert!(
            self.left == 0 && self.at == self.filling.len(),
            "fewer bytes than announced"
        );
        self.left = 0;
        self.next();
        self.full
    }
}
