//! An index in memory that loses power on demand.

use std::{collections::BTreeMap, io};

use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::nvme::index::{
    Change, Index, IndexEntry, IndexKey, IndexUsage, Known,
    codec::{Edit, FIRST, Key, decode, decode_entry},
};

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Keeps the bytes that the real index writes, in order, and remembers which groups are not yet
/// safe from a loss of power.
#[derive(Debug, Default)]
pub struct MemoryIndex(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    now: Pairs,
    /// What a loss of power leaves in any case.
    persisted: Pairs,
    /// The groups applied since.
    groups: Vec<Vec<Change>>,
    failures: Option<(u32, io::ErrorKind)>,
    crashes: u64,
}

impl MemoryIndex {
    /// An empty index.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on a loss of power leaves everything that was applied so far.
    pub fn persist(&self) {
        let mut state = self.0.lock();
        let groups = std::mem::take(&mut state.groups);
        groups.iter().for_each(|group| edit(&mut state.persisted, group));
    }

    /// The index after a loss of power: some number of the groups since the last
    /// [`persist`](Self::persist), drawn from `seed` and the number of crashes before, the earliest
    /// first.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let state = self.0.lock();
        let outcomes = u64::try_from(state.groups.len()).map_or(u64::MAX, |groups| groups + 1);
        let kept = xxh3_64_with_seed(&state.crashes.to_le_bytes(), seed) % outcomes;
        let mut now = state.persisted.clone();
        for (group, _) in state.groups.iter().zip(0..kept) {
            edit(&mut now, group);
        }
        let crashes = state.crashes + 1;
        Self(Mutex::new(State { persisted: now.clone(), now, crashes, ..State::default() }))
    }

    /// Groups that a loss of power may take.
    #[must_use]
    pub fn groups_at_risk(&self) -> usize {
        self.0.lock().groups.len()
    }

    /// The next `count` groups are not applied: the call fails with this kind.
    pub fn fail_next(&self, count: u32, kind: io::ErrorKind) {
        self.0.lock().failures = Some((count, kind));
    }

    /// Puts bytes of any kind there, as a damaged or a newer index would have them.
    pub fn plant(&self, key: &[u8], value: &[u8]) {
        let mut state = self.0.lock();
        state.now.insert(key.to_vec(), value.to_vec());
        state.persisted.insert(key.to_vec(), value.to_vec());
    }
}

impl State {
    fn check_fault(&mut self) -> io::Result<()> {
        let Some((left, kind)) = &mut self.failures else { return Ok(()) };
        let kind = *kind;
        let Some(fewer) = left.checked_sub(1) else { return Ok(()) };
        *left = fewer;
        Err(io::Error::new(kind, "write index: fail as planned"))
    }
}

fn edit(pairs: &mut Pairs, changes: &[Change]) {
    let mut scratch = Vec::new();
    for change in changes {
        match Edit::of(change, &mut scratch) {
            Edit::Put(key, value) => pairs.insert(key.as_ref().to_vec(), value.to_vec()),
            Edit::Delete(key) => pairs.remove(key.as_ref()),
            Edit::DeleteBlock(block, description) => {
                pairs.remove(description.as_ref());
                pairs.remove(block.as_ref())
            }
        };
    }
}

impl Index for MemoryIndex {
    fn apply(&self, changes: &[Change]) -> io::Result<()> {
        let mut state = self.0.lock();
        state.check_fault()?;
        edit(&mut state.now, changes);
        state.groups.push(changes.to_vec());
        Ok(())
    }

    fn get(&self, key: &IndexKey) -> io::Result<Option<IndexEntry>> {
        let state = self.0.lock();
        Ok(state.now.get(Key::block(key).as_ref()).and_then(|value| decode_entry(value)))
    }

    fn load(&self, visit: &mut dyn FnMut(Known) -> io::Result<()>) -> io::Result<u64> {
        let pairs = self.0.lock().now.clone();
        let mut passed_over = 0;
        for (key, value) in pairs.range(FIRST.to_vec()..) {
            match decode(key, value) {
                Some(known) => visit(known)?,
                None => passed_over += 1,
            }
        }
        Ok(passed_over)
    }

    fn clear(&self) -> io::Result<()> {
        let mut state = self.0.lock();
        state.now.clear();
        state.persisted.clear();
        state.groups.clear();
        Ok(())
    }

    fn reopen(&self) -> io::Result<()> {
        Ok(())
    }

    fn usage(&self) -> IndexUsage {
        let state = self.0.lock();
        let bytes = state.now.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
        IndexUsage { disk_bytes: 0, memory_bytes: u64::try_from(bytes).unwrap_or(u64::MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::index_suite::{self, Contents, put};

    #[test]
    fn keeps_the_contract() {
        index_suite::run(&MemoryIndex::new(), MemoryIndex::plant);
    }

    #[test]
    fn a_crash_keeps_a_prefix_of_the_groups() {
        let index = MemoryIndex::new();
        index.apply(&[put(0, 0)]).unwrap();
        index.persist();
        (1..=20).for_each(|number| index.apply(&[put(number, 0), put(0, number)]).unwrap());
        let kept: Vec<_> = (0..100)
            .map(|seed| {
                let after = Contents::of(&index.crash(seed)).unwrap();
                let groups = after.blocks.len() as u64 - 1;
                let expected = MemoryIndex::new();
                expected.apply(&[put(0, groups)]).unwrap();
                (1..=groups).for_each(|number| expected.apply(&[put(number, 0)]).unwrap());
                assert_eq!(after, Contents::of(&expected).unwrap(), "seed {seed}");
                groups
            })
            .collect();
        assert!(kept.contains(&0) && kept.contains(&20), "{kept:?}");
        let again = |seed| Contents::of(&index.crash(seed)).unwrap();
        assert_eq!(again(7), again(7));
        index.persist();
        assert_eq!(index.groups_at_risk(), 0);
        assert_eq!(again(7).blocks.len(), 21);
    }

    #[test]
    fn a_planned_failure_applies_nothing() {
        let index = MemoryIndex::new();
        index.fail_next(2, io::ErrorKind::StorageFull);
        for _ in 0..2 {
            let error = index.apply(&[put(1, 1)]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        }
        assert_eq!(Contents::of(&index).unwrap(), Contents::default());
        index.apply(&[put(1, 1)]).unwrap();
        assert_eq!(Contents::of(&index).unwrap().blocks.len(), 1);
    }
}
