//! ZeroMQ's wire protocol, as much as events take: ZMTP 3.0 over TCP without security.
//!
//! ```text
//! FF 00*8 7F  03 00  "NULL" 00*16  00  00*31          greeting, 64 bytes, from both sides
//! 04 len  05 "READY"  (name len, name, value len u32, value)*      from both sides
//! flags len body ...                                   flags: 1 more, 2 length of 8 bytes, 4 command
//! 00 len  01 prefix                                    a subscriber wants topics that begin so; 00: no more
//! ```
//! A peer of a newer version takes us for what we say we are. Frames have a limit that is looked at
//! before their bytes are waited for, messages a number of frames; memory grows as bytes come. Who
//! listens and who connects is not decided here: a publisher may do either ([`Connection::open`],
//! [`Connection::accept`]). Queues are not made here: whoever publishes has them, and sees when one is full.

mod connection;
mod frame;

pub(super) use connection::{Connection, Heard, Kind, Receiver};
pub(super) use frame::{message, pong};
