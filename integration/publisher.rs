//! A publisher of events as engines have them, for one subscriber at a time, and its replays.

use std::sync::{Arc, Mutex};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};

const MORE: u8 = 1;
const COMMAND: u8 = 4;

/// Somebody who speaks ZeroMQ to those who connect.
pub(crate) struct Publisher {
    pub(crate) listener: TcpListener,
}

/// One who has connected.
pub(crate) struct Peer {
    io: TcpStream,
}

impl Publisher {
    pub(crate) async fn bind() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    pub(crate) fn address(&self) -> String {
        format!("tcp://{}", self.listener.local_addr().unwrap())
    }

    pub(crate) async fn accept(&self) -> Peer {
        let (io, _) = self.listener.accept().await.unwrap();
        let mut peer = Peer { io };
        let mut greeting = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL".to_vec();
        greeting.resize(64, 0);
        peer.io.write_all(&greeting).await.unwrap();
        peer.io.read_exact(&mut greeting).await.unwrap();
        assert_eq!(&greeting[10..16], b"\x03\0NULL");
        let (flags, ready) = peer.frame().await;
        assert!(flags & COMMAND != 0 && ready.starts_with(b"\x05READY\x0bSocket-Type"));
        peer.write(COMMAND, b"\x05READY\x0bSocket-Type\0\0\0\x03PUB").await;
        peer
    }

    /// One who listens, once it has said so.
    pub(crate) async fn subscriber(&self) -> Peer {
        let mut peer = self.accept().await;
        assert_eq!(peer.frame().await, (0, vec![1]));
        peer
    }
}

impl Peer {
    pub(crate) async fn frame(&mut self) -> (u8, Vec<u8>) {
        let flags = self.io.read_u8().await.unwrap();
        let bytes = if flags & 2 == 0 {
            u64::from(self.io.read_u8().await.unwrap())
        } else {
            self.io.read_u64().await.unwrap()
        };
        let mut body = vec![0; usize::try_from(bytes).unwrap()];
        self.io.read_exact(&mut body).await.unwrap();
        (flags, body)
    }

    pub(crate) async fn write(&mut self, flags: u8, body: &[u8]) {
        let mut bytes = match u8::try_from(body.len()) {
            Ok(short) => vec![flags, short],
            Err(_) => [&[flags | 2], &(body.len() as u64).to_be_bytes()[..]].concat(),
        };
        bytes.extend(body);
        self.io.write_all(&bytes).await.unwrap();
    }

    pub(crate) async fn publish(&mut self, number: u64, payload: &[u8]) {
        self.write(MORE, b"kv-events").await;
        self.write(MORE, &number.to_be_bytes()).await;
        self.write(0, payload).await;
    }
}

/// Batches that are sent again to whoever asks, by their numbers.
pub(crate) type Kept = Arc<Mutex<Vec<(u64, Vec<u8>)>>>;

pub(crate) fn replayer(publisher: Publisher, kept: Kept) -> JoinSet<()> {
    let mut replaying = JoinSet::new();
    replaying.spawn(async move {
        loop {
            let mut peer = publisher.accept().await;
            assert_eq!(peer.frame().await, (MORE, Vec::new()));
            let (_, from) = peer.frame().await;
            let from = u64::from_be_bytes(from.try_into().unwrap());
            let batches = kept.lock().unwrap().clone();
            for (number, payload) in batches.into_iter().filter(|(number, _)| *number >= from) {
                peer.write(MORE, b"").await;
                peer.publish(number, &payload).await;
            }
            peer.write(MORE, b"").await;
            peer.publish(u64::MAX, b"").await;
        }
    });
    replaying
}
