//! Where clients come in: so many at a time, and none that is gone without a word.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
};

use axum::serve::Listener;
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
};
use tracing::debug;

use crate::{
    api::incoming::{Place, Places, accept},
    keep_alive::keep_alive,
};

/// Connections of clients, which keep some for later: twice what may be under way.
const CONNECTIONS_MAX: usize = 8192;

/// See the module.
#[derive(Debug)]
pub(super) struct ClientListener {
    listener: TcpListener,
    places: Places,
}

/// A connection with its place.
#[derive(Debug)]
pub(super) struct Connection {
    io: TcpStream,
    _place: Place,
}

impl ClientListener {
    /// `open` shows how many there are.
    pub(super) fn new(listener: TcpListener, open: Gauge) -> Self {
        Self { listener, places: Places::new(CONNECTIONS_MAX, open) }
    }
}

impl Listener for ClientListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let ((io, peer), place) = self.places.next(|| accept(&self.listener)).await;
        if let Err(error) = keep_alive(&io) {
            debug!(%error, "nobody asks whether a silent client lives");
        }
        (Connection { io, _place: place }, peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, into)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
