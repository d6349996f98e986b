//! Remove: out of the map at once, then off the tiers, for good.
//!
//! A tier forgets a block by its hash. So no copy of a block is made while it does: removals have the
//! turn of the block's demotions, and one that finds a later copy in the map leaves it alone. Nor is a
//! removal answered while a copy is being made that nobody will want: a kill could bring it back.

use futures_util::future::{join, join_all};

use super::{
    Shared,
    load::{Flight, Turn},
};
use crate::{
    block::{BlockHash, Hashes},
    error::{Error, ErrorKind, Result},
    map::{Hashed, Location, removed},
    metrics::EvictReason,
    namespace::Namespace,
    store::Wanted,
    tier::Tier,
};

/// The colder tiers, in the order of an entry's locations.
const COLDER: [Tier; 2] = [Tier::Nvme, Tier::Object];

/// A block that has left the map, or its copies have, and where these are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Gone {
    at: Hashed,
    cold: [Option<Location>; 2],
}

impl Gone {
    pub(super) fn from_tier(at: Hashed, tier: Tier, location: Location) -> Self {
        Self { at, cold: COLDER.map(|other| (other == tier).then_some(location)) }
    }

    fn on(&self, tier: Tier) -> Option<Location> {
        COLDER.into_iter().zip(self.cold).find(|(other, _)| *other == tier)?.1
    }
}

/// Blocks that may come back with a restart, and why.
#[derive(Debug, Default)]
pub(super) struct Unnoted {
    blocks: usize,
    why: Option<Error>,
}

impl Unnoted {
    fn and(self, other: Self) -> Self {
        Self { blocks: self.blocks + other.blocks, why: self.why.or(other.why) }
    }

    fn into_result(self) -> Result<()> {
        let Self { blocks, why } = self;
        if blocks == 0 {
            return Ok(());
        }
        let what = format!(
            "remove: {blocks} blocks cannot be read any more, but a colder tier has not noted that \
             yet; if this node restarts soon they may come back, then remove them again"
        );
        let error = Error::new(ErrorKind::Unavailable, what);
        Err(match why {
            Some(why) => error.because(why),
            None => error,
        })
    }
}

impl Shared {
    pub(super) async fn remove(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Result<u32> {
        let mut count = 0;
        let mut gone = Vec::new();
        for at in self.keys(namespace, hashes) {
            let (was_readable, cold) = self.remove_here(at);
            count += u32::from(was_readable);
            // What is being copied, or removed by somebody else, has to be waited for.
            if cold != [None, None] || self.demotions.has(at.key) {
                gone.push(Gone { at, cold });
            }
        }
        let forgotten = self.forget_copies(namespace, gone).await;
        let noted = self.note_removed(namespace, hashes).await;
        forgotten.into_result().and(noted)?;
        Ok(count)
    }

    /// Tells the tiers what they must not find any more.
    async fn note_removed(&self, namespace: &Namespace, hashes: Hashes<'_>) -> Result<()> {
        let hashes: Vec<BlockHash> = hashes.iter().collect();
        let noted = self.cold.iter().map(|store| store.removed(*namespace.id(), &hashes));
        join_all(noted).await.into_iter().collect()
    }

    /// Takes a block out of the map; returns whether it was readable, and its colder copies.
    fn remove_here(&self, at: Hashed) -> (bool, [Option<Location>; 2]) {
        let entry = self.map.with(at, |shard| {
            let (len, tiers) = (shard.entry(at)?.len, shard.entry(at)?.tiers());
            for tier in tiers {
                shard.push(removed(at.key, tier));
                if tier != Tier::Dram {
                    self.count_copy(tier, (at.key.namespace, len), false);
                }
            }
            shard.remove(at)
        });
        let Some(entry) = entry else { return (false, [None, None]) };
        self.settled.tell();
        if entry.hottest().is_none() {
            self.forget_unread(Some(entry));
            return (false, [None, None]);
        }
        self.map.count(false);
        self.count_gone(at.key.namespace, entry.len);
        if let Some(payload) = &entry.payload {
            self.count_evicted(payload, EvictReason::Removed);
            self.read_or_gone(entry.context, entry.slot_bytes());
        }
        (true, entry.cold)
    }

    /// Has the tiers forget copies that have left the map. Those that nobody works on are begun with
    /// the first poll, and complete by themselves.
    pub(super) async fn forget_copies(&self, namespace: &Namespace, gone: Vec<Gone>) -> Unnoted {
        let (mut now, mut later) = (Vec::new(), Vec::new());
        for gone in gone {
            match Flight::join(&self.demotions, gone.at.key).try_turn() {
                Ok(turn) => now.push((turn, gone)),
                Err(flight) => later.push((flight, gone)),
            }
        }
        // One by one: who waits for a turn has no other.
        let later = later.into_iter().map(async |(flight, gone)| {
            let turn = flight.turn().await;
            self.forget_in_turn(namespace, vec![(turn, gone)]).await
        });
        let (now, later) = join(self.forget_in_turn(namespace, now), join_all(later)).await;
        later.into_iter().fold(now, Unnoted::and)
    }

    async fn forget_in_turn(
        &self,
        namespace: &Namespace,
        mut turns: Vec<(Turn<'_>, Gone)>,
    ) -> Unnoted {
        let turns_of = &turns;
        let removals = self.cold.iter().map(async |store| {
            let tier = store.tier();
            let copies =
                turns_of.iter().filter_map(|(_, gone)| self.useless(namespace, gone, tier));
            let copies: Vec<Wanted> = copies.collect();
            if copies.is_empty() {
                return None;
            }
            let error = store.remove(&copies).await.err()?;
            let blocks = copies.len();
            tracing::warn!(%error, tier = tier.name(), blocks, "removed blocks may come back");
            Some((tier, error))
        });
        let failed: Vec<(Tier, Error)> = join_all(removals).await.into_iter().flatten().collect();
        let mut blocks = 0;
        for (turn, gone) in &mut turns {
            let left = match gone.cold {
                [None, None] => turn.is_left(),
                _ => failed.iter().any(|(tier, _)| gone.on(*tier).is_some()),
            };
            turn.leaves(left);
            blocks += usize::from(left);
        }
        Unnoted { blocks, why: failed.into_iter().next().map(|(_, error)| error) }
    }

    /// The copy on `tier`, unless that has a later one, which stands in for it.
    fn useless(&self, namespace: &Namespace, gone: &Gone, tier: Tier) -> Option<Wanted> {
        let location = gone.on(tier)?;
        let has_later = |entry: &crate::map::Entry| entry.cold(tier).is_some();
        if self.map.with(gone.at, |shard| shard.entry(gone.at).is_some_and(has_later)) {
            return None;
        }
        Some(Wanted { namespace: *namespace.id(), hash: gone.at.key.hash, location })
    }
}
