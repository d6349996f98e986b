//! Memory of blocks without a stack, to drive a colder tier directly.

use std::sync::Arc;

use crate::{
    dram::{BlockWriter, Payload, Pool, seal, slot_bytes},
    error::Result,
    gpu::HostMemory,
};

/// An arena that hands out blocks to whoever asks.
#[derive(Debug)]
pub struct Arena(Arc<Pool>);

impl Arena {
    /// An arena of so many bytes.
    ///
    /// # Errors
    /// Those of the pool.
    pub fn new(bytes: u64) -> Result<Self> {
        Pool::new(bytes, Arc::default()).map(Self)
    }

    /// All of its memory.
    #[must_use]
    pub fn regions(&self) -> Vec<Arc<dyn HostMemory>> {
        self.0.regions()
    }

    /// Memory for a block of `len` bytes; `None` when the arena is full.
    #[must_use]
    pub fn writer(&self, len: u32) -> Option<BlockWriter> {
        self.0.allocate(slot_bytes(len, false), &[len])?.pop()
    }

    /// A block with these bytes; `None` when the arena is full or they are too many.
    #[must_use]
    pub fn sealed(&self, bytes: &[u8]) -> Option<Payload> {
        let len = u32::try_from(bytes.len()).ok()?;
        let mut writer = self.writer(len)?;
        writer.bytes_mut().copy_from_slice(bytes);
        seal(vec![writer], len).ok()
    }
}
