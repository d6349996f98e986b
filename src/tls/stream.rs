//! A connection that was accepted: plain, or TLS whose handshake is made by whoever first reads or
//! writes. So accepting waits for nobody, and whatever bounds the connection bounds its handshake. Its
//! reader and its writer must be of one task until then.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::{Accept, server::TlsStream};
use tracing::debug;

use super::Tls;
use crate::metrics::{Door, TrustMetrics};

/// How every client of TLS begins: the type of a record.
const HANDSHAKE: u8 = 0x16;
/// Discarded at a time of what a client says that speaks no TLS.
const DISCARD_BYTES: usize = 4096;

/// See the module.
#[derive(Debug)]
pub(crate) struct Stream {
    state: State,
}

enum State {
    Plain(TcpStream),
    /// Nothing has come yet.
    New(TcpStream, Entry),
    Handshake(Box<Accept<TcpStream>>, Entry),
    Encrypted(Box<TlsStream<TcpStream>>),
    /// The client has been told that this is TLS: it is listened to until it hangs up, because a
    /// connection that is closed under a client that speaks cuts the answer off.
    Told(TcpStream),
    Failed,
}

/// How the connections of one listener begin; clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    door: Door,
    /// None: they are not encrypted.
    tls: Option<Tls>,
    metrics: TrustMetrics,
    /// What a client is told that speaks no TLS.
    plain_answer: Arc<[u8]>,
}

impl Entry {
    pub(crate) fn new(
        door: Door,
        tls: Option<Tls>,
        metrics: TrustMetrics,
        plain_answer: Vec<u8>,
    ) -> Self {
        Self { door, tls, metrics, plain_answer: plain_answer.into() }
    }

    /// Connections are encrypted.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.tls.is_some()
    }

    /// A connection that was accepted.
    pub(crate) fn begin(&self, io: TcpStream) -> Stream {
        let state = match &self.tls {
            None => State::Plain(io),
            Some(_) => State::New(io, self.clone()),
        };
        Stream { state }
    }
}

impl Stream {
    /// The socket of a connection that will never be encrypted, or itself.
    pub(crate) fn into_plain(self) -> Result<TcpStream, Self> {
        match self.state {
            State::Plain(io) => Ok(io),
            state => Err(Self { state }),
        }
    }

    /// The socket, unless the connection has failed.
    pub(crate) fn socket(&self) -> Option<&TcpStream> {
        match &self.state {
            State::Plain(io) | State::New(io, _) | State::Told(io) => Some(io),
            State::Encrypted(io) => Some(io.get_ref().0),
            State::Handshake(..) | State::Failed => None,
        }
    }

    fn poll_established(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match &mut self.state {
                State::Plain(_) | State::Encrypted(_) => return Poll::Ready(Ok(())),
                State::New(io, _) => {
                    let mut first = [0];
                    let mut room = ReadBuf::new(&mut first);
                    let peeked = ready!(io.poll_peek(cx, &mut room));
                    self.begin(cx, peeked.map(|_bytes| room.filled().first().copied()))?;
                }
                State::Told(io) => {
                    let mut nowhere = [0; DISCARD_BYTES];
                    let mut room = ReadBuf::new(&mut nowhere);
                    ready!(Pin::new(io).poll_read(cx, &mut room))?;
                    if room.filled().is_empty() {
                        self.state = State::Failed;
                    }
                }
                State::Handshake(accept, entry) => {
                    let done = ready!(Pin::new(accept.as_mut()).poll(cx));
                    if let Err(error) = &done {
                        entry.metrics.record_tls_failure(entry.door);
                        debug!(door = entry.door.name(), %error, "TLS handshake failed");
                    }
                    self.state = State::Failed;
                    self.state = State::Encrypted(Box::new(done?));
                }
                State::Failed => return Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
            }
        }
    }

    /// Begins the handshake, now that the first byte has come, if one has.
    fn begin(&mut self, cx: &mut Context<'_>, first: io::Result<Option<u8>>) -> io::Result<()> {
        let State::New(mut io, entry) = std::mem::replace(&mut self.state, State::Failed) else {
            return Ok(());
        };
        match first? {
            None => Err(io::ErrorKind::UnexpectedEof.into()),
            Some(HANDSHAKE) => {
                let acceptor = entry.tls.as_ref().and_then(|tls| tls.acceptor(entry.door));
                let accept = acceptor.ok_or(io::ErrorKind::NotConnected)?.accept(io);
                self.state = State::Handshake(Box::new(accept), entry);
                Ok(())
            }
            Some(_other) => {
                entry.metrics.record_tls_failure(entry.door);
                debug!(door = entry.door.name(), "a client speaks no TLS");
                // There is room for it on a new connection; a client that is gone needs none.
                drop(io.try_write(&entry.plain_answer));
                drop(Pin::new(&mut io).poll_shutdown(cx));
                self.state = State::Told(io);
                Ok(())
            }
        }
    }
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Plain(_) => "Plain",
            Self::New(..) => "New",
            Self::Handshake(..) => "Handshake",
            Self::Encrypted(_) => "Encrypted",
            Self::Told(_) => "Told",
            Self::Failed => "Failed",
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_established(cx))?;
        match &mut self.state {
            State::Plain(io) => Pin::new(io).poll_read(cx, buf),
            State::Encrypted(io) => Pin::new(io.as_mut()).poll_read(cx, buf),
            State::New(..) | State::Handshake(..) | State::Told(_) | State::Failed => {
                not_connected()
            }
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_established(cx))?;
        match &mut self.state {
            State::Plain(io) => Pin::new(io).poll_write(cx, buf),
            State::Encrypted(io) => Pin::new(io.as_mut()).poll_write(cx, buf),
            State::New(..) | State::Handshake(..) | State::Told(_) | State::Failed => {
                not_connected()
            }
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_established(cx))?;
        match &mut self.state {
            State::Plain(io) => Pin::new(io).poll_write_vectored(cx, bufs),
            State::Encrypted(io) => Pin::new(io.as_mut()).poll_write_vectored(cx, bufs),
            State::New(..) | State::Handshake(..) | State::Told(_) | State::Failed => {
                not_connected()
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            State::Plain(io) => Pin::new(io).poll_flush(cx),
            State::Encrypted(io) => Pin::new(io.as_mut()).poll_flush(cx),
            // Nothing was written.
            State::New(..) | State::Handshake(..) | State::Told(_) | State::Failed => {
                Poll::Ready(Ok(()))
            }
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.state {
            State::Plain(io) => Pin::new(io).poll_shutdown(cx),
            State::Encrypted(io) => Pin::new(io.as_mut()).poll_shutdown(cx),
            State::New(..) | State::Handshake(..) | State::Told(_) | State::Failed => {
                self.state = State::Failed;
                Poll::Ready(Ok(()))
            }
        }
    }
}

fn not_connected<T>() -> Poll<io::Result<T>> {
    Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
}
