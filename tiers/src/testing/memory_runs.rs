//! Runs over a tier in memory.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::MemoryStore;
use crate::{
    error::{Error, ErrorKind, Result},
    store::{BoxFuture, RunBlock, RunId, Runs},
};

/// Cuts the copies of a [`MemoryStore`] into runs, for tests of what copies runs. Under a stack, that
/// store is its nvme tier: what the stack demotes lies in the next run that is sealed.
#[derive(Debug)]
pub struct MemoryRuns {
    store: Arc<MemoryStore>,
    runs: Mutex<BTreeMap<RunId, Run>>,
    sealed: Notify,
    /// How many of the oldest runs are about to leave.
    leaving: AtomicUsize,
    failing: AtomicBool,
    holding: AtomicBool,
}

#[derive(Debug, Default)]
struct Run {
    blocks: Vec<RunBlock>,
    offered: bool,
}

impl MemoryRuns {
    /// No runs yet: all that `store` has is in the first one that is sealed.
    #[must_use]
    pub fn over(store: Arc<MemoryStore>) -> Self {
        Self {
            store,
            runs: Mutex::default(),
            sealed: Notify::new(),
            leaving: AtomicUsize::new(0),
            failing: AtomicBool::new(false),
            holding: AtomicBool::new(false),
        }
    }

    /// Seals a run of all copies of the store that are in no run.
    pub fn seal(&self) -> RunId {
        let mut runs = self.runs.lock();
        let known = |block: &RunBlock| {
            runs.values().any(|run| run.blocks.iter().any(|b| b.location == block.location))
        };
        let mut blocks = self.store.run_blocks();
        blocks.retain(|block| !known(block));
        let id = RunId(runs.keys().next_back().map_or(1, |last| last.0 + 1));
        runs.insert(id, Run { blocks, offered: false });
        drop(runs);
        self.sealed.notify_one();
        id
    }

    /// The oldest `count` runs are about to leave from now on.
    pub fn press(&self, count: usize) {
        self.leaving.store(count, Ordering::Relaxed);
    }

    /// A run leaves, and its blocks with it: the stack is told, as by a tier that reclaims it.
    pub fn reclaim(&self, run: RunId) {
        let Some(run) = self.runs.lock().remove(&run) else { return };
        let blocks: Vec<_> = run.blocks.iter().map(RunBlock::wanted).collect();
        self.store.let_go(&blocks);
    }

    /// Whether reading runs and their blocks fails from now on.
    pub fn fail(&self, failing: bool) {
        self.failing.store(failing, Ordering::Relaxed);
    }

    /// Whether runs that were not offered should stay.
    #[must_use]
    pub fn is_holding(&self) -> bool {
        self.holding.load(Ordering::Relaxed)
    }

    /// The runs that were offered and are there, oldest first.
    #[must_use]
    pub fn offers(&self) -> Vec<RunId> {
        let runs = self.runs.lock();
        runs.iter().filter(|(_, run)| run.offered).map(|(id, _)| *id).collect()
    }

    fn check(&self) -> Result<()> {
        if self.failing.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Unavailable, "read a run on demand"));
        }
        Ok(())
    }
}

impl Runs for MemoryRuns {
    fn sealed(&self) -> Vec<RunId> {
        self.runs.lock().keys().copied().collect()
    }

    fn contents<'a>(&'a self, run: RunId) -> BoxFuture<'a, Result<Vec<RunBlock>>> {
        Box::pin(async move {
            self.check()?;
            Ok(self.runs.lock().get(&run).map(|run| run.blocks.clone()).unwrap_or_default())
        })
    }

    fn read<'a>(&'a self, block: &'a RunBlock) -> BoxFuture<'a, Result<Option<Vec<u8>>>> {
        Box::pin(async move {
            self.check()?;
            Ok(self.store.bytes_of(&block.wanted()))
        })
    }

    fn sealed_more<'a>(&'a self) -> BoxFuture<'a, ()> {
        Box::pin(self.sealed.notified())
    }

    fn next_to_leave(&self) -> Vec<RunId> {
        let runs = self.runs.lock();
        let leaving = runs.iter().take(self.leaving.load(Ordering::Relaxed));
        leaving.filter(|(_, run)| !run.offered).map(|(id, _)| *id).collect()
    }

    fn hold_unoffered(&self, hold: bool) {
        self.holding.store(hold, Ordering::Relaxed);
    }

    fn offered(&self, run: RunId) {
        if let Some(run) = self.runs.lock().get_mut(&run) {
            run.offered = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        store::{BlockStore, Uncopied},
        testing::{Fixture, block_bytes, hash_of},
        tier::Tier,
    };

    #[tokio::test]
    async fn what_a_stack_demotes_lies_in_the_next_run_and_is_uncopied_until_it_is_copied() {
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let runs = MemoryRuns::over(Arc::clone(&nvme));
        let cold = vec![Arc::clone(&nvme) as Arc<dyn BlockStore>];
        let fixture = Fixture::new(1 << 20, cold).unwrap();
        let namespace = fixture.namespace("m", &[4096]).unwrap();
        fixture.put(&namespace, &[1, 2, 3]).unwrap();
        for number in [1, 2, 3] {
            let demoted = fixture.stack.demote(&namespace, hash_of(number), Tier::Nvme);
            assert!(demoted.await.unwrap());
        }
        let run = runs.seal();
        runs.sealed_more().await;
        let blocks = runs.contents(run).await.unwrap();
        let hashes: Vec<_> = blocks.iter().map(|block| block.hash).collect();
        assert_eq!(hashes, [1, 2, 3].map(hash_of), "in the order of the puts");
        let bytes = runs.read(&blocks[1]).await.unwrap();
        assert_eq!(bytes, Some(block_bytes(&namespace, 2, 0, 4096)));
        let above = fixture.stack.above().upgrade().unwrap();
        let wanted: Vec<_> = blocks.iter().map(RunBlock::wanted).collect();
        let asked = || above.uncopied(Tier::Nvme, Tier::Object, &wanted);
        assert!(asked().iter().all(|block| matches!(block, Some(Uncopied { reused: false, .. }))));
        assert!(above.copied(&wanted[0], Tier::Object, wanted[0].location, &blocks[0].checksums));
        assert_eq!(asked().iter().map(Option::is_some).collect::<Vec<_>>(), [false, true, true]);
        runs.press(1);
        assert_eq!((runs.next_to_leave(), runs.offers()), (vec![run], vec![]));
        runs.offered(run);
        assert_eq!((runs.next_to_leave(), runs.offers()), (vec![], vec![run]));
        runs.reclaim(run);
        assert_eq!((runs.sealed(), nvme.copies()), (vec![], vec![]));
        assert_eq!(runs.read(&blocks[1]).await.unwrap(), None);
        assert!(asked().iter().all(Option::is_none));
        runs.fail(true);
        assert!(runs.contents(run).await.is_err());
    }
}
