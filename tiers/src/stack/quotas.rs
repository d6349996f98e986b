//! What tenants may have of the tiers, and what is counted for them.

use std::{collections::HashMap, sync::Arc};

use super::{Shared, Stack};
use crate::{
    account::{Account, Quota, SHARED_LANE},
    error::{Error, Result},
    tier::Tier,
};

impl Stack {
    /// Gives tenants these quotas, from now on, and all others none. What one has beyond its quota stays
    /// until others, or its own puts, need the room.
    ///
    /// # Errors
    /// `Invalid` naming the tenant, the field, the value and the range; then nothing changes.
    ///
    /// # Blocking
    /// Walks the map, one shard after the other, when somebody has its first quota.
    pub fn set_quotas(&self, quotas: &[(&str, Quota)]) -> Result<()> {
        self.shared.check_quotas(quotas)?;
        if !self.shared.namespaces.accounts().set_quotas(quotas)? {
            return Ok(());
        }
        let namespaces = &self.shared.namespaces;
        self.shared.map.change_lanes(&|namespace| {
            namespaces.account_of(namespace).map_or(SHARED_LANE, |account| account.lane())
        });
        Ok(())
    }
}

impl Shared {
    fn check_quotas(&self, quotas: &[(&str, Quota)]) -> Result<()> {
        let nvme = self.store(Tier::Nvme).map_or(0, |store| match store.usage().capacity_bytes {
            // It has no bound of its own.
            0 => u64::MAX,
            bytes => bytes,
        });
        let dram = self.pool.capacity_bytes();
        let mut sums = [0_u64; 2];
        for (tenant, quota) in quotas {
            let floors = [
                ("dram_floor", quota.dram_floor, "dram_max", quota.dram_max),
                ("nvme_floor", quota.nvme_floor, "nvme_max", quota.nvme_max),
            ];
            for ((floor, value, most, max), sum) in floors.into_iter().zip(&mut sums) {
                if value > max {
                    return Err(Error::invalid(format!(
                        "tenant {tenant}: {floor}: {value} bytes given, 0 to {max} ({most}) allowed"
                    )));
                }
                *sum = sum.saturating_add(value);
            }
        }
        let tiers = [("dram_floor", dram, "dram"), ("nvme_floor", nvme, "the nvme tier")];
        for ((floor, capacity, tier), sum) in tiers.into_iter().zip(sums) {
            if sum > capacity {
                return Err(Error::invalid(format!(
                    "{floor}: {sum} bytes given to all tenants together, 0 to {capacity} (all of {tier}) \
                     allowed"
                )));
            }
        }
        Ok(())
    }

    /// A colder tier has a copy of so many bytes more or less.
    pub(super) fn count_copy(&self, tier: Tier, (namespace, len): (u32, u32), added: bool) {
        self.count_copies(tier, added);
        if let Some(account) = self.namespaces.account_of(namespace) {
            account.count(tier, u64::from(len), added);
        }
    }

    /// Makes those of `blocks` (namespace, bytes, last use) as hot as anything whose tenants would have less
    /// on nvme than is kept for them if they left: all but the coldest, as far as a tenant has more.
    pub(super) fn protect_on_nvme(&self, blocks: &mut [Option<(u32, u32, u64)>]) {
        if !self.namespaces.accounts().has_floors() {
            return;
        }
        let mut above: HashMap<u32, Option<u64>> = HashMap::new();
        let now = self.map.clock();
        let mut coldest_first: Vec<_> = blocks.iter_mut().flatten().collect();
        coldest_first.sort_by_key(|(_, _, age)| *age);
        for (namespace, len, age) in coldest_first {
            let Some(account) = self.account(*namespace) else { continue };
            let above = above.entry(account.number());
            let Some(left) = above.or_insert_with(|| account.nvme_above_floor()) else { continue };
            match left.checked_sub(u64::from(*len)) {
                Some(less) => *left = less,
                None => *age = now,
            }
        }
    }

    /// The accounts whose copies on nvme are all kept, by namespace: asked once for each.
    pub(super) fn all_kept_on_nvme(&self) -> impl FnMut(u32) -> bool {
        let has_floors = self.namespaces.accounts().has_floors();
        let namespaces = Arc::clone(&self.namespaces);
        let mut known: HashMap<u32, bool> = HashMap::new();
        move |namespace| {
            has_floors
                && *known.entry(namespace).or_insert_with(|| {
                    let account = namespaces.account_of(namespace);
                    account.and_then(|account| account.nvme_above_floor()) == Some(0)
                })
        }
    }

    /// The account of a namespace, for what is counted in many places.
    pub(super) fn account(&self, namespace: u32) -> Option<Arc<Account>> {
        self.namespaces.account_of(namespace)
    }
}
