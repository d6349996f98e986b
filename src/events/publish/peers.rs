//! Those who listen to one publisher: each has a queue of its own, and a task that writes it.
//!
//! A queue has a limit. Whoever publishes looks at the fullest one before it makes more
//! ([`Peers::backlog`]); a peer that takes nothing for a while, or whose queue is full all the same, loses its
//! connection, and with the next one everything is said again: nothing is dropped that a peer would not notice.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::{io::AsyncWriteExt, net::tcp::OwnedWriteHalf, sync::Notify, time::timeout};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::{
    events::zmtp::{Connection, Heard, Receiver, pong},
    limits::{
        PUBLISH_PEERS_MAX, PUBLISH_PREFIX_BYTES_MAX, PUBLISH_PREFIXES_MAX, PUBLISH_QUEUE_BYTES_MAX,
        PUBLISH_WRITE_DEADLINE,
    },
};

/// Those who listen to one publisher; clones share them.
#[derive(Debug, Clone)]
pub(super) struct Peers {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    topic: Box<[u8]>,
    peers: Mutex<Vec<Arc<Peer>>>,
    /// Somebody has begun to listen.
    arrived: AtomicBool,
    /// Somebody has missed batches that are not kept any more.
    missed: AtomicBool,
    /// Somebody was cut off because it was too slow.
    cut: AtomicBool,
    /// Those who are gone and have not come back.
    away: AtomicUsize,
    wake: Arc<Notify>,
}

#[derive(Debug, Default)]
struct Peer {
    queue: Mutex<Queue>,
    filled: Notify,
    gone: CancellationToken,
}

#[derive(Debug, Default)]
struct Queue {
    messages: VecDeque<Arc<[u8]>>,
    bytes: usize,
    listens: bool,
}

impl Peer {
    /// Whether there was room for it.
    fn push(&self, message: Arc<[u8]>) -> bool {
        let mut queue = self.queue.lock();
        queue.bytes += message.len();
        queue.messages.push_back(message);
        let fits = queue.bytes <= PUBLISH_QUEUE_BYTES_MAX;
        drop(queue);
        self.filled.notify_one();
        fits
    }

    fn pop(&self) -> Option<Arc<[u8]>> {
        let mut queue = self.queue.lock();
        let message = queue.messages.pop_front()?;
        queue.bytes = queue.bytes.saturating_sub(message.len());
        Some(message)
    }
}

impl Peers {
    /// Nobody yet. `wake` is told when there is something to be looked at.
    pub(super) fn new(topic: &str, wake: Arc<Notify>) -> Self {
        let shared = Shared {
            topic: topic.as_bytes().into(),
            peers: Mutex::default(),
            arrived: AtomicBool::new(false),
            missed: AtomicBool::new(false),
            cut: AtomicBool::new(false),
            away: AtomicUsize::new(0),
            wake,
        };
        Self { shared: Arc::new(shared) }
    }

    /// What all messages begin with.
    pub(super) fn topic(&self) -> &[u8] {
        &self.shared.topic
    }

    /// How many listen.
    pub(super) fn listening(&self) -> usize {
        self.shared.peers.lock().iter().filter(|peer| peer.queue.lock().listens).count()
    }

    /// Whether somebody has begun to listen since the last call.
    pub(super) fn take_arrived(&self) -> bool {
        self.shared.arrived.swap(false, Ordering::AcqRel)
    }

    /// Somebody has missed batches that are not kept any more.
    pub(super) fn has_missed(&self) {
        self.shared.missed.store(true, Ordering::Release);
        self.shared.wake.notify_one();
    }

    /// Whether somebody has, since the last call.
    pub(super) fn take_missed(&self) -> bool {
        self.shared.missed.swap(false, Ordering::AcqRel)
    }

    /// Whether nobody is gone who may come back, and has missed what was said last.
    pub(super) fn are_all_here(&self) -> bool {
        // Who comes back has arrived before it counts as here.
        self.shared.away.load(Ordering::Acquire) == 0
            && !self.shared.arrived.load(Ordering::Acquire)
    }

    /// Whether somebody was cut off since the last call.
    pub(super) fn take_cut(&self) -> bool {
        self.shared.cut.swap(false, Ordering::AcqRel)
    }

    /// Bytes that wait for the slowest.
    pub(super) fn backlog(&self) -> usize {
        let peers = self.shared.peers.lock();
        peers.iter().map(|peer| peer.queue.lock().bytes).max().unwrap_or(0)
    }

    /// Gives a message to all who listen.
    pub(super) fn publish(&self, message: &Arc<[u8]>) {
        for peer in self.shared.peers.lock().iter() {
            if peer.queue.lock().listens && !peer.push(Arc::clone(message)) {
                info!("a listener to events is cut off: it is too far behind");
                self.shared.cut.store(true, Ordering::Release);
                peer.gone.cancel();
            }
        }
    }

    /// Serves a connection until it ends.
    ///
    /// # Cancel safety
    /// Safe: the connection is closed.
    pub(super) async fn serve(&self, connection: Connection) {
        let peer = Arc::new(Peer::default());
        {
            let mut peers = self.shared.peers.lock();
            if peers.len() >= PUBLISH_PEERS_MAX {
                debug!("a listener to events is turned away: there are {PUBLISH_PEERS_MAX}");
                return;
            }
            peers.push(Arc::clone(&peer));
        }
        let leaving = Leaving { shared: &self.shared, peer: &peer };
        let (receiver, sender) = connection.split();
        tokio::select! {
            () = self.listen(receiver, &peer) => {}
            () = self.write(sender, &peer) => {}
            () = peer.gone.cancelled() => {}
        }
        drop(leaving);
    }

    /// What a peer says: which topics it wants.
    async fn listen(&self, mut receiver: Receiver, peer: &Peer) {
        let mut prefixes: Vec<Vec<u8>> = Vec::new();
        while let Ok(heard) = receiver.hear().await {
            match heard {
                Heard::Ping(context) => _ = peer.push(pong(&context).into()),
                Heard::Message(frames) => {
                    let [frame] = frames.as_slice() else { return };
                    match frame.split_first() {
                        Some((1, prefix))
                            if prefixes.len() < PUBLISH_PREFIXES_MAX
                                && prefix.len() <= PUBLISH_PREFIX_BYTES_MAX =>
                        {
                            prefixes.push(prefix.to_vec());
                        }
                        Some((0, prefix)) => {
                            if let Some(known) = prefixes.iter().position(|known| known == prefix) {
                                prefixes.swap_remove(known);
                            }
                        }
                        _ => return,
                    }
                    self.subscribe(
                        peer,
                        prefixes.iter().any(|prefix| self.topic().starts_with(prefix)),
                    );
                }
            }
        }
    }

    fn subscribe(&self, peer: &Peer, listens: bool) {
        let listened = std::mem::replace(&mut peer.queue.lock().listens, listens);
        if listens && !listened {
            self.shared.arrived.store(true, Ordering::Release);
            self.shared.comes();
        } else if listened && !listens {
            self.shared.goes();
        }
        self.shared.wake.notify_one();
    }

    async fn write(&self, mut sender: OwnedWriteHalf, peer: &Peer) {
        loop {
            let filled = peer.filled.notified();
            let Some(message) = peer.pop() else {
                filled.await;
                continue;
            };
            match timeout(PUBLISH_WRITE_DEADLINE, sender.write_all(&message)).await {
                Ok(Ok(())) => self.shared.wake.notify_one(),
                Ok(Err(error)) => return debug!(%error, "a listener to events is gone"),
                Err(_elapsed) => {
                    info!("a listener to events is cut off: it takes nothing");
                    return self.shared.cut.store(true, Ordering::Release);
                }
            }
        }
    }
}

impl Shared {
    fn goes(&self) {
        self.away.fetch_add(1, Ordering::AcqRel);
    }

    fn comes(&self) {
        let back = |away: usize| Some(away.saturating_sub(1));
        // It is always some number.
        _ = self.away.fetch_update(Ordering::AcqRel, Ordering::Acquire, back);
    }
}

/// Takes a peer off the list however its connection ends.
struct Leaving<'a> {
    shared: &'a Shared,
    peer: &'a Arc<Peer>,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.shared.peers.lock().retain(|peer| !Arc::ptr_eq(peer, self.peer));
        if self.peer.queue.lock().listens {
            self.shared.goes();
        }
        self.shared.wake.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;
    use crate::events::zmtp::{Kind, message};

    /// Somebody who connects to the peers' publisher, served by a task of the test.
    async fn connect(peers: &Peers) -> Connection {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let accepting = async {
            let (io, _) = listener.accept().await.unwrap();
            Connection::accept(io, Kind::Publisher).await.unwrap()
        };
        let (ours, theirs) = tokio::join!(accepting, Connection::open(&address, Kind::Subscriber));
        let peers = peers.clone();
        #[expect(clippy::disallowed_methods, reason = "a test without a server has no tasks")]
        drop(tokio::spawn(async move { peers.serve(ours).await }));
        theirs.unwrap()
    }

    async fn until(condition: impl Fn() -> bool) {
        while !condition() {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn only_who_wants_the_topic_is_told_and_known_to_have_come() {
        let peers = Peers::new("kv@pod@m", Arc::new(Notify::new()));
        let mut theirs = connect(&peers).await;
        theirs.send(&[b"\x01other"]).await.unwrap();
        let mut ours = connect(&peers).await;
        ours.send(&[b"\x01kv@"]).await.unwrap();
        until(|| peers.listening() == 1).await;
        assert!(peers.take_arrived() && !peers.take_arrived() && peers.are_all_here());
        peers.publish(&message(&[peers.topic(), b"first"]).into());
        assert_eq!(ours.receive().await.unwrap(), [&b"kv@pod@m"[..], b"first"]);
        ours.send(&[b"\0kv@"]).await.unwrap();
        until(|| peers.listening() == 0).await;
        assert!(!peers.are_all_here());
        // Whoever comes again is told everything, too.
        theirs.send(&[b"\x01"]).await.unwrap();
        until(|| peers.listening() == 1).await;
        assert!(peers.take_arrived() && peers.are_all_here());
        peers.publish(&message(&[peers.topic(), b"second"]).into());
        assert_eq!(theirs.receive().await.unwrap()[1], b"second");
        drop((ours, theirs));
        until(|| peers.shared.peers.lock().is_empty() && !peers.are_all_here()).await;
    }

    #[tokio::test]
    async fn whose_queue_is_full_is_cut_off_and_nobody_else() {
        let peers = Peers::new("", Arc::new(Notify::new()));
        let (mut still, mut moving) = (connect(&peers).await, connect(&peers).await);
        for peer in [&mut still, &mut moving] {
            peer.subscribe().await.unwrap();
        }
        until(|| peers.listening() == 2).await;
        let large: Arc<[u8]> = message(&[b"", &[7; 1 << 20]]).into();
        let mut told = 0;
        while !peers.take_cut() {
            assert!(told < 64, "64 MiB wait for somebody");
            peers.publish(&large);
            moving.receive().await.unwrap();
            told += 1;
        }
        assert!(told > PUBLISH_QUEUE_BYTES_MAX >> 20, "{told}");
        until(|| peers.listening() == 1).await;
        peers.publish(&large);
        moving.receive().await.unwrap();
        assert!(peers.backlog() < 1 << 20);
        let ended = async { while still.receive().await.is_ok() {} };
        ended.await;
    }
}
