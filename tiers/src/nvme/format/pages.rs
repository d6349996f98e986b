//! Bytes in pages.

use crate::nvme::aligned::PAGE_BYTES;

/// Copies `bytes` into `page` at `at`, if they fit.
pub(super) fn copy_to(page: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(place) = page.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

/// Hands `bytes` on, and zeros up to the next page.
pub(super) fn put_padded(bytes: &[u8], out: &mut impl FnMut(&[u8])) {
    out(bytes);
    let padding = bytes.len().next_multiple_of(PAGE_BYTES) - bytes.len();
    if let Some(zeros) = [0; PAGE_BYTES].get(..padding).filter(|zeros| !zeros.is_empty()) {
        out(zeros);
    }
}
