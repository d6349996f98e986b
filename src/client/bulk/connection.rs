//! One connection to a bulk port.

use std::{io, time::Duration};

use bytes::Bytes;
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::{Instant, timeout, timeout_at},
};
use tonic::{Code, Status};

use super::shared::{Known, Shared};
use crate::{
    bulk::{
        body::{Hello, ID_BYTES, Refused, Welcome, push_credit},
        frame::{Header, Kind, VERSION},
        input::{Input, lost},
        output::Output,
        widen,
    },
    client::{
        BulkPort, Path, RETRY_AFTER_KEY, access::Access, connect::timed_out, error_of,
        status::broken_contract,
    },
    metrics::Door,
    shm,
};

/// Payload that the server may be ahead of us, at least: less than a core's share of the cache, because
/// what has left it is read from memory twice more.
const CREDIT_BYTES_MIN: u32 = 1 << 20;
/// And at most: a few blocks.
const CREDIT_BYTES_MAX: u32 = 16 << 20;
/// What a network carries in a microsecond, in bytes: 100 Gbit/s.
const BYTES_PER_MICROSECOND: u128 = 12_500;

pub(super) type Reader = Input<Box<dyn AsyncRead + Send + Unpin>>;
pub(super) type Writer = Box<dyn AsyncWrite + Send + Unpin>;
type Io = (Box<dyn AsyncRead + Send + Unpin>, Writer);

/// See the module.
pub(in crate::client) struct Connection {
    pub(super) from: Reader,
    pub(super) to: Writer,
    pub(super) out: Output<Bytes>,
    session: Bytes,
    instance: Bytes,
    /// The longest payload of one frame.
    pub(super) payload_bytes_max: usize,
    /// The number of the latest request.
    request: u32,
    /// Payload that the server may be ahead of us.
    credit: u32,
    /// Bytes that were taken and not given credit for.
    owed: u32,
    /// The memory that it shares with the server; none if it shares none.
    pub(super) shared: Option<Shared>,
}

/// How a connection is to be made.
#[derive(Clone, Copy)]
pub(super) struct Dial<'a> {
    pub(super) port: &'a BulkPort,
    pub(super) session: &'a Bytes,
    pub(super) access: &'a Access,
    pub(super) path: Path,
    /// What was mapped before.
    pub(super) known: &'a Known,
}

/// The other end is on this host, where there is no network to keep busy.
fn is_here(io: &TcpStream) -> bool {
    let ends = (io.local_addr(), io.peer_addr());
    matches!(ends, (Ok(ours), Ok(theirs)) if ours.ip() == theirs.ip())
}

/// A credit that keeps a network busy for as long as it takes to be given again.
fn credit_of(round_trip: Duration) -> u32 {
    let bytes = BYTES_PER_MICROSECOND.saturating_mul(round_trip.as_micros());
    let bytes = u32::try_from(bytes).unwrap_or(CREDIT_BYTES_MAX);
    bytes.clamp(CREDIT_BYTES_MIN, CREDIT_BYTES_MAX)
}

impl Connection {
    /// Connects, by the Unix socket if there is one here, says hello, and shares memory if that is
    /// possible and wanted.
    pub(super) async fn dial(dial: Dial<'_>) -> Result<Self> {
        let Dial { port, session, access, path, .. } = dial;
        if !port.unix.is_empty()
            && let Ok(io) = UnixStream::connect(&port.unix).await
        {
            widen(&io);
            let greeted = Self::greet_here(io, dial).await;
            // Another server may have a socket of that name here.
            if greeted.is_ok() || port.tcp.is_empty() || path == Path::Shm {
                return greeted;
            }
        }
        if path == Path::Shm {
            return Err(unshared("its Unix socket is not on this host"));
        }
        if port.tcp.is_empty() {
            return Err(lost(io::ErrorKind::NotFound.into()));
        }
        // The other side's kernel answers at once, whatever its server does.
        let asked = Instant::now();
        if let Some(dialer) = &access.dialer {
            let (from, to) = tokio::io::split(dialer.connect(Door::Bulk, &port.tcp).await?);
            let credit = credit_of(asked.elapsed());
            return Self::greet((Box::new(from), Box::new(to)), credit, port, session, access)
                .await;
        }
        let io = TcpStream::connect(&port.tcp).await.map_err(lost)?;
        let credit = if is_here(&io) { CREDIT_BYTES_MIN } else { credit_of(asked.elapsed()) };
        io.set_nodelay(true).map_err(lost)?;
        let (from, to) = io.into_split();
        Self::greet((Box::new(from), Box::new(to)), credit, port, session, access).await
    }

    /// Says hello on a Unix socket.
    async fn greet_here(io: UnixStream, dial: Dial<'_>) -> Result<Self> {
        let Dial { port, session, access, path, known } = dial;
        if path == Path::Bulk {
            let (from, to) = io.into_split();
            let io: Io = (Box::new(from), Box::new(to));
            return Self::greet(io, CREDIT_BYTES_MIN, port, session, access).await;
        }
        let (from, to, files) = shm::socket::split(io);
        let io: Io = (Box::new(from), Box::new(to));
        let mut connection = Self::greet(io, CREDIT_BYTES_MIN, port, session, access).await?;
        connection.shared = connection.share(&files, known).await?;
        if connection.shared.is_none() && path == Path::Shm {
            return Err(unshared("it does not offer it (server.shared_memory)"));
        }
        Ok(connection)
    }

    async fn greet(
        (from, to): Io,
        credit: u32,
        port: &BulkPort,
        session: &Bytes,
        access: &Access,
    ) -> Result<Self> {
        const DOING: &str = "connect to the bulk port";
        let mut connection = Self {
            from: Input::new(from),
            to,
            out: Output::default(),
            session: session.clone(),
            instance: port.instance.clone(),
            payload_bytes_max: 0,
            request: 0,
            credit,
            owed: 0,
            shared: None,
        };
        let (version, token) = (VERSION, access.token());
        let session = <[u8; ID_BYTES]>::try_from(session.as_ref()).unwrap_or_default();
        let hello = Hello { version, credit, session, token };
        connection.out.push(|heads| hello.push(heads));
        connection.out.flush(&mut connection.to).await?;
        let header = connection.from.header().await?;
        let header = header.ok_or_else(|| lost(io::ErrorKind::UnexpectedEof.into()))?;
        let body = connection.from.body(&header).await?;
        match header.kind {
            Kind::Welcome => {}
            Kind::Refused => return Err(refusal(DOING, body)),
            _ => return Err(broken_contract(DOING, "it does not welcome")),
        }
        let welcome = Welcome::read(body)?;
        if welcome.instance.as_slice() != port.instance.as_ref() {
            let text = "connect to the bulk port: another server is there";
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        connection.payload_bytes_max =
            usize::try_from(welcome.payload_bytes_max).unwrap_or(usize::MAX).max(1);
        Ok(connection)
    }

    /// The session that it was opened for; empty for none.
    pub(super) fn session(&self) -> &Bytes {
        &self.session
    }

    /// The server that it leads to.
    pub(super) fn instance(&self) -> &Bytes {
        &self.instance
    }

    /// Nothing has come that was not asked for, such as its end.
    pub(super) fn is_well(&mut self) -> bool {
        self.from.is_silent() && self.out.is_empty()
    }

    /// The number of a new request.
    pub(super) fn begin(&mut self) -> u32 {
        self.request = self.request.wrapping_add(1).max(1);
        self.request
    }

    /// Places have been copied from: lets the server know, now and then.
    pub(super) async fn let_go(&mut self, damaged: bool, all: bool) -> Result<()> {
        let Some(shared) = &mut self.shared else { return Ok(()) };
        if shared.is_due(damaged || all) {
            self.out.push(|heads| shared.release(heads, damaged));
            self.out.flush(&mut self.to).await?;
        }
        Ok(())
    }

    /// Payload has been taken: lets the server send as much again, now and then.
    pub(super) async fn took(&mut self, bytes: u32) -> Result<()> {
        self.owed = self.owed.saturating_add(bytes);
        if self.owed < self.credit / 2 {
            return Ok(());
        }
        let owed = std::mem::take(&mut self.owed);
        self.out.push(|heads| push_credit(heads, owed));
        self.out.flush(&mut self.to).await
    }
}

/// The error of a server that shares no memory.
fn unshared(why: &str) -> Error {
    let text = format!("shm: the server shares no memory: {why}; choose another path");
    Error::new(ErrorKind::Unsupported, text)
}

/// The header that comes next, of this request.
pub(super) async fn next_header(
    doing: &str,
    from: &mut Reader,
    request: u32,
    (stall, until): (Duration, Instant),
) -> Result<Header> {
    let late = |_elapsed| timed_out(doing, stall);
    let header = timeout(stall, timeout_at(until, from.header())).await.map_err(late)?;
    let header = header.map_err(late)??;
    let header = header.ok_or_else(|| lost(io::ErrorKind::UnexpectedEof.into()))?;
    if header.request != request && (header.request, header.kind) != (0, Kind::Refused) {
        return Err(broken_contract(doing, "a frame of another request"));
    }
    Ok(header)
}

/// The error that a server has ended a request, or the connection, with.
pub(super) fn refusal(doing: &str, body: Bytes) -> Error {
    let Ok(Refused { code, retry_after_ms, text }) = Refused::read(body) else {
        return broken_contract(doing, "a refusal that cannot be read");
    };
    let code = Code::from_i32(i32::try_from(code).unwrap_or(0));
    let mut status = Status::new(code, text);
    if retry_after_ms > 0 {
        status.metadata_mut().insert(RETRY_AFTER_KEY, retry_after_ms.into());
    }
    error_of(doing, &status)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credit_keeps_a_network_busy_and_a_cache_warm() {
        for (micros, credit) in [
            (0, CREDIT_BYTES_MIN),
            (40, CREDIT_BYTES_MIN),
            (200, 2_500_000),
            (1_000, 12_500_000),
            (50_000, CREDIT_BYTES_MAX),
            (u64::MAX, CREDIT_BYTES_MAX),
        ] {
            assert_eq!(credit_of(Duration::from_micros(micros)), credit, "{micros} us");
        }
    }
}
