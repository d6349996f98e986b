//! Get: blocks in the order asked; misses are data.
//!
//! A few blocks load ahead, in order, so that a colder tier is kept busy; a reader that stalls holds no
//! more than those. Nothing is copied: a block is a view of the arena that keeps its memory alive. What
//! dram has is verified only when its turn comes, so that its bytes are still in the cache when they
//! leave.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_tiers::{
    block::Hashes,
    error::Result,
    namespace::Namespace,
    stack::{Block, Fetch, Stack},
    tier::Tier,
};
use tokio::time::Instant;

use super::{
    Delivered,
    ahead::{Ahead, Load, Loads},
    count, period,
};
use crate::{
    auth::{Bearer, Rates},
    console::SlowLoads,
    costs::Via,
    id::{LeaseId, SessionId},
    limits::{GET_BLOCKS_MAX, GET_DEADLINE_DEFAULT, GET_DEADLINE_MAX},
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
    /// What its bytes travel by.
    pub(crate) via: Via,
}

/// What comes next of a get.
#[derive(Debug)]
pub(crate) enum Step {
    /// A block is here.
    Block(Ready),
    /// Positions from the first to before the second have no bytes.
    Miss(u32, u32, Missed),
}

/// A block whose turn it is. Unless it [is verified](Block::is_verified), whoever sends it verifies it.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) position: u32,
    pub(crate) block: Block,
    /// How long it took to find.
    elapsed: Duration,
}

/// A get under way.
pub(crate) struct GetFlow {
    stack: Stack,
    metrics: ServerMetrics,
    rates: Arc<Rates>,
    /// Indices into the declared parts, never empty.
    parts: Arc<[u32]>,
    stop_at_miss: bool,
    deadline: Instant,
    ahead: Ahead,
    /// What is asked for.
    asked: (Arc<Namespace>, Bytes),
    /// From where on the request is touched at its end. What a lease covers is not: its release does
    /// that. A lease covers the head that was in dram; behind it are blocks loaded now.
    touch_from: Option<u32>,
    delivered: Delivered,
    slow: SlowLoads,
    position: u32,
    count: u32,
}

impl GetFlow {
    /// Checks what is asked for and begins to load it.
    ///
    /// # Errors
    /// What the request can be refused for, by field.
    pub(crate) fn begin(node: &Node, bearer: &Bearer, ask: GetAsk<'_>) -> Result<Self> {
        let namespace = node.namespace(bearer, ask.namespace_id)?;
        let hashes = namespace.hashes(&ask.hashes, GET_BLOCKS_MAX, "hashes")?;
        let blocks = hashes.len();
        let wait = period("deadline_ms", ask.deadline_ms, GET_DEADLINE_DEFAULT, GET_DEADLINE_MAX)?;
        if let Some((session, lease)) = ask.lease {
            node.session(bearer, session)?;
            node.leases.check(session, lease)?;
        }
        bearer.rates().may_move()?;
        // Each rank reads its part of a block: together they load it once.
        let loads = ask.parts.is_empty() || ask.parts.contains(&0);
        let bytes = match loads {
            true => node.stack.bytes_by_tier(&namespace, hashes),
            false => [0; 3],
        };
        let locality = node.locality_of(&namespace, ask.via);
        let load = node.costs.begin(bearer.tenant(), locality, bytes);
        let touch_from = ask.lease.is_none().then_some(0);
        let asked = (Arc::clone(&namespace), ask.hashes.clone());
        let deadline = Instant::now() + wait;
        let declared = count(namespace.layout().parts().len());
        let wanted: Arc<[u32]> = ask.parts.into();
        let parts = if wanted.is_empty() { (0..declared).collect() } else { Arc::clone(&wanted) };
        let loads = Loads {
            promotions: Arc::new(node.stack.promotions()),
            stack: node.stack.clone(),
            namespace,
            hashes: ask.hashes,
            parts: wanted,
            deadline,
        };
        Ok(Self {
            stack: node.stack.clone(),
            metrics: node.metrics.clone(),
            rates: Arc::clone(bearer.rates()),
            parts,
            stop_at_miss: ask.stop_at_miss,
            deadline,
            ahead: Ahead::new(loads, blocks),
            asked,
            touch_from,
            delivered: Delivered::new(load),
            slow: node.console.slow.clone(),
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

    /// The next block, verified, or miss, in order; none at the end.
    ///
    /// # Cancel safety
    /// Safe: what was loaded is returned by the next call.
    pub(crate) async fn next(&mut self) -> Result<Option<Step>> {
        let step = self.next_unverified().await?;
        Ok(step.map(|step| match step {
            Step::Block(ready) if !self.is_right(&ready) => self.damaged(&ready),
            Step::Block(ready) => {
                self.deliver(&ready);
                Step::Block(ready)
            }
            Step::Miss(..) => step,
        }))
    }

    /// As [`next`](Self::next), but blocks are not verified yet: each is to be told to be
    /// [delivered](Self::deliver) or [damaged](Self::damaged) before the next one is asked for.
    ///
    /// # Cancel safety
    /// As that of [`next`](Self::next).
    pub(crate) async fn next_unverified(&mut self) -> Result<Option<Step>> {
        if self.position > 0 && self.position < self.count && Instant::now() >= self.deadline {
            return Ok(Some(self.miss(self.position, self.count, Missed::Timeout)));
        }
        let found = if self.position < self.count { self.ahead.next().await } else { None };
        match found {
            Some(found) => self.take(found).map(Some),
            None => {
                self.position = self.count;
                self.touch()?;
                self.delivered.finish();
                self.slow.note(&self.asked.0, self.delivered.take_spent());
                Ok(None)
            }
        }
    }

    fn is_right(&self, ready: &Ready) -> bool {
        let block = &ready.block;
        block.is_verified() || self.parts.iter().all(|part| block.is_right(*part))
    }

    /// Counts a block that was verified.
    pub(crate) fn deliver(&mut self, ready: &Ready) {
        let Ready { block, elapsed, .. } = ready;
        let lengths = self.parts.iter().filter_map(|part| block.part_len(*part));
        let bytes = u64::try_from(lengths.sum::<usize>()).unwrap_or(u64::MAX);
        let whole = u64::try_from(block.len()).unwrap_or(u64::MAX);
        self.delivered.block(block.tier(), (bytes, whole), *elapsed);
        self.metrics.record_get(block.tier().into(), bytes, *elapsed);
        self.rates.moved(bytes);
    }

    /// Takes a block that is not right out of use; returns the miss that it is instead.
    pub(crate) fn damaged(&mut self, ready: &Ready) -> Step {
        self.stack.quarantine(&ready.block);
        self.miss(ready.position, self.position, Missed::Corrupt)
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

    fn take(&mut self, found: Load) -> Result<Step> {
        let position = self.position;
        self.position = self.position.saturating_add(1);
        let missed = match found.fetch? {
            Fetch::Hit(block) => {
                if block.tier() != Tier::Dram {
                    self.touch_from.get_or_insert(position);
                }
                return Ok(Step::Block(Ready { position, block, elapsed: found.elapsed }));
            }
            Fetch::Pending => Missed::Pending,
            Fetch::Corrupt => Missed::Corrupt,
            Fetch::Timeout => Missed::Timeout,
            Fetch::Busy => Missed::Busy,
            Fetch::Miss => Missed::Absent,
        };
        Ok(self.miss(position, self.position, missed))
    }

    fn miss(&mut self, start: u32, end: u32, reason: Missed) -> Step {
        self.delivered.gap();
        self.metrics.record_missed(reason, u64::from(end.saturating_sub(start)));
        self.position = if self.stop_at_miss { self.count } else { end };
        Step::Miss(start, end, reason)
    }
}
