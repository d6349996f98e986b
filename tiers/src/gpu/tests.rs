//! A device, on host memory and on `cudarc` over a fake driver.

use std::{num::NonZeroUsize, sync::Arc};

use super::*;
use crate::{
    error::ErrorKind,
    testing::{
        Arena,
        device_copy_suite::{self, CHUNK_BYTES, DEVICE_BYTES},
    },
};

#[test]
fn host_memory_is_a_device() {
    let host = Arc::new(HostCopy::new(8 * DEVICE_BYTES));
    let copy: Arc<dyn DeviceCopy> = Arc::clone(&host) as Arc<dyn DeviceCopy>;
    device_copy_suite::run(&copy);
    assert_eq!(host.in_use(), 0, "everything was given back");
}

#[test]
fn memory_of_a_device_ends_somewhere_and_comes_back() {
    let device = Device::new(Arc::new(HostCopy::new(1000)));
    let first = device.allocate(600).unwrap();
    let kind = device.allocate(600).unwrap_err().kind();
    assert!(matches!(kind, ErrorKind::Exhausted { .. }), "{kind:?}");
    let range = first.range(0..600).unwrap();
    drop(first);
    device.allocate(600).unwrap_err();
    drop(range);
    device.allocate(600).unwrap();
}

#[tokio::test]
async fn a_copy_is_waited_for_beside_other_tasks() {
    let device = Device::with_chunks(Arc::new(HostCopy::new(DEVICE_BYTES)), CHUNK_BYTES);
    let memory = device.allocate(8).unwrap();
    let range = || memory.range(0..8).unwrap();
    let onload = device.onload([(bytes::Bytes::from_static(b"8 bytes."), range())]).unwrap();
    assert_eq!(onload.done().await.unwrap(), [b"8 bytes.".as_slice()]);
    let back = device.offload([(range(), device.pinned_buffer(8).unwrap())]).unwrap();
    assert_eq!(&back.done().await.unwrap()[0][..], b"8 bytes.");
}

#[test]
fn the_arena_is_pinned_with_all_its_regions() {
    let arena = Arena::new(16 << 20).unwrap();
    let bytes: usize = arena.regions().iter().map(|region| region.span().1).sum();
    assert_eq!(bytes, 16 << 20);
    let device = Device::new(Arc::new(HostCopy::new(0)));
    let pins: Vec<Pins> =
        arena.regions().into_iter().map(|region| device.pin(region).unwrap()).collect();
    assert!(pins.iter().map(Pins::chunks).sum::<usize>() <= 2, "a GiB at a time");
}

/// The fake driver is loaded as the real one would be, so the tests that use it run in a process of
/// their own, which finds it first: this test again.
#[cfg(feature = "cuda")]
#[expect(unsafe_code, reason = "calls functions of the fake driver by their names")]
mod fake_driver {
    use std::{env, ffi::CString, fs, process::Command};

    use cudarc::driver::sys;

    use super::*;

    const CHILD: &str = "KVSTRATA_FAKE_CUDA";
    const NO_MEMORY: i32 = 2;
    const LAUNCH_FAILED: i32 = 719;
    /// What a transfer that failed for good keeps: its buffer, the memory, and the device's streams.
    const LOST: i64 = 4;

    /// Runs a test of this module again, where `directory` is searched first for libraries.
    fn run_again(test: &str, directory: &std::path::Path) {
        let program = env::current_exe().unwrap();
        let output = Command::new(program)
            .args(["--exact", &format!("gpu::tests::fake_driver::{test}"), "--nocapture"])
            .env(CHILD, "1")
            .env("LD_LIBRARY_PATH", directory)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
        assert!(said.contains("1 passed"), "{said}");
    }

    fn compiled() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("libcuda.c");
        fs::write(&source, include_str!("fake/libcuda.c")).unwrap();
        let compiled = Command::new("cc")
            .args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
            .args([directory.path().join("libcuda.so"), source])
            .output()
            .expect("a C compiler, which building RocksDB needs, too");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        directory
    }

    /// A function of the fake driver.
    ///
    /// # Safety
    /// It is of type `T`.
    unsafe fn function<T: Copy>(name: &str) -> T {
        let name = CString::new(name).unwrap();
        // SAFETY: loads the fake, or returns what is loaded.
        let driver = unsafe { sys::culib() };
        // SAFETY: the caller's promise.
        *unsafe { driver.get::<T>(name.as_bytes_with_nul()) }.unwrap()
    }

    /// What the fake driver counts.
    fn count(what: &str) -> i64 {
        // SAFETY: the fake's counters are functions of this type.
        let count = unsafe { function::<extern "C" fn() -> i64>(what) };
        count()
    }

    /// Makes a call of the driver fail: `times`, after some have passed.
    fn fail(call: &str, after: i32, times: i32, code: i32) {
        type Fail = extern "C" fn(*const std::ffi::c_char, i32, i32, i32);
        let call = CString::new(call).unwrap();
        // SAFETY: it is of this type.
        let fail = unsafe { function::<Fail>("fake_fail") };
        // It copies the text.
        fail(call.as_ptr(), after, times, code);
    }

    fn opened() -> (Arc<dyn DeviceCopy>, Device) {
        let copy: Arc<dyn DeviceCopy> = Arc::new(cuda::CudaCopy::open(0).unwrap().unwrap());
        (Arc::clone(&copy), Device::with_chunks(copy, CHUNK_BYTES))
    }

    #[test]
    fn cudarc_over_the_fake_driver_is_a_device() {
        if env::var_os(CHILD).is_none() {
            return run_again("cudarc_over_the_fake_driver_is_a_device", compiled().path());
        }
        let (copy, device) = opened();
        assert_eq!(device.name(), "fake GPU");
        device_copy_suite::run(&copy);
        assert!(count("fake_copies") > 500, "{}", count("fake_copies"));
        failures(&device);
        drop((device, copy));
        assert_eq!((count("fake_live"), count("fake_misuse")), (LOST, 0));
        assert_eq!(open(1).unwrap_err().kind(), ErrorKind::Unavailable, "there is no second GPU");
    }

    fn failures(device: &Device) {
        let memory = device.allocate(DEVICE_BYTES).unwrap();
        let live = count("fake_live");
        // Some chunks are pinned, and then no more: none stays.
        let region = Arena::new(16 << 20).unwrap().regions().remove(0);
        fail("cuMemHostRegister_v2", 3, 1, NO_MEMORY);
        let error = device.pin(Arc::clone(&region)).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
        assert_eq!(count("fake_live"), live);
        drop(device.pin(region).unwrap());
        // Half a batch, and a batch without an event behind it.
        let piece = |at: usize| {
            let bytes = device.pinned_buffer(1000).unwrap();
            (bytes::Bytes::from_owner(bytes), memory.range(at * 2000..at * 2000 + 1000).unwrap())
        };
        for (function, after) in [("cuMemcpyHtoDAsync_v2", 2), ("cuEventRecord", 0)] {
            fail(function, after, 1, LAUNCH_FAILED);
            let error = device.onload((0..4).map(piece)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(format!("{error:?}").contains("an error of the fake driver"), "{error:?}");
            assert_eq!(
                count("fake_live"),
                live,
                "what the device is done with is free: {function}"
            );
        }
        device.onload((0..4).map(piece)).unwrap().wait().unwrap();
        // A device that fails for good may still write: its memory is not used again.
        fail("cuEventSynchronize", 0, 1, LAUNCH_FAILED);
        device.onload([piece(0)]).unwrap().wait().unwrap_err();
        assert_eq!(count("fake_live"), live + 1, "a buffer is lost, and no more");
        let last = device.onload([piece(0)]).unwrap();
        fail("cuEventQuery", 0, 1, LAUNCH_FAILED);
        last.is_done().unwrap_err();
        last.wait().unwrap();
    }

    #[test]
    fn without_a_driver_no_gpu_is_found_and_nothing_panics() {
        if env::var_os(CHILD).is_none() {
            // Without the fake; a machine with a real driver has nothing to show here.
            let none = tempfile::tempdir().unwrap();
            return run_again("without_a_driver_no_gpu_is_found_and_nothing_panics", none.path());
        }
        // SAFETY: loads the driver's library, or none.
        if !unsafe { sys::is_culib_present() } {
            assert!(open(0).unwrap().is_none());
        }
    }

    #[test]
    fn what_starts_with_a_driver_that_fails_is_an_error() {
        if env::var_os(CHILD).is_none() {
            return run_again(
                "what_starts_with_a_driver_that_fails_is_an_error",
                compiled().path(),
            );
        }
        fail("cuInit", 0, 1, 100);
        let error = open(0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(error.to_string().contains("open GPU 0"), "{error}");
        assert!(open(0).unwrap().is_some(), "later it may work");
    }
}

#[test]
fn chunks_are_of_any_power_of_two() {
    let device =
        Device::with_chunks(Arc::new(HostCopy::new(100)), NonZeroUsize::new(4096).unwrap());
    let memory = device.allocate(10).unwrap();
    let whole = || memory.range(0..10).unwrap();
    device.onload([(bytes::Bytes::from_static(b"0123456789"), whole())]).unwrap().wait().unwrap();
    let read = device.offload([(whole(), device.pinned_buffer(10).unwrap())]).unwrap().wait();
    assert_eq!(&read.unwrap()[0][..], b"0123456789");
}
