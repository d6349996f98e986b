//! The blocks of one get as they are found: what dram has at once, the rest loaded a few blocks ahead.
//!
//! What dram has costs no future and no allocation. Loads from colder tiers begin as soon as their
//! block is within the window, also while others are being sent, and are answered in order.

use std::{collections::VecDeque, future::poll_fn, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, future::BoxFuture, stream::FuturesOrdered};
use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    error::Result,
    namespace::{BlockLayout, Namespace},
    stack::{Fetch, Promotions, Stack},
};
use tokio::time::Instant;

use crate::limits::{GET_BLOCKS_AHEAD, GET_BYTES_AHEAD};

/// One position of a get: what was found, and how long that took.
pub(super) struct Load {
    pub(super) fetch: Result<Fetch>,
    pub(super) elapsed: Duration,
}

/// How the blocks of one get are found.
pub(super) struct Loads {
    pub(super) stack: Stack,
    pub(super) promotions: Arc<Promotions>,
    pub(super) namespace: Arc<Namespace>,
    /// Packed.
    pub(super) hashes: Bytes,
    /// Indices into the declared parts; empty: all.
    pub(super) parts: Arc<[u32]>,
    pub(super) deadline: Instant,
}

/// A position within the window.
enum Slot {
    Found(Load),
    /// Its load is the next one of those that are under way and were not taken.
    Loading,
}

/// See the module.
pub(super) struct Ahead {
    loads: Loads,
    /// The first position behind the window, and the number of all.
    next: usize,
    count: usize,
    /// Positions in the window at most.
    most: usize,
    window: VecDeque<Slot>,
    under_way: FuturesOrdered<BoxFuture<'static, Load>>,
    /// Loads that have ended before their turn.
    loaded: VecDeque<Load>,
}

impl Ahead {
    pub(super) fn new(loads: Loads, count: usize) -> Self {
        let most = blocks_ahead(loads.namespace.layout());
        Self {
            loads,
            next: 0,
            count,
            most,
            window: VecDeque::with_capacity(most),
            under_way: FuturesOrdered::new(),
            loaded: VecDeque::new(),
        }
    }

    /// The next position; none behind the last one.
    ///
    /// # Cancel safety
    /// Safe: what was loaded is returned by the next call.
    pub(super) async fn next(&mut self) -> Option<Load> {
        while self.next < self.count && self.window.len() < self.most {
            let slot = self.loads.find(self.next);
            self.next += 1;
            self.window.push_back(slot.unwrap_or_else(|load| {
                self.under_way.push_back(load);
                Slot::Loading
            }));
        }
        match self.window.front()? {
            Slot::Found(_) => self.begin_loads().await,
            Slot::Loading => self.await_load().await,
        }
        match self.window.pop_front()? {
            Slot::Found(load) => Some(load),
            Slot::Loading => self.loaded.pop_front(),
        }
    }

    /// Lets what is under way go on, without waiting for it.
    async fn begin_loads(&mut self) {
        if !self.under_way.is_empty() {
            poll_fn(|cx| {
                while let Poll::Ready(Some(load)) = self.under_way.poll_next_unpin(cx) {
                    self.loaded.push_back(load);
                }
                Poll::Ready(())
            })
            .await;
        }
    }

    /// Waits until the first one under way is there.
    async fn await_load(&mut self) {
        if self.loaded.is_empty()
            && let Some(load) = self.under_way.next().await
        {
            self.loaded.push_back(load);
        }
    }
}

/// How many blocks load ahead of the reader.
fn blocks_ahead(layout: &BlockLayout) -> usize {
    let (least, most) = GET_BLOCKS_AHEAD.into_inner();
    // Of opaque blocks only the longest is known, which most are not.
    let blocks =
        if layout.is_opaque() { least } else { GET_BYTES_AHEAD / layout.block_bytes().max(1) };
    usize::try_from(blocks.clamp(least, most)).unwrap_or(1)
}

impl Loads {
    /// What dram says of a position, or the load of it.
    fn find(&self, position: usize) -> Result<Slot, BoxFuture<'static, Load>> {
        let found = |fetch| Ok(Slot::Found(Load { fetch, elapsed: Duration::ZERO }));
        let hash = match self.hash(position) {
            Ok(Some(hash)) => hash,
            Ok(None) => return found(Ok(Fetch::Miss)),
            Err(why) => return found(Err(why)),
        };
        match self.stack.get_dram(&self.namespace, hash, &self.parts) {
            Ok(Some(Fetch::Pending) | None) => Err(self.load(hash)),
            Ok(Some(fetch)) => found(Ok(fetch)),
            Err(why) => found(Err(why)),
        }
    }

    /// Waits for a put of the block that is in flight, and loads it unless dram has it then.
    fn load(&self, hash: BlockHash) -> BoxFuture<'static, Load> {
        let (stack, namespace) = (self.stack.clone(), Arc::clone(&self.namespace));
        let (promotions, parts) = (Arc::clone(&self.promotions), Arc::clone(&self.parts));
        let deadline = self.deadline;
        Box::pin(async move {
            stack.settled(&namespace, hash, deadline).await;
            let started = Instant::now();
            let loading = stack.get_within(&promotions, &namespace, hash, &parts, deadline);
            Load { fetch: loading.await, elapsed: started.elapsed() }
        })
    }

    fn hash(&self, position: usize) -> Result<Option<BlockHash>> {
        Ok(Hashes::new(&self.hashes, self.namespace.hash_bytes())?.get(position))
    }
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::{
        store::BlockStore,
        testing::{Fault, Faulty, Fixture, MemoryStore, hash_of, pack},
        tier::Tier,
    };
    use tokio::time::sleep;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn a_put_in_flight_is_waited_for_within_the_deadline() {
        let fixture = Fixture::new(1 << 20, Vec::new()).unwrap();
        let namespace = fixture.namespace("m", &[4096]).unwrap();
        let mut batch = fixture.offer(&namespace, &[1, 2], None).unwrap();
        let mut ahead = Ahead::new(
            Loads {
                promotions: Arc::new(fixture.stack.promotions()),
                stack: fixture.stack.clone(),
                namespace: Arc::clone(&namespace),
                hashes: pack(&[1, 2]).into(),
                parts: Vec::new().into(),
                deadline: Instant::now() + 3 * SECOND,
            },
            2,
        );
        let start = Instant::now();
        let put = async {
            sleep(SECOND).await;
            fixture.write(&mut batch, &namespace, (0, 1), 0).unwrap();
        };
        let (load, ()) = tokio::join!(ahead.next(), put);
        let load = load.unwrap();
        assert!(matches!(load.fetch, Ok(Fetch::Hit(_))));
        assert_eq!(load.elapsed, Duration::ZERO, "a tier is not slow because a put is");
        assert_eq!(start.elapsed(), SECOND);
        assert!(matches!(ahead.next().await.unwrap().fetch, Ok(Fetch::Pending)));
        assert_eq!(start.elapsed(), 3 * SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn cold_blocks_load_while_those_of_dram_are_sent_and_all_come_in_order() {
        let nvme = Arc::new(Faulty::new(Arc::new(MemoryStore::new(Tier::Nvme))));
        let cold = vec![Arc::clone(&nvme) as Arc<dyn BlockStore>];
        let fixture = Fixture::new(1 << 20, cold).unwrap();
        let namespace = fixture.namespace("m", &[4096]).unwrap();
        fixture.put(&namespace, &[0, 1, 2]).unwrap();
        for number in 0..3 {
            let demoted = fixture.stack.demote(&namespace, hash_of(number), Tier::Nvme);
            assert!(demoted.await.unwrap());
        }
        for number in 1000..1256 {
            fixture.put(&namespace, &[number]).unwrap();
        }
        let asked = [1253, 1254, 1255, 0, 1, 7, 2];
        let deadline = Instant::now() + 10 * SECOND;
        let mut ahead = Ahead::new(
            Loads {
                promotions: Arc::new(fixture.stack.promotions()),
                stack: fixture.stack.clone(),
                namespace: Arc::clone(&namespace),
                hashes: pack(&asked).into(),
                parts: Vec::new().into(),
                deadline,
            },
            asked.len(),
        );
        nvme.plan(&[Fault::Slow(SECOND); 3]);
        let start = Instant::now();
        let mut tiers = Vec::new();
        for _ in asked {
            let load = ahead.next().await.unwrap();
            tiers.push(match load.fetch.unwrap() {
                Fetch::Hit(block) => {
                    assert_eq!(block.is_verified(), block.tier() != Tier::Dram);
                    Some(block.tier())
                }
                _ => None,
            });
            if tiers.len() == 3 {
                assert_eq!(start.elapsed(), Duration::ZERO, "dram waits for nobody");
                sleep(SECOND).await;
            }
        }
        let (dram, nvme) = (Some(Tier::Dram), Some(Tier::Nvme));
        assert_eq!(tiers, [dram, dram, dram, nvme, nvme, None, nvme]);
        assert!(start.elapsed() < SECOND * 3 / 2, "{:?}", start.elapsed());
        assert!(ahead.next().await.is_none());
    }
}
