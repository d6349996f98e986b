//! The entries of the index, against the segments.

use std::{
    collections::{BTreeMap, HashSet},
    io,
};

use super::{Check, PAGE, What};
use crate::nvme::{
    device::SegmentId,
    format::{Kind, Place},
    index::{IndexKey, Known},
    scan::{Scanner, Trouble},
};

/// Entries looked at one by one; more are counted and not looked at.
const SUSPECTS_MAX: usize = 65_536;

/// Entries by what is wrong with them.
type Wrong = BTreeMap<(SegmentId, u32, What), u64>;

impl Check<'_> {
    /// Checks every entry.
    pub(super) async fn entries(&mut self) {
        let mut wrong = Wrong::new();
        for (id, summary) in &self.summaries {
            for (from, _) in &summary.holes {
                wrong.insert((*id, *from, What::Record), 0);
            }
        }
        for id in &self.strangers {
            wrong.insert((*id, 0, What::Stranger), 0);
        }
        let mut named: BTreeMap<SegmentId, u64> = BTreeMap::new();
        let mut entries = 0;
        self.each_entry(|_, place, generation| {
            entries += 1;
            match self.fault(place, generation) {
                Some((page, what)) => {
                    *wrong.entry((place.segment, page, what)).or_default() += 1;
                }
                None => *named.entry(place.segment).or_default() += 1,
            }
        });
        self.report.entries = entries;
        let matched = |id: &SegmentId| self.summaries.get(id).map_or(0, |known| known.matched);
        let suspects = named.iter().filter(|(id, count)| matched(id) != **count);
        let suspects: HashSet<SegmentId> = suspects.map(|(id, _)| *id).collect();
        for ((id, page, what), blocks) in wrong {
            self.report.add(id, page, what, blocks);
        }
        if !suspects.is_empty() {
            self.look_at(&suspects).await;
        }
    }

    /// What can be told of an entry without reading its record.
    fn fault(&self, place: Place, generation: u64) -> Option<(u32, What)> {
        let Some(summary) = self.summaries.get(&place.segment) else {
            let stranger = self.strangers.contains(&place.segment);
            return Some((0, if stranger { What::Stranger } else { What::Missing }));
        };
        if summary.generation != generation {
            return Some((0, What::Generation));
        }
        let unit = place.unit;
        let hole = summary.holes.iter().find(|(from, to)| (*from..*to).contains(&unit));
        match hole {
            Some((from, _)) => Some((*from, What::Record)),
            None => (unit >= summary.end).then_some((0, What::Truncated)),
        }
    }

    /// Reads the records of entries in segments where not all of them were found.
    async fn look_at(&mut self, suspects: &HashSet<SegmentId>) {
        let mut places = Vec::new();
        self.each_entry(|key, place, generation| {
            let told = self.fault(place, generation).is_some();
            if !told && suspects.contains(&place.segment) && places.len() < SUSPECTS_MAX {
                places.push((key, place, generation));
            }
        });
        for (key, place, generation) in places {
            let start = place.offset();
            let mut scanner =
                Scanner::new(self.device, place.segment, generation, (start, u64::MAX - PAGE));
            let what = match scanner.read_record(false).await {
                Ok(found) if found.entry.key == key && found.entry.kind == Kind::Block => continue,
                Ok(_) | Err(Trouble::Damaged(_)) => What::Misplaced,
                Err(Trouble::Disk(_)) => What::Unreadable,
            };
            self.report.add(place.segment, place.unit, what, 1);
        }
    }

    /// Visits the blocks of the index. What cannot be loaded was reported before.
    fn each_entry(&self, mut visit: impl FnMut(IndexKey, Place, u64)) {
        let loaded: io::Result<u64> = self.index.load(&mut |known| {
            if let Known::Block(key, entry) = known {
                visit(key, Place::of(entry.location), entry.generation);
            }
            Ok(())
        });
        if let Err(error) = loaded {
            tracing::warn!(%error, "nvme index cannot be read to its end");
        }
    }
}
