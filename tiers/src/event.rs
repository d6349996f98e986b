//! What changed in the tiers, for those who tell routers.
//!
//! Each shard of the map keeps its latest events in a bounded ring, written under the shard's lock,
//! so that the order of events of one block is the order of what happened. A reader that falls
//! behind never blocks a put or an eviction: the ring is cleared, the shard is marked dirty, and the
//! next [`EventFeed::drain`] returns everything that the shard holds instead of the difference.
//! The first drain of a feed is such a resync, too.
//!
//! `Stored` comes after a block is readable, `Removed` before it is not.

use std::{collections::VecDeque, fmt, sync::Arc};

use crate::{block::BlockKey, limits::SHARD_EVENTS_MAX, map::Map, tier::Tier};

/// One change of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TierEvent {
    /// The block can be read from the tier.
    Stored {
        /// Which block.
        key: BlockKey,
        /// Which tier.
        tier: Tier,
    },
    /// The block can no longer be read from the tier.
    Removed {
        /// Which block.
        key: BlockKey,
        /// Which tier.
        tier: Tier,
    },
    /// Something else than before is known of a readable block's place in its chain:
    /// [`Stack::description`](crate::stack::Stack::description) has it.
    Described {
        /// Which block.
        key: BlockKey,
    },
}

/// What a shard has to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Drained {
    /// What happened since the last drain, in order.
    Events(Vec<TierEvent>),
    /// Forget what you knew of this shard: this is all that it holds. A block is named once for each
    /// tier that has it, hot to cold.
    Resync(Vec<(BlockKey, Tier)>),
}

/// The events of one shard.
#[derive(Debug, Default)]
pub(crate) struct EventRing {
    queue: VecDeque<TierEvent>,
    dirty: bool,
    /// The feed that reads; 0 for none.
    feed: u64,
}

impl EventRing {
    /// Feeds are numbered in the order of their start: of two that start at once, the later one
    /// gets all shards.
    pub(crate) fn switch_on(&mut self, feed: u64) {
        if feed > self.feed {
            *self = Self { queue: VecDeque::new(), dirty: true, feed };
        }
    }

    /// Does nothing if another feed has taken over.
    pub(crate) fn switch_off(&mut self, feed: u64) {
        if self.feed == feed {
            *self = Self::default();
        }
    }

    pub(crate) fn push(&mut self, event: TierEvent) {
        if self.feed == 0 || self.dirty {
            return;
        }
        if self.queue.len() >= SHARD_EVENTS_MAX {
            self.queue = VecDeque::new();
            self.dirty = true;
        } else {
            self.queue.push_back(event);
        }
    }

    /// `None` asks for a resync, which is answered from the shard under the same lock. A feed that
    /// another has taken over from gets nothing and takes nothing away.
    pub(crate) fn take(&mut self, feed: u64) -> Option<Vec<TierEvent>> {
        if self.feed != feed {
            return Some(Vec::new());
        }
        if std::mem::take(&mut self.dirty) {
            return None;
        }
        Some(self.queue.drain(..).collect())
    }
}

/// The reading end. One at a time: the latest one is told, those before it are not any more.
pub struct EventFeed {
    map: Arc<Map>,
    number: u64,
}

impl EventFeed {
    pub(crate) fn new(map: Arc<Map>) -> Self {
        let number = map.start_events();
        Self { map, number }
    }

    /// How many shards there are.
    #[must_use]
    pub fn shards(&self) -> usize {
        crate::limits::SHARDS
    }

    /// Takes what `shard` has to tell; nothing for a shard that does not exist.
    ///
    /// # Blocking
    /// A resync copies the keys of a whole shard under its lock.
    #[must_use]
    pub fn drain(&self, shard: usize) -> Drained {
        self.map.drain_events(shard, self.number)
    }

    /// As [`drain`](Self::drain), with all that the shard holds at that moment, as
    /// [`Drained::Resync`] has it: for readers that come later.
    ///
    /// # Blocking
    /// Copies the keys of a whole shard under its lock.
    #[must_use]
    pub fn drain_whole(&self, shard: usize) -> (Drained, Vec<(BlockKey, Tier)>) {
        self.map.drain_whole(shard, self.number)
    }
}

impl Drop for EventFeed {
    fn drop(&mut self) {
        self.map.stop_events(self.number);
    }
}

impl fmt::Debug for EventFeed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventFeed")
    }
}
