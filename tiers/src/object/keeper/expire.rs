//! What leaves: packs that are too old or too many, and objects that nobody needs any more.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Keeper, LOG_DEADLINE, TEND_EVERY};
use crate::{
    object::{
        catalog::{PackInfo, PackNumber, Summary},
        format::ManifestRecord,
        owner::OwnerError,
    },
    tier::Tier,
};

/// When the next step of a compaction comes.
const TEND_AGAIN: Duration = Duration::from_millis(100);
/// How often it is looked for packs that nobody will name any more: the names of all are listed for it.
pub(super) const SWEEP_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

impl Keeper {
    pub(super) async fn tend(&mut self) {
        self.expire();
        let (now, deadline) = (self.core.now_unix_ms(), Instant::now() + LOG_DEADLINE);
        let grace = self.core.config.delete_grace;
        let Some(log) = &mut self.log else { return };
        let sweeps = self.sweep_at <= Instant::now();
        let mut more = false;
        let collected = async {
            if sweeps {
                log.sweep(now, deadline).await?;
            }
            let collected = log.collect(now, grace, deadline).await?;
            // One step: who removes something waits meanwhile.
            more = log.needs_compaction() && log.compact(now, deadline).await?;
            Ok::<_, OwnerError>(collected)
        };
        match collected.await {
            Ok(collected) => {
                let packs = u64::try_from(collected.packs.len()).unwrap_or(0);
                self.core.metrics.deleted_packs.inc_by(packs);
                if sweeps {
                    self.sweep_at = Instant::now() + SWEEP_EVERY;
                }
            }
            Err(error) if self.ends(&error) => {}
            Err(error) => tracing::warn!(%error, "object garbage stays for now"),
        }
        self.tend_at = Instant::now() + if more { TEND_AGAIN } else { self.tend_every() };
        if self.is_ward() {
            self.give_up_if_empty().await;
        }
    }

    /// How often that is.
    pub(super) fn tend_every(&self) -> Duration {
        TEND_EVERY.min(self.core.config.delete_grace)
    }

    /// Drops packs that are too old, and the coldest while there are too many.
    fn expire(&mut self) {
        let config = &self.core.config;
        let ttl_ms = config.ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        let now = self.core.now_unix_ms();
        let packs = self.packs();
        // What a ward has may not be live only because this node has it elsewhere, too.
        let is_own = !self.is_ward();
        let old = packs.iter().filter(|pack| {
            let age_ms = now.saturating_sub(pack.info.created_unix_ms);
            ttl_ms.is_some_and(|ttl_ms| age_ms > ttl_ms) || (is_own && pack.live_blocks == 0)
        });
        let old = old.map(|pack| pack.number).collect();
        self.drop_packs(&old);
        let capacity = self.core.config.capacity_bytes;
        let bytes: u64 = self.packs().iter().map(|pack| pack.info.bytes).sum();
        let mut over = bytes.saturating_sub(capacity);
        if capacity == 0 || over == 0 {
            return;
        }
        let mut coldest = HashSet::new();
        for (number, bytes) in self.by_heat() {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(bytes);
            coldest.insert(number);
        }
        self.drop_packs(&coldest);
    }

    /// All packs of the ordinal.
    pub(super) fn packs(&self) -> Vec<Summary> {
        self.core.catalog.packs_of(self.seat.owner.ordinal)
    }

    /// All packs with their bytes, the one first whose blocks were used the longest ago.
    fn by_heat(&self) -> Vec<(PackNumber, u64)> {
        let mut hottest: HashMap<PackNumber, u64> = HashMap::new();
        let Some(above) = self.core.above() else { return Vec::new() };
        above.survey(Tier::Object, &mut |location, _len, age| {
            let known = hottest.entry(PackNumber::of(location).0).or_default();
            *known = age.max(*known);
        });
        let mut packs = self.packs();
        packs.sort_by_key(|pack| (hottest.get(&pack.number).copied().unwrap_or(0), pack.number));
        packs.into_iter().map(|pack| (pack.number, pack.info.bytes)).collect()
    }

    /// The pack goes whose blocks were used the longest ago.
    pub(super) fn shed(&mut self) {
        let coldest = self.by_heat().into_iter().take(1).map(|(number, _)| number);
        self.drop_packs(&coldest.collect());
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
