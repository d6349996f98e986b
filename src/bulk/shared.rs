//! What a connection shares with its client beside its frames: the arena, the client's staging.

use std::sync::Arc;

use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    stack::Stack,
};

use super::{
    Bulk,
    put::OpenPut,
    shared_body::{Regions, Staged},
};
use crate::shm::{Shown, pins::Pins, socket::Files};

/// See the module.
pub(super) struct Sharing {
    /// None where files cannot be sent.
    files: Option<Arc<Files>>,
    shown: Option<Shown>,
}

impl Sharing {
    /// Nothing is shared yet.
    pub(super) fn new(files: Option<Arc<Files>>) -> Self {
        if let Some(files) = &files {
            files.expect(1);
        }
        Self { files, shown: None }
    }

    /// Shows the arena, whose regions leave with what is written next unless the client has them.
    ///
    /// # Errors
    /// `Unsupported` if it is not shown here, `Invalid` if it has been shown already, or for a staging
    /// that cannot be used, `Exhausted` for too many clients.
    pub(super) fn begin(
        &mut self,
        bulk: &Bulk,
        staging_bytes: u64,
        has_regions: bool,
    ) -> Result<Regions> {
        let (Some(files), Some(arena)) = (&self.files, &bulk.arena) else {
            let text = "shared memory: not offered here (server.shared_memory, by the Unix socket)";
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        if bulk.gate.tenants() > 1 {
            let text = "shared memory: not offered while there are tokens of several tenants, \
                        because it shows the blocks of all";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if self.shown.is_some() {
            return Err(Error::invalid("map: asked for a second time"));
        }
        self.shown = Some(arena.show(files.take().pop(), staging_bytes)?);
        files.expect(0);
        if !has_regions {
            files.send(arena.files()?);
        }
        let pinned_bytes_max = u64::try_from(arena.client_bytes_max()).unwrap_or(u64::MAX);
        Ok(Regions { pinned_bytes_max, lengths: arena.lengths().collect() })
    }

    /// What the client is told the places of.
    pub(super) fn pins(&self) -> Option<Arc<Pins>> {
        self.shown.as_ref().map(|shown| Arc::clone(&shown.pins))
    }

    /// The client has copied all up to a pin, the last of which is `damaged` if it says so. Whether that is so
    /// is found out here: nobody takes a block out of use by a claim.
    ///
    /// # Errors
    /// `Invalid` for a pin that was not given out.
    pub(super) fn release(&self, stack: &Stack, (through, damaged): (u64, bool)) -> Result<()> {
        let Some(shown) = &self.shown else { return Err(not_shown()) };
        let last = shown.pins.release(through)?;
        if let Some(block) = last.filter(|_| damaged) {
            let mut parts = (0..).take_while(|part| block.part(*part).is_some());
            if parts.any(|part| !block.is_right(part)) {
                stack.quarantine(&block);
            }
        }
        Ok(())
    }

    /// Copies what is in the client's staging to where it will stay.
    ///
    /// # Errors
    /// Why the put is refused.
    pub(super) fn store(&self, put: &mut OpenPut, staged: Staged) -> Result<()> {
        let staging = self.shown.as_ref().and_then(|shown| shown.staging.as_ref());
        let staging = staging.ok_or_else(not_shown)?;
        let offset = usize::try_from(staged.offset).unwrap_or(usize::MAX);
        let mut inside = true;
        let stored = put.store(staged.place, staged.bytes, |room| {
            let copied = staging.bytes(offset, room.len()).map(|from| from.copy_to(room.into()));
            inside = copied.is_some();
            copied.map_or(0, |copy| copy.len())
        });
        if inside {
            return stored;
        }
        let Staged { bytes, offset, .. } = staged;
        Err(Error::invalid(format!("staged: {bytes} bytes at {offset} are not in the staging")))
    }
}

impl Drop for Sharing {
    /// A client that is gone, or that only reads, is sent the rest.
    fn drop(&mut self) {
        if let Some(shown) = &self.shown {
            shown.pins.close();
        }
    }
}

fn not_shown() -> Error {
    Error::invalid("shared memory: there is none on this connection")
}
