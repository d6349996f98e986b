//! The blocks that one client was told the places of. They stay where they are until it lets go or its
//! connection ends; there is no deadline, because whoever copies cannot be told to stop.

use std::{collections::VecDeque, sync::Arc};

use kvstrata_tiers::{
    error::{Error, Result},
    stack::Block,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::arena::Arena;

/// See the module.
#[derive(Debug)]
pub(crate) struct Pins {
    arena: Arc<Arena>,
    held: Mutex<Held>,
    released: Notify,
}

#[derive(Debug, Default)]
struct Held {
    /// With the numbers up to the latest.
    blocks: VecDeque<(Block, OwnedSemaphorePermit)>,
    bytes: usize,
    /// The number of the latest pin.
    latest: u64,
    /// Nothing will be let go any more but by the end of all.
    is_closed: bool,
}

/// Whether a block was pinned.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pinned {
    /// Under this number.
    As(u64),
    /// The client has as many as it may, and must let go first.
    Full,
    /// All clients together have as many as they may, or this one does not let go any more.
    Busy,
}

impl Pins {
    pub(super) fn new(arena: Arc<Arena>) -> Self {
        Self { arena, held: Mutex::default(), released: Notify::new() }
    }

    /// The arena that they are of.
    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Keeps a block where it is.
    pub(crate) fn pin(&self, block: &Block) -> Pinned {
        let bytes = block.len();
        let mut held = self.held.lock();
        if held.is_closed {
            return Pinned::Busy;
        }
        if !held.blocks.is_empty() && held.bytes + bytes > self.arena.client_bytes_max() {
            return Pinned::Full;
        }
        let kibibytes = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.arena.room);
        let Ok(room) = Semaphore::try_acquire_many_owned(room, kibibytes) else {
            return Pinned::Busy;
        };
        held.blocks.push_back((block.clone(), room));
        held.bytes += bytes;
        self.arena.pinned_bytes.inc_by(signed(bytes));
        held.latest += 1;
        Pinned::As(held.latest)
    }

    /// The client lets go of all up to the one with this number; returns that one.
    ///
    /// # Errors
    /// `Invalid` if there was none of this number yet.
    pub(crate) fn release(&self, through: u64) -> Result<Option<Block>> {
        let mut held = self.held.lock();
        if through > held.latest {
            let latest = held.latest;
            let text = format!("release: pin {through} given, {latest} at most was given out");
            return Err(Error::invalid(text));
        }
        let kept = usize::try_from(held.latest - through).unwrap_or(usize::MAX);
        let mut last = None;
        while held.blocks.len() > kept
            && let Some((block, _room)) = held.blocks.pop_front()
        {
            held.bytes -= block.len();
            self.arena.pinned_bytes.dec_by(signed(block.len()));
            last = Some(block);
        }
        drop(held);
        self.released.notify_one();
        Ok(last)
    }

    /// The client says no more, so it lets go of nothing: whoever waits for that need not.
    pub(crate) fn close(&self) {
        self.held.lock().is_closed = true;
        self.released.notify_one();
    }

    /// Waits until the client has let go of some, or will not. There is one who waits.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn wait(&self) {
        self.released.notified().await;
    }
}

impl Drop for Pins {
    fn drop(&mut self) {
        self.arena.pinned_bytes.dec_by(signed(self.held.get_mut().bytes));
    }
}

fn signed(bytes: usize) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}
