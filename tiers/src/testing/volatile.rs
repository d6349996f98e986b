//! A disk in memory that forgets, when the power goes, what was not synced.
//!
//! Every change is volatile until the sync that is made for it: bytes and lengths until the segment
//! is synced, names until the directory is. [`VolatileDevice::crash`] keeps, drops or tears each
//! volatile change for itself, so a later one may survive an earlier one; a page is torn into
//! sectors of [`SECTOR_BYTES`]. What is read before the crash is always what was written last.
//!
//! Writes and syncs take some turns. A sync is for what had ended when it began, and does its work
//! when it ends: who syncs too early, or does not wait for it, has synced nothing.
//!
//! Nothing is random but the crash, and that depends on its seed alone.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io::{self, ErrorKind},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;

use super::Draws;
use crate::{
    nvme::{
        aligned::{PAGE, PAGE_BYTES},
        device::{Device, Landing, Moved, SegmentId, Space, SyncPoint},
        gather::Gather,
    },
    store::BoxFuture,
};

/// What a disk writes in one piece, whatever happens.
pub const SECTOR_BYTES: usize = 512;

/// How much of what is volatile survives, in a thousand: one of these per crash, so that some lose
/// nearly all and some nearly nothing.
const KEPT_PER_MILLE: [u64; 5] = [0, 100, 500, 900, 1000];

/// A write takes up to so many turns.
const WRITE_TURNS: u64 = 4;
/// A sync takes so many.
const SYNC_TURNS: usize = 2;

type Page = Arc<[u8]>;

/// The bytes of a file; pages that are not there are zeros.
#[derive(Debug, Clone, Default)]
struct Content {
    bytes: u64,
    pages: BTreeMap<u64, Page>,
}

#[derive(Debug, Clone)]
enum Change {
    Length(u64),
    Page(u64, Page),
}

impl Content {
    fn apply(&mut self, change: Change) {
        match change {
            Change::Length(bytes) => {
                self.bytes = bytes;
                drop(self.pages.split_off(&bytes.div_ceil(PAGE)));
            }
            Change::Page(number, page) => drop(self.pages.insert(number, page)),
        }
    }

    /// Writes some sectors of a page, each with a chance of one half.
    fn tear(&mut self, number: u64, page: &[u8], draws: &mut Draws) {
        let before = self.pages.get(&number).map_or(&[0; PAGE_BYTES][..], |page| page);
        let sectors = before.chunks(SECTOR_BYTES).zip(page.chunks(SECTOR_BYTES));
        let torn = sectors.flat_map(|(old, new)| if draws.chance(500) { new } else { old });
        let torn: Vec<u8> = torn.copied().collect();
        self.apply(Change::Page(number, torn.into()));
    }
}

#[derive(Debug, Clone, Default)]
struct File {
    now: Content,
    synced: Content,
    /// What leads from `synced` to `now`, by when it was done.
    volatile: BTreeMap<u64, Change>,
    /// Of these, what is still being written.
    under_way: BTreeSet<u64>,
    changes: u64,
}

impl File {
    fn change(&mut self, change: Change) -> u64 {
        self.now.apply(change.clone());
        self.changes += 1;
        self.volatile.insert(self.changes, change);
        self.changes
    }

    /// What a sync that begins now is for.
    fn written(&self) -> Vec<u64> {
        self.volatile.keys().filter(|number| !self.under_way.contains(number)).copied().collect()
    }

    fn sync(&mut self, written: &[u64]) {
        for number in written {
            if let Some(change) = self.volatile.remove(number) {
                self.synced.apply(change);
            }
        }
    }

    fn crash(&self, kept: u64, draws: &mut Draws) -> Self {
        let mut left = self.synced.clone();
        for change in self.volatile.values() {
            let keep = draws.chance(kept);
            match change {
                change if keep => left.apply(change.clone()),
                Change::Page(number, page) if draws.chance(500) => left.tear(*number, page, draws),
                Change::Page(..) | Change::Length(_) => {}
            }
        }
        // Pages may have outlived the length that they were written under.
        left.apply(Change::Length(left.bytes));
        Self { now: left.clone(), synced: left, ..Self::default() }
    }
}

type Names = BTreeMap<SegmentId, u64>;

#[derive(Debug, Default)]
struct Disk {
    files: HashMap<u64, File>,
    names: Names,
    synced_names: Names,
    /// What leads from `synced_names` to `names`: who is which file now.
    volatile_names: Vec<(SegmentId, Option<u64>)>,
    files_made: u64,
}

impl Disk {
    fn file(&mut self, segment: SegmentId) -> io::Result<&mut File> {
        let number = self.names.get(&segment).copied();
        let file = number.and_then(|number| self.files.get_mut(&number));
        file.ok_or_else(|| io::Error::new(ErrorKind::NotFound, format!("{segment:?} is not there")))
    }

    fn name(&mut self, segment: SegmentId, file: Option<u64>) {
        rename(&mut self.names, segment, file);
        self.volatile_names.push((segment, file));
    }

    fn sync_names(&mut self) {
        self.volatile_names.clear();
        self.synced_names = self.names.clone();
        let named: Vec<u64> = self.names.values().copied().collect();
        self.files.retain(|number, _| named.contains(number));
    }

    fn allocated_bytes(&self) -> u64 {
        let files = self.names.values().filter_map(|number| self.files.get(number));
        files.map(|file| file.now.bytes.next_multiple_of(PAGE)).sum()
    }

    fn crash(&self, seed: u64) -> Self {
        let mut draws = Draws::new(seed);
        let odds = usize::try_from(draws.below(5)).unwrap_or(0);
        let kept = KEPT_PER_MILLE.get(odds).copied().unwrap_or(0);
        let mut names = self.synced_names.clone();
        for (segment, file) in &self.volatile_names {
            if draws.chance(kept) {
                rename(&mut names, *segment, *file);
            }
        }
        // In the order of their names: the draws must not depend on that of a hash map.
        let files = names.values().filter_map(|number| {
            let file = self.files.get(number)?.crash(kept, &mut draws);
            Some((*number, file))
        });
        let files = files.collect();
        let synced_names = names.clone();
        Self { files, names, synced_names, files_made: self.files_made, ..Self::default() }
    }
}

fn rename(names: &mut Names, segment: SegmentId, file: Option<u64>) {
    match file {
        Some(file) => drop(names.insert(segment, file)),
        None => drop(names.remove(&segment)),
    }
}

#[derive(Debug, Default)]
struct Shared {
    disk: Mutex<Disk>,
    skip: Mutex<Option<SyncPoint>>,
    capacity_bytes: u64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
    syncs: AtomicU64,
}

/// A disk with a volatile cache, in memory.
#[derive(Debug)]
pub struct VolatileDevice {
    shared: Arc<Shared>,
}

impl VolatileDevice {
    /// An empty disk of so many bytes.
    #[must_use]
    pub fn new(capacity_bytes: u64) -> Self {
        Self { shared: Arc::new(Shared { capacity_bytes, ..Shared::default() }) }
    }

    /// From now on, syncs for this reason do nothing and say that they did: a test that does not
    /// notice does not test that the sync is needed.
    pub fn skip(&self, point: Option<SyncPoint>) {
        *self.shared.skip.lock() = point;
    }

    /// The disk after a loss of power at this moment. This one stays as it is, so that the same
    /// moment can be lost in many ways. What is under way has either not begun or happened.
    #[must_use]
    pub fn crash(&self, seed: u64) -> Self {
        let shared = Shared {
            disk: Mutex::new(self.shared.disk.lock().crash(seed)),
            skip: Mutex::new(*self.shared.skip.lock()),
            capacity_bytes: self.shared.capacity_bytes,
            ..Shared::default()
        };
        Self { shared: Arc::new(shared) }
    }

    /// Bytes that were read so far.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.shared.bytes_read.load(Ordering::Relaxed)
    }

    /// Bytes that were written so far.
    #[must_use]
    pub fn bytes_written(&self) -> u64 {
        self.shared.bytes_written.load(Ordering::Relaxed)
    }

    /// Syncs of segments and of the directory so far, skipped ones too.
    #[must_use]
    pub fn syncs(&self) -> u64 {
        self.shared.syncs.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// Counts a sync; whether it is to be done.
    fn is_synced(&self, why: SyncPoint) -> bool {
        self.syncs.fetch_add(1, Ordering::Relaxed);
        *self.skip.lock() != Some(why)
    }

    fn read(&self, segment: SegmentId, offset: u64, landing: &mut Landing) -> io::Result<usize> {
        let mut disk = self.disk.lock();
        let content = &disk.file(segment)?.now;
        let mut at = offset;
        for page in landing.slices().into_iter().flat_map(|slice| slice.chunks_mut(PAGE_BYTES)) {
            check_aligned(at, page.len())?;
            let left = usize::try_from(content.bytes.saturating_sub(at)).unwrap_or(usize::MAX);
            let len = left.min(page.len());
            let stored = content.pages.get(&(at / PAGE)).map_or(&[0; PAGE_BYTES][..], |p| p);
            for (to, from) in page.iter_mut().zip(stored).take(len) {
                *to = *from;
            }
            at += u64::try_from(len).unwrap_or(0);
            if len < PAGE_BYTES {
                break;
            }
        }
        self.bytes_read.fetch_add(at - offset, Ordering::Relaxed);
        Ok(usize::try_from(at - offset).unwrap_or(usize::MAX))
    }

    /// Begins a write; what it changes, and how many bytes.
    fn write(
        &self,
        segment: SegmentId,
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<(Vec<u64>, usize)> {
        check_aligned(offset, bytes.len())?;
        let mut disk = self.disk.lock();
        let file = disk.file(segment)?;
        let end = offset.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        let mut changes = Vec::new();
        if end > file.now.bytes {
            changes.push(file.change(Change::Length(end)));
        }
        for (number, page) in (offset / PAGE..).zip(bytes.chunks(PAGE_BYTES)) {
            changes.push(file.change(Change::Page(number, page.into())));
        }
        file.under_way.extend(&changes);
        self.bytes_written.fetch_add(end - offset, Ordering::Relaxed);
        Ok((changes, bytes.len()))
    }
}

/// A write under way: it ends when it is dropped, as one whose caller has gone does in a kernel.
struct UnderWay {
    shared: Arc<Shared>,
    segment: SegmentId,
    changes: Vec<u64>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Ok(file) = self.shared.disk.lock().file(self.segment) {
            file.under_way.retain(|number| !self.changes.contains(number));
        }
    }
}

async fn take_turns(turns: usize) {
    for _ in 0..turns {
        tokio::task::yield_now().await;
    }
}

/// As direct I/O does.
fn check_aligned(offset: u64, len: usize) -> io::Result<()> {
    if offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE_BYTES) {
        return Ok(());
    }
    let what = format!("move {len} bytes at {offset}: not whole pages");
    Err(io::Error::new(ErrorKind::InvalidInput, what))
}

impl Device for VolatileDevice {
    fn name(&self) -> &'static str {
        "volatile"
    }

    fn list(&self) -> io::Result<Vec<(SegmentId, u64)>> {
        let disk = self.shared.disk.lock();
        let length = |number| disk.files.get(number).map_or(0, |file| file.now.bytes);
        Ok(disk.names.iter().map(|(segment, number)| (*segment, length(number))).collect())
    }

    fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        let mut disk = self.shared.disk.lock();
        if disk.names.contains_key(&segment) {
            return Err(io::Error::new(ErrorKind::AlreadyExists, format!("create {segment:?}")));
        }
        if disk.allocated_bytes().saturating_add(bytes) > self.shared.capacity_bytes {
            let what = format!("create {segment:?} of {bytes} bytes");
            return Err(io::Error::new(ErrorKind::StorageFull, what));
        }
        let mut file = File::default();
        file.change(Change::Length(bytes));
        disk.files_made += 1;
        let number = disk.files_made;
        disk.files.insert(number, file);
        disk.name(segment, Some(number));
        Ok(())
    }

    fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        let mut disk = self.shared.disk.lock();
        let file = disk.file(segment)?;
        if file.now.bytes < bytes {
            let what = format!("cut {segment:?} to {bytes} bytes: it is shorter");
            return Err(io::Error::new(ErrorKind::InvalidInput, what));
        }
        file.change(Change::Length(bytes));
        Ok(())
    }

    fn remove(&self, segment: SegmentId) -> io::Result<()> {
        let mut disk = self.shared.disk.lock();
        if disk.names.contains_key(&segment) {
            disk.name(segment, None);
        }
        Ok(())
    }

    fn sync_directory(&self, why: SyncPoint) -> io::Result<()> {
        if self.shared.is_synced(why) {
            self.shared.disk.lock().sync_names();
        }
        Ok(())
    }

    fn space(&self) -> io::Result<Space> {
        let allocated_bytes = self.shared.disk.lock().allocated_bytes();
        let total_bytes = self.shared.capacity_bytes;
        let available_bytes = total_bytes.saturating_sub(allocated_bytes);
        Ok(Space { total_bytes, available_bytes, allocated_bytes })
    }

    fn read(&self, segment: SegmentId, offset: u64, mut landing: Landing) -> Moved<Landing> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let read = shared.read(segment, offset, &mut landing);
            tokio::task::yield_now().await;
            (landing, read)
        })
    }

    fn write(&self, segment: SegmentId, offset: u64, from: Gather) -> Moved<Gather> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let begun = shared.write(segment, offset, &from.slices().collect::<Vec<_>>().concat());
            let (changes, bytes) = match begun {
                Ok(begun) => begun,
                Err(error) => return (from, Err(error)),
            };
            // Writes end in another order than they began in.
            let turns = changes.last().map_or(0, |last| last % WRITE_TURNS);
            let under_way = UnderWay { shared, segment, changes };
            take_turns(1 + usize::try_from(turns).unwrap_or(0)).await;
            drop(under_way);
            (from, Ok(bytes))
        })
    }

    fn sync(&self, segment: SegmentId, why: SyncPoint) -> BoxFuture<'static, io::Result<()>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            let is_synced = shared.is_synced(why);
            let written = shared.disk.lock().file(segment)?.written();
            take_turns(SYNC_TURNS).await;
            let mut disk = shared.disk.lock();
            let file = disk.file(segment)?;
            if is_synced {
                file.sync(&written);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests;
