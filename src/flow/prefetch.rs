//! Prefetch: blocks brought towards dram ahead of need, in the background.

use std::{future::ready, sync::Arc};

use futures_util::{StreamExt, stream};
use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    namespace::Namespace,
    stack::Fetch,
};
use tokio::time::Instant;

use super::count;
use crate::{
    costs::Locality,
    limits::{GET_DEADLINE_DEFAULT, PREFETCH_LOADS_MAX},
    node::Node,
};

/// What a prefetch found and began.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefetched {
    /// Blocks that are in dram.
    pub(crate) in_dram: u32,
    /// Loads that were started.
    pub(crate) started: u32,
}

impl Node {
    /// Loads what is not in dram in the background, unless enough prefetches run already.
    pub(crate) fn prefetch(
        self: &Arc<Self>,
        namespace: &Arc<Namespace>,
        hashes: Hashes<'_>,
    ) -> Prefetched {
        let bytes = self.stack.bytes_by_tier(namespace, hashes);
        let found = self.stack.prefetch(namespace, hashes);
        let started = self.load(Arc::clone(namespace), found.cold, bytes);
        Prefetched { in_dram: found.in_dram, started }
    }

    /// Loads blocks in the background, unless enough prefetches run already; returns how many.
    fn load(
        self: &Arc<Self>,
        namespace: Arc<Namespace>,
        cold: Vec<BlockHash>,
        [_dram, nvme, object]: [u64; 3],
    ) -> u32 {
        let started = count(cold.len());
        if started == 0 {
            return 0;
        }
        let Ok(permit) = Arc::clone(&self.prefetches).try_acquire_owned() else { return 0 };
        let (stack, stop) = (self.stack.clone(), self.tasks.stop_token());
        let turns = Arc::clone(&self.prefetch_loads);
        // Its bytes go nowhere from dram.
        let bytes = [0, nvme, object];
        let mut planned = self.costs.begin(namespace.tenant(), Locality::SharedMemory, bytes);
        self.tasks.spawn("prefetch", async move {
            let _permit = permit;
            let deadline = Instant::now() + GET_DEADLINE_DEFAULT;
            let promotions = stack.promotions_ahead();
            let load = async |hash| {
                let _turn = turns.acquire().await;
                stack.get_within(&promotions, &namespace, hash, &[], deadline).await
            };
            // What would not stay in dram is not loaded.
            let wanted = stream::iter(cold).take_while(|_| ready(!promotions.is_spent()));
            let loads = wanted.map(load);
            let mut loaded = loads.buffer_unordered(PREFETCH_LOADS_MAX);
            let all = async {
                while let Some(outcome) = loaded.next().await {
                    if let Ok(Fetch::Hit(block)) = outcome {
                        let bytes = u64::try_from(block.len()).unwrap_or(u64::MAX);
                        planned.came(block.tier(), bytes);
                    }
                }
            };
            // Stopping half-way is fine: it is only a hint.
            stop.run_until_cancelled(all).await.unwrap_or_default();
        });
        started
    }
}
