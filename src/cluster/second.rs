//! Gives a second holder to what is read often, so that it outlives a node that dies without a word.
//!
//! The member is the one that rendezvous hashing picks for the namespace and the root of the chain, so that what
//! a prompt shares with others lies there as a whole, and whoever thinks of it picks the same one. The copies are
//! puts as any: the member owes them nothing, and does not copy them further while this node has them. They are
//! made in the background: so many bytes a second, and so many in a while.

use std::{collections::HashMap, sync::Arc};

use kvstrata_tiers::{block::BlockHash, namespace::Namespace};
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use super::{
    handover::{Batch, batches, staying},
    home::weight,
    push::{Door, Pushed, Words},
};
use crate::{
    client::ClientOptions,
    limits::{
        SECOND_BLOCKS_AT_ONCE, SECOND_BYTES_PER_SECOND, SECOND_CHAIN_MAX, SECOND_GATHER,
        SECOND_PAUSE, SECOND_SHARE_DIVISOR, SECOND_WINDOW,
    },
    members::Member,
    node::Node,
};

/// Copies until `stop`, or until the node leaves.
///
/// # Cancel safety
/// Safe: what members have taken stays there.
pub(crate) async fn run(node: Arc<Node>, access: ClientOptions, stop: CancellationToken) {
    let leaves = node.drain.asked().clone();
    tokio::select! {
        () = stop.cancelled() => {}
        () = leaves.cancelled() => {}
        () = Copier::new(Arc::clone(&node), access).run() => {}
    }
}

/// What goes to whom.
struct Copier {
    node: Arc<Node>,
    access: ClientOptions,
    doors: HashMap<String, Door>,
    /// Members that did not answer, and until when they are left alone.
    away: HashMap<String, Instant>,
    room: Room,
}

/// So many bytes in a while.
#[derive(Debug)]
struct Room {
    bytes_max: u64,
    since: Instant,
    bytes: u64,
}

impl Room {
    fn new(bytes_max: u64) -> Self {
        Self { bytes_max, since: Instant::now(), bytes: 0 }
    }

    /// Whether so many bytes may go now; then they count.
    fn takes(&mut self, bytes: u64) -> bool {
        if self.since.elapsed() >= SECOND_WINDOW {
            *self = Self::new(self.bytes_max);
        }
        let fits = self.bytes.saturating_add(bytes) <= self.bytes_max;
        if fits {
            self.bytes += bytes;
        }
        fits
    }
}

impl Copier {
    fn new(node: Arc<Node>, access: ClientOptions) -> Self {
        let bytes_max = node.stack.usage().dram_capacity_bytes / SECOND_SHARE_DIVISOR;
        let (doors, away) = (HashMap::new(), HashMap::new());
        Self { node, access, doors, away, room: Room::new(bytes_max) }
    }

    async fn run(mut self) {
        let mut members = self.node.roster.follow();
        loop {
            // Nothing is noted while there is nobody to give it to.
            if members.wait_for(|members| members.list.len() > 1).await.is_err() {
                return;
            }
            let chains = self.node.stack.popular(SECOND_BLOCKS_AT_ONCE).await;
            for batch in batches(chains) {
                self.copy(&batch).await;
            }
            // A session that does nothing would keep a member that leaves waiting for it.
            self.doors.clear();
            // One get uses its blocks one after the other: what follows comes with the next round as a whole.
            sleep(SECOND_GATHER).await;
        }
    }

    async fn copy(&mut self, batch: &Batch) {
        let Some(namespace) = self.node.namespaces.by_index(batch.namespace) else { return };
        let members = staying(&self.node);
        let Some(member) = self.second(&namespace, batch, &members) else { return };
        let now = Instant::now();
        self.away.retain(|_, until| *until > now);
        if self.away.contains_key(&member.name) || !self.room.takes(batch.bytes) {
            return;
        }
        let name = member.name.clone();
        match self.push(member, &namespace, batch).await {
            Ok(Pushed { blocks, bytes, present, refused, .. }) => {
                debug!(member = name, blocks, bytes, present, refused, "second holder");
                self.node.metrics.handover.record_second(blocks, bytes, present, refused);
                // The pace: as long as these bytes may take.
                let millis = bytes.saturating_mul(1000) / SECOND_BYTES_PER_SECOND;
                sleep(std::time::Duration::from_millis(millis)).await;
            }
            Err(error) => {
                info!(member = name, %error, "a member takes no copies now");
                self.doors.remove(&name);
                self.away.insert(name, now + SECOND_PAUSE);
            }
        }
    }

    async fn push(
        &mut self,
        member: &Member,
        namespace: &Arc<Namespace>,
        batch: &Batch,
    ) -> kvstrata_tiers::error::Result<Pushed> {
        let door = match self.doors.remove(&member.name) {
            Some(door) if door.member().endpoint == member.endpoint => door,
            _ => Door::new(member.clone(), self.access.clone()),
        };
        let door = self.doors.entry(member.name.clone()).or_insert(door);
        let words = Words::of(&self.node, namespace);
        let place = door.place(namespace, &words).await?;
        place.put(&self.node.stack, batch.parent, &batch.hashes).await
    }

    /// Who is to have it, too.
    fn second<'a>(
        &self,
        namespace: &Namespace,
        batch: &Batch,
        members: &'a [Member],
    ) -> Option<&'a Member> {
        let root = self.root(namespace, batch);
        let chain = format!("{}{root:?}", namespace.id());
        members.iter().max_by_key(|member| (weight(&chain, &member.name), &member.name))
    }

    /// The first block of the chain, as far as it is known.
    fn root(&self, namespace: &Namespace, batch: &Batch) -> Option<BlockHash> {
        let mut root = *batch.hashes.first()?;
        let mut parent = batch.parent;
        for _ in 0..SECOND_CHAIN_MAX {
            let Some(before) = parent else { break };
            root = before;
            parent = self.node.stack.description(namespace, before)?.parent;
        }
        Some(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_is_copied_in_a_while_is_bounded() {
        let mut room = Room::new(100);
        assert!(room.takes(60) && !room.takes(60) && room.takes(40) && !room.takes(1));
        tokio::time::advance(SECOND_WINDOW).await;
        assert!(room.takes(100) && !room.takes(1));
        assert!(!Room::new(10).takes(11), "what never fits is not copied");
    }
}
