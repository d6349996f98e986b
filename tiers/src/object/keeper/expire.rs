//! What leaves: packs that are too old, too empty or too many, and objects that nobody needs any more.
//!
//! A pack leaves as a whole, so what of it is worth keeping is packed again before.
//!
//! It cannot run away: at most half of a pack that leaves for want of room is packed again, so that each
//! byte packed makes at most one byte be packed again; a pack that is half empty frees more than it
//! costs; and one that is too old comes once in its time.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    Keeper, LOG_DEADLINE,
    heat::{Coldest, KEPT_DIVISOR},
    room::millis,
    tend_every,
};
use crate::{
    object::{
        catalog::{PackInfo, PackNumber, Summary},
        format::ManifestRecord,
        owner::OwnerError,
        packer::Victim,
    },
    tier::Tier,
};

/// When the next step of a compaction comes.
const TEND_AGAIN: Duration = Duration::from_millis(100);
/// How often it is looked for packs that nobody will name any more: the names of all are listed for it.
pub(super) const SWEEP_EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// A pack less of which is live than 1 / this is packed again: below it, each byte that is read and
/// written frees more than one.
const LIVE_DIVISOR: u64 = 2;
/// Packs that are packed into one: each costs some requests.
const VICTIMS_MAX: usize = 16;
/// If packs could not be packed again so often, they leave as they are.
const REPACK_TRIES: u32 = 3;

impl Keeper {
    pub(super) async fn tend(&mut self) {
        self.expire();
        let (now, deadline) = (self.core.now_unix_ms(), Instant::now() + LOG_DEADLINE);
        let grace = self.core.config.delete_grace;
        let Some(log) = &mut self.log else { return };
        let sweeps = self.sweep_at <= Instant::now();
        let (mut more, mut deleted) = (false, Vec::new());
        let tended = async {
            if sweeps {
                log.sweep(now, deadline).await?;
            }
            deleted = log.collect(now, grace, deadline).await?.packs;
            // One step: who removes something waits meanwhile.
            more = log.needs_compaction() && log.compact(now, deadline).await?;
            Ok::<_, OwnerError>(())
        };
        let tended = tended.await;
        // Also if something failed after it.
        self.room.deleted(&deleted);
        self.core.metrics.deleted_packs.inc_by(u64::try_from(deleted.len()).unwrap_or(0));
        match tended {
            Ok(()) if sweeps => self.sweep_at = Instant::now() + SWEEP_EVERY,
            Ok(()) => {}
            Err(error) if self.ends(&error) => {}
            Err(error) => tracing::warn!(%error, "object garbage stays for now"),
        }
        self.tend_at = Instant::now() + if more { TEND_AGAIN } else { tend_every(grace) };
        if self.is_ward() {
            self.give_up_if_empty().await;
        }
    }

    /// Drops packs without a live block, and has what stays of the next others packed again.
    fn expire(&mut self) {
        let mut packs = self.packs();
        if self.is_ward() {
            return self.expire_ward(&packs);
        }
        let dead = packs.extract_if(.., |pack| pack.live_blocks == 0);
        let dead = dead.map(|pack| pack.number).collect();
        self.drop_packs(&dead);
        if !self.victims.is_empty() {
            return;
        }
        let overfull = self.room.overfull(self.live_bytes());
        if overfull > 0 {
            // There is no place for what would stay of them.
            let going = self.coldest_as_they_are(&packs, overfull);
            self.drop_packs(&going);
            return;
        }
        // In the order of their numbers: so they lie in the new pack, too.
        let mut victims = self.old_or_empty(&packs);
        if victims.is_empty() {
            victims = self.coldest(&packs);
        }
        let numbers = victims.iter().map(|victim| victim.number).collect();
        if !victims.is_empty() && self.core.repacks.try_send(victims).is_ok() {
            self.victims = numbers;
        }
    }

    /// Drops what is too old of a ward, and the coldest while there is too much. Nothing of it is packed
    /// again, because only its own node makes packs in its name; and a pack without a live block stays:
    /// it may be so only because this node has the blocks elsewhere, too.
    fn expire_ward(&mut self, packs: &[Summary]) {
        let old = packs.iter().filter(|pack| self.is_old(pack)).map(|pack| pack.number);
        let mut going: HashSet<_> = old.collect();
        let excess = self.room.excess(self.live_bytes(), self.core.now_unix_ms());
        if excess > 0 {
            going.extend(self.coldest_as_they_are(packs, excess));
        }
        self.drop_packs(&going);
    }

    /// All packs of the ordinal.
    pub(super) fn packs(&self) -> Vec<Summary> {
        self.core.catalog.packs_of(self.seat.owner.ordinal)
    }

    /// Their bytes.
    pub(super) fn live_bytes(&self) -> u64 {
        self.packs().iter().map(|pack| pack.info.bytes).sum()
    }

    fn is_old(&self, pack: &Summary) -> bool {
        let age_ms = self.core.now_unix_ms().saturating_sub(pack.info.created_unix_ms);
        self.core.config.ttl.is_some_and(|ttl| age_ms > millis(ttl))
    }

    /// The first of the packs that are too old: what was used since they were made stays. And of those
    /// that are half empty: all that is live stays.
    fn old_or_empty(&self, packs: &[Summary]) -> Vec<Victim> {
        let victims = packs.iter().filter_map(|pack| {
            let hot_from = if self.is_old(pack) {
                pack.info.made_at
            } else if pack.live_bytes < pack.data_bytes / LIVE_DIVISOR {
                0
            } else {
                return None;
            };
            let bytes_max = self.core.config.pack_bytes;
            Some(Victim { number: pack.number, hot_from, bytes_max })
        });
        victims.take(VICTIMS_MAX).collect()
    }

    /// While there are too many packs: those that are missed the least.
    fn coldest(&mut self, packs: &[Summary]) -> Vec<Victim> {
        let excess = self.room.excess(self.live_bytes(), self.core.now_unix_ms());
        if excess == 0 {
            return Vec::new();
        }
        let limits = (excess, self.core.config.pack_bytes, VICTIMS_MAX);
        let Coldest { packs: chosen, cold } = self.coldest_of(packs, limits);
        let chosen = packs.iter().filter(|pack| chosen.contains(&pack.number));
        let victim = |pack: &Summary| Victim {
            number: pack.number,
            hot_from: cold + 1,
            bytes_max: pack.data_bytes / KEPT_DIVISOR,
        };
        chosen.map(victim).collect()
    }

    fn coldest_of(&mut self, packs: &[Summary], limits: (u64, u64, usize)) -> Coldest {
        self.heat.refresh(self.core.above().as_deref(), packs);
        self.heat.coldest(packs, limits)
    }

    /// The coldest packs, of which nothing stays, so that `excess` bytes are free.
    fn coldest_as_they_are(&mut self, packs: &[Summary], excess: u64) -> HashSet<PackNumber> {
        let bytes: HashMap<_, _> =
            packs.iter().map(|pack| (pack.number, pack.info.bytes)).collect();
        let coldest = self.coldest_of(packs, (excess, u64::MAX, usize::MAX));
        let mut freed = 0;
        let going = coldest.packs.into_iter().take_while(|number| {
            let is_needed = freed < excess;
            freed += bytes.get(number).copied().unwrap_or(0);
            is_needed
        });
        going.collect()
    }

    /// The pack goes that is missed the least. Nothing of it is packed again: there are too many blocks.
    pub(super) fn shed(&mut self) {
        let coldest = self.coldest_of(&self.packs(), (u64::MAX, 0, 1));
        self.drop_packs(&coldest.packs.into_iter().collect());
    }

    /// What stays of these packs was packed again, and is named; none if that has failed.
    pub(super) fn repacked(&mut self, emptied: Option<Vec<PackNumber>>) {
        let victims = std::mem::take(&mut self.victims);
        if self.log.is_none() {
            // They are another's now.
            return;
        }
        if let Some(emptied) = emptied {
            self.repack_failures = 0;
            self.drop_packs(&emptied.into_iter().collect());
            // There may be more.
            self.tend_at = Instant::now();
            return;
        }
        self.repack_failures += 1;
        if self.repack_failures >= REPACK_TRIES {
            self.repack_failures = 0;
            self.drop_packs(&victims);
        }
    }

    /// The object of a pack is not there: somebody has deleted it.
    pub(super) fn lose(&mut self, number: PackNumber) {
        for info in self.drop_packs(&HashSet::from([number])) {
            self.core.metrics.lost_packs.inc();
            tracing::warn!(pack = info.name, "object pack is gone");
        }
    }

    /// Packs leave: nobody finds their blocks any more, and the log says so. Returns those that were
    /// there.
    pub(super) fn drop_packs(&mut self, numbers: &HashSet<PackNumber>) -> Vec<Arc<PackInfo>> {
        let (dropped, blocks) = self.take_out(numbers);
        self.core.metrics.collected_blocks.inc_by(blocks);
        for info in &dropped {
            self.core.metrics.dropped_packs.inc();
            self.room.dropped(info.id, info.bytes);
            self.note(ManifestRecord::Dropped(info.id));
        }
        dropped
    }

    /// Nobody finds the blocks of these packs here any more. Returns the packs that were there, and how
    /// many blocks.
    pub(super) fn take_out(&self, numbers: &HashSet<PackNumber>) -> (Vec<Arc<PackInfo>>, u64) {
        let taken = numbers.iter().filter_map(|number| self.core.catalog.remove(*number));
        let taken: Vec<_> = taken.collect();
        let mut blocks = 0;
        if let Some(above) = self.core.above().filter(|_| !taken.is_empty()) {
            let gone = &mut |location| numbers.contains(&PackNumber::of(location).0);
            blocks = above.gone(Tier::Object, gone);
        }
        (taken, blocks)
    }
}
