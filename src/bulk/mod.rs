//! The bulk port: blocks at line rate beside gRPC, over TCP or a Unix socket.
//!
//! ```text
//! client                                server
//! Hello version, token, session, credit ->
//!                                 <-  Welcome version, limits, instance
//! Get hashes                      ->
//!                                 <-  Block place + payload | Miss range | ... | End
//! Credit bytes                    ->      no more payload is sent than there is credit for
//! Offer hashes, checksums         ->
//!                                 <-  Want ranges, Results
//! Data place + payload | ...      ->
//! Finish                          ->
//!                                 <-  Results | ... | End
//! Cancel                          ->
//!                                 <-  Refused code, text     instead of End
//! ```
//! The same flows as behind gRPC ([`crate::flow`]), in frames of our own ([`frame`], [`body`]):
//! payload goes to the socket from the arena ([`output`]) and from the socket into the arena
//! ([`input`]); what it is checked by travels in front of it.
//!
//! - A connection is one task. Its reader takes requests, its writer answers gets in turn, and the
//!   short answers of puts in between. Requests under way are bounded, and so are the bytes of what all
//!   connections ask.
//! - A frame that is not one ends its connection, which is told why; a request that cannot be served
//!   ends alone.
//! - Nobody waits for a peer for ever: not for its hello, not for the rest of a frame, not for it to
//!   read one, not for its credit, not for its next request.
//! - A connection names its session in its hello. The end of either ends the puts of both.
//!
//! Clients on this host may share memory instead of sending payload ([`crate::shm`], [`shared`]).
//!
//! Namespaces, sessions, leases and lookups stay with gRPC: they are small. Why not HTTP/2 here, too:
//! its windows and frames cost a copy and a third of the throughput (benches/README.md).

pub(crate) mod body;
mod connection;
pub(crate) mod frame;
#[cfg(test)]
mod fuzz_tests;
mod get;
mod hello;
pub(crate) mod input;
mod lane;
mod listen;
pub(crate) mod output;
mod put;
mod shared;
pub(crate) mod shared_body;
mod writer;

use std::sync::Arc;

use kvstrata_tiers::error::Error;
pub(crate) use listen::{Listener, SocketFile, listen_unix, serve, widen};
use tokio::sync::Semaphore;

use crate::{
    api::{Calls, status},
    auth::Gate,
    flow::millis,
    node::Node,
    shm::Arena,
};

/// What all connections work on.
#[derive(Debug)]
pub(crate) struct Bulk {
    pub(crate) node: Arc<Node>,
    pub(crate) calls: Calls,
    pub(crate) gate: Gate,
    /// What the member list says of this server.
    pub(crate) instance: [u8; body::ID_BYTES],
    /// Room for what is asked in large requests, in KiB.
    pub(crate) room: Arc<Semaphore>,
    /// What is shown to clients on this host; none if nothing is.
    pub(crate) arena: Option<Arc<Arena>>,
}

/// What a client is told of an error.
fn refused(error: &Error) -> body::Refused {
    let status = status::from_error(error);
    body::Refused {
        code: u32::try_from(i32::from(status.code())).unwrap_or(0),
        retry_after_ms: error.retry_after().map_or(0, millis),
        text: status.message().to_owned(),
    }
}

/// What a client is told that speaks no TLS where it should.
pub(crate) fn plain_answer() -> Vec<u8> {
    let mut answer = Vec::new();
    refused(&Error::invalid("this port speaks TLS, and the client does not")).push(&mut answer, 0);
    answer
}

#[cfg(test)]
mod tests;
