//! A full disk: another process takes all the room there is, and all that the tier gives up.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
};

use kvstrata_proto::v1::PutOutcome;

use super::{Home, count_right, store};
use crate::{
    harness::{SERVER_WAIT, wait_until},
    tmpfs::Tmpfs,
    wire::{Wire, namespace_of},
};

const FULL: &str = "kvstrata_nvme_state{state=\"full\"}";
const READY: &str = "kvstrata_nvme_state{state=\"ready\"}";
/// Blocks stored before the disk is full: 20 segments of 1 MiB, more than dram holds.
const BLOCKS: u64 = 300;
/// Of those, at least so many must be served all the while, in percent. The tier gives way down to
/// half of what it had, and by one segment more when it tries to exchange one in vain.
const SERVED_PERCENT_MIN: usize = 40;
/// Lines of WARN and ERROR that the whole story may make.
const LOUD_MAX: usize = 8;

/// The other process: takes what room there is whenever it is asked.
struct Ballast(fs::File, PathBuf);

impl Ballast {
    fn new(folder: &Path) -> Self {
        let path = folder.join("ballast");
        Self(fs::File::create(&path).unwrap(), path)
    }

    fn grow(&mut self) {
        while self.0.write_all(&[1; 16 << 10]).is_ok() {}
    }

    fn give_back(self) {
        fs::remove_file(self.1).unwrap();
    }
}

/// Puts blocks that nobody has put before, durably; returns how many became durable.
async fn put_more(wire: &mut Wire, next: &mut u64) -> usize {
    let numbers: Vec<u64> = (*next..*next + 20).collect();
    *next += 20;
    let outcomes = wire.put_durable(&numbers).await.unwrap();
    let stored = outcomes.iter().filter(|outcome| **outcome == PutOutcome::Stored).count();
    let others = outcomes.iter().filter(|outcome| **outcome == PutOutcome::NotDurable).count();
    assert_eq!(stored + others, 20, "{outcomes:?}");
    assert_eq!(count_right(wire, numbers).await, 20, "in dram in any case");
    stored
}

fn loud(log: &str) -> usize {
    log.lines().filter(|line| line.contains(" WARN ") || line.contains("ERROR ")).count()
}

#[tokio::test]
async fn a_full_disk_stops_durable_puts_and_nothing_else() {
    let test = "a_full_disk_stops_durable_puts_and_nothing_else";
    let Some(mount) = Tmpfs::mount(test, "size=64m") else { return };
    let home = Home::new();
    let builder = home.server_at(mount.path()).dram("16MiB").set("nvme.segment_bytes", "1MiB");
    let server = builder.start().await;
    let mut wire = Wire::connect(&server, namespace_of("m", 64 << 10)).await;
    store(&mut wire, 0..BLOCKS, true).await;
    let (mut ballast, mut next) = (Ballast::new(mount.path()), BLOCKS);
    let mut none_durable = 0;
    // Twice the time that writes pause for a full disk, so that it has tried again.
    let started = tokio::time::Instant::now();
    while started.elapsed() < std::time::Duration::from_secs(5) || none_durable < 10 {
        assert!(started.elapsed() < SERVER_WAIT, "still durable");
        ballast.grow();
        none_durable += usize::from(put_more(&mut wire, &mut next).await == 0);
        let served = count_right(&mut wire, 0..BLOCKS).await;
        assert!(served * 100 >= 300 * SERVED_PERCENT_MIN, "{served} of {BLOCKS} served");
    }
    ballast.grow();
    assert_eq!(put_more(&mut wire, &mut next).await, 0);
    assert_eq!((server.metric(FULL).await, server.metric(READY).await), (1.0, 0.0));
    assert_eq!(wire.put(&[next]).await, [PutOutcome::Stored], "what need not be durable");

    ballast.give_back();
    let mut durable = 0;
    while durable < 20 {
        assert!(started.elapsed() < SERVER_WAIT, "not durable again:\n{}", server.log());
        durable = put_more(&mut wire, &mut next).await;
    }
    wait_until("ready", SERVER_WAIT, async || server.metric(READY).await == 1.0).await;
    assert_eq!(server.metric(FULL).await, 0.0);
    let last: Vec<u64> = (next - 20..next).collect();
    let log = server.kill();
    assert!(loud(&log) <= LOUD_MAX, "{log}");
    let server = home.server_at(mount.path()).set("nvme.segment_bytes", "1MiB").start().await;
    let mut wire = Wire::connect(&server, namespace_of("m", 64 << 10)).await;
    assert_eq!(count_right(&mut wire, last).await, 20, "what was durable is there");
    // Which of the older ones are left depends on how often the disk was full.
    let found = server.metric("kvstrata_nvme_blocks").await;
    let served = count_right(&mut wire, 0..next).await;
    assert!(found >= 100.0 && served as f64 == found, "{served} of {found} that were found");
}
