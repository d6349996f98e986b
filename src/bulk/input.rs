//! Reads frames: the header and the body into memory of their own, the payload where it will stay.
//!
//! A frame has a deadline from its first byte on, whatever comes of it and however slowly. Memory for
//! a body grows as its bytes come, not by what its header says.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{BufMut, Bytes};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncBufRead, AsyncRead, AsyncReadExt, BufReader, ReadBuf},
    time::{Instant, timeout_at},
};

use super::frame::{HEADER_BYTES, Header};
use crate::limits::BULK_FRAME_DEADLINE;

/// Read at a time where it is not payload: a batch of small frames. What of a payload comes with them
/// is copied once more.
const BUFFER_BYTES: usize = 4096;
/// A body is given memory in steps of this.
const BODY_STEP_BYTES: usize = 256 * 1024;

/// The incoming half of a connection.
#[derive(Debug)]
pub(crate) struct Input<R> {
    io: BufReader<R>,
    header: [u8; HEADER_BYTES],
    /// How many of its bytes have come.
    have: usize,
    /// When the frame that has begun must be over.
    deadline: Instant,
}

impl<R: AsyncRead + Unpin> Input<R> {
    pub(crate) fn new(io: R) -> Self {
        let io = BufReader::with_capacity(BUFFER_BYTES, io);
        Self { io, header: [0; HEADER_BYTES], have: 0, deadline: Instant::now() }
    }

    /// The next header; none if the peer has closed before it.
    ///
    /// # Cancel safety
    /// Safe: what has come of it is kept.
    pub(crate) async fn header(&mut self) -> Result<Option<Header>> {
        while self.have < HEADER_BYTES {
            let rest = self.header.get_mut(self.have..).unwrap_or_default();
            let reading = self.io.read(rest);
            let read = match self.have {
                0 => reading.await,
                _ => timeout_at(self.deadline, reading).await.map_err(|_elapsed| slow())?,
            };
            match (read.map_err(lost)?, self.have) {
                (0, 0) => return Ok(None),
                (0, _) => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
                (read, 0) => {
                    self.have = read;
                    self.deadline = Instant::now() + BULK_FRAME_DEADLINE;
                }
                (read, _) => self.have += read,
            }
        }
        self.have = 0;
        Ok(Some(Header::read(&self.header)?))
    }

    /// The body of the frame whose header came last, verified.
    pub(crate) async fn body(&mut self, header: &Header) -> Result<Bytes> {
        let mut body = Vec::with_capacity(header.body_bytes.min(BODY_STEP_BYTES));
        while body.len() < header.body_bytes {
            let step = (header.body_bytes - body.len()).min(BODY_STEP_BYTES);
            let start = body.len();
            body.resize(start + step, 0);
            self.exactly(body.get_mut(start..).unwrap_or_default()).await?;
        }
        header.verify(&body)?;
        Ok(body.into())
    }

    /// The body of a frame whose kind has bodies of one length only, verified.
    pub(crate) async fn fixed<const N: usize>(&mut self, header: &Header) -> Result<[u8; N]> {
        let mut body = [0; N];
        self.exactly(&mut body).await?;
        header.verify(&body)?;
        Ok(body)
    }

    /// Fills `room` with payload.
    pub(crate) async fn exactly(&mut self, room: &mut [u8]) -> Result<()> {
        let read = timeout_at(self.deadline, self.io.read_exact(room)).await;
        read.map_err(|_elapsed| slow())?.map_err(lost).map(drop)
    }

    /// Appends what has come of a payload to `to`, which has room for it: `most` bytes at most, and at
    /// least one.
    pub(crate) async fn append_some(&mut self, to: &mut impl BufMut, most: usize) -> Result<usize> {
        let mut room = BufMut::limit(to, most);
        let read = timeout_at(self.deadline, self.io.read_buf(&mut room)).await;
        match read.map_err(|_elapsed| slow())?.map_err(lost)? {
            0 => Err(lost(io::ErrorKind::UnexpectedEof.into())),
            read => Ok(read),
        }
    }

    /// Reads payload that nobody wants.
    pub(crate) async fn skip(&mut self, mut bytes: usize) -> Result<()> {
        let mut nowhere = [0; BUFFER_BYTES];
        while bytes > 0 {
            let step = bytes.min(nowhere.len());
            self.exactly(nowhere.get_mut(..step).unwrap_or_default()).await?;
            bytes -= step;
        }
        Ok(())
    }

    /// When the frame that has begun must be over.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Reads what there is of a payload into `room`; returns how much, at least one byte.
    pub(crate) fn poll_some(
        &mut self,
        cx: &mut Context<'_>,
        room: &mut [u8],
    ) -> Poll<Result<usize>> {
        poll_some(&mut self.io, cx, room)
    }

    /// Whether nothing has come that was not asked for, the end of the connection included.
    pub(crate) fn is_silent(&mut self) -> bool {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        self.have == 0 && Pin::new(&mut self.io).poll_fill_buf(&mut cx).is_pending()
    }
}

/// Reads what there is into `room`; returns how much, at least one byte.
pub(crate) fn poll_some(
    io: &mut (impl AsyncRead + Unpin),
    cx: &mut Context<'_>,
    room: &mut [u8],
) -> Poll<Result<usize>> {
    let mut room = ReadBuf::new(room);
    match Pin::new(io).poll_read(cx, &mut room) {
        Poll::Pending => Poll::Pending,
        Poll::Ready(Err(error)) => Poll::Ready(Err(lost(error))),
        Poll::Ready(Ok(())) if room.filled().is_empty() => {
            Poll::Ready(Err(lost(io::ErrorKind::UnexpectedEof.into())))
        }
        Poll::Ready(Ok(())) => Poll::Ready(Ok(room.filled().len())),
    }
}

/// The error of a frame that takes too long.
pub(crate) fn slow() -> Error {
    let within = BULK_FRAME_DEADLINE.as_secs();
    Error::new(ErrorKind::Timeout, format!("frame: not whole within {within} s"))
}

/// The error of a connection that is gone.
pub(crate) fn lost(error: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, "connection lost").because(error)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::bulk::{
        body::push_credit,
        frame::{Kind, bare},
    };

    #[tokio::test(start_paused = true)]
    async fn a_byte_a_second_is_too_slow_and_a_pause_between_frames_is_not() {
        let (mut peer, ours) = tokio::io::duplex(64);
        let mut input = Input::new(ours);
        let writing = async {
            tokio::time::sleep(BULK_FRAME_DEADLINE * 10).await;
            peer.write_all(&bare(Kind::Finish, 3)).await.unwrap();
            for byte in bare(Kind::Finish, 4) {
                if peer.write_all(&[byte]).await.is_err() {
                    break;
                }
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
        };
        let reading = async {
            let header = input.header().await.unwrap().unwrap();
            assert_eq!((header.kind, header.request), (Kind::Finish, 3));
            let start = Instant::now();
            assert_eq!(input.header().await.unwrap_err().kind(), ErrorKind::Timeout);
            assert!(start.elapsed() <= BULK_FRAME_DEADLINE + Duration::from_secs(1));
            drop(input);
        };
        tokio::join!(writing, reading);
    }

    #[tokio::test]
    async fn a_header_that_was_waited_for_in_vain_is_not_lost() {
        let (mut peer, ours) = tokio::io::duplex(64);
        let mut input = Input::new(ours);
        let mut frame = Vec::new();
        push_credit(&mut frame, 77);
        peer.write_all(&frame[..10]).await.unwrap();
        let soon = tokio::time::timeout(Duration::from_millis(20), input.header()).await;
        assert!(soon.is_err());
        peer.write_all(&frame[10..]).await.unwrap();
        let header = input.header().await.unwrap().unwrap();
        let body = input.body(&header).await.unwrap();
        assert_eq!(crate::bulk::body::read_credit(body).unwrap(), 77);
        assert!(input.is_silent());
        drop(peer);
        assert!(!input.is_silent());
        assert!(input.header().await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_connection_cut_within_a_frame_is_lost() {
        let (mut peer, ours) = tokio::io::duplex(64);
        let mut input = Input::new(ours);
        peer.write_all(&bare(Kind::End, 1)[..7]).await.unwrap();
        drop(peer);
        assert_eq!(input.header().await.unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
