//! Blocks between host memory and a GPU.
//!
//! ```text
//!  Bytes / BlockWriter           Device                    DeviceCopy
//!  (owned: kept until   ->  bounds, joined neighbours,  ->  CudaCopy: cudarc, one stream a direction
//!   the device is done)     batches, pins in chunks         HostCopy: memcpy, everywhere
//! ```
//!
//! [`Device`] is what others use, and it is safe: whatever takes part in a copy is owned by the
//! [`Transfer`] until the device is done with it, so nothing is freed under a running copy, whoever stops
//! waiting. [`DeviceCopy`] is the seam below: raw addresses, one implementation for each kind of device.
//! Every implementation passes `testing::device_copy_suite`.
//!
//! Why copies go by one stream for each direction and an event for each batch: a copy of a 2 MiB block
//! from pinned memory fills the bus, so more streams would only share it; both directions run at a time.
//!
//! Why memory is pinned in chunks that end at multiples of an address: one registration of hundreds of
//! GiB is refused by drivers, and a copy may not reach over the border of two registrations
//! (CUDA driver API, `cuMemHostRegister`); so [`Device`] cuts copies at the same multiples.

mod batch;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod host;
mod memory;
mod transfer;

use std::{fmt, ptr::NonNull};

pub use self::{
    device::{Device, PIN_CHUNK_BYTES},
    host::HostCopy,
    memory::{DeviceMemory, DeviceRange, HostMemory, PinnedBuffer, Pins},
    transfer::{Landing, Transfer},
};
use crate::error::{Error, Result};

/// Opens GPU `ordinal`; `None` where there is no CUDA driver, which is said in one line of the log.
///
/// # Errors
/// `Unavailable` if the driver is there and the GPU is not, or cannot be used; `Unsupported` in a build
/// without the feature `cuda`.
pub fn open(ordinal: usize) -> Result<Option<Device>> {
    #[cfg(feature = "cuda")]
    {
        let copy = cuda::CudaCopy::open(ordinal)?;
        Ok(copy.map(|copy| Device::new(std::sync::Arc::new(copy))))
    }
    #[cfg(not(feature = "cuda"))]
    {
        let what = format!("open GPU {ordinal}: this build is without the feature `cuda`");
        Err(Error::new(crate::error::ErrorKind::Unsupported, what))
    }
}

/// An address in the memory of a device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceAddress(pub u64);

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {:#x}", self.0)
    }
}

/// Where a batch of copies goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From host memory to the device.
    Onload,
    /// From the device to host memory.
    Offload,
}

/// One copy, as the device is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawCopy {
    /// Bytes in host memory.
    pub host: NonNull<u8>,
    /// Bytes on the device.
    pub device: DeviceAddress,
    /// How many; at least 1.
    pub bytes: usize,
}

/// Why a batch was not begun, or not wholly.
#[derive(Debug)]
pub struct Refusal {
    /// The cause.
    pub error: Error,
    /// Whether the device has let go of the memory of the batch. If it cannot say so, the memory is
    /// never used again.
    pub is_idle: bool,
}

/// The end of a batch on the device.
pub trait BatchEnd: fmt::Debug + Send + Sync {
    /// Whether the device is done with the batch.
    ///
    /// # Errors
    /// That of the device; then nobody knows what of the batch was copied, and whether it goes on.
    fn is_reached(&self) -> Result<bool>;

    /// Waits until it is.
    ///
    /// # Blocking
    /// As long as the copies take.
    ///
    /// # Errors
    /// As [`is_reached`](Self::is_reached).
    fn wait(&self) -> Result<()>;
}

/// What moves bytes to and from a device: the seam below [`Device`].
///
/// # Safety
/// An implementation must
/// - return from the two `allocate` calls memory of that size that nothing else uses, aligned to 256 bytes,
/// - touch host memory of a batch only until its end is reached, or it was refused as idle,
/// - touch no other host memory than that of the copies that it was told of.
#[expect(unsafe_code, reason = "a seam of raw memory; see the trait's own section")]
pub unsafe trait DeviceCopy: fmt::Debug + Send + Sync {
    /// What it is, for people.
    fn name(&self) -> String;

    /// Memory on the device; what is in it is undefined.
    ///
    /// # Errors
    /// `Exhausted` if there is not so much.
    fn allocate(&self, bytes: usize) -> Result<DeviceAddress>;

    /// Gives memory back.
    ///
    /// # Safety
    /// It is from `allocate` of this device, given back once, and no copy with it is under way.
    unsafe fn free(&self, address: DeviceAddress);

    /// Host memory that is pinned; what is in it is undefined.
    ///
    /// # Errors
    /// `Exhausted` if there is not so much.
    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>>;

    /// Gives pinned memory back.
    ///
    /// # Safety
    /// As [`free`](Self::free), for `allocate_pinned`.
    unsafe fn free_pinned(&self, base: NonNull<u8>);

    /// Pins host memory that exists already, so that copies of it run at the speed of the bus and beside
    /// the program. Memory that is pinned already is refused.
    ///
    /// # Errors
    /// `Exhausted` if the kernel does not pin so much, `Invalid` if it is pinned already.
    ///
    /// # Safety
    /// The memory stays mapped until `unregister`.
    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<()>;

    /// Ends what `register` began.
    ///
    /// # Safety
    /// `base` was registered, and no copy with its memory is under way.
    unsafe fn unregister(&self, base: NonNull<u8>);

    /// Begins a batch; copies of one direction run in the order in which they were begun.
    ///
    /// # Errors
    /// With the news whether the device still uses the memory.
    ///
    /// # Safety
    /// Until the end is reached, host memory is valid and, for `Offload`, nobody else's; memory of the
    /// device is from this device, and nobody frees it.
    unsafe fn begin(
        &self,
        direction: Direction,
        copies: &[RawCopy],
    ) -> Result<Box<dyn BatchEnd>, Refusal>;
}

#[cfg(test)]
mod tests;
