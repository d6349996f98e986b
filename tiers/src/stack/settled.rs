//! Waiting for puts in flight: one engine reads what another is about to have put.

use std::pin::pin;

use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use super::Stack;
use crate::{block::BlockHash, map::Entry, namespace::Namespace};

/// Tells those who wait that some put came to the end of one of its blocks.
#[derive(Debug, Default)]
pub(super) struct Settled(Notify);

impl Settled {
    /// A block is readable now, or the put of it was given up, or it was removed.
    pub(super) fn tell(&self) {
        self.0.notify_waiters();
    }
}

impl Stack {
    /// Waits until no put of a block is in flight, at most until the deadline. What became of it says
    /// the next read: a put may also have been given up.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn settled(&self, namespace: &Namespace, hash: BlockHash, deadline: Instant) {
        let at = self.shared.map.hashed(namespace.index(), hash);
        loop {
            let mut told = pin!(self.shared.settled.0.notified());
            // Before the look: what ends behind it is not missed.
            told.as_mut().enable();
            let is_pending =
                self.shared.map.with(at, |shard| shard.entry(at).is_some_and(Entry::is_pending));
            if !is_pending || timeout_at(deadline, told).await.is_err() {
                return;
            }
        }
    }
}
