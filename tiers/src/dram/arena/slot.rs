//! Slots of a carved extent: free, being written, sealed.
#![expect(unsafe_code, reason = "hands out slices of the arena; see the essay of the parent")]

use std::{
    fmt,
    mem::ManuallyDrop,
    ptr::NonNull,
    slice,
    sync::{
        Arc, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use super::region::Extent;

/// References to one slot. Far more would not fit into memory, unless they were leaked.
const REFERENCES_MAX: u32 = u32::MAX / 2;

/// Where slots go when the last reference to them is dropped.
pub(crate) trait Home: fmt::Debug + Send + Sync {
    /// Takes the slot back. Called from destructors: must not block for long and must not panic.
    fn release(&self, slot: FreeSlot);
}

/// An extent in use: its slots, who refers to them, who owns them.
pub(super) struct Carve {
    extent: Extent,
    slot_bytes: usize,
    /// For each slot: writers, or payloads, that exist.
    references: Box<[AtomicU32]>,
    /// For each slot: the map entry that the block belongs to, plus one; 0 for none.
    owners: Box<[AtomicU64]>,
    /// For each slot: the number of the account that it counts in.
    accounts: Box<[AtomicU32]>,
    /// Sum of the ages (last use) of the blocks in the map; wraps, differences are exact.
    ages: AtomicU64,
    home: Weak<dyn Home>,
}

impl Carve {
    /// The accounts of `extent`, cut into `slots` slots.
    ///
    /// The caller has checked that `slots * slot_bytes` is at most the length of the extent.
    pub(super) fn new(extent: Extent, slots: u32, slot_bytes: usize, home: Weak<dyn Home>) -> Self {
        Self {
            references: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            owners: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            accounts: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            ages: AtomicU64::new(0),
            extent,
            slot_bytes,
            home,
        }
    }

    /// All slots, last one first: the first taken from the end of the list is the first in memory.
    ///
    /// Sound only while no other slot, writer or payload of this carve exists, which both callers
    /// (a fresh carve, a refused rejoin that consumed all slots) guarantee.
    pub(super) fn free_slots(carve: &Arc<Self>) -> Vec<FreeSlot> {
        let count = u32::try_from(carve.references.len()).unwrap_or(u32::MAX);
        (0..count).rev().map(|slot| FreeSlot { carve: Arc::clone(carve), slot }).collect()
    }

    fn count(&self, slot: u32) -> Option<&AtomicU32> {
        self.references.get(usize::try_from(slot).ok()?)
    }

    fn owner(&self, slot: u32) -> Option<&AtomicU64> {
        self.owners.get(usize::try_from(slot).ok()?)
    }

    fn set_owner(&self, slot: u32, entry: u64) {
        if let Some(owner) = self.owner(slot) {
            owner.store(entry.wrapping_add(1), Ordering::Relaxed);
        }
    }

    fn address(&self, slot: u32, offset: u32) -> NonNull<u8> {
        let slot = usize::try_from(slot).unwrap_or(usize::MAX);
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        // SAFETY: slots are numbered below `extent.len / slot_bytes` by `carve` and offsets lie
        // within a slot by `take`, so the address is inside the extent.
        unsafe { self.extent.base().add(slot * self.slot_bytes + offset) }
    }

    /// Gives back one reference; with the last one the slot goes home.
    fn give_back(self: Arc<Self>, slot: u32) {
        let Some(count) = self.count(slot) else {
            return;
        };
        // Release: our reads and writes happen before the slot is used again.
        if count.fetch_sub(1, Ordering::Release) != 1 {
            return;
        }
        // Acquire: those of all other holders do too.
        fence(Ordering::Acquire);
        if let Some(owner) = self.owner(slot) {
            owner.store(0, Ordering::Relaxed);
        }
        if let Some(home) = self.home.upgrade() {
            home.release(FreeSlot { carve: self, slot });
        }
    }
}

/// A view of one carved extent that keeps nothing alive, for choosing what to reclaim.
pub(crate) struct CarveView(Weak<Carve>);

impl CarveView {
    /// Sum of the ages of the blocks in it.
    pub(crate) fn ages(&self) -> u64 {
        self.0.upgrade().map_or(0, |carve| carve.ages.load(Ordering::Relaxed))
    }

    /// The map entries that own its slots.
    pub(crate) fn owners(&self) -> Vec<u64> {
        let Some(carve) = self.0.upgrade() else {
            return Vec::new();
        };
        let owners = carve.owners.iter().map(|owner| owner.load(Ordering::Relaxed));
        owners.filter_map(|owner| owner.checked_sub(1)).collect()
    }
}

impl fmt::Debug for CarveView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CarveView")
    }
}

/// An owned slot that holds no block.
pub(crate) struct FreeSlot {
    carve: Arc<Carve>,
    slot: u32,
}

impl FreeSlot {
    /// The extent it lies in.
    pub(crate) fn extent(&self) -> u32 {
        self.carve.extent.index()
    }

    /// Its length, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.carve.slot_bytes
    }

    /// Notes the account that it counts in until it is home again.
    pub(crate) fn set_account(&self, number: u32) {
        if let Some(account) = self.account_place() {
            account.store(number, Ordering::Relaxed);
        }
    }

    /// The account that it counted in last.
    pub(crate) fn account(&self) -> u32 {
        self.account_place().map_or(0, |account| account.load(Ordering::Relaxed))
    }

    fn account_place(&self) -> Option<&AtomicU32> {
        self.carve.accounts.get(usize::try_from(self.slot).ok()?)
    }

    /// Looks at the carved extent without keeping it.
    pub(crate) fn view(&self) -> CarveView {
        CarveView(Arc::downgrade(&self.carve))
    }

    /// Splits the slot into one writer per part, one behind the other; gives the slot back if the
    /// parts do not fit or there are none.
    pub(crate) fn take(self, lengths: &[u32]) -> Result<Vec<BlockWriter>, Self> {
        let total: u64 = lengths.iter().copied().map(u64::from).sum();
        let parts = u32::try_from(lengths.len()).unwrap_or(u32::MAX);
        let fits = usize::try_from(total).is_ok_and(|total| total <= self.carve.slot_bytes);
        let Some(count) = self.carve.count(self.slot) else {
            return Err(self);
        };
        if parts == 0 || !fits {
            return Err(self);
        }
        // Relaxed: the slot is ours alone until the writers are handed on.
        count.store(parts, Ordering::Relaxed);
        let mut offset = 0;
        let mut writers = Vec::with_capacity(lengths.len());
        for len in lengths {
            let carve = ManuallyDrop::new(Arc::clone(&self.carve));
            writers.push(BlockWriter { carve, slot: self.slot, offset, len: *len });
            offset += len;
        }
        Ok(writers)
    }
}

impl fmt::Debug for FreeSlot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FreeSlot({}/{})", self.extent(), self.slot)
    }
}

/// Returns the extent that `slots` were carved from, or the slots if one of them is still in use.
pub(crate) fn rejoin(mut slots: Vec<FreeSlot>) -> Result<Extent, Vec<FreeSlot>> {
    let all_home = slots.first().is_some_and(|first| {
        slots.len() == first.carve.references.len()
            && slots.iter().all(|slot| Arc::ptr_eq(&slot.carve, &first.carve))
    });
    if !all_home {
        return Err(slots);
    }
    let Some(last) = slots.pop() else {
        return Err(slots);
    };
    drop(slots);
    match Arc::try_unwrap(last.carve) {
        Ok(carve) => Ok(carve.extent),
        // Somebody looks through a view at this moment: nothing is lost but this occasion.
        Err(carve) => Err(Carve::free_slots(&carve)),
    }
}

/// Exclusive, writable bytes of one part of a block (or of a whole block) that is not sealed yet.
pub struct BlockWriter {
    carve: ManuallyDrop<Arc<Carve>>,
    slot: u32,
    offset: u32,
    len: u32,
}

impl BlockWriter {
    /// How many bytes the part has; at least 1.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a part is never empty")]
    pub fn len(&self) -> usize {
        usize::try_from(self.len).unwrap_or(0)
    }

    /// Bytes that the slot of the block occupies.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.carve.slot_bytes
    }

    /// The number of the extent it lies in.
    pub(crate) fn extent(&self) -> u32 {
        self.carve.extent.index()
    }

    /// Notes which map entry the block belongs to.
    pub(crate) fn set_owner(&self, entry: u64) {
        self.carve.set_owner(self.slot, entry);
    }

    /// The bytes. Before they are written they are what an earlier block left behind.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        let start = self.carve.address(self.slot, self.offset);
        // SAFETY: the range is inside the slot (`take`), initialised (memfd pages are), and nobody
        // else has it: writers of one slot are disjoint and payloads of it do not exist yet.
        unsafe { slice::from_raw_parts(start.as_ptr(), self.len()) }
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.carve.address(self.slot, self.offset);
        // SAFETY: as in `bytes`, and `&mut self` makes this the only access to the range.
        unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.len()) }
    }
}

impl BlockWriter {
    /// The bytes and those behind them up to a whole number of pages of `page_bytes`, for direct I/O.
    /// `None` if the bytes do not start at such a page, or the slot ends before.
    #[must_use]
    pub fn pages_mut(&mut self, page_bytes: usize) -> Option<&mut [u8]> {
        let start = self.carve.address(self.slot, self.offset);
        let len = self.len().next_multiple_of(page_bytes.max(1));
        let end = usize::try_from(self.offset).ok()?.checked_add(len)?;
        // Only the part that ends the block may reach beyond its own bytes.
        // Acquire: pairs with the release of a writer that has just let go.
        let is_last = self.carve.count(self.slot)?.load(Ordering::Acquire) == 1;
        if !is_last || end > self.carve.slot_bytes || !start.addr().get().is_multiple_of(page_bytes)
        {
            return None;
        }
        // SAFETY: the range is inside the slot, initialised, and nobody else has any of it: this
        // writer is the only one of the slot and payloads of it do not exist yet.
        Some(unsafe { slice::from_raw_parts_mut(start.as_ptr(), len) })
    }
}

impl Drop for BlockWriter {
    fn drop(&mut self) {
        // SAFETY: taken exactly once, here; the field is not used afterwards.
        let carve = unsafe { ManuallyDrop::take(&mut self.carve) };
        carve.give_back(self.slot);
    }
}

impl fmt::Debug for BlockWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = (self.carve.extent.index(), self.slot);
        write!(f, "BlockWriter({}/{} +{} {} bytes)", at.0, at.1, self.offset, self.len)
    }
}

/// Makes a block of `len` bytes immutable. `writers` must be all parts of one slot, in order, and
/// together of that length; they come back otherwise.
pub(crate) fn seal(writers: Vec<BlockWriter>, len: u32) -> Result<Payload, Vec<BlockWriter>> {
    let Some(first) = writers.first() else {
        return Err(writers);
    };
    let slot = first.slot;
    let parts = u32::try_from(writers.len()).unwrap_or(u32::MAX);
    // Relaxed: all references of the slot are ours, or the check fails.
    let complete =
        first.carve.count(slot).is_some_and(|count| count.load(Ordering::Relaxed) == parts);
    let mut end = 0;
    let mut in_order = true;
    for writer in &writers {
        let same = Arc::ptr_eq(&writer.carve, &first.carve) && writer.slot == slot;
        in_order &= same && writer.offset == end;
        end += writer.len;
    }
    if !complete || !in_order || end != len {
        return Err(writers);
    }
    let payload = Payload { carve: ManuallyDrop::new(Arc::clone(&first.carve)), slot, len };
    // The payload's reference first, so that dropping the writers does not send the slot home.
    payload.add_reference();
    drop(writers);
    Ok(payload)
}

/// The sealed, immutable bytes of one block. Clones refer to the same bytes: each is a pin.
pub struct Payload {
    carve: ManuallyDrop<Arc<Carve>>,
    slot: u32,
    len: u32,
}

impl Payload {
    fn add_reference(&self) {
        if let Some(count) = self.carve.count(self.slot) {
            // Relaxed: a new reference is only made from an existing one.
            if count.fetch_add(1, Ordering::Relaxed) > REFERENCES_MAX {
                // As `Arc` does: a count that wraps would free memory that is read.
                std::process::abort();
            }
        }
    }

    /// Whether somebody besides this holder has the block.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        // Acquire: pairs with the release of a reader that has just let go.
        self.carve.count(self.slot).is_none_or(|count| count.load(Ordering::Acquire) > 1)
    }

    /// Bytes that the slot occupies, at least the length of the block.
    #[must_use]
    pub fn slot_bytes(&self) -> usize {
        self.carve.slot_bytes
    }

    /// The number of the extent it lies in.
    pub(crate) fn extent(&self) -> u32 {
        self.carve.extent.index()
    }

    /// Whether `other` is the same copy in memory.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.carve, &other.carve) && self.slot == other.slot
    }

    /// Notes which map entry the block belongs to.
    pub(crate) fn set_owner(&self, entry: u64) {
        self.carve.set_owner(self.slot, entry);
    }

    /// Notes that the block's last use moved from `before` to `after` (0: not in the map).
    pub(crate) fn change_age(&self, before: u64, after: u64) {
        self.carve.ages.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        let start = self.carve.address(self.slot, 0);
        let len = usize::try_from(self.len).unwrap_or(0);
        // SAFETY: the range is inside the slot (`take`, `seal`), initialised, and no writer of the
        // slot exists while a payload does: `seal` consumed them all and `take` needs a free slot.
        unsafe { slice::from_raw_parts(start.as_ptr(), len) }
    }
}

impl Clone for Payload {
    fn clone(&self) -> Self {
        self.add_reference();
        let carve = ManuallyDrop::new(Arc::clone(&self.carve));
        Self { carve, slot: self.slot, len: self.len }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: taken exactly once, here; the field is not used afterwards.
        let carve = unsafe { ManuallyDrop::take(&mut self.carve) };
        carve.give_back(self.slot);
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Payload({}/{} {} bytes)", self.carve.extent.index(), self.slot, self.len)
    }
}
