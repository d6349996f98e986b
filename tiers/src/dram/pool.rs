//! Who has which extent: slots by size, lent out in extents and taken back across sizes.
//!
//! A *class* is one slot size. It borrows whole extents and hands out their slots; when it has none
//! left it borrows another extent, first one that nobody has, then one that lies idle in another
//! class. If there is neither, the caller evicts: a block of the same class, or everything in the
//! coldest extent of another class ([`Pool::coldest_elsewhere`]), which then lies idle. So no size
//! owns memory for ever, whatever the mix of models was yesterday.
//!
//! Each slot in use counts in an account, and each extent knows how much of it is whose: an extent that
//! others may not empty is no candidate.
//!
//! Why exact slot sizes and no power-of-two classes: an engine has one or two block sizes, and KV
//! blocks are seldom a power of two, so rounding up would waste a quarter of the tier.

use std::{
    collections::HashMap,
    fmt,
    os::fd::OwnedFd,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use super::arena::{BlockWriter, CarveView, Extent, FreeSlot, Home, Region, map_extents, rejoin};
use crate::{
    account::{Account, Accounts, Choice},
    error::{Error, ErrorKind, Result},
    gpu::HostMemory,
    limits::{BLOCK_BYTES_MAX, EXTENT_BYTES_MAX, EXTENT_BYTES_MIN, EXTENTS_MIN, REGION_BYTES_MAX},
    tier::Tier,
};

/// Slots are multiples of this when blocks are larger, so that direct I/O can use them as they are.
const PAGE_BYTES: u64 = 4096;
/// Slots of small blocks are multiples of this: a cache line.
const LINE_BYTES: u64 = 64;

/// The coldest extent of the other classes.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// Mean age (last use) of its blocks.
    pub(crate) mean_age: u64,
    /// The number of the extent.
    pub(crate) extent: u32,
    /// Slots of it that hold a block or are being written.
    pub(crate) slots_used: usize,
    /// The map entries in it; a slot that is being written, or that only a reader has, has none.
    pub(crate) owners: Vec<u64>,
}

/// An extent that a class has borrowed.
#[derive(Debug)]
struct Lent {
    slot_bytes: usize,
    slots: usize,
    free: Vec<FreeSlot>,
    view: CarveView,
    /// How many of its slots in use count in which account.
    accounts: Vec<(u32, u32)>,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// All of them are in use.
    Full,
    /// The account has what it may have.
    Quota,
}

#[derive(Debug, Default)]
struct State {
    /// Extents that nobody has; those to be lent next are at the end.
    spare: Vec<Extent>,
    /// Borrowed extents by their number.
    lent: HashMap<u32, Lent>,
    /// For each slot size: numbers of borrowed extents with a free slot.
    open: HashMap<usize, Vec<u32>>,
    slots_used_bytes: u64,
    reclaimed_extents: u64,
}

/// The dram tier's memory.
pub(crate) struct Pool {
    state: Mutex<State>,
    extent_bytes: u64,
    capacity_bytes: u64,
    regions: Vec<Arc<Region>>,
    accounts: Arc<Accounts>,
    me: Weak<Self>,
}

impl Pool {
    /// Maps an arena of at most `capacity_bytes`, in whole extents, whose slots count in `accounts`.
    ///
    /// # Errors
    /// `Invalid` if the capacity is below one smallest extent, `Unavailable` without memory.
    pub(crate) fn new(capacity_bytes: u64, accounts: Arc<Accounts>) -> Result<Arc<Self>> {
        let extent_bytes = extent_bytes(capacity_bytes);
        let extents = capacity_bytes / extent_bytes;
        if extents == 0 {
            return Err(Error::invalid(format!(
                "dram capacity: {capacity_bytes} bytes given, at least {EXTENT_BYTES_MIN} required"
            )));
        }
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut spare = map_extents(size(extents), size(extent_bytes), size(REGION_BYTES_MAX))?;
        spare.reverse();
        let regions = spare.iter().filter_map(Extent::region).collect();
        let state = Mutex::new(State { spare, ..State::default() });
        let capacity_bytes = extents * extent_bytes;
        Ok(Arc::new_cyclic(|me| {
            let me = Weak::clone(me);
            Self { state, extent_bytes, capacity_bytes, regions, accounts, me }
        }))
    }

    /// All of its memory, for who pins it.
    pub(crate) fn regions(&self) -> Vec<Arc<dyn HostMemory>> {
        self.regions.iter().map(|region| Arc::clone(region) as Arc<dyn HostMemory>).collect()
    }

    /// Descriptors of all of its memory in the order of the regions, to be read by other processes.
    ///
    /// # Errors
    /// `Unavailable` if the kernel cannot seal them against writers.
    pub(crate) fn share(&self) -> Result<Vec<OwnedFd>> {
        let shared: std::result::Result<_, _> =
            self.regions.iter().map(|one| one.share()).collect();
        shared.map_err(|errno| {
            Error::new(ErrorKind::Unavailable, "seal an arena region to be shared").because(errno)
        })
    }

    /// Bytes of all extents.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// Bytes of all slots that hold a block or are being written.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.state.lock().slots_used_bytes
    }

    /// Extents that went from one class to another, since the start.
    pub(crate) fn reclaimed_extents(&self) -> u64 {
        self.state.lock().reclaimed_extents
    }

    /// Bytes of one extent.
    pub(crate) fn extent_bytes(&self) -> u64 {
        self.extent_bytes
    }

    /// The longest block that fits into an extent.
    pub(crate) fn block_bytes_max(&self) -> u64 {
        self.extent_bytes.min(BLOCK_BYTES_MAX)
    }

    /// Backs one more spare extent with memory; false when there is none left to do.
    ///
    /// # Blocking
    /// Clears up to 64 MiB, outside the lock.
    pub(crate) fn pre_touch_step(&self) -> bool {
        let Some(mut extent) = self.state.lock().take_untouched() else { return false };
        extent.pre_touch();
        // Behind the others: the next ones to be lent are those that are backed already.
        self.state.lock().spare.push(extent);
        true
    }

    /// As [`allocate_for`](Self::allocate_for), for nobody.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn allocate(&self, slot_bytes: usize, lengths: &[u32]) -> Option<Vec<BlockWriter>> {
        self.allocate_for(&self.accounts.nobody(), slot_bytes, lengths).ok()
    }

    /// Takes a slot of `slot_bytes` that counts in `account` and splits it into parts, without evicting
    /// anything.
    pub(crate) fn allocate_for(
        &self,
        account: &Account,
        slot_bytes: usize,
        lengths: &[u32],
    ) -> Result<Vec<BlockWriter>, NoRoom> {
        let bytes = u64::try_from(slot_bytes).unwrap_or(u64::MAX);
        let mut state = self.state.lock();
        if !account.has_room(bytes) {
            return Err(NoRoom::Quota);
        }
        let lend_and_take = |state: &mut State| {
            let extent = state.spare.pop().or_else(|| state.take_idle(slot_bytes))?;
            state.lend(extent, slot_bytes, Weak::clone(&self.me) as Weak<dyn Home>);
            state.take_open(slot_bytes)
        };
        let slot = state.take_open(slot_bytes).or_else(|| lend_and_take(&mut state));
        let slot = slot.ok_or(NoRoom::Full)?;
        let extent = slot.extent();
        slot.set_account(account.number());
        match slot.take(lengths) {
            Ok(writers) => {
                state.slots_used_bytes += bytes;
                if let Some(lent) = state.lent.get_mut(&extent) {
                    lent.count(account.number(), true);
                }
                account.count(Tier::Dram, bytes, true);
                Ok(writers)
            }
            Err(slot) => {
                state.put_back(slot);
                Err(NoRoom::Full)
            }
        }
    }

    /// The extent of any class but `slot_bytes` whose blocks were used least recently on average,
    /// without those `passed_over` and those that may not be emptied by `choice`.
    pub(crate) fn coldest_elsewhere(
        &self,
        slot_bytes: usize,
        passed_over: &[u32],
        choice: Option<&Choice<'_>>,
    ) -> Option<Candidate> {
        let state = self.state.lock();
        let others = state.lent.iter().filter(|(extent, lent)| {
            lent.slot_bytes != slot_bytes
                && !passed_over.contains(extent)
                && choice.is_none_or(|choice| lent.may_be_emptied(&self.accounts, choice))
        });
        let used = others.filter_map(|(extent, lent)| {
            let slots_used = lent.slots.saturating_sub(lent.free.len());
            let mean_age = lent.view.ages().checked_div(u64::try_from(slots_used).ok()?)?;
            Some((mean_age, *extent, slots_used, lent))
        });
        let (mean_age, extent, slots_used, coldest) =
            used.min_by_key(|(mean_age, ..)| *mean_age)?;
        Some(Candidate { mean_age, extent, slots_used, owners: coldest.view.owners() })
    }

    /// Whether a block of `slot_bytes` could have an extent without evicting anything.
    pub(crate) fn has_idle(&self, slot_bytes: usize) -> bool {
        let state = self.state.lock();
        let idle = |lent: &Lent| lent.slot_bytes != slot_bytes && lent.free.len() == lent.slots;
        !state.spare.is_empty() || state.lent.values().any(idle)
    }

    /// Sum of the ages that the extents account for.
    #[cfg(test)]
    pub(crate) fn ages(&self) -> u64 {
        let state = self.state.lock();
        state.lent.values().fold(0, |sum, lent| sum.wrapping_add(lent.view.ages()))
    }

    /// How many slot sizes borrow extents.
    pub(crate) fn classes(&self) -> usize {
        self.state.lock().open.len()
    }
}

impl State {
    fn take_untouched(&mut self) -> Option<Extent> {
        let position = self.spare.iter().position(|extent| !extent.is_touched())?;
        Some(self.spare.remove(position))
    }

    fn take_open(&mut self, slot_bytes: usize) -> Option<FreeSlot> {
        let open = self.open.get_mut(&slot_bytes)?;
        let lent = self.lent.get_mut(open.last()?)?;
        let slot = lent.free.pop()?;
        if lent.free.is_empty() {
            // In a full arena the lists of free slots would cost 16 bytes a block.
            lent.free = Vec::new();
            open.pop();
        }
        Some(slot)
    }

    fn lend(&mut self, extent: Extent, slot_bytes: usize, home: Weak<dyn Home>) {
        let number = extent.index();
        let free = extent.carve(slot_bytes, home);
        let Some(view) = free.first().map(FreeSlot::view) else {
            return;
        };
        let (slots, accounts) = (free.len(), Vec::new());
        self.lent.insert(number, Lent { slot_bytes, slots, free, view, accounts });
        self.open.entry(slot_bytes).or_default().push(number);
    }

    /// Takes an extent from another class if one lies there with nothing in it.
    fn take_idle(&mut self, for_slot_bytes: usize) -> Option<Extent> {
        let (number, _) = self
            .lent
            .iter()
            .find(|(_, lent)| lent.slot_bytes != for_slot_bytes && lent.free.len() == lent.slots)?;
        let number = *number;
        let lent = self.lent.remove(&number)?;
        if let Some(open) = self.open.get_mut(&lent.slot_bytes) {
            open.retain(|candidate| *candidate != number);
            if open.is_empty() && !self.lent.values().any(|l| l.slot_bytes == lent.slot_bytes) {
                self.open.remove(&lent.slot_bytes);
            }
        }
        match rejoin(lent.free) {
            Ok(extent) => {
                self.reclaimed_extents += 1;
                Some(extent)
            }
            Err(free) => {
                self.open.entry(lent.slot_bytes).or_default().push(number);
                self.lent.insert(number, Lent { free, ..lent });
                None
            }
        }
    }

    fn put_back(&mut self, slot: FreeSlot) {
        let (number, slot_bytes) = (slot.extent(), slot.bytes());
        if let Some(lent) = self.lent.get_mut(&number) {
            lent.free.push(slot);
            if lent.free.len() == 1 {
                self.open.entry(slot_bytes).or_default().push(number);
            }
        }
    }
}

impl Lent {
    /// Counts a slot of an account in or out.
    fn count(&mut self, number: u32, added: bool) {
        let known = self.accounts.iter().position(|(other, _)| *other == number);
        match known.and_then(|at| Some((at, self.accounts.get_mut(at)?))) {
            None if added => self.accounts.push((number, 1)),
            None => {}
            Some((_, (_, slots))) if added => *slots += 1,
            Some((_, (_, slots))) if *slots > 1 => *slots -= 1,
            Some((at, _)) => drop(self.accounts.swap_remove(at)),
        }
    }

    fn may_be_emptied(&self, accounts: &Accounts, choice: &Choice<'_>) -> bool {
        let slot_bytes = u64::try_from(self.slot_bytes).unwrap_or(u64::MAX);
        self.accounts.iter().all(|(number, slots)| {
            let bytes = slot_bytes.saturating_mul(u64::from(*slots));
            accounts.by_number(*number).is_none_or(|account| choice.may_take(&account, bytes))
        })
    }
}

impl Home for Pool {
    fn release(&self, slot: FreeSlot) {
        let mut state = self.state.lock();
        let (bytes, number) = (u64::try_from(slot.bytes()).unwrap_or(0), slot.account());
        state.slots_used_bytes = state.slots_used_bytes.saturating_sub(bytes);
        if let Some(lent) = state.lent.get_mut(&slot.extent()) {
            lent.count(number, false);
        }
        if let Some(account) = self.accounts.by_number(number) {
            account.count(Tier::Dram, bytes, false);
        }
        state.put_back(slot);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} bytes in extents of {})", self.capacity_bytes, self.extent_bytes)
    }
}

/// The slot size for blocks of `len` bytes. Values of any length are put into four sizes for each
/// power of two, so that they make few classes.
pub(crate) fn slot_bytes(len: u32, any_length: bool) -> usize {
    let len = u64::from(len.max(1));
    let unit = if len < PAGE_BYTES { LINE_BYTES } else { PAGE_BYTES };
    let step = if any_length { (len.next_power_of_two() / 8).max(unit) } else { unit };
    usize::try_from(len.next_multiple_of(step)).unwrap_or(usize::MAX)
}

/// The extent size for an arena: small arenas get small extents, so that classes can trade them.
fn extent_bytes(capacity_bytes: u64) -> u64 {
    let share = (capacity_bytes / EXTENTS_MIN).max(1);
    let power = if share.is_power_of_two() { share } else { share.next_power_of_two() / 2 };
    power.clamp(EXTENT_BYTES_MIN, EXTENT_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{dram::arena::seal, limits::MIB};

    fn pool(bytes: u64) -> Result<Arc<Pool>> {
        Pool::new(bytes, Arc::default())
    }

    fn put(pool: &Pool, len: u32) -> Option<super::super::Payload> {
        seal(pool.allocate(slot_bytes(len, false), &[len])?, len).ok()
    }

    #[test]
    fn slot_sizes_waste_little() {
        assert_eq!(slot_bytes(1, false), 64);
        assert_eq!(slot_bytes(368_640, false), 368_640);
        assert_eq!(slot_bytes(368_641, false), 372_736);
        let sizes: std::collections::HashSet<_> =
            (4096..=8192).map(|len| slot_bytes(len, true)).collect();
        assert!(sizes.len() <= 5, "{sizes:?}");
        for len in [1, 63, 4095, 4097, 100_000, 1 << 26] {
            assert!(slot_bytes(len, true) >= usize::try_from(len).unwrap());
        }
    }

    #[test]
    fn the_arena_is_never_larger_than_asked() {
        for capacity in [MIB, 3 * MIB + 5, 74_870_784, 1000 * MIB] {
            let pool = pool(capacity).unwrap();
            let lost = capacity - pool.capacity_bytes();
            assert!(lost < EXTENT_BYTES_MIN.max(capacity / EXTENTS_MIN), "{capacity} lost {lost}");
        }
        assert!(pool(MIB - 1).is_err());
    }

    #[test]
    fn a_full_pool_refuses_and_takes_slots_back() {
        let pool = pool(2 * MIB).unwrap();
        let mut blocks: Vec<_> = std::iter::from_fn(|| put(&pool, 4096)).collect();
        assert_eq!((blocks.len(), pool.used_bytes()), (512, 2 * MIB));
        blocks.pop();
        assert!(put(&pool, 4096).is_some());
        blocks.clear();
        assert_eq!(pool.used_bytes(), 0);
    }

    #[test]
    fn idle_extents_go_to_the_class_that_needs_them() {
        let pool = pool(2 * MIB).unwrap();
        let small: Vec<_> = std::iter::from_fn(|| put(&pool, 4096)).collect();
        assert!(put(&pool, 1 << 20).is_none());
        drop(small);
        let large: Vec<_> = std::iter::from_fn(|| put(&pool, 1 << 20)).collect();
        assert_eq!((large.len(), pool.reclaimed_extents()), (2, 2));
        assert_eq!(pool.classes(), 1);
    }

    #[test]
    fn the_coldest_extent_of_the_others_is_found() {
        let pool = pool(2 * MIB).unwrap();
        let blocks: Vec<_> = std::iter::from_fn(|| put(&pool, 1 << 19)).collect();
        for (block, age) in blocks.iter().zip([10, 30, 1, 2]) {
            block.set_owner(age);
            block.change_age(0, age);
        }
        let coldest = pool.coldest_elsewhere(4096, &[], None).unwrap();
        assert_eq!((coldest.mean_age, coldest.slots_used), (1, 2));
        assert_eq!(coldest.owners.len(), 2);
        assert!(coldest.owners.contains(&2));
        let next = pool.coldest_elsewhere(4096, &[coldest.extent], None).unwrap();
        assert_eq!(next.mean_age, 20);
        assert!(pool.coldest_elsewhere(1 << 19, &[], None).is_none());
    }

    #[test]
    fn touching_goes_through_all_spare_extents_once() {
        let pool = pool(4 * MIB).unwrap();
        let held = put(&pool, 4096).unwrap();
        let steps = std::iter::from_fn(|| pool.pre_touch_step().then_some(())).count();
        assert_eq!(steps, 3);
        drop(held);
    }
}
