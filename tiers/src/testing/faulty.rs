//! A tier that fails on demand.
#![deny(clippy::missing_trait_methods)]

use std::{
    collections::{HashMap, VecDeque},
    future::pending,
    sync::{Arc, Weak},
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    block::BlockHash,
    dram::BlockWriter,
    error::{Error, ErrorKind, Result},
    map::Location,
    namespace::NamespaceId,
    store::{Above, Ailment, BlockStore, BoxFuture, Load, Outgoing, StoreUsage, Wanted},
    tier::Tier,
};

/// How one call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No fault: passes the call on.
    None,
    /// The call fails.
    Error,
    /// A get says busy.
    Busy,
    /// A get finds nothing.
    Miss,
    /// A get returns the bytes with one bit flipped, at this byte.
    BitFlip(usize),
    /// A get fills the first half only.
    Torn,
    /// The call does not return.
    Hang,
    /// The call takes so long.
    Slow(Duration),
    /// A get reads, takes so long, and returns a flipped bit.
    SlowFlip(Duration),
}

/// Wraps a tier; each call takes the next planned fault, none if there is no plan.
#[derive(Debug)]
pub struct Faulty {
    inner: Arc<dyn BlockStore>,
    plan: Mutex<VecDeque<Fault>>,
    by_hash: Mutex<Option<Puts>>,
}

/// Where each block was put.
type Puts = HashMap<(NamespaceId, BlockHash), Vec<Location>>;

impl Faulty {
    /// Wraps `inner` without faults.
    #[must_use]
    pub fn new(inner: Arc<dyn BlockStore>) -> Self {
        Self { inner, plan: Mutex::default(), by_hash: Mutex::default() }
    }

    /// Forgets all copies of a block from now on when it is told to forget one, as a log does.
    pub fn forget_by_hash(&self) {
        *self.by_hash.lock() = Some(Puts::default());
    }

    /// Plans the faults of the next calls, in order.
    pub fn plan(&self, faults: &[Fault]) {
        self.plan.lock().extend(faults);
    }

    fn next(&self) -> Fault {
        self.plan.lock().pop_front().unwrap_or(Fault::None)
    }

    /// What happens before a call that returns no bytes.
    async fn disturb(&self) -> Result<()> {
        match self.next() {
            Fault::Error => Err(Error::new(ErrorKind::Internal, "fail as planned")),
            Fault::Hang => pending().await,
            Fault::Slow(delay) | Fault::SlowFlip(delay) => {
                tokio::time::sleep(delay).await;
                Ok(())
            }
            Fault::None | Fault::Busy | Fault::Miss | Fault::BitFlip(_) | Fault::Torn => Ok(()),
        }
    }
}

impl BlockStore for Faulty {
    fn tier(&self) -> Tier {
        self.inner.tier()
    }

    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, Result<Location>> {
        Box::pin(async move {
            self.disturb().await?;
            let key = (*block.namespace.id(), block.hash);
            let location = self.inner.put(block).await?;
            if let Some(puts) = self.by_hash.lock().as_mut() {
                puts.entry(key).or_default().push(location);
            }
            Ok(location)
        })
    }

    fn get<'a>(&'a self, wanted: Wanted, into: BlockWriter) -> BoxFuture<'a, Result<Load>> {
        Box::pin(async move {
            let fault = self.next();
            match fault {
                Fault::Error => return Err(Error::new(ErrorKind::Internal, "fail as planned")),
                Fault::Busy => return Ok(Load::Busy(Duration::from_millis(1))),
                Fault::Miss => return Ok(Load::Miss),
                Fault::Hang => pending().await,
                Fault::Slow(delay) => tokio::time::sleep(delay).await,
                Fault::SlowFlip(_) | Fault::None | Fault::BitFlip(_) | Fault::Torn => {}
            }
            let mut load = self.inner.get(wanted, into).await?;
            if let Fault::SlowFlip(delay) = fault {
                tokio::time::sleep(delay).await;
            }
            if let Load::Hit(writer) = &mut load {
                let half = writer.len() / 2;
                match fault {
                    Fault::SlowFlip(_) => {
                        writer.bytes_mut().iter_mut().take(1).for_each(|byte| *byte ^= 1);
                    }
                    Fault::BitFlip(at) => {
                        if let Some(byte) = writer.bytes_mut().get_mut(at) {
                            *byte ^= 1;
                        }
                    }
                    Fault::Torn => writer.bytes_mut().iter_mut().skip(half).for_each(|b| *b = 0),
                    Fault::None
                    | Fault::Error
                    | Fault::Busy
                    | Fault::Miss
                    | Fault::Hang
                    | Fault::Slow(_) => {}
                }
            }
            Ok(load)
        })
    }

    fn attach(&self, above: Weak<dyn Above>) {
        self.inner.attach(above);
    }

    fn is_damaged(&self, block: &Wanted) -> bool {
        self.inner.is_damaged(block)
    }

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.disturb().await?;
            let others = |block: &Wanted| {
                let (namespace, hash) = (block.namespace, block.hash);
                let puts = self.by_hash.lock().as_mut()?.remove(&(namespace, hash))?;
                Some(puts.into_iter().map(move |location| Wanted { namespace, hash, location }))
            };
            let others: Vec<Wanted> = blocks.iter().filter_map(others).flatten().collect();
            self.inner.remove(&others).await?;
            self.inner.remove(blocks).await
        })
    }

    fn removed<'a>(
        &'a self,
        namespace: NamespaceId,
        hashes: &'a [BlockHash],
    ) -> BoxFuture<'a, Result<()>> {
        self.inner.removed(namespace, hashes)
    }

    fn described(&self, namespace: NamespaceId, hashes: &[BlockHash]) {
        self.inner.described(namespace, hashes);
    }

    fn shed(&self) {
        self.inner.shed();
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }

    fn ailment(&self) -> Option<Ailment> {
        self.inner.ailment()
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        self.inner.close()
    }
}
