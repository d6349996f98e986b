//! Writes frames: heads that lie one behind the other and payload from where it lies, as many as there
//! are in one call. A payload is held exactly until the kernel has taken its last byte.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    ops::Range,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    time::timeout,
};

use super::input::lost;
use crate::limits::BULK_FRAME_DEADLINE;

/// Pieces handed to the kernel at a time.
const SLICES_MAX: usize = 64;

/// Heads up to a place, and then the payload, if there is one.
#[derive(Debug)]
struct Segment<P> {
    heads_end: usize,
    payload: Option<(P, Range<usize>)>,
}

/// Frames that wait to be written.
#[derive(Debug)]
pub(crate) struct Output<P> {
    heads: Vec<u8>,
    /// How many of the heads are written.
    heads_done: usize,
    segments: VecDeque<Segment<P>>,
    /// Bytes of payload in them.
    payload_bytes: usize,
}

impl<P> Default for Output<P> {
    fn default() -> Self {
        Self { heads: Vec::new(), heads_done: 0, segments: VecDeque::new(), payload_bytes: 0 }
    }
}

impl<P: AsRef<[u8]>> Output<P> {
    /// Appends frames without payload.
    pub(crate) fn push(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        write(&mut self.heads);
        let heads_end = self.heads.len();
        match self.segments.back_mut() {
            Some(last) if last.payload.is_none() => last.heads_end = heads_end,
            _ => self.segments.push_back(Segment { heads_end, payload: None }),
        }
    }

    /// Appends a frame whose payload is `range` of `payload`.
    pub(crate) fn push_payload(
        &mut self,
        payload: P,
        range: Range<usize>,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        self.push(write);
        self.payload_bytes += range.len();
        if let Some(last) = self.segments.back_mut() {
            last.payload = Some((payload, range));
        }
    }

    /// Nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes of payload that wait.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// As many as one call takes are full.
    pub(crate) fn is_full(&self) -> bool {
        self.segments.len() * 2 >= SLICES_MAX
    }

    /// Writes all that waits, within the deadline of a frame.
    ///
    /// # Errors
    /// `Timeout` if the peer does not read, `Unavailable` if it is gone.
    pub(crate) async fn flush<W: AsyncWrite + Unpin>(&mut self, to: &mut W) -> Result<()> {
        match timeout(BULK_FRAME_DEADLINE, self.write_all(to)).await {
            Ok(written) => written.map_err(lost),
            Err(_elapsed) => {
                let within = BULK_FRAME_DEADLINE.as_secs();
                let text = format!("frame: the peer has not read it within {within} s");
                Err(Error::new(ErrorKind::Timeout, text))
            }
        }
    }

    async fn write_all<W: AsyncWrite + Unpin>(&mut self, to: &mut W) -> io::Result<()> {
        while !self.segments.is_empty() {
            let written = {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let filled = self.slices(&mut slices);
                to.write_vectored(slices.get(..filled).unwrap_or_default()).await?
            };
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.advance(written);
        }
        // What an encrypted stream has taken need not have left.
        to.flush().await?;
        self.heads.clear();
        self.heads_done = 0;
        Ok(())
    }

    /// What is written next, as pieces that are not empty; returns how many.
    fn slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut start = self.heads_done;
        let pieces = self.segments.iter().flat_map(|segment| {
            let head = self.heads.get(start..segment.heads_end).unwrap_or_default();
            start = segment.heads_end;
            let payload = segment.payload.as_ref();
            let payload = payload.and_then(|(bytes, range)| bytes.as_ref().get(range.clone()));
            [head, payload.unwrap_or_default()]
        });
        let mut filled = 0;
        for (slot, piece) in slices.iter_mut().zip(pieces.filter(|piece| !piece.is_empty())) {
            *slot = IoSlice::new(piece);
            filled += 1;
        }
        filled
    }

    /// Lets go of what is written.
    fn advance(&mut self, mut written: usize) {
        while let Some(segment) = self.segments.front_mut() {
            let head = segment.heads_end.saturating_sub(self.heads_done).min(written);
            self.heads_done += head;
            written -= head;
            if self.heads_done < segment.heads_end {
                return;
            }
            if let Some((_, range)) = &mut segment.payload {
                let payload = range.len().min(written);
                range.start += payload;
                written -= payload;
                self.payload_bytes -= payload;
                if range.start < range.end {
                    return;
                }
            }
            self.segments.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn all_is_written_in_order_however_little_is_taken_at_a_time() {
        let mut expected = Vec::new();
        let mut output = Output::<Vec<u8>>::default();
        for number in 0..200_u8 {
            output.push(|heads| heads.extend([number; 3]));
            expected.extend([number; 3]);
            if number % 3 == 0 {
                let payload: Vec<u8> = (0..number).collect();
                expected.extend([9; 2]);
                expected.extend(&payload[usize::from(number / 2)..]);
                let range = usize::from(number / 2)..payload.len();
                output.push_payload(payload, range, |heads| heads.extend([9; 2]));
            }
        }
        let (mut to, mut from) = tokio::io::duplex(7);
        let writing = async {
            output.flush(&mut to).await.unwrap();
            assert!(output.is_empty() && output.payload_bytes() == 0);
            drop(to);
        };
        let reading = async {
            let mut read = Vec::new();
            from.read_to_end(&mut read).await.unwrap();
            read
        };
        assert_eq!(tokio::join!(writing, reading).1, expected);
    }

    #[tokio::test(start_paused = true)]
    async fn a_payload_is_held_until_it_is_written_and_a_peer_that_does_not_read_is_given_up() {
        let payload = std::sync::Arc::new([7_u8; 100]);
        #[derive(Debug)]
        struct Held(std::sync::Arc<[u8; 100]>);
        impl AsRef<[u8]> for Held {
            fn as_ref(&self) -> &[u8] {
                self.0.as_slice()
            }
        }
        let mut output = Output::default();
        for _ in 0..2 {
            output
                .push_payload(Held(std::sync::Arc::clone(&payload)), 0..100, |heads| heads.push(1));
        }
        let (mut to, _from) = tokio::io::duplex(150);
        let failed = output.flush(&mut to).await.unwrap_err();
        assert_eq!(failed.kind(), ErrorKind::Timeout);
        assert_eq!(std::sync::Arc::strong_count(&payload), 2, "the first one is written");
        drop(output);
        assert_eq!(std::sync::Arc::strong_count(&payload), 1);
    }
}
