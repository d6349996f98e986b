//! Memory that another process can write at any time, mapped to be read; and memory of ours that another
//! process reads.
//!
//! No reference to shared bytes is ever made ([`kvstrata_tiers::shared`]). A file is mapped only if it is memory of the kernel's and sealed against shrinking: a page of it is
//! always there, so reading never faults, whatever its other holders do.
#![expect(unsafe_code, reason = "maps memory; nothing outside of this file touches it")]

use std::{fmt, num::NonZeroUsize, os::fd::OwnedFd, ptr::NonNull};

use bytes::{BufMut, BytesMut};
use kvstrata_tiers::{
    checksum::PartHasher,
    error::{Error, ErrorKind, Result},
    shared::{self, Room, SharedBytes},
};
use rustix::{
    fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, ftruncate,
        memfd_create,
    },
    io::Errno,
    mm::{MapFlags, ProtFlags, mmap, munmap},
};

/// What `fstatfs` says of plain shared memory; that of huge pages, which may be missing, is another one.
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// Memory of somebody else's, to be read.
pub(crate) struct Mapping(Mapped);

/// Memory of ours for somebody else to read.
pub(crate) struct Staging {
    mapped: Mapped,
    file: OwnedFd,
}

struct Mapped {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain memory that only the functions of this file touch, by copies, and it is
// nobody's in particular.
unsafe impl Send for Mapped {}
// SAFETY: as above; shared access only copies out of what may change at any time anyway. Writing needs
// `&mut Staging`.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &OwnedFd, len: NonZeroUsize, protection: ProtFlags) -> Result<Self> {
        let len = len.get();
        // SAFETY: a fresh mapping at an address the kernel chooses; it aliases nothing of ours.
        let base =
            unsafe { mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, file, 0) };
        let base = base.map_err(unmappable)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or_else(|| unmappable(Errno::NOMEM))?;
        Ok(Self { base, len })
    }

    /// Where `bytes` bytes from `offset` on begin, if there are as many.
    fn at(&self, offset: usize, bytes: usize) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // SAFETY: `offset` is within the mapping, or just behind it.
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(offset) })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of our own mapping, and nobody has kept an address of it.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "unmapping our own mapping cannot fail");
    }
}

impl Mapping {
    /// Maps a file that another process has sent, of which it says that it has so many bytes.
    ///
    /// # Errors
    /// `Invalid` if it could be taken away while it is read, or is shorter; `Unavailable` if the kernel
    /// refuses.
    pub(crate) fn new(file: &OwnedFd, bytes: u64) -> Result<Self> {
        let kind = fstatfs(file).map(|found| i128::from(found.f_type));
        let seals = fcntl_get_seals(file);
        let sealed = seals.is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if kind != Ok(TMPFS_MAGIC) || !sealed {
            return Err(Error::invalid(
                "shared memory: a memfd without huge pages and with F_SEAL_SHRINK required",
            ));
        }
        let found = fstat(file).ok().and_then(|found| u64::try_from(found.st_size).ok());
        let len = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
        let Some(len) = len.filter(|_| found >= Some(bytes)) else {
            let found = found.unwrap_or(0);
            let text = format!("shared memory: {bytes} bytes given, 1 to {found} required");
            return Err(Error::invalid(text));
        };
        Ok(Self(Mapped::new(file, len, ProtFlags::READ)?))
    }

    /// The `bytes` bytes at `offset`, if there are as many.
    pub(crate) fn bytes(&self, offset: usize, bytes: usize) -> Option<SharedBytes<'_>> {
        let from = self.0.at(offset, bytes)?;
        // SAFETY: there are as many, mapped for as long as `self` is, and never taken away.
        Some(unsafe { SharedBytes::new(from, bytes) })
    }

    /// Appends the `bytes` bytes at `offset` to `to`, which has room for them, and has them hashed; false,
    /// and nothing, if there is no such room or they are not within it.
    #[must_use]
    pub(crate) fn append(
        &self,
        offset: usize,
        bytes: usize,
        to: &mut BytesMut,
        hasher: &mut PartHasher,
    ) -> bool {
        let room = to.spare_capacity_mut().get_mut(..bytes);
        let (Some(from), Some(room)) = (self.bytes(offset, bytes), room) else { return false };
        hasher.copy(from, Room::from(room));
        // SAFETY: that many bytes of the room have just been written.
        unsafe { to.advance_mut(bytes) };
        true
    }
}

impl fmt::Debug for Mapping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mapping({} bytes)", self.0.len)
    }
}

impl Staging {
    /// Memory of so many bytes, sealed so that another process may map it.
    ///
    /// # Errors
    /// `Unavailable` if the kernel refuses.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        let bytes = NonZeroUsize::new(bytes).ok_or_else(|| unmappable(Errno::INVAL))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("kvstrata-staging", flags).map_err(unmappable)?;
        let len = u64::try_from(bytes.get()).unwrap_or(u64::MAX);
        ftruncate(&file, len).map_err(unmappable)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).map_err(unmappable)?;
        let mapped = Mapped::new(&file, bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        Ok(Self { mapped, file })
    }

    /// What the other process is to be sent.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// How many bytes it has.
    pub(crate) fn len(&self) -> usize {
        self.mapped.len
    }

    /// Writes `from` at `offset`; false, and nothing, if that is not within it.
    #[must_use]
    pub(crate) fn write(&mut self, offset: usize, from: &[u8]) -> bool {
        let Some(to) = self.mapped.at(offset, from.len()) else { return false };
        // SAFETY: `to` has as many bytes, mapped and never taken away, and no reference to any of them
        // exists in this process; what another process reads meanwhile it has to check.
        unsafe { shared::copy(from.as_ptr(), to, from.len()) };
        true
    }
}

impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staging({} bytes)", self.len())
    }
}

fn unmappable(errno: Errno) -> Error {
    Error::new(ErrorKind::Unavailable, "shared memory").because(errno)
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::{block::BlockHash, namespace::NamespaceId};
    use rustix::fs::{FallocateFlags, fallocate};

    use super::*;

    fn staging(bytes: usize) -> Staging {
        Staging::new(bytes).unwrap()
    }

    fn hasher() -> PartHasher {
        let hash = BlockHash::new(&[1; 32]).unwrap();
        PartHasher::new(&NamespaceId::from_bytes([2; 32]), &hash, 0, 0)
    }

    #[test]
    fn bytes_are_copied_at_any_alignment_and_never_beyond_the_end() {
        let mut ours = staging(10_000);
        let theirs = Mapping::new(ours.file(), 10_000).unwrap();
        let bytes: Vec<u8> = (0..2_250_u32).flat_map(|at| (at * 31).to_le_bytes()).collect();
        for (offset, len) in [(0, 9_000), (1, 8_999), (7, 13), (1_000, 0), (3_000, 7_000)] {
            let bytes = &bytes[..len];
            assert!(ours.write(offset, bytes));
            let mut copy = vec![0; len];
            theirs.bytes(offset, len).unwrap().copy_to(Room::from(copy.as_mut_slice()));
            let mut appended = BytesMut::with_capacity(len + 3);
            appended.extend_from_slice(b"abc");
            let (mut hasher, mut right) = (hasher(), hasher());
            assert!(theirs.append(offset, len, &mut appended, &mut hasher));
            assert!(copy == bytes && appended[3..] == *bytes);
            right.update(bytes);
            assert_eq!(hasher.checksum(), right.checksum());
        }
        assert!(!ours.write(9_000, &bytes[..1_001]) && !ours.write(usize::MAX, &bytes));
        assert!(theirs.bytes(9_999, 2).is_none() && theirs.bytes(usize::MAX, 2).is_none());
        let append = |offset, bytes| {
            theirs.append(offset, bytes, &mut BytesMut::with_capacity(99), &mut hasher())
        };
        assert!(!append(0, 1_000) && !append(9_999, 2));
    }

    #[test]
    fn what_could_be_taken_away_is_not_mapped() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = memfd_create("open", flags).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert!(Mapping::new(&open, 4096).is_err(), "it can be shrunk");
        fcntl_add_seals(&open, SealFlags::SHRINK).unwrap();
        Mapping::new(&open, 4096).unwrap();
        for bytes in [0, 4097, u64::MAX] {
            let refused = Mapping::new(&open, bytes).unwrap_err().to_string();
            assert!(refused.contains(&bytes.to_string()), "{refused}");
        }
        let disk = OwnedFd::from(tempfile::tempfile().unwrap());
        ftruncate(&disk, 4096).unwrap();
        assert!(Mapping::new(&disk, 4096).is_err(), "it is no memory");
    }

    #[test]
    fn pages_that_are_punched_out_are_zeros_and_no_fault() {
        let mut ours = staging(8192);
        let theirs = Mapping::new(ours.file(), 8192).unwrap();
        assert!(ours.write(0, &[7; 8192]));
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(ours.file(), hole, 4096, 4096).unwrap();
        assert!(ftruncate(ours.file(), 100).is_err());
        let mut copy = vec![1; 8192];
        theirs.bytes(0, 8192).unwrap().copy_to(Room::from(copy.as_mut_slice()));
        assert_eq!((copy[4095], copy[4096]), (7, 0));
    }
}
