//! Bytes in pages.

use crate::nvme::aligned::PAGE_BYTES;

/// Copies `bytes` into `page` at `at`, if they fit.
pub(super) fn copy_to(page: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = page.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Adds `bytes` to whole pages, and zeros up to the next one.
pub(super) fn put_padded(bytes: &[u8], pages: &mut Vec<u8>) {
    pages.extend_from_slice(bytes);
    pages.resize(pages.len().next_multiple_of(PAGE_BYTES), 0);
}
