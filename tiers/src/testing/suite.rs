//! The contract of [`BlockStore`], as steps that any implementation can be put through.
//!
//! ```text
//! suite::run(Arc::new(MyStore::open(dir)?)).await;
//! ```
#![expect(clippy::panic, reason = "a contract fails by panicking with what was broken")]

use std::{num::NonZeroU64, sync::Arc};

use super::{Fixture, block_bytes, hash_of};
use crate::{
    dram::{BlockWriter, Pool, seal, slot_bytes},
    error::{ErrorKind, Result},
    map::{Checksums, Location},
    namespace::Namespace,
    store::{BlockStore, Load, Outgoing, Urgency, Wanted},
    tier::Tier,
};

/// Lengths that a tier must take: tiny, odd, a page, more than a page, typical.
const LENGTHS: [u32; 6] = [1, 100, 4096, 4097, 65_536, 368_640];

/// Puts a store through all steps; it must be empty, and is closed afterwards.
///
/// # Panics
/// Where the store breaks the contract.
///
/// # Cancel safety
/// Not safe: the store is left in the middle of a step.
pub async fn run(store: Arc<dyn BlockStore>) {
    let bench = Bench::new(store);
    bench.check(bench.reads_back_what_was_put().await, "reads back what was put");
    bench.check(bench.tells_blocks_apart().await, "tells blocks apart");
    bench.check(bench.removed_stays_removed().await, "removed stays removed");
    bench.check(bench.accounts_follow().await, "accounts follow");
    bench.check(bench.close_ends_it().await, "close ends it");
}

struct Bench {
    store: Arc<dyn BlockStore>,
    pool: Arc<Pool>,
    fixture: Fixture,
}

impl Bench {
    fn new(store: Arc<dyn BlockStore>) -> Self {
        let (Ok(pool), Ok(fixture)) =
            (Pool::new(32 << 20, Arc::default()), Fixture::new(1 << 20, Vec::new()))
        else {
            panic!("no memory for the suite");
        };
        Self { store, pool, fixture }
    }

    fn check(&self, outcome: Result<bool>, step: &str) {
        match outcome {
            Ok(true) => {}
            Ok(false) => panic!("{:?}: contract broken: {step}", self.store),
            Err(error) => panic!("{:?}: failed while checking: {step}: {error}", self.store),
        }
    }

    fn namespace(&self, len: u32) -> Result<Arc<Namespace>> {
        self.fixture.namespace("suite", &[len])
    }

    fn writer(&self, len: u32) -> Option<BlockWriter> {
        self.pool.allocate(slot_bytes(len, false), &[len])?.pop()
    }

    async fn put(&self, len: u32, number: u64) -> Result<Location> {
        let namespace = self.namespace(len)?;
        let Some(mut writer) = self.writer(len) else { panic!("the suite's arena is full") };
        let bytes = block_bytes(&namespace, number, 0, writer.len());
        writer.bytes_mut().copy_from_slice(&bytes);
        let Ok(payload) = seal(vec![writer], len) else { panic!("cannot seal") };
        let checksums = Checksums::One(0);
        let (hash, urgency, reused) = (hash_of(number), Urgency::Durable, false);
        let block = Outgoing { namespace, hash, payload, checksums, urgency, reused };
        self.store.put(block).await
    }

    /// The bytes at a location asked for as block `number` of length `len`.
    async fn get(&self, len: u32, number: u64, location: Location) -> Result<Option<Vec<u8>>> {
        let Some(writer) = self.writer(len) else { panic!("the suite's arena is full") };
        let namespace = *self.namespace(len)?.id();
        let wanted = Wanted { namespace, hash: hash_of(number), location };
        match self.store.get(wanted, writer).await? {
            Load::Hit(writer) => Ok(Some(writer.bytes().to_vec())),
            Load::Busy(_) | Load::Miss => Ok(None),
        }
    }

    async fn is_right(&self, len: u32, number: u64, location: Location) -> Result<bool> {
        let namespace = self.namespace(len)?;
        let expected = block_bytes(&namespace, number, 0, usize::try_from(len).unwrap_or(0));
        Ok(self.get(len, number, location).await? == Some(expected))
    }

    async fn reads_back_what_was_put(&self) -> Result<bool> {
        if self.store.tier() == Tier::Dram {
            return Ok(false);
        }
        for len in LENGTHS {
            let mut kept = Vec::new();
            for number in 0..5 {
                kept.push((number, self.put(len, number).await?));
            }
            for (number, location) in kept {
                if !self.is_right(len, number, location).await? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    async fn tells_blocks_apart(&self) -> Result<bool> {
        let location = self.put(4096, 100).await?;
        let other_hash = self.get(4096, 101, location).await?;
        let other_length = self.get(4097, 100, location).await?;
        let nowhere = Location(NonZeroU64::MAX);
        let never_put = self.get(4096, 100, nowhere).await?;
        let right = self.is_right(4096, 100, location).await?;
        Ok(right && [other_hash, other_length, never_put].iter().all(Option::is_none))
    }

    async fn removed_stays_removed(&self) -> Result<bool> {
        let (gone, stays) = (self.put(4096, 200).await?, self.put(4096, 201).await?);
        let wanted =
            Wanted { namespace: *self.namespace(4096)?.id(), hash: hash_of(200), location: gone };
        self.store.remove(&[wanted]).await?;
        // Removing what is not there is a success.
        self.store.remove(&[wanted]).await?;
        let absent = self.get(4096, 200, gone).await?.is_none();
        let again = self.put(4096, 200).await?;
        Ok(absent
            && self.is_right(4096, 201, stays).await?
            && self.is_right(4096, 200, again).await?
            && self.get(4096, 200, gone).await?.is_none())
    }

    async fn accounts_follow(&self) -> Result<bool> {
        let before = self.store.usage();
        let location = self.put(65_536, 300).await?;
        let during = self.store.usage();
        let namespace = *self.namespace(65_536)?.id();
        self.store.remove(&[Wanted { namespace, hash: hash_of(300), location }]).await?;
        let after = self.store.usage();
        Ok(during.blocks == before.blocks + 1
            && during.used_bytes >= before.used_bytes + 65_536
            && after.blocks == before.blocks)
    }

    async fn close_ends_it(&self) -> Result<bool> {
        self.store.close().await?;
        self.store.close().await?;
        let refused = self.put(4096, 400).await;
        Ok(refused.is_err_and(|error| error.kind() == ErrorKind::Unavailable))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;
    use crate::{
        store::Above,
        testing::{Faulty, MemoryStore},
    };

    #[tokio::test]
    async fn the_memory_store_keeps_the_contract() {
        run(Arc::new(MemoryStore::new(Tier::Nvme))).await;
    }

    #[tokio::test]
    async fn the_faulty_wrapper_without_faults_keeps_the_contract() {
        run(Arc::new(Faulty::new(Arc::new(MemoryStore::new(Tier::Object))))).await;
    }

    #[tokio::test]
    #[should_panic(expected = "contract broken: reads back what was put")]
    async fn a_store_that_flips_a_bit_breaks_the_contract() {
        let store = Faulty::new(Arc::new(MemoryStore::new(Tier::Nvme)));
        // Five puts, then the first get.
        store.plan(&[super::super::Fault::None; 5]);
        store.plan(&[super::super::Fault::BitFlip(0)]);
        run(Arc::new(store)).await;
    }

    #[tokio::test]
    #[should_panic(expected = "contract broken: removed stays removed")]
    async fn a_store_that_resurrects_breaks_the_contract() {
        run(Arc::new(Resurrecting(MemoryStore::new(Tier::Nvme)))).await;
    }

    /// Forgets to remove.
    #[derive(Debug)]
    struct Resurrecting(MemoryStore);

    impl BlockStore for Resurrecting {
        fn tier(&self) -> Tier {
            self.0.tier()
        }

        fn put<'a>(&'a self, block: Outgoing) -> crate::store::BoxFuture<'a, Result<Location>> {
            self.0.put(block)
        }

        fn get<'a>(
            &'a self,
            wanted: Wanted,
            into: BlockWriter,
        ) -> crate::store::BoxFuture<'a, Result<Load>> {
            self.0.get(wanted, into)
        }

        fn attach(&self, above: Weak<dyn Above>) {
            self.0.attach(above);
        }

        fn remove<'a>(&'a self, _blocks: &'a [Wanted]) -> crate::store::BoxFuture<'a, Result<()>> {
            Box::pin(async { Ok(()) })
        }

        fn shed(&self) {
            self.0.shed();
        }

        fn usage(&self) -> crate::store::StoreUsage {
            self.0.usage()
        }

        fn close<'a>(&'a self) -> crate::store::BoxFuture<'a, Result<()>> {
            self.0.close()
        }
    }
}
