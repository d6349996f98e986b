//! A colder tier in memory.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    num::NonZeroU64,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;

use crate::{
    admission::Admission,
    block::BlockHash,
    dram::BlockWriter,
    error::{Error, ErrorKind, Result},
    map::{Checksums, Location},
    namespace::{Namespace, NamespaceId, NamespaceTable},
    store::{Above, BlockStore, BoxFuture, Found, Load, Outgoing, RunBlock, StoreUsage, Wanted},
    tier::Tier,
};

/// The part of its blocks that it drops when asked to shed: 1 / this.
const SHED_DIVISOR: usize = 16;
/// What it answers when its budget is short.
const BUDGET_RETRY: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
struct Kept {
    namespace: Arc<Namespace>,
    hash: BlockHash,
    bytes: Arc<[u8]>,
    checksums: Checksums,
}

/// All copies, by their numbers and by their blocks.
#[derive(Debug, Default)]
struct Copies {
    kept: BTreeMap<NonZeroU64, Kept>,
    of_block: HashMap<(NamespaceId, BlockHash), Vec<NonZeroU64>>,
}

impl Copies {
    fn insert(&mut self, number: NonZeroU64, kept: Kept) {
        self.of_block.entry(kept.key()).or_default().push(number);
        self.kept.insert(number, kept);
    }

    fn remove(&mut self, number: &NonZeroU64) {
        let Some(kept) = self.kept.remove(number) else { return };
        if let Entry::Occupied(mut numbers) = self.of_block.entry(kept.key()) {
            numbers.get_mut().retain(|other| other != number);
            if numbers.get().is_empty() {
                numbers.remove();
            }
        }
    }

    /// Removes the copies of a block but for one.
    fn supersede(&mut self, by: NonZeroU64, key: &(NamespaceId, BlockHash)) {
        for number in self.of_block.get(key).cloned().unwrap_or_default() {
            if number != by {
                self.remove(&number);
            }
        }
    }
}

impl Kept {
    fn key(&self) -> (NamespaceId, BlockHash) {
        (*self.namespace.id(), self.hash)
    }
}

/// Keeps copies of blocks on the heap. Locations are numbers that are never used again and grow.
#[derive(Debug)]
pub struct MemoryStore {
    tier: Tier,
    blocks: Mutex<Copies>,
    last: AtomicU64,
    closed: AtomicBool,
    /// What it takes; none for nothing.
    admission: Mutex<Option<Admission>>,
    /// The longest block that it takes.
    bytes_max: AtomicUsize,
    above: Mutex<Option<Weak<dyn Above>>>,
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
            admission: Mutex::new(Some(Admission::All)),
            bytes_max: AtomicUsize::new(usize::MAX),
            above: Mutex::default(),
        }
    }

    /// Takes only what `admission` admits from now on; nothing at all if there is none.
    pub fn admit(&self, admission: Option<Admission>) {
        *self.admission.lock() = admission;
    }

    /// Takes no longer blocks than this from now on.
    pub fn fit(&self, bytes_max: usize) {
        self.bytes_max.store(bytes_max, Ordering::Relaxed);
    }

    /// Copies that it holds, oldest first.
    #[must_use]
    pub fn copies(&self) -> Vec<Wanted> {
        let blocks = self.blocks.lock();
        let wanted = |(number, kept): (&NonZeroU64, &Kept)| Wanted {
            namespace: *kept.namespace.id(),
            hash: kept.hash,
            location: Location(*number),
        };
        blocks.kept.iter().map(wanted).collect()
    }

    /// Reclaims its `count` oldest copies, as a tier does that is full.
    pub fn reclaim(&self, count: usize) {
        let mut oldest = self.copies();
        oldest.truncate(count);
        self.let_go(&oldest);
    }

    /// Copies leave, and whoever is above is told first.
    pub(super) fn let_go(&self, copies: &[Wanted]) {
        if let Some(above) = self.above() {
            above.leaving(self.tier, copies);
        }
        let mut blocks = self.blocks.lock();
        for copy in copies {
            blocks.remove(&copy.location.0);
        }
    }

    /// All copies with what is known of them, oldest first.
    pub(super) fn run_blocks(&self) -> Vec<RunBlock> {
        let blocks = self.blocks.lock();
        let block = |(number, kept): (&NonZeroU64, &Kept)| RunBlock {
            namespace: Arc::clone(&kept.namespace),
            hash: kept.hash,
            location: Location(*number),
            len: u32::try_from(kept.bytes.len()).unwrap_or(u32::MAX),
            checksums: kept.checksums.clone(),
        };
        blocks.kept.iter().map(block).collect()
    }

    /// The bytes of a copy.
    pub(super) fn bytes_of(&self, copy: &Wanted) -> Option<Vec<u8>> {
        let blocks = self.blocks.lock();
        let kept = blocks.kept.get(&copy.location.0)?;
        let is_it = kept.key() == (copy.namespace, copy.hash);
        is_it.then(|| kept.bytes.to_vec())
    }

    /// Moves a copy to a new place, as a tier does that compacts; false if nobody wants it there.
    pub fn compact(&self, copy: &Wanted) -> bool {
        let Some(number) = self.number() else { return false };
        {
            let mut blocks = self.blocks.lock();
            let Some(kept) = blocks.kept.get(&copy.location.0).cloned() else { return false };
            blocks.insert(number, kept);
        }
        let to = Location(number);
        let wanted = self.above().is_some_and(|above| above.moved(self.tier, copy, to));
        let useless = if wanted { copy.location } else { to };
        self.blocks.lock().remove(&useless.0);
        wanted
    }

    /// Finds a copy of a block on its medium that it was never given; false if it forgot it again.
    pub fn discover(
        &self,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        bytes: &[u8],
        checksums: Checksums,
    ) -> bool {
        let namespace = Arc::clone(namespace);
        let older = self
            .copies()
            .into_iter()
            .filter(|copy| (copy.namespace, copy.hash) == (*namespace.id(), hash));
        let older: Vec<Wanted> = older.collect();
        let kept = Kept { namespace, hash, bytes: bytes.into(), checksums };
        let Some(location) = self.keep(kept.clone()) else { return false };
        let stays = self.tell(&kept, location);
        let mut blocks = self.blocks.lock();
        if stays {
            older.iter().for_each(|copy| blocks.remove(&copy.location.0));
        } else {
            blocks.remove(&location.0);
        }
        stays
    }

    /// Copies a block of a run, as the object tier does; false if nobody wants the copy (any more), then
    /// it is forgotten.
    pub fn copy_in(&self, block: &RunBlock, bytes: &[u8]) -> bool {
        let kept = Kept {
            namespace: Arc::clone(&block.namespace),
            hash: block.hash,
            bytes: bytes.into(),
            checksums: block.checksums.clone(),
        };
        let Some(location) = self.keep(kept) else { return false };
        let wanted = self.above().is_some_and(|above| {
            above.copied(&block.wanted(), self.tier, location, &block.checksums)
        });
        if !wanted {
            self.blocks.lock().remove(&location.0);
        }
        wanted
    }

    /// Tells the stack above what it holds of these namespaces, as a tier does that was started again;
    /// returns how many blocks the stack knows of now. The rest is forgotten.
    pub fn recover(&self, namespaces: &NamespaceTable) -> usize {
        let held: Vec<_> =
            self.blocks.lock().kept.iter().map(|(n, kept)| (*n, kept.clone())).collect();
        let mut known = 0;
        for (number, mut kept) in held {
            let open = namespaces.get(kept.namespace.id().as_bytes());
            let is_open = open.map(|namespace| kept.namespace = namespace).is_ok();
            if is_open && self.tell(&kept, Location(number)) {
                known += 1;
            } else {
                self.blocks.lock().remove(&number);
            }
        }
        known
    }

    fn tell(&self, kept: &Kept, location: Location) -> bool {
        let Kept { namespace, hash, bytes, checksums } = kept.clone();
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let found = Found { namespace, hash, len, checksums, location, replaces: true };
        self.above().is_some_and(|above| above.found(self.tier, found))
    }

    fn above(&self) -> Option<Arc<dyn Above>> {
        self.above.lock().as_ref()?.upgrade()
    }

    fn number(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.last.fetch_add(1, Ordering::Relaxed) + 1)
    }

    fn keep(&self, kept: Kept) -> Option<Location> {
        let number = self.number()?;
        self.blocks.lock().insert(number, kept);
        Some(Location(number))
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Unavailable, "use a closed tier"));
        }
        Ok(())
    }

    fn put_now(&self, block: &Outgoing) -> Result<Location> {
        self.check_open()?;
        if block.payload.as_ref().len() > self.bytes_max.load(Ordering::Relaxed) {
            return Err(Error::invalid("write a block that does not fit"));
        }
        match *self.admission.lock() {
            None => return Err(Error::new(ErrorKind::Unavailable, "write to a read-only tier")),
            Some(rule) if !rule.admits(block.urgency, block.reused) => {
                let short = ErrorKind::Exhausted { retry_after: BUDGET_RETRY };
                return Err(Error::new(short, "write within the budget"));
            }
            Some(_) => {}
        }
        let kept = Kept {
            namespace: Arc::clone(&block.namespace),
            hash: block.hash,
            bytes: block.payload.as_ref().into(),
            checksums: block.checksums.clone(),
        };
        let internal = || Error::new(ErrorKind::Internal, "number a block");
        let (key, number) = (kept.key(), self.number().ok_or_else(internal)?);
        let mut blocks = self.blocks.lock();
        blocks.insert(number, kept);
        blocks.supersede(number, &key);
        Ok(Location(number))
    }

    fn get_now(&self, wanted: &Wanted, mut into: BlockWriter) -> Result<Load> {
        self.check_open()?;
        let blocks = self.blocks.lock();
        let kept = blocks.kept.get(&wanted.location.0).filter(|kept| {
            (*kept.namespace.id(), kept.hash) == (wanted.namespace, wanted.hash)
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

    fn attach(&self, above: Weak<dyn Above>) {
        *self.above.lock() = Some(above);
    }

    fn remove<'a>(&'a self, blocks: &'a [Wanted]) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.check_open()?;
            let mut kept = self.blocks.lock();
            for block in blocks {
                kept.remove(&block.location.0);
            }
            Ok(())
        })
    }

    fn shed(&self) {
        let held = self.blocks.lock().kept.len();
        self.reclaim(held.div_ceil(SHED_DIVISOR));
    }

    fn usage(&self) -> StoreUsage {
        let blocks = self.blocks.lock();
        let used = blocks.kept.values().map(|kept| kept.bytes.len()).sum::<usize>();
        StoreUsage {
            capacity_bytes: 0,
            used_bytes: u64::try_from(used).unwrap_or(u64::MAX),
            blocks: u64::try_from(blocks.kept.len()).unwrap_or(u64::MAX),
            evicted_blocks: 0,
        }
    }

    fn close<'a>(&'a self) -> BoxFuture<'a, Result<()>> {
        Box::pin(async move {
            self.closed.store(true, Ordering::Release);
            Ok(())
        })
    }
}
