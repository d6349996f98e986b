//! Memory that takes part in copies, and who owns it.
#![expect(unsafe_code, reason = "owns memory by its address; each block says why it is sound")]

use std::{
    fmt,
    num::NonZeroUsize,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    slice,
    sync::Arc,
};

use super::{Device, DeviceAddress, DeviceCopy};
use crate::error::{Error, Result};

/// Memory on a device. Its bytes are undefined until they are written.
pub struct DeviceMemory {
    copy: Arc<dyn DeviceCopy>,
    address: DeviceAddress,
    bytes: usize,
    is_owned: bool,
}

impl DeviceMemory {
    pub(super) fn allocate(copy: &Arc<dyn DeviceCopy>, bytes: usize) -> Result<Arc<Self>> {
        if bytes == 0 {
            return Err(Error::invalid("device memory: 0 bytes given, at least 1 required"));
        }
        let address = copy.allocate(bytes)?;
        Ok(Arc::new(Self { copy: Arc::clone(copy), address, bytes, is_owned: true }))
    }

    /// Memory of the device that somebody else has allocated, as an engine's blocks.
    ///
    /// # Safety
    /// All of it is memory of this device, in its context, for as long as this and every range of it
    /// exists; and nobody else uses the parts that copies use meanwhile.
    #[must_use]
    pub unsafe fn foreign(device: &Device, address: DeviceAddress, bytes: usize) -> Arc<Self> {
        Arc::new(Self { copy: Arc::clone(device.copy()), address, bytes, is_owned: false })
    }

    /// How many bytes it has.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Where it is on the device.
    #[must_use]
    pub fn address(&self) -> DeviceAddress {
        self.address
    }

    /// A part of it.
    ///
    /// # Errors
    /// `Invalid` if it is not one, or empty.
    pub fn range(self: &Arc<Self>, range: Range<usize>) -> Result<DeviceRange> {
        if range.is_empty() || range.end > self.bytes {
            let what = format!("device range: {range:?} given, within 0..{} required", self.bytes);
            return Err(Error::invalid(what));
        }
        Ok(DeviceRange { memory: Arc::clone(self), range })
    }

    /// Whether it is memory of the device behind `copy`.
    pub(super) fn is_of(&self, copy: &Arc<dyn DeviceCopy>) -> bool {
        Arc::ptr_eq(&self.copy, copy)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.is_owned {
            // SAFETY: it is from `allocate`, and this is the only time. A copy holds a range, and
            // with it this memory, until the device is done.
            unsafe { self.copy.free(self.address) };
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceMemory({:?}, {} bytes)", self.address, self.bytes)
    }
}

/// A part of a device's memory, at least a byte.
#[derive(Debug, Clone)]
pub struct DeviceRange {
    memory: Arc<DeviceMemory>,
    range: Range<usize>,
}

impl DeviceRange {
    /// How many bytes it has.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a range is never empty")]
    pub fn len(&self) -> usize {
        self.range.len()
    }

    pub(super) fn memory(&self) -> &DeviceMemory {
        &self.memory
    }

    pub(super) fn address(&self) -> DeviceAddress {
        let offset = u64::try_from(self.range.start).unwrap_or(u64::MAX);
        DeviceAddress(self.memory.address.0.saturating_add(offset))
    }
}

/// Host memory that can be pinned: the arena's regions, or a mapping of them by somebody else.
///
/// # Safety
/// [`span`](Self::span) is always the same, whole pages, and mapped for as long as this exists.
pub unsafe trait HostMemory: fmt::Debug + Send + Sync {
    /// Where it begins, and its bytes.
    fn span(&self) -> (NonNull<u8>, usize);
}

/// Host memory that is pinned for a device; not any more when this is dropped. Copies of it that are
/// under way must have ended by then: they are slower without, or fail, and nothing else.
pub struct Pins {
    copy: Arc<dyn DeviceCopy>,
    chunks: Vec<NonNull<u8>>,
    memory: Arc<dyn HostMemory>,
}

// SAFETY: the addresses are only handed to the device, which may be told of them by any thread.
unsafe impl Send for Pins {}
// SAFETY: as above; a shared `Pins` does nothing.
unsafe impl Sync for Pins {}

impl Pins {
    /// Pins all of it or nothing.
    pub(super) fn new(
        copy: &Arc<dyn DeviceCopy>,
        memory: Arc<dyn HostMemory>,
        chunk: NonZeroUsize,
    ) -> Result<Self> {
        let (base, bytes) = memory.span();
        let mut pins = Self { copy: Arc::clone(copy), chunks: Vec::new(), memory };
        let mut done = 0;
        while done < bytes {
            let at = base.map_addr(|base| base.saturating_add(done));
            let len = (bytes - done).min(chunk.get() - at.addr().get() % chunk.get());
            // SAFETY: `HostMemory` promises that it stays mapped while `pins` has it, and dropping
            // `pins` unregisters before it lets go of it.
            unsafe { pins.copy.register(at, len) }?;
            pins.chunks.push(at);
            done += len;
        }
        Ok(pins)
    }

    /// Registrations that it takes.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            // SAFETY: it was registered by `new`. A driver waits for copies that use the memory
            // before it lets go of its pages.
            unsafe { self.copy.unregister(chunk) };
        }
    }
}

impl fmt::Debug for Pins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pins({:?} in {} chunks)", self.memory, self.chunks.len())
    }
}

/// Pinned host memory of its own, zeroed at first.
pub struct PinnedBuffer {
    copy: Arc<dyn DeviceCopy>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory, which any thread may use.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; shared, it is only read.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    pub(super) fn allocate(copy: &Arc<dyn DeviceCopy>, bytes: usize) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::invalid("pinned buffer: 0 bytes given, at least 1 required"));
        }
        let base = copy.allocate_pinned(bytes)?;
        // SAFETY: `allocate_pinned` promises so many bytes that nothing else uses.
        unsafe { base.write_bytes(0, bytes) };
        Ok(Self { copy: Arc::clone(copy), base, bytes })
    }
}

impl Deref for PinnedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: its own memory, initialised by `allocate`, borrowed with `self`.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }
}

impl DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only access.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }
}

impl AsRef<[u8]> for PinnedBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: it is from `allocate_pinned`, and this is the only time. A transfer owns the buffer
        // until the device is done.
        unsafe { self.copy.free_pinned(self.base) };
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBuffer({} bytes)", self.bytes)
    }
}
