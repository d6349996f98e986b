//! Wards: the packs of nodes that are gone are served by those that are left.
//!
//! ```text
//! scan     every minute: LIST the epochs of the cluster -> look at what is new or may be silent
//! adopt    silent for long, or released -> rendezvous hashing picks this node -> its keeper starts
//! let go   its own node is back, or another was faster: the keeper ends, the packs leave the map
//! ```
//! Invariants
//! - The bucket says who lives: signs of life, nothing else. That two nodes take the same ordinal is
//!   not prevented here but by the epoch's conditional create ([`owner`](super::owner)).
//! - A node that does not hold its own ordinal adopts none: others could not see that it lives.
//! - No packs are made in the name of a ward: it shrinks until its node is back or nothing is left.
//! - A scan lists one name for each epoch that is kept, and reads no more than [`LOOKS_MAX`] objects
//!   twice: an epoch's record never changes, and a sign of life is read again when it may be too old.
//!
//! A block that the map has in another pack already is not taken from a ward, and is not found when
//! that one leaves: the ward's node, which is back then, has it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures_util::{
    FutureExt,
    stream::{self, FuturesUnordered, StreamExt},
};
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    sync::mpsc,
    time::{Instant, sleep_until},
};

use super::{
    Core,
    format::Role,
    keeper::Keeper,
    names::Owner,
    owner::{OwnerError, Sighting, TAKEOVER_AFTER, newest_epochs, sight},
};
use crate::fields::checksum;

/// How often it is looked who lives.
const SCAN_EVERY: Duration = Duration::from_secs(60);
/// How long a look at all may take.
const SCAN_DEADLINE: Duration = Duration::from_secs(45);
/// Ordinals that one scan looks at; the others wait for the next.
const LOOKS_MAX: usize = 256;
/// Ordinals that are looked at at a time: two small reads each.
const LOOKS_AT_ONCE: usize = 8;
/// Keepers that wait to be run.
const STARTS_MAX: usize = 16;

/// The node among `nodes` that has `ordinal` while its own node is gone.
///
/// Rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
/// IEEE/ACM Transactions on Networking 6(1), 1998): the highest hash of the name of a node with the
/// ordinal wins. All who know the same nodes pick the same one, in any order, and if one leaves only
/// what it had moves.
pub(super) fn rendezvous<'a>(
    nodes: impl IntoIterator<Item = &'a str>,
    ordinal: u32,
) -> Option<&'a str> {
    let weight = |node: &str| checksum(&[&ordinal.to_le_bytes(), node.as_bytes()].concat());
    nodes.into_iter().max_by_key(|node| (weight(node), *node))
}

/// The task that adopts. It ends when the store is closed.
#[derive(Debug)]
pub(super) struct Wards {
    core: Arc<Core>,
    seen: BTreeMap<u32, Sighting>,
}

impl Wards {
    pub(super) fn new(core: Arc<Core>) -> Self {
        Self { core, seen: BTreeMap::new() }
    }

    /// Adopts what there is to adopt, and keeps it.
    pub(super) async fn run(self) {
        let (start, starting) = mpsc::channel(STARTS_MAX);
        let adopted = self.core.metrics.adopted_ordinals.clone();
        tokio::join!(self.scan_often(start), keep(adopted, starting));
    }

    async fn scan_often(mut self, start: mpsc::Sender<Keeper>) {
        let mut next = Instant::now();
        while self.core.seats.own().epoch.wait().await {
            tokio::select! {
                () = self.core.seats.own().epoch.lost() => continue,
                () = sleep_until(next) => {}
            }
            next = Instant::now() + SCAN_EVERY;
            match self.scan().await {
                Ok(orphans) => {
                    for ordinal in orphans {
                        self.adopt(ordinal, &start).await;
                    }
                }
                Err(error) => tracing::warn!(%error, "object tier does not see who lives now"),
            }
        }
    }

    /// Looks who lives; returns the ordinals that this node should adopt.
    async fn scan(&mut self) -> Result<Vec<u32>, OwnerError> {
        let deadline = Instant::now() + SCAN_DEADLINE;
        let Core { config, bucket, .. } = self.core.as_ref();
        let newest = newest_epochs(bucket, &config.owner.cluster, deadline).await?;
        self.seen.retain(|ordinal, seen| newest.get(ordinal) == Some(&seen.epoch));
        let mut due = self.due(&newest);
        // What is not known yet may be the one to adopt.
        let sees_all = due.len() <= LOOKS_MAX;
        due.truncate(LOOKS_MAX);
        let looks = due.into_iter().map(|(owner, epoch)| {
            let look = async move { (owner.ordinal, sight(bucket, &owner, epoch, deadline).await) };
            look.boxed()
        });
        let looks = looks.collect::<Vec<_>>();
        let mut looks = stream::iter(looks).buffer_unordered(LOOKS_AT_ONCE);
        let mut found = Vec::new();
        while let Some((ordinal, seen)) = looks.next().await {
            found.push((ordinal, seen?));
        }
        drop(looks);
        self.seen.extend(found);
        Ok(if sees_all { self.mine() } else { Vec::new() })
    }

    /// What has to be looked at: epochs that are new, and holders that have not been seen for long.
    fn due(&self, newest: &BTreeMap<u32, u64>) -> Vec<(Owner, u64)> {
        let now = self.core.now_unix_ms();
        let own = &self.core.config.owner;
        let is_due = |ordinal: &u32| {
            let seen = self.seen.get(ordinal);
            seen.is_none_or(|seen| seen.role().is_held() && seen.age(now) >= TAKEOVER_AFTER)
        };
        let due = newest.iter().filter(|(ordinal, _)| is_due(ordinal) && **ordinal != own.ordinal);
        let whose = |ordinal| Owner { cluster: own.cluster.clone(), ordinal };
        due.map(|(ordinal, epoch)| (whose(*ordinal), *epoch)).collect()
    }

    /// Of the ordinals without a node, those for which this one is picked.
    fn mine(&self) -> Vec<u32> {
        let now = self.core.now_unix_ms();
        let me = self.core.config.holder.as_str();
        let own = self.seen.values().filter(|seen| seen.role() == Role::Own);
        let live: BTreeSet<&str> = own.filter_map(|seen| seen.alive(now)).chain([me]).collect();
        let is_mine = |(ordinal, seen): &(&u32, &Sighting)| match (seen.role(), seen.alive(now)) {
            (Role::Empty, _) => false,
            // It was before this process started.
            (Role::Ward, Some(holder)) => holder == me,
            (Role::Own, Some(_)) => false,
            (Role::Own | Role::Ward | Role::Released, _) => {
                rendezvous(live.iter().copied(), **ordinal) == Some(me)
            }
        };
        let mine = self.seen.iter().filter(is_mine).map(|(ordinal, _)| *ordinal);
        mine.filter(|ordinal| self.core.seats.of(*ordinal).is_none()).collect()
    }

    async fn adopt(&mut self, ordinal: u32, start: &mpsc::Sender<Keeper>) {
        // Whatever comes of it, it is looked at again.
        self.seen.remove(&ordinal);
        let owner = Owner { ordinal, ..self.core.config.owner.clone() };
        let Some(seat) = self.core.seats.admit(owner) else { return };
        let keeper = Keeper::new(Arc::clone(&self.core), seat, None);
        if start.send(keeper).await.is_err() {
            self.core.seats.dismiss(ordinal);
        }
    }
}

/// Runs the keepers of wards, until no more come and all have ended.
async fn keep(adopted: Gauge, mut starting: mpsc::Receiver<Keeper>) {
    let mut running = FuturesUnordered::new();
    let mut more = true;
    while more || !running.is_empty() {
        tokio::select! {
            Some(()) = running.next() => drop(adopted.dec()),
            start = starting.recv(), if more => match start {
                Some(keeper) => {
                    adopted.inc();
                    running.push(keeper.run());
                }
                None => more = false,
            },
        }
    }
}

#[cfg(test)]
mod tests;
