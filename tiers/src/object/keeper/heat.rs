//! How hot packs are, from one walk over the map for several that leave.
//!
//! A pack leaves as a whole, and what stays of it is packed again, half of it at most: so what it costs
//! to lose is its colder half. The next to go is the pack whose *middle* block was used the longest ago,
//! and of those that go together what was used later than the middle of the last of them stays. So the
//! order in which blocks leave is nearly that of their last use, and there is no share to be tuned of
//! what is cold: packs that are half cold are found as far back as they must be.

use std::{cmp::Reverse, collections::HashMap};

use crate::{
    object::catalog::{PackNumber, Summary},
    store::Above,
    tier::Tier,
};

/// Ages that are noted of a pack: 512 bytes for each.
const SAMPLE_MAX: usize = 64;
/// A walk is used until this part of the packs has left, but at least once.
const REUSE_DIVISOR: usize = 32;
/// Of a pack that leaves for want of room, at most 1 / this is packed again.
pub(super) const KEPT_DIVISOR: u64 = 2;

/// What a walk has found of a pack.
#[derive(Debug, Default)]
struct Ages {
    /// Every so many-th block of the pack is noted.
    stride: usize,
    /// How many that are, whether or not the map has them.
    count: usize,
    /// Their last uses, latest first.
    ages: Vec<u64>,
}

impl Ages {
    fn of(pack: &Summary) -> Self {
        let stride = pack.blocks.div_ceil(SAMPLE_MAX).max(1);
        Self { stride, count: pack.blocks.div_ceil(stride), ages: Vec::new() }
    }

    /// The last use of the block in the middle.
    fn middle(&self) -> u64 {
        self.ages.get(self.count / 2).copied().unwrap_or(0)
    }

    /// Of `bytes` of the pack, those used after `cold`.
    fn hot_bytes(&self, cold: u64, bytes: u64) -> u64 {
        let hot = self.ages.partition_point(|age| *age > cold) as u64;
        (bytes * hot / (self.count as u64).max(1)).min(bytes / KEPT_DIVISOR)
    }
}

/// Packs that should go together.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Coldest {
    pub(super) packs: Vec<PackNumber>,
    /// What was used later than this stays of them.
    pub(super) cold: u64,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Heat {
    packs: HashMap<PackNumber, Ages>,
    /// How often the walk is still good.
    left: usize,
}

impl Heat {
    /// Makes it good for once more.
    pub(super) fn refresh(&mut self, above: Option<&dyn Above>, packs: &[Summary]) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = packs.len() / REUSE_DIVISOR;
        self.packs = packs.iter().map(|pack| (pack.number, Ages::of(pack))).collect();
        let Some(above) = above else { return };
        above.survey(Tier::Object, &mut |location, _len, age| {
            let (number, index) = PackNumber::of(location);
            if let Some(pack) = self.packs.get_mut(&number)
                && index % pack.stride == 0
            {
                pack.ages.push(age);
            }
        });
        for pack in self.packs.values_mut() {
            pack.ages.sort_unstable_by_key(|age| Reverse(*age));
        }
    }

    /// The next of `packs` to go: until `excess` bytes are free, and while what stays of them fits into
    /// `room` and they are no more than `most`. Of packs made since the walk nothing is known: they are
    /// the last.
    pub(super) fn coldest(
        &self,
        packs: &[Summary],
        (excess, room, most): (u64, u64, usize),
    ) -> Coldest {
        let unknown = Ages { stride: 1, count: 1, ages: vec![u64::MAX] };
        let ages = |pack: &Summary| self.packs.get(&pack.number).unwrap_or(&unknown);
        let mut order: Vec<&Summary> = packs.iter().collect();
        order.sort_by_cached_key(|pack| (ages(pack).middle(), pack.number));
        let (mut taken, mut cold) = (0, 0);
        for count in 1..=most.min(order.len()) {
            let next = order.get(count - 1).map_or(0, |pack| ages(pack).middle());
            let (mut kept, mut bytes) = (0, 0);
            for pack in order.iter().take(count) {
                kept += ages(pack).hot_bytes(next, pack.data_bytes);
                bytes += pack.info.bytes;
            }
            if kept > room && taken > 0 {
                break;
            }
            (taken, cold) = (count, next);
            if bytes - kept >= excess {
                break;
            }
        }
        Coldest { packs: order.iter().take(taken).map(|pack| pack.number).collect(), cold }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::object::{catalog::PackInfo, names::PackId};

    /// Packs of ten blocks of ten bytes, with these ages.
    fn walked(packs: &[&[u64]]) -> (Heat, Vec<Summary>) {
        let summary = |seq: u64| Summary {
            number: PackNumber::of(crate::map::Location(
                std::num::NonZeroU64::new((seq + 1) << 24).unwrap(),
            ))
            .0,
            info: Arc::new(PackInfo {
                id: PackId { ordinal: 0, epoch: 1, seq },
                name: String::new(),
                bytes: 100,
                created_unix_ms: 0,
                made_at: 0,
            }),
            blocks: 10,
            live_blocks: 10,
            live_bytes: 100,
            data_bytes: 100,
        };
        let summaries: Vec<Summary> = (0..packs.len() as u64).map(summary).collect();
        let mut heat = Heat::default();
        heat.refresh(None, &summaries);
        for (summary, ages) in summaries.iter().zip(packs) {
            let pack = heat.packs.get_mut(&summary.number).unwrap();
            pack.ages = ages.to_vec();
            pack.ages.sort_unstable_by_key(|age| Reverse(*age));
        }
        (heat, summaries)
    }

    #[test]
    fn the_packs_go_whose_colder_halves_are_the_coldest_and_what_is_hotter_stays() {
        let (heat, packs) = walked(&[
            &[1, 2, 3, 4, 50, 51, 52, 90, 91, 92],
            &[10, 11, 12, 13, 14, 15, 16, 70, 71, 72],
            &[5, 6, 7, 8, 9, 93, 94, 95, 96, 97],
            &[60; 10],
        ]);
        let seqs = |coldest: &Coldest| {
            let seq = |number| packs.iter().find(|pack| pack.number == number).unwrap().info.id.seq;
            coldest.packs.iter().map(|number| seq(*number)).collect::<Vec<_>>()
        };
        let first = heat.coldest(&packs, (1, 100, 16));
        assert_eq!((seqs(&first), first.cold), (vec![2], 9), "half of it is the oldest there is");
        let two = heat.coldest(&packs, (60, 100, 16));
        assert_eq!((seqs(&two), two.cold), (vec![2, 1], 14));
        let most = heat.coldest(&packs, (1000, 100, 16));
        assert_eq!(seqs(&most), [2, 1], "more does not fit into one pack");
        assert_eq!(seqs(&heat.coldest(&packs, (1000, 1000, 3))), [2, 1, 0]);
        assert_eq!(seqs(&heat.coldest(&packs, (1000, 0, 16))), [2], "one at least");
        assert_eq!(heat.coldest(&[], (1000, 1000, 3)), Coldest::default());
    }

    #[test]
    fn blocks_that_the_map_does_not_have_are_cold() {
        let (heat, packs) = walked(&[&[50; 10], &[90, 91, 92]]);
        let first = heat.coldest(&packs, (1, 100, 16));
        assert_eq!((first.packs, first.cold), (vec![packs[1].number], 0));
    }
}
