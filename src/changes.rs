//! What changes in the tiers, for everybody here who tells others: publishers, watchers, indexes.
//!
//! The store has one feed of events. The hub reads it, a shard at a time and again and again while
//! anybody follows, and hands what it reads to each [`Follower`]. A follower has a bounded queue of its
//! own and never holds up the store, the hub or another follower: for a shard whose news did not find room
//! it is told later what that shard holds then, which is also how it begins. So it misses no change
//! without being told so.

use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Weak},
};

use kvstrata_tiers::{
    block::BlockKey,
    event::{Drained, EventFeed, TierEvent},
    limits::SHARDS,
    stack::Stack,
    tier::Tier,
};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::limits::{CHANGES_INTERVAL, FOLLOWER_QUEUE_KEYS_MAX};

/// News of one shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Number of the shard, 0 to 63. Events of one block are of one shard, in their order.
    pub shard: usize,
    /// The news.
    pub what: Changed,
}

/// What is new in a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Changed {
    /// This has happened since the last news of the shard, in order.
    Events(Arc<[TierEvent]>),
    /// Forget what you knew of the shard: this is all that it holds. A block is named once for each tier
    /// that has it, hot to cold.
    Resync(Arc<[(BlockKey, Tier)]>),
}

impl Changed {
    fn keys(&self) -> usize {
        match self {
            Self::Events(events) => events.len(),
            Self::Resync(held) => held.len(),
        }
    }
}

/// The hub; clones share it.
#[derive(Clone)]
pub struct Changes {
    hub: Arc<Hub>,
}

struct Hub {
    stack: Stack,
    followers: Mutex<Vec<Known>>,
    /// Somebody has begun to follow.
    joined: Notify,
}

/// A follower, as the hub knows it.
struct Known {
    queue: Weak<Queue>,
    /// Shards of which it is to be told all.
    behind: [bool; SHARDS],
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    pushed: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    changes: VecDeque<Change>,
    keys: usize,
}

/// The reading end of one follower. Dropping it ends its following.
#[derive(Debug)]
pub struct Follower {
    queue: Arc<Queue>,
}

impl Changes {
    /// A hub for `stack`, which tells nothing until it [runs](Self::run).
    #[must_use]
    pub fn new(stack: Stack) -> Self {
        let hub = Hub { stack, followers: Mutex::default(), joined: Notify::new() };
        Self { hub: Arc::new(hub) }
    }

    /// Follows what changes from now on; what every shard holds comes first.
    #[must_use]
    pub fn follow(&self) -> Follower {
        let queue = Arc::new(Queue::default());
        let known = Known { queue: Arc::downgrade(&queue), behind: [true; SHARDS] };
        self.hub.followers.lock().push(known);
        self.hub.joined.notify_one();
        Follower { queue }
    }

    /// Reads and tells until `stop`. The store keeps no events while nobody follows.
    pub async fn run(&self, stop: CancellationToken) {
        stop.run_until_cancelled(self.tell()).await;
    }

    async fn tell(&self) {
        let mut ticks = interval(CHANGES_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut feed: Option<EventFeed> = None;
        loop {
            if !self.is_followed() {
                feed = None;
                self.hub.joined.notified().await;
                continue;
            }
            ticks.tick().await;
            let feed = feed.get_or_insert_with(|| self.hub.stack.subscribe());
            for shard in 0..feed.shards() {
                self.tell_shard(feed, shard);
            }
        }
    }

    fn is_followed(&self) -> bool {
        let mut followers = self.hub.followers.lock();
        followers.retain(|known| known.queue.strong_count() > 0);
        !followers.is_empty()
    }

    fn tell_shard(&self, feed: &EventFeed, shard: usize) {
        let mut followers = self.hub.followers.lock();
        let wants_all = followers.iter().any(|known| known.is_behind(shard) && known.has_room());
        let (events, held) = if wants_all {
            let (drained, held) = feed.drain_whole(shard);
            (drained, Some(held))
        } else {
            (feed.drain(shard), None)
        };
        let (events, held) = match events {
            Drained::Events(events) => (Some(Changed::Events(events.into())), held),
            // The shard has forgotten what happened: all are told what it holds.
            Drained::Resync(held) => (None, Some(held)),
        };
        let held = held.map(|held| Changed::Resync(held.into()));
        for known in followers.iter_mut() {
            known.tell(shard, events.as_ref(), held.as_ref());
        }
    }
}

impl Known {
    fn is_behind(&self, shard: usize) -> bool {
        self.behind.get(shard).copied().unwrap_or(false)
    }

    fn has_room(&self) -> bool {
        self.queue.upgrade().is_some_and(|queue| queue.waiting.lock().has_room())
    }

    /// Tells what has happened to a follower that knows the rest, and else what there is.
    fn tell(&mut self, shard: usize, events: Option<&Changed>, held: Option<&Changed>) {
        let Some(behind) = self.behind.get_mut(shard) else { return };
        let Some(queue) = self.queue.upgrade() else { return };
        let news = match (*behind, events) {
            (false, Some(events)) if events.keys() == 0 => return,
            (false, Some(events)) => Some(events),
            (true, _) | (false, None) => held,
        };
        *behind = !news.is_some_and(|news| queue.push(Change { shard, what: news.clone() }));
    }
}

impl Queue {
    /// Whether there was room.
    fn push(&self, change: Change) -> bool {
        let mut waiting = self.waiting.lock();
        if !waiting.has_room() {
            return false;
        }
        waiting.keys += change.what.keys();
        waiting.changes.push_back(change);
        drop(waiting);
        self.pushed.notify_one();
        true
    }
}

impl Waiting {
    /// A change may be larger than what is left: a shard is told of at once, or not.
    fn has_room(&self) -> bool {
        self.keys < FOLLOWER_QUEUE_KEYS_MAX && self.changes.len() < FOLLOWER_QUEUE_KEYS_MAX
    }
}

impl Follower {
    /// The next news; waits for it.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn next(&mut self) -> Change {
        loop {
            // One reader: what is pushed before it waits is kept for it.
            if let Some(change) = self.try_next() {
                return change;
            }
            self.queue.pushed.notified().await;
        }
    }

    /// The next news, if it has come.
    pub fn try_next(&mut self) -> Option<Change> {
        let mut waiting = self.queue.waiting.lock();
        let change = waiting.changes.pop_front()?;
        waiting.keys = waiting.keys.saturating_sub(change.what.keys());
        Some(change)
    }
}

impl fmt::Debug for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let followers = self.hub.followers.lock().len();
        f.debug_struct("Changes").field("followers", &followers).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
