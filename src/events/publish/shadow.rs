//! What one router may believe: the blocks that were announced to it, and where.
//!
//! Routers count what they are told ("stored" twice takes "removed" twice), so that everything that is
//! announced is written down here first, and withdrawn exactly once. Children are counted, for blocks that are
//! not announced themselves too: a chain whose head comes back is as long as what hangs on it.

use std::collections::HashMap;

use kvstrata_tiers::tier::Tier;

/// Tiers, a bit for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct TierSet(u8);

impl TierSet {
    pub(super) const NONE: Self = Self(0);

    pub(super) fn of(tier: Tier) -> Self {
        Self(1 << index(tier))
    }

    pub(super) fn has(self, tier: Tier) -> bool {
        self.0 & Self::of(tier).0 != 0
    }

    pub(super) fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(super) fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    pub(super) fn both(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Hot to cold.
    pub(super) fn iter(self) -> impl Iterator<Item = Tier> {
        Tier::ALL.into_iter().filter(move |tier| self.has(*tier))
    }
}

/// The place of a tier in a list of them, hot to cold.
pub(super) fn index(tier: Tier) -> usize {
    match tier {
        Tier::Dram => 0,
        Tier::Nvme => 1,
        Tier::Object => 2,
    }
}

/// What is written down of a block.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    namespace: u32,
    tiers: TierSet,
    /// Blocks behind it that are announced, on each tier.
    children: [u32; 3],
    /// The block before it, while it is announced.
    parent: Option<u64>,
}

/// The blocks that were announced, by the hashes that routers know.
#[derive(Debug, Default)]
pub(super) struct Shadow {
    known: HashMap<u64, Known>,
    announced: usize,
}

impl Shadow {
    /// Where this block is announced. Another one with the same 64 bits is not this block.
    pub(super) fn tiers(&self, namespace: u32, hash: u64) -> TierSet {
        let known = self.known.get(&hash).filter(|known| known.namespace == namespace);
        known.map_or(TierSet::NONE, |known| known.tiers)
    }

    /// Where whatever block is announced that routers know by this hash.
    pub(super) fn tiers_of(&self, hash: u64) -> TierSet {
        self.known.get(&hash).map_or(TierSet::NONE, |known| known.tiers)
    }

    /// Whether a block of another namespace is announced under this hash.
    pub(super) fn is_taken(&self, namespace: u32, hash: u64) -> bool {
        let known = self.known.get(&hash);
        known.is_some_and(|known| known.namespace != namespace && !known.tiers.is_empty())
    }

    /// How many blocks are announced on each tier that follow this one.
    pub(super) fn children(&self, hash: u64) -> [u32; 3] {
        self.known.get(&hash).map_or([0; 3], |known| known.children)
    }

    /// How many blocks are announced.
    pub(super) fn len(&self) -> usize {
        self.announced
    }

    pub(super) fn announce(&mut self, namespace: u32, hash: u64, parent: Option<u64>, tier: Tier) {
        let known = self.known.entry(hash).or_default();
        if known.tiers.is_empty() {
            (known.namespace, known.parent) = (namespace, parent);
            self.announced += 1;
        }
        if known.tiers.has(tier) {
            return;
        }
        known.tiers = known.tiers.with(TierSet::of(tier));
        if let Some(parent) = known.parent {
            let above = self.known.entry(parent).or_insert(Known { namespace, ..Known::default() });
            if let Some(count) = above.children.get_mut(index(tier)) {
                *count = count.saturating_add(1);
            }
        }
    }

    pub(super) fn withdraw(&mut self, hash: u64, tiers: TierSet) {
        let Some(known) = self.known.get_mut(&hash) else { return };
        let gone = known.tiers.both(tiers);
        known.tiers = known.tiers.without(gone);
        let parent = known.parent;
        if !gone.is_empty() && known.tiers.is_empty() {
            self.announced -= 1;
        }
        self.drop_unused(hash);
        let Some(parent) = parent else { return };
        if let Some(above) = self.known.get_mut(&parent) {
            for tier in gone.iter() {
                if let Some(count) = above.children.get_mut(index(tier)) {
                    *count = count.saturating_sub(1);
                }
            }
        }
        self.drop_unused(parent);
    }

    /// Forgets everything; returns what was announced.
    pub(super) fn take(&mut self) -> Vec<(u64, TierSet)> {
        self.announced = 0;
        let known = std::mem::take(&mut self.known).into_iter();
        known
            .map(|(hash, known)| (hash, known.tiers))
            .filter(|(_, tiers)| !tiers.is_empty())
            .collect()
    }

    fn drop_unused(&mut self, hash: u64) {
        let unused = |known: &Known| known.tiers.is_empty() && known.children == [0; 3];
        if self.known.get(&hash).is_some_and(unused) {
            self.known.remove(&hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_announced_once_for_each_tier_and_forgotten_with_the_last() {
        let mut shadow = Shadow::default();
        shadow.announce(1, 7, None, Tier::Dram);
        shadow.announce(1, 7, None, Tier::Object);
        shadow.announce(1, 8, Some(7), Tier::Nvme);
        assert_eq!(shadow.tiers(1, 7).iter().collect::<Vec<_>>(), [Tier::Dram, Tier::Object]);
        assert_eq!(shadow.tiers(2, 7), TierSet::NONE);
        assert!(shadow.is_taken(2, 7) && !shadow.is_taken(1, 7));
        assert_eq!((shadow.len(), shadow.children(7)), (2, [0, 1, 0]));
        shadow.withdraw(7, TierSet::of(Tier::Dram).with(TierSet::of(Tier::Object)));
        assert_eq!((shadow.len(), shadow.children(7)), (1, [0, 1, 0]));
        assert_eq!(shadow.tiers(1, 7), TierSet::NONE);
        shadow.withdraw(8, TierSet::of(Tier::Nvme));
        shadow.withdraw(8, TierSet::of(Tier::Nvme));
        assert_eq!((shadow.len(), shadow.known.len()), (0, 0));
    }
}
