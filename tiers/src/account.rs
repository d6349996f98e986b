//! What each tenant has on each tier, and what it may have there.
//!
//! A tenant has one account for as long as the process lives, made with its first namespace or its first
//! quota. It counts bytes where the tiers themselves do: memory when a slot is taken and given back, copies
//! on colder tiers when the map learns of them. So the accounts together say what the tiers say.
//!
//! A tenant with a quota has a *lane*: an eviction order of its own for each slot size, so that whoever
//! makes room asks of each tenant only whether it may lose a block, and never walks over blocks that may
//! not leave. All tenants without one share lane 0, and a node without quotas has no other.
//!
//! - `dram_max`, `nvme_max`, `object_max`: no more than that is admitted.
//! - `dram_floor`, `nvme_floor`: what others leave alone. A block that is evicted is counted as leaving before
//!   it is gone, so that two who make room at the same time do not both take the last one above a floor.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering},
    },
};

use parking_lot::RwLock;

use crate::{
    error::{Error, Result},
    limits::LANES_MAX,
    tier::Tier,
};

/// The lane of everybody who has no quota.
pub(crate) const SHARED_LANE: u16 = 0;

/// What a tenant may have, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// Slots of dram that others leave alone.
    pub dram_floor: u64,
    /// Slots of dram that it has at most, whatever for.
    pub dram_max: u64,
    /// Bytes of blocks on nvme that reclaiming keeps if it can.
    pub nvme_floor: u64,
    /// Bytes of blocks beyond which nothing more is copied to nvme.
    pub nvme_max: u64,
    /// Bytes of blocks beyond which nothing more is packed for the object tier.
    pub object_max: u64,
}

impl Default for Quota {
    /// Nothing is kept for it, and nothing is kept from it.
    fn default() -> Self {
        let none = u64::MAX;
        Self { dram_floor: 0, dram_max: none, nvme_floor: 0, nvme_max: none, object_max: none }
    }
}

/// What a tenant has, and what was kept from it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Holding {
    /// Bytes by tier, hot to cold: of slots in dram, of blocks on the others.
    pub bytes: [u64; 3],
    /// Blocks that its quota kept from a tier since the start, hot to cold.
    pub refused: [u64; 3],
}

/// The account of one tenant.
#[derive(Debug)]
pub struct Account {
    number: u32,
    tenant: Box<str>,
    lane: AtomicU16,
    /// Changed under the pool's lock only.
    dram: AtomicU64,
    /// Of those, bytes of blocks that are being evicted.
    leaving: AtomicU64,
    /// Copies on nvme and on object.
    colder: [AtomicU64; 2],
    /// Bytes that are being copied to nvme.
    copying: AtomicU64,
    refused: [AtomicU64; 3],
    dram_floor: AtomicU64,
    dram_max: AtomicU64,
    nvme_floor: AtomicU64,
    nvme_max: AtomicU64,
    object_max: AtomicU64,
}

/// A block of an account that is being evicted, until its memory has gone back.
#[derive(Debug)]
pub(crate) struct Leaving {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Leaving {
    fn drop(&mut self) {
        self.account.leaving.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

/// A copy to nvme that is being made, until the map knows of it or it has failed.
#[derive(Debug)]
pub(crate) struct Admitted {
    account: Arc<Account>,
    bytes: u64,
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.account.copying.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

impl Account {
    /// Whose it is.
    #[must_use]
    pub fn tenant(&self) -> &str {
        &self.tenant
    }

    fn new(number: u32, tenant: &str) -> Self {
        let quota = Quota::default();
        Self {
            number,
            tenant: tenant.into(),
            lane: AtomicU16::new(SHARED_LANE),
            dram: AtomicU64::new(0),
            leaving: AtomicU64::new(0),
            colder: Default::default(),
            copying: AtomicU64::new(0),
            refused: Default::default(),
            dram_floor: AtomicU64::new(quota.dram_floor),
            dram_max: AtomicU64::new(quota.dram_max),
            nvme_floor: AtomicU64::new(quota.nvme_floor),
            nvme_max: AtomicU64::new(quota.nvme_max),
            object_max: AtomicU64::new(quota.object_max),
        }
    }

    /// What it may have.
    #[must_use]
    pub fn quota(&self) -> Quota {
        // Relaxed throughout: each bound holds by itself.
        Quota {
            dram_floor: self.dram_floor.load(Ordering::Relaxed),
            dram_max: self.dram_max.load(Ordering::Relaxed),
            nvme_floor: self.nvme_floor.load(Ordering::Relaxed),
            nvme_max: self.nvme_max.load(Ordering::Relaxed),
            object_max: self.object_max.load(Ordering::Relaxed),
        }
    }

    fn set_quota(&self, quota: Quota) {
        self.dram_floor.store(quota.dram_floor, Ordering::Relaxed);
        self.dram_max.store(quota.dram_max, Ordering::Relaxed);
        self.nvme_floor.store(quota.nvme_floor, Ordering::Relaxed);
        self.nvme_max.store(quota.nvme_max, Ordering::Relaxed);
        self.object_max.store(quota.object_max, Ordering::Relaxed);
    }

    /// Whether it has a quota, or had one since the start.
    #[must_use]
    pub fn has_had_quota(&self) -> bool {
        self.lane() != SHARED_LANE
    }

    /// What it has now.
    #[must_use]
    pub fn holding(&self) -> Holding {
        Holding {
            bytes: Tier::ALL.map(|tier| self.on(tier).load(Ordering::Relaxed)),
            refused: self.refused.each_ref().map(|count| count.load(Ordering::Relaxed)),
        }
    }

    /// Its number in the table.
    pub(crate) fn number(&self) -> u32 {
        self.number
    }

    /// Where its blocks stand in line.
    pub(crate) fn lane(&self) -> u16 {
        self.lane.load(Ordering::Relaxed)
    }

    fn on(&self, tier: Tier) -> &AtomicU64 {
        let [nvme, object] = &self.colder;
        match tier {
            Tier::Dram => &self.dram,
            Tier::Nvme => nvme,
            Tier::Object => object,
        }
    }

    /// Counts bytes on a tier in or out.
    pub(crate) fn count(&self, tier: Tier, bytes: u64, added: bool) {
        if added {
            self.on(tier).fetch_add(bytes, Ordering::AcqRel);
        } else {
            self.on(tier).fetch_sub(bytes, Ordering::AcqRel);
        }
    }

    /// A block was kept from a tier by the quota.
    pub(crate) fn refuse(&self, tier: Tier) {
        let [dram, nvme, object] = &self.refused;
        let count = match tier {
            Tier::Dram => dram,
            Tier::Nvme => nvme,
            Tier::Object => object,
        };
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes of dram that it has and keeps.
    fn kept(&self) -> u64 {
        // Leaving first: it goes down only after the memory has been counted out.
        let leaving = self.leaving.load(Ordering::Acquire);
        self.dram.load(Ordering::Acquire).saturating_sub(leaving)
    }

    /// Whether `bytes` more of dram are within its quota. Exact under the pool's lock.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let has = self.dram.load(Ordering::Acquire);
        has.saturating_add(bytes) <= self.dram_max.load(Ordering::Relaxed)
    }

    /// Bytes of dram that have to leave before it may have `bytes` more.
    pub(crate) fn over(&self, bytes: u64) -> u64 {
        self.kept().saturating_add(bytes).saturating_sub(self.dram_max.load(Ordering::Relaxed))
    }

    /// Whether it has so little dram that `bytes` more are its due.
    fn is_below_floor(&self, bytes: u64) -> bool {
        self.kept().saturating_add(bytes) <= self.dram_floor.load(Ordering::Relaxed)
    }

    /// Whether others may take `bytes` of dram from it.
    fn may_lose(&self, bytes: u64) -> bool {
        let floor = self.dram_floor.load(Ordering::Relaxed);
        floor == 0 || self.kept() >= floor.saturating_add(bytes)
    }

    fn leave(self: &Arc<Self>, bytes: u64) -> Leaving {
        self.leaving.fetch_add(bytes, Ordering::AcqRel);
        Leaving { account: Arc::clone(self), bytes }
    }

    /// What it has on nvme beyond what is kept for it; none if nothing is.
    pub(crate) fn nvme_above_floor(&self) -> Option<u64> {
        let floor = self.nvme_floor.load(Ordering::Relaxed);
        let has = self.on(Tier::Nvme).load(Ordering::Relaxed);
        (floor > 0).then(|| has.saturating_sub(floor))
    }

    /// Takes part of its quota on nvme for a copy; none if it has none left. Counted.
    pub(crate) fn admit_to_nvme(self: &Arc<Self>, bytes: u64) -> Option<Admitted> {
        let copying = self.copying.fetch_add(bytes, Ordering::AcqRel).saturating_add(bytes);
        let admitted = Admitted { account: Arc::clone(self), bytes };
        let has = self.on(Tier::Nvme).load(Ordering::Acquire);
        if has.saturating_add(copying) <= self.nvme_max.load(Ordering::Relaxed) {
            return Some(admitted);
        }
        self.refuse(Tier::Nvme);
        None
    }

    /// Whether `bytes` more on the object tier are within its quota. Counted if not.
    pub(crate) fn admits_to_object(&self, bytes: u64) -> bool {
        let has = self.on(Tier::Object).load(Ordering::Relaxed);
        let fits = has.saturating_add(bytes) <= self.object_max.load(Ordering::Relaxed);
        if !fits {
            self.refuse(Tier::Object);
        }
        fits
    }
}

/// Those who have a lane of their own, from lane 1 on.
type Lanes = Arc<[Arc<Account>]>;

#[derive(Debug, Default)]
struct Table {
    by_tenant: HashMap<Box<str>, Arc<Account>>,
    by_number: Vec<Arc<Account>>,
    lanes: Lanes,
}

/// The accounts of all tenants. Number 0 is nobody's.
#[derive(Debug)]
pub struct Accounts {
    table: RwLock<Table>,
    has_floors: AtomicBool,
}

impl Default for Accounts {
    fn default() -> Self {
        let nobody = Arc::new(Account::new(0, ""));
        let table = Table { by_number: vec![nobody], ..Table::default() };
        Self { table: RwLock::new(table), has_floors: AtomicBool::new(false) }
    }
}

impl Accounts {
    /// The account of a tenant, made now if there is none.
    #[must_use]
    pub fn of(&self, tenant: &str) -> Arc<Account> {
        if let Some(known) = self.table.read().by_tenant.get(tenant) {
            return Arc::clone(known);
        }
        self.table.write().of(tenant)
    }

    /// Stands for whatever belongs to no tenant.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn nobody(&self) -> Arc<Account> {
        self.by_number(0).unwrap_or_else(|| Arc::new(Account::new(0, "")))
    }

    /// All accounts, in the order in which they were made.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Account>> {
        self.table.read().by_number.get(1..).unwrap_or_default().to_vec()
    }

    /// The account with this number.
    pub(crate) fn by_number(&self, number: u32) -> Option<Arc<Account>> {
        self.table.read().by_number.get(usize::try_from(number).ok()?).cloned()
    }

    /// Whether anything is kept for anybody.
    pub(crate) fn has_floors(&self) -> bool {
        self.has_floors.load(Ordering::Relaxed)
    }

    /// Gives tenants these quotas and all others none. Returns whether somebody has a new lane.
    ///
    /// # Errors
    /// `Invalid` if there would be more lanes than there may be; then nothing changes. Lanes stay for as
    /// long as the process lives.
    pub(crate) fn set_quotas(&self, quotas: &[(&str, Quota)]) -> Result<bool> {
        let mut table = self.table.write();
        let accounts: Vec<_> =
            quotas.iter().map(|(tenant, quota)| (table.of(tenant), *quota)).collect();
        let new = accounts.iter().filter(|(account, _)| account.lane() == SHARED_LANE);
        let mut lanes = table.lanes.to_vec();
        lanes.extend(new.map(|(account, _)| Arc::clone(account)));
        if lanes.len() > LANES_MAX {
            return Err(Error::invalid(format!(
                "{} tenants have or had quotas since the start, at most {LANES_MAX} allowed",
                lanes.len()
            )));
        }
        let grown = lanes.len() > table.lanes.len();
        for (lane, account) in (1..).zip(&lanes) {
            account.lane.store(lane, Ordering::Relaxed);
        }
        for account in table
            .by_number
            .iter()
            .filter(|account| !accounts.iter().any(|(given, _)| Arc::ptr_eq(given, account)))
        {
            account.set_quota(Quota::default());
        }
        accounts.iter().for_each(|(account, quota)| account.set_quota(*quota));
        table.lanes = lanes.into();
        let floors = quotas.iter().any(|(_, quota)| quota.dram_floor > 0 || quota.nvme_floor > 0);
        self.has_floors.store(floors, Ordering::Relaxed);
        Ok(grown)
    }

    /// Whose blocks may make room for one of `own` with so many bytes.
    pub(crate) fn choice<'a>(&self, own: &'a Account, bytes: u64) -> Choice<'a> {
        let lanes = Arc::clone(&self.table.read().lanes);
        let whose = if own.is_below_floor(bytes) { Whose::Others } else { Whose::Anybody };
        Choice { own, lanes, whose }
    }
}

impl Table {
    fn of(&mut self, tenant: &str) -> Arc<Account> {
        if let Some(known) = self.by_tenant.get(tenant) {
            return Arc::clone(known);
        }
        let number = u32::try_from(self.by_number.len()).unwrap_or(u32::MAX);
        let account = Arc::new(Account::new(number, tenant));
        self.by_tenant.insert(tenant.into(), Arc::clone(&account));
        self.by_number.push(Arc::clone(&account));
        account
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    /// Of everybody who is above its floor, and its own.
    Anybody,
    /// Not its own: it is below its floor.
    Others,
    /// Its own only: it is at its most.
    Own,
}

/// Whose blocks may leave for a block of somebody.
#[derive(Debug)]
pub(crate) struct Choice<'a> {
    own: &'a Account,
    lanes: Lanes,
    whose: Whose,
}

impl Choice<'_> {
    /// The same, but only its own blocks.
    pub(crate) fn own_only(self) -> Self {
        Self { whose: Whose::Own, ..self }
    }

    /// Whether only its own blocks may leave.
    pub(crate) fn is_own_only(&self) -> bool {
        self.whose == Whose::Own
    }

    /// Whether its own blocks are left out.
    pub(crate) fn leaves_own_out(&self) -> bool {
        self.whose == Whose::Others
    }

    /// Whether a block of so many bytes in a lane may leave.
    pub(crate) fn may(&self, lane: u16, bytes: usize) -> bool {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let is_own = lane == self.own.lane();
        match self.whose {
            Whose::Own => is_own,
            Whose::Others if is_own && lane != SHARED_LANE => false,
            Whose::Anybody if is_own => true,
            Whose::Anybody | Whose::Others => {
                self.account(lane).is_none_or(|account| account.may_lose(bytes))
            }
        }
    }

    /// Whether so many bytes of an account may leave.
    pub(crate) fn may_take(&self, account: &Account, bytes: u64) -> bool {
        let is_own = account.number == self.own.number;
        match self.whose {
            Whose::Own => is_own,
            Whose::Others if is_own => false,
            Whose::Anybody if is_own => true,
            Whose::Anybody | Whose::Others => account.may_lose(bytes),
        }
    }

    /// As [`may`](Self::may), and counts the block as leaving; none if it may not. Within it: none in the
    /// lane of those who have no floor.
    pub(crate) fn begin(&self, lane: u16, bytes: usize) -> Option<Option<Leaving>> {
        if !self.may(lane, bytes) {
            return None;
        }
        let Some(account) = self.account(lane) else { return Some(None) };
        let leaving = account.leave(u64::try_from(bytes).unwrap_or(u64::MAX));
        // Somebody else may have begun meanwhile: now it counts, as if this one had gone already.
        let is_own = lane == self.own.lane();
        (is_own || account.may_lose(0)).then_some(Some(leaving))
    }

    fn account(&self, lane: u16) -> Option<&Arc<Account>> {
        self.lanes.get(usize::from(lane.checked_sub(1)?))
    }
}
