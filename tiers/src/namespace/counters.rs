//! What a namespace holds and has been asked.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::tier::TierCounts;

/// What a namespace holds and has been asked, for stats. Relaxed: nothing is decided by them.
#[derive(Debug, Default)]
pub struct NamespaceCounters {
    /// Readable blocks now.
    pub blocks: AtomicU64,
    /// Bytes of them.
    pub bytes: AtomicU64,
    /// Blocks stored since the start.
    pub put_blocks: AtomicU64,
    /// Blocks asked for by lookups since the start, by answer: dram, nvme, object, pending, miss.
    pub lookups: [AtomicU64; 5],
}

impl NamespaceCounters {
    /// Adds one lookup's answer.
    pub fn count_lookup(&self, counts: TierCounts) {
        for (total, count) in self.lookups.iter().zip(counts.to_array()) {
            total.fetch_add(u64::from(count), Ordering::Relaxed);
        }
    }
}
