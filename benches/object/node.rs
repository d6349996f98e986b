//! A node with an object tier, whose nvme is in memory.

use std::{path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use kvstrata_tiers::{
    block::Hashes,
    checksum::part_checksum,
    namespace::{Identity, Namespace, NamespaceSpec, NamespaceTable, PartSpec, Secret},
    object::{
        ObjectAdmission, ObjectConfig, ObjectMetrics, ObjectParts, ObjectStore, PackMetrics,
        bucket::{Bucket, BucketConfig},
        names::{ClusterName, Owner},
    },
    stack::{Fetch, Offer, Piece},
    store::BlockStore,
    testing::{Fixture, MemoryRuns, MemoryStore, hash_of, pack},
    tier::Tier,
};
use prometheus_client::registry::Registry;
use tokio::{task::JoinSet, time::Instant};

use super::harness::{SERVER_WAIT, wait_until};

/// The node's wall clock, in milliseconds since 1970.
pub(crate) const NOW_UNIX_MS: u64 = 1_790_000_000_000;
/// Blocks that are asked for at once: two packs, as a client that loads a prefix does.
const READS: usize = 32;
/// What the map may hold.
const INDEX_BLOCKS_MAX: u64 = 1 << 20;
/// Memory that is not for blocks, in bytes.
const SPARE_BYTES: u64 = 64 << 20;

pub(crate) struct Node {
    store: Arc<ObjectStore>,
    runs: Arc<MemoryRuns>,
    fixture: Fixture,
    namespace: Arc<Namespace>,
    pub(crate) packs: PackMetrics,
    pub(crate) requests: ObjectMetrics,
    _tasks: JoinSet<()>,
}

/// What a node is for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) blocks: usize,
    pub(crate) block_bytes: u32,
    pub(crate) pack_bytes: u64,
}

pub(crate) fn identity(dtype: &str, block_bytes: u32) -> NamespaceSpec {
    NamespaceSpec::Engine(Box::new(Identity {
        tenant: "default".into(),
        model: "m".into(),
        weights: "1".into(),
        engine: "bench".into(),
        layout: "plain".into(),
        dtype: dtype.into(),
        block_tokens: 16,
        parts: vec![PartSpec { group: 0, rank: 0, bytes: block_bytes }],
        split: "none".into(),
        hash_algorithm: "blake3".into(),
        hash_bytes: 32,
        ..Identity::default()
    }))
}

impl Node {
    /// A node with this much in the bucket; it has found what is there.
    pub(crate) async fn start(
        bucket: BucketConfig,
        local: &Path,
        dtype: &str,
        sizes: Sizes,
    ) -> Self {
        let namespaces = Arc::new(NamespaceTable::new(Secret::new([7; 32]), false));
        let nvme = Arc::new(MemoryStore::new(Tier::Nvme));
        let runs = Arc::new(MemoryRuns::over(Arc::clone(&nvme)));
        let requests = ObjectMetrics::register(&mut Registry::default());
        let packs = PackMetrics::register(&mut Registry::default());
        let config = ObjectConfig {
            owner: Owner { cluster: ClusterName::new("bench").unwrap(), ordinal: 0 },
            holder: "node-0".to_owned(),
            local: local.to_owned(),
            capacity_bytes: 0,
            ttl: None,
            delete_grace: Duration::from_secs(4200),
            admission: ObjectAdmission::All,
            pack_bytes: sizes.pack_bytes,
        };
        let parts = ObjectParts {
            bucket: Bucket::open(bucket, requests.clone()).unwrap(),
            runs: Arc::<MemoryRuns>::clone(&runs),
            namespaces: Arc::clone(&namespaces),
            metrics: packs.clone(),
            clock: Arc::new(|| NOW_UNIX_MS),
        };
        let (store, work) = ObjectStore::open(config, parts).unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(work.run());
        let cold = vec![nvme as Arc<dyn BlockStore>, Arc::<ObjectStore>::clone(&store) as _];
        let dram_bytes = sizes.blocks as u64 * u64::from(sizes.block_bytes) + SPARE_BYTES;
        let fixture = Fixture::over(dram_bytes, INDEX_BLOCKS_MAX, cold, namespaces).unwrap();
        let spec = identity(dtype, sizes.block_bytes);
        let namespace = fixture.namespaces.open(spec, true).unwrap().namespace;
        store.found().await;
        Self { store, runs, fixture, namespace, packs, requests, _tasks: tasks }
    }

    /// Puts blocks and copies them to nvme, where they lie in a run that is not sealed yet.
    pub(crate) async fn put(&self, blocks: &[Bytes]) {
        let numbers: Vec<u64> = (0..blocks.len() as u64).collect();
        let packed = pack(&numbers);
        let hashes = Hashes::new(&packed, 32).unwrap();
        let offer = Offer { hashes, parts: &[], checksums: &[], parent: None, lengths: &[] };
        let mut batch = self.fixture.stack.put(&self.namespace, offer).unwrap();
        for (position, data) in (0_u32..).zip(blocks) {
            let hash = hash_of(u64::from(position));
            let checksum = part_checksum(self.namespace.id(), &hash, 0, 0, data);
            let piece = Piece { position, part: 0, offset: 0, data, checksum, part_bytes: 0 };
            batch.write(piece).unwrap();
        }
        batch.finish();
        for number in numbers {
            let hash = hash_of(number);
            let demoted = self.fixture.stack.demote(&self.namespace, hash, Tier::Nvme).await;
            assert!(demoted.unwrap());
        }
    }

    /// Seals the run; seconds until its blocks are in the bucket. Returns once the log names them.
    pub(crate) async fn pack(&self, blocks: usize) -> f64 {
        let started = Instant::now();
        self.runs.seal();
        wait_until("blocks are in packs", SERVER_WAIT, async || {
            self.packs.packed_blocks.get() >= blocks as u64
        })
        .await;
        let seconds = started.elapsed().as_secs_f64();
        wait_until("packs are named", SERVER_WAIT, async || {
            self.packs.named_packs.get() >= self.packs.packs_made.get()
        })
        .await;
        seconds
    }

    /// Reads blocks from the bucket into dram, verified; seconds.
    pub(crate) async fn get(&self, blocks: &[Bytes]) -> f64 {
        let started = Instant::now();
        let gets = (0_u64..).zip(blocks).map(|(number, block)| async move {
            let deadline = Instant::now() + SERVER_WAIT;
            let stack = &self.fixture.stack;
            let got = stack.get(&self.namespace, hash_of(number), &[], deadline).await;
            let Ok(Fetch::Hit(got)) = got else { panic!("block {number}: {got:?}") };
            assert_eq!(got.len(), block.len());
        });
        stream::iter(gets).buffered(READS).collect::<Vec<()>>().await;
        started.elapsed().as_secs_f64()
    }

    pub(crate) async fn stop(self) {
        self.store.close().await.unwrap();
    }
}
