//! Accepts connections, at most so many at a time.
//!
//! A connection holds its permit until it is closed; while there is none, new ones wait in the
//! kernel's backlog, which is bounded too. So a peer that connects and says nothing must not hold one
//! for ever: gRPC's keepalive begins only after the first bytes of HTTP/2, and HTTP/1.1 has none. An
//! error of one accept (a client that is gone already, no descriptor left) is no reason to stop
//! listening.

use std::{
    io,
    net::SocketAddr,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{FutureExt, Stream as Items, stream};
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::{error, warn};

use crate::{
    limits::{HELLO_DEADLINE, HTTP_CONNECTIONS_MAX, HTTP_SILENCE_MAX},
    node::Node,
    tls::{Entry, Stream},
};

/// Pause after a failed accept: without descriptors the next one fails as well.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Bytes that every client of HTTP/2 begins with.
const PREFACE_BYTES: usize = 24;

/// A connection with its permit.
#[derive(Debug)]
pub struct Connection {
    io: Stream,
    silence: Option<Silence>,
    _place: Place,
}

/// Bounds connections.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    permits: Arc<Semaphore>,
    open: Gauge,
}

/// The place of one connection.
#[derive(Debug)]
pub(crate) struct Place {
    open: Gauge,
    _permit: OwnedSemaphorePermit,
}

impl Places {
    /// So many places; `open` shows how many are taken.
    pub(crate) fn new(connections_max: usize, open: Gauge) -> Self {
        Self { permits: Arc::new(Semaphore::new(connections_max)), open }
    }

    /// Waits for a place, then for a connection.
    ///
    /// # Cancel safety
    /// Safe: a connection that was not returned is closed.
    pub(crate) async fn next<T, F>(&self, accept: impl Fn() -> F) -> (T, Place)
    where
        F: Future<Output = io::Result<T>>,
    {
        let permit = loop {
            match Arc::clone(&self.permits).acquire_owned().await {
                Ok(permit) => break permit,
                // Nobody closes the semaphore.
                Err(_closed) => std::future::pending::<()>().await,
            }
        };
        let accepted = loop {
            match accept().await {
                Ok(accepted) => break accepted,
                Err(error) => {
                    warn!(%error, "connection not accepted");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        };
        self.open.inc();
        (accepted, Place { open: self.open.clone(), _permit: permit })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.dec();
    }
}

/// Serves one connection in a task of its own, until it ends or the tasks of the node should; a panic
/// ends it and nothing else.
pub(crate) fn serve(
    node: &Node,
    name: &'static str,
    place: Place,
    serving: impl Future<Output = ()> + Send + 'static,
) {
    let (stop, panics) = (node.tasks.stop_token(), node.metrics.request_panics.clone());
    node.tasks.spawn(name, async move {
        let _place = place;
        let serving = AssertUnwindSafe(Box::pin(serving)).catch_unwind();
        if let Some(Err(_panic)) = stop.run_until_cancelled(serving).await {
            panics.inc();
            error!(task = name, "connection panicked");
        }
    });
}

/// How long nothing, or too little, may come from the peer.
#[derive(Debug)]
struct Silence {
    deadline: Pin<Box<Sleep>>,
    allowed: Allowed,
}

#[derive(Debug)]
enum Allowed {
    /// Until this many more bytes have come, however slowly: then any.
    First(usize),
    /// So long after each byte that came, or that it took.
    Each(Duration),
}

impl Silence {
    fn first(bytes: usize, within: Duration) -> Self {
        Self { deadline: Box::pin(sleep(within)), allowed: Allowed::First(bytes) }
    }

    fn each(within: Duration) -> Self {
        Self { deadline: Box::pin(sleep(within)), allowed: Allowed::Each(within) }
    }

    /// Takes note of bytes that were sent: a peer that reads is there, whatever it says.
    fn say(&mut self, sent: &Poll<io::Result<usize>>) {
        if let (Allowed::Each(within), Poll::Ready(Ok(1..))) = (&self.allowed, sent) {
            self.deadline.as_mut().reset(Instant::now() + *within);
        }
    }

    /// Takes note of bytes that came; returns whether they were enough for good.
    fn hear(&mut self, bytes: usize) -> bool {
        match &mut self.allowed {
            Allowed::First(left) => {
                *left = left.saturating_sub(bytes);
                *left == 0
            }
            Allowed::Each(within) => {
                if bytes > 0 {
                    self.deadline.as_mut().reset(Instant::now() + *within);
                }
                false
            }
        }
    }
}

/// What a client of HTTP/2 is told that speaks no TLS: empty settings, and that the connection ends for
/// lack of security, with the reason.
pub(crate) fn plain_answer() -> Vec<u8> {
    const REASON: &[u8; 34] = b"this port speaks TLS: use https://";
    let settings = [0, 0, 0, 4, 0, 0, 0, 0, 0];
    // 42 bytes: the last stream that was looked at (none), the code of inadequate security, the reason.
    let goaway = [0, 0, 42, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12];
    [settings.as_slice(), &goaway, REASON].concat()
}

/// The gRPC connections of `listener`, at most `connections_max` at a time; `open` shows how many.
pub(crate) fn connections(
    listener: TcpListener,
    entry: Entry,
    connections_max: usize,
    open: Gauge,
) -> impl Items<Item = io::Result<Connection>> {
    let acceptor = Acceptor::new(listener, entry, connections_max, open);
    stream::unfold(acceptor, |acceptor| async move {
        let (mut connection, _peer) = acceptor.next().await;
        connection.silence = Some(Silence::first(PREFACE_BYTES, HELLO_DEADLINE));
        Some((Ok(connection), acceptor))
    })
}

/// Accepts connections, one place for each.
#[derive(Debug)]
pub struct Acceptor {
    listener: TcpListener,
    entry: Entry,
    places: Places,
}

impl Acceptor {
    fn new(listener: TcpListener, entry: Entry, connections_max: usize, open: Gauge) -> Self {
        Self { listener, entry, places: Places::new(connections_max, open) }
    }

    /// Accepts readers of pages: few, and none that says nothing for long.
    #[must_use]
    pub(crate) fn of_pages(listener: TcpListener, entry: Entry) -> Self {
        Self::new(listener, entry, HTTP_CONNECTIONS_MAX, Gauge::default())
    }

    /// The next reader of pages.
    ///
    /// # Cancel safety
    /// Safe: a connection that was not returned is closed.
    pub async fn next_reader(&self) -> (Connection, SocketAddr) {
        let (mut connection, peer) = self.next().await;
        connection.silence = Some(Silence::each(HTTP_SILENCE_MAX));
        (connection, peer)
    }

    /// Where it listens.
    ///
    /// # Errors
    /// As the system's.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    async fn next(&self) -> (Connection, SocketAddr) {
        let ((io, peer), place) = self.places.next(|| accept(&self.listener)).await;
        let io = self.entry.begin(io);
        (Connection { io, silence: None, _place: place }, peer)
    }
}

/// A connection that sends small things at once.
pub(crate) async fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr)> {
    let (io, peer) = listener.accept().await?;
    io.set_nodelay(true)?;
    Ok((io, peer))
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        let unknown = TcpConnectInfo { local_addr: None, remote_addr: None };
        self.io.socket().map_or(unknown, Connected::connect_info)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buf);
        let Some(silence) = &mut self.silence else { return read };
        if silence.hear(buf.filled().len().saturating_sub(before)) {
            self.silence = None;
        } else if silence.deadline.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let sent = Pin::new(&mut self.io).poll_write(cx, buf);
        if let Some(silence) = &mut self.silence {
            silence.say(&sent);
        }
        sent
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
        let sent = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        if let Some(silence) = &mut self.silence {
            silence.say(&sent);
        }
        sent
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt;
    use prometheus_client::registry::Registry;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::metrics::{Door, TrustMetrics};

    fn plain() -> Entry {
        let metrics = TrustMetrics::register(&mut Registry::default());
        Entry::new(Door::Grpc, None, metrics, Vec::new())
    }

    async fn listener() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_takes_what_it_is_told_need_not_say_more() {
        let (listener, address) = listener().await;
        let pages = Acceptor::of_pages(listener, plain());
        let mut peer = TcpStream::connect(address).await.unwrap();
        let (mut connection, _) = pages.next_reader().await;
        let start = Instant::now();
        for _ in 0..10 {
            sleep(HTTP_SILENCE_MAX / 2).await;
            connection.write_all(b"line").await.unwrap();
            peer.read_exact(&mut [0; 4]).await.unwrap();
        }
        let error = connection.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!((start.elapsed() - HTTP_SILENCE_MAX * 5).as_secs(), HTTP_SILENCE_MAX.as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_says_too_little_loses_its_place() {
        let (listener, address) = listener().await;
        let open = Gauge::default();
        let mut accepted = Box::pin(connections(listener, plain(), 1, open.clone()));
        let mut peer = TcpStream::connect(address).await.unwrap();
        let mut connection = accepted.next().await.unwrap().unwrap();
        let start = Instant::now();
        let reading = async {
            let mut bytes = Vec::new();
            connection.read_to_end(&mut bytes).await.unwrap_err()
        };
        // One byte now and then is no beginning.
        let trickling = async {
            loop {
                peer.write_all(b"P").await.unwrap();
                sleep(HELLO_DEADLINE / 8).await;
            }
        };
        let error = tokio::select! {
            error = reading => error,
            () = trickling => unreachable!("endless"),
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() < HELLO_DEADLINE * 2, "{:?}", start.elapsed());
        assert_eq!(open.get(), 1);
        drop(connection);
        assert_eq!(open.get(), 0);
        let _peer = TcpStream::connect(address).await.unwrap();
        accepted.next().await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_first_bytes_silence_is_for_keepalive_to_judge() {
        let (listener, address) = listener().await;
        let mut accepted = Box::pin(connections(listener, plain(), 1, Gauge::default()));
        let mut peer = TcpStream::connect(address).await.unwrap();
        let mut connection = accepted.next().await.unwrap().unwrap();
        peer.write_all(&[b'x'; PREFACE_BYTES]).await.unwrap();
        let mut bytes = [0; PREFACE_BYTES];
        connection.read_exact(&mut bytes).await.unwrap();
        let silent = connection.read_u8();
        assert!(tokio::time::timeout(HELLO_DEADLINE * 10, silent).await.is_err(), "still open");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_of_pages_may_pause_but_not_for_long() {
        let (listener, address) = listener().await;
        let pages = Acceptor::of_pages(listener, plain());
        let mut peer = TcpStream::connect(address).await.unwrap();
        let (mut connection, _) = pages.next_reader().await;
        for _ in 0..5 {
            sleep(HTTP_SILENCE_MAX * 3 / 4).await;
            peer.write_all(b"x").await.unwrap();
            assert_eq!(connection.read_u8().await.unwrap(), b'x');
        }
        let error = connection.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
