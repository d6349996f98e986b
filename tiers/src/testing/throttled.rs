//! A tier as fast as it is told to be.
#![deny(clippy::missing_trait_methods)]

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};

use crate::{
    block::BlockHash,
    dram::BlockWriter,
    error::Result,
    map::Location,
    namespace::NamespaceId,
    store::{Above, Ailment, BlockStore, BoxFuture, Load, Outgoing, StoreUsage, Wanted},
    tier::Tier,
};

/// Wraps a tier: its device delivers one block after another, each so much later.
#[derive(Debug)]
pub struct Throttled {
    inner: Arc<dyn BlockStore>,
    device: Mutex<Device>,
}

#[derive(Debug)]
struct Device {
    setup: Duration,
    bytes_per_second: f64,
    /// When it has delivered what it was asked for.
    free: Instant,
}

impl Throttled {
    /// Wraps `inner`: the first byte of a block comes after `setup`, and so many bytes a second.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockStore>, setup: Duration, bytes_per_second: f64) -> Self {
        let device = Device { setup, bytes_per_second, free: Instant::now() };
        Self { inner, device: Mutex::new(device) }
    }

    /// From now on it delivers so many bytes a second.
    pub fn throttle(&self, bytes_per_second: f64) {
        self.device.lock().bytes_per_second = bytes_per_second;
    }

    /// When a block that is asked for now has been delivered.
    fn delivers(&self, bytes: usize) -> Instant {
        let mut device = self.device.lock();
        let takes = Duration::try_from_secs_f64(bytes as f64 / device.bytes_per_second);
        device.free = device.free.max(Instant::now()) + takes.unwrap_or_default();
        device.free + device.setup
    }
}

impl BlockStore for Throttled {
    fn tier(&self) -> Tier {
        self.inner.tier()
    }

    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, Result<Location>> {
        self.inner.put(block)
    }

    fn get<'a>(&'a self, wanted: Wanted, into: BlockWriter) -> BoxFuture<'a, Result<Load>> {
        Box::pin(async move {
            sleep_until(self.delivers(into.len())).await;
            self.inner.get(wanted, into).await
        })
    }

    fn attach(&self, above: Weak<dyn Above>) {
        self.inner.attach(above);
    }

    fn is_damaged(&self, block: &Wanted) -> bool {
        self.inner.is_damaged(block)
    }

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>> {
        self.inner.remove(blocks)
    }

    fn removed<'a>(
        &'a self,
        namespace: NamespaceId,
        hashes: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<()>> {
        self.inner.removed(namespace, hashes)
    }

    fn described(&self, namespace: NamespaceId, hashes: &[BlockHash]) {
        self.inner.described(namespace, hashes);
    }

    fn shed(&self) {
        self.inner.shed();
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn ailment(&self) -> Option<Ailment> {
        self.inner.ailment()
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        self.inner.close()
    }
}
