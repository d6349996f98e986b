//! Accepts connections, at most so many at a time.
//!
//! A connection holds its permit until it is closed; while there is none, new ones wait in the
//! kernel's backlog, which is bounded too. An error of one accept (a client that is gone already, no
//! descriptor left) is no reason to stop listening.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, stream};
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::warn;

/// Pause after a failed accept: without descriptors the next one fails as well.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A connection with its permit.
#[derive(Debug)]
pub struct Connection {
    io: TcpStream,
    open: Gauge,
    _permit: OwnedSemaphorePermit,
}

/// The connections of `listener`, at most `connections_max` at a time; `open` shows how many.
pub fn connections(
    listener: TcpListener,
    connections_max: usize,
    open: Gauge,
) -> impl Stream<Item = io::Result<Connection>> {
    let permits = Arc::new(Semaphore::new(connections_max));
    stream::unfold((listener, permits, open), |(listener, permits, open)| async move {
        let permit = Arc::clone(&permits).acquire_owned().await.ok()?;
        let io = loop {
            match accept(&listener).await {
                Ok(io) => break io,
                Err(error) => {
                    warn!(%error, "connection not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        open.inc();
        let connection = Connection { io, open: open.clone(), _permit: permit };
        Some((Ok(connection), (listener, permits, open)))
    })
}

async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (io, _peer) = listener.accept().await?;
    io.set_nodelay(true)?;
    Ok(io)
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.open.dec();
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.io.connect_info()
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
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
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}
