//! What do the codings of the object tier save on real KV cache, and what do they cost?
//!
//! Blocks of bf16 of three texts (`kv/*_b16.kv` of the shared data), whole (16 tokens, 368,640 bytes)
//! and cut into shorter ones; a sample made here, which is more regular, when they are not there.
//! Floor: copying the same bytes (memcpy). Not measured: the bucket, checksums, several cores.
//!
//! ```text
//! cargo bench --profile dev --bench codec
//! ```
//! The dev profile is optimised. Tables: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "../integration/shared_data.rs"]
mod shared_data;
#[path = "../integration/skipped.rs"]
mod skipped;
mod support;

use std::{fs, hint::black_box};

use kvstrata_tiers::{
    object::codec::{Coding, Decoder, Encoder},
    testing::Draws,
};
use support::Samples;

/// Each holds six blocks.
const SAMPLES: [&str; 3] = ["kv/agent_b16.kv", "kv/gpl3_b16.kv", "kv/pycode_b16.kv"];
/// Bytes of a whole block, and of shorter ones cut from it.
const LENGTHS: [usize; 3] = [368_640, 61_440, 4096];
/// The fastest of them counts: others use the machine, too.
const ROUNDS: usize = 15;
/// The blocks, again and again: more than the caches hold, so that they come from memory.
const WORKING_SET: usize = 64 << 20;

fn main() {
    let (name, sample) = sample();
    let memory = sample.repeat(WORKING_SET / sample.len());
    println!("{name}, {} bytes; MB/s of the block's bytes, one core", sample.len());
    println!("{:>10} {:>22} {:>8} {:>10} {:>10}", "bytes", "", "ratio", "encode", "decode");
    for len in LENGTHS {
        let blocks: Vec<&[u8]> = memory.chunks_exact(len).collect();
        let mut target = vec![0; len];
        let copy = rate(&blocks, |block| {
            target.copy_from_slice(block);
            black_box(&target);
        });
        println!("{len:>10} {:>22} {:>8} {copy:>10.0} {copy:>10.0}", "floor: memcpy", "1.000");
        for (name, element_bytes) in [("planes-zstd (ours)", 2), ("zstd-1", 1)] {
            let [ratio, encoding, decoding] = measure(&blocks, element_bytes);
            println!("{len:>10} {name:>22} {ratio:>8.3} {encoding:>10.0} {decoding:>10.0}");
        }
    }
}

/// Ratio, and MB/s of encoding and decoding.
fn measure(blocks: &[&[u8]], element_bytes: u8) -> [f64; 3] {
    let mut encoder = Encoder::default();
    let encoding = rate(blocks, |block| {
        black_box(encoder.encode(block, element_bytes));
    });
    let stored: Vec<(Coding, Vec<u8>)> = blocks
        .iter()
        .map(|block| {
            let (coding, stored) = encoder.encode(block, element_bytes);
            (coding, stored.to_vec())
        })
        .collect();
    let len = blocks[0].len();
    let (mut decoder, mut target) = (Decoder::default(), vec![0; len]);
    for ((coding, stored), block) in stored.iter().zip(blocks) {
        decoder.decode(*coding, stored, &mut target).unwrap();
        assert_eq!(target, *block, "a block came back changed");
    }
    let micros = Samples::of(ROUNDS, |_| {
        for (coding, stored) in &stored {
            decoder.decode(*coding, stored, &mut target).unwrap();
            black_box(&target);
        }
    });
    let all = (len * blocks.len()) as f64;
    let kept: usize = stored.iter().map(|(_, stored)| stored.len()).sum();
    [all / kept as f64, encoding, all / micros.at(0.0)]
}

/// MB/s over all blocks.
fn rate(blocks: &[&[u8]], mut act: impl FnMut(&[u8])) -> f64 {
    let samples = Samples::of(ROUNDS, |_| blocks.iter().for_each(|block| act(block)));
    (blocks[0].len() * blocks.len()) as f64 / samples.at(0.0)
}

/// The bytes of the real blocks, or of made ones.
fn sample() -> (&'static str, Vec<u8>) {
    let found: Option<Vec<_>> =
        SAMPLES.iter().map(|name| shared_data::find("bench codec", name)).collect();
    let Some(paths) = found else { return ("self-made sample", made()) };
    let bytes = paths.iter().flat_map(|path| fs::read(path).expect("a readable sample"));
    ("real KV cache", bytes.collect())
}

/// Numbers around zero, as bf16: few exponents, noise behind them.
fn made() -> Vec<u8> {
    let mut draws = Draws::new(1);
    let mut number = || {
        let sum: u64 = (0..4).map(|_| draws.below(1 << 16)).sum();
        let number = sum as f32 / 65_536.0 - 2.0;
        ((number.to_bits() >> 16) as u16).to_le_bytes()
    };
    (0..368_640 * 18 / 2).flat_map(|_| number()).collect()
}
