//! A way to a node that takes its time: each byte arrives so much later, in order, in both directions.

use std::{collections::VecDeque, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// Bytes that are read at a time.
const PIECE_BYTES: usize = 256 * 1024;
/// Pieces that are under way at a time.
const PIECES_MAX: usize = 64;

/// The way to some ports of a node; closed when dropped.
#[derive(Debug)]
pub(crate) struct SlowPath {
    _listeners: JoinSet<()>,
}

impl SlowPath {
    /// Takes what comes to `here` on each of the ports to the same port of `there`, `delay` later each way.
    pub(crate) async fn open(here: &str, there: &str, ports: &[u16], delay: Duration) -> Self {
        let mut listeners = JoinSet::new();
        for port in ports {
            let listener = TcpListener::bind(format!("{here}:{port}")).await.unwrap();
            let target = format!("{there}:{port}");
            listeners.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((near, _)) = listener.accept().await {
                    connections.spawn(connection(near, target.clone(), delay));
                }
            });
        }
        Self { _listeners: listeners }
    }
}

async fn connection(near: TcpStream, target: String, delay: Duration) {
    let Ok(far) = TcpStream::connect(target).await else { return };
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    tokio::join!(carry(near_read, far_write, delay), carry(far_read, near_write, delay));
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) {
    let mut under_way: VecDeque<(Instant, Vec<u8>)> = VecDeque::new();
    let mut piece = vec![0; PIECE_BYTES];
    let mut open = true;
    while open || !under_way.is_empty() {
        let due = under_way.front().map(|(due, _)| *due);
        tokio::select! {
            read = from.read(&mut piece), if open && under_way.len() < PIECES_MAX => match read {
                Ok(0) | Err(_) => open = false,
                Ok(bytes) => under_way.push_back((Instant::now() + delay, piece[..bytes].to_vec())),
            },
            () = async { sleep_until(due.unwrap_or_else(Instant::now)).await }, if due.is_some() => {
                let Some((_, bytes)) = under_way.pop_front() else { return };
                if to.write_all(&bytes).await.is_err() {
                    return;
                }
            }
        }
    }
}
