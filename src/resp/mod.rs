//! The RESP listener: the protocol of Redis, for engines that know no other. Off by default.
//!
//! ```text
//! HELLO, AUTH, PING, ECHO, SELECT, CLIENT, INFO, COMMAND, CLUSTER, DBSIZE, QUIT
//! SET [EX | PX | NX ...]          the value goes from the socket to where it stays
//! GET, MGET                       values go to the socket from where they lie, verified
//! EXISTS, DEL, UNLINK, STRLEN, TTL
//! ```
//! A key has one value, in an opaque namespace ([`key`], [`space`]), and the flows are those of every
//! other path ([`crate::flow`]): what is stored is named by the hash of its key, has a checksum from
//! where its bytes came in, and is found by a lookup as anything else.
//!
//! What differs from Redis, because this is a cache of bytes that are the same whoever makes them:
//! - The first value of a key stays until it is evicted or deleted; a later SET of it is answered with
//!   OK and changes nothing. Expiry is taken note of by nobody: what is not used leaves.
//! - A value may go at any time. One that cannot be stored is answered with OK all the same, dropped
//!   and counted: some clients cannot read an error at that place, and would take the next answer for
//!   another one. For the same reason SET, GET, MGET, EXISTS and DEL never get an error line; when there
//!   is nothing else to say, the connection ends.
//! - LMCache stores two values for a chunk, its bytes and then what they look like. They are one: each is
//!   nil without the other, and when one is stored anew what is left of the other goes first.
//!
//! A connection is one task, which reads a command, answers it, and reads the next; answers are written
//! when there are no more commands to read. Nobody is waited for for ever but a peer that is silent
//! between two commands, which is what a pool of connections does: the kernel asks whether it lives.

mod connection;
#[cfg(test)]
mod fuzz_tests;
mod get;
mod handshake;
mod input;
mod key;
mod listen;
mod pairs;
mod reply;
mod set;
mod space;

use std::sync::{Arc, atomic::AtomicU64};

pub(crate) use listen::{Listener, start};

use crate::{api::Calls, auth::Gate, node::Node};

/// What all connections work on.
#[derive(Debug)]
struct Resp {
    node: Arc<Node>,
    calls: Calls,
    gate: Gate,
    spaces: space::Spaces,
    pairs: pairs::Pairs,
    /// Connections since the start, which numbers them.
    connections: AtomicU64,
    /// Whether a client says something at once: it has a token to show, or begins with TLS.
    prompt: bool,
}

/// What a client is told that speaks no TLS where it should.
pub(crate) fn plain_answer() -> Vec<u8> {
    b"-ERR this port speaks TLS, and the client does not\r\n".to_vec()
}

#[cfg(test)]
mod tests;
