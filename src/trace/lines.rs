//! Lines of a file, plain or zstd, never more than one in memory.
//!
//! Decompression is bounded three times: the decoder's window, the length of a line, and the total.
//! A small hostile file therefore costs time up to the total and memory up to one line.

use std::io::{self, BufRead, BufReader, Read};

/// The longest line, in bytes: a request of the most blocks with 15-digit ids.
const LINE_BYTES_MAX: u64 = 16 << 20;
/// The most text one trace may hold once decompressed, in bytes.
const TEXT_BYTES_MAX: u64 = 64 << 30;
/// The largest zstd window accepted, as a power of two: 128 MiB, the format's own advice.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;
/// The first bytes of a zstd frame.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
const BUFFER_BYTES: usize = 64 << 10;

/// Numbered lines of one source.
pub(super) struct Lines<'a> {
    source: Box<dyn BufRead + 'a>,
    number: u64,
    line: Vec<u8>,
}

impl<'a> Lines<'a> {
    /// Starts reading; zstd is recognised by its first bytes, whatever the name.
    pub(super) fn new(source: impl Read + 'a) -> io::Result<Self> {
        let mut source = BufReader::with_capacity(BUFFER_BYTES, source);
        let text: Box<dyn BufRead> = if source.fill_buf()?.starts_with(&ZSTD_MAGIC) {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(source)?;
            decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
            Box::new(BufReader::with_capacity(BUFFER_BYTES, decoder.take(TEXT_BYTES_MAX)))
        } else {
            Box::new(source.take(TEXT_BYTES_MAX))
        };
        Ok(Self { source: text, number: 0, line: Vec::new() })
    }

    /// The number of the line returned last, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The next line that is not blank, without its end.
    pub(super) fn next_line(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            self.line.clear();
            self.number = self.number.saturating_add(1);
            let mut bounded = (&mut self.source).take(LINE_BYTES_MAX);
            let read = bounded.read_until(b'\n', &mut self.line)?;
            if read == 0 {
                return Ok(None);
            }
            if read as u64 == LINE_BYTES_MAX && !self.line.ends_with(b"\n") {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("the line is longer than {LINE_BYTES_MAX} bytes"),
                ));
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(Some(self.line.trim_ascii()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(source: &[u8]) -> Vec<(u64, String)> {
        let mut lines = Lines::new(source).unwrap();
        let mut seen = Vec::new();
        while let Some(line) = lines.next_line().unwrap() {
            let line = String::from_utf8(line.to_vec()).unwrap();
            seen.push((lines.number(), line));
        }
        seen
    }

    #[test]
    fn plain_and_zstd_read_alike_and_blank_lines_count() {
        let text = b"a\n\n b \r\nlast";
        let expected = [(1, "a".to_owned()), (3, "b".to_owned()), (4, "last".to_owned())];
        assert_eq!(all(text), expected);
        let packed = zstd::stream::encode_all(&text[..], 3).unwrap();
        assert_eq!(all(&packed), expected);
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut lines = Lines::new(io::repeat(b'x')).unwrap();
        assert!(lines.next_line().unwrap_err().to_string().contains("longer than 16777216 bytes"));
    }

    #[test]
    fn a_cut_zstd_frame_is_an_error() {
        let packed = zstd::stream::encode_all(&b"some text\n".repeat(100)[..], 3).unwrap();
        let mut lines = Lines::new(&packed[..packed.len() - 4]).unwrap();
        let mut result = lines.next_line().map(|_| ());
        while result.is_ok() {
            result = lines.next_line().map(|_| ());
        }
        assert!(result.is_err());
    }
}
