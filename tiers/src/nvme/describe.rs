//! What was described of blocks is kept beside them in the index, for a restart.
//!
//! The map has descriptions; the index has a copy of each, written with the block ([`place`](super::append)) or
//! when a block that is there is described. It leaves with the block. A description whose block is not
//! there, as a crash may leave it, is dropped at the start. The segments know nothing of it: with the index,
//! all descriptions are lost.

use std::sync::Arc;

use super::{
    OpLabel,
    index::{Change, IndexKey},
    recover::State,
    writer::Writer,
};
use crate::{description::Description, tier::Tier};

/// Descriptions of blocks that are there and wait to be written: 4 MiB. A prompt of 1 M tokens at 16 to a
/// block, told at once.
pub(super) const DESCRIBED_MAX: usize = 65_536;
/// Descriptions written at once: a few hundred kilobytes, in milliseconds.
const GROUP_MAX: usize = 1024;

impl Writer {
    /// What the map knows of a block that is being written.
    pub(super) fn description(&self, key: &IndexKey) -> Option<Change> {
        let description = self.core.above()?.description(key.namespace, key.hash)?;
        Some(Change::Describe(*key, description))
    }

    /// Writes what blocks that are there were described as since the last time, or some of it: others want
    /// to be written, too. False if there was nothing.
    pub(super) fn keep_descriptions(&mut self) -> bool {
        let keys = self.core.described.take_first(GROUP_MAX);
        // What is not there yet is described when it is placed, what has left not at all.
        let there = |key: &&IndexKey| self.current(key).is_some();
        let known = keys.iter().filter(there).filter_map(|key| self.description(key));
        let changes: Vec<_> = known.collect();
        if changes.is_empty() {
            return !keys.is_empty();
        }
        let count = u64::try_from(changes.len()).unwrap_or(u64::MAX);
        match self.index(changes) {
            Ok(()) => {
                self.core.metrics.described_blocks.inc_by(count);
            }
            Err(error) => {
                self.core.metrics.errors(OpLabel::Index).inc();
                self.core.metrics.undescribed_blocks.inc_by(count);
                tracing::warn!(%error, "nvme index does not take descriptions");
            }
        }
        true
    }

    /// Takes what the index says of a block, which it has said before.
    pub(super) fn load_description(
        &mut self,
        key: IndexKey,
        description: Description,
        state: &mut State,
    ) {
        let above = self.core.above();
        let is_taken = above.is_some_and(|above| {
            above.found_described(Tier::Nvme, key.namespace, key.hash, description)
        });
        if is_taken {
            state.found.described += 1;
        } else {
            state.changes.push(Change::Undescribe(key));
        }
    }
}

impl super::Core {
    /// Blocks were described that are there, or on their way.
    pub(super) fn note_described(self: &Arc<Self>, keys: impl Iterator<Item = IndexKey>) {
        let dropped = keys.filter(|key| !self.described.note(*key)).count();
        self.metrics.undescribed_blocks.inc_by(u64::try_from(dropped).unwrap_or(u64::MAX));
    }
}
