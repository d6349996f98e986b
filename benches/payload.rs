//! Question: how fast does replay make and check payload on one core, for each source and length?
//!
//! Not measured: the network, the server, and the client's checksum, which comes on top.
//!
//! Command: `cargo bench --bench payload`. Last table, on a shared 2-core machine:
//!
//! ```text
//! source         bytes  make GiB/s check GiB/s
//! generated       4096        4.81        4.71
//! generated      65536        5.58        5.19
//! generated    2097152        5.60        4.99
//! generated   16777216        5.76        4.33
//! sampled         4096       17.09       15.84
//! sampled        65536       39.51       27.28
//! sampled      2097152       31.55       17.15
//! sampled     16777216       16.88        7.98
//! ```
#![allow(
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a bench prints its table and fails by panicking"
)]

use std::hint::black_box;

use kvstrata::replay::{
    Source,
    payload::{Checker, PartIdentity},
};
use kvstrata_tiers::{block::BlockHash, namespace::NamespaceId};
use tokio::time::{Duration, Instant};

/// Lengths of a part, in bytes.
const LENGTHS: [usize; 4] = [4 << 10, 64 << 10, 2 << 20, 16 << 20];
/// Time for each case.
const CASE_TIME: Duration = Duration::from_millis(500);
const GIB: f64 = (1_u64 << 30) as f64;

fn main() {
    let sample: Vec<u8> = (0..=255).cycle().take(2_211_840).collect();
    println!("{:<10}{:>10}{:>12}{:>12}", "source", "bytes", "make GiB/s", "check GiB/s");
    for (name, source) in
        [("generated", Source::Generated), ("sampled", Source::Sampled(sample.into()))]
    {
        for len in LENGTHS {
            let mut block = vec![0; len];
            let make = rate(len, |hash| source.fill(identity(hash), &mut block));
            let mut checker = Checker::new(source.clone(), len);
            let hash = BlockHash::from_array([7; 32]);
            source.fill(identity(&hash), &mut block);
            let check = rate(len, |_| {
                assert_eq!(checker.wrong_bytes(identity(&hash), &[black_box(&block)]), 0);
            });
            println!("{name:<10}{len:>10}{make:>12.2}{check:>12.2}");
        }
    }
}

/// GiB per second of `work` on blocks of `len` bytes.
fn rate(len: usize, mut work: impl FnMut(&BlockHash)) -> f64 {
    let started = Instant::now();
    let mut blocks = 0_u32;
    while started.elapsed() < CASE_TIME {
        let mut hash = [9; 32];
        for (to, from) in hash.iter_mut().zip(blocks.to_le_bytes()) {
            *to = from;
        }
        work(&BlockHash::from_array(hash));
        blocks += 1;
    }
    f64::from(blocks) * len as f64 / GIB / started.elapsed().as_secs_f64()
}

fn identity(hash: &BlockHash) -> PartIdentity<'_> {
    static NAMESPACE: std::sync::LazyLock<NamespaceId> =
        std::sync::LazyLock::new(|| NamespaceId::from_bytes([1; 32]));
    PartIdentity { namespace: &NAMESPACE, hash, part: 0 }
}
