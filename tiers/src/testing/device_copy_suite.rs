//! The contract of [`DeviceCopy`](crate::gpu::DeviceCopy), put to a [`Device`] over it.
#![expect(clippy::panic, reason = "a contract fails by panicking with what was broken")]

use std::{num::NonZeroUsize, sync::Arc, thread};

use bytes::Bytes;

use super::{Arena, Draws};
use crate::{
    dram::BlockWriter,
    error::ErrorKind,
    gpu::{Device, DeviceCopy, DeviceMemory, DeviceRange, PinnedBuffer},
};

/// Bytes of the memory on the device that the steps copy to: it must have twice as many.
pub const DEVICE_BYTES: usize = 4 << 20;
/// Pins end at multiples of this: blocks in the arena reach over it.
pub const CHUNK_BYTES: NonZeroUsize = NonZeroUsize::new(64 << 10).expect("not 0");
const ARENA_BYTES: u64 = 16 << 20;
/// Blocks of the batches; no whole number of them fits into a chunk.
const BLOCK_BYTES: usize = 40_000;
const BLOCKS: usize = 64;

/// Puts a device through all steps. Nothing of it may be in use before, and nothing is afterwards.
///
/// # Blocking
/// A second, on a slow device.
///
/// # Panics
/// Where the device breaks the contract.
pub fn run(copy: &Arc<dyn DeviceCopy>) {
    let bench = Bench::new(Device::with_chunks(Arc::clone(copy), CHUNK_BYTES));
    bench.comes_back_as_it_was();
    bench.comes_back_by_the_arena_pinned_in_chunks();
    bench.neighbours_and_strangers_go_to_their_places();
    bench.batches_run_beside_each_other();
    bench.what_nobody_waits_for_is_done();
    bench.what_cannot_be_is_refused();
    bench.memory_is_pinned_once();
}

struct Bench {
    device: Device,
    memory: Arc<DeviceMemory>,
}

impl Bench {
    fn new(device: Device) -> Self {
        let memory = device.allocate(DEVICE_BYTES);
        let memory = memory.unwrap_or_else(|error| panic!("memory of the device: {error}"));
        Self { device, memory }
    }

    fn place(&self, block: usize) -> DeviceRange {
        let start = block * BLOCK_BYTES;
        match self.memory.range(start..start + BLOCK_BYTES) {
            Ok(range) => range,
            Err(error) => panic!("a range of its memory: {error}"),
        }
    }

    fn pinned(&self, bytes: usize) -> PinnedBuffer {
        match self.device.pinned_buffer(bytes) {
            Ok(buffer) => buffer,
            Err(error) => panic!("a pinned buffer: {error}"),
        }
    }

    fn onload(&self, pieces: Vec<(Bytes, DeviceRange)>) {
        let transfer = self.device.onload(pieces).and_then(|transfer| transfer.wait().map(drop));
        transfer.unwrap_or_else(|error| panic!("onload: {error}"));
    }

    /// What is at these places.
    fn read(&self, blocks: &[usize]) -> Vec<PinnedBuffer> {
        let pieces = blocks.iter().map(|block| (self.place(*block), self.pinned(BLOCK_BYTES)));
        let read = self.device.offload(pieces.collect::<Vec<_>>());
        match read.and_then(crate::gpu::Transfer::wait) {
            Ok(read) => read,
            Err(error) => panic!("offload: {error}"),
        }
    }

    fn comes_back_as_it_was(&self) {
        let places = || (0..BLOCKS).map(|block| self.place(block));
        self.onload((0..BLOCKS).map(|block| bytes(1, block)).zip(places()).collect());
        let all: Vec<usize> = (0..BLOCKS).collect();
        for (block, read) in self.read(&all).iter().enumerate() {
            assert!(read[..] == bytes(1, block), "wrong bytes of block {block}");
        }
        // The source is the only owner of its bytes, and it is pinned memory.
        let mut source = self.pinned(BLOCK_BYTES);
        source.copy_from_slice(&bytes(2, 0));
        self.onload(vec![(Bytes::from_owner(source), self.place(3))]);
        let read = self.read(&[2, 3, 4]);
        let read: Vec<&[u8]> = read.iter().map(AsRef::as_ref).collect();
        assert!(
            read == [&bytes(1, 2)[..], &bytes(2, 0)[..], &bytes(1, 4)[..]],
            "neighbours changed"
        );
    }

    fn comes_back_by_the_arena_pinned_in_chunks(&self) {
        let arena = arena();
        let pins: Vec<_> =
            arena.regions().into_iter().map(|region| self.device.pin(region)).collect();
        for pin in &pins {
            let chunks = pin.as_ref().map(crate::gpu::Pins::chunks);
            assert!(matches!(chunks, Ok(2..)), "pinned in chunks: {chunks:?}");
        }
        let blocks: Vec<_> =
            (0..BLOCKS).filter_map(|block| arena.sealed(&bytes(3, block))).collect();
        assert_eq!(blocks.len(), BLOCKS, "the arena has room");
        let places = (0..BLOCKS).map(|block| self.place(block));
        self.onload(blocks.into_iter().map(Bytes::from_owner).zip(places).collect());
        let pieces = (0..BLOCKS).map(|block| (self.place(block), writer(&arena)));
        let read = self.device.offload(pieces.collect::<Vec<_>>());
        match read.and_then(crate::gpu::Transfer::wait) {
            Ok(read) => {
                for (block, writer) in read.iter().enumerate() {
                    assert!(writer.bytes() == bytes(3, block), "wrong bytes of block {block}");
                }
            }
            Err(error) => panic!("offload to the arena: {error}"),
        }
    }

    fn neighbours_and_strangers_go_to_their_places(&self) {
        let mut draws = Draws::new(11);
        let whole = Bytes::from_owner(self.filled(4, 8));
        for _ in 0..20 {
            // Some in their order, some not, some twice from one source.
            let first = index(draws.below(BLOCKS as u64 - 8));
            let order: Vec<usize> = (0..8).map(|_| index(draws.below(8))).collect();
            let pieces = order.iter().enumerate().map(|(position, from)| {
                let from = from * BLOCK_BYTES;
                (whole.slice(from..from + BLOCK_BYTES), self.place(first + position))
            });
            self.onload(pieces.collect());
            let places: Vec<usize> = (first..first + 8).collect();
            for (read, from) in self.read(&places).iter().zip(&order) {
                assert!(read[..] == bytes(4, *from), "wrong bytes from {from} of {order:?}");
            }
        }
    }

    fn filled(&self, seed: u64, blocks: usize) -> PinnedBuffer {
        let mut filled = self.pinned(blocks * BLOCK_BYTES);
        for (block, slot) in filled.chunks_mut(BLOCK_BYTES).enumerate() {
            slot.copy_from_slice(&bytes(seed, block));
        }
        filled
    }

    fn batches_run_beside_each_other(&self) {
        thread::scope(|scope| {
            for part in 0..4 {
                scope.spawn(move || {
                    let blocks: Vec<usize> = (part * 16..part * 16 + 16).collect();
                    for round in 0..8 {
                        let seed = 100 + round;
                        let pieces =
                            blocks.iter().map(|block| (bytes(seed, *block), self.place(*block)));
                        self.onload(pieces.collect());
                        for (read, block) in self.read(&blocks).iter().zip(&blocks) {
                            assert!(read[..] == bytes(seed, *block), "wrong bytes of {block}");
                        }
                    }
                });
            }
        });
    }

    fn what_nobody_waits_for_is_done(&self) {
        let pieces: Vec<_> = (0..8).map(|block| (bytes(5, block), self.place(block))).collect();
        match self.device.onload(pieces) {
            Ok(transfer) => drop(transfer),
            Err(error) => panic!("onload: {error}"),
        }
        let pieces: Vec<_> =
            (0..8).map(|block| (self.place(block), self.pinned(BLOCK_BYTES))).collect();
        let transfer = self.device.offload(pieces);
        let transfer = transfer.unwrap_or_else(|error| panic!("offload: {error}"));
        // Asked until it is done, as an engine's scheduler does.
        while !matches!(transfer.is_done(), Ok(true)) {
            thread::yield_now();
        }
        let read = transfer.wait().unwrap_or_else(|error| panic!("offload: {error}"));
        for (block, read) in read.iter().enumerate() {
            assert!(read[..] == bytes(5, block), "wrong bytes of block {block}");
        }
    }

    fn what_cannot_be_is_refused(&self) {
        let kind = |result: crate::error::Result<()>| result.err().map(|error| error.kind());
        let invalid = Some(ErrorKind::Invalid);
        let short = vec![(bytes(6, 0), self.place(0)), (bytes(6, 1).slice(1..), self.place(1))];
        assert_eq!(kind(self.device.onload(short).map(drop)), invalid, "a piece that is too short");
        let long = vec![(self.place(0), self.pinned(BLOCK_BYTES + 1))];
        assert_eq!(kind(self.device.offload(long).map(drop)), invalid, "a piece that is too long");
        let other = Device::new(Arc::new(crate::gpu::HostCopy::new(DEVICE_BYTES)));
        let elsewhere = other.onload(vec![(bytes(6, 0), self.place(0))]);
        assert_eq!(kind(elsewhere.map(drop)), invalid, "memory of another device");
        let is_there = |read: &PinnedBuffer| read[..] == bytes(5, 0);
        assert!(self.read(&[0]).first().is_some_and(is_there), "what is refused copies nothing");
        for range in [0..0, 5..5, 0..DEVICE_BYTES + 1] {
            let refused = self.memory.range(range.clone()).map(drop);
            assert_eq!(kind(refused), invalid, "{range:?}");
        }
        assert_eq!(kind(self.device.allocate(0).map(drop)), invalid);
        assert_eq!(kind(self.device.pinned_buffer(0).map(drop)), invalid);
        let much = kind(self.device.allocate(1 << 60).map(drop));
        assert!(matches!(much, Some(ErrorKind::Exhausted { .. })), "{much:?}");
    }

    fn memory_is_pinned_once(&self) {
        let arena = arena();
        let Some(region) = arena.regions().pop() else { panic!("an arena without memory") };
        let pins = self.device.pin(Arc::clone(&region));
        let pins = pins.unwrap_or_else(|error| panic!("pin: {error}"));
        for _ in 0..2 {
            let again = self.device.pin(Arc::clone(&region)).map(drop);
            assert_eq!(again.err().map(|error| error.kind()), Some(ErrorKind::Invalid), "twice");
        }
        drop(pins);
        let again = self.device.pin(region).map(drop);
        again.unwrap_or_else(|error| panic!("pin what is not pinned any more: {error}"));
    }
}

fn arena() -> Arena {
    Arena::new(ARENA_BYTES).unwrap_or_else(|error| panic!("an arena: {error}"))
}

fn writer(arena: &Arena) -> BlockWriter {
    let len = u32::try_from(BLOCK_BYTES).unwrap_or(0);
    arena.writer(len).unwrap_or_else(|| panic!("the arena is full"))
}

fn index(drawn: u64) -> usize {
    usize::try_from(drawn).unwrap_or(0)
}

/// The bytes of a block.
fn bytes(seed: u64, block: usize) -> Bytes {
    let mut draws = Draws::new(seed * 1000 + block as u64);
    let mut bytes = Vec::with_capacity(BLOCK_BYTES);
    while bytes.len() < BLOCK_BYTES {
        bytes.extend_from_slice(&draws.draw().to_le_bytes());
    }
    bytes.truncate(BLOCK_BYTES);
    Bytes::from(bytes)
}
