//! The little of canonical CBOR (RFC 8949, 4.2.1) that hash chains are made of.

const UNSIGNED: u8 = 0;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const NULL: u8 = 0xf6;

/// Appends items to a buffer.
#[derive(Debug)]
pub(super) struct Writer<'a>(pub(super) &'a mut Vec<u8>);

impl Writer<'_> {
    pub(super) fn unsigned(&mut self, number: u64) {
        self.head(UNSIGNED, number);
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.head(BYTES, length(bytes));
        self.0.extend(bytes);
    }

    pub(super) fn text(&mut self, text: &str) {
        self.head(TEXT, length(text.as_bytes()));
        self.0.extend(text.as_bytes());
    }

    /// So many items follow that belong to it.
    pub(super) fn array(&mut self, items: usize) {
        self.head(ARRAY, u64::try_from(items).unwrap_or(u64::MAX));
    }

    pub(super) fn null(&mut self) {
        self.0.push(NULL);
    }

    pub(super) fn tokens(&mut self, tokens: &[u32]) {
        self.array(tokens.len());
        tokens.iter().for_each(|token| self.unsigned(u64::from(*token)));
    }

    /// The shortest head that says it.
    fn head(&mut self, major: u8, number: u64) {
        let major = major << 5;
        let bytes = number.to_be_bytes();
        let [_, _, _, _, _, _, high, low] = bytes;
        match number {
            0..24 => self.0.push(major | low),
            24..0x100 => self.0.extend([major | 24, low]),
            0x100..0x1_0000 => self.0.extend([major | 25, high, low]),
            0x1_0000..0x1_0000_0000 => {
                self.0.push(major | 26);
                self.0.extend(bytes.iter().skip(4));
            }
            0x1_0000_0000.. => {
                self.0.push(major | 27);
                self.0.extend(bytes);
            }
        }
    }
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_shortest_heads() {
        // The examples of RFC 8949, appendix A.
        let cases: [(u64, &str); 9] = [
            (0, "00"),
            (23, "17"),
            (24, "1818"),
            (255, "18ff"),
            (1000, "1903e8"),
            (65_536, "1a00010000"),
            (1_000_000, "1a000f4240"),
            (1_000_000_000_000, "1b000000e8d4a51000"),
            (u64::MAX, "1bffffffffffffffff"),
        ];
        for (number, expected) in cases {
            let mut bytes = Vec::new();
            Writer(&mut bytes).unsigned(number);
            assert_eq!(hex::encode(bytes), expected, "{number}");
        }
    }
}
