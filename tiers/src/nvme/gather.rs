//! What a write takes its bytes from.

use std::{fmt, ops::Range};

use super::aligned::{AlignedBuf, PAGE_BYTES};
use crate::store::Payload;

/// Whole pages, one behind the other, some of them the tier's own and some lent by the arena: the
/// bytes of a block go to the disk from where they are. What is lent stays as it is, and where it is,
/// for as long as this exists.
#[derive(Default)]
pub struct Gather {
    own: AlignedBuf,
    /// Bytes of `own` that have their place.
    placed: usize,
    pieces: Vec<Piece>,
    len: usize,
    written: usize,
}

enum Piece {
    Own(Range<usize>),
    Lent(Payload, Range<usize>),
}

impl Gather {
    /// No bytes yet; those that are copied will be in `own`.
    #[must_use]
    pub fn empty(own: AlignedBuf) -> Self {
        Self { own, ..Self::default() }
    }

    /// Bytes in all: a multiple of [`PAGE_BYTES`] once it is handed to a device.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies bytes behind what is there; as many as there is own memory for.
    pub fn copy(&mut self, bytes: &[u8]) {
        let end = self.own.len().min(self.placed + bytes.len());
        let added = self.placed..end;
        if let Some((place, bytes)) = self.own.get_mut(added.clone()).zip(bytes.get(..added.len()))
        {
            place.copy_from_slice(bytes);
        }
        self.place(added);
    }

    /// Puts a range of a block behind what is there, without a copy. Both ends of it are multiples of
    /// [`PAGE_BYTES`], and it lies within a block that [can be lent](Self::can_lend).
    pub fn lend(&mut self, block: &Payload, range: Range<usize>) {
        self.len += range.len();
        self.pieces.push(Piece::Lent(block.clone(), range));
    }

    /// Whether direct I/O takes the whole pages of this block from where they are.
    #[must_use]
    pub fn can_lend(block: &Payload) -> bool {
        block.as_ref().as_ptr().addr().is_multiple_of(PAGE_BYTES)
    }

    /// Bytes of it that are written: the first ones.
    #[must_use]
    pub fn written(&self) -> usize {
        self.written
    }

    /// Notes that the next `bytes` are written; only whole pages count, and no more than there are.
    /// Returns how many do.
    pub fn advance(&mut self, bytes: usize) -> usize {
        let bytes = bytes.min(self.len - self.written);
        let pages = bytes - bytes % PAGE_BYTES;
        self.written += pages;
        pages
    }

    /// The bytes that are still to be written, in order. Each slice starts at a page and is whole pages
    /// long, none is empty.
    pub fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let mut skipped = self.written;
        self.pieces.iter().filter_map(move |piece| {
            let bytes = match piece {
                Piece::Own(range) => self.own.get(range.clone()),
                Piece::Lent(block, range) => block.as_ref().get(range.clone()),
            };
            let bytes = bytes.unwrap_or_default();
            let skip = skipped.min(bytes.len());
            skipped -= skip;
            bytes.get(skip..).filter(|rest| !rest.is_empty())
        })
    }

    /// Gives the own memory back; what was lent is let go.
    #[must_use]
    pub fn into_own(self) -> AlignedBuf {
        self.own
    }

    fn place(&mut self, added: Range<usize>) {
        self.len += added.len();
        self.placed = added.end;
        match self.pieces.last_mut() {
            Some(Piece::Own(last)) => last.end = added.end,
            _ => self.pieces.push(Piece::Own(added)),
        }
    }
}

impl From<AlignedBuf> for Gather {
    /// All of it.
    fn from(own: AlignedBuf) -> Self {
        let all = 0..own.len();
        let mut gather = Self::empty(own);
        gather.place(all);
        gather
    }
}

impl fmt::Debug for Gather {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gather({} bytes in {} pieces)", self.len, self.pieces.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Arena;

    #[test]
    fn slices_are_the_bytes_in_order_from_any_page_on() {
        let bytes: Vec<u8> =
            (0..3 * PAGE_BYTES).map(|at| u8::try_from(at % 251).unwrap()).collect();
        let block = Arena::new(128 << 20).unwrap().sealed(&bytes).unwrap();
        assert!(Gather::can_lend(&block));
        let (first, last) = ([1; PAGE_BYTES], [2; 2 * PAGE_BYTES]);
        let mut gather = Gather::empty(AlignedBuf::zeroed(3 * PAGE_BYTES));
        gather.copy(&first[..100]);
        gather.copy(&first[100..]);
        gather.lend(&block, PAGE_BYTES..3 * PAGE_BYTES);
        gather.copy(&last);
        let mut all = first.to_vec();
        all.extend_from_slice(&block.as_ref()[PAGE_BYTES..]);
        all.extend_from_slice(&last);
        assert_eq!(gather.len(), all.len());
        for page in 0..=5 {
            let slices: Vec<&[u8]> = gather.slices().collect();
            assert!(slices.iter().all(|slice| slice.len().is_multiple_of(PAGE_BYTES)));
            assert!(slices.len() <= 3 && slices.iter().all(|slice| !slice.is_empty()));
            assert_eq!(slices.concat(), all[page * PAGE_BYTES..], "from page {page}");
            // What lies behind the last whole page is written again.
            assert_eq!(gather.advance(PAGE_BYTES + 7), if page < 5 { PAGE_BYTES } else { 0 });
        }
        assert_eq!(gather.written(), all.len());
        // There is no own memory left.
        gather.copy(&first);
        assert_eq!(gather.len(), all.len());
        assert_eq!(gather.into_own().len(), 3 * PAGE_BYTES);
    }
}
