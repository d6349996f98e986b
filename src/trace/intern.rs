//! Gives the block ids of a file dense numbers, range by range.
//!
//! Known ids are kept as intervals (first id, length, first dense number), so a chain that a
//! session extends turn by turn is one interval however often it is named. Interning costs a
//! look-up in a sorted map for each interval touched, not for each block.

use std::collections::{BTreeMap, HashSet};

use kvstrata_tiers::error::{Error, Result};

use super::{BLOCKS_UNIQUE_MAX, Run};

/// Consecutive ids as a file names them: `first` to `first + count - 1`.
///
/// Files carry signed or unsigned 64-bit ids; 128 bits hold both without confusing them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileRange {
    pub(super) first: i128,
    pub(super) count: u32,
}

#[derive(Debug, Clone, Copy)]
struct Interval {
    count: u32,
    dense_first: u32,
}

/// The ids seen so far.
#[derive(Debug, Default)]
pub(super) struct Interner {
    /// By first file id; intervals do not overlap.
    intervals: BTreeMap<i128, Interval>,
    next_dense: u32,
}

impl Interner {
    /// Dense numbers given out; all are below this.
    pub(super) fn blocks_unique(&self) -> u32 {
        self.next_dense
    }

    /// Appends the dense runs of `range` to `runs`, joining neighbours.
    ///
    /// # Errors
    /// `Invalid` if there are more than [`BLOCKS_UNIQUE_MAX`] distinct ids.
    pub(super) fn intern(&mut self, range: FileRange, runs: &mut Vec<Run>) -> Result<()> {
        let end = range.first.saturating_add(i128::from(range.count));
        let mut next = range.first;
        while next < end {
            let wanted = count_between(next, end);
            let run = match self.known(next) {
                Some(known) => Run { first: known.first, count: known.count.min(wanted) },
                None => self.add(next, wanted)?,
            };
            next = next.saturating_add(i128::from(run.count));
            join(runs, run);
        }
        Ok(())
    }

    /// The dense run that starts at a known `id` and reaches to the end of its interval.
    fn known(&self, id: i128) -> Option<Run> {
        let (start, interval) = self.intervals.range(..=id).next_back()?;
        let offset = count_between(*start, id);
        let count = interval.count.checked_sub(offset).filter(|count| *count > 0)?;
        Some(Run { first: interval.dense_first.saturating_add(offset), count })
    }

    /// Numbers up to `wanted` new ids from `id` on, stopping before the next known one.
    fn add(&mut self, id: i128, wanted: u32) -> Result<Run> {
        let to_known =
            self.intervals.range(id..).next().map(|(start, _)| count_between(id, *start));
        let count = wanted.min(to_known.unwrap_or(u32::MAX));
        let run = Run { first: self.next_dense, count };
        self.next_dense = self
            .next_dense
            .checked_add(count)
            .filter(|next| *next <= BLOCKS_UNIQUE_MAX)
            .ok_or_else(|| {
                Error::invalid(format!(
                    "the trace has more than {BLOCKS_UNIQUE_MAX} distinct blocks"
                ))
            })?;
        if let Some((start, before)) = self.intervals.range_mut(..id).next_back()
            && start.saturating_add(i128::from(before.count)) == id
            && before.dense_first.saturating_add(before.count) == run.first
        {
            before.count = before.count.saturating_add(count);
        } else {
            self.intervals.insert(id, Interval { count, dense_first: run.first });
        }
        Ok(run)
    }
}

/// How many ids lie from `from` up to before `to`, at most `u32::MAX`.
fn count_between(from: i128, to: i128) -> u32 {
    u32::try_from(to.saturating_sub(from)).unwrap_or(u32::MAX)
}

fn join(runs: &mut Vec<Run>, run: Run) {
    match runs.last_mut() {
        Some(last) if last.end() == run.first => last.count = last.count.saturating_add(run.count),
        _ => runs.push(run),
    }
}

/// Keeps the first of equal blocks within one request; returns how many were dropped.
pub(super) fn drop_repeats(runs: &mut Vec<Run>) -> u64 {
    if !overlap(runs) {
        return 0;
    }
    let mut seen = HashSet::new();
    let mut kept = Vec::with_capacity(runs.len());
    let mut dropped = 0;
    for id in runs.iter().flat_map(|run| run.ids()) {
        if seen.insert(id) {
            join(&mut kept, Run { first: id, count: 1 });
        } else {
            dropped += 1;
        }
    }
    *runs = kept;
    dropped
}

fn overlap(runs: &[Run]) -> bool {
    // In a trace of new blocks the runs ascend anyway: look before sorting.
    let crosses = |pair: &[Run]| matches!(pair, [left, right] if left.end() > right.first);
    if !runs.windows(2).any(crosses) {
        return false;
    }
    let mut sorted = runs.to_vec();
    sorted.sort_unstable_by_key(|run| run.first);
    sorted.windows(2).any(crosses)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn ranges_get_the_numbers_that_single_ids_would(
            ranges in prop::collection::vec((-40_i128..40, 1_u32..20), 1..30),
        ) {
            let mut interner = Interner::default();
            let mut model = HashMap::new();
            for (first, count) in ranges {
                let mut runs = Vec::new();
                interner.intern(FileRange { first, count }, &mut runs).unwrap();
                let got: Vec<u32> = runs.iter().flat_map(|run| run.ids()).collect();
                let expected: Vec<u32> = (first..first + i128::from(count))
                    .map(|id| {
                        let next = u32::try_from(model.len()).unwrap();
                        *model.entry(id).or_insert(next)
                    })
                    .collect();
                prop_assert_eq!(got, expected);
            }
            prop_assert_eq!(interner.blocks_unique() as usize, model.len());
        }
    }

    #[test]
    fn a_chain_that_grows_stays_one_interval() {
        let mut interner = Interner::default();
        for count in [10, 20, 35] {
            let mut runs = Vec::new();
            interner.intern(FileRange { first: 1 << 70, count }, &mut runs).unwrap();
            assert_eq!(runs, [Run { first: 0, count }]);
        }
        assert_eq!(interner.intervals.len(), 1);
    }

    #[test]
    fn too_many_distinct_blocks_are_refused() {
        let mut interner = Interner::default();
        let range = FileRange { first: 0, count: u32::MAX };
        let error = interner.intern(range, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("268435456"), "{error}");
    }
}
