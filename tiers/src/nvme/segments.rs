//! What the tier knows of its segments in memory: which there are, how full and how alive they are,
//! and which places must not be read any more.
//!
//! Written by the writer, read by everybody. One lock, held for a few instructions.

use std::collections::{BTreeMap, HashSet};

use parking_lot::Mutex;

use super::{device::SegmentId, format::Place};

/// One segment.
#[derive(Debug, Default)]
pub(super) struct Segment {
    /// Drawn when it was made.
    pub(super) generation: u64,
    /// Bytes of its file.
    pub(super) file_bytes: u64,
    /// Where its records end; records beyond are not readable (yet).
    pub(super) data_bytes: u64,
    /// Whether the writer is done with it.
    pub(super) closed: bool,
    /// Bytes and number of the records that the index points to.
    pub(super) live_bytes: u64,
    /// See `live_bytes`.
    pub(super) live_blocks: u64,
    /// Bytes of its records of tombstones, as far as they are known: those of a segment that was there
    /// before the start only after the first look at it.
    pub(super) tombstone_bytes: u64,
    /// How often reclaiming chose a younger one.
    pub(super) passed_over: u32,
    /// Whether all of it was copied that should be.
    pub(super) offered: bool,
    /// Pages of records that were removed: not readable although they are there.
    pub(super) removed: HashSet<u32>,
}

impl Segment {
    /// All but what was removed.
    fn outline(&self) -> Self {
        Self { removed: HashSet::new(), ..*self }
    }

    /// Nothing in it is live, and deleting it gains room: tombstones would have to be written again,
    /// unless it is the oldest, and then have nothing to kill.
    fn is_dead(&self, oldest: bool) -> bool {
        let gains = oldest || self.tombstone_bytes <= self.file_bytes / TOMBSTONE_SHARE;
        self.closed && self.live_blocks == 0 && gains
    }
}

/// A segment with no live block of which one in so many bytes is of tombstones is left alone until it
/// is the oldest.
const TOMBSTONE_SHARE: u64 = 4;

/// Sums over all segments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    pub(super) segments: u64,
    pub(super) file_bytes: u64,
    pub(super) data_bytes: u64,
    pub(super) live_bytes: u64,
    pub(super) live_blocks: u64,
}

/// All segments.
#[derive(Debug, Default)]
pub(super) struct Segments(Mutex<BTreeMap<SegmentId, Segment>>);

impl Segments {
    pub(super) fn insert(&self, id: SegmentId, segment: Segment) {
        self.0.lock().insert(id, segment);
    }

    /// Forgets a segment: nothing of it can be read from now on.
    pub(super) fn remove(&self, id: SegmentId) -> Option<Segment> {
        self.0.lock().remove(&id)
    }

    pub(super) fn get(&self, id: SegmentId) -> Option<Segment> {
        self.0.lock().get(&id).map(Segment::outline)
    }

    /// The generation of the segment, if the place may be read.
    pub(super) fn readable(&self, place: Place) -> Option<u64> {
        let segments = self.0.lock();
        let segment = segments.get(&place.segment)?;
        let readable =
            place.offset() < segment.data_bytes && !segment.removed.contains(&place.unit);
        readable.then_some(segment.generation)
    }

    /// Changes one segment, if it is there.
    pub(super) fn update<T>(
        &self,
        id: SegmentId,
        change: impl FnOnce(&mut Segment) -> T,
    ) -> Option<T> {
        self.0.lock().get_mut(&id).map(change)
    }

    /// A record has become live.
    pub(super) fn add_live(&self, id: SegmentId, bytes: u64) {
        self.update(id, |segment| {
            segment.live_bytes += bytes;
            segment.live_blocks += 1;
        });
    }

    /// A record has become dead.
    pub(super) fn sub_live(&self, id: SegmentId, bytes: u64) {
        self.update(id, |segment| {
            segment.live_bytes = segment.live_bytes.saturating_sub(bytes);
            segment.live_blocks = segment.live_blocks.saturating_sub(1);
        });
    }

    /// The place must not be read any more.
    pub(super) fn forbid(&self, place: Place) {
        self.update(place.segment, |segment| segment.removed.insert(place.unit));
    }

    /// The segments that the writer is done with, oldest first.
    pub(super) fn closed(&self) -> Vec<(SegmentId, Segment)> {
        let segments = self.0.lock();
        let closed = segments.iter().filter(|(_, segment)| segment.closed);
        closed.map(|(id, segment)| (*id, segment.outline())).collect()
    }

    /// The first one that can be deleted for nothing.
    pub(super) fn dead(&self) -> Option<SegmentId> {
        let segments = self.0.lock();
        let oldest = segments.keys().next().copied();
        let mut dead = segments.iter().filter(|(id, s)| s.is_dead(Some(**id) == oldest));
        dead.next().map(|(id, _)| *id)
    }

    /// Whether there is one that was offered.
    pub(super) fn any_offered(&self) -> bool {
        self.0.lock().values().any(|segment| segment.closed && segment.offered)
    }

    /// The segment `chosen` is reclaimed and not those that are older.
    pub(super) fn pass_over(&self, chosen: SegmentId) {
        for segment in self.0.lock().range_mut(..chosen).map(|(_, segment)| segment) {
            segment.passed_over += 1;
        }
    }

    /// Whether there is a segment other than `but` with a number of at most `id`.
    pub(super) fn any_up_to(&self, id: SegmentId, but: SegmentId) -> bool {
        self.0.lock().range(..=id).any(|(other, _)| *other != but)
    }

    pub(super) fn totals(&self) -> Totals {
        let segments = self.0.lock();
        let mut totals = Totals::default();
        for segment in segments.values() {
            totals.segments += 1;
            totals.file_bytes += segment.file_bytes;
            totals.data_bytes += segment.data_bytes;
            totals.live_bytes += segment.live_bytes;
            totals.live_blocks += segment.live_blocks;
        }
        totals
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(segment: u64, unit: u32) -> Place {
        Place { segment: SegmentId(segment), unit }
    }

    #[test]
    fn only_published_places_that_were_not_removed_can_be_read() {
        let segments = Segments::default();
        let data_bytes = 4096 * 10;
        segments.insert(SegmentId(3), Segment { generation: 7, data_bytes, ..Segment::default() });
        assert_eq!(segments.readable(place(3, 9)), Some(7));
        assert_eq!(segments.readable(place(3, 10)), None);
        assert_eq!(segments.readable(place(4, 1)), None);
        segments.forbid(place(3, 9));
        assert_eq!(segments.readable(place(3, 9)), None);
        assert_eq!(segments.readable(place(3, 8)), Some(7));
        segments.remove(SegmentId(3));
        assert_eq!(segments.readable(place(3, 8)), None);
    }

    #[test]
    fn older_segments_are_found() {
        let segments = Segments::default();
        segments.insert(SegmentId(3), Segment::default());
        segments.insert(SegmentId(5), Segment::default());
        let any = |id, but| segments.any_up_to(SegmentId(id), SegmentId(but));
        assert!(any(5, 5) && any(3, 5) && any(9, 3));
        assert!(!any(4, 3) && !any(2, 9));
    }
}
