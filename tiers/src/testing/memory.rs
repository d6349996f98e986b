//! A colder tier in memory.

use std::{
    collections::HashMap,
    num::NonZeroU64,
    sync::{
        Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use crate::{
    block::BlockHash,
    dram::BlockWriter,
    error::{Error, ErrorKind, Result},
    map::Location,
    namespace::NamespaceId,
    store::{Above, BlockStore, BoxFuture, Load, Outgoing, StoreUsage, Wanted},
    tier::Tier,
};

#[derive(Debug)]
struct Kept {
    namespace: NamespaceId,
    hash: BlockHash,
    bytes: Vec<u8>,
}

/// Keeps copies of blocks on the heap. Locations are numbers that are never used again.
#[derive(Debug)]
pub struct MemoryStore {
    tier: Tier,
    blocks: Mutex<HashMap<u64, Kept>>,
    last: AtomicU64,
    closed: AtomicBool,
}

impl MemoryStore {
    /// An empty store that says it is `tier`.
    #[must_use]
    pub fn new(tier: Tier) -> Self {
        Self {
            tier,
            blocks: Mutex::default(),
            last: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        }
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "use a closed tier"));
        }
        Ok(())
    }

    fn put_now(&self, block: &Outgoing) -> Result<Location> {
        self.check_open()?;
        let number = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let kept = Kept {
            namespace: *block.namespace.id(),
            hash: block.hash,
            bytes: block.payload.as_ref().to_vec(),
        };
        self.blocks.lock().insert(number, kept);
        let number = NonZeroU64::new(number)
            .ok_or_else(|| Error::new(ErrorKind::Internal, "number a block"))?;
        Ok(Location(number))
    }

    fn get_now(&self, wanted: &Wanted, mut into: BlockWriter) -> Result<Load> {
        self.check_open()?;
        let blocks = self.blocks.lock();
        let kept = blocks.get(&wanted.location.0.get()).filter(|kept| {
            (kept.namespace, kept.hash) == (wanted.namespace, wanted.hash)
                && kept.bytes.len() == into.len()
        });
        let Some(kept) = kept else { return Ok(Load::Miss) };
        into.bytes_mut().copy_from_slice(&kept.bytes);
        Ok(Load::Hit(into))
    }
}

impl BlockStore for MemoryStore {
    fn tier(&self) -> Tier {
        self.tier
    }

    fn put<'a>(&'a self, block: Outgoing) -> BoxFuture<'a, Result<Location>> {
        Box::pin(async move { self.put_now(&block) })
    }

    fn get<'a>(&'a self, wanted: Wanted, into: BlockWriter) -> BoxFuture<'a, Result<Load>> {
        Box::pin(async move { self.get_now(&wanted, into) })
    }

    fn attach(&self, _above: Weak<dyn Above>) {}

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            let mut kept = self.blocks.lock();
            for block in blocks {
                kept.remove(&block.location.0.get());
            }
            Ok(())
        })
    }

    fn usage(&self) -> StoreUsage {
        let blocks = self.blocks.lock();
        let used = blocks.values().map(|kept| kept.bytes.len()).sum::<usize>();
        StoreUsage {
            capacity_bytes: 0,
            used_bytes: u64::try_from(used).unwrap_or(u64::MAX),
            blocks: u64::try_from(blocks.len()).unwrap_or(u64::MAX),
        }
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.closed.store(true, Ordering::Release);
            Ok(())
        })
    }
}
