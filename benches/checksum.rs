//! Which checksum guards a part? Speed of the candidates on one core, for blocks of common sizes.
//!
//! Not measured: how well they detect errors (see docs/decisions/0002-part-checksum.md). Floor:
//! reading every byte once (a sum of words), and copying it (memcpy). The last row copies, too.
//!
//! ```text
//! cargo bench --bench checksum
//! ```
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    reason = "a bench prints its table and fails by panicking"
)]

mod support;

use std::hint::black_box;

use kvstrata_tiers::{
    block::BlockHash,
    checksum::PartHasher,
    namespace::NamespaceId,
    shared::{Room, SharedBytes},
};
use support::Samples;
use xxhash_rust::{xxh3, xxh64};

const SIZES: [usize; 3] = [4 << 10, 368_640, 2 << 20];
/// More than the last-level cache of one core, so that blocks come from memory as in service.
const WORKING_SET: usize = 64 << 20;

type Candidate = (&'static str, fn(&[u8]) -> u64);

const CANDIDATES: [Candidate; 8] = [
    ("read (sum of words)", read),
    ("ours", |bytes| {
        let mut hasher = hasher();
        hasher.update(bytes);
        hasher.checksum()
    }),
    ("xxh3-64 (xxhash-rust)", |bytes| xxh3::xxh3_64_with_seed(bytes, 7)),
    ("xxh3-64 (twox-hash)", |bytes| twox_hash::XxHash3_64::oneshot_with_seed(7, bytes)),
    ("xxh3-128, low half", |bytes| {
        #[expect(clippy::cast_possible_truncation, reason = "only used up")]
        let low = xxh3::xxh3_128_with_seed(bytes, 7) as u64;
        low
    }),
    ("xxh64", |bytes| xxh64::xxh64(bytes, 7)),
    ("crc32c", |bytes| u64::from(crc32c::crc32c(bytes))),
    ("blake3", |bytes| u64::from(blake3::hash(bytes).as_bytes().iter().copied().max().unwrap())),
];

fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

fn main() {
    let memory: Vec<u8> = (0..=255).cycle().take(WORKING_SET).collect();
    println!("{:>22}{}", "GB/s, one core", SIZES.map(|size| format!("{size:>12}")).concat());
    for (name, sum) in CANDIDATES {
        print!("{name:>22}");
        for size in SIZES {
            print!(
                "{:>12.2}",
                rate(&memory, size, |bytes| {
                    black_box(sum(bytes));
                })
            );
        }
        println!();
    }
    let mut target = vec![0; SIZES[2]];
    print!("{:>22}", "memcpy");
    for size in SIZES {
        print!(
            "{:>12.2}",
            rate(&memory, size, |bytes| {
                target[..bytes.len()].copy_from_slice(bytes);
                black_box(&target);
            })
        );
    }
    println!();
    print!("{:>22}", "ours, copying");
    for size in SIZES {
        print!(
            "{:>12.2}",
            rate(&memory, size, |bytes| {
                let mut hasher = hasher();
                hasher.copy(SharedBytes::of(bytes), Room::from(&mut target[..bytes.len()]));
                black_box(hasher.checksum());
                black_box(&target);
            })
        );
    }
    println!();
}

fn hasher() -> PartHasher {
    let block = BlockHash::new(&[1; 32]).unwrap();
    PartHasher::new(&NamespaceId::from_bytes([2; 32]), &block, 0, 0)
}

/// Median bytes per second over the working set, in GB/s.
fn rate(memory: &[u8], size: usize, mut act: impl FnMut(&[u8])) -> f64 {
    let samples = Samples::of(11, |_| memory.chunks_exact(size).for_each(&mut act));
    let bytes = memory.len() / size * size;
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let bytes = bytes as f64;
    bytes / (samples.at(0.5) * 1e3)
}
