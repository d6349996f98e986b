//! The datagrams of `chitchat` over UDP, sealed.
//!
//! What is not taken is counted by its reason and dropped: nothing is logged for it, because anybody can send it.
//! A failure to send is no failure of the transport: the other may come back, and gossip says everything again.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use chitchat::{
    ChitchatMessage, Deserializable, Serializable,
    transport::{Socket, Transport},
};
use parking_lot::Mutex;
use tokio::net::UdpSocket;
use tracing::debug;

use super::{
    keys::ClusterKeys,
    seal::{BOOT_BYTES, Refused, Seals, Verdict},
};
use crate::{
    limits::GOSSIP_DATAGRAM_BYTES_MAX,
    metrics::{ClusterMetrics, DatagramOutcome},
};

/// Time before a socket that failed is read again: errors of UDP are of single datagrams and pass.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// The one socket of a node, until chitchat opens it.
pub(crate) struct SealedTransport(Mutex<Option<SealedSocket>>);

/// See the module.
pub(crate) struct SealedSocket {
    socket: UdpSocket,
    at: SocketAddr,
    seals: Seals,
    metrics: ClusterMetrics,
    /// One byte more than is allowed, to see what is too long.
    buffer: Box<[u8]>,
    message: Vec<u8>,
}

impl SealedTransport {
    /// Over a socket that is bound to `at`; `boot` is random.
    pub(crate) fn new(
        (socket, at): (UdpSocket, SocketAddr),
        keys: ClusterKeys,
        boot: [u8; BOOT_BYTES],
        metrics: ClusterMetrics,
    ) -> Self {
        let seals = Seals::new(keys, boot);
        let buffer = vec![0; GOSSIP_DATAGRAM_BYTES_MAX + 1].into_boxed_slice();
        let message = Vec::new();
        Self(Mutex::new(Some(SealedSocket { socket, at, seals, metrics, buffer, message })))
    }
}

#[async_trait::async_trait]
impl Transport for SealedTransport {
    async fn open(&self, _bound_before: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        match self.0.lock().take() {
            Some(socket) => Ok(Box::new(socket)),
            None => Err(anyhow::anyhow!("the socket of gossip is open already")),
        }
    }
}

#[async_trait::async_trait]
impl Socket for SealedSocket {
    /// Seals and sends; what cannot be sent is counted.
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        self.message.clear();
        message.serialize(&mut self.message);
        let sealed = self.seals.seal(to, &self.message);
        let sent = match &sealed {
            Some(datagram) => self.socket.send_to(datagram, self.reached(to)).await,
            None => Err(io::ErrorKind::FileTooLarge.into()),
        };
        self.count_sent(to, sent);
        Ok(())
    }

    /// The next message of a member.
    ///
    /// Cancel safe: what was received is handled before anything is awaited.
    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        loop {
            match self.socket.recv_from(&mut self.buffer).await {
                Ok((length, from)) => {
                    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
                    if let Some(message) = self.take(length, from) {
                        return Ok((from, message));
                    }
                }
                Err(error) => {
                    debug!(%error, "datagram not received");
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }
}

impl SealedSocket {
    /// Opens the datagram in the buffer; what is no message is dealt with here.
    fn take(&mut self, length: usize, from: SocketAddr) -> Option<ChitchatMessage> {
        self.metrics.received_bytes.inc_by(u64::try_from(length).unwrap_or(u64::MAX));
        let datagram = self.buffer.get(..length)?;
        let (outcome, message) = match self.seals.open(from, datagram) {
            Verdict::Message(mut payload) => match ChitchatMessage::deserialize(&mut payload) {
                Ok(message) => (DatagramOutcome::Taken, Some(message)),
                Err(_of_another_version) => (DatagramOutcome::Unread, None),
            },
            Verdict::Answer(hello) => {
                // Not waited for: a hello that is lost is asked for again.
                let sent = self.socket.try_send_to(&hello, self.reached(from));
                self.count_sent(from, sent);
                (DatagramOutcome::Answered, None)
            }
            Verdict::Learned => (DatagramOutcome::Learned, None),
            Verdict::Refused(why) => (why.into(), None),
        };
        self.metrics.record_datagram(outcome);
        message
    }

    /// An address as this socket can reach it.
    fn reached(&self, to: SocketAddr) -> SocketAddr {
        match (self.at.ip(), to.ip()) {
            (IpAddr::V6(_), IpAddr::V4(ip)) => (ip.to_ipv6_mapped(), to.port()).into(),
            _ => to,
        }
    }

    fn count_sent(&self, to: SocketAddr, sent: io::Result<usize>) {
        match sent {
            Ok(bytes) => {
                self.metrics.sent_bytes.inc_by(u64::try_from(bytes).unwrap_or(u64::MAX));
            }
            Err(error) => {
                debug!(%to, %error, "datagram not sent");
                self.metrics.unsent.inc();
            }
        }
    }
}

impl From<Refused> for DatagramOutcome {
    fn from(why: Refused) -> Self {
        match why {
            Refused::TooLong => Self::TooLong,
            Refused::Malformed => Self::Malformed,
            Refused::Foreign => Self::Foreign,
            Refused::Forged => Self::Forged,
            Refused::Replayed => Self::Replayed,
            Refused::Own => Self::Own,
        }
    }
}
