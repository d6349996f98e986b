//! Packs the values of a put into messages of about 1 MiB.

use std::ops::Range;

use bytes::Bytes;
use kvstrata_proto::v1;

/// Data in one message, in bytes: large enough for line rate, small enough to share a connection.
const MESSAGE_DATA_BYTES: usize = 1 << 20;
/// What a piece costs in a message besides its data, at most.
const PIECE_OVERHEAD_BYTES: usize = 48;
/// What a message costs besides its pieces, at most.
const MESSAGE_OVERHEAD_BYTES: usize = 64;

/// The values of one batch and how to cut them.
#[derive(Debug)]
pub(super) struct Packer {
    parts: Vec<u32>,
    values: Vec<Bytes>,
    checksums: Vec<u64>,
    room_bytes: usize,
}

impl Packer {
    /// Packs for messages of at most `message_bytes_max`; `values` are (block, part), blocks
    /// outermost, and `checksums` goes with them.
    pub(super) fn new(
        parts: Vec<u32>,
        values: Vec<Bytes>,
        checksums: Vec<u64>,
        message_bytes_max: usize,
    ) -> Self {
        let most = message_bytes_max.saturating_sub(MESSAGE_OVERHEAD_BYTES);
        let room_bytes = MESSAGE_DATA_BYTES.min(most).max(2 * PIECE_OVERHEAD_BYTES);
        Self { parts, values, checksums, room_bytes }
    }

    /// The messages that carry the blocks at `wanted`, made one at a time.
    pub(super) fn messages(
        self,
        wanted: Vec<Range<usize>>,
    ) -> impl Iterator<Item = v1::PutData> + Send + 'static {
        let mut cursor = Cursor::new(wanted, self.parts.len());
        std::iter::from_fn(move || {
            let parts = self.next_message(&mut cursor);
            (!parts.is_empty()).then_some(v1::PutData { parts })
        })
    }

    fn next_message(&self, cursor: &mut Cursor) -> Vec<v1::PartData> {
        let mut pieces = Vec::new();
        let mut room = self.room_bytes;
        while let Some((block, ordinal)) = cursor.current() {
            let at = block * self.parts.len() + ordinal;
            let (Some(value), Some(part)) = (self.values.get(at), self.parts.get(ordinal)) else {
                break;
            };
            let rest = value.len().saturating_sub(cursor.offset);
            let space = room.saturating_sub(PIECE_OVERHEAD_BYTES);
            // A short tail of room is not worth a piece of its own.
            if !pieces.is_empty() && rest > space {
                break;
            }
            let end = cursor.offset + rest.min(space);
            let whole = cursor.offset == 0 && end == value.len();
            pieces.push(v1::PartData {
                index: wire(block),
                part: *part,
                offset: wire(cursor.offset),
                data: value.slice(cursor.offset..end),
                checksum: self.checksums.get(at).copied().unwrap_or_default(),
                part_bytes: if whole { 0 } else { wire(value.len()) },
            });
            room = space.saturating_sub(end - cursor.offset);
            cursor.advance(end, value.len());
        }
        pieces
    }
}

/// Where the next piece starts.
struct Cursor {
    ranges: std::vec::IntoIter<Range<usize>>,
    blocks: Range<usize>,
    ordinal: usize,
    parts: usize,
    offset: usize,
}

impl Cursor {
    fn new(wanted: Vec<Range<usize>>, parts: usize) -> Self {
        Self { ranges: wanted.into_iter(), blocks: 0..0, ordinal: 0, parts, offset: 0 }
    }

    fn current(&mut self) -> Option<(usize, usize)> {
        while self.blocks.is_empty() {
            self.blocks = self.ranges.next()?;
        }
        Some((self.blocks.start, self.ordinal))
    }

    fn advance(&mut self, end: usize, value_len: usize) {
        self.offset = end;
        if end < value_len {
            return;
        }
        self.offset = 0;
        self.ordinal += 1;
        if self.ordinal >= self.parts {
            self.ordinal = 0;
            self.blocks.start += 1;
        }
    }
}

/// Positions and offsets are checked to fit before a batch gets here.
fn wire(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    const MIB: usize = 1 << 20;

    fn packed(
        lengths: &[usize],
        parts: u32,
        wanted: &[(usize, usize)],
        message_bytes_max: usize,
    ) -> Vec<v1::PutData> {
        let values: Vec<_> = lengths.iter().map(|len| Bytes::from(vec![7; *len])).collect();
        let checksums = (0..values.len() as u64).collect();
        let packer = Packer::new((0..parts).collect(), values, checksums, message_bytes_max);
        let wanted = wanted.iter().map(|(start, end)| *start..*end).collect();
        packer.messages(wanted).collect()
    }

    #[test]
    fn small_parts_share_messages_of_one_mebibyte() {
        let messages = packed(&[4096; 1000], 1, &[(0, 1000)], 8 * MIB);
        let pieces: usize = messages.iter().map(|message| message.parts.len()).sum();
        assert_eq!((pieces, messages.len()), (1000, 4));
        assert!(messages.iter().all(|message| message.encoded_len() <= MIB));
    }

    #[test]
    fn a_large_part_comes_in_pieces_in_order_of_offset() {
        let messages = packed(&[5 * MIB / 2, 10], 2, &[(0, 1)], 8 * MIB);
        let pieces: Vec<_> = messages.iter().flat_map(|message| &message.parts).collect();
        let mut offset = 0;
        for piece in pieces.iter().filter(|piece| piece.part == 0) {
            assert_eq!((piece.offset as usize, piece.checksum), (offset, 0));
            assert_eq!(piece.part_bytes as usize, 5 * MIB / 2);
            offset += piece.data.len();
        }
        assert_eq!(offset, 5 * MIB / 2);
        let last = pieces.last().unwrap();
        assert_eq!((last.part, last.data.len(), last.checksum), (1, 10, 1));
        assert!(messages.iter().all(|message| message.encoded_len() <= MIB));
    }

    #[test]
    fn only_what_is_wanted_is_sent_and_empty_values_too() {
        let messages = packed(&[10, 0, 30, 40], 1, &[(1, 2), (3, 4)], 8 * MIB);
        let sent: Vec<_> =
            messages.iter().flat_map(|m| &m.parts).map(|p| (p.index, p.data.len())).collect();
        assert_eq!(sent, [(1, 0), (3, 40)]);
        assert!(packed(&[10], 1, &[], 8 * MIB).is_empty());
    }

    #[test]
    fn a_small_message_limit_is_kept() {
        let messages = packed(&[10_000], 1, &[(0, 1)], 1000);
        assert!(messages.iter().all(|message| message.encoded_len() <= 1000));
    }
}
