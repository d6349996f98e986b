//! A restart with a million blocks.

use std::{path::Path, sync::Arc};

use futures_util::{StreamExt, stream};
use kvstrata_tiers::{
    nvme::{
        NvmeConfig, NvmeMetrics, NvmeParts, NvmeStore,
        device::{Engine, open},
        index::RocksIndex,
    },
    store::{BlockStore, Urgency},
    testing::Fixture,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use super::{
    support::rss_bytes,
    tier::{Bench, Sizes, directory},
};

const BLOCKS: u64 = 1_000_000;
const BLOCK: u32 = 16 << 10;

pub(crate) async fn of_a_million_blocks() {
    let directory = directory();
    let sizes = Sizes { capacity_bytes: 32 << 30, block_bytes: BLOCK, arena_bytes: 256 << 20 };
    let bench = Bench::start(directory.path(), Engine::Auto, &sizes);
    let block = bench.arena.sealed(&vec![9; BLOCK as usize]).unwrap();
    let started = Instant::now();
    let puts = (0..BLOCKS).map(|number| bench.put(number, block.clone(), Urgency::Background));
    stream::iter(puts).buffered(900).for_each(async |_| {}).await;
    println!(
        "{BLOCKS} blocks of {BLOCK} bytes appended in {:.0} s",
        started.elapsed().as_secs_f64()
    );
    let stored = bench.store.usage().used_bytes;
    // Not closed: as a kill would leave it.
    drop(bench);
    restart(directory.path(), &sizes, stored).await;
}

async fn restart(directory: &Path, sizes: &Sizes, stored: u64) {
    let memory = rss_bytes();
    let read_before = bytes_read();
    let started = Instant::now();
    let index = Arc::new(RocksIndex::open(&directory.join("index"), 64 << 20).unwrap());
    let config = NvmeConfig {
        capacity_bytes: sizes.capacity_bytes,
        segment_bytes: 256 << 20,
        blocks_max: u64::MAX,
        daily_write_bytes: 0,
        store: [1; 16],
        seed: 2,
    };
    let fixture = Fixture::new(1 << 20, Vec::new()).unwrap();
    let parts = NvmeParts {
        device: open(&directory.join("segments"), Engine::Auto).unwrap(),
        index: Arc::<RocksIndex>::clone(&index),
        namespaces: Arc::clone(&fixture.namespaces),
        metrics: NvmeMetrics::register(&mut Registry::default()),
    };
    let (store, writer) = NvmeStore::new(config, parts).unwrap();
    let cold: Vec<Arc<dyn BlockStore>> = vec![Arc::<NvmeStore>::clone(&store)];
    let stack = Fixture::over(1 << 20, 2 * BLOCKS, cold, fixture.namespaces).unwrap();
    let runtime = tokio::runtime::Handle::current();
    let writing = std::thread::spawn(move || runtime.block_on(writer.run()));
    let found = store.recovered().await.unwrap();
    let elapsed = started.elapsed();
    let read = bytes_read() - read_before;
    let usage = kvstrata_tiers::nvme::index::Index::usage(index.as_ref());
    println!(
        "restart after a kill: {} blocks ready in {:.2} s",
        found.blocks,
        elapsed.as_secs_f64()
    );
    println!(
        "bytes read {} MiB of {} MiB stored: {:.2} %",
        read >> 20,
        stored >> 20,
        read as f64 / stored as f64 * 100.0
    );
    println!(
        "index on disk {} B a block, memory of map and index {} B a block",
        usage.disk_bytes / BLOCKS,
        (rss_bytes() - memory) / BLOCKS
    );
    assert_eq!(found.blocks, BLOCKS);
    assert!(read * 100 < stored, "a restart reads less than 1 % of what is stored");
    drop(stack);
    store.close().await.unwrap();
    writing.join().unwrap();
}

/// Bytes that this process has read: by calls, whether from the disk or the page cache, and from the
/// disk by io_uring, which the calls do not count. What is counted twice makes it an upper bound.
fn bytes_read() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap();
    let field = |name| io.lines().find_map(|line| line.strip_prefix(name)?.parse::<u64>().ok());
    field("rchar: ").unwrap() + field("read_bytes: ").unwrap()
}
