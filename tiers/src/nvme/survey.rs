//! Which segments hold how much that is hot, from one walk over the map for several reclaims.

use std::collections::HashMap;

use super::{
    device::SegmentId,
    format::{Place, Shape},
    segments::Segment,
};
use crate::{store::Above, tier::Tier};

/// The share of the tier's blocks that is cold: what reclaiming may drop without looking further.
const COLD_SHARE: f64 = 0.08;
/// A survey is used until this part of the segments has been reclaimed, but at least once.
const REUSE_DIVISOR: u64 = 32;

/// What a walk has found.
#[derive(Debug, Default)]
pub(super) struct Survey {
    /// The age below which blocks are cold.
    cold: u64,
    hot_bytes: HashMap<SegmentId, u64>,
    /// The newest segment that was closed then: of later ones nothing is known.
    newest: Option<SegmentId>,
    /// Reclaims that it is still good for.
    left: u64,
}

impl Survey {
    /// Makes it good for the next reclaim of one of `closed`, which ascend.
    pub(super) fn refresh(&mut self, above: Option<&dyn Above>, closed: &[(SegmentId, Segment)]) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = u64::try_from(closed.len()).unwrap_or(0) / REUSE_DIVISOR;
        self.newest = closed.last().map(|(id, _)| *id);
        self.hot_bytes.clear();
        let Some(above) = above else { return };
        let cold = above.cold_age(Tier::Nvme, COLD_SHARE);
        let hot_bytes = &mut self.hot_bytes;
        above.survey(Tier::Nvme, &mut |location, len, age| {
            if age > cold {
                let len = usize::try_from(len).unwrap_or(usize::MAX);
                let bytes = Shape::of(1, len).bytes();
                *hot_bytes.entry(Place::of(location).segment).or_default() += bytes;
            }
        });
        self.cold = cold;
    }

    /// The age below which blocks are cold.
    pub(super) fn cold(&self) -> u64 {
        self.cold
    }

    /// The segment whose room costs the least writing: what must be written again for each byte that
    /// becomes free. Among those that `may` go.
    pub(super) fn cheapest(
        &self,
        closed: &[(SegmentId, Segment)],
        may: impl Fn(&Segment) -> bool,
    ) -> Option<usize> {
        let oldest = closed.first().map(|(id, _)| *id);
        let cost = |(id, segment): &(SegmentId, Segment)| {
            let hot = self.hot_bytes.get(id).copied().unwrap_or(0);
            // Those of the oldest have nothing to kill any more.
            let tombstones = if Some(*id) == oldest { 0 } else { segment.tombstone_bytes };
            let hot = hot.saturating_add(tombstones).min(segment.file_bytes);
            (u128::from(hot) << 32) / u128::from(segment.file_bytes.saturating_sub(hot).max(1))
        };
        let known = closed.iter().take_while(|(id, _)| Some(*id) <= self.newest);
        let costs = known.enumerate().filter(|(_, (_, segment))| may(segment));
        costs.min_by_key(|(_, known)| cost(known)).map(|(position, _)| position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_segment_with_the_least_to_write_for_its_room_goes() {
        let segment = |file_bytes| Segment { file_bytes, ..Segment::default() };
        let closed = [
            (SegmentId(1), segment(100)),
            (SegmentId(2), segment(100)),
            (SegmentId(3), segment(10)),
        ];
        let survey = |hot: [u64; 3]| Survey {
            hot_bytes: (1..).map(SegmentId).zip(hot).collect(),
            newest: Some(SegmentId(3)),
            ..Survey::default()
        };
        assert_eq!(survey([50, 40, 9]).cheapest(&closed, |_| true), Some(1));
        assert_eq!(survey([50, 60, 3]).cheapest(&closed, |_| true), Some(2));
        assert_eq!(survey([0, 0, 0]).cheapest(&closed, |_| true), Some(0), "the oldest of equals");
        assert_eq!(
            survey([100, 100, 10]).cheapest(&closed, |_| true),
            Some(2),
            "all hot: the least"
        );
        let rest = survey([50, 40, 9]).cheapest(&closed, |segment| segment.file_bytes < 100);
        assert_eq!(rest, Some(2), "of those that may go");
        let older = Survey { newest: Some(SegmentId(2)), ..survey([100, 90, 0]) };
        assert_eq!(
            older.cheapest(&closed, |_| true),
            Some(1),
            "of what came later nothing is known"
        );
        assert_eq!(Survey::default().cheapest(&closed, |_| true), None);
    }
}
