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

/// An owned, zeroed, page-aligned buffer of whole pages; may be empty.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
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
            return Self { start: NonNull::dangling(), len };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        Self { start, len }
    }

    fn layout(len: usize) -> Layout {
        match Layout::from_size_align(len, PAGE_BYTES) {
            Ok(layout) => layout,
            // Longer than an address space: nobody can have asked for it.
            Err(_too_long) => handle_alloc_error(Layout::new::<[u8; PAGE_BYTES]>()),
        }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `zeroed` with this very layout, and freed once.
            unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
        }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes that are ours; dangling only when there are none.
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
        }
    }
}
