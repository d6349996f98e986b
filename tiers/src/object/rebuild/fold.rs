//! What the records of a log say together, in whatever order.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{LogObject, Reads, Rebuilt, RebuiltPack, Unnamed, mark};
use crate::{
    key::IndexKey,
    object::{
        format::{Footer, ManifestRecord},
        names::{PackId, Seq},
    },
};

/// What a log says.
#[derive(Debug, Default)]
pub(in crate::object) struct Folded {
    pub(in crate::object) packs: BTreeMap<PackId, RebuiltPack>,
    pub(in crate::object) dropped: BTreeSet<PackId>,
    pub(in crate::object) removed: HashMap<IndexKey, Seq>,
    /// The newest epoch that has begun; 0 for none.
    pub(in crate::object) begun: u64,
    pub(in crate::object) lost_until: Option<u64>,
}

impl Folded {
    pub(in crate::object) fn of(objects: Vec<LogObject>, lost_until: Option<u64>) -> Self {
        let mut folded = Self { lost_until, ..Self::default() };
        for object in objects {
            folded.take(object);
        }
        folded
    }

    pub(in crate::object) fn take(&mut self, object: LogObject) {
        for record in object.records {
            if mark(&record) == Some(object.id.at.epoch) {
                self.begun = self.begun.max(object.id.at.epoch);
            }
            match record {
                ManifestRecord::Pack(footer) => self.take_pack(footer),
                ManifestRecord::Dropped(id) => {
                    self.packs.remove(&id);
                    self.dropped.insert(id);
                }
                ManifestRecord::Removed { keys, before } => {
                    note_removed(&mut self.removed, keys, before);
                }
                ManifestRecord::Base { .. } => {}
            }
        }
    }

    fn take_pack(&mut self, footer: Footer) {
        let id = footer.id;
        let lost = self.lost_until.is_some_and(|epoch| id.epoch <= epoch);
        if !lost && !self.dropped.contains(&id) {
            let bytes = footer.object_bytes();
            self.packs.insert(id, RebuiltPack { id, bytes, footer });
        }
    }

    /// Forgets the packs up to an epoch of which an object of the log cannot be read.
    pub(in crate::object) fn lose(&mut self, epoch: u64) {
        let until = self.lost_until.map_or(epoch, |lost| lost.max(epoch));
        self.lost_until = Some(until);
        self.packs.retain(|id, _| id.epoch > until);
    }

    pub(in crate::object) fn into_rebuilt(self, unnamed: Unnamed, reads: Reads) -> Rebuilt {
        let reads = Reads { footers: unnamed.footers, ..reads };
        let adopted = unnamed.orphans.len();
        let mut packs = self.packs;
        packs.extend(unnamed.orphans.into_iter().map(|pack| (pack.id, pack)));
        for pack in packs.values_mut() {
            forget_removed(pack, &self.removed);
        }
        Rebuilt {
            packs: packs.into_values().collect(),
            dropped: self.dropped.into_iter().collect(),
            waiting: unnamed.waiting,
            adopted,
            leftovers: unnamed.leftovers,
            lost_until: self.lost_until,
            reads,
        }
    }
}

/// Notes removals; the latest of a key counts.
pub(in crate::object) fn note_removed(
    removed: &mut HashMap<IndexKey, Seq>,
    keys: impl IntoIterator<Item = IndexKey>,
    before: Seq,
) {
    for key in keys {
        let barrier = removed.entry(key).or_insert(before);
        *barrier = before.max(*barrier);
    }
}

/// Takes out of a pack what was removed since.
fn forget_removed(pack: &mut RebuiltPack, removed: &HashMap<IndexKey, Seq>) {
    if removed.is_empty() {
        return;
    }
    let at = pack.id.at();
    let stays = |key: &IndexKey| removed.get(key).is_none_or(|before| at >= *before);
    pack.footer.entries.retain(|entry| stays(&entry.key));
}
