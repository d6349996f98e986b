//! Files on a Unix socket: sent with the next bytes that are written, and kept when they come with what is read.
//!
//! Files come at the latest with the last byte of the frame that they were sent with. They are taken
//! while some are expected; a peer that sends them at other times sends them nowhere.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// What the kernel takes with one write, and a half: most have a few.
const FILES_PER_WRITE: usize = 128;

/// The files of one connection.
#[derive(Debug, Default)]
pub(crate) struct Files {
    to_send: Mutex<Vec<OwnedFd>>,
    come: Mutex<Vec<OwnedFd>>,
    /// How many more may come.
    expected: AtomicUsize,
}

impl Files {
    /// Sends files with what is written next.
    pub(crate) fn send(&self, files: Vec<OwnedFd>) {
        *self.to_send.lock() = files;
    }

    /// Keeps so many files that come from now on, and lets go of others; with 0, reads are plain.
    pub(crate) fn expect(&self, files: usize) {
        self.expected.store(files, Ordering::Relaxed);
    }

    /// Those that have come.
    pub(crate) fn take(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.come.lock())
    }

    fn is_sending(&self) -> bool {
        !self.to_send.lock().is_empty()
    }

    fn read(&self, from: &UnixStream, room: &mut [u8]) -> io::Result<usize> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_PER_WRITE))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut room = [IoSliceMut::new(room)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let read = recvmsg(from.as_fd(), &mut room, &mut ancillary, flags)?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                let mut come = self.come.lock();
                // What is not kept is closed.
                let wanted = self.expected.load(Ordering::Relaxed).saturating_sub(come.len());
                come.extend(files.take(wanted));
            }
        }
        Ok(read.bytes)
    }

    /// Writes with as many files as go with one write; if some are left, only a byte.
    fn write(&self, to: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
        let mut files = self.to_send.lock();
        let now = files.len().min(FILES_PER_WRITE);
        let bytes = if files.len() > now { bytes.get(..1).unwrap_or(bytes) } else { bytes };
        let borrowed: Vec<_> = files.iter().take(now).map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_PER_WRITE))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let bytes = [IoSlice::new(bytes)];
        let written = sendmsg(to.as_fd(), &bytes, &mut ancillary, SendFlags::NOSIGNAL)?;
        drop(borrowed);
        files.drain(..now);
        Ok(written)
    }
}

/// The reading half of a connection that files come by.
#[derive(Debug)]
pub(crate) struct From {
    half: OwnedReadHalf,
    files: Arc<Files>,
}

/// The writing half of a connection that files are sent by.
#[derive(Debug)]
pub(crate) struct To {
    half: OwnedWriteHalf,
    files: Arc<Files>,
}

/// The halves of a connection, and its files.
pub(crate) fn split(io: UnixStream) -> (From, To, Arc<Files>) {
    let (from, to) = io.into_split();
    let files = Arc::<Files>::default();
    let from = From { half: from, files: Arc::clone(&files) };
    (from, To { half: to, files: Arc::clone(&files) }, files)
}

impl AsyncRead for From {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        room: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.files.expected.load(Ordering::Relaxed) == 0 {
            return Pin::new(&mut self.half).poll_read(cx, room);
        }
        let io = self.half.as_ref();
        loop {
            ready!(io.poll_read_ready(cx))?;
            let free = room.initialize_unfilled();
            match io.try_io(Interest::READABLE, || self.files.read(io, free)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
                Ok(read) => {
                    room.advance(read);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }
}

impl To {
    /// Writes bytes with the files that wait.
    fn poll_with_files(&self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let io = self.half.as_ref();
        loop {
            ready!(io.poll_write_ready(cx))?;
            match io.try_io(Interest::WRITABLE, || self.files.write(io, bytes)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }
}

impl AsyncWrite for To {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.files.is_sending() && !bytes.is_empty() {
            return self.poll_with_files(cx, bytes);
        }
        Pin::new(&mut self.half).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let first = pieces.iter().find(|piece| !piece.is_empty());
        if let Some(first) = first.filter(|_| self.files.is_sending()) {
            return self.poll_with_files(cx, first);
        }
        Pin::new(&mut self.half).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.half).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.half).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| memfd_create("test", MemfdFlags::CLOEXEC).unwrap()).collect()
    }

    #[tokio::test]
    async fn files_come_with_the_bytes_that_they_were_sent_with_however_many() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_, mut to, sent) = split(ours);
        let (mut from, _, come) = split(theirs);
        for count in [1, FILES_PER_WRITE, 2 * FILES_PER_WRITE + 3, 0] {
            sent.send(files(count));
            come.expect(count);
            to.write_all(&[1; 100]).await.unwrap();
            from.read_exact(&mut [0; 100]).await.unwrap();
            assert_eq!(come.take().len(), count);
        }
    }

    #[tokio::test]
    async fn files_that_nobody_expects_are_let_go() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (_, mut to, sent) = split(ours);
        let (mut from, _, come) = split(theirs);
        for (expected, kept) in [(0, 0), (2, 2)] {
            sent.send(files(5));
            come.expect(expected);
            to.write_all(&[1; 100]).await.unwrap();
            from.read_exact(&mut [0; 100]).await.unwrap();
            assert_eq!(come.take().len(), kept);
        }
    }
}
