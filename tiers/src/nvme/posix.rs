//! A directory of segment files on any POSIX file system: what both engines share.
//!
//! Segment 27 is the file `000000000000001b.seg`; other files in the directory are left alone. Files
//! are opened for direct I/O where the file system accepts it, so that blocks are not kept twice, in
//! the arena and in the page cache; where it does not, they are read and written through the cache.
//! All bytes of a file are allocated when it is made, so that a full disk shows there and not in the
//! middle of a write.

use std::{
    fs,
    io::{self, ErrorKind},
    num::NonZeroUsize,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
};

use lru::LruCache;
use parking_lot::Mutex;
use rustix::{
    fs::{
        AtFlags, FallocateFlags, Mode, OFlags, StatVfs, fallocate, fstat, fstatvfs, fsync,
        ftruncate, openat, statat, unlinkat,
    },
    io::{Errno, retry_on_intr},
};

use super::{
    device::{SegmentId, Space},
    format::Place,
};

/// Segments whose files stay open: far below the descriptors that a process may have (1024 where
/// nobody raised it), and enough for the segments that are read at one time.
const OPEN_FILES_MAX: NonZeroUsize = NonZeroUsize::MIN.saturating_add(255);

/// The most that one operation moves: the kernel's own limit is a little under 2 GiB.
pub(super) const MOVE_BYTES_MAX: usize = 1 << 30;

/// The most slices that one operation moves: the kernel's own limit (`IOV_MAX`).
pub(super) const MOVE_SLICES_MAX: usize = 1024;

/// What `st_blocks` counts, whatever the block size of the file system is.
const STAT_BLOCK_BYTES: u64 = 512;

const SUFFIX: &str = ".seg";
const PROBE: &str = ".probe";

/// The directory and its open files.
#[derive(Debug)]
pub(super) struct PosixFiles {
    path: PathBuf,
    directory: OwnedFd,
    direct: bool,
    open: Mutex<LruCache<SegmentId, Arc<OwnedFd>>>,
}

impl PosixFiles {
    /// Opens an existing directory and finds out whether it takes direct I/O.
    pub(super) fn open(path: &Path) -> io::Result<Arc<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = retry_on_intr(|| rustix::fs::open(path, flags, Mode::empty()))
            .map_err(|errno| failed(&format!("open the directory {}", path.display()), errno))?;
        let direct = is_direct_accepted(&directory)
            .map_err(|errno| failed(&format!("make a file in {}", path.display()), errno))?;
        if !direct {
            let path = path.display();
            tracing::warn!(%path, "no direct I/O here: blocks also take memory of the page cache");
        }
        let open = Mutex::new(LruCache::new(OPEN_FILES_MAX));
        Ok(Arc::new(Self { path: path.into(), directory, direct, open }))
    }

    /// Whether files bypass the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct
    }

    /// The open file of a segment. It stays open for as long as somebody holds it.
    pub(super) fn file(&self, segment: SegmentId) -> io::Result<Arc<OwnedFd>> {
        if let Some(file) = self.cached(segment) {
            return Ok(file);
        }
        let file = self
            .open_file(&file_name(segment), OFlags::empty())
            .map_err(|errno| failed(&format!("open {segment:?}"), errno))?;
        Ok(self.keep(segment, file))
    }

    /// The open file of a segment, if it is open already.
    pub(super) fn cached(&self, segment: SegmentId) -> Option<Arc<OwnedFd>> {
        self.open.lock().get(&segment).map(Arc::clone)
    }

    /// For an engine that opens by itself: which name, with which flags, in the directory.
    pub(super) fn how_to_open(&self, segment: SegmentId) -> (String, OFlags) {
        (file_name(segment), open_flags(self.direct))
    }

    /// The directory itself.
    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    fn open_file(&self, name: &str, more: OFlags) -> rustix::io::Result<OwnedFd> {
        open_at(&self.directory, name, more, self.direct)
    }

    /// Keeps a segment's file open for the next who asks.
    pub(super) fn keep(&self, segment: SegmentId, file: OwnedFd) -> Arc<OwnedFd> {
        let file = Arc::new(file);
        // What falls out of the cache is closed behind the lock.
        let fallen = self.open.lock().push(segment, Arc::clone(&file));
        drop(fallen);
        // Deleted meanwhile? An open file would keep its space. A deletion from here on finds it.
        if fstat(&file).is_ok_and(|stat| stat.st_nlink == 0) {
            drop(self.open.lock().pop(&segment));
        }
        file
    }

    /// See [`Device::list`](super::device::Device::list).
    pub(super) fn list(&self) -> io::Result<Vec<(SegmentId, u64)>> {
        let mut segments = Vec::new();
        self.each_file(|segment, stat| {
            segments.push((segment, u64::try_from(stat.st_size).unwrap_or(0)));
        })?;
        segments.sort_unstable();
        Ok(segments)
    }

    fn each_file(&self, mut visit: impl FnMut(SegmentId, rustix::fs::Stat)) -> io::Result<()> {
        let listed = |error: io::Error| {
            io::Error::new(error.kind(), format!("list {}: {error}", self.path.display()))
        };
        for entry in fs::read_dir(&self.path).map_err(listed)? {
            let name = entry.map_err(listed)?.file_name();
            let Some(segment) = name.to_str().and_then(segment_of) else { continue };
            match statat(&self.directory, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => visit(segment, stat),
                // Deleted since it was listed.
                Err(Errno::NOENT) => {}
                Err(errno) => return Err(failed(&format!("stat {segment:?}"), errno)),
            }
        }
        Ok(())
    }

    /// See [`Device::create`](super::device::Device::create).
    pub(super) fn create(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        let what = || format!("create {segment:?} of {bytes} bytes");
        // Asked first: an allocation that fails half way has filled the disk for everybody else
        // until it is given back, and a privileged process would also take what is kept in reserve.
        if self.file_system()?.available_bytes < bytes {
            let what = format!("{}: {}", what(), Errno::NOSPC);
            return Err(io::Error::new(ErrorKind::StorageFull, what));
        }
        let name = file_name(segment);
        let file = self
            .open_file(&name, OFlags::CREATE | OFlags::EXCL)
            .map_err(|errno| failed(&what(), errno))?;
        if let Err(errno) = allocate(&file, bytes) {
            drop(file);
            if let Err(left) = unlinkat(&self.directory, &name, AtFlags::empty()) {
                tracing::warn!(?segment, error = %left, "half a segment file stays behind");
            }
            return Err(failed(&what(), errno));
        }
        drop(self.keep(segment, file));
        Ok(())
    }

    /// See [`Device::truncate`](super::device::Device::truncate).
    pub(super) fn truncate(&self, segment: SegmentId, bytes: u64) -> io::Result<()> {
        let what = || format!("cut {segment:?} to {bytes} bytes");
        let file = self.file(segment)?;
        let stat = fstat(&file).map_err(|errno| failed(&what(), errno))?;
        if u64::try_from(stat.st_size).unwrap_or(0) < bytes {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                format!("{}: it is shorter", what()),
            ));
        }
        retry_on_intr(|| ftruncate(&file, bytes)).map_err(|errno| failed(&what(), errno))
    }

    /// See [`Device::remove`](super::device::Device::remove).
    pub(super) fn remove(&self, segment: SegmentId) -> io::Result<()> {
        let removed = unlinkat(&self.directory, file_name(segment), AtFlags::empty());
        // After that: see `keep`.
        drop(self.open.lock().pop(&segment));
        match removed {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(failed(&format!("remove {segment:?}"), errno)),
        }
    }

    /// See [`Device::sync_directory`](super::device::Device::sync_directory).
    pub(super) fn sync_directory(&self) -> io::Result<()> {
        retry_on_intr(|| fsync(&self.directory))
            .map_err(|errno| failed(&format!("sync the directory {}", self.path.display()), errno))
    }

    /// See [`Device::space`](super::device::Device::space).
    pub(super) fn space(&self) -> io::Result<Space> {
        let mut space = self.file_system()?;
        self.each_file(|_, stat| {
            let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
            space.allocated_bytes += blocks * STAT_BLOCK_BYTES;
        })?;
        Ok(space)
    }

    /// How full the file system is, without a look at the segments.
    fn file_system(&self) -> io::Result<Space> {
        let StatVfs { f_frsize, f_blocks, f_bavail, .. } = retry_on_intr(|| {
            fstatvfs(&self.directory)
        })
        .map_err(|errno| failed(&format!("ask {} for its space", self.path.display()), errno))?;
        Ok(Space {
            total_bytes: f_blocks.saturating_mul(f_frsize),
            available_bytes: f_bavail.saturating_mul(f_frsize),
            allocated_bytes: 0,
        })
    }
}

/// An error that says what was not possible; its kind is that of `errno`.
pub(super) fn failed(what: &str, errno: Errno) -> io::Error {
    let kind = match errno {
        Errno::DQUOT => ErrorKind::StorageFull,
        other => other.kind(),
    };
    io::Error::new(kind, format!("{what}: {errno}"))
}

fn open_at(
    directory: &OwnedFd,
    name: &str,
    more: OFlags,
    direct: bool,
) -> rustix::io::Result<OwnedFd> {
    let flags = open_flags(direct) | more;
    retry_on_intr(|| openat(directory, name, flags, Mode::RUSR | Mode::WUSR))
}

fn open_flags(direct: bool) -> OFlags {
    let how = if direct { OFlags::DIRECT } else { OFlags::empty() };
    OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | how
}

fn is_direct_accepted(directory: &OwnedFd) -> rustix::io::Result<bool> {
    let made = open_at(directory, PROBE, OFlags::CREATE, true);
    let removed = unlinkat(directory, PROBE, AtFlags::empty());
    match (made, removed) {
        (Ok(_file), removed) => removed.map(|()| true),
        // The file may have been made all the same.
        (Err(Errno::INVAL | Errno::OPNOTSUPP), _) => Ok(false),
        // A full disk must not keep its blocks from being read.
        (Err(Errno::NOSPC | Errno::DQUOT), _) => Ok(true),
        (Err(errno), _) => Err(errno),
    }
}

/// Allocates all bytes of a new, empty file; where the file system cannot, they are only promised.
fn allocate(file: &OwnedFd, bytes: u64) -> rustix::io::Result<()> {
    match retry_on_intr(|| fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => retry_on_intr(|| ftruncate(file, bytes)),
        allocated => allocated,
    }
}

fn file_name(segment: SegmentId) -> String {
    format!("{:016x}{SUFFIX}", segment.0)
}

/// The segment that a file holds, if it is one.
fn segment_of(name: &str) -> Option<SegmentId> {
    let segment = SegmentId(u64::from_str_radix(name.strip_suffix(SUFFIX)?, 16).ok()?);
    // Numbers that no place can name are not ours, and the next after them would not be, either.
    Place { segment, unit: 1 }.location()?;
    // Only the one spelling: two files must not be the same segment.
    (file_name(segment) == name).then_some(segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_one_spelling_is_a_segment() {
        for number in [1, 27, (1 << 46) - 1] {
            assert_eq!(segment_of(&file_name(SegmentId(number))), Some(SegmentId(number)));
        }
        assert_eq!(file_name(SegmentId(27)), "000000000000001b.seg");
        let odd = ["1.seg", "000000000000001B.seg", "+00000000000001b.seg", "CURRENT", ".seg"];
        for name in odd.into_iter().chain(["ffffffffffffffff.seg", "0000400000000000.seg"]) {
            assert_eq!(segment_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_file_that_falls_out_of_the_cache_stays_open_for_its_holder() {
        let directory = tempfile::tempdir().unwrap();
        let files = PosixFiles::open(directory.path()).unwrap();
        files.create(SegmentId(1), 4096).unwrap();
        let held = files.file(SegmentId(1)).unwrap();
        let more = u64::try_from(OPEN_FILES_MAX.get()).unwrap() + 10;
        for number in 2..more {
            files.create(SegmentId(number), 4096).unwrap();
        }
        assert_eq!(files.open.lock().len(), OPEN_FILES_MAX.get());
        assert_eq!(fstat(&held).unwrap().st_size, 4096);
        assert!(!Arc::ptr_eq(&held, &files.file(SegmentId(1)).unwrap()));
    }

    #[test]
    fn a_creation_that_fails_leaves_no_trace() {
        let directory = tempfile::tempdir().unwrap();
        let files = PosixFiles::open(directory.path()).unwrap();
        let too_much = files.space().unwrap().total_bytes;
        // Refused before, and refused by the file system: an allocation of nothing is an error.
        let cases = [(too_much, ErrorKind::StorageFull), (0, ErrorKind::InvalidInput)];
        for (bytes, kind) in cases {
            let error = files.create(SegmentId(1), bytes).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains("create segment 1"), "{error}");
            assert_eq!(files.list().unwrap(), []);
            assert_eq!(files.space().unwrap().allocated_bytes, 0);
            assert!(files.cached(SegmentId(1)).is_none());
        }
    }

    #[test]
    fn other_files_are_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("notes"), "x").unwrap();
        let files = PosixFiles::open(directory.path()).unwrap();
        assert_eq!(files.list().unwrap(), []);
        assert!(directory.path().join("notes").exists());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "the probe is gone");
    }
}
