//! Both engines: the contract, what a forced engine does, and what happens at the end of a device.

use std::{io::ErrorKind, sync::Arc, time::Duration};

use super::{
    aligned::AlignedBuf,
    device::{Engine, Landing, SegmentId, SyncPoint, open, read_full, write_full},
};
use crate::testing::device_suite;

const FIRST: SegmentId = SegmentId(1);

/// The engines that this kernel permits.
fn engines() -> Vec<Engine> {
    let directory = tempfile::tempdir().unwrap();
    match open(directory.path(), Engine::Uring) {
        Ok(_) => vec![Engine::Pread, Engine::Uring],
        Err(error) => {
            assert!(error.to_string().contains("choose the engine auto or pread"), "{error}");
            println!("io_uring is not tested here: {error}");
            vec![Engine::Pread]
        }
    }
}

#[tokio::test]
async fn pread_keeps_the_contract() {
    let directory = tempfile::tempdir().unwrap();
    device_suite::run(open(directory.path(), Engine::Pread).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_engine_keeps_the_contract() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let device = open(directory.path(), engine).unwrap();
        let expected = if engine == Engine::Uring { "io_uring" } else { "pread" };
        assert_eq!(device.name(), expected);
        device_suite::run(device).await;
    }
}

#[tokio::test]
async fn auto_opens_anywhere_and_finds_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    for engine in engines() {
        let device = open(directory.path(), engine).unwrap();
        let number = device.list().unwrap().len();
        device.create(SegmentId(u64::try_from(number).unwrap() + 1), 1 << 16).unwrap();
    }
    let device = open(directory.path(), Engine::Auto).unwrap();
    assert_eq!(device.list().unwrap().len(), engines().len());
    let missing = open(&directory.path().join("missing"), Engine::Auto).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert!(missing.to_string().contains("missing"), "{missing}");
}

#[tokio::test]
async fn operations_outlive_the_device() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let device = open(directory.path(), engine).unwrap();
        device.create(FIRST, 1 << 20).unwrap();
        let (_, written) = write_full(&*device, FIRST, 0, AlignedBuf::zeroed(1 << 20).into()).await;
        written.unwrap();
        let mut reads = Vec::new();
        for _ in 0..100 {
            let landing = Landing::new(AlignedBuf::zeroed(1 << 16), None);
            let mut read = device.read(FIRST, 0, landing);
            let started =
                std::future::poll_fn(|context| std::task::Poll::Ready(read.as_mut().poll(context)));
            if started.await.is_pending() {
                reads.push(read);
            }
        }
        let late = device.read(FIRST, 0, Landing::new(AlignedBuf::zeroed(1 << 16), None));
        drop(device);
        for read in reads {
            assert_eq!(read.await.1.unwrap(), 1 << 16, "{engine:?}");
        }
        let _closed = late.await.1.unwrap_err();
    }
}

/// The end of the thread that made the calls must not end the operations.
#[tokio::test]
async fn operations_outlive_the_thread_of_their_caller() {
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let device = open(directory.path(), engine).unwrap();
        device.create(FIRST, 64 << 20).unwrap();
        device.sync(FIRST, SyncPoint::Records).await.unwrap();
        let caller = {
            let device = Arc::clone(&device);
            std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                runtime.block_on(async {
                    for number in 0..32 {
                        let mut from = AlignedBuf::zeroed(2 << 20);
                        from.fill(7);
                        let mut write = device.write(FIRST, number * (2 << 20), from.into());
                        std::future::poll_fn(|context| {
                            drop(write.as_mut().poll(context));
                            std::task::Poll::Ready(())
                        })
                        .await;
                    }
                });
            })
        };
        caller.join().unwrap();
        for number in 0..32 {
            let mut looks = 0;
            loop {
                let landing = Landing::new(AlignedBuf::zeroed(2 << 20), None);
                let (landing, read) = read_full(&*device, FIRST, number * (2 << 20), landing).await;
                read.unwrap();
                if landing.head.iter().all(|byte| *byte == 7) {
                    break;
                }
                looks += 1;
                assert!(looks < 1000, "{engine:?}: write {number} never happened");
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

#[tokio::test]
async fn threads_end_with_the_device() {
    fn threads() -> Vec<String> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        // One that ends meanwhile cannot be read.
        let names =
            tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.filter(|name| name.starts_with("nvme-")).collect()
    }
    async fn soon(what: &str, is_so: impl Fn() -> bool) {
        let mut looks = 0;
        while !is_so() {
            looks += 1;
            assert!(looks < 30_000, "{what}: {:?}", threads());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    for engine in engines() {
        let directory = tempfile::tempdir().unwrap();
        let devices: Vec<_> = (0..4).map(|_| open(directory.path(), engine).unwrap()).collect();
        soon("threads that start", || threads().len() >= 4).await;
        drop(devices);
    }
    // Other tests run beside this one: the count comes down some time, not at once.
    soon("threads that are left", || threads().is_empty()).await;
}
