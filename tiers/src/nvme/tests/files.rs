//! Real files that are cut, emptied, exchanged, lost, or somebody else's, with the index intact and
//! lost; and an index whose own files are damaged.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::rig::{MANY, Rig, open_index};
use crate::nvme::{
    DamageLabel,
    device::{Device, Engine, open},
    format::{FORMAT_VERSION, checksum},
    verify::What,
};

struct Disk {
    _directory: tempfile::TempDir,
    segments: PathBuf,
    index: PathBuf,
}

impl Disk {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (segments, index) = (directory.path().join("segments"), directory.path().join("index"));
        fs::create_dir(&segments).unwrap();
        Self { _directory: directory, segments, index }
    }

    /// A disk with blocks `0..MANY` in sealed segments.
    async fn filled() -> Self {
        let disk = Self::new();
        disk.rig().await.fill().await;
        disk
    }

    async fn rig(&self) -> Rig {
        let device = open(&self.segments, Engine::Pread).unwrap();
        Rig::on(device, open_index(&self.index).await)
    }

    /// Drops all that the index knows.
    async fn lose_index(&self) {
        open_index(&self.index).await.clear().unwrap();
    }

    fn segment(&self, number: u64) -> PathBuf {
        self.segments.join(format!("{number:016x}.seg"))
    }

    /// Which blocks are in a segment.
    async fn blocks_in(&self, number: u64) -> BTreeSet<u64> {
        let rig = self.rig().await;
        let mut blocks = BTreeSet::new();
        for block in 0..MANY {
            if rig.page_of(block).await.0.0 == number {
                blocks.insert(block);
            }
        }
        blocks
    }
}

/// Sets the version of the first page to one that is to come.
fn make_newer(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[8..10].copy_from_slice(&(FORMAT_VERSION + 1).to_le_bytes());
    let sum = checksum(&bytes[..56]);
    bytes[56..64].copy_from_slice(&sum.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

/// Makes the first page that of another store.
fn make_foreign(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[32..48].copy_from_slice(&[9; 16]);
    let sum = checksum(&bytes[..56]);
    bytes[56..64].copy_from_slice(&sum.to_le_bytes());
    fs::write(path, bytes).unwrap();
}

/// A way to damage segment 2, what it is called, and whether the file must stay as it is.
type Case = (&'static str, fn(&Disk), What, bool);

const CASES: [Case; 7] = [
    ("cut", |disk| cut(&disk.segment(2), 100_000), What::Truncated, false),
    ("empty", |disk| cut(&disk.segment(2), 0), What::Truncated, false),
    ("missing", |disk| fs::remove_file(disk.segment(2)).unwrap(), What::Missing, false),
    ("newer", |disk| make_newer(&disk.segment(2)), What::Stranger, true),
    ("foreign", |disk| make_foreign(&disk.segment(2)), What::Stranger, true),
    ("exchanged", exchange, What::Stranger, true),
    (
        "other",
        |disk| fs::write(disk.segment(2), vec![7; 50_000]).unwrap(),
        What::SegmentHeader,
        false,
    ),
];

fn cut(path: &Path, bytes: u64) {
    fs::OpenOptions::new().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn exchange(disk: &Disk) {
    let other = disk.segments.join("other");
    fs::rename(disk.segment(2), &other).unwrap();
    fs::rename(disk.segment(3), disk.segment(2)).unwrap();
    fs::rename(other, disk.segment(3)).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_segment_that_is_not_what_it_was_costs_its_blocks() {
    for (name, damage, what, stays) in CASES {
        for lost in [false, true] {
            let disk = Disk::filled().await;
            let mut hit = disk.blocks_in(2).await;
            if name == "exchanged" {
                hit.extend(disk.blocks_in(3).await);
            }
            damage(&disk);
            let left = fs::read(disk.segment(2)).ok();
            if lost {
                disk.lose_index().await;
            }
            let rig = disk.rig().await;
            if !lost {
                let report = rig.verify().await;
                assert!(report.problems.iter().any(|p| p.what == what), "{name}: {report}");
            }
            let life = rig.start().await;
            let gone: BTreeSet<u64> = life.lost().await.into_iter().collect();
            // Of the one that is cut, the blocks before the cut are there.
            let partly = name == "cut" && gone.len() < hit.len() && gone.is_subset(&hit);
            assert!(gone == hit || partly, "{name}, index lost {lost}: {gone:?} of {hit:?}");
            let metrics = life.metrics();
            let counted = metrics.damaged(DamageLabel::Segment).get()
                + metrics.damaged(DamageLabel::Header).get()
                + metrics.stale_entries.get();
            assert!(counted > 0 || lost, "{name}: counted");
            let again = life.works(&rig).await;
            let still: BTreeSet<u64> = again.lost().await.into_iter().collect();
            assert_eq!(still, gone, "{name}");
            if stays {
                assert!(fs::read(disk.segment(2)).ok() == left, "{name} is left alone");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_version_keeps_its_number_and_its_file() {
    let disk = Disk::filled().await;
    let before = disk.rig().await.device.list().unwrap();
    let last = before.last().unwrap().0.0;
    make_newer(&disk.segment(last));
    disk.lose_index().await;
    let rig = disk.rig().await;
    let life = rig.start().await;
    assert!(life.hits(0..MANY).await.len() >= 36);
    life.works(&rig).await;
    let after = rig.device.list().unwrap();
    assert!(after.iter().any(|(id, _)| id.0 == last) && after.iter().any(|(id, _)| id.0 > last));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_an_impossible_number_is_left_alone() {
    for number in [1 << 46, u64::MAX] {
        let disk = Disk::filled().await;
        fs::write(disk.segment(number), vec![0; 8192]).unwrap();
        let rig = disk.rig().await;
        let life = rig.start().await;
        assert_eq!(life.lost().await, Vec::<u64>::new());
        life.works(&rig).await;
        assert!(disk.segment(number).exists());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_file_of_the_index_costs_no_block() {
    // The first start after the filling flushes nothing: all is in the log, unless it is opened again.
    for (extension, opened) in [("log", 0), ("sst", 2), ("log", 2)] {
        let disk = Disk::filled().await;
        for _ in 0..opened {
            disk.rig().await.start().await.put(1000..1003).await;
        }
        let files = fs::read_dir(&disk.index).unwrap().map(|file| file.unwrap().path());
        let files: Vec<_> =
            files.filter(|path| path.extension().is_some_and(|e| e == extension)).collect();
        assert!(!files.is_empty(), "{extension}");
        for path in files {
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.len() / 3;
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 4;
            }
            fs::write(&path, bytes).unwrap();
        }
        let rig = disk.rig().await;
        let life = rig.start().await;
        assert_eq!(life.lost().await, Vec::<u64>::new(), "{extension}");
        let again = life.works(&rig).await;
        assert_eq!(again.lost().await, Vec::<u64>::new(), "{extension}");
    }
}
