//! A tier on the disk with its writer on a thread of its own.

use std::{path::PathBuf, sync::Arc, thread};

use kvstrata_tiers::{
    Checksums, Location,
    namespace::Namespace,
    nvme::{
        NvmeConfig, NvmeMetrics, NvmeParts, NvmeStore,
        device::{Engine, open},
        index::RocksIndex,
    },
    store::{BlockStore, Load, Outgoing, Payload, Urgency, Wanted},
    testing::{Arena, Fixture, hash_of},
};
use prometheus_client::registry::Registry;

/// A fresh directory on the disk to be measured.
pub(crate) fn directory() -> tempfile::TempDir {
    let parent = std::env::var_os("KVSTRATA_BENCH_DIRECTORY").map(PathBuf::from);
    let parent = parent.unwrap_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")));
    tempfile::Builder::new().prefix("bench-nvme").tempdir_in(parent).unwrap()
}

pub(crate) struct Bench {
    pub(crate) store: Arc<NvmeStore>,
    pub(crate) arena: Arena,
    pub(crate) namespace: Arc<Namespace>,
    writer: Option<thread::JoinHandle<()>>,
}

pub(crate) struct Sizes {
    pub(crate) capacity_bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) arena_bytes: u64,
}

impl Bench {
    pub(crate) fn start(directory: &std::path::Path, engine: Engine, sizes: &Sizes) -> Self {
        let segments = directory.join("segments");
        std::fs::create_dir_all(&segments).unwrap();
        let fixture = Fixture::new(1 << 20, Vec::new()).unwrap();
        let index = RocksIndex::open(&directory.join("index"), 64 << 20).unwrap();
        let parts = NvmeParts {
            device: open(&segments, engine).unwrap(),
            index: Arc::new(index),
            namespaces: Arc::clone(&fixture.namespaces),
            metrics: NvmeMetrics::register(&mut Registry::default()),
        };
        let config = NvmeConfig {
            capacity_bytes: sizes.capacity_bytes,
            segment_bytes: 256 << 20,
            blocks_max: u64::MAX,
            daily_write_bytes: 0,
            store: [1; 16],
            seed: 1,
        };
        let (store, writer) = NvmeStore::new(config, parts).unwrap();
        let namespace = fixture.namespace("bench", &[sizes.block_bytes]).unwrap();
        let runtime = tokio::runtime::Handle::current();
        let writer = thread::spawn(move || runtime.block_on(writer.run()));
        let arena = Arena::new(sizes.arena_bytes).unwrap();
        // A server touches its memory ahead of need.
        let mut all: Vec<_> = std::iter::from_fn(|| arena.writer(sizes.block_bytes)).collect();
        all.iter_mut().for_each(|writer| writer.bytes_mut().fill(1));
        drop(all);
        Self { store, arena, namespace, writer: Some(writer) }
    }

    pub(crate) async fn put(&self, number: u64, payload: Payload, urgency: Urgency) -> Location {
        let block = Outgoing {
            namespace: Arc::clone(&self.namespace),
            hash: hash_of(number),
            payload,
            checksums: Checksums::One(number),
            urgency,
            reused: true,
        };
        self.store.put(block).await.unwrap()
    }

    pub(crate) async fn get(&self, number: u64, location: Location, len: u32) {
        let into = self.arena.writer(len).unwrap();
        let wanted = Wanted { namespace: *self.namespace.id(), hash: hash_of(number), location };
        let load = self.store.get(wanted, into).await.unwrap();
        assert!(matches!(load, Load::Hit(_)), "{load:?}");
    }

    /// Ends it well.
    pub(crate) async fn stop(mut self) {
        self.store.close().await.unwrap();
        self.writer.take().unwrap().join().unwrap();
    }
}
