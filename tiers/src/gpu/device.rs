//! The safe side of a device.
#![expect(unsafe_code, reason = "tells the device what memory to use, and owns it meanwhile")]

use std::{num::NonZeroUsize, sync::Arc};

use bytes::Bytes;

use super::{
    DeviceCopy, DeviceMemory, DeviceRange, Direction, HostMemory, Landing, PinnedBuffer, Pins,
    RawCopy, Transfer, batch::planned, transfer,
};
use crate::error::{Error, Result};

/// Host memory is pinned in pieces that end at multiples of this: 1 GiB. More than 512 GiB at once was
/// refused by drivers; each piece takes about a tenth of a second.
pub const PIN_CHUNK_BYTES: NonZeroUsize = NonZeroUsize::new(1 << 30).expect("not 0");

/// A GPU, or what stands in for one. Clones are the same device.
#[derive(Debug, Clone)]
pub struct Device {
    copy: Arc<dyn DeviceCopy>,
    chunk: NonZeroUsize,
}

impl Device {
    /// What moves bytes, as a device.
    #[must_use]
    pub fn new(copy: Arc<dyn DeviceCopy>) -> Self {
        Self::with_chunks(copy, PIN_CHUNK_BYTES)
    }

    /// The same with other pieces than [`PIN_CHUNK_BYTES`]: a power of two, a page or more.
    #[must_use]
    pub fn with_chunks(copy: Arc<dyn DeviceCopy>, chunk: NonZeroUsize) -> Self {
        Self { copy, chunk }
    }

    /// What it is, for people.
    #[must_use]
    pub fn name(&self) -> String {
        self.copy.name()
    }

    /// Memory on the device; what is in it is undefined.
    ///
    /// # Errors
    /// `Exhausted` if there is not so much, `Invalid` for 0 bytes.
    pub fn allocate(&self, bytes: usize) -> Result<Arc<DeviceMemory>> {
        DeviceMemory::allocate(&self.copy, bytes)
    }

    /// Pinned host memory, zeroed.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn pinned_buffer(&self, bytes: usize) -> Result<PinnedBuffer> {
        PinnedBuffer::allocate(&self.copy, bytes)
    }

    /// Pins host memory until the result is dropped: all of it, or none.
    ///
    /// # Blocking
    /// About a tenth of a second for each GiB.
    ///
    /// # Errors
    /// `Exhausted` if so much cannot be pinned, `Invalid` if it is pinned already.
    pub fn pin(&self, memory: Arc<dyn HostMemory>) -> Result<Pins> {
        Pins::new(&self.copy, memory, self.chunk)
    }

    /// Copies each piece to its place on the device.
    ///
    /// # Errors
    /// `Invalid` if a piece is not as long as its place, or the place is not on this device; then
    /// nothing is copied. That of the device; then nobody knows what was.
    pub fn onload(
        &self,
        pieces: impl IntoIterator<Item = (Bytes, DeviceRange)>,
    ) -> Result<Transfer<Bytes>> {
        let (host, ranges): (Vec<Bytes>, Vec<DeviceRange>) = pieces.into_iter().unzip();
        let host_addresses = host.iter().map(|bytes| (transfer::address(bytes), bytes.len()));
        let copies = self.plan(host_addresses, &ranges)?;
        Transfer::begin(&self.copy, host, ranges, || {
            // SAFETY: `Transfer` owns the host memory, whose bytes stay where they are when a `Bytes`
            // moves, and the ranges, which keep the device's memory; both until the end.
            unsafe { self.copy.begin(Direction::Onload, &copies) }
        })
    }

    /// Copies each place on the device to host memory as long as it.
    ///
    /// # Errors
    /// As [`onload`](Self::onload).
    pub fn offload<T: Landing>(
        &self,
        pieces: impl IntoIterator<Item = (DeviceRange, T)>,
    ) -> Result<Transfer<T>> {
        let (ranges, mut host): (Vec<DeviceRange>, Vec<T>) = pieces.into_iter().unzip();
        let host_addresses = host.iter_mut().map(|landing| {
            let memory = landing.memory();
            (transfer::address_mut(memory), memory.len())
        });
        let copies = self.plan(host_addresses, &ranges)?;
        Transfer::begin(&self.copy, host, ranges, || {
            // SAFETY: as in `onload`; `Landing` promises that its memory stays where it is, and is
            // nobody else's.
            unsafe { self.copy.begin(Direction::Offload, &copies) }
        })
    }

    fn plan(
        &self,
        host: impl Iterator<Item = (std::ptr::NonNull<u8>, usize)>,
        ranges: &[DeviceRange],
    ) -> Result<Vec<RawCopy>> {
        let mut copies = Vec::with_capacity(ranges.len());
        for (position, ((address, len), range)) in host.zip(ranges).enumerate() {
            let bytes = range.len();
            if len != bytes {
                let what = format!("piece {position}: {len} bytes given, {bytes} required");
                return Err(Error::invalid(what));
            }
            if !range.memory().is_of(&self.copy) {
                let what = format!("piece {position}: its place is on another device");
                return Err(Error::invalid(what));
            }
            copies.push(RawCopy { host: address, device: range.address(), bytes });
        }
        Ok(planned(copies.into_iter(), self.chunk))
    }

    /// What moves its bytes.
    #[must_use]
    pub fn copy(&self) -> &Arc<dyn DeviceCopy> {
        &self.copy
    }
}
