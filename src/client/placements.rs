//! Where blocks are that are not here: what lookups have said of the blocks of one namespace.
//!
//! It is bounded, and may be wrong at any time: a block that has moved since is a miss.

use std::sync::Arc;

use kvstrata_tiers::block::BlockHash;
use lru::LruCache;
use parking_lot::Mutex;

use super::{HashList, Locality, Run};
use crate::limits::PLACEMENTS_MAX;

/// The name of a member.
pub(super) type Name = Arc<str>;

/// See the module.
#[derive(Debug)]
pub(super) struct Placements(Mutex<LruCache<BlockHash, Name>>);

/// The first few blocks of a list, which are read from one member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) blocks: usize,
    /// `None`: from the server that the client is at.
    pub(super) holder: Option<Name>,
}

impl Default for Placements {
    fn default() -> Self {
        Self(Mutex::new(LruCache::unbounded()))
    }
}

impl Placements {
    /// Takes what a lookup of `hashes` has found; `name` tells the name of a holder.
    pub(super) fn note<'r>(
        &self,
        hashes: &HashList,
        runs: impl Iterator<Item = &'r Run>,
        name: impl Fn(u32) -> Option<Name>,
    ) {
        let mut placed = self.0.lock();
        for run in runs {
            let found = hashes.slice(run.start as usize..run.end as usize);
            let holder = match run.locality {
                Locality::Remote => name(run.holder),
                Locality::Local => None,
            };
            match holder {
                Some(holder) => found.iter().for_each(|hash| {
                    placed.push(hash, Arc::clone(&holder));
                }),
                None if placed.is_empty() => {}
                None => found.iter().for_each(|hash| {
                    placed.pop(&hash);
                }),
            }
            while placed.len() > PLACEMENTS_MAX {
                placed.pop_lru();
            }
        }
    }

    /// From where to read the first of `hashes`, and how many of them.
    pub(super) fn route(&self, hashes: &HashList) -> Route {
        let mut placed = self.0.lock();
        if placed.is_empty() {
            return Route { blocks: hashes.len(), holder: None };
        }
        let holder = hashes.get(0).and_then(|first| placed.get(&first).cloned());
        let also = hashes.iter().take_while(|hash| placed.get(hash) == holder.as_ref());
        Route { blocks: also.count(), holder }
    }

    /// These are not where they were said to be.
    pub(super) fn forget(&self, hashes: &HashList) {
        let mut placed = self.0.lock();
        hashes.iter().for_each(|hash| {
            placed.pop(&hash);
        });
    }

    /// Nothing can be read from this member.
    pub(super) fn forget_holder(&self, holder: &str) {
        let mut placed = self.0.lock();
        let of_it = placed.iter().filter(|(_, name)| &***name == holder);
        let gone: Vec<_> = of_it.map(|(hash, _)| *hash).collect();
        for hash in gone {
            placed.pop(&hash);
        }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use std::{ops::Range, time::Duration};

    use kvstrata_tiers::tier::Tier;

    use super::*;

    fn hash(number: u32) -> BlockHash {
        let mut bytes = [7; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlockHash::new(&bytes).unwrap()
    }

    fn hashes(numbers: Range<u32>) -> HashList {
        HashList::of(&numbers.map(hash).collect::<Vec<_>>())
    }

    fn run(positions: Range<u32>, holder: u32) -> Run {
        Run {
            start: positions.start,
            end: positions.end,
            tier: Tier::Dram,
            holder,
            locality: if holder == 0 { Locality::Local } else { Locality::Remote },
            est_load: Duration::ZERO,
            pending: false,
        }
    }

    /// Holder 9 is not in the list.
    fn name(holder: u32) -> Option<Name> {
        (holder != 9).then(|| format!("node-{holder}").into())
    }

    /// How many blocks after one another, and where: `-` for here.
    fn routes(placements: &Placements, numbers: Range<u32>) -> String {
        let (all, mut from, mut text) = (hashes(numbers), 0, String::new());
        while from < all.len() {
            let Route { blocks, holder } = placements.route(&all.slice(from..all.len()));
            let holder = holder.as_deref().map_or("-", |name| name.trim_start_matches("node-"));
            text += &format!("{blocks}x{holder} ");
            from += blocks;
        }
        text.trim_end().to_owned()
    }

    #[test]
    fn what_a_lookup_has_found_elsewhere_is_read_there() {
        let placements = Placements::default();
        assert_eq!(routes(&placements, 0..5), "5x-");
        let found = [run(0..2, 0), run(2..4, 1), run(4..5, 2), run(5..6, 9)];
        placements.note(&hashes(0..10), found.iter(), name);
        assert_eq!(routes(&placements, 0..7), "2x- 2x1 1x2 2x-");
        assert_eq!(routes(&placements, 3..5), "1x1 1x2");
        // Here now, or nowhere.
        placements.note(&hashes(0..10), [run(2..3, 0)].iter(), name);
        assert_eq!(routes(&placements, 2..5), "1x- 1x1 1x2");
        placements.forget_holder("node-1");
        assert_eq!(routes(&placements, 2..5), "2x- 1x2");
        placements.forget(&hashes(4..5));
        assert_eq!((routes(&placements, 0..10).as_str(), placements.len()), ("10x-", 0));
    }

    #[test]
    fn what_is_remembered_is_bounded_whatever_a_server_says() {
        let placements = Placements::default();
        let backwards = Run { end: 2, ..run(4..5, 2) };
        let far = Run { end: u32::MAX, ..run(3..4, 1) };
        placements.note(&hashes(0..5), [far, backwards].iter(), name);
        assert_eq!(routes(&placements, 0..5), "3x- 2x1");
        let most = u32::try_from(PLACEMENTS_MAX).unwrap();
        let all = hashes(0..most + 10);
        placements.note(&all, [run(0..most + 10, 1)].iter(), name);
        assert_eq!(placements.len(), PLACEMENTS_MAX);
        assert_eq!(routes(&placements, 9..11), "1x- 1x1");
    }
}
