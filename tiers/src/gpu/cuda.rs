//! A GPU by the CUDA driver, which is looked for when the program runs.
//!
//! `cudarc` panics when it is used without a driver, so it is asked first whether there is one.
//! Whatever it answers after that is an error, never a panic.
#![expect(
    unsafe_code,
    reason = "calls the driver with raw addresses; each block says why it is sound"
)]

use std::{ffi::c_void, fmt, ptr::NonNull, sync::Arc, time::Duration};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaStream, DriverError, result,
    sys::{self, CUresult},
};

use super::{BatchEnd, DeviceAddress, DeviceCopy, Direction, RawCopy, Refusal};
use crate::error::{Error, ErrorKind, Result};

/// One GPU: its context and a stream for each direction.
pub(super) struct CudaCopy {
    name: String,
    context: Arc<CudaContext>,
    onload: Arc<CudaStream>,
    offload: Arc<CudaStream>,
}

impl CudaCopy {
    /// `None` without a driver.
    pub(super) fn open(ordinal: usize) -> Result<Option<Self>> {
        // SAFETY: loads a library by the name of the driver's, whose loading has no effect on others.
        if !unsafe { sys::is_culib_present() } {
            tracing::info!("no CUDA driver (libcuda) on this machine: no GPU is used");
            return Ok(None);
        }
        let failed = |error: DriverError| {
            let what = format!("open GPU {ordinal}: see whether nvidia-smi lists it");
            Error::new(ErrorKind::Unavailable, what).because(Cause::from(error))
        };
        let context = CudaContext::new(ordinal).map_err(failed)?;
        let onload = context.new_stream().map_err(failed)?;
        let offload = context.new_stream().map_err(failed)?;
        let name = context.name().map_err(failed)?;
        Ok(Some(Self { name, context, onload, offload }))
    }

    fn bind(&self, doing: &str) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| failed(doing, error))
    }

    /// Lets go of something; who gives back cannot do anything about a failure.
    fn give_back(&self, doing: &str, give_back: impl FnOnce() -> Result<(), DriverError>) {
        let given =
            self.bind(doing).and_then(|()| give_back().map_err(|error| failed(doing, error)));
        if let Err(error) = given {
            tracing::warn!(%error, "GPU keeps what was given back");
        }
    }

    fn begin_all(
        &self,
        direction: Direction,
        copies: &[RawCopy],
    ) -> Result<CudaEvent, DriverError> {
        self.context.bind_to_thread()?;
        let stream = self.stream(direction);
        for copy in copies {
            let (host, device) = (copy.host.as_ptr().cast::<c_void>(), copy.device.0);
            let (bytes, stream) = (copy.bytes, stream.cu_stream());
            let begun = match direction {
                // SAFETY: whoever called `begin` promises that both are valid until the end of the
                // batch, and that the device's memory is of this context.
                Direction::Onload => unsafe {
                    sys::cuMemcpyHtoDAsync_v2(device, host.cast_const(), bytes, stream)
                },
                // SAFETY: the same.
                Direction::Offload => unsafe {
                    sys::cuMemcpyDtoHAsync_v2(host, device, bytes, stream)
                },
            };
            begun.result()?;
        }
        // Whoever waits sleeps, and lets others compute.
        stream.record_event(Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC))
    }

    fn stream(&self, direction: Direction) -> &Arc<CudaStream> {
        match direction {
            Direction::Onload => &self.onload,
            Direction::Offload => &self.offload,
        }
    }
}

// SAFETY: memory is the driver's; host memory of a batch is used by the copies that were begun and no
// longer: `begin` synchronises if it fails, and else the event is behind all of them.
unsafe impl DeviceCopy for CudaCopy {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceAddress> {
        let doing = format!("allocate {bytes} bytes of the GPU");
        self.bind(&doing)?;
        // SAFETY: the context is bound; the memory has no type.
        let address = unsafe { result::malloc_sync(bytes) };
        address.map(DeviceAddress).map_err(|error| failed(&doing, error))
    }

    unsafe fn free(&self, address: DeviceAddress) {
        // SAFETY: the caller's promise.
        self.give_back("free memory of the GPU", || unsafe { result::free_sync(address.0) });
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<NonNull<u8>> {
        let doing = format!("allocate {bytes} bytes of pinned memory");
        self.bind(&doing)?;
        // SAFETY: the context is bound; the memory has no type.
        let base = unsafe { result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE) };
        let base = base.map_err(|error| failed(&doing, error))?;
        NonNull::new(base.cast::<u8>()).ok_or_else(|| Error::new(ErrorKind::Internal, doing))
    }

    unsafe fn free_pinned(&self, base: NonNull<u8>) {
        let base = base.as_ptr().cast::<c_void>();
        // SAFETY: the caller's promise.
        self.give_back("free pinned memory", || unsafe { result::free_host(base) });
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: usize) -> Result<()> {
        let doing = format!("pin {bytes} bytes of host memory");
        self.bind(&doing)?;
        let base = base.as_ptr().cast::<c_void>();
        // SAFETY: the caller's promise: mapped, and until `unregister`.
        let registered =
            unsafe { sys::cuMemHostRegister_v2(base, bytes, sys::CU_MEMHOSTREGISTER_PORTABLE) };
        registered.result().map_err(|error| failed(&doing, error))
    }

    unsafe fn unregister(&self, base: NonNull<u8>) {
        let base = base.as_ptr().cast::<c_void>();
        // SAFETY: the caller's promise.
        let unregister = || unsafe { sys::cuMemHostUnregister(base) }.result();
        self.give_back("unpin host memory", unregister);
    }

    unsafe fn begin(
        &self,
        direction: Direction,
        copies: &[RawCopy],
    ) -> Result<Box<dyn BatchEnd>, Refusal> {
        match self.begin_all(direction, copies) {
            Ok(event) => Ok(Box::new(Recorded(event))),
            Err(error) => {
                let is_idle = self.stream(direction).synchronize().is_ok();
                let doing = format!("copy {} pieces ({direction:?})", copies.len());
                Err(Refusal { error: failed(&doing, error), is_idle })
            }
        }
    }
}

impl fmt::Debug for CudaCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaCopy({})", self.name)
    }
}

/// An event behind the copies of a batch.
#[derive(Debug)]
struct Recorded(CudaEvent);

impl BatchEnd for Recorded {
    fn is_reached(&self) -> Result<bool> {
        self.0.try_is_complete().map_err(|error| failed("ask a GPU for its copies", error))
    }

    fn wait(&self) -> Result<()> {
        self.0.synchronize().map_err(|error| failed("wait for copies of a GPU", error))
    }
}

fn failed(doing: &str, error: DriverError) -> Error {
    let kind = match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            ErrorKind::Exhausted { retry_after: Duration::from_secs(1) }
        }
        CUresult::CUDA_ERROR_INVALID_VALUE
        | CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED => ErrorKind::Invalid,
        CUresult::CUDA_ERROR_NOT_SUPPORTED => ErrorKind::Unsupported,
        _ => ErrorKind::Unavailable,
    };
    Error::new(kind, doing).because(Cause::from(error))
}

/// What the driver said. `cudarc`'s own error asks the driver for its words when it is shown.
#[derive(Debug, thiserror::Error)]
#[error("CUDA: {0}")]
struct Cause(String);

impl From<DriverError> for Cause {
    fn from(error: DriverError) -> Self {
        Self(error.to_string())
    }
}
