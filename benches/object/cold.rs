//! How soon does the first block of a long prefix come from nvme and from the object store over the bulk
//! port, and how fast does the rest follow?
//!
//! A real node with a dram that holds an eighth of its blocks; prefixes of 64 blocks of 2 MiB, each read
//! once from each tier. Floors in turn with them: as many plain reads of 2 MiB, eight at once, with
//! `O_DIRECT` of the tier's own files, and by `object_store` of its own packs (a directory as the
//! bucket, so that both read from the page cache). Not measured: a bucket behind a network.
//!
//! ```text
//! cargo bench --profile dev --bench cold
//! ```
//! Table: benches/README.md.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a bench prints its table and fails by panicking"
)]

#[path = "../../integration/harness.rs"]
#[allow(dead_code, reason = "shared with the integration tests, which use all of it")]
mod harness;
#[path = "../bulk/setup.rs"]
mod setup;
#[path = "../support/mod.rs"]
mod support;

use std::{
    fs::{self, File, OpenOptions},
    ops::Range,
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::{Path as FilePath, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use harness::{Server, wait_until};
use kvstrata::client::{FetchedBlock, GetOptions, GetSink, Handle, MissReason, Path};
use kvstrata_tiers::tier::Tier;
use object_store::{ObjectStore, ObjectStoreExt, local::LocalFileSystem};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use setup::{connect, list, open, put};
use support::median;
use tokio::time::Instant;

const BLOCK: usize = 2 << 20;
const BLOCKS: u64 = 512;
/// Blocks of a prefix.
const PREFIX: u64 = 64;
/// Prefixes that are read: what the last segments hold is in no pack.
const PREFIXES: u64 = 6;
/// Plain reads at once.
const AT_ONCE: usize = 8;
/// What direct I/O is aligned to.
const PAGE: usize = 4096;

#[tokio::main]
async fn main() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let home = directory.path();
    let (nvme, bucket) = (home.join("nvme"), home.join("bucket"));
    fs::create_dir(&bucket).unwrap();
    let server = node(home, &nvme, &bucket).await;
    let handle = fill(&server).await;
    let files = files(&nvme);
    report("nvme", &handle, Tier::Nvme, async |round| direct(&files, round)).await;
    wait_until("all packs are named", Duration::from_secs(300), async || {
        let made = server.metric("kvstrata_object_packs_made_total").await;
        let packed = server.metric("kvstrata_object_packed_blocks_total").await;
        packed >= (PREFIX * PREFIXES) as f64
            && server.metric("kvstrata_object_named_packs_total").await >= made
    })
    .await;
    server.kill();
    fs::remove_dir_all(&nvme).unwrap();
    let server = node(home, &nvme, &bucket).await;
    wait_until("the packs are found", Duration::from_secs(60), async || {
        server.metric("kvstrata_object_blocks").await >= (PREFIX * PREFIXES) as f64
    })
    .await;
    let client = connect(&server, Path::Bulk).await;
    let handle = open(&client, "cold", BLOCK as u32).await;
    let store: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new_with_prefix(&bucket).unwrap());
    let packs: Vec<_> = store.list(None).try_collect().await.unwrap();
    let packs: Vec<_> = packs.into_iter().filter(|pack| pack.size > 8 * BLOCK as u64).collect();
    report("object", &handle, Tier::Object, async |round| {
        let (start, first) = (Instant::now(), AtomicUsize::new(0));
        let reads = (0..PREFIX as usize).map(|at| {
            let pack = &packs[(round * 8 + at / 8) % packs.len()];
            let offset = ((at % 8) * BLOCK) as u64;
            let (store, path) = (Arc::clone(&store), pack.location.clone());
            let (first, start) = (&first, start);
            async move {
                let read = store.get_range(&path, offset..offset + BLOCK as u64).await.unwrap();
                assert_eq!(read.len(), BLOCK);
                if at == 0 {
                    first.store(start.elapsed().as_micros() as usize, Ordering::Relaxed);
                }
            }
        });
        stream::iter(reads).buffered(AT_ONCE).collect::<Vec<()>>().await;
        Read { first: first.load(Ordering::Relaxed) as f64 / 1e3, all: start.elapsed() }
    })
    .await;
    server.kill();
}

async fn node(home: &FilePath, nvme: &FilePath, bucket: &FilePath) -> Server {
    Server::builder()
        .home(home)
        .dram("128MiB")
        .set("memory.limit", "1GiB")
        .set("nvme.path", nvme.to_str().unwrap())
        .set("nvme.capacity", "4GiB")
        .set("nvme.daily_writes", "none")
        .set("object.url", &format!("file://{}", bucket.display()))
        .set("object.admission", "all")
        .start()
        .await
}

/// Puts all blocks on nvme: bytes that do not compress.
async fn fill(server: &Server) -> Handle {
    let client = connect(server, Path::Bulk).await;
    let handle = open(&client, "cold", BLOCK as u32).await;
    let session = client.session("bench").await.unwrap();
    let mut value = vec![0; BLOCK];
    ChaCha8Rng::seed_from_u64(7).fill_bytes(&mut value);
    let value = Bytes::from(value);
    for first in (0..BLOCKS).step_by(16) {
        assert_eq!(put(&handle, &session, first..first + 16, &value, true).await, 16);
    }
    handle
}

/// How long until the first block was there, in milliseconds, and until all were.
struct Read {
    first: f64,
    all: Duration,
}

/// Takes note of when the first block came.
struct First {
    start: Instant,
    first: Option<f64>,
}

impl GetSink for First {
    fn block(&mut self, block: FetchedBlock<'_>) {
        assert_eq!(block.len(), BLOCK);
        let start = self.start;
        self.first.get_or_insert_with(|| start.elapsed().as_secs_f64() * 1e3);
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        panic!("{positions:?}: {reason:?}");
    }
}

/// Reads the prefixes from a tier, each after the floor's reads; prints both.
async fn report(name: &str, handle: &Handle, tier: Tier, floor: impl AsyncFn(usize) -> Read) {
    let (mut floors, mut ours) = (Vec::new(), Vec::new());
    for round in 0..PREFIXES {
        floors.push(floor(round as usize).await);
        let mut sink = First { start: Instant::now(), first: None };
        let hashes = list(round * PREFIX..(round + 1) * PREFIX);
        let got = handle.get(&hashes, GetOptions::default(), &mut sink).await.unwrap();
        let cold = if tier == Tier::Nvme { got.nvme } else { got.object };
        assert!(cold * 10 >= PREFIX * 9, "{cold} of {PREFIX} blocks from {name}");
        ours.push(Read { first: sink.first.unwrap(), all: sink.start.elapsed() });
    }
    let gigabytes = PREFIX as f64 * BLOCK as f64 / 1e9;
    for (who, reads) in [("floor", floors), ("ours", ours)] {
        let first = median(reads.iter().map(|read| read.first));
        let all = median(reads.iter().map(|read| read.all.as_secs_f64()));
        let last = reads.iter().map(|read| read.first).fold(0.0, f64::max);
        println!(
            "{name:>8} {who:>6}: first of {PREFIX} blocks after {first:.2} ms (most {last:.2}), \
             {:.2} GB/s",
            gigabytes / all
        );
    }
}

/// The files of the tier that hold blocks.
fn files(directory: &FilePath) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).unwrap().flatten() {
        let metadata = entry.metadata().unwrap();
        if metadata.is_dir() {
            files.extend(self::files(&entry.path()));
        } else if metadata.len() > 8 * BLOCK as u64 {
            files.push(entry.path());
        }
    }
    files.sort();
    files
}

/// Plain direct reads of as many blocks, by [`AT_ONCE`] threads.
fn direct(files: &[PathBuf], round: usize) -> Read {
    const DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    let open =
        |path: &PathBuf| OpenOptions::new().read(true).custom_flags(DIRECT).open(path).unwrap();
    let opened: Vec<File> = files.iter().map(open).collect();
    let per_file = files.iter().map(|file| fs::metadata(file).unwrap().len()).min().unwrap();
    let per_file = per_file as usize / BLOCK;
    let (next, first) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                let mut room = vec![0; BLOCK + PAGE];
                let skip = room.as_ptr().align_offset(PAGE);
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= PREFIX as usize {
                        return;
                    }
                    let block = round * PREFIX as usize + at;
                    let file = &opened[block / per_file % opened.len()];
                    let offset = (block % per_file * BLOCK) as u64;
                    file.read_exact_at(&mut room[skip..skip + BLOCK], offset).unwrap();
                    if at == 0 {
                        first.store(start.elapsed().as_micros() as usize, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    Read { first: first.load(Ordering::Relaxed) as f64 / 1e3, all: start.elapsed() }
}
