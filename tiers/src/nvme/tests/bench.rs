//! A tier with a writer that runs, blocks that can be made again, and a map above it.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::task::JoinSet;

use crate::{
    block::BlockHash,
    checksum::part_checksum,
    description::Description,
    error::Result,
    map::{Checksums, Location},
    namespace::{Namespace, NamespaceId},
    nvme::{
        NvmeConfig, NvmeMetrics, NvmeParts, NvmeStore, Recovered, device::Device, index::Index,
    },
    store::{Above, BlockStore, Found, Load, Outgoing, Uncopied, Urgency, Wanted},
    testing::{
        Arena, Fixture, MemoryIndex, VolatileDevice, block_bytes, hash_of,
        index_suite::description_of,
    },
    tier::Tier,
};

/// Where a tier lies, and what it is made of.
pub(super) struct Bench {
    pub(super) device: Arc<dyn Device>,
    pub(super) index: Arc<dyn Index>,
    pub(super) config: NvmeConfig,
    /// Bytes of a block.
    pub(super) len: u32,
}

impl Bench {
    pub(super) fn new(device: Arc<dyn Device>, index: Arc<dyn Index>) -> Self {
        let config = NvmeConfig {
            capacity_bytes: 64 << 20,
            segment_bytes: 1 << 20,
            blocks_max: 1 << 20,
            daily_write_bytes: 0,
            store: [3; 16],
            seed: 5,
        };
        Self { device, index, config, len: 64 << 10 }
    }

    /// On a disk that has so much room for segments.
    pub(super) fn in_memory(capacity_bytes: u64) -> Self {
        let device = Arc::new(VolatileDevice::new(capacity_bytes * 2));
        let mut bench = Self::new(device, Arc::new(MemoryIndex::new()));
        bench.config.capacity_bytes = capacity_bytes;
        bench
    }

    /// Starts the tier. Dropping what is returned is a kill.
    pub(super) fn start(&self) -> Running {
        let fixture = Fixture::new(1 << 20, Vec::new()).unwrap();
        let parts = NvmeParts {
            device: Arc::clone(&self.device),
            index: Arc::clone(&self.index),
            namespaces: Arc::clone(&fixture.namespaces),
            metrics: NvmeMetrics::register(&mut Registry::default()),
        };
        let (store, writer) = NvmeStore::new(self.config, parts).unwrap();
        let above = Arc::new(Map::default());
        let weak: Weak<dyn Above> = Arc::<Map>::downgrade(&above);
        store.attach(weak);
        let mut tasks = JoinSet::new();
        tasks.spawn(writer.run());
        let arena = Arena::new(32 << 20).unwrap();
        Running { store, above, fixture, arena, len: self.len, _writer: tasks }
    }
}

/// A tier whose writer runs.
pub(super) struct Running {
    pub(super) store: Arc<NvmeStore>,
    pub(super) above: Arc<Map>,
    fixture: Fixture,
    arena: Arena,
    len: u32,
    // Ends the writer when dropped, as a kill would.
    _writer: JoinSet<()>,
}

impl Running {
    pub(super) fn namespace(&self) -> Arc<Namespace> {
        self.fixture.namespace("bench", &[self.len]).unwrap()
    }

    pub(super) async fn recovered(&self) -> Recovered {
        self.store.recovered().await.unwrap()
    }

    /// What the start has found: numbers and places.
    pub(super) fn found(&self) -> Vec<(u64, Location)> {
        self.above.there()
    }

    /// A block on its way.
    pub(super) fn outgoing(&self, number: u64, urgency: Urgency) -> Outgoing {
        let namespace = self.namespace();
        let bytes = block_bytes(&namespace, number, 0, self.len as usize);
        let payload = self.arena.sealed(&bytes).unwrap();
        let hash = hash_of(number);
        let sum = part_checksum(namespace.id(), &hash, 0, 0, payload.as_ref());
        let checksums = Checksums::One(sum);
        Outgoing { namespace, hash, payload, checksums, urgency, reused: false }
    }

    pub(super) async fn try_put(&self, number: u64) -> Result<Location> {
        let block = self.outgoing(number, Urgency::Durable);
        let known = (*block.namespace.id(), number);
        let location = self.store.put(block).await?;
        self.above.set(known.0, number, location);
        Ok(location)
    }

    pub(super) async fn put(&self, number: u64) -> Location {
        self.try_put(number).await.unwrap()
    }

    pub(super) async fn put_all(&self, numbers: Range<u64>) -> Vec<(u64, Location)> {
        let mut put = Vec::new();
        for number in numbers {
            put.push((number, self.put(number).await));
        }
        put
    }

    pub(super) fn wanted(&self, number: u64, location: Location) -> Wanted {
        Wanted { namespace: *self.namespace().id(), hash: hash_of(number), location }
    }

    pub(super) async fn remove(&self, blocks: &[(u64, Location)]) {
        for (number, _) in blocks {
            self.above.forget(*number);
        }
        let wanted: Vec<_> =
            blocks.iter().map(|(n, location)| self.wanted(*n, *location)).collect();
        self.store.remove(&wanted).await.unwrap();
    }

    /// The bytes of a block, if it is there.
    pub(super) async fn get(&self, number: u64, location: Location) -> Option<Vec<u8>> {
        let writer = self.arena.writer(self.len).unwrap();
        match self.store.get(self.wanted(number, location), writer).await {
            Ok(Load::Hit(writer)) => Some(writer.bytes().to_vec()),
            Ok(Load::Busy(_) | Load::Miss) | Err(_) => None,
        }
    }

    /// Whether the tier has the block with its bytes.
    pub(super) async fn is_right(&self, number: u64, location: Location) -> bool {
        let expected = block_bytes(&self.namespace(), number, 0, self.len as usize);
        self.get(number, location).await == Some(expected)
    }
}

/// A map above the tier: where each block is and when it was used.
#[derive(Debug, Default)]
pub(super) struct Map(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    clock: u64,
    blocks: BTreeMap<u64, (Location, u64)>,
    numbers: BTreeMap<[u8; 32], u64>,
    /// The round of the description that each block has.
    described: BTreeMap<u64, u32>,
}

impl Map {
    fn set(&self, _namespace: NamespaceId, number: u64, location: Location) {
        let mut entries = self.0.lock();
        entries.clock += 1;
        let age = entries.clock;
        entries.blocks.insert(number, (location, age));
        entries.numbers.insert(*hash_of(number).as_bytes(), number);
    }

    fn forget(&self, number: u64) {
        self.0.lock().forget(number);
    }

    /// Describes a block, whether or not it is there yet.
    pub(super) fn describe(&self, number: u64, round: u32) {
        self.0.lock().described.insert(number, round);
    }

    /// Blocks that are described, and the round of that.
    pub(super) fn described(&self) -> Vec<(u64, u32)> {
        self.0.lock().described.iter().map(|(number, round)| (*number, *round)).collect()
    }

    pub(super) fn touch_all(&self, numbers: Range<u64>) {
        let mut entries = self.0.lock();
        entries.clock += 1;
        let age = entries.clock;
        for number in numbers {
            if let Some(block) = entries.blocks.get_mut(&number) {
                block.1 = age;
            }
        }
    }

    /// All blocks, by number.
    pub(super) fn there(&self) -> Vec<(u64, Location)> {
        self.0.lock().blocks.iter().map(|(number, (location, _))| (*number, *location)).collect()
    }

    pub(super) fn location(&self, number: u64) -> Option<Location> {
        self.0.lock().blocks.get(&number).map(|block| block.0)
    }
}

impl Entries {
    fn number(&mut self, hash: &BlockHash) -> u64 {
        // Numbers below this are all that any test uses.
        if self.numbers.len() < 20_000 {
            self.numbers = (0..20_000).map(|n| (*hash_of(n).as_bytes(), n)).collect();
        }
        self.numbers[hash.as_bytes()]
    }

    fn forget(&mut self, number: u64) {
        self.blocks.remove(&number);
        self.described.remove(&number);
    }

    fn at(&mut self, block: &Wanted) -> Option<(u64, &mut (Location, u64))> {
        let number = *self.numbers.get(block.hash.as_bytes())?;
        let known = self.blocks.get_mut(&number)?;
        (known.0 == block.location).then_some((number, known))
    }
}

impl Above for Map {
    fn found(&self, _tier: Tier, block: Found) -> bool {
        let mut entries = self.0.lock();
        entries.clock += 1;
        let age = entries.clock;
        let number = entries.number(&block.hash);
        entries.blocks.insert(number, (block.location, age));
        true
    }

    fn leaving(&self, _tier: Tier, blocks: &[Wanted]) {
        let mut entries = self.0.lock();
        for block in blocks {
            if let Some((number, _)) = entries.at(block) {
                entries.forget(number);
            }
        }
    }

    fn moved(&self, _tier: Tier, block: &Wanted, to: Location) -> bool {
        let mut entries = self.0.lock();
        entries.at(block).map(|(_, known)| known.0 = to).is_some()
    }

    fn clock(&self) -> u64 {
        self.0.lock().clock
    }

    fn ages(&self, _tier: Tier, blocks: &[Wanted]) -> Vec<Option<u64>> {
        let mut entries = self.0.lock();
        blocks.iter().map(|block| entries.at(block).map(|(_, known)| known.1)).collect()
    }

    fn cold_age(&self, _tier: Tier, share: f64) -> u64 {
        let entries = self.0.lock();
        let mut ages: Vec<u64> = entries.blocks.values().map(|(_, age)| *age).collect();
        ages.sort_unstable();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a short list"
        )]
        let at = (ages.len() as f64 * share) as usize;
        ages.get(at).copied().unwrap_or(0)
    }

    fn survey(&self, _tier: Tier, visit: &mut dyn FnMut(Location, u32, u64)) {
        let entries = self.0.lock();
        entries.blocks.values().for_each(|(location, age)| visit(*location, 1 << 16, *age));
    }

    fn uncopied(&self, _from: Tier, _to: Tier, blocks: &[Wanted]) -> Vec<Option<Uncopied>> {
        let ages = self.ages(Tier::Nvme, blocks).into_iter();
        ages.map(|age| Some(Uncopied { age: age?, reused: false, in_long_chain: false })).collect()
    }

    fn gone(&self, _tier: Tier, _is_gone: &mut dyn FnMut(Location) -> bool) -> u64 {
        0
    }

    fn description(&self, _namespace: NamespaceId, hash: BlockHash) -> Option<Description> {
        let mut entries = self.0.lock();
        let number = entries.number(&hash);
        entries.described.get(&number).map(|round| description_of(number, *round))
    }

    fn found_described(
        &self,
        _tier: Tier,
        _namespace: NamespaceId,
        hash: BlockHash,
        description: Description,
    ) -> bool {
        let mut entries = self.0.lock();
        let number = entries.number(&hash);
        assert_eq!(description, description_of(number, description.position), "block {number}");
        let is_there = entries.blocks.contains_key(&number);
        if is_there {
            entries.described.insert(number, description.position);
        }
        is_there
    }

    fn copied(&self, _from: &Wanted, _to: Tier, _at: Location, _sums: &Checksums) -> bool {
        false
    }
}
