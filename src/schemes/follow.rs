//! Follows what changes in the tiers, so that the index is as the map is a moment later.

use std::{future::pending, sync::Arc, time::Duration};

use kvstrata_tiers::{block::BlockKey, event::TierEvent, limits::SHARDS};
use tokio::{
    task::yield_now,
    time::{Instant, sleep_until},
};

use crate::{
    changes::{Change, Changed},
    node::Node,
};

/// Blocks that are looked at before others have their turn: a tenth of a millisecond.
const TURN_KEYS: usize = 128;
/// How long after a shard was told anew all that is held is asked for: the other shards come with it.
const PRUNE_DELAY: Duration = Duration::from_secs(2);

/// Follows until the tasks of the node should end.
pub(crate) fn start(node: &Arc<Node>) {
    let (followed, stop) = (Arc::clone(node), node.tasks.stop_token());
    node.tasks.spawn_critical("schemes", async move {
        stop.run_until_cancelled(follow_all(&followed)).await.unwrap_or_default();
    });
}

async fn follow_all(node: &Node) {
    loop {
        // While nobody wants names, the store needs to keep no events.
        while !node.schemes.is_wanted() {
            node.schemes.wanted().await;
        }
        follow_once(node).await;
        // Some are wanted that were not before, or there is room again: from the beginning.
        node.schemes.show();
    }
}

/// Follows from the beginning, until something else is to be followed.
async fn follow_once(node: &Node) {
    let mut follower = node.changes.follow();
    // What has left while nobody was told of it is found by asking of all that is held.
    let is_old = !node.schemes.is_empty();
    let mut seen = [is_old; SHARDS];
    let mut prune_at = is_old.then(|| Instant::now() + PRUNE_DELAY);
    loop {
        let change = tokio::select! {
            biased;
            () = node.schemes.wanted() => return,
            () = at(prune_at) => {
                prune_at = None;
                refresh(node, &node.schemes.held()).await;
                node.schemes.shrink();
                node.schemes.show();
                continue;
            }
            change = follower.next() => change,
        };
        let mut next = Some(change);
        while let Some(Change { shard, what }) = next {
            if let (Changed::Resync(_), Some(seen)) = (&what, seen.get_mut(shard))
                && std::mem::replace(seen, true)
            {
                prune_at.get_or_insert(Instant::now() + PRUNE_DELAY);
            }
            refresh(node, &keys(&what)).await;
            next = follower.try_next();
        }
        node.schemes.show();
        if node.schemes.has_room_again() {
            return;
        }
    }
}

/// Waits for a time; for ever if there is none.
async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

fn keys(what: &Changed) -> Vec<BlockKey> {
    let mut keys: Vec<_> = match what {
        Changed::Events(events) => events.iter().map(key_of).collect(),
        Changed::Resync(held) => held.iter().map(|(key, _)| *key).collect(),
    };
    // The map is asked for each: once is enough, and together what is of one namespace.
    keys.sort_unstable();
    keys.dedup();
    keys
}

fn key_of(event: &TierEvent) -> BlockKey {
    match event {
        TierEvent::Stored { key, .. }
        | TierEvent::Removed { key, .. }
        | TierEvent::Described { key } => *key,
    }
}

async fn refresh(node: &Node, keys: &[BlockKey]) {
    for keys in keys.chunks(TURN_KEYS) {
        let mut due = node.schemes.refresh(&node.stack, &node.namespaces, keys);
        yield_now().await;
        while !due.is_empty() {
            due = node.schemes.go_on(&node.stack, due, TURN_KEYS);
            yield_now().await;
        }
    }
}
