//! Which parts of a colder tier hold how much that is hot, from one walk over the map for several
//! parts that are given up. A part is what leaves as a whole: a segment, or a pack.

use std::{collections::HashMap, hash::Hash};

use crate::{map::Location, store::Above, tier::Tier};

/// The share of a tier's blocks that is cold: what giving up a part may drop without looking further.
const COLD_SHARE: f64 = 0.08;
/// A survey is used until this part of the parts has been given up, but at least once.
const REUSE_DIVISOR: usize = 32;

/// A part that may be given up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part<Id> {
    pub(crate) id: Id,
    /// The bytes of it, counted as those that are hot.
    pub(crate) bytes: u64,
    /// Bytes that are to be written again whatever is hot.
    pub(crate) kept: u64,
}

/// What a walk has found.
#[derive(Debug)]
pub(crate) struct Survey<Id> {
    /// The age up to which blocks are cold.
    cold: u64,
    hot_bytes: HashMap<Id, u64>,
    /// The newest part that there was then: of later ones nothing is known.
    newest: Option<Id>,
    /// How often it is still good.
    left: usize,
}

impl<Id> Default for Survey<Id> {
    fn default() -> Self {
        Self { cold: 0, hot_bytes: HashMap::new(), newest: None, left: 0 }
    }
}

impl<Id: Copy + Ord + Hash> Survey<Id> {
    /// Makes it good for once more. There are `count` parts, the last of them `newest`; `place` says in
    /// which one a block of a length lies, and how many bytes it takes there.
    pub(crate) fn refresh(
        &mut self,
        (above, tier): (Option<&dyn Above>, Tier),
        (count, newest): (usize, Option<Id>),
        place: impl Fn(Location, u32) -> (Id, u64),
    ) {
        if self.left > 0 {
            self.left -= 1;
            return;
        }
        self.left = count / REUSE_DIVISOR;
        self.newest = newest;
        self.hot_bytes.clear();
        let Some(above) = above else { return };
        let cold = above.cold_age(tier, COLD_SHARE);
        let hot_bytes = &mut self.hot_bytes;
        above.survey(tier, &mut |location, len, age| {
            if age > cold {
                let (id, bytes) = place(location, len);
                *hot_bytes.entry(id).or_default() += bytes;
            }
        });
        self.cold = cold;
    }

    /// The age up to which blocks are cold.
    pub(crate) fn cold(&self) -> u64 {
        self.cold
    }

    /// The bytes of a part that are to be written again.
    pub(crate) fn kept(&self, part: &Part<Id>) -> u64 {
        let hot = self.hot_bytes.get(&part.id).copied().unwrap_or(0);
        hot.saturating_add(part.kept).min(part.bytes)
    }

    /// What must be written again for each byte that becomes free, in no unit; `None` for a part of
    /// which nothing is known.
    pub(crate) fn cost(&self, part: &Part<Id>) -> Option<u128> {
        let kept = self.kept(part);
        let cost = (u128::from(kept) << 32) / u128::from(part.bytes.saturating_sub(kept).max(1));
        (Some(part.id) <= self.newest).then_some(cost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_with_the_least_to_write_for_its_room_costs_the_least() {
        let sizes = [(1, 100), (2, 100), (3, 10)];
        let survey = |hot: [u64; 3]| Survey {
            hot_bytes: (1..).zip(hot).collect(),
            newest: Some(3),
            ..Survey::default()
        };
        let cheapest = |survey: &Survey<u64>, kept: u64| {
            let parts = sizes.map(|(id, bytes)| Part { id, bytes, kept });
            let costs = parts.iter().filter_map(|part| Some((survey.cost(part)?, part.id)));
            costs.min().map(|(_, id)| id)
        };
        assert_eq!(cheapest(&survey([50, 40, 9]), 0), Some(2));
        assert_eq!(cheapest(&survey([50, 60, 3]), 0), Some(3));
        assert_eq!(cheapest(&survey([50, 60, 3]), 5), Some(1), "what is kept counts");
        assert_eq!(cheapest(&survey([0, 0, 0]), 0), Some(1), "the oldest of equals");
        assert_eq!(cheapest(&survey([100, 100, 10]), 0), Some(3), "all hot: the least");
        let older = Survey { newest: Some(2), ..survey([100, 90, 0]) };
        assert_eq!(cheapest(&older, 0), Some(2), "of what came later nothing is known");
        assert_eq!(cheapest(&Survey::default(), 0), None);
    }
}
