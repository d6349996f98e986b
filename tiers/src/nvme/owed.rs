//! What could not be written, and the tombstones that are owed because of it.
//!
//! A put that failed may be in the log all the same, and so may one that nobody waits for any more: no
//! map knows of it, nobody would remove it, and a restart would bring it back. A removal that failed
//! is in the index, but not in the log. Both are owed a tombstone, which is written as soon as writing
//! works; its barrier is that of the failure, so that what is put later stays.

use super::{
    OpLabel, RejectLabel, TOMBSTONES_MAX,
    aligned::PAGE,
    device::SegmentId,
    format::{Place, Tombstone},
    index::{Change, IndexKey},
    item::{Item, Then},
    reclaim::Refusal,
    writer::Writer,
};
use crate::{error::Error, store::Wanted};

/// Tombstones owed at most: 5 MiB of memory. What is beyond may come back with a restart.
const OWED_MAX: usize = 65_536;

impl Writer {
    /// Tombstones that one record may hold: with its table it must fit into a small segment.
    pub(super) fn tombstones_max(segment_bytes: u64) -> usize {
        let fit = usize::try_from(segment_bytes / 4).unwrap_or(usize::MAX) / Tombstone::BYTES;
        fit.min(TOMBSTONES_MAX)
    }

    /// Notes that what is recorded of a block before `barrier` must not come back.
    pub(super) fn owe(&mut self, key: IndexKey, barrier: Place) {
        if self.owed.len() < OWED_MAX {
            self.owed.push(Tombstone { key, barrier });
        } else {
            tracing::warn!("a failed nvme write may come back with a restart: too many before it");
        }
    }

    /// Writes what is owed, if writing works.
    pub(super) async fn pay(&mut self) {
        if self.owed.is_empty() || self.core.state.check().is_err() {
            return;
        }
        let owed = std::mem::take(&mut self.owed);
        let fit = Self::tombstones_max(self.core.config.segment_bytes);
        let items = owed.chunks(fit).map(|owed| Item::owed(owed.to_vec())).collect();
        // What fails is owed again.
        self.append(items, false).await;
    }

    pub(super) fn refuse_all(&mut self, items: impl IntoIterator<Item = Item>, why: &Refusal) {
        for item in items {
            self.refuse(item, RejectLabel::State, why);
        }
    }

    /// Answers what was not even placed.
    pub(super) fn refuse(&mut self, item: Item, reason: RejectLabel, why: &Refusal) {
        self.failures += 1;
        self.core.metrics.rejected(reason).inc();
        let error = Error::new(why.kind, why.what);
        match item.then {
            // Nothing of it is anywhere.
            Then::Put(done) => drop(done.send(Err(error))),
            Then::Moved(_) | Then::Nobody => {}
            Then::Removed(..) | Then::Owed => {
                let barrier = self.next_place();
                self.fail_one(item, barrier, error);
            }
        }
    }

    /// Behind all that is in the log, before all that will be.
    fn next_place(&self) -> Place {
        let (segment, at) = match &self.open {
            Some(open) => (open.id, open.at),
            None => (SegmentId(self.next_segment), 0),
        };
        Place { segment, unit: u32::try_from(at / PAGE).unwrap_or(u32::MAX) }
    }

    /// Answers what may be in the log, before `barrier`, and may not.
    pub(super) fn fail_one(&mut self, item: Item, barrier: Place, error: Error) {
        let Item { key, tombstones, then, .. } = item;
        // Whoever asked may have gone.
        match then {
            Then::Put(done) => {
                self.owe(key, barrier);
                drop(done.send(Err(error)));
            }
            Then::Moved(_) => self.owe(key, barrier),
            Then::Removed(done, blocks) => {
                self.unindex(&blocks, barrier);
                drop(done.send(Err(error)));
            }
            Then::Owed => tombstones.iter().for_each(|t| self.owe(t.key, t.barrier)),
            Then::Nobody => {}
        }
    }

    /// Removes from the index what has no tombstone yet: unless the index is lost, it stays removed.
    fn unindex(&mut self, blocks: &[Wanted], barrier: Place) {
        let mut changes = Vec::new();
        for block in blocks {
            let key = IndexKey::of(block);
            if let Some((place, bytes)) = self.current(&key) {
                self.core.segments.sub_live(place.segment, bytes);
                self.core.segments.forbid(place);
                changes.push(Change::Remove(key));
            }
            self.owe(key, barrier);
        }
        if let Err(error) = self.index(changes) {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, "removed nvme blocks may come back with a restart");
        }
    }

    /// Takes out of the index what readers found not to be there.
    pub(super) fn drop_lost(&mut self) {
        let lost = self.core.lost.take();
        let there = |block: &Wanted| {
            let key = IndexKey::of(block);
            let (place, bytes) = self.current(&key)?;
            (place.location() == Some(block.location)).then_some((key, place, bytes))
        };
        let lost: Vec<_> = lost.iter().filter_map(there).collect();
        for (_, place, bytes) in &lost {
            // The place itself stays readable: it may be that of another block.
            self.core.segments.sub_live(place.segment, *bytes);
        }
        let changes: Vec<_> = lost.into_iter().map(|(key, ..)| Change::Remove(key)).collect();
        if !changes.is_empty() && self.index(changes).is_err() {
            self.core.metrics.errors(OpLabel::Index).inc();
        }
    }
}
