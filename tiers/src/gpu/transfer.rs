//! Copies under way, and what they own.
#![expect(unsafe_code, reason = "promises who writes what memory until the device is done")]

use std::{fmt, mem::ManuallyDrop, ptr::NonNull, sync::Arc};

use super::{BatchEnd, DeviceCopy, PinnedBuffer};
use crate::{
    error::{Error, ErrorKind, Result},
    store::BlockWriter,
};

/// Memory that a device may write.
///
/// # Safety
/// The memory of [`memory`](Self::memory) is where it is until the value is dropped, also when the value
/// moves, and nobody but the owner of the value reads or writes it.
pub unsafe trait Landing: Send + 'static {
    /// All of it.
    fn memory(&mut self) -> &mut [u8];
}

// SAFETY: it owns its memory, which is not in the value itself.
unsafe impl Landing for PinnedBuffer {
    fn memory(&mut self) -> &mut [u8] {
        self
    }
}

// SAFETY: a writer is the only one who has its part of the arena.
unsafe impl Landing for BlockWriter {
    fn memory(&mut self) -> &mut [u8] {
        self.bytes_mut()
    }
}

/// A batch of copies that has begun. It owns what takes part in them: `T` is host memory.
///
/// # Blocking
/// Dropping it waits for the device.
#[must_use = "dropping it waits for the device"]
pub struct Transfer<T: Send + 'static> {
    /// `None` once the device is done.
    end: Option<Box<dyn BatchEnd>>,
    held: ManuallyDrop<Held<T>>,
}

/// What must outlive the copies.
struct Held<T> {
    host: Vec<T>,
    _device: Vec<super::DeviceRange>,
    _copy: Arc<dyn DeviceCopy>,
}

impl<T: Send + 'static> Transfer<T> {
    /// Begins copies with what `begin` makes of them; if the device can't say that it has let go of
    /// the memory, it is never freed.
    pub(super) fn begin(
        copy: &Arc<dyn DeviceCopy>,
        host: Vec<T>,
        device: Vec<super::DeviceRange>,
        begin: impl FnOnce() -> Result<Box<dyn BatchEnd>, super::Refusal>,
    ) -> Result<Self> {
        let held = Held { host, _device: device, _copy: Arc::clone(copy) };
        let held = ManuallyDrop::new(held);
        match begin() {
            Ok(end) => Ok(Self { end: Some(end), held }),
            Err(refusal) => {
                if refusal.is_idle {
                    drop(ManuallyDrop::into_inner(held));
                }
                Err(refusal.error)
            }
        }
    }

    /// Whether the device is done, without waiting.
    ///
    /// # Errors
    /// That of the device.
    pub fn is_done(&self) -> Result<bool> {
        self.end.as_ref().map_or(Ok(true), |end| end.is_reached())
    }

    /// Waits until the device is done, and returns the host memory in the order in which it was given.
    ///
    /// # Blocking
    /// As long as the copies take; [`done`](Self::done) waits on a thread for that.
    ///
    /// # Errors
    /// That of the device. Then the host memory is not given back to anybody: the device may still
    /// be writing to it.
    pub fn wait(mut self) -> Result<Vec<T>> {
        if let Some(end) = self.end.take() {
            end.wait()?;
        }
        // SAFETY: the device is done, and `end` is gone, so that dropping `self` leaves it alone.
        let held = unsafe { ManuallyDrop::take(&mut self.held) };
        Ok(held.host)
    }

    /// [`wait`](Self::wait) without blocking the caller's thread.
    ///
    /// # Cancel safety
    /// The copies go on; their memory is freed when they have ended.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub async fn done(self) -> Result<Vec<T>> {
        let waited = tokio::task::spawn_blocking(move || self.wait()).await;
        waited.unwrap_or_else(|error| {
            Err(Error::new(ErrorKind::Internal, "wait for a device").because(error))
        })
    }
}

impl<T: Send + 'static> Drop for Transfer<T> {
    fn drop(&mut self) {
        let Some(end) = self.end.take() else { return };
        match end.wait() {
            // SAFETY: the device is done, and nobody has taken it: then there would be no `end`.
            Ok(()) => unsafe { ManuallyDrop::drop(&mut self.held) },
            Err(error) => {
                tracing::warn!(%error, blocks = self.held.host.len(), "device failed: memory is lost");
            }
        }
    }
}

impl<T: Send + 'static> fmt::Debug for Transfer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfer({} pieces of host memory)", self.held.host.len())
    }
}

/// The address of host memory that a device reads or writes.
pub(super) fn address(bytes: &[u8]) -> NonNull<u8> {
    NonNull::from(bytes).cast()
}

/// The same, to be written.
pub(super) fn address_mut(bytes: &mut [u8]) -> NonNull<u8> {
    NonNull::from(bytes).cast()
}
