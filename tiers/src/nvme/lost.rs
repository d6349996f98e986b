//! Blocks that are not where the index says: the reader finds them, the writer takes them out of the
//! index, so that a restart does not promise them again.

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::store::Wanted;

/// Blocks noted at most; what is beyond is found again.
const LOST_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct Lost {
    blocks: Mutex<Vec<Wanted>>,
    some: Notify,
}

impl Lost {
    pub(super) fn note(&self, block: Wanted) {
        let mut blocks = self.blocks.lock();
        if blocks.len() < LOST_MAX {
            blocks.push(block);
            self.some.notify_one();
        }
    }

    pub(super) fn take(&self) -> Vec<Wanted> {
        std::mem::take(&mut self.blocks.lock())
    }

    /// Waits until there are some.
    pub(super) async fn notified(&self) {
        self.some.notified().await;
    }
}
