//! A stack over a tier whose disk fails on demand: what its users get, and what it costs.

use std::{collections::BTreeSet, sync::Arc};

use prometheus_client::registry::Registry;
use tokio::task::JoinSet;

use crate::{
    block::Hashes,
    namespace::{Namespace, NamespaceSpec, NamespaceTable, Secret},
    nvme::{
        NvmeConfig, NvmeMetrics, NvmeParts, NvmeStore,
        device::{Device, SegmentId},
        format::{Entry, Kind},
        index::Index,
        scan::{First, Scanner, read_first},
        verify::{Report, verify},
    },
    store::BlockStore,
    testing::{FaultyDevice, Fixture, MemoryIndex, VolatileDevice, block_bytes, hash_of, pack},
    tier::Tier,
};

pub(super) const LEN: u32 = 16 << 10;
pub(super) const SEGMENT_BYTES: u64 = 256 << 10;
pub(super) const STORE: [u8; 16] = [3; 16];
/// Blocks of a usual test: four segments and a bit.
pub(super) const MANY: u64 = 50;

/// A disk, an index, and the sizes of the tier on them.
pub(super) struct Rig {
    pub(super) device: Arc<FaultyDevice>,
    pub(super) index: Arc<dyn Index>,
    /// The index, if it is in memory.
    pub(super) memory: Arc<MemoryIndex>,
    pub(super) config: NvmeConfig,
    pub(super) parts: Vec<u32>,
}

impl Rig {
    pub(super) fn new() -> Self {
        let memory = Arc::new(MemoryIndex::new());
        let index: Arc<dyn Index> = Arc::<MemoryIndex>::clone(&memory);
        let mut rig = Self::on(Arc::new(VolatileDevice::new(64 << 20)), index);
        rig.memory = memory;
        rig
    }

    pub(super) fn on(device: Arc<dyn Device>, index: Arc<dyn Index>) -> Self {
        let config = NvmeConfig {
            capacity_bytes: 16 << 20,
            segment_bytes: SEGMENT_BYTES,
            blocks_max: 1 << 20,
            daily_write_bytes: 0,
            store: STORE,
            seed: 5,
        };
        let device = Arc::new(FaultyDevice::new(device, 1));
        Self { device, index, memory: Arc::default(), config, parts: vec![LEN] }
    }

    /// Starts the tier; dropping what is returned is a kill.
    pub(super) async fn start(&self) -> Life {
        let (store, fixture, _writer) = self.run().await;
        let namespace = fixture.namespace("rig", &self.parts).unwrap();
        Life { store, fixture, namespace, _writer }
    }

    /// The same, with a namespace that is opened otherwise.
    pub(super) async fn start_opened(&self, spec: NamespaceSpec, keep_tokens: bool) -> Life {
        let (store, fixture, _writer) = self.run().await;
        let namespace = fixture.namespaces.open(spec, keep_tokens).unwrap().namespace;
        Life { store, fixture, namespace, _writer }
    }

    async fn run(&self) -> (Arc<NvmeStore>, Fixture, JoinSet<()>) {
        let namespaces = Arc::new(NamespaceTable::new(Secret::new([7; 32]), false));
        let metrics = NvmeMetrics::register(&mut Registry::default());
        let device: Arc<dyn Device> = Arc::<FaultyDevice>::clone(&self.device);
        let index = Arc::clone(&self.index);
        let parts = NvmeParts { device, index, namespaces: Arc::clone(&namespaces), metrics };
        let (store, writer) = NvmeStore::new(self.config, parts).unwrap();
        let cold: Vec<Arc<dyn BlockStore>> = vec![Arc::<NvmeStore>::clone(&store)];
        let fixture = Fixture::over(4 << 20, 1 << 20, cold, namespaces).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(writer.run());
        store.recovered().await.unwrap();
        (store, fixture, tasks)
    }

    /// A tier with blocks `0..MANY`, closed: all segments are sealed.
    pub(super) async fn filled() -> Self {
        let rig = Self::new();
        rig.fill().await;
        rig
    }

    pub(super) async fn fill(&self) {
        let life = self.start().await;
        life.put(0..MANY).await;
        life.store.close().await.unwrap();
    }

    /// An index that knows nothing.
    pub(super) fn lose_index(&self) {
        self.index.clear().unwrap();
    }

    /// All records of all segments.
    pub(super) async fn records(&self) -> Vec<(SegmentId, Entry)> {
        let mut records = Vec::new();
        for (id, bytes) in self.device.list().unwrap() {
            let First::Ours(header) = read_first(self.device.as_ref(), id, STORE).await else {
                continue;
            };
            let range = (0, bytes);
            let mut scanner = Scanner::new(self.device.as_ref(), id, header.generation, range);
            while let Some(scanned) = scanner.next(false).await {
                records.push((id, scanned.entry));
            }
        }
        records
    }

    /// Segment and page of the record of a block.
    pub(super) async fn page_of(&self, number: u64) -> (SegmentId, u64) {
        let records = self.records().await;
        let is_it = |(_, entry): &&(SegmentId, Entry)| {
            entry.kind == Kind::Block && entry.key.hash == hash_of(number)
        };
        let (id, entry) = records.iter().rfind(is_it).unwrap();
        (*id, u64::from(entry.unit))
    }

    pub(super) async fn verify(&self) -> Report {
        let device: Arc<dyn Device> = Arc::<FaultyDevice>::clone(&self.device);
        verify(device, Arc::clone(&self.index), STORE, &mut |_, _| {}).await.unwrap()
    }
}

/// Opens the index as a server does, made anew if it is damaged; once the life before has let it go.
#[cfg(feature = "rocksdb")]
pub(super) async fn open_index(path: &std::path::Path) -> Arc<dyn Index> {
    use crate::nvme::index::RocksIndex;
    for _ in 0..500 {
        match RocksIndex::open(path, 4 << 20) {
            Ok(index) => return Arc::new(index),
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                RocksIndex::destroy(path).unwrap();
            }
            Err(_held) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    }
    panic!("the index stays held");
}

/// A stack over a tier that runs.
pub(super) struct Life {
    pub(super) store: Arc<NvmeStore>,
    pub(super) fixture: Fixture,
    pub(super) namespace: Arc<Namespace>,
    // Ends the writer when dropped, as a kill would.
    _writer: JoinSet<()>,
}

impl Life {
    pub(super) fn metrics(&self) -> &NvmeMetrics {
        self.store.metrics()
    }

    /// Puts one block into dram and copies it to the tier; whether that worked.
    pub(super) async fn try_put(&self, number: u64) -> bool {
        self.fixture.put(&self.namespace, &[number]).unwrap();
        let demoted = self.fixture.stack.demote(&self.namespace, hash_of(number), Tier::Nvme);
        demoted.await.is_ok_and(|there| there)
    }

    pub(super) async fn put(&self, numbers: impl IntoIterator<Item = u64>) {
        for number in numbers {
            assert!(self.try_put(number).await, "block {number} is not taken");
        }
    }

    pub(super) async fn remove(&self, numbers: impl IntoIterator<Item = u64>) {
        let packed = pack(&numbers.into_iter().collect::<Vec<_>>());
        let hashes = Hashes::new(&packed, 32).unwrap();
        // A tier in trouble does not note it; nothing can be read all the same.
        drop(self.fixture.stack.remove(&self.namespace, hashes).await);
    }

    /// Which of the blocks come back. A wrong byte ends the test.
    pub(super) async fn hits(&self, numbers: impl IntoIterator<Item = u64>) -> BTreeSet<u64> {
        let mut hits = BTreeSet::new();
        for number in numbers {
            let Some(read) = self.fixture.read(&self.namespace, number).await else { continue };
            let parts = (0..).zip(self.namespace.layout().parts());
            let right = parts.map(|(part, spec)| {
                block_bytes(&self.namespace, number, part, spec.bytes as usize)
            });
            assert!(read == right.collect::<Vec<_>>(), "block {number} is wrong");
            hits.insert(number);
        }
        hits
    }

    /// Which of `0..MANY` are lost.
    pub(super) async fn lost(&self) -> Vec<u64> {
        let hits = self.hits(0..MANY).await;
        (0..MANY).filter(|number| !hits.contains(number)).collect()
    }

    /// Writes work, and what is written is found by the next start.
    pub(super) async fn works(self, rig: &Rig) -> Life {
        self.put(9_000..9_020).await;
        drop(self);
        let again = rig.start().await;
        assert_eq!(again.hits(9_000..9_020).await.len(), 20, "what was written after the fault");
        again
    }
}
