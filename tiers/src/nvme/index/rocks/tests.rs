//! The contract on a real directory; crashes, damage, other versions; what it costs.

use std::{
    collections::BTreeSet,
    fs::{self, File},
};

use rocksdb::statistics::Ticker;
use tempfile::{TempDir, tempdir};

use super::*;
use crate::{
    nvme::device::SegmentId,
    testing::index_suite::{self, Contents, entry_of, key_of, put},
};

const MEMORY: u64 = 16 << 20;

fn open(directory: &Path) -> RocksIndex {
    RocksIndex::open(directory, MEMORY).unwrap()
}

fn flush(index: &RocksIndex) {
    index.with(|db| db.flush().map_err(io::Error::other)).unwrap();
}

/// What a process that is killed now would leave.
fn killed(directory: &Path) -> TempDir {
    let copy = tempdir().unwrap();
    for file in fs::read_dir(directory).unwrap() {
        let path = file.unwrap().path();
        match fs::copy(&path, copy.path().join(path.file_name().unwrap())) {
            // Deleted in the background, as no longer needed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            copied => assert!(copied.is_ok(), "{copied:?}"),
        }
    }
    copy
}

fn files(directory: &Path, ending: &str) -> Vec<PathBuf> {
    let all = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    let mut found: Vec<_> = all.filter(|path| path.to_str().unwrap().ends_with(ending)).collect();
    found.sort();
    found
}

fn truncate(path: &Path, len: u64) {
    File::options().write(true).open(path).unwrap().set_len(len).unwrap();
}

/// Group `number` of a history: a new block, and how many there are, in two other places.
fn group(number: u64) -> [Change; 3] {
    let indexed = Change::Indexed { segment: SegmentId(1), generation: 1, bytes: number };
    [put(number, 1), put(0, number), indexed]
}

/// How many groups of the history there are; they must be the first ones, and whole.
fn groups_kept(index: &RocksIndex) -> u64 {
    let contents = Contents::of(index).unwrap();
    let kept = contents.segments.first().map_or(0, |(_, _, bytes)| *bytes);
    let numbers = (1..=kept).map(|number| (key_of(number), entry_of(number, 1)));
    let count = (kept > 0).then(|| (key_of(0), entry_of(0, kept)));
    let mut expected: Vec<_> = numbers.chain(count).collect();
    expected.sort_unstable_by_key(|(key, _)| *key);
    assert_eq!(contents.blocks, expected, "{kept} groups");
    kept
}

#[test]
fn keeps_the_contract() {
    let directory = tempdir().unwrap();
    index_suite::run(&open(directory.path()), |index, key, value| {
        index.with(|db| db.put(key, value).map_err(io::Error::other)).unwrap();
    });
}

#[test]
fn the_end_of_the_process_loses_nothing() {
    let directory = tempdir().unwrap();
    let index = open(directory.path());
    (1..=100).for_each(|number| index.apply(&group(number)).unwrap());
    assert_eq!(groups_kept(&open(killed(directory.path()).path())), 100);
    flush(&index);
    (101..=150).for_each(|number| index.apply(&group(number)).unwrap());
    assert_eq!(groups_kept(&open(killed(directory.path()).path())), 150);
    drop(index);
    assert_eq!(groups_kept(&open(directory.path())), 150);
}

#[test]
fn a_torn_log_loses_its_tail_only() {
    let directory = tempdir().unwrap();
    let index = open(directory.path());
    (1..=40).for_each(|number| index.apply(&group(number)).unwrap());
    let whole = killed(directory.path());
    let [log] = &files(whole.path(), ".log")[..] else { panic!("one log expected") };
    let (log, len) = (log.file_name().unwrap(), fs::metadata(log).unwrap().len());
    let mut seen = BTreeSet::new();
    for cut in (0..=len).step_by(53).chain([len]) {
        let torn = killed(whole.path());
        truncate(&torn.path().join(log), cut);
        let index = open(torn.path());
        let kept = groups_kept(&index);
        seen.insert(kept);
        // It goes on from there, and what comes is as safe as before.
        index.apply(&group(kept + 1)).unwrap();
        assert_eq!(groups_kept(&open(killed(torn.path()).path())), kept + 1);
    }
    assert!(seen.len() > 35 && seen.first() == Some(&0) && seen.last() == Some(&40), "{seen:?}");
}

#[test]
fn a_hole_between_two_logs_is_not_jumped() {
    let directory = tempdir().unwrap();
    let mut options = options(MEMORY).unwrap();
    // Several small memtables, none of which is flushed: all their logs are needed.
    options.set_write_buffer_size(64 << 10);
    options.set_max_write_buffer_number(16);
    options.set_min_write_buffer_number_to_merge(15);
    let index = RocksIndex::open_with(directory.path(), options).unwrap();
    let mut ends = Vec::new();
    let mut number = 0;
    loop {
        number += 1;
        index.apply(&group(number)).unwrap();
        match &files(directory.path(), ".log")[..] {
            [log] => ends.push(fs::metadata(log).unwrap().len()),
            [_, _, _, ..] => break,
            _ => {}
        }
    }
    let whole = killed(directory.path());
    let logs = files(whole.path(), ".log");
    assert!(logs.len() >= 3 && files(whole.path(), ".sst").is_empty(), "{logs:?}");
    // The tail of the first log is lost exactly between two groups, the later logs are whole.
    for (groups, end) in (1..).zip(&ends[..ends.len() - 1]) {
        let torn = killed(whole.path());
        truncate(&torn.path().join(logs[0].file_name().unwrap()), *end);
        assert_eq!(groups_kept(&open(torn.path())), groups);
    }
}

#[test]
fn other_versions_and_other_databases_are_refused() {
    let refused = |marker: Option<&[u8]>| {
        let directory = tempdir().unwrap();
        let index = open(directory.path());
        index.apply(&[put(1, 1)]).unwrap();
        index
            .with(|db| Ok(marker.map_or_else(|| db.delete(MARKER), |to| db.put(MARKER, to))))
            .unwrap()
            .unwrap();
        drop(index);
        let error = RocksIndex::open(directory.path(), MEMORY).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        // The way out of it.
        RocksIndex::destroy(directory.path()).unwrap();
        assert_eq!(Contents::of(&open(directory.path())).unwrap(), Contents::default());
        error.to_string()
    };
    assert_eq!(refused(Some(&[2, 0, 0, 0])), "index format 2: this version reads 1");
    assert_eq!(refused(Some(&[1])), "index format: 1 bytes found, exactly 4 required");
    assert_eq!(refused(None), "index format: none in a database that is not empty");
}

#[test]
fn an_interrupted_clear_leaves_nothing() {
    let directory = tempdir().unwrap();
    let index = open(directory.path());
    index.apply(&[put(1, 1)]).unwrap();
    flush(&index);
    index.apply(&[put(2, 1)]).unwrap();
    let interrupted = killed(directory.path());
    fs::remove_file(interrupted.path().join(CURRENT)).unwrap();
    fs::write(interrupted.path().join("theirs"), "kept").unwrap();
    assert_eq!(Contents::of(&open(interrupted.path())).unwrap(), Contents::default());
    assert!(interrupted.path().join("theirs").exists());
}

/// A damaged table: each call gives what was put or `InvalidData`.
#[test]
fn a_flipped_byte_in_a_table_gives_no_wrong_entry() {
    let directory = tempdir().unwrap();
    let index = open(directory.path());
    let puts: Vec<_> = (0..300).map(|number| put(number, 1)).collect();
    index.apply(&puts).unwrap();
    flush(&index);
    drop(index);
    let [table] = &files(directory.path(), ".sst")[..] else { panic!("one table expected") };
    let (table, len) = (table.file_name().unwrap(), fs::metadata(table).unwrap().len());
    let (mut refused, mut failed_loads, mut failed_gets) = (0, 0, 0);
    // Every 97th byte, and each of the footer.
    for at in (0..len).step_by(97).chain(len - 60..len) {
        let damaged = killed(directory.path());
        let path = damaged.path().join(table);
        let mut bytes = fs::read(&path).unwrap();
        bytes[usize::try_from(at).unwrap()] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        let index = match RocksIndex::open(damaged.path(), MEMORY) {
            Ok(index) => index,
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {at}: {error}");
                refused += 1;
                continue;
            }
        };
        match Contents::of(&index) {
            Ok(contents) => assert_eq!(contents.blocks.len(), 300, "byte {at}"),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {at}: {error}");
                failed_loads += 1;
            }
        }
        for number in 0..300 {
            match index.get(&key_of(number)) {
                Ok(entry) => assert_eq!(entry, Some(entry_of(number, 1)), "byte {at}"),
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "byte {at}: {error}");
                    failed_gets += 1;
                }
            }
        }
        // However damaged, it can be made empty.
        index.clear().unwrap();
        assert_eq!(Contents::of(&index).unwrap(), Contents::default());
    }
    println!("{refused} not opened, {failed_loads} loads and {failed_gets} gets failed");
    assert!(refused > 0 && failed_loads > 0 && failed_gets > 0);
}

#[test]
fn a_missing_file_is_damage() {
    let directory = tempdir().unwrap();
    let index = open(directory.path());
    index.apply(&[put(1, 1)]).unwrap();
    flush(&index);
    drop(index);
    fs::remove_file(&files(directory.path(), ".sst")[0]).unwrap();
    let error = RocksIndex::open(directory.path(), MEMORY).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
}

#[test]
fn a_second_one_in_the_same_directory_is_refused() {
    let directory = tempdir().unwrap();
    let _first = open(directory.path());
    assert_eq!(
        RocksIndex::open(directory.path(), MEMORY).unwrap_err().kind(),
        io::ErrorKind::Other
    );
}

/// Entries of one part, in groups as the tier makes them.
fn apply_entries(index: &RocksIndex, numbers: std::ops::Range<u64>) {
    let mut groups = numbers.clone().step_by(64).peekable();
    while let Some(first) = groups.next() {
        let last = groups.peek().copied().unwrap_or(numbers.end);
        let indexed = Change::Indexed { segment: SegmentId(1), generation: 1, bytes: last };
        let puts = (first..last).map(|number| {
            Change::Put(
                key_of(number),
                IndexEntry { checksums: crate::map::Checksums::One(number), ..entry_of(number, 1) },
            )
        });
        index.apply(&puts.chain([indexed]).collect::<Vec<_>>()).unwrap();
    }
}

#[test]
fn an_entry_takes_less_than_300_bytes_on_disk() {
    const ENTRIES: u64 = 20_000;
    let directory = tempdir().unwrap();
    let index = open(directory.path());
    let empty = index.usage().disk_bytes;
    apply_entries(&index, 0..ENTRIES);
    let logged = index.usage();
    flush(&index);
    let flushed = index.usage();
    let each = |bytes: u64| bytes as f64 / ENTRIES as f64;
    let written = each(logged.disk_bytes - empty) + each(flushed.disk_bytes - empty);
    println!(
        "bytes a block: {:.1} in the log, {:.1} in tables, {written:.1} written, {:.1} in memory",
        each(logged.disk_bytes - empty),
        each(flushed.disk_bytes - empty),
        each(logged.memory_bytes),
    );
    assert!(written < 300.0, "{written}");
    assert!(logged.memory_bytes < MEMORY, "{logged:?}");
}

/// The same over the life of an index: a hundred memtables, with what compactions write. They get
/// the time that they have in service, where a memtable fills while gigabytes of blocks are written.
#[test]
fn compactions_do_not_write_much() {
    const ENTRIES: u64 = 200_000;
    const MEMTABLE_ENTRIES: u64 = 2000;
    let directory = tempdir().unwrap();
    let mut options = options(MEMORY).unwrap();
    options.enable_statistics();
    let index = RocksIndex::open_with(directory.path(), options).unwrap();
    let settled = rocksdb::WaitForCompactOptions::default();
    for first in (0..ENTRIES).step_by(MEMTABLE_ENTRIES.try_into().unwrap()) {
        apply_entries(&index, first..first + MEMTABLE_ENTRIES);
        flush(&index);
        index.with(|db| db.wait_for_compact(&settled).map_err(io::Error::other)).unwrap();
    }
    let written = |ticker| index.options.get_ticker_count(ticker) as f64 / ENTRIES as f64;
    let [log, flushes, compactions] =
        [Ticker::WalFileBytes, Ticker::FlushWriteBytes, Ticker::CompactWriteBytes].map(written);
    let all = log + flushes + compactions;
    println!("bytes a block: {log:.1} log, {flushes:.1} flushes, {compactions:.1} compactions");
    assert!(flushes > 0.0 && compactions > 0.0, "{flushes} and {compactions}");
    assert!(all < 300.0, "{all}");
}
