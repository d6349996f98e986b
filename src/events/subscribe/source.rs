//! One engine: connected to again and again, and asked for what was missed.

use std::{io, ops::Range, sync::Arc};

use tokio::time::{sleep, timeout};
use tracing::{debug, info};

use super::{
    batch,
    sequence::{Seen, Sequence},
};
use crate::{
    config::EventSource,
    events::zmtp::{Connection, Kind},
    limits::{EVENT_REPLAY_DEADLINE, EVENT_RETRY},
    metrics::{EventBatch, EventMetrics},
    node::Node,
};

/// The number behind the last batch of a replay.
const END: u64 = u64::MAX;

/// What listens to one engine.
struct Source {
    source: EventSource,
    node: Arc<Node>,
    metrics: EventMetrics,
    sequence: Sequence,
}

/// Listens to an engine for ever.
pub(super) async fn follow(source: EventSource, node: Arc<Node>) {
    let metrics = node.metrics.events.clone();
    let mut listening = Source { source, node, metrics, sequence: Sequence::default() };
    let (first, longest) = EVENT_RETRY;
    let mut pause = first;
    loop {
        let publisher = listening.source.publisher.clone();
        match Connection::open(&publisher, Kind::Subscriber).await {
            Ok(connection) => {
                pause = first;
                info!(publisher, "listening to the events of an engine");
                listening.metrics.connected.inc();
                let ended = listening.listen(connection).await;
                listening.metrics.connected.dec();
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

impl Source {
    async fn listen(&mut self, mut connection: Connection) -> io::Result<()> {
        connection.subscribe().await?;
        self.sequence.connect();
        loop {
            let message = connection.receive().await?;
            // The topic says nothing that the payload does not.
            let [_topic, number, payload] = message.as_slice() else {
                self.metrics.record_batches(EventBatch::Broken, 1);
                continue;
            };
            let Some(number) = read_number(number) else {
                self.metrics.record_batches(EventBatch::Broken, 1);
                continue;
            };
            match self.sequence.see(number) {
                Seen::Again => {
                    self.metrics.record_batches(EventBatch::Repeated, 1);
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
        let mut brought = 0;
        if let Some(replay) = self.source.replay.clone() {
            let replaying = self.replay(&replay, wanted.clone(), unseen, &mut brought);
            match timeout(EVENT_REPLAY_DEADLINE, replaying).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(replay, %error, "replay failed"),
                Err(_elapsed) => debug!(replay, "replay not over in time"),
            }
        }
        let missing = wanted.end.saturating_sub(unseen).saturating_sub(brought);
        self.metrics.record_batches(EventBatch::Lost, missing);
    }

    /// `brought` counts those from `unseen` on.
    async fn replay(
        &mut self,
        address: &str,
        wanted: Range<u64>,
        unseen: u64,
        brought: &mut u64,
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
            if number >= wanted.start {
                *brought += u64::from(number >= unseen);
                self.take(payload, EventBatch::Replayed);
            }
        }
    }

    fn take(&self, payload: &[u8], outcome: EventBatch) {
        let stored = match batch::read(payload) {
            Ok(stored) => stored,
            Err(broken) => {
                debug!(publisher = self.source.publisher, reason = broken.0, "batch not read");
                self.metrics.record_batches(EventBatch::Broken, 1);
                return;
            }
        };
        self.metrics.record_batches(outcome, 1);
        let Node { stack, namespaces, told, .. } = &*self.node;
        let Some(model) = told.models.iter().find(|model| model.is_of(&self.source)) else {
            return;
        };
        for stored in &stored {
            let described = model.take(stack, namespaces, stored);
            self.metrics.told_blocks.inc_by(u64::try_from(stored.hashes.len()).unwrap_or(u64::MAX));
            self.metrics.described_blocks.inc_by(described);
        }
    }
}

fn read_number(frame: &[u8]) -> Option<u64> {
    frame.try_into().ok().map(u64::from_be_bytes)
}
