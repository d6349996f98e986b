//! Joins what engines tell of blocks with the blocks that are put: a bounded table, no I/O, no clock.
//!
//! Either may come first. An entry is found by 64 bits of the hash, because that may be all that is
//! published, and has what was told of the block and its whole hash, which only a put (or an engine that
//! publishes all of it) knows. A block is described when both are there and so are its place in the
//! chain and the whole hash of the block before it; when that one comes, those that wait for it are
//! described. What is not used leaves.
//!
//! Two blocks of one model that share those 64 bits are told apart by nobody here: what was told of one
//! would be told of the other. That is met once in 2^64 pairs, and says no byte of either.

use std::{num::NonZeroUsize, sync::Arc};

use kvstrata_tiers::block::BlockHash;
use lru::LruCache;

/// Blocks that wait for one block; more are not waited for.
const CHILDREN_MAX: usize = 64;

/// What is known of blocks.
#[derive(Debug)]
pub(super) struct Table {
    entries: LruCache<u64, Entry>,
}

#[derive(Debug, Default)]
struct Entry {
    told: Option<Told>,
    whole: Option<BlockHash>,
    /// Nothing has come since it was described that would change its description, or its need of one.
    described: bool,
    /// Blocks that can be described when this one is known.
    children: Vec<u64>,
}

/// What was told of a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    /// The block before it; none at the root.
    pub(super) parent: Option<u64>,
    /// Its index in its chain, once that is known.
    pub(super) position: Option<u32>,
    /// Its token ids, or none.
    pub(super) tokens: Box<[u32]>,
    pub(super) lora_name: Arc<str>,
}

/// A block that can be described.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) hash: BlockHash,
    pub(super) parent: Option<BlockHash>,
    pub(super) position: u32,
    pub(super) tokens: Box<[u32]>,
    pub(super) lora_name: Arc<str>,
}

impl Table {
    pub(super) fn new(blocks_max: NonZeroUsize) -> Self {
        Self { entries: LruCache::new(blocks_max) }
    }

    /// Takes the whole hash of a block; what can be described now is appended. One that is `put` needs a
    /// description, also if it was described before: it may have left since.
    pub(super) fn know(
        &mut self,
        short: u64,
        whole: BlockHash,
        put: bool,
        described: &mut Vec<Described>,
    ) {
        let entry = self.entries.get_or_insert_mut(short, Entry::default);
        entry.described &= !put && entry.whole == Some(whole);
        entry.whole = Some(whole);
        self.settle(short, described);
    }

    /// Takes what was told of a block; what can be described now is appended.
    pub(super) fn tell(&mut self, short: u64, told: Told, described: &mut Vec<Described>) {
        let mut told = told;
        if let Some(parent) = told.parent {
            let entry = self.entries.get_or_insert_mut(parent, Entry::default);
            let before = entry.told.as_ref().and_then(|told| told.position);
            told.position = before.and_then(|before| before.checked_add(1));
            let waits = told.position.is_none() || entry.whole.is_none();
            if waits && !entry.children.contains(&short) && entry.children.len() < CHILDREN_MAX {
                entry.children.push(short);
            }
        } else {
            told.position = Some(0);
        }
        let entry = self.entries.get_or_insert_mut(short, Entry::default);
        entry.described &= entry.told.as_ref() == Some(&told);
        entry.told = Some(told);
        self.settle(short, described);
    }

    /// Describes a block and those that wait for it, as far as they can be. A block is gone on from only
    /// when its place has become known, which happens once: chains that bite their tail end.
    fn settle(&mut self, short: u64, described: &mut Vec<Described>) {
        let mut ready = vec![short];
        while let Some(short) = ready.pop() {
            described.extend(self.describe(short));
            let Some(entry) = self.entries.peek_mut(&short) else { continue };
            let place = entry.told.as_ref().and_then(|told| told.position);
            let whole = entry.whole.is_some();
            let mut children = std::mem::take(&mut entry.children);
            children.retain(|child| {
                let Some(told) = self.told_behind(short, *child) else { return false };
                let placed = told.position.is_none() && place.is_some();
                if placed {
                    told.position = place.and_then(|place| place.checked_add(1));
                }
                let waits = !whole || told.position.is_none();
                if placed {
                    ready.push(*child);
                } else if whole {
                    described.extend(self.describe(*child));
                }
                waits
            });
            if let Some(entry) = self.entries.peek_mut(&short) {
                entry.children = children;
            }
        }
    }

    /// What was told of a block, if it is still told to be behind `parent`.
    fn told_behind(&mut self, parent: u64, child: u64) -> Option<&mut Told> {
        let told = self.entries.peek_mut(&child)?.told.as_mut()?;
        (told.parent == Some(parent)).then_some(told)
    }

    fn describe(&mut self, short: u64) -> Option<Described> {
        let parent = match self.entries.peek(&short)?.told.as_ref()?.parent {
            None => None,
            Some(parent) => Some(self.entries.peek(&parent)?.whole?),
        };
        let entry = self.entries.peek_mut(&short).filter(|entry| !entry.described)?;
        let (told, hash) = (entry.told.as_ref()?, entry.whole?);
        entry.described = told.position.is_some();
        Some(Described {
            hash,
            parent,
            position: told.position?,
            tokens: told.tokens.clone(),
            lora_name: Arc::clone(&told.lora_name),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(blocks: usize) -> Table {
        Table::new(NonZeroUsize::new(blocks).unwrap())
    }

    fn whole(number: u64) -> BlockHash {
        BlockHash::new(&[[9; 24].as_slice(), &number.to_be_bytes()].concat()).unwrap()
    }

    fn told(number: u64) -> Told {
        Told {
            parent: (number > 0).then(|| number - 1),
            position: None,
            tokens: [u32::try_from(number).unwrap()].into(),
            lora_name: "".into(),
        }
    }

    fn expected(number: u64) -> Described {
        Described {
            hash: whole(number),
            parent: (number > 0).then(|| whole(number - 1)),
            position: u32::try_from(number).unwrap(),
            tokens: [u32::try_from(number).unwrap()].into(),
            lora_name: "".into(),
        }
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Step {
        Tell(u64),
        Know(u64),
    }

    fn run(table: &mut Table, steps: &[Step]) -> Vec<Described> {
        let mut described = Vec::new();
        for step in steps {
            match *step {
                Step::Tell(number) => table.tell(number, told(number), &mut described),
                Step::Know(number) => table.know(number, whole(number), true, &mut described),
            }
        }
        described
    }

    #[test]
    fn a_chain_is_described_in_whatever_order_its_parts_come() {
        use Step::{Know, Tell};
        let orders: [&[Step]; 5] = [
            &[Tell(0), Tell(1), Tell(2), Know(0), Know(1), Know(2)],
            &[Know(0), Know(1), Know(2), Tell(0), Tell(1), Tell(2)],
            &[Tell(2), Tell(1), Tell(0), Know(2), Know(1), Know(0)],
            &[Know(2), Tell(2), Know(1), Tell(1), Know(0), Tell(0)],
            &[Tell(1), Know(2), Tell(0), Know(0), Tell(2), Know(1)],
        ];
        for order in orders {
            let mut described = run(&mut table(100), order);
            described.sort_by_key(|described| described.position);
            described.dedup();
            assert_eq!(described, [expected(0), expected(1), expected(2)], "{order:?}");
        }
    }

    #[test]
    fn every_order_of_a_longer_chain_ends_the_same() {
        let mut state = 7_u64;
        let mut below = |most: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            usize::try_from(state >> 33).unwrap() % most
        };
        for _ in 0..500 {
            let mut steps: Vec<_> =
                (0..8).flat_map(|at| [Step::Tell(at), Step::Know(at)]).collect();
            for at in (1..steps.len()).rev() {
                steps.swap(at, below(at + 1));
            }
            let mut described = run(&mut table(100), &steps);
            described.sort_by_key(|described| described.position);
            described.dedup();
            assert_eq!(described, (0..8).map(expected).collect::<Vec<_>>(), "{steps:?}");
        }
    }

    #[test]
    fn nothing_is_said_of_a_block_whose_place_or_parent_is_not_known() {
        use Step::{Know, Tell};
        assert_eq!(run(&mut table(100), &[Tell(0), Tell(1), Know(1)]), []);
        assert_eq!(
            run(&mut table(100), &[Tell(2), Know(2), Know(1), Tell(0), Know(0)]),
            [expected(0)]
        );
        assert_eq!(run(&mut table(100), &[Know(0), Know(1)]), []);
    }

    #[test]
    fn chains_that_bite_their_tail_describe_nothing_and_end() {
        let mut table = table(100);
        let mut described = Vec::new();
        for (number, parent) in [(5, 5), (6, 7), (7, 6), (8, 5)] {
            let told = Told { parent: Some(parent), ..told(number) };
            table.tell(number, told, &mut described);
            table.know(number, whole(number), false, &mut described);
        }
        assert_eq!(described, []);
    }

    #[test]
    fn what_is_stored_again_is_described_again_until_it_has_left_the_table() {
        use Step::{Know, Tell};
        let mut table = table(3);
        assert_eq!(run(&mut table, &[Tell(0), Know(0)]), [expected(0)]);
        assert_eq!(run(&mut table, &[Know(0)]), [expected(0)]);
        assert_eq!(run(&mut table, &[Tell(0)]), [], "nothing new");
        assert_eq!(run(&mut table, &[Know(10), Know(11), Know(12), Know(0)]), []);
        assert_eq!(table.entries.len(), 3);
    }
}
