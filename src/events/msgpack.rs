//! Reads MessagePack from bytes that somebody else has made: nothing is copied, nothing is made for a
//! length that is not there, and nothing nests for ever.

/// How deep a value that nobody wants may be nested.
const DEPTH_MAX: u32 = 16;

/// What is not MessagePack, or not of the kind that is expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Broken(pub(super) &'static str);

type Result<T> = std::result::Result<T, Broken>;

/// Bytes that are left to be read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

/// A value, with the lengths of those that hold others; what they hold comes next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value<'a> {
    Nil,
    Bool(bool),
    /// A number; those above `i64::MAX` too.
    Int(i128),
    Float(f64),
    Text(&'a [u8]),
    Bytes(&'a [u8]),
    Array(usize),
    Map(usize),
    /// Of a type that an application has made.
    Other,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// Nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next value.
    pub(super) fn value(&mut self) -> Result<Value<'a>> {
        let tag = self.number(1)?;
        Ok(match u8::try_from(tag).unwrap_or(0xc1) {
            tag @ 0x00..=0x7f => Value::Int(i128::from(tag)),
            tag @ 0x80..=0x8f => self.map(usize::from(tag & 0x0f))?,
            tag @ 0x90..=0x9f => self.array(usize::from(tag & 0x0f))?,
            tag @ 0xa0..=0xbf => Value::Text(self.bytes(usize::from(tag & 0x1f))?),
            0xc0 => Value::Nil,
            tag @ (0xc2 | 0xc3) => Value::Bool(tag == 0xc3),
            tag @ 0xc4..=0xc6 => {
                let bytes = self.length(1 << (tag - 0xc4))?;
                Value::Bytes(self.bytes(bytes)?)
            }
            tag @ 0xc7..=0xc9 => {
                let bytes = self.length(1 << (tag - 0xc7))?;
                self.other(bytes)?
            }
            0xca => {
                let bits = u32::try_from(self.number(4)?).unwrap_or(0);
                Value::Float(f64::from(f32::from_bits(bits)))
            }
            0xcb => Value::Float(f64::from_bits(self.number(8)?)),
            tag @ 0xcc..=0xcf => Value::Int(i128::from(self.number(1 << (tag - 0xcc))?)),
            tag @ 0xd0..=0xd3 => self.signed(1 << (tag - 0xd0))?,
            tag @ 0xd4..=0xd8 => self.other(1 << (tag - 0xd4))?,
            tag @ 0xd9..=0xdb => {
                let bytes = self.length(1 << (tag - 0xd9))?;
                Value::Text(self.bytes(bytes)?)
            }
            tag @ (0xdc | 0xdd) => {
                let count = self.length(2 << (tag - 0xdc))?;
                self.array(count)?
            }
            tag @ (0xde | 0xdf) => {
                let count = self.length(2 << (tag - 0xde))?;
                self.map(count)?
            }
            tag @ 0xe0..=0xff => Value::Int(i128::from(tag) - 256),
            0xc1 => return Err(Broken("a byte that no value begins with")),
        })
    }

    /// Reads a value with all that it holds, which nobody wants.
    pub(super) fn skip(&mut self) -> Result<()> {
        let value = self.value()?;
        self.skip_in(value)
    }

    /// Reads what a value holds that was read.
    pub(super) fn skip_in(&mut self, value: Value<'a>) -> Result<()> {
        self.skip_within(value, DEPTH_MAX)
    }

    fn skip_within(&mut self, value: Value<'a>, depth: u32) -> Result<()> {
        let count = match value {
            Value::Array(count) => count,
            Value::Map(count) => count.saturating_mul(2),
            _ => return Ok(()),
        };
        let depth = depth.checked_sub(1).ok_or(Broken("nested too deep"))?;
        for _ in 0..count {
            let value = self.value()?;
            self.skip_within(value, depth)?;
        }
        Ok(())
    }

    /// An array; what it holds takes a byte each at least.
    fn array(&self, count: usize) -> Result<Value<'a>> {
        (count <= self.rest.len()).then_some(Value::Array(count)).ok_or(Broken("cut"))
    }

    fn map(&self, count: usize) -> Result<Value<'a>> {
        (count <= self.rest.len() / 2).then_some(Value::Map(count)).ok_or(Broken("cut"))
    }

    fn other(&mut self, bytes: usize) -> Result<Value<'a>> {
        self.number(1)?;
        self.bytes(bytes)?;
        Ok(Value::Other)
    }

    fn bytes(&mut self, count: usize) -> Result<&'a [u8]> {
        let (bytes, rest) = self.rest.split_at_checked(count).ok_or(Broken("cut"))?;
        self.rest = rest;
        Ok(bytes)
    }

    /// A big-endian number of so many bytes, 8 at most.
    fn number(&mut self, bytes: usize) -> Result<u64> {
        let bytes = self.bytes(bytes)?;
        Ok(bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn signed(&mut self, bytes: u32) -> Result<Value<'a>> {
        let number = self.number(usize::try_from(bytes).unwrap_or(8))?;
        let unused = 64_u32.saturating_sub(bytes.saturating_mul(8));
        Ok(Value::Int(i128::from((number << unused).cast_signed() >> unused)))
    }

    fn length(&mut self, bytes: usize) -> Result<usize> {
        usize::try_from(self.number(bytes)?).map_err(|_too_long| Broken("cut"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_value_reads() {
        let table: &[(&[u8], Value<'_>)] = &[
            (&[0x05], Value::Int(5)),
            (&[0xff], Value::Int(-1)),
            (&[0xe0], Value::Int(-32)),
            (&[0xcc, 200], Value::Int(200)),
            (&[0xcd, 1, 0], Value::Int(256)),
            (&[0xce, 0, 1, 0, 0], Value::Int(65_536)),
            (&[0xcf, 255, 255, 255, 255, 255, 255, 255, 255], Value::Int(u64::MAX.into())),
            (&[0xd0, 0x80], Value::Int(-128)),
            (&[0xd1, 0xff, 0xfe], Value::Int(-2)),
            (&[0xd2, 0xff, 0xff, 0xff, 0xfe], Value::Int(-2)),
            (&[0xd3, 0x80, 0, 0, 0, 0, 0, 0, 0], Value::Int(i64::MIN.into())),
            (&[0xc0], Value::Nil),
            (&[0xc2], Value::Bool(false)),
            (&[0xc3], Value::Bool(true)),
            (&[0xca, 0x3f, 0x80, 0, 0], Value::Float(1.0)),
            (&[0xcb, 0xbf, 0xf0, 0, 0, 0, 0, 0, 0], Value::Float(-1.0)),
            (&[0xa1, b'x'], Value::Text(b"x")),
            (&[0xd9, 1, b'x'], Value::Text(b"x")),
            (&[0xda, 0, 1, b'x'], Value::Text(b"x")),
            (&[0xc4, 2, 7, 8], Value::Bytes(&[7, 8])),
            (&[0xc5, 0, 1, 7], Value::Bytes(&[7])),
            (&[0xd4, 1, 2], Value::Other),
            (&[0xc7, 2, 1, 2, 3], Value::Other),
        ];
        for (bytes, expected) in table {
            let mut reader = Reader::new(bytes);
            assert_eq!(reader.value(), Ok(*expected), "{bytes:x?}");
            assert!(reader.is_empty(), "{bytes:x?}");
            for cut in 0..bytes.len() {
                assert!(Reader::new(&bytes[..cut]).value().is_err(), "{bytes:x?} cut at {cut}");
            }
        }
        assert_eq!(Reader::new(&[0x92, 1, 2]).value(), Ok(Value::Array(2)));
        assert_eq!(Reader::new(&[0x81, 1, 2]).value(), Ok(Value::Map(1)));
    }

    #[test]
    fn lengths_that_are_not_there_and_endless_nesting_are_refused() {
        for bytes in [
            &[0xdd, 0xff, 0xff, 0xff, 0xff][..],
            &[0xdf, 0xff, 0xff, 0xff, 0xff, 0, 0],
            &[0xc6, 0xff, 0xff, 0xff, 0xff],
            &[0xc1],
            &[],
        ] {
            assert!(Reader::new(bytes).value().is_err(), "{bytes:x?}");
        }
        let nested = [&[0x91; 100][..], &[1]].concat();
        assert_eq!(Reader::new(&nested).skip(), Err(Broken("nested too deep")));
        let flat = [0x92, 0x81, 0xa1, b'k', 0x91, 1, 0x05, 0x07];
        let mut reader = Reader::new(&flat);
        reader.skip().unwrap();
        assert_eq!(reader.value(), Ok(Value::Int(7)));
    }
}
