//! Get: blocks in the order asked; misses are data.
//!
//! A few blocks load ahead, in order, so that a colder tier is kept busy; a reader that stalls holds no
//! more than those. Nothing is copied: a block is a view of the arena that keeps its memory alive.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{
    StreamExt,
    stream::{self, BoxStream},
};
use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    error::Result,
    namespace::{BlockLayout, Namespace},
    stack::{Block, Fetch, Promotions, Stack},
    tier::Tier,
};
use tokio::time::Instant;

use super::{Delivered, count, period, tier_label};
use crate::{
    auth::Bearer,
    id::{LeaseId, SessionId},
    limits::{
        GET_BLOCKS_AHEAD, GET_BLOCKS_MAX, GET_BYTES_AHEAD, GET_DEADLINE_DEFAULT, GET_DEADLINE_MAX,
    },
    metrics::{Missed, ServerMetrics},
    node::Node,
};

/// What is asked for.
#[derive(Debug)]
pub(crate) struct GetAsk<'a> {
    /// Id of the namespace.
    pub(crate) namespace_id: &'a [u8],
    /// Packed hashes.
    pub(crate) hashes: Bytes,
    /// Indices into the declared parts; empty: all.
    pub(crate) parts: Vec<u32>,
    /// The lease that it reads under, with its session.
    pub(crate) lease: Option<(SessionId, LeaseId)>,
    /// 0 takes the default.
    pub(crate) deadline_ms: u32,
    /// Later blocks are of no use after a miss.
    pub(crate) stop_at_miss: bool,
}

/// What comes next of a get.
#[derive(Debug)]
pub(crate) enum Step {
    /// The block at a position.
    Block(u32, Block),
    /// Positions from the first to before the second have no bytes.
    Miss(u32, u32, Missed),
}

/// One position of a get: what was found, and how long that took.
struct Found {
    fetch: Result<Fetch>,
    elapsed: Duration,
}

/// A get under way.
pub(crate) struct GetFlow {
    stack: Stack,
    metrics: ServerMetrics,
    /// Indices into the declared parts, never empty.
    parts: Arc<[u32]>,
    stop_at_miss: bool,
    deadline: Instant,
    found: BoxStream<'static, Found>,
    /// What is asked for.
    asked: (Arc<Namespace>, Bytes),
    /// From where on the request is touched at its end. What a lease covers is not: its release does
    /// that. A lease covers the head that was in dram; behind it are blocks loaded now.
    touch_from: Option<u32>,
    delivered: Delivered,
    position: u32,
    count: u32,
}

/// How many blocks load ahead of the reader.
fn blocks_ahead(layout: &BlockLayout) -> usize {
    let (least, most) = GET_BLOCKS_AHEAD.into_inner();
    // Of opaque blocks only the longest is known, which most are not.
    let blocks =
        if layout.is_opaque() { least } else { GET_BYTES_AHEAD / layout.block_bytes().max(1) };
    usize::try_from(blocks.clamp(least, most)).unwrap_or(1)
}

impl GetFlow {
    /// Checks what is asked for and begins to load it.
    ///
    /// # Errors
    /// What the request can be refused for, by field.
    pub(crate) fn begin(node: &Node, bearer: &Bearer, ask: GetAsk<'_>) -> Result<Self> {
        let namespace = node.namespace(bearer, ask.namespace_id)?;
        let blocks = namespace.hashes(&ask.hashes, GET_BLOCKS_MAX, "hashes")?.len();
        let wait = period("deadline_ms", ask.deadline_ms, GET_DEADLINE_DEFAULT, GET_DEADLINE_MAX)?;
        if let Some((session, lease)) = ask.lease {
            node.session(bearer, session)?;
            node.leases.check(session, lease)?;
        }
        let touch_from = ask.lease.is_none().then_some(0);
        let asked = (Arc::clone(&namespace), ask.hashes.clone());
        let deadline = Instant::now() + wait;
        let declared = count(namespace.layout().parts().len());
        let wanted: Arc<[u32]> = ask.parts.into();
        let parts = if wanted.is_empty() { (0..declared).collect() } else { Arc::clone(&wanted) };
        let ahead = blocks_ahead(namespace.layout());
        let loads = Loads {
            promotions: Arc::new(node.stack.promotions()),
            stack: node.stack.clone(),
            namespace,
            hashes: ask.hashes,
        };
        let found = stream::iter(0..blocks)
            .map(move |position| loads.load(position, Arc::clone(&wanted), deadline))
            .buffered(ahead)
            .boxed();
        Ok(Self {
            stack: node.stack.clone(),
            metrics: node.metrics.clone(),
            parts,
            stop_at_miss: ask.stop_at_miss,
            deadline,
            found,
            asked,
            touch_from,
            delivered: Delivered::new(node.stack.clone()),
            position: 0,
            count: count(blocks),
        })
    }

    /// When what has not come is a miss.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The parts of each block that are asked for, in their order.
    pub(crate) fn parts(&self) -> &Arc<[u32]> {
        &self.parts
    }

    /// The reader asks for more.
    pub(crate) fn resume(&mut self) {
        self.delivered.resume();
    }

    /// The reader has been handed what there was.
    pub(crate) fn hand(&mut self) {
        self.delivered.hand();
    }

    /// The next block or miss, in order; none at the end.
    ///
    /// # Cancel safety
    /// Safe: what was loaded is returned by the next call.
    pub(crate) async fn next(&mut self) -> Result<Option<Step>> {
        if self.position > 0 && self.position < self.count && Instant::now() >= self.deadline {
            return Ok(Some(self.miss(self.position, self.count, Missed::Timeout)));
        }
        let found = if self.position < self.count { self.found.next().await } else { None };
        match found {
            Some(found) => self.take(found).map(Some),
            None => {
                self.position = self.count;
                self.touch()?;
                self.delivered.finish();
                Ok(None)
            }
        }
    }

    /// Counts the request as used, tail first, once.
    fn touch(&mut self) -> Result<()> {
        if let Some(from) = self.touch_from.take() {
            let (namespace, hashes) = &self.asked;
            let from = usize::try_from(from).unwrap_or(0) * namespace.hash_bytes();
            let hashes = hashes.get(from..).unwrap_or_default();
            self.stack.touch(namespace, Hashes::new(hashes, namespace.hash_bytes())?);
        }
        Ok(())
    }

    fn take(&mut self, found: Found) -> Result<Step> {
        let position = self.position;
        self.position = self.position.saturating_add(1);
        let missed = match found.fetch? {
            Fetch::Hit(block) => {
                if block.tier() != Tier::Dram {
                    self.touch_from.get_or_insert(position);
                }
                self.deliver(&block, found.elapsed);
                return Ok(Step::Block(position, block));
            }
            Fetch::Pending => Missed::Pending,
            Fetch::Corrupt => Missed::Corrupt,
            Fetch::Timeout => Missed::Timeout,
            Fetch::Busy => Missed::Busy,
            Fetch::Miss => Missed::Absent,
        };
        Ok(self.miss(position, self.position, missed))
    }

    fn deliver(&mut self, block: &Block, elapsed: Duration) {
        let lengths = self.parts.iter().filter_map(|part| block.part(*part));
        let bytes: usize = lengths.map(|part| part.as_ref().len()).sum();
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.delivered.block(block.tier(), bytes, elapsed);
        self.metrics.record_get(tier_label(block.tier()), bytes, elapsed);
    }

    fn miss(&mut self, start: u32, end: u32, reason: Missed) -> Step {
        self.delivered.gap();
        self.metrics.record_missed(reason, u64::from(end.saturating_sub(start)));
        self.position = if self.stop_at_miss { self.count } else { end };
        Step::Miss(start, end, reason)
    }
}

/// Loads the blocks of one get.
struct Loads {
    stack: Stack,
    promotions: Arc<Promotions>,
    namespace: Arc<Namespace>,
    hashes: Bytes,
}

impl Loads {
    fn load(
        &self,
        position: usize,
        parts: Arc<[u32]>,
        deadline: Instant,
    ) -> impl Future<Output = Found> + Send + use<> {
        let hash = self.hash(position);
        let (stack, namespace) = (self.stack.clone(), Arc::clone(&self.namespace));
        let promotions = Arc::clone(&self.promotions);
        async move {
            let started = Instant::now();
            let fetch = match hash {
                Ok(Some(hash)) => {
                    stack.get_within(&promotions, &namespace, hash, &parts, deadline).await
                }
                Ok(None) => Ok(Fetch::Miss),
                Err(why) => Err(why),
            };
            Found { fetch, elapsed: started.elapsed() }
        }
    }

    fn hash(&self, position: usize) -> Result<Option<BlockHash>> {
        Ok(Hashes::new(&self.hashes, self.namespace.hash_bytes())?.get(position))
    }
}
