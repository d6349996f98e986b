//! Host memory as a device: for machines without a GPU, and for tests.
//!
//! Its errors are those of a GPU: what is pinned cannot be pinned again, memory ends somewhere.
#![expect(unsafe_code, reason = "allocates and copies raw memory; each block says why it is sound")]

use std::{
    alloc::{Layout, alloc, dealloc},
    collections::{BTreeMap, HashMap},
    ptr::NonNull,
    time::Duration,
};

use parking_lot::Mutex;

use super::{BatchEnd, DeviceAddress, DeviceCopy, Direction, RawCopy, Refusal};
use crate::error::{Error, ErrorKind, Result};

/// As devices align.
const ALIGN_BYTES: usize = 256;

#[derive(Debug, Default)]
struct State {
    /// Allocations by their address: those of the device and those that are pinned.
    allocated: HashMap<usize, (NonNull<u8>, Layout)>,
    allocated_bytes: usize,
    /// Registered memory: its beginnings and bytes.
    registered: BTreeMap<usize, usize>,
}

// SAFETY: the addresses are only used with the lock of `State`, and memory is any thread's.
unsafe impl Send for State {}

/// Copies by the CPU, done when they are begun.
#[derive(Debug)]
pub struct HostCopy {
    capacity_bytes: usize,
    state: Mutex<State>,
}

impl HostCopy {
    /// A device with so much memory, pinned buffers included.
    #[must_use]
    pub fn new(capacity_bytes: usize) -> Self {
        Self { capacity_bytes, state: Mutex::default() }
    }

    /// Pieces of memory that are allocated or registered now.
    #[must_use]
    pub fn in_use(&self) -> usize {
        let state = self.state.lock();
        state.allocated.len() + state.registered.len()
    }

    fn take(&self, bytes: usize) -> Result<NonNull<u8>> {
        let mut state = self.state.lock();
        let layout = Layout::from_size_align(bytes, ALIGN_BYTES).ok();
        let fits =
            state.allocated_bytes.checked_add(bytes).filter(|sum| *sum <= self.capacity_bytes);
        let (Some(layout), Some(allocated_bytes)) = (layout.filter(|_| bytes > 0), fits) else {
            return Err(exhausted(bytes));
        };
        // SAFETY: the layout is not of 0 bytes.
        let base = NonNull::new(unsafe { alloc(layout) }).ok_or_else(|| exhausted(bytes))?;
        state.allocated.insert(base.addr().get(), (base, layout));
        state.allocated_bytes = allocated_bytes;
        Ok(base)
    }

    /// # Safety
    /// As `DeviceCopy::free`.
    unsafe fn give_back(&self, address: usize) {
        let mut state = self.state.lock();
        if let Some((base, layout)) = state.allocated.remove(&address) {
            state.allocated_bytes -= layout.size();
            // SAFETY: it is from `take`, with this layout, and not in the table any more.
            unsafe { dealloc(base.as_ptr(), layout) };
        }
    }
}

fn exhausted(bytes: usize) -> Error {
    let kind = ErrorKind::Exhausted { retry_after: Duration::from_secs(1) };
    Error::new(kind, format!("allocate {bytes} bytes of a device"))
}

// SAFETY: memory is from the allocator; host memory is used only within `begin`, for its copies.
unsafe impl DeviceCopy for HostCopy {
    fn name(&self) -> String {
        "host memory".to_owned()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress> {
        let base = self.take(bytes)?;
        Ok(DeviceAddress(u64::try_from(base.as_ptr().expose_provenance()).unwrap_or(u64::MAX)))
    }

    unsafe fn free(&self, address: DeviceAddress) {
        let address = usize::try_from(address.0).unwrap_or(0);
        // SAFETY: the caller's promise.
        unsafe { self.give_back(address) };
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        self.take(bytes)
    }

    unsafe fn free_pinned(&self, base: NonNull<u8>) {
        // SAFETY: the caller's promise.
        unsafe { self.give_back(base.addr().get()) };
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<()> {
        let start = base.addr().get();
        let mut state = self.state.lock();
        let before = state.registered.range(..start.saturating_add(bytes)).next_back();
        if before.is_some_and(|(other, len)| other.saturating_add(*len) > start) {
            return Err(Error::invalid("pin host memory: it is pinned already"));
        }
        state.registered.insert(start, bytes);
        Ok(())
    }

    unsafe fn unregister(&self, base: NonNull<u8>) {
        self.state.lock().registered.remove(&base.addr().get());
    }

    unsafe fn begin(
        &self,
        direction: Direction,
        copies: &[RawCopy],
    ) -> Result<Box<dyn BatchEnd>, Refusal> {
        for copy in copies {
            let address = usize::try_from(copy.device.0).unwrap_or(0);
            let device = std::ptr::with_exposed_provenance_mut::<u8>(address);
            let host = copy.host.as_ptr();
            let (to, from) = match direction {
                Direction::Onload => (device, host),
                Direction::Offload => (host, device),
            };
            // SAFETY: the caller's promise: both are valid for so many bytes, and the device's memory is
            // an allocation of its own, so they do not overlap.
            unsafe { to.copy_from_nonoverlapping(from, copy.bytes) };
        }
        Ok(Box::new(Done))
    }
}

#[derive(Debug)]
struct Done;

impl BatchEnd for Done {
    fn is_reached(&self) -> Result<bool> {
        Ok(true)
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }
}
