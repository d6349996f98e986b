//! What a server shows of itself: the regions of the arena, and where a block lies in them.

use std::{os::fd::OwnedFd, sync::Arc};

use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    stack::Stack,
};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{map::Mapping, pins::Pins};
use crate::limits::{
    RETRY_AFTER_COUNT, SHM_CLIENTS_MAX, SHM_PINNED_BYTES_MAX, SHM_PINNED_SHARE_DIVISOR,
    SHM_STAGING_BYTES_MAX,
};

/// The arena as it is shown to clients.
#[derive(Debug)]
pub(crate) struct Arena {
    files: Vec<OwnedFd>,
    /// Address and length of each region here.
    spans: Vec<(usize, usize)>,
    /// Bytes that one client may have pinned.
    client_bytes_max: usize,
    /// Bytes that all clients together may have pinned, in KiB.
    pub(super) room: Arc<Semaphore>,
    clients: Arc<Semaphore>,
    pub(super) pinned_bytes: Gauge,
}

/// The arena as it is shown to one client.
#[derive(Debug)]
pub(crate) struct Shown {
    /// What it was told to lie where.
    pub(crate) pins: Arc<Pins>,
    /// Where it puts.
    pub(crate) staging: Option<Mapping>,
    _client: OwnedSemaphorePermit,
}

impl Arena {
    /// Seals the arena and makes it ready to be shown.
    ///
    /// # Errors
    /// `Unavailable` if the kernel cannot seal it.
    pub(crate) fn new(stack: &Stack, pinned_bytes: Gauge) -> Result<Self> {
        let files = stack.share()?;
        let spans: Vec<_> = stack
            .regions()
            .iter()
            .map(|region| region.span())
            .map(|(base, bytes)| (base.addr().get(), bytes))
            .collect();
        let bytes = spans.iter().map(|(_, bytes)| *bytes).sum::<usize>();
        let share = bytes / SHM_PINNED_SHARE_DIVISOR;
        Ok(Self {
            files,
            spans,
            pinned_bytes,
            client_bytes_max: SHM_PINNED_BYTES_MAX.min(share / 2),
            room: Arc::new(Semaphore::new((share / 1024).min(Semaphore::MAX_PERMITS))),
            clients: Arc::new(Semaphore::new(SHM_CLIENTS_MAX)),
        })
    }

    /// Descriptors of the regions, to be sent.
    ///
    /// # Errors
    /// `Unavailable` if this process has no more of them.
    pub(crate) fn files(&self) -> Result<Vec<OwnedFd>> {
        let files: std::io::Result<_> = self.files.iter().map(OwnedFd::try_clone).collect();
        files.map_err(|error| {
            Error::new(ErrorKind::Unavailable, "duplicate the regions").because(error)
        })
    }

    /// The lengths of the regions, in bytes.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = u64> {
        self.spans.iter().map(|(_, bytes)| u64::try_from(*bytes).unwrap_or(u64::MAX))
    }

    /// Bytes that one client may have pinned; one block it may in any case.
    pub(crate) fn client_bytes_max(&self) -> usize {
        self.client_bytes_max
    }

    /// Where bytes of the arena lie: the region and the offset in it.
    pub(crate) fn place(&self, bytes: &[u8]) -> Option<(u32, u64)> {
        let address = bytes.as_ptr().addr();
        (0..).zip(&self.spans).find_map(|(region, (base, len))| {
            let offset = address.checked_sub(*base)?;
            let inside = offset.checked_add(bytes.len())? <= *len;
            inside.then(|| (region, u64::try_from(offset).unwrap_or(u64::MAX)))
        })
    }

    /// Admits a client with its staging, of so many bytes; with 0 it has none.
    ///
    /// # Errors
    /// `Invalid` for a staging that cannot be used, `Exhausted` for too many clients.
    pub(crate) fn show(
        self: &Arc<Self>,
        staging: Option<OwnedFd>,
        staging_bytes: u64,
    ) -> Result<Shown> {
        if staging_bytes > SHM_STAGING_BYTES_MAX {
            let text = format!(
                "staging: {staging_bytes} bytes given, at most {SHM_STAGING_BYTES_MAX} allowed"
            );
            return Err(Error::invalid(text));
        }
        let client = Arc::clone(&self.clients).try_acquire_owned().map_err(|_full| {
            let kind = ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT };
            Error::new(kind, format!("shared memory: {SHM_CLIENTS_MAX} clients have it already"))
        })?;
        let staging = match (staging, staging_bytes) {
            (_, 0) => None,
            (Some(file), bytes) => Some(Mapping::new(&file, bytes)?),
            (None, bytes) => {
                let text = format!("staging: {bytes} bytes given, but no file came with it");
                return Err(Error::invalid(text));
            }
        };
        let pins = Arc::new(Pins::new(Arc::clone(self)));
        Ok(Shown { pins, staging, _client: client })
    }
}
