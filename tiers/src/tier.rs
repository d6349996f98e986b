//! Tiers, and what a lookup says about them.

/// A storage class, ordered hot to cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// CPU memory of this node.
    Dram,
    /// Local flash.
    Nvme,
    /// The shared object store.
    Object,
}

impl Tier {
    /// All tiers, hot to cold.
    pub const ALL: [Self; 3] = [Self::Dram, Self::Nvme, Self::Object];

    /// The lower-case name, as in metrics and on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Dram => "dram",
            Self::Nvme => "nvme",
            Self::Object => "object",
        }
    }
}

/// Positions `start..end` of a lookup lie on one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First position.
    pub start: u32,
    /// One past the last position.
    pub end: u32,
    /// The hottest tier that holds all of them.
    pub tier: Tier,
    /// A put is in flight: not readable yet.
    pub pending: bool,
    /// Bytes of these blocks.
    pub bytes: u64,
}

/// A lookup's answer in numbers: the prefix by tier and what is not in it. The sum is what was asked.
///
/// It tells the decision at lookup time; what a later get delivers is counted apart.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Prefix blocks whose hottest copy is in dram.
    pub dram: u32,
    /// Prefix blocks whose hottest copy is on nvme.
    pub nvme: u32,
    /// Prefix blocks that only the object store has.
    pub object: u32,
    /// Prefix blocks whose put is in flight.
    pub pending: u32,
    /// All others, including present blocks behind the first gap.
    pub miss: u32,
}

impl TierCounts {
    /// The counts of a prefix made of `runs` among `asked` positions; the only constructor.
    #[must_use]
    pub fn of_prefix(runs: &[Run], asked: u32) -> Self {
        let mut counts = Self::default();
        for run in runs {
            let blocks = run.end.saturating_sub(run.start);
            let count = match (run.pending, run.tier) {
                (true, _) => &mut counts.pending,
                (false, Tier::Dram) => &mut counts.dram,
                (false, Tier::Nvme) => &mut counts.nvme,
                (false, Tier::Object) => &mut counts.object,
            };
            *count = count.saturating_add(blocks);
        }
        let found = counts.dram + counts.nvme + counts.object + counts.pending;
        debug_assert!(found <= asked, "a prefix cannot be longer than what was asked");
        counts.miss = asked.saturating_sub(found);
        counts
    }

    /// dram, nvme, object, pending, miss.
    #[must_use]
    pub fn to_array(self) -> [u32; 5] {
        [self.dram, self.nvme, self.object, self.pending, self.miss]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_sum_to_what_was_asked() {
        let run = |start, end, tier, pending| Run { start, end, tier, pending, bytes: 0 };
        let cases = [
            (vec![], 5, [0, 0, 0, 0, 5]),
            (vec![run(0, 3, Tier::Dram, false)], 5, [3, 0, 0, 0, 2]),
            (
                vec![
                    run(0, 1, Tier::Dram, false),
                    run(1, 3, Tier::Nvme, false),
                    run(3, 4, Tier::Dram, true),
                    run(4, 9, Tier::Object, false),
                ],
                9,
                [1, 2, 5, 1, 0],
            ),
        ];
        for (runs, asked, expected) in cases {
            let counts = TierCounts::of_prefix(&runs, asked).to_array();
            assert_eq!(counts, expected);
            assert_eq!(counts.iter().sum::<u32>(), asked);
        }
    }
}
