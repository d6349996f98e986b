//! A segment that may be reclaimed: what is in it, and what of that is worth keeping.

use super::{
    Core, OpLabel,
    aligned::PAGE,
    device::{Device, SegmentId},
    format::{Entry, Kind, Place},
    scan::{Scanned, Scanner, Trouble, read_table, read_trailer},
    segments::Segment,
};
use crate::{store::Wanted, tier::Tier};

/// A segment that is looked at, and what it holds.
pub(super) struct Victim {
    pub(super) id: SegmentId,
    pub(super) segment: Segment,
    pub(super) entries: Vec<Entry>,
    /// For each entry: the last use, if it is a block that the map has here.
    pub(super) ages: Vec<Option<u64>>,
    /// Whether all of its records are in `entries`.
    pub(super) whole: bool,
}

impl Victim {
    /// Finds out what is in a segment.
    pub(super) async fn look_at(core: &Core, id: SegmentId, segment: Segment) -> Self {
        let (entries, whole) = core.entries_of(id, &segment).await;
        let wanted: Vec<Wanted> = entries.iter().map(|entry| wanted(id, entry)).collect();
        let mut ages = match core.above() {
            Some(above) => above.ages(Tier::Nvme, &wanted),
            None => vec![None; entries.len()],
        };
        ages.resize(entries.len(), None);
        for (age, entry) in ages.iter_mut().zip(&entries) {
            if entry.kind != Kind::Block {
                *age = None;
            }
        }
        let victim = Self { id, segment, entries, ages, whole };
        let tombstone_bytes = victim.tombstone_bytes();
        core.segments.update(id, |segment| segment.tombstone_bytes = tombstone_bytes);
        victim
    }

    /// Reads a record again, with its payload.
    pub(super) async fn read(
        &self,
        device: &dyn Device,
        entry: &Entry,
    ) -> Result<Scanned, Trouble> {
        let start = u64::from(entry.unit) * PAGE;
        let range = (start, self.segment.data_bytes);
        let mut scanner = Scanner::new(device, self.id, self.segment.generation, range);
        scanner.read_record(true).await
    }

    fn tombstone_bytes(&self) -> u64 {
        let tombstones = self.entries.iter().filter(|entry| entry.kind == Kind::Tombstones);
        tombstones.map(record_bytes).sum()
    }

    /// The blocks to keep, in their order: those used after `cold`, up to `bytes_max`, hottest first.
    pub(super) fn chosen(&self, cold: u64, bytes_max: u64) -> Vec<&Entry> {
        let aged = self.entries.iter().zip(&self.ages);
        let mut hot: Vec<(u64, &Entry)> = aged
            .filter_map(|(entry, age)| Some(((*age)?, entry)))
            .filter(|(age, _)| *age > cold || cold == 0)
            .collect();
        hot.sort_by_key(|(age, _)| std::cmp::Reverse(*age));
        let mut bytes = 0;
        hot.retain(|(_, entry)| {
            bytes += record_bytes(entry);
            cold == 0 || bytes <= bytes_max
        });
        hot.sort_by_key(|(_, entry)| entry.unit);
        hot.into_iter().map(|(_, entry)| entry).collect()
    }
}

impl Core {
    /// The records of a segment, and whether that are all of them.
    pub(super) async fn entries_of(&self, id: SegmentId, segment: &Segment) -> (Vec<Entry>, bool) {
        let device = self.device.as_ref();
        let trailer = read_trailer(device, id, segment.generation, segment.file_bytes).await;
        if let Ok(Some(trailer)) = trailer
            && let Ok(table) = read_table(device, id, &trailer).await
        {
            return (table.into_entries(), true);
        }
        let range = (0, segment.data_bytes);
        let mut scanner = Scanner::new(device, id, segment.generation, range).searching();
        let mut entries = Vec::new();
        while let Some(scanned) = scanner.next(false).await {
            entries.push(scanned.entry);
        }
        let whole = scanner.at() >= segment.data_bytes && scanner.holes().is_empty();
        scanner.holes().iter().for_each(|hole| self.note(id, &hole.trouble));
        (entries, whole)
    }

    pub(super) fn note(&self, id: SegmentId, trouble: &Trouble) {
        match trouble {
            Trouble::Disk(error) => {
                self.metrics.errors(OpLabel::Read).inc();
                tracing::warn!(%error, segment = id.0, "nvme segment cannot be read");
            }
            Trouble::Damaged(damage) => {
                self.metrics.damaged(super::DamageLabel::Header).inc();
                tracing::warn!(?damage, segment = id.0, "nvme segment is damaged");
            }
        }
    }
}

pub(super) fn record_bytes(entry: &Entry) -> u64 {
    u64::from(entry.units) * PAGE
}

/// The block of an entry at its place. Entries that are no blocks name none.
pub(super) fn wanted(id: SegmentId, entry: &Entry) -> Wanted {
    entry.key.at(Place { segment: id, unit: entry.unit }.location_or_nowhere())
}
