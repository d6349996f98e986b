//! Durable puts: results that wait until nvme has their blocks.
//!
//! The copies are made beside each other, in the order of the batch, while further data comes in; the
//! cleaner owns them, so that a put that ends early loses the answers and not the copies. A tier that
//! did not copy a block in time is not waited for again in the same put.

use std::{collections::VecDeque, sync::Arc};

use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    namespace::Namespace,
    stack::Stack,
    tier::Tier,
};
use tokio::time::timeout;

use super::put::Results;
use crate::{
    limits::{DURABLE_BLOCKS_AHEAD, DURABLE_DEADLINE},
    metrics::PutLabel,
};

/// What a copy has come to.
enum Copied {
    Yes,
    No,
    /// Not within the deadline.
    Late,
}

/// The positions of one put that wait for nvme.
pub(super) struct Durable {
    stack: Stack,
    namespace: Arc<Namespace>,
    hashes: Bytes,
    /// Positions in line, with the result that they will have.
    waiting: VecDeque<(u32, PutLabel)>,
    running: FuturesUnordered<BoxFuture<'static, (u32, PutLabel, Copied)>>,
    late: bool,
}

impl Durable {
    /// Nothing waits yet. `hashes` are those of the offer.
    pub(super) fn new(stack: Stack, namespace: Arc<Namespace>, hashes: Bytes) -> Self {
        let (waiting, running) = (VecDeque::new(), FuturesUnordered::new());
        Self { stack, namespace, hashes, waiting, running, late: false }
    }

    /// Keeps the results that must wait; returns the others.
    pub(super) fn hold(&mut self, results: Results) -> Results {
        let mut others = Results::default();
        for (start, end, outcome) in results.ranges {
            for position in start..end {
                match outcome {
                    PutLabel::Stored | PutLabel::Duplicate | PutLabel::DuplicateDiffers => {
                        self.waiting.push_back((position, outcome));
                    }
                    PutLabel::PartStored
                    | PutLabel::Pending
                    | PutLabel::Refused
                    | PutLabel::Corrupt
                    | PutLabel::NotDurable => others.push(position, outcome),
                }
            }
        }
        self.start();
        others
    }

    /// Nothing waits.
    pub(super) fn is_idle(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// More waits than is copied at a time: more data would only wait, too.
    pub(super) fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The results that are known next; waits for ever if nothing waits.
    ///
    /// # Cancel safety
    /// Safe: results are kept until they are returned.
    pub(super) async fn next(&mut self) -> Results {
        let mut results = Results::default();
        if self.late {
            self.waiting.drain(..).for_each(|(at, _)| results.push(at, PutLabel::NotDurable));
        }
        if results.ranges.is_empty() {
            match self.running.next().await {
                Some(done) => self.take(done, &mut results),
                None => std::future::pending().await,
            }
        }
        while let Some(Some(done)) = self.running.next().now_or_never() {
            self.take(done, &mut results);
        }
        self.start();
        results
    }

    fn take(
        &mut self,
        (position, outcome, copied): (u32, PutLabel, Copied),
        results: &mut Results,
    ) {
        let outcome = match copied {
            Copied::Yes => outcome,
            Copied::No => PutLabel::NotDurable,
            Copied::Late => {
                self.late = true;
                PutLabel::NotDurable
            }
        };
        results.push(position, outcome);
    }

    fn start(&mut self) {
        while !self.late && self.running.len() < DURABLE_BLOCKS_AHEAD {
            let Some((position, outcome)) = self.waiting.pop_front() else { return };
            let Some(hash) = self.hash(position) else { continue };
            let (stack, namespace) = (self.stack.clone(), Arc::clone(&self.namespace));
            self.running.push(Box::pin(async move {
                let copy = stack.demote(&namespace, hash, Tier::Nvme);
                let copied = match timeout(DURABLE_DEADLINE, copy).await {
                    Ok(Ok(true)) => Copied::Yes,
                    Ok(Ok(false) | Err(_)) => Copied::No,
                    Err(_elapsed) => Copied::Late,
                };
                (position, outcome, copied)
            }));
        }
    }

    fn hash(&self, position: u32) -> Option<BlockHash> {
        let hashes = Hashes::new(&self.hashes, self.namespace.hash_bytes()).ok()?;
        hashes.get(usize::try_from(position).ok()?)
    }
}
