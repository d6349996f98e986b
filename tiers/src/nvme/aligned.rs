//! Memory that direct I/O accepts: whole pages, starting at a page.
#![expect(unsafe_code, reason = "allocates with an alignment that Vec cannot have")]

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    fmt,
    ops::{Deref, DerefMut},
    ptr::NonNull,
    slice,
};

/// The unit of direct I/O, and of everything in a segment: every disk of today accepts it.
pub const PAGE_BYTES: usize = 4096;
/// The same, for offsets in files.
pub const PAGE: u64 = 4096;

const _: () = assert!(PAGE == PAGE_BYTES as u64, "one page, in two types");

/// An owned, page-aligned buffer of whole pages, zeroed when it is made; may be empty.
pub struct AlignedBuf {
    start: NonNull<u8>,
    /// At most `allocated`.
    len: usize,
    allocated: usize,
}

// SAFETY: the buffer is owned memory without any tie to a thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Zeroed memory of at least `len` bytes, rounded up to whole pages.
    #[must_use]
    pub fn zeroed(len: usize) -> Self {
        let len = len.next_multiple_of(PAGE_BYTES);
        if len == 0 {
            return Self { start: NonNull::dangling(), len, allocated: len };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, len, allocated: len }
    }

    /// Shows only the first `len` bytes, rounded up to whole pages, of what was allocated; all of it
    /// if that is less. What is in them stays.
    pub fn resize_within(&mut self, len: usize) {
        self.len = len.next_multiple_of(PAGE_BYTES).min(self.allocated);
    }

    /// Bytes that were allocated.
    #[must_use]
    pub fn allocated(&self) -> usize {
        self.allocated
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, PAGE_BYTES) {
            Ok(layout) => layout,
            // Longer than an address space: nobody can have asked for it.
            Err(_too_long) => handle_alloc_error(Layout::new::<[u8; PAGE_BYTES]>()),
        }
    }
}

impl Default for AlignedBuf {
    /// An empty one.
    fn default() -> Self {
        Self::zeroed(0)
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.allocated > 0 {
            // SAFETY: allocated in `zeroed` with this very layout, and freed once.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.allocated)) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` is at most `allocated`, initialised bytes that are ours; dangling only when
        // there are none.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes this the only access.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_whole_zeroed_pages_at_a_page() {
        for (asked, len) in [(0, 0), (1, 4096), (4096, 4096), (4097, 8192), (1 << 20, 1 << 20)] {
            let mut buffer = AlignedBuf::zeroed(asked);
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|byte| *byte == 0));
            assert!(len == 0 || buffer.as_ptr().addr().is_multiple_of(PAGE_BYTES));
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
            buffer.resize_within(1);
            assert_eq!(buffer.len(), len.min(PAGE_BYTES));
            buffer.resize_within(usize::MAX - PAGE_BYTES);
            assert_eq!((buffer.len(), buffer.allocated()), (len, len));
        }
    }
}
