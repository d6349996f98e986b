//! ZeroMQ's wire protocol, as much as a subscriber needs: ZMTP 3.0 over TCP without security.
//!
//! ```text
//! FF 00*8 7F  03 00  "NULL" 00*16  00  00*31          greeting, 64 bytes, from both sides
//! 04 len  05 "READY"  (name len, name, value len u32, value)*      from both sides
//! flags len body ...                                   flags: 1 more, 2 length of 8 bytes, 4 command
//! ```
//! A peer of a newer version takes us for what we say we are. Frames have a limit that is looked at
//! before their bytes are waited for, messages a number of frames; memory grows as bytes come.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    time::timeout,
};

use crate::{
    keep_alive::keep_alive,
    limits::{EVENT_FRAME_BYTES_MAX, EVENT_HANDSHAKE_DEADLINE},
};

/// Frames of one message: a subscriber's have three, a replay's four.
const FRAMES_MAX: usize = 8;
/// A frame is given memory in steps of this.
const STEP_BYTES: usize = 64 * 1024;
const GREETING_BYTES: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A connection to somebody who publishes or replays.
#[derive(Debug)]
pub(super) struct Connection {
    io: BufReader<TcpStream>,
}

/// What a connection is for, as its peer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It listens to a publisher.
    Subscriber,
    /// It asks and is answered.
    Dealer,
}

impl Connection {
    /// Connects to `host:port` and agrees on who is who.
    ///
    /// # Errors
    /// As the system's; `TimedOut`, and `InvalidData` with what is wrong.
    pub(super) async fn open(address: &str, kind: Kind) -> io::Result<Self> {
        let opening = async {
            let io = TcpStream::connect(address).await?;
            io.set_nodelay(true)?;
            keep_alive(&io)?;
            let mut connection = Self { io: BufReader::new(io) };
            connection.greet(kind).await?;
            Ok(connection)
        };
        within(EVENT_HANDSHAKE_DEADLINE, opening).await
    }

    async fn greet(&mut self, kind: Kind) -> io::Result<()> {
        self.io.write_all(&greeting()).await?;
        let mut theirs = [0; GREETING_BYTES];
        self.io.read_exact(&mut theirs).await?;
        let is_zmtp = theirs.first() == Some(&0xff) && theirs.get(9) == Some(&0x7f);
        if !is_zmtp || theirs.get(10).is_none_or(|major| *major < 3) {
            return Err(broken("the peer does not speak ZMTP 3"));
        }
        if theirs.get(12..32) != greeting().get(12..32) {
            return Err(broken("the peer asks for security that is not spoken here"));
        }
        self.io.write_all(&ready(kind)).await?;
        let (flags, body) = self.frame().await?;
        if flags & COMMAND == 0 || !body.starts_with(b"\x05READY") {
            return Err(broken("the peer does not want this connection"));
        }
        Ok(())
    }

    /// Sends a message.
    pub(super) async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for (number, frame) in (1..).zip(frames) {
            let more = if number < frames.len() { MORE } else { 0 };
            push(&mut bytes, more, frame);
        }
        within(EVENT_HANDSHAKE_DEADLINE, self.io.write_all(&bytes)).await
    }

    /// Subscribes to all topics.
    pub(super) async fn subscribe(&mut self) -> io::Result<()> {
        self.send(&[&[1]]).await
    }

    /// The next message.
    ///
    /// # Cancel safety
    /// Not safe: what has come of a message is lost.
    pub(super) async fn receive(&mut self) -> io::Result<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = self.frame().await?;
            if flags & COMMAND != 0 {
                self.obey(&body).await?;
                continue;
            }
            if frames.len() >= FRAMES_MAX {
                return Err(broken("a message of too many frames"));
            }
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(frames);
            }
        }
    }

    /// Answers a peer that asks whether we live; other commands mean nothing here.
    async fn obey(&mut self, command: &[u8]) -> io::Result<()> {
        // Behind the name there are two bytes of time, and what is to be sent back.
        if let Some(context) = command.strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..)) {
            let mut pong = Vec::new();
            push(&mut pong, COMMAND, &[b"\x04PONG", context].concat());
            within(EVENT_HANDSHAKE_DEADLINE, self.io.write_all(&pong)).await?;
        }
        Ok(())
    }

    async fn frame(&mut self) -> io::Result<(u8, Vec<u8>)> {
        let flags = self.io.read_u8().await?;
        let bytes = if flags & LONG == 0 {
            u64::from(self.io.read_u8().await?)
        } else {
            self.io.read_u64().await?
        };
        if flags & !(MORE | LONG | COMMAND) != 0 || bytes > EVENT_FRAME_BYTES_MAX {
            return Err(broken("a frame that is too long, or none"));
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut body = Vec::with_capacity(bytes.min(STEP_BYTES));
        while body.len() < bytes {
            let start = body.len();
            body.resize(start + (bytes - start).min(STEP_BYTES), 0);
            self.io.read_exact(body.get_mut(start..).unwrap_or_default()).await?;
        }
        Ok((flags, body))
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn push(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(short) => bytes.extend([flags, short]),
        Err(_long) => {
            bytes.push(flags | LONG);
            bytes.extend(u64::try_from(body.len()).unwrap_or(u64::MAX).to_be_bytes());
        }
    }
    bytes.extend_from_slice(body);
}

fn greeting() -> Vec<u8> {
    let mut greeting = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".to_vec();
    greeting.resize(GREETING_BYTES, 0);
    greeting
}

fn ready(kind: Kind) -> Vec<u8> {
    let value: &[u8] = match kind {
        Kind::Subscriber => b"SUB",
        Kind::Dealer => b"DEALER",
    };
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend(u32::try_from(value.len()).unwrap_or(0).to_be_bytes());
    body.extend(value);
    let mut frame = Vec::new();
    push(&mut frame, COMMAND, &body);
    frame
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    /// A publisher that says these bytes behind the greeting; returns what it has heard.
    async fn publisher(says: Vec<u8>) -> (String, tokio::task::JoinHandle<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        #[expect(clippy::disallowed_methods, reason = "a test without a server has no tasks")]
        let heard = tokio::spawn(async move {
            let (mut io, _) = listener.accept().await.unwrap();
            io.write_all(&greeting()).await.unwrap();
            io.write_all(&says).await.unwrap();
            let mut heard = vec![0; 64];
            io.read_exact(&mut heard).await.unwrap();
            let mut rest = Vec::new();
            drop(io.read_to_end(&mut rest).await);
            rest
        });
        (address, heard)
    }

    #[tokio::test]
    async fn messages_come_in_their_frames_and_pings_are_answered() {
        let mut says = ready(Kind::Subscriber);
        push(&mut says, COMMAND, b"\x04PING\0\x0acontext");
        push(&mut says, MORE, b"topic");
        push(&mut says, MORE, &[0; 8]);
        push(&mut says, COMMAND, b"\x07UNKNOWN");
        push(&mut says, 0, &[7; 70_000]);
        push(&mut says, 0, b"");
        let (address, heard) = publisher(says).await;
        let mut connection = Connection::open(&address, Kind::Subscriber).await.unwrap();
        connection.subscribe().await.unwrap();
        let message = connection.receive().await.unwrap();
        assert_eq!(message, [b"topic".to_vec(), vec![0; 8], vec![7; 70_000]]);
        assert_eq!(connection.receive().await.unwrap(), [Vec::<u8>::new()]);
        drop(connection);
        let mut expected = ready(Kind::Subscriber);
        push(&mut expected, 0, &[1]);
        push(&mut expected, COMMAND, b"\x04PONGcontext");
        assert_eq!(heard.await.unwrap(), expected);
    }

    #[tokio::test]
    async fn what_is_no_publisher_is_refused() {
        let refused = async |says: &[u8]| {
            let (address, heard) = publisher(says.to_vec()).await;
            let error = match Connection::open(&address, Kind::Dealer).await {
                Ok(mut open) => open.receive().await.unwrap_err(),
                Err(error) => error,
            };
            drop(heard);
            error.kind()
        };
        let mut long = ready(Kind::Dealer);
        long.extend([LONG, 255, 255, 255, 255, 255, 255, 255, 255]);
        let many = [ready(Kind::Dealer), [MORE, 0].repeat(FRAMES_MAX + 1)].concat();
        for says in [&b"\x04\x05\x05ERROR"[..], b"\0\x01x", &long, &many, b"\xf0\0"] {
            assert_eq!(refused(says).await, io::ErrorKind::InvalidData, "{says:x?}");
        }
    }
}
