//! The little of Python's pickle, protocol 5, that hash chains are made of: what `pickle.dumps` writes of
//! tuples of bytes, texts, whole numbers and `None`, of which no object stands in two places.
//!
//! ```text
//! 80 05                    protocol
//! 95 length u64            one frame: everything behind it
//! 43 n bytes 94            bytes, memoized
//! 8c n text 94             text, memoized
//! 4b u8 | 4d u16 | 4a i32 | 8a n ...   a whole number
//! ( items t 94 | items 85 94 | items 86 94 | items 87 94    a tuple, memoized
//! 4e                       None
//! 2e                       end
//! ```

/// What a frame may hold: what is longer is written in several.
const FRAME_BYTES_MAX: usize = 64 << 10;

const PROTOCOL: [u8; 2] = [0x80, 5];
const FRAME: u8 = 0x95;
const SHORT_BYTES: u8 = b'C';
const SHORT_TEXT: u8 = 0x8c;
const TEXT: u8 = b'X';
const BYTE: u8 = b'K';
const WORD: u8 = b'M';
const INT: u8 = b'J';
const LONG: u8 = 0x8a;
const MARK: u8 = b'(';
const TUPLE: u8 = b't';
const EMPTY_TUPLE: u8 = b')';
const NONE: u8 = b'N';
const MEMOIZE: u8 = 0x94;
const STOP: u8 = b'.';
/// The opcode of a tuple of one, two and three.
const SHORT_TUPLES: [u8; 3] = [0x85, 0x86, 0x87];

/// Writes one object.
#[derive(Debug)]
pub(super) struct Writer<'a>(&'a mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn none(&mut self) {
        self.0.push(NONE);
    }

    /// Up to 255 bytes.
    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend([SHORT_BYTES, u8::try_from(bytes.len()).unwrap_or(u8::MAX)]);
        self.0.extend(bytes);
        self.0.push(MEMOIZE);
    }

    pub(super) fn text(&mut self, text: &str) {
        match u8::try_from(text.len()) {
            Ok(length) => self.0.extend([SHORT_TEXT, length]),
            Err(_longer) => {
                self.0.push(TEXT);
                self.0.extend(u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
            }
        }
        self.0.extend(text.as_bytes());
        self.0.push(MEMOIZE);
    }

    pub(super) fn number(&mut self, number: u32) {
        let [a, b, c, d] = number.to_le_bytes();
        match number {
            0..0x100 => self.0.extend([BYTE, a]),
            0x100..0x1_0000 => self.0.extend([WORD, a, b]),
            0x1_0000..0x8000_0000 => self.0.extend([INT, a, b, c, d]),
            // The sign takes a byte.
            0x8000_0000.. => self.0.extend([LONG, 5, a, b, c, d, 0]),
        }
    }

    /// A tuple of so many items, which `items` writes.
    pub(super) fn tuple(&mut self, count: usize, items: impl FnOnce(&mut Self)) {
        let short = count.checked_sub(1).and_then(|at| SHORT_TUPLES.get(at));
        match short {
            _ if count == 0 => return self.0.push(EMPTY_TUPLE),
            Some(opcode) => {
                items(self);
                self.0.push(*opcode);
            }
            None => {
                self.0.push(MARK);
                items(self);
                self.0.push(TUPLE);
            }
        }
        self.0.push(MEMOIZE);
    }

    pub(super) fn tokens(&mut self, tokens: &[u32]) {
        self.tuple(tokens.len(), |writer| tokens.iter().for_each(|token| writer.number(*token)));
    }
}

/// Writes what `object` writes as a whole pickle over what `into` held; false if it is too long to be
/// written as one frame.
pub(super) fn write(into: &mut Vec<u8>, object: impl FnOnce(&mut Writer<'_>)) -> bool {
    const HEAD: usize = PROTOCOL.len() + 1 + size_of::<u64>();
    into.clear();
    into.extend(PROTOCOL);
    into.push(FRAME);
    into.extend([0; size_of::<u64>()]);
    object(&mut Writer(into));
    into.push(STOP);
    let frame = into.len() - HEAD;
    let length = u64::try_from(frame).unwrap_or(u64::MAX).to_le_bytes();
    if let Some(place) = into.get_mut(PROTOCOL.len() + 1..HEAD) {
        place.copy_from_slice(&length);
    }
    frame < FRAME_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What CPython 3.11 writes.
    #[test]
    fn it_writes_what_python_writes() {
        let root = hex::decode("066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198")
            .unwrap();
        let cases: [(&[u32], &str); 3] = [
            (
                &[1, 2, 300, 70_000, 0x8000_0000],
                "8005953d000000000000004320066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0\
                 d7119894284b014b024d2c014a701101008a05000000800074944e87942e",
            ),
            (
                &[1],
                "8005952b000000000000004320066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0\
                 d71198944b0185944e87942e",
            ),
            (
                &[255, 256, 65_535, 65_536],
                "80059537000000000000004320066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0\
                 d7119894284bff4d00014dffff4a0000010074944e87942e",
            ),
        ];
        for (tokens, expected) in cases {
            let mut bytes = Vec::new();
            assert!(write(&mut bytes, |writer| writer.tuple(3, |writer| {
                writer.bytes(&root);
                writer.tokens(tokens);
                writer.none();
            })));
            assert_eq!(hex::encode(bytes), expected, "{tokens:?}");
        }
    }

    #[test]
    fn what_takes_several_frames_is_not_written() {
        let mut bytes = Vec::new();
        assert!(write(&mut bytes, |writer| writer.tokens(&[70_000; 10_000])));
        assert!(!write(&mut bytes, |writer| writer.tokens(&[70_000; 14_000])));
    }
}
