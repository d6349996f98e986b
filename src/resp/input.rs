//! Reads commands: their lengths and words into memory of ours, a value where it will stay.
//!
//! ```text
//! *COUNT CRLF, then COUNT times   $LENGTH CRLF BYTES CRLF
//! or what a person types          WORD WORD ... CRLF
//! ```
//! Nothing is made for a length that a peer has only told: words have a limit, and what is longer is
//! read and forgotten. A command has a deadline from its first byte on, which grows with the value that
//! it announces. What is typed is put in front of the stream in the other form, so there is one way on.

use std::{
    io,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader},
    time::{Instant, error::Elapsed, timeout_at},
};

use crate::{
    bulk::input::{lost, poll_some},
    limits::{
        BULK_FRAME_DEADLINE, RESP_BYTES_PER_SECOND_MIN, RESP_KEYS_MAX, RESP_LINE_BYTES_MAX,
        RESP_VALUE_BYTES_MAX,
    },
};

/// Read at a time where it is not a value.
const BUFFER_BYTES: usize = 4096;
/// Words of the command with the most of them: its name, and keys.
const WORDS_MAX: usize = RESP_KEYS_MAX + 1;

/// The incoming half of a connection.
#[derive(Debug)]
pub(super) struct Input<R> {
    io: BufReader<R>,
    /// What comes before that which `io` gives.
    front: Bytes,
    /// When the command that has begun must be over.
    deadline: Instant,
}

/// A word of a command.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Word {
    Short(Vec<u8>),
    /// It was longer than allowed, and is gone.
    Long,
}

impl Word {
    /// The word, or nothing if it was too long.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long => Vec::new(),
        }
    }
}

impl<R: AsyncRead + Unpin> Input<R> {
    pub(super) fn new(io: R) -> Self {
        let io = BufReader::with_capacity(BUFFER_BYTES, io);
        Self { io, front: Bytes::new(), deadline: Instant::now() }
    }

    /// More has come than was read.
    pub(super) fn has_more(&self) -> bool {
        !self.front.is_empty() || !self.io.buffer().is_empty()
    }

    /// Waits for the first byte of a command; false if the peer has closed.
    ///
    /// # Cancel safety
    /// Safe: nothing is read.
    pub(super) async fn begin(&mut self) -> Result<bool> {
        if self.front.is_empty() && self.io.fill_buf().await.map_err(lost)?.is_empty() {
            return Ok(false);
        }
        self.deadline = Instant::now() + BULK_FRAME_DEADLINE;
        Ok(true)
    }

    /// How many words the command has that has begun; 0 for an empty one, which is no command.
    pub(super) async fn count(&mut self) -> Result<usize> {
        let line = self.line().await?;
        if let Some(digits) = line.strip_prefix(b"*") {
            return number(digits, WORDS_MAX).ok_or_else(|| broken("invalid multibulk length"));
        }
        let words: Vec<_> =
            line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).collect();
        if words.len() > WORDS_MAX {
            return Err(broken("too many words"));
        }
        let mut front = Vec::with_capacity(line.len() + 16 * words.len());
        for word in &words {
            front.extend(format!("${}\r\n", word.len()).bytes());
            front.extend(*word);
            front.extend(b"\r\n");
        }
        self.front = front.into();
        Ok(words.len())
    }

    /// The next word, of at most so many bytes.
    pub(super) async fn word(&mut self, bytes_max: usize) -> Result<Word> {
        let bytes = self.length().await?;
        if bytes > bytes_max {
            self.expect(bytes);
            self.skip(bytes).await?;
            self.end().await?;
            return Ok(Word::Long);
        }
        let mut word = vec![0; bytes];
        self.exactly(&mut word).await?;
        self.end().await?;
        Ok(Word::Short(word))
    }

    /// Reads words that nobody wants.
    pub(super) async fn skip_words(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            self.word(0).await?;
        }
        Ok(())
    }

    /// The length of the next word or value, whose bytes come next.
    pub(super) async fn length(&mut self) -> Result<usize> {
        let line = self.line().await?;
        let digits = line.strip_prefix(b"$").ok_or_else(|| broken("expected '$'"))?;
        number(digits, RESP_VALUE_BYTES_MAX).ok_or_else(|| broken("invalid bulk length"))
    }

    /// Gives a value of so many bytes the time that it takes.
    pub(super) fn expect(&mut self, bytes: usize) {
        let seconds = bytes / RESP_BYTES_PER_SECOND_MIN;
        self.deadline += Duration::from_secs(u64::try_from(seconds).unwrap_or(u64::MAX));
    }

    /// When the command that has begun must be over.
    pub(super) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Fills `room`.
    pub(super) async fn exactly(&mut self, room: &mut [u8]) -> Result<()> {
        let ready = self.front.len().min(room.len());
        let (first, rest) = room.split_at_mut(ready);
        self.front.copy_to_slice(first);
        let read = timeout_at(self.deadline, self.io.read_exact(rest)).await;
        read.map_err(slow)?.map_err(lost).map(drop)
    }

    /// Reads what nobody wants.
    pub(super) async fn skip(&mut self, mut bytes: usize) -> Result<()> {
        let mut nowhere = [0; BUFFER_BYTES];
        while bytes > 0 {
            let step = bytes.min(nowhere.len());
            self.exactly(nowhere.get_mut(..step).unwrap_or_default()).await?;
            bytes -= step;
        }
        Ok(())
    }

    /// Reads what is behind every word and value.
    pub(super) async fn end(&mut self) -> Result<()> {
        let mut end = [0; 2];
        self.exactly(&mut end).await?;
        if &end == b"\r\n" { Ok(()) } else { Err(broken("expected CRLF behind a string")) }
    }

    /// Reads what there is of a value into `room`; returns how much, at least one byte.
    pub(super) fn poll_some(
        &mut self,
        cx: &mut Context<'_>,
        room: &mut [u8],
    ) -> Poll<Result<usize>> {
        if !self.front.is_empty() {
            let ready = self.front.len().min(room.len());
            self.front.copy_to_slice(room.get_mut(..ready).unwrap_or_default());
            return Poll::Ready(Ok(ready));
        }
        poll_some(&mut self.io, cx, room)
    }

    /// A line without its end.
    async fn line(&mut self) -> Result<Vec<u8>> {
        let mut line = Vec::new();
        loop {
            let (piece, ended) = self.piece().await?;
            line.extend(piece);
            if line.len() > RESP_LINE_BYTES_MAX {
                return Err(broken("too big line"));
            }
            if ended {
                break;
            }
        }
        // Whoever types at a terminal sends LF alone.
        let bytes = line.strip_suffix(b"\n").unwrap_or(&line);
        let end = bytes.strip_suffix(b"\r").unwrap_or(bytes).len();
        line.truncate(end);
        Ok(line)
    }

    /// What there is of a line, up to its end, and whether that is there.
    async fn piece(&mut self) -> Result<(Bytes, bool)> {
        let newline = |bytes: &[u8]| bytes.iter().position(|byte| *byte == b'\n');
        if !self.front.is_empty() {
            let end = newline(&self.front).map(|at| at + 1);
            return Ok((self.front.split_to(end.unwrap_or(self.front.len())), end.is_some()));
        }
        let ready = timeout_at(self.deadline, self.io.fill_buf()).await;
        let ready = ready.map_err(slow)?.map_err(lost)?;
        if ready.is_empty() {
            return Err(lost(io::ErrorKind::UnexpectedEof.into()));
        }
        let end = newline(ready).map(|at| at + 1);
        let piece =
            Bytes::copy_from_slice(ready.get(..end.unwrap_or(ready.len())).unwrap_or_default());
        self.io.consume(piece.len());
        Ok((piece, end.is_some()))
    }
}

/// A number in digits alone, up to `most`.
fn number(digits: &[u8], most: usize) -> Option<usize> {
    let known = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    let number = str::from_utf8(digits).ok().filter(|_| known)?.parse().ok()?;
    (number <= most).then_some(number)
}

/// The error of bytes that are no command; its connection ends.
fn broken(what: &str) -> Error {
    Error::invalid(format!("Protocol error: {what}"))
}

/// The error of a command that takes too long.
pub(super) fn slow(_elapsed: Elapsed) -> Error {
    Error::new(ErrorKind::Timeout, "RESP command: not whole in time")
}
