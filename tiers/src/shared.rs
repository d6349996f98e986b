//! Memory that another process may write at any time.
//!
//! No reference to shared bytes is ever made, because references promise that nobody writes. Bytes are
//! copied out by code that the compiler knows nothing about, and judged only in the copy.
#![expect(unsafe_code, reason = "copies from memory that Rust may not refer to")]

use std::{marker::PhantomData, mem::MaybeUninit};

/// Bytes that can be copied, and nothing else.
#[derive(Debug, Clone, Copy)]
pub struct SharedBytes<'a> {
    from: *const u8,
    len: usize,
    mapped: PhantomData<&'a ()>,
}

impl<'a> SharedBytes<'a> {
    /// The `len` bytes from `from` on.
    ///
    /// # Safety
    /// They are mapped and can be read for as long as `'a`, and nobody takes them away.
    #[must_use]
    pub unsafe fn new(from: *const u8, len: usize) -> Self {
        Self { from, len, mapped: PhantomData }
    }

    /// Bytes of our own, which nobody writes meanwhile.
    #[must_use]
    pub fn of(bytes: &'a [u8]) -> Self {
        // SAFETY: they are borrowed for as long.
        unsafe { Self::new(bytes.as_ptr(), bytes.len()) }
    }

    /// How many there are.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// There are none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Where they begin.
    pub(crate) fn as_ptr(self) -> *const u8 {
        self.from
    }

    /// The first `at` of them, or all if there are fewer, and the rest.
    #[must_use]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let at = at.min(self.len);
        let rest = self.from.wrapping_add(at);
        (Self { len: at, ..self }, Self { from: rest, len: self.len - at, ..self })
    }

    /// Copies as many of them as there is room for; returns the copy.
    pub fn copy_to<'t>(self, to: Room<'t>) -> &'t mut [u8] {
        let bytes = self.len.min(to.len);
        // SAFETY: both have as many bytes, and the room is not shared.
        unsafe { copy(self.from, to.to, bytes) };
        // SAFETY: they have just been written.
        unsafe { to.written(bytes) }
    }
}

/// Memory of our own that is written before it is read.
#[derive(Debug)]
pub struct Room<'a> {
    to: *mut u8,
    len: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Room<'a> {
    /// How many bytes there is room for.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Where it begins.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.to
    }

    /// The first `at` bytes of it, or all if there are fewer, and the rest.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        let Self { to, len, borrowed } = self;
        let at = at.min(len);
        (Self { to, len: at, borrowed }, Self { to: to.wrapping_add(at), len: len - at, borrowed })
    }

    /// What has been written.
    ///
    /// # Safety
    /// There are as many bytes, and all are written.
    pub(crate) unsafe fn written(self, bytes: usize) -> &'a mut [u8] {
        // SAFETY: the caller vouches for them, and they are borrowed for as long.
        unsafe { std::slice::from_raw_parts_mut(self.to, bytes) }
    }
}

impl<'a> From<&'a mut [u8]> for Room<'a> {
    fn from(to: &'a mut [u8]) -> Self {
        Self { to: to.as_mut_ptr(), len: to.len(), borrowed: PhantomData }
    }
}

impl<'a> From<&'a mut [MaybeUninit<u8>]> for Room<'a> {
    fn from(to: &'a mut [MaybeUninit<u8>]) -> Self {
        Self { to: to.as_mut_ptr().cast(), len: to.len(), borrowed: PhantomData }
    }
}

/// Copies bytes of which either side may be shared with another process. To the compiler this is not a
/// read of Rust's, which would have to be of memory that nobody writes.
///
/// # Safety
/// Both are mapped for `bytes` bytes and do not overlap, and what is not shared is the caller's.
#[cfg(target_arch = "x86_64")]
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    // SAFETY: the caller vouches for both ranges. Not slower than `memcpy` for slices of 64 KiB and more.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") bytes => _,
            inout("rdi") to => _,
            inout("rsi") from => _,
            options(nostack, preserves_flags),
        );
    }
}

/// As above: in words, each by an atomic read, which is what such memory may be read by.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};
    let mut at = 0;
    while at < bytes {
        // SAFETY: `at` is below `bytes`, so both addresses are within what the caller vouches for.
        let (source, target) = unsafe { (from.add(at).cast_mut(), to.add(at)) };
        if bytes - at >= 8 && source.addr() % 8 == 0 {
            // SAFETY: eight bytes are left, and the source is aligned; atomics may read what is mapped
            // for reading only.
            let word = unsafe { AtomicU64::from_ptr(source.cast()) }.load(Relaxed);
            // SAFETY: eight bytes are left, and the write asks for no alignment.
            unsafe { target.cast::<u64>().write_unaligned(word) };
            at += 8;
        } else {
            // SAFETY: a byte is left, and has no alignment.
            let byte = unsafe { AtomicU8::from_ptr(source) }.load(Relaxed);
            // SAFETY: a byte is left.
            unsafe { target.write(byte) };
            at += 1;
        }
    }
}
