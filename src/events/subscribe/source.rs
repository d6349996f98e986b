//! One engine: connected to again and again, and asked for what was missed.

use std::{io, ops::Range};

use tokio::time::{sleep, timeout};
use tracing::{debug, info};

use super::{
    batch::{self, Batch},
    sequence::{Seen, Sequence},
};
use crate::{
    events::zmtp::{Connection, Kind},
    limits::{EVENT_REPLAY_DEADLINE, EVENT_RETRY},
    metrics::{EventBatch, EventMetrics},
};

/// The number behind the last batch of a replay.
const END: u64 = u64::MAX;

/// Where an engine publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// `host:port` of its publisher.
    pub(crate) publisher: String,
    /// `host:port` at which it sends again what was missed; none if it does not.
    pub(crate) replay: Option<String>,
}

/// Who is told what an engine publishes, in the order in which it happened.
pub(crate) trait Listener: Send {
    /// A batch, which may have been told before: of one start of an engine, the last one told counts.
    fn take(&mut self, batch: &Batch);

    /// What was told before may no longer be so: something was missed for good, or nobody listens now.
    fn lost(&mut self);

    /// Where it is counted.
    fn metrics(&self) -> &EventMetrics;
}

/// What listens to one engine.
struct Source<L> {
    endpoint: Endpoint,
    listener: L,
    sequence: Sequence,
}

/// Listens to an engine for ever.
pub(crate) async fn follow(endpoint: Endpoint, listener: impl Listener) {
    let mut source = Source { endpoint, listener, sequence: Sequence::default() };
    let (first, longest) = EVENT_RETRY;
    let mut pause = first;
    loop {
        let publisher = source.endpoint.publisher.clone();
        match Connection::open(&publisher, Kind::Subscriber).await {
            Ok(connection) => {
                pause = first;
                info!(publisher, "listening to the events of an engine");
                source.listener.metrics().connected.inc();
                let ended = source.listen(connection).await;
                source.listener.metrics().connected.dec();
                source.listener.lost();
                info!(
                    publisher,
                    reason = ended.err().map(|error| error.to_string()),
                    "engine lost"
                );
            }
            Err(error) => debug!(publisher, %error, "engine not reached"),
        }
        sleep(pause).await;
        pause = (pause * 2).min(longest);
    }
}

impl<L: Listener> Source<L> {
    async fn listen(&mut self, mut connection: Connection) -> io::Result<()> {
        connection.subscribe().await?;
        self.sequence.connect();
        loop {
            let message = connection.receive().await?;
            // The topic says nothing that the payload does not.
            let [_topic, number, payload] = message.as_slice() else {
                self.listener.metrics().record_batches(EventBatch::Broken, 1);
                continue;
            };
            let Some(number) = read_number(number) else {
                self.listener.metrics().record_batches(EventBatch::Broken, 1);
                continue;
            };
            match self.sequence.see(number) {
                Seen::Again => {
                    self.listener.metrics().record_batches(EventBatch::Repeated, 1);
                    continue;
                }
                Seen::Next => {}
                Seen::Missing { from, unseen } => self.catch_up(from..number, unseen).await,
            }
            self.take(payload, EventBatch::Taken);
        }
    }

    /// Asks for batches, as far as the engine still has them; of those from `unseen` on that do not come,
    /// it is said that they are lost.
    async fn catch_up(&mut self, wanted: Range<u64>, unseen: u64) {
        let mut brought = Brought { next: wanted.start, unseen: 0 };
        if let Some(replay) = self.endpoint.replay.clone() {
            let replaying = self.replay(&replay, wanted.clone(), unseen, &mut brought);
            match timeout(EVENT_REPLAY_DEADLINE, replaying).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(replay, %error, "replay failed"),
                Err(_elapsed) => debug!(replay, "replay not over in time"),
            }
        }
        if brought.next < wanted.end {
            self.listener.lost();
        }
        let missing = wanted.end.saturating_sub(unseen).saturating_sub(brought.unseen);
        self.listener.metrics().record_batches(EventBatch::Lost, missing);
    }

    async fn replay(
        &mut self,
        address: &str,
        wanted: Range<u64>,
        unseen: u64,
        brought: &mut Brought,
    ) -> io::Result<()> {
        let mut connection = Connection::open(address, Kind::Dealer).await?;
        connection.send(&[b"", &wanted.start.to_be_bytes()]).await?;
        loop {
            let message = connection.receive().await?;
            // In front of them there is an empty frame and, of newer engines, the topic.
            let [.., number, payload] = message.as_slice() else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let number = read_number(number).ok_or(io::ErrorKind::InvalidData)?;
            if number == END || number >= wanted.end {
                return Ok(());
            }
            if number >= brought.next {
                if number > brought.next {
                    self.listener.lost();
                }
                brought.next = number + 1;
                brought.unseen += u64::from(number >= unseen);
                self.take(payload, EventBatch::Replayed);
            }
        }
    }

    fn take(&mut self, payload: &[u8], outcome: EventBatch) {
        match batch::read(payload) {
            Ok(batch) => {
                self.listener.metrics().record_batches(outcome, 1);
                self.listener.take(&batch);
            }
            Err(broken) => {
                let publisher = &self.endpoint.publisher;
                debug!(publisher, reason = broken.0, "batch not read");
                self.listener.metrics().record_batches(EventBatch::Broken, 1);
                self.listener.lost();
            }
        }
    }
}

/// What a replay has brought.
struct Brought {
    /// Everything before this was brought, or is lost.
    next: u64,
    /// How many that were never seen.
    unseen: u64,
}

fn read_number(frame: &[u8]) -> Option<u64> {
    frame.try_into().ok().map(u64::from_be_bytes)
}
