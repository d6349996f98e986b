//! Goes back through a log to where it counts from, and notices what is missing.

use super::{FIRST_SEQ, Log, LogObject, Read, Reads};
use crate::object::names::{ManifestId, Seq};

/// Goes back through a log.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Newest first.
    objects: Vec<LogObject>,
    /// The first and the last of the base, once the last is found.
    base: Option<(Seq, Seq)>,
    /// Whether all that counts has come.
    whole: bool,
    damaged: Option<ManifestId>,
    reads: Reads,
}

impl Walk {
    /// Takes the next older object. False if nothing older is needed, or of use.
    pub(super) fn take(&mut self, read: Read) -> bool {
        let (object, cached) = match read {
            Read::There { object, cached } => (object, cached),
            Read::Damaged(id) => {
                self.reads.manifests += 1;
                self.damaged = Some(id);
                return false;
            }
        };
        if cached {
            self.reads.cached += 1;
        } else {
            self.reads.manifests += 1;
        }
        if self.objects.last().is_some_and(|newer| !follows(object.id, newer.id)) {
            return false;
        }
        let at = object.id.at;
        if self.base.is_none() {
            self.base = object.base_from().map(|from| (from, at));
        }
        self.objects.push(object);
        self.whole = self.base.is_some_and(|(from, _)| from == at);
        !self.whole
    }

    pub(super) fn into_log(mut self, ids: &[ManifestId]) -> Log {
        let oldest = self.objects.last().map(|object| object.id);
        let from_the_start = oldest.is_none_or(|oldest| oldest.at.seq == FIRST_SEQ);
        let all_listed = self.objects.len() == ids.len();
        let whole = self.whole || (self.base.is_none() && all_listed && from_the_start);
        let lost_at = self.damaged.or(oldest).filter(|_| !whole);
        let superseded = ids.iter().copied().filter(|id| oldest.is_none_or(|oldest| *id < oldest));
        self.objects.reverse();
        Log {
            superseded: superseded.collect(),
            objects: self.objects,
            base: self.base,
            lost_until: lost_at.map(|id| id.at.epoch),
            reads: self.reads,
        }
    }
}

/// Whether no object is missing between two.
fn follows(older: ManifestId, newer: ManifestId) -> bool {
    if older.at.epoch == newer.at.epoch {
        older.at.seq.checked_add(1) == Some(newer.at.seq)
    } else {
        newer.at.seq == FIRST_SEQ
    }
}
