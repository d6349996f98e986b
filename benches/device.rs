//! How fast do blocks move between the arena and a GPU, and is every byte right?
//!
//! First the contract of a device is put to it, then blocks of 2 MiB are copied in batches of 64: from and
//! to an arena that is pinned, an arena that is not, and with places that are not neighbours. Floor:
//! memcpy of the same blocks on one core. Without a GPU, host memory stands in for it: that shows what
//! the seam costs, and nothing of a GPU. Not measured: verification, sockets.
//!
//! ```text
//! cargo bench --profile dev --bench device
//! ```
//! Table: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "a bench prints its table and fails by panicking"
)]

mod support;

use std::{hint::black_box, sync::Arc};

use bytes::Bytes;
use kvstrata_tiers::{
    dram::{BlockWriter, Payload},
    gpu::{self, Device, DeviceMemory, HostCopy},
    testing::{Arena, Draws, device_copy_suite},
};
use support::Samples;

const BLOCK_BYTES: usize = 2 << 20;
const BLOCKS: usize = 64;
/// Blocks and as many places to copy back to.
const ARENA_BYTES: u64 = 2 * (BLOCK_BYTES * BLOCKS) as u64 + (128 << 20);
const ROUNDS: usize = 15;

fn main() {
    let device = gpu::open(0).expect("the GPU can be used");
    let host = || Device::new(Arc::new(HostCopy::new(2 << 30)));
    let is_gpu = device.is_some();
    let device = device.unwrap_or_else(host);
    device_copy_suite::run(device.copy());
    println!("{}: keeps the contract of a device", device.name());
    if !is_gpu {
        println!("no GPU here: host memory stands in, so these are no figures of one");
    }
    println!("{:>28} {:>8} {:>8} {:>8}", "GB/s", "", "median", "best");
    let arena = Arena::new(ARENA_BYTES).unwrap();
    let memory = device.allocate(BLOCK_BYTES * BLOCKS).unwrap();
    let bench = Bench { device, memory, blocks: filled(&arena) };
    bench.floor();
    bench.both("not pinned", &arena, &in_order());
    let pins: Vec<_> =
        arena.regions().into_iter().map(|region| bench.device.pin(region).unwrap()).collect();
    bench.both("pinned", &arena, &in_order());
    bench.both("pinned, places in no order", &arena, &shuffled());
    drop(pins);
}

struct Bench {
    device: Device,
    memory: Arc<DeviceMemory>,
    blocks: Vec<Payload>,
}

impl Bench {
    fn floor(&self) {
        let mut target = vec![0; BLOCK_BYTES * BLOCKS];
        let copy = measured(|| {
            for (to, from) in target.chunks_mut(BLOCK_BYTES).zip(&self.blocks) {
                to.copy_from_slice(from.as_ref());
            }
            black_box(&target);
        });
        show("floor", "memcpy", &copy);
    }

    /// Onloads the blocks to `places`, and copies them back to the arena.
    fn both(&self, what: &str, arena: &Arena, places: &[usize]) {
        let range = |place: &usize| {
            self.memory.range(place * BLOCK_BYTES..(place + 1) * BLOCK_BYTES).unwrap()
        };
        let onload = measured(|| {
            let pieces = self.blocks.iter().zip(places);
            let pieces =
                pieces.map(|(block, place)| (Bytes::from_owner(block.clone()), range(place)));
            self.device.onload(pieces).unwrap().wait().unwrap();
        });
        show(what, "onload", &onload);
        let mut writers = Some(places.iter().map(|_| writer(arena)).collect::<Vec<_>>());
        let offload = measured(|| {
            let pieces = places.iter().map(range).zip(writers.take().unwrap());
            writers = Some(self.device.offload(pieces).unwrap().wait().unwrap());
        });
        for (writer, block) in writers.unwrap().iter().zip(&self.blocks) {
            assert!(writer.bytes() == block.as_ref(), "wrong bytes");
        }
        show(what, "offload", &offload);
    }
}

fn writer(arena: &Arena) -> BlockWriter {
    arena.writer(BLOCK_BYTES as u32).expect("the arena has room")
}

fn filled(arena: &Arena) -> Vec<Payload> {
    let block = |number: usize| {
        let mut draws = Draws::new(number as u64);
        let bytes: Vec<u8> =
            (0..BLOCK_BYTES / 8).flat_map(|_| draws.draw().to_le_bytes()).collect();
        arena.sealed(&bytes).expect("the arena has room")
    };
    (0..BLOCKS).map(block).collect()
}

fn in_order() -> Vec<usize> {
    (0..BLOCKS).collect()
}

fn shuffled() -> Vec<usize> {
    let (mut places, mut draws) = (in_order(), Draws::new(1));
    places.sort_by_cached_key(|_| draws.draw());
    places
}

fn measured(mut batch: impl FnMut()) -> Samples {
    Samples::of(ROUNDS, |_| batch())
}

/// GB/s of a batch: the median of the rounds, and the best.
fn show(what: &str, way: &str, samples: &Samples) {
    let rate = |share: f64| (BLOCK_BYTES * BLOCKS) as f64 / samples.at(share) / 1e3;
    println!("{what:>28} {way:>8} {:>8.2} {:>8.2}", rate(0.5), rate(0.0));
}
