//! The bulk port from the client's side: the same gets and puts, in frames of our own.
//!
//! A get or put has a connection to itself while it runs; then it is kept for the next one. Where a
//! server has no bulk port, or none that can be reached, blocks go over gRPC, and the port is left alone
//! for a while. What is left in the middle is not used again: its connection is closed, which ends it
//! at the server.

mod connection;
mod get;
mod put;
mod shared;

use std::time::Duration;

use bytes::Bytes;
use connection::{Connection, Dial};
pub(super) use get::get;
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
pub(super) use put::{Batch, put};
use tokio::time::{Instant, timeout};

use self::shared::Known;
use super::{BulkPort, Client, Path, breaker::Breaker, connect::timed_out, server::Server};
use crate::limits::BULK_IDLE_MAX;

/// Connections that are kept for the next get or put.
const IDLE_MAX: usize = 16;
/// How long a connection is kept: shorter than the server does, so that it is not closed under a
/// request.
const KEPT: Duration = Duration::from_secs(BULK_IDLE_MAX.as_secs() / 2);
const DIAL: &str = "connect to the bulk port";
/// Longest time to connect while there is another way.
const DIAL_DEADLINE: Duration = Duration::from_secs(1);

/// The connections to the bulk port of one server that nobody uses.
#[derive(Default)]
pub(super) struct Pool {
    idle: Mutex<Vec<Idle>>,
    /// The memory of its server.
    known: Known,
    /// Whether the port can be reached, while there is another way.
    breaker: Breaker,
}

struct Idle {
    connection: Connection,
    since: Instant,
}

impl Pool {
    /// A connection of this session to this server that is still well.
    fn take(&self, session: &Bytes, port: &BulkPort) -> Option<Connection> {
        let mut idle = self.idle.lock();
        idle.retain_mut(|idle| {
            idle.since.elapsed() < KEPT
                && idle.connection.instance() == &port.instance
                && idle.connection.is_well()
        });
        let at = idle.iter().rposition(|idle| idle.connection.session() == session)?;
        Some(idle.swap_remove(at).connection)
    }

    fn give_back(&self, connection: Connection) {
        let mut idle = self.idle.lock();
        if idle.len() >= IDLE_MAX {
            idle.swap_remove(0);
        }
        idle.push(Idle { connection, since: Instant::now() });
    }
}

impl Client {
    /// A connection to the bulk port, in the name of a session if one is given; none if blocks are to
    /// go over gRPC.
    pub(super) async fn bulk(&self, session: &Bytes) -> Result<Option<Connection>> {
        let path = self.options().path;
        if path == Path::Grpc {
            return Ok(None);
        }
        let must = matches!(path, Path::Bulk | Path::Shm);
        let server = self.server();
        let Some(port) = server.members().bulk().cloned() else {
            let text = "bulk: the server has no bulk port; choose another path";
            return if must { Err(Error::new(ErrorKind::Unsupported, text)) } else { Ok(None) };
        };
        let pool = &server.bulk;
        if let Some(connection) = pool.take(session, &port) {
            return Ok(Some(connection));
        }
        if must {
            let deadline = self.options().connect_deadline;
            return server.dial_bulk(&port, session, (path, deadline)).await.map(Some);
        }
        if pool.breaker.admit(DIAL).is_err() {
            return Ok(None);
        }
        let deadline = self.options().connect_deadline.min(DIAL_DEADLINE);
        match pool.breaker.note(server.dial_bulk(&port, session, (path, deadline)).await) {
            Ok(connection) => Ok(Some(connection)),
            Err(error) => {
                tracing::info!(%error, "bulk port not reached, blocks go over gRPC");
                Ok(None)
            }
        }
    }

    /// Keeps a connection whose request is answered for the next one.
    pub(super) fn keep_bulk(&self, connection: Connection) {
        self.server().bulk.give_back(connection);
    }
}

impl Server {
    async fn dial_bulk(
        &self,
        port: &BulkPort,
        session: &Bytes,
        (path, deadline): (Path, Duration),
    ) -> Result<Connection> {
        let Self { access, bulk, .. } = self;
        let dial = Dial { port, session, access, path, known: &bulk.known };
        match timeout(deadline, Connection::dial(dial)).await {
            Ok(dialled) => dialled,
            Err(_elapsed) => Err(timed_out(DIAL, deadline)),
        }
    }
}
