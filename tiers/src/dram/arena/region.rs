//! Memory from the kernel: memfd regions and the extents they are cut into.
#![expect(unsafe_code, reason = "maps memory; see the essay of the parent module")]

use std::{
    fmt,
    os::fd::OwnedFd,
    ptr::NonNull,
    sync::{Arc, Weak},
};

use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create},
    io::fcntl_dupfd_cloexec,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap},
};

use super::slot::{Carve, FreeSlot, Home};
use crate::{
    error::{Error, ErrorKind, Result},
    gpu::HostMemory,
};

/// One mapped memfd. Unmapped when the last extent of it is dropped.
pub(crate) struct Region {
    base: NonNull<u8>,
    len: usize,
    /// Kept open: clients on this host are handed duplicates of it.
    memfd: OwnedFd,
}

// SAFETY: the mapping is plain memory; who may read or write which bytes is decided by the owned
// types of the parent module, not by the thread they are on.
unsafe impl Send for Region {}
// SAFETY: as above; `Region` itself offers no access to the bytes.
unsafe impl Sync for Region {}

impl Region {
    fn map(len: usize) -> rustix::io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = memfd_create("kvstrata-arena", flags)?;
        ftruncate(&memfd, u64::try_from(len).unwrap_or(u64::MAX))?;
        // Sealed so that no holder of the descriptor can shrink it and turn our reads into SIGBUS.
        fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address the kernel chooses; it aliases nothing of ours.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &memfd, 0)? };
        let base = NonNull::new(base.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        Ok(Self { base, len, memfd })
    }

    /// A descriptor of it for another process, which can read it and do nothing else: a read-only
    /// descriptor could be opened anew for writing, so it is sealed against every write but ours. What
    /// is mapped for writing already stays so; this is our own mapping, whole since the start.
    pub(crate) fn share(&self) -> rustix::io::Result<OwnedFd> {
        let seals = fcntl_get_seals(&self.memfd)?;
        if !seals.contains(SealFlags::SEAL) {
            fcntl_add_seals(&self.memfd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?;
        }
        fcntl_dupfd_cloexec(&self.memfd, 0)
    }
}

// SAFETY: it is mapped whole, and only unmapped when it is dropped.
unsafe impl HostMemory for Region {
    fn span(&self) -> (NonNull<u8>, usize) {
        (self.base, self.len)
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({} bytes)", self.len)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of our own mapping, and nothing refers to it any more:
        // every extent, and through it every slot, holds an `Arc` of this region.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping our own region cannot fail");
    }
}

/// An owned, equally long piece of a region that is not carved into slots.
pub(crate) struct Extent {
    region: Arc<Region>,
    offset: usize,
    len: usize,
    index: u32,
    generation: u32,
    touched: bool,
}

impl Extent {
    /// The number of this extent in the arena.
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Whether [`pre_touch`](Self::pre_touch) was called.
    pub(crate) fn is_touched(&self) -> bool {
        self.touched
    }

    /// The region it was cut from, if it is the first of it.
    pub(crate) fn region(&self) -> Option<Arc<Region>> {
        (self.offset == 0).then(|| Arc::clone(&self.region))
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        // SAFETY: `offset + len <= region.len` by construction in `map_extents`.
        unsafe { self.region.base.add(self.offset) }
    }

    /// Makes the kernel back the whole extent with memory now, instead of at the first write.
    ///
    /// # Blocking
    /// Clears up to 64 MiB: tens of milliseconds.
    pub(crate) fn pre_touch(&mut self) {
        if self.touched {
            return;
        }
        let start = self.base().as_ptr().cast();
        // SAFETY: the range lies in our own mapping and is exclusively owned by `self`; populating
        // changes no content.
        let populated = unsafe { madvise(start, self.len, Advice::LinuxPopulateWrite) };
        if let Err(errno) = populated {
            // An old kernel, or no memory: the pages are backed at the first write.
            tracing::debug!(%errno, extent = self.index, "extent not backed beforehand");
        }
        self.touched = true;
    }

    /// Cuts the extent into slots of `slot_bytes` that come home to `home`.
    ///
    /// Returns no slot if `slot_bytes` is 0 or longer than the extent.
    pub(crate) fn carve(mut self, slot_bytes: usize, home: Weak<dyn Home>) -> Vec<FreeSlot> {
        self.generation = self.generation.wrapping_add(1);
        let slots = self.len.checked_div(slot_bytes).unwrap_or(0);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        Carve::free_slots(&Arc::new(Carve::new(self, slots, slot_bytes, home)))
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extent({}, generation {}, {} bytes)", self.index, self.generation, self.len)
    }
}

/// Maps `extents` extents of `extent_bytes` in regions of up to `region_bytes`.
///
/// # Errors
/// `Unavailable` if the kernel refuses the memory.
pub(crate) fn map_extents(
    extents: usize,
    extent_bytes: usize,
    region_bytes: usize,
) -> Result<Vec<Extent>> {
    let per_region = (region_bytes / extent_bytes).max(1);
    let mut mapped = Vec::with_capacity(extents);
    while mapped.len() < extents {
        let count = per_region.min(extents - mapped.len());
        let region = Region::map(count * extent_bytes).map_err(|errno| {
            Error::new(ErrorKind::Unavailable, "map an arena region").because(errno)
        })?;
        let region = Arc::new(region);
        for position in 0..count {
            mapped.push(Extent {
                region: Arc::clone(&region),
                offset: position * extent_bytes,
                len: extent_bytes,
                index: u32::try_from(mapped.len()).unwrap_or(u32::MAX),
                generation: 0,
                touched: false,
            });
        }
    }
    Ok(mapped)
}
