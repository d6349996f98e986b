//! The index in RocksDB.
//!
//! One column family; keys and values are those of `codec`. A group is one write batch: one record
//! of the write-ahead log, which is handed to the kernel before the call returns and never synced by
//! us. So a group survives the end of the process, and a loss of power costs the latest groups only:
//! recovery stops at the first record that is torn, and each log names the end of the log before it,
//! so that a lost tail of an older one is noticed when a newer one survived.
//!
//! What RocksDB writes for one block of one part: 98 bytes to the log, 76 when the memtable is
//! flushed, 76 for each compaction that the entry goes through. Hashes are random, so every
//! compaction touches everything, and levels of a fixed ratio would rewrite an entry ten times or
//! more. Here runs are merged by size, sixteen at a time (`compaction`): an entry is rewritten about
//! once until there are over a hundred memtables of entries, which makes 256 bytes in all. A removal
//! adds 66 bytes in the log and 45 in a table: a block that was put and removed has cost 300 to 400,
//! less where the entry has not been rewritten before its removal meets it. The price is room: up to
//! sixteen runs, besides the large one, of which parts are garbage.
//!
//! What was described of a block is a pair of its own, behind all blocks: 65 bytes and what was said, each
//! time that it is written. Only where there are any does a removal take two keys.
//!
//! A damaged file is found by its checksums and is an error of kind `InvalidData`. A disk that is
//! full makes RocksDB refuse all writes until it is opened again ([`Index::reopen`]).
//!
//! Why not a file of our own: ordered, compact and crash-safe at once is what RocksDB is.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use parking_lot::RwLock;
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, DBRecoveryMode, LogLevel, Options,
    ReadOptions, UniversalCompactOptions, WriteBatch, WriteBufferManager, WriteOptions,
    properties::{BLOCK_CACHE_USAGE, ESTIMATE_TABLE_READERS_MEM},
};

use super::{
    Change, Index, IndexEntry, IndexKey, IndexUsage, Known,
    codec::{DESCRIPTIONS, Edit, FIRST, FORMAT, Key, MARKER, decode, decode_entry},
};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The least memory that it works with.
const MEMORY_BYTES_MIN: usize = 4 * MIB;
/// The largest memtable: half a million entries. A larger one saves compactions, but after a crash
/// all of it is replayed, at about a million entries a second.
const MEMTABLE_BYTES_MAX: usize = 64 * MIB;
/// How many runs there are before some are merged: see the module's head.
const RUNS_MAX: i32 = 16;
/// When the garbage in the newer runs may be four times what the oldest one has, all are merged into
/// one. Lower would rewrite a growing index once more, higher would keep more of what is gone.
const GARBAGE_PERCENT_MAX: i32 = 400;
/// Files open at most: 64 MiB each, so 16 GiB of index without opening any of them twice.
const OPEN_FILES_MAX: i32 = 256;
/// How much is read ahead when all is loaded.
const LOAD_AHEAD_BYTES: usize = 2 * MIB;
/// The file without which RocksDB takes a directory for empty.
const CURRENT: &str = "CURRENT";

/// The index in a directory of its own.
pub struct RocksIndex {
    directory: PathBuf,
    options: Options,
    /// Nothing after a failure to open it again.
    db: RwLock<Option<DB>>,
    /// There may be descriptions.
    describes: AtomicBool,
}

impl fmt::Debug for RocksIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RocksIndex({})", self.directory.display())
    }
}

impl RocksIndex {
    /// Opens the index in `directory`, or makes an empty one. It holds `memory_bytes` (at least
    /// 4 MiB) for memtables and cached blocks; the directory should be its own.
    ///
    /// # Errors
    /// `InvalidData` if there is one of a newer version, another database, or a damaged one;
    /// `StorageFull`; others as the system has them, with what was being done.
    pub fn open(directory: &Path, memory_bytes: u64) -> io::Result<Self> {
        Self::open_with(directory, options(memory_bytes)?)
    }

    fn open_with(directory: &Path, options: Options) -> io::Result<Self> {
        let db = open_database(directory, &options)?;
        let describes = AtomicBool::new(has_descriptions(&db)?);
        Ok(Self { directory: directory.to_owned(), options, db: RwLock::new(Some(db)), describes })
    }

    /// Whether there is an index in `directory`, in whatever state.
    #[must_use]
    pub fn exists(directory: &Path) -> bool {
        directory.join(CURRENT).is_file()
    }

    /// Deletes the index in `directory`, which must not be open. Files of others stay.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn destroy(directory: &Path) -> io::Result<()> {
        // Without this file the rest is taken for nothing, however far the deletion came.
        match fs::remove_file(directory.join(CURRENT)) {
            Ok(()) => fs::File::open(directory)?.sync_all()?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        DB::destroy(&Options::default(), directory).map_err(|error| failed("delete index", &error))
    }

    fn with<T>(&self, work: impl FnOnce(&DB) -> io::Result<T>) -> io::Result<T> {
        let db = self.db.read();
        let closed = || io::Error::other("index: closed after a failure to open it again");
        work(db.as_ref().ok_or_else(closed)?)
    }
}

impl Index for RocksIndex {
    fn apply(&self, changes: &[Change]) -> io::Result<()> {
        let mut batch = WriteBatch::default();
        let mut scratch = Vec::new();
        if changes.iter().any(|change| matches!(change, Change::Describe(..))) {
            // Relaxed: whoever removes a block has seen it described, or nobody has.
            self.describes.store(true, Ordering::Relaxed);
        }
        for change in changes {
            match Edit::of(change, &mut scratch) {
                Edit::Put(key, value) => batch.put(key, value),
                Edit::Delete(key) => batch.delete(key),
                Edit::DeleteBlock(block, description) => {
                    batch.delete(block);
                    if self.describes.load(Ordering::Relaxed) {
                        batch.delete(description);
                    }
                }
            }
        }
        self.with(|db| {
            db.write_opt(batch, &write_options()).map_err(|error| failed("write index", &error))
        })
    }

    fn get(&self, key: &IndexKey) -> io::Result<Option<IndexEntry>> {
        self.with(|db| {
            let value =
                db.get_pinned(Key::block(key)).map_err(|error| failed("read index", &error))?;
            Ok(value.and_then(|value| decode_entry(&value)))
        })
    }

    fn load(&self, visit: &mut dyn FnMut(Known) -> io::Result<()>) -> io::Result<u64> {
        self.with(|db| {
            let mut passed_over = 0;
            let mut reading = ReadOptions::default();
            reading.set_readahead_size(LOAD_AHEAD_BYTES);
            // Everything is read once: it would only drive out the filters.
            reading.fill_cache(false);
            let mut pairs = db.raw_iterator_opt(reading);
            pairs.seek(FIRST);
            while let Some((key, value)) = pairs.item() {
                match decode(key, value) {
                    Some(known) => visit(known)?,
                    None => passed_over += 1,
                }
                pairs.next();
            }
            // An iterator ends at an error as it does at the end.
            pairs.status().map_err(|error| failed("load index", &error))?;
            Ok(passed_over)
        })
    }

    fn clear(&self) -> io::Result<()> {
        let mut db = self.db.write();
        drop(db.take());
        Self::destroy(&self.directory)?;
        *db = Some(open_database(&self.directory, &self.options)?);
        Ok(())
    }

    fn reopen(&self) -> io::Result<()> {
        let mut db = self.db.write();
        drop(db.take());
        *db = Some(open_database(&self.directory, &self.options)?);
        Ok(())
    }

    fn usage(&self) -> IndexUsage {
        let property = |db: &DB, name| db.property_int_value(name).ok().flatten().unwrap_or(0);
        // The memtables are charged to the cache.
        let memory = self.with(|db| {
            Ok(property(db, BLOCK_CACHE_USAGE) + property(db, ESTIMATE_TABLE_READERS_MEM))
        });
        IndexUsage {
            disk_bytes: directory_bytes(&self.directory).unwrap_or(0),
            memory_bytes: memory.unwrap_or(0),
        }
    }
}

/// The properties know tables only; the log is as large as they are at first.
fn directory_bytes(directory: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for file in fs::read_dir(directory)? {
        // One that was deleted meanwhile has none.
        bytes += file?.metadata().map_or(0, |metadata| metadata.len());
    }
    Ok(bytes)
}

fn open_database(directory: &Path, options: &Options) -> io::Result<DB> {
    fs::create_dir_all(directory)?;
    if !directory.join(CURRENT).try_exists()? {
        // What is left of an interrupted deletion would be replayed into the new one.
        RocksIndex::destroy(directory)?;
        fs::create_dir_all(directory)?;
    }
    let db = DB::open(options, directory).map_err(|error| failed("open index", &error))?;
    check_marker(&db)?;
    Ok(db)
}

fn has_descriptions(db: &DB) -> io::Result<bool> {
    let mut pairs = db.raw_iterator();
    pairs.seek(DESCRIPTIONS);
    pairs.status().map_err(|error| failed("read index", &error))?;
    Ok(pairs.valid())
}

fn check_marker(db: &DB) -> io::Result<()> {
    let wrong = |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, what));
    let found = db.get(MARKER).map_err(|error| failed("read index format", &error))?;
    match found.map(<[u8; 4]>::try_from) {
        Some(Ok(bytes)) if bytes == FORMAT.to_le_bytes() => Ok(()),
        Some(Ok(bytes)) => wrong(format!(
            "index format {}: this version reads {FORMAT}",
            u32::from_le_bytes(bytes)
        )),
        Some(Err(bytes)) => {
            wrong(format!("index format: {} bytes found, exactly 4 required", bytes.len()))
        }
        None => {
            let mut any = db.raw_iterator();
            any.seek_to_first();
            any.status().map_err(|error| failed("read index format", &error))?;
            if any.valid() {
                return wrong("index format: none in a database that is not empty".to_owned());
            }
            db.put_opt(MARKER, FORMAT.to_le_bytes(), &write_options())
                .map_err(|error| failed("write index format", &error))
        }
    }
}

fn write_options() -> WriteOptions {
    let mut options = WriteOptions::default();
    options.set_sync(false);
    options.disable_wal(false);
    options
}

/// Half of the memory may be memtables, one that is written and one that is being flushed; the rest
/// is blocks, indexes and filters of tables. All of it is charged to one cache.
fn options(memory_bytes: u64) -> io::Result<Options> {
    let memory = usize::try_from(memory_bytes).unwrap_or(usize::MAX).max(MEMORY_BYTES_MIN);
    let cache = Cache::new_lru_cache(memory);
    // The bindings have no setter for this one: each log names the end of the log before it.
    let mut options = Options::default()
        .get_options_from_string("track_and_verify_wals=true")
        .map_err(|error| failed("set up index", &error))?;
    options.create_if_missing(true);
    options.set_wal_recovery_mode(DBRecoveryMode::PointInTime);
    options.set_write_buffer_manager(&WriteBufferManager::new_write_buffer_manager_with_cache(
        memory / 2,
        false,
        cache.clone(),
    ));
    options.set_write_buffer_size((memory / 4).min(MEMTABLE_BYTES_MAX));
    options.set_max_write_buffer_number(2);
    options.set_block_based_table_factory(&tables(&cache));
    options.set_compression_type(DBCompressionType::None);
    options.set_max_open_files(OPEN_FILES_MAX);
    options.set_max_background_jobs(2);
    // Dirty pages leave as they come, not all at once when a table is finished.
    options.set_bytes_per_sync(1 << 20);
    compaction(&mut options);
    quiet(&mut options);
    Ok(options)
}

fn tables(cache: &Cache) -> BlockBasedOptions {
    let mut tables = BlockBasedOptions::default();
    tables.set_block_cache(cache);
    tables.set_cache_index_and_filter_blocks(true);
    // Larger than usual: half of the index blocks, and single entries are seldom read.
    tables.set_block_size(16 * KIB);
    // 1 in 100 absent keys reads a block of a run.
    tables.set_bloom_filter(10.0, false);
    tables
}

/// Runs are merged by size, and only when there are many: see the module's head.
fn compaction(options: &mut Options) {
    let mut universal = UniversalCompactOptions::default();
    universal.set_max_size_amplification_percent(GARBAGE_PERCENT_MAX);
    options.set_compaction_style(rocksdb::DBCompactionStyle::Universal);
    options.set_universal_compaction_options(&universal);
    options.set_level_zero_file_num_compaction_trigger(RUNS_MAX);
    options.set_level_zero_slowdown_writes_trigger(3 * RUNS_MAX);
    options.set_level_zero_stop_writes_trigger(4 * RUNS_MAX);
    options.set_target_file_size_base(64 << 20);
    // Age alone is no reason to write an entry again.
    options.set_periodic_compaction_seconds(0);
    options.set_ttl(0);
}

/// No statistics, a small log with what went wrong, a small manifest.
fn quiet(options: &mut Options) {
    options.set_log_level(LogLevel::Warn);
    options.set_keep_log_file_num(2);
    options.set_max_log_file_size(MIB);
    options.set_max_manifest_file_size(4 * MIB);
    options.set_stats_dump_period_sec(0);
    options.set_stats_persist_period_sec(0);
    options.set_skip_stats_update_on_db_open(true);
}

/// The kind says what may help: room, a new index, or nothing that is known.
fn failed(doing: &str, error: &rocksdb::Error) -> io::Error {
    use rocksdb::ErrorKind::{Corruption, IOError, NotSupported};
    let text: &str = error.as_ref();
    let says = |what: &[&str]| what.iter().any(|what| text.contains(what));
    let kind = match error.kind() {
        Corruption | NotSupported => io::ErrorKind::InvalidData,
        IOError if says(&["No space left", "Disk quota exceeded"]) => io::ErrorKind::StorageFull,
        // The directory was made before: what is missing is a part of the database.
        IOError if says(&["No such file"]) => io::ErrorKind::InvalidData,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, format!("{doing}: {text}"))
}

#[cfg(test)]
mod tests;
