//! How long does a lookup of 32,768 hashes (524 k tokens at 16) take in the stack itself, and what
//! does the map cost for each block?
//!
//! Not measured: the wire (benches/rpc.rs). Floor: one random read of a 64-byte line per hash over
//! as much memory as the map has, which is what any map must do.
//!
//! ```text
//! cargo bench --bench lookup
//! ```
//! Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    reason = "a bench prints its table and fails by panicking"
)]

mod support;

use std::{hint::black_box, sync::Arc};

use kvstrata_tiers::{
    block::Hashes,
    limits::INDEX_BYTES_PER_BLOCK,
    namespace::Namespace,
    stack::Ask,
    testing::{Fixture, pack},
};
use support::{Samples, rss_bytes};
use tokio::time::Instant;

const BLOCKS: u64 = 1_000_000;
const ASKED: u64 = 32_768;
const ROUNDS: usize = 200;

fn main() {
    let before = rss_bytes();
    let fixture = Fixture::with_index(BLOCKS * 64 + (8 << 20), 2 * BLOCKS, Vec::new()).unwrap();
    while fixture.stack.pre_touch_step() {}
    let namespace = fixture.namespace("bench", &[64]).unwrap();
    let touched = rss_bytes();
    println!("arena backed beforehand: {} MiB", (touched - before) >> 20);
    let numbers: Vec<u64> = (0..BLOCKS).collect();
    for batch in numbers.chunks(32_768) {
        assert_eq!(fixture.put(&namespace, batch).unwrap(), batch.len());
    }
    let full = rss_bytes();
    let usage = fixture.stack.usage();
    println!("blocks: {}", usage.dram_blocks);
    let index_bytes = (full - touched) / BLOCKS;
    println!("index bytes per block (growth of RSS): {index_bytes}");
    assert!(index_bytes <= INDEX_BYTES_PER_BLOCK, "the memory budget counts on less");
    println!("  of which entries and places: {}", usage.index_bytes / BLOCKS);
    lookups(&fixture, &namespace);
    floor(usage.index_bytes);
}

fn lookups(fixture: &Fixture, namespace: &Arc<Namespace>) {
    let chains: Vec<Vec<u8>> = (0..BLOCKS / ASKED)
        .map(|chain| pack(&(chain * ASKED..(chain + 1) * ASKED).collect::<Vec<_>>()))
        .collect();
    let absent = pack(&(BLOCKS..BLOCKS + ASKED).collect::<Vec<_>>());
    let lease = Ask { sparse: false, pin_bytes_max: Some(u64::MAX) };
    for (name, packed, ask) in [
        ("all present, no lease", &chains, Ask::default()),
        ("all present, lease and release", &chains, lease),
        ("none present", &vec![absent], Ask::default()),
    ] {
        let mut pins = Vec::new();
        let mut releases = Vec::new();
        for round in 0..ROUNDS {
            let packed = &packed[round % packed.len()];
            let started = Instant::now();
            let answer = fixture.stack.lookup(namespace, Hashes::new(packed, 32).unwrap(), ask);
            pins.push(started.elapsed());
            fixture.stack.unpin(black_box(answer).pins);
            releases.push(started.elapsed());
        }
        let [lookups, all] = [pins, releases].map(|durations| Samples::from_durations(&durations));
        println!("lookup of {ASKED}, {name}: {lookups}; with its release {all}");
    }
}

fn floor(index_bytes: u64) {
    let lines = vec![[1_u64; 8]; (index_bytes / 64) as usize];
    let samples = Samples::of(ROUNDS, |round| {
        let mut at = round as u64;
        let mut sum = 0;
        for _ in 0..ASKED {
            at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += lines[(at >> 20) as usize % lines.len()][0];
        }
        black_box(sum);
    });
    println!("floor, {ASKED} random line reads: {samples}");
}
