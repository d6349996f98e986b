//! One connection: who is who, and the messages that come.

use std::{io, time::Duration};

use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufReader},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::timeout,
};

use super::frame::{
    COMMAND, GREETING_BYTES, MORE, broken, greeting, message, pong, read, ready, socket_type,
};
use crate::{
    keep_alive::keep_alive,
    limits::{EVENT_HANDSHAKE_DEADLINE, PUBLISH_SILENCE_MAX},
};

/// Frames of one message: a subscriber's have three, a replay's four.
const FRAMES_MAX: usize = 8;

/// A connection between two who know who the other is.
#[derive(Debug)]
pub(in crate::events) struct Connection {
    receiver: Receiver,
    sender: OwnedWriteHalf,
}

/// The half of it that listens.
#[derive(Debug)]
pub(in crate::events) struct Receiver {
    io: BufReader<OwnedReadHalf>,
}

/// What a peer has said.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::events) enum Heard {
    /// The frames of a message.
    Message(Vec<Vec<u8>>),
    /// It asks whether we live, and wants this back ([`pong`]).
    Ping(Vec<u8>),
}

/// What a connection is for, as its peer is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::events) enum Kind {
    /// It listens to a publisher.
    Subscriber,
    /// It asks and is answered.
    Dealer,
    /// It publishes.
    Publisher,
    /// It answers many who ask.
    Router,
}

impl Kind {
    pub(super) fn name(self) -> &'static [u8] {
        match self {
            Self::Subscriber => b"SUB",
            Self::Dealer => b"DEALER",
            Self::Publisher => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    /// Whether a peer of this kind is one to talk to. Those that we connect to, to listen, were named by
    /// somebody who should know.
    fn talks_to(self, peer: &[u8]) -> bool {
        match self {
            Self::Subscriber | Self::Dealer => true,
            Self::Publisher => matches!(peer, b"SUB" | b"XSUB"),
            Self::Router => matches!(peer, b"DEALER" | b"REQ" | b"ROUTER"),
        }
    }
}

impl Connection {
    /// Connects to `host:port` and agrees on who is who.
    ///
    /// # Errors
    /// As the system's; `TimedOut`, and `InvalidData` with what is wrong.
    pub(in crate::events) async fn open(address: &str, kind: Kind) -> io::Result<Self> {
        let opening = async { Self::greet(TcpStream::connect(address).await?, kind).await };
        within(EVENT_HANDSHAKE_DEADLINE, opening).await
    }

    /// Agrees with somebody who has connected on who is who.
    ///
    /// # Errors
    /// As those of [`open`](Self::open).
    pub(in crate::events) async fn accept(io: TcpStream, kind: Kind) -> io::Result<Self> {
        within(EVENT_HANDSHAKE_DEADLINE, Self::greet(io, kind)).await
    }

    async fn greet(io: TcpStream, kind: Kind) -> io::Result<Self> {
        io.set_nodelay(true)?;
        keep_alive(&io)?;
        if kind == Kind::Publisher {
            let millis = u32::try_from(PUBLISH_SILENCE_MAX.as_millis()).unwrap_or(u32::MAX);
            set_tcp_user_timeout(&io, millis)?;
        }
        let (receiver, mut sender) = io.into_split();
        let mut io = BufReader::new(receiver);
        sender.write_all(&greeting()).await?;
        let mut theirs = [0; GREETING_BYTES];
        io.read_exact(&mut theirs).await?;
        let is_zmtp = theirs.first() == Some(&0xff) && theirs.get(9) == Some(&0x7f);
        if !is_zmtp || theirs.get(10).is_none_or(|major| *major < 3) {
            return Err(broken("the peer does not speak ZMTP 3"));
        }
        if theirs.get(12..32) != greeting().get(12..32) {
            return Err(broken("the peer asks for security that is not spoken here"));
        }
        sender.write_all(&ready(kind)).await?;
        let (flags, body) = read(&mut io).await?;
        if flags & COMMAND == 0 || !body.starts_with(b"\x05READY") {
            return Err(broken("the peer does not want this connection"));
        }
        if !kind.talks_to(socket_type(&body).unwrap_or_default()) {
            return Err(broken("the peer has a socket of another kind"));
        }
        Ok(Self { receiver: Receiver { io }, sender })
    }

    /// Both halves.
    pub(in crate::events) fn split(self) -> (Receiver, OwnedWriteHalf) {
        (self.receiver, self.sender)
    }

    /// Sends a message.
    pub(in crate::events) async fn send(&mut self, frames: &[&[u8]]) -> io::Result<()> {
        self.write(&message(frames)).await
    }

    /// Subscribes to all topics.
    pub(in crate::events) async fn subscribe(&mut self) -> io::Result<()> {
        self.send(&[&[1]]).await
    }

    /// The next message; who asks whether we live is answered.
    ///
    /// # Cancel safety
    /// Not safe: what has come of a message is lost.
    pub(in crate::events) async fn receive(&mut self) -> io::Result<Vec<Vec<u8>>> {
        loop {
            match self.receiver.hear().await? {
                Heard::Message(frames) => return Ok(frames),
                Heard::Ping(context) => self.write(&pong(&context)).await?,
            }
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        within(EVENT_HANDSHAKE_DEADLINE, self.sender.write_all(bytes)).await
    }
}

impl Receiver {
    /// The next that the peer says. Commands that mean nothing here are passed over.
    ///
    /// # Cancel safety
    /// Not safe: what has come of a message is lost.
    pub(in crate::events) async fn hear(&mut self) -> io::Result<Heard> {
        let mut frames = Vec::new();
        loop {
            let (flags, body) = read(&mut self.io).await?;
            if flags & COMMAND != 0 {
                // Behind the name there are two bytes of time, and what is to be sent back.
                let ping = body.strip_prefix(b"\x04PING").and_then(|rest| rest.get(2..));
                match ping {
                    Some(context) if frames.is_empty() => return Ok(Heard::Ping(context.to_vec())),
                    Some(_) => return Err(broken("a command within a message")),
                    None => continue,
                }
            }
            if frames.len() >= FRAMES_MAX {
                return Err(broken("a message of too many frames"));
            }
            frames.push(body);
            if flags & MORE == 0 {
                return Ok(Heard::Message(frames));
            }
        }
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(limit, work).await.unwrap_or_else(|_elapsed| Err(io::ErrorKind::TimedOut.into()))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::{
        super::frame::{LONG, push},
        *,
    };

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

    #[tokio::test]
    async fn who_connects_to_a_publisher_listens_and_who_connects_to_a_router_asks() {
        for (kind, peer, welcome) in [
            (Kind::Publisher, Kind::Subscriber, true),
            (Kind::Publisher, Kind::Dealer, false),
            (Kind::Router, Kind::Dealer, true),
            (Kind::Router, Kind::Subscriber, false),
        ] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let accepting = async {
                let (io, _) = listener.accept().await.unwrap();
                Connection::accept(io, kind).await
            };
            let (ours, theirs) = tokio::join!(accepting, Connection::open(&address, peer));
            let mut theirs = theirs.unwrap();
            match ours {
                Ok(ours) if welcome => {
                    let (mut receiver, mut sender) = ours.split();
                    theirs.send(&[b"", b"ask"]).await.unwrap();
                    let heard = receiver.hear().await.unwrap();
                    assert_eq!(heard, Heard::Message(vec![Vec::new(), b"ask".to_vec()]));
                    sender.write_all(&message(&[b"topic", b"answer"])).await.unwrap();
                    assert_eq!(theirs.receive().await.unwrap(), [&b"topic"[..], b"answer"]);
                }
                Err(error) if !welcome => assert_eq!(error.kind(), io::ErrorKind::InvalidData),
                other => panic!("{kind:?} and {peer:?}: {other:?}"),
            }
        }
    }
}
