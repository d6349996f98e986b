//! What follows a write: groups that are durable become readable, are indexed and answered; those that
//! are not are answered as well.

use std::io;

use super::{
    OpLabel, RejectLabel,
    aligned::PAGE,
    device::SegmentId,
    format::{Kind, Place},
    index::Change,
    item::Then,
    pipeline::{Group, Placed, Progress},
    writer::Writer,
};
use crate::{
    error::{Error, ErrorKind},
    tier::Tier,
};

/// Changes that the index may have refused before writing ends: 10 MiB of memory, and more than any
/// group has.
const UNINDEXED_MAX: usize = 65_536;

impl Writer {
    /// Waits until nothing is on its way to the disk any more.
    pub(super) async fn settle(&mut self) {
        while !self.pipeline.is_empty() {
            self.advance().await;
        }
    }

    /// Waits until something has ended on the disk, and does what follows.
    pub(super) async fn advance(&mut self) {
        let progress = self.pipeline.progress().await;
        self.follow(progress);
    }

    /// Does what follows when something has ended on the disk.
    pub(super) fn follow(&mut self, progress: Progress) {
        match progress {
            Progress::Written => {}
            Progress::Landed(segment, groups) => {
                self.core.metrics.syncs.inc();
                self.land(segment, groups);
            }
            Progress::Failed { segment, groups, op, error } => {
                self.core.metrics.errors(op).inc();
                let doing = if op == OpLabel::Sync {
                    self.core.metrics.syncs.inc();
                    self.core.state.poison(&error);
                    "sync records"
                } else {
                    self.stop_writes(&error);
                    "write records"
                };
                self.abandon();
                groups.into_iter().for_each(|group| self.fail(segment, group, doing, &error));
            }
        }
    }

    /// Makes durable groups readable, indexes them together, and answers.
    fn land(&mut self, id: SegmentId, mut groups: Vec<Group>) {
        let indexed = self.index(groups.iter_mut().flat_map(|group| group.changes.drain(..)));
        groups.iter().for_each(|group| self.account(id, group));
        if let Err(error) = indexed {
            self.core.metrics.errors(OpLabel::Index).inc();
            self.stop_writes(&error);
            // The records are in the log: the next group, or a restart, indexes them.
            return groups.into_iter().for_each(|group| self.fail_unindexed(id, group, &error));
        }
        self.core.state.well();
        groups.into_iter().for_each(|group| self.answer(id, group));
    }

    /// Writes stop for now: until there may be room, or for longer with each failure.
    fn stop_writes(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::StorageFull {
            self.core.state.full();
        } else {
            self.core.state.failed(error);
        }
    }

    /// Applies changes, behind those that could not be applied before: the index follows the log in
    /// its order, or recovery would take older records for newer ones. Opens the index again once if
    /// that fails. Too much that it does not take is the end of writing: a restart reads it in the log.
    pub(super) fn index(&mut self, changes: impl IntoIterator<Item = Change>) -> io::Result<()> {
        if self.unindexed.len() > UNINDEXED_MAX {
            return Err(io::Error::other("index: it has refused too many changes"));
        }
        self.unindexed.extend(changes);
        let applied = self.core.index.apply(&self.unindexed).or_else(|error| {
            tracing::warn!(%error, "nvme index refuses changes, opening it again");
            self.core.index.reopen()?;
            self.core.index.apply(&self.unindexed)
        });
        match &applied {
            Ok(()) => self.unindexed.clear(),
            Err(error) if self.unindexed.len() > UNINDEXED_MAX => self.core.state.poison(error),
            Err(_) => {}
        }
        applied
    }

    /// Makes a group readable.
    fn account(&self, id: SegmentId, group: &Group) {
        let segments = &self.core.segments;
        segments.update(id, |segment| segment.data_bytes = group.end);
        for placed in &group.placed {
            let bytes = placed.header.shape().bytes();
            match placed.item.kind {
                Kind::Block => segments.add_live(id, bytes),
                Kind::Tombstones => {
                    segments.update(id, |segment| segment.tombstone_bytes += bytes);
                }
                Kind::Namespace => {}
            }
        }
        for (place, bytes) in &group.dead {
            segments.sub_live(place.segment, *bytes);
            segments.forbid(*place);
        }
    }

    /// Tells everybody. What nobody knows of is owed a tombstone: it would come back with a restart,
    /// whatever was removed meanwhile.
    fn answer(&mut self, id: SegmentId, group: Group) {
        let mut bytes = [0, 0];
        for Placed { header, item } in group.placed {
            let place = Place { segment: id, unit: header.unit };
            let [appended, moved] = &mut bytes;
            match item.then {
                Then::Put(done) => {
                    *appended += header.shape().bytes();
                    let location = place.location();
                    let location =
                        location.ok_or_else(|| Error::new(ErrorKind::Internal, "name a place"));
                    if done.send(location).is_err() {
                        self.owe(item.key, place.next());
                    }
                }
                // Whoever asked may have gone.
                Then::Removed(done, _) => drop(done.send(Ok(()))),
                Then::Moved(from) => {
                    *moved += header.shape().bytes();
                    let known = self.core.above().zip(place.location());
                    if let Some((above, to)) = known
                        && !above.moved(Tier::Nvme, &from, to)
                    {
                        self.owe(item.key, place.next());
                    }
                }
                Then::Owed | Then::Nobody => {}
            }
        }
        let [appended, moved] = bytes;
        self.core.metrics.appended_bytes.inc_by(appended);
        self.core.metrics.moved_bytes.inc_by(moved);
    }

    /// Answers a group that was not written, or only in part.
    fn fail(&mut self, id: SegmentId, group: Group, doing: &'static str, error: &io::Error) {
        self.failures += 1;
        for namespace in &group.namespaces {
            // The index has not heard of it.
            self.known.remove(namespace);
        }
        let barrier = barrier_behind(id, group.end);
        for Placed { item, .. } in group.placed {
            self.core.metrics.rejected(RejectLabel::Error).inc();
            let error = Error::new(ErrorKind::Unavailable, doing).because(error.to_string());
            self.fail_one(item, barrier, error);
        }
    }

    /// Answers a group that is in the log, and that the index did not take: what was removed is, and
    /// what was put is removed again, because nobody will know of it.
    fn fail_unindexed(&mut self, id: SegmentId, group: Group, error: &io::Error) {
        self.failures += 1;
        let barrier = barrier_behind(id, group.end);
        for Placed { item, .. } in group.placed {
            match item.then {
                Then::Removed(done, _) => drop(done.send(Ok(()))),
                Then::Put(_) | Then::Moved(_) => {
                    self.core.metrics.rejected(RejectLabel::Error).inc();
                    let what = Error::new(ErrorKind::Unavailable, "index records");
                    self.fail_one(item, barrier, what.because(error.to_string()));
                }
                Then::Owed | Then::Nobody => {}
            }
        }
    }

    /// Stops writing to the open segment. What is on the disk behind its last good record is unknown
    /// and was refused: the index is told, at once if it can be, that there is nothing to be found.
    fn abandon(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.core.segments.update(open.id, |segment| segment.closed = true);
        self.core.feed.sealed.notify_one();
        let done_with = Change::Indexed {
            segment: open.id,
            generation: open.generation,
            bytes: self.core.config.segment_bytes,
        };
        if let Err(error) = self.index([done_with]) {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, segment = open.id.0, "nvme index does not hear of a failed write");
        }
    }
}

/// Kills all that was placed in a segment so far.
fn barrier_behind(id: SegmentId, bytes: u64) -> Place {
    Place { segment: id, unit: u32::try_from(bytes / PAGE).unwrap_or(u32::MAX) }
}
