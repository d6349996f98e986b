//! What does the nvme tier reach of what the disk gives, how fast is a restart with many blocks, and
//! what do reads notice of writes?
//!
//! Floor: fio with direct I/O at the same block size and depth, in turn with ours; its writes sync as
//! often as ours do. Not measured: other file systems, several disks, verification of part checksums
//! (benches/checksum.rs), which the stack does after a read.
//!
//! ```text
//! cargo bench --bench nvme --profile dev -- all          (or: device, demotion, restart, estimates)
//! KVSTRATA_BENCH_DIRECTORY=/somewhere/on/the/disk        (default: target/)
//! ```
//! The dev profile is optimised, and RocksDB is not compiled a second time for it. Needs fio.
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "nvme/device.rs"]
mod device;
#[path = "nvme/estimates.rs"]
mod estimates;
#[path = "../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "nvme/restart.rs"]
mod restart;
mod support;
#[path = "nvme/tier.rs"]
mod tier;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let parts: Vec<String> =
        std::env::args().skip(1).filter(|part| !part.starts_with('-')).collect();
    let wanted = |part: &str| parts.iter().any(|given| given == part || given == "all");
    if !["all", "device", "demotion", "restart", "estimates"].into_iter().any(wanted) {
        println!("name a part: all, device, demotion, restart, estimates");
    }
    if wanted("device") {
        runtime.block_on(device::against_fio());
    }
    if wanted("demotion") {
        runtime.block_on(device::reads_beside_demotion());
    }
    if wanted("restart") {
        runtime.block_on(restart::of_a_million_blocks());
    }
    if wanted("estimates") {
        runtime.block_on(estimates::while_throttled());
    }
}
