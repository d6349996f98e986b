//! The memory of callers, lent to a request: the only file of this crate with `unsafe`.
//!
//! A [`Loan`] holds the buffers of one request. Who reads or writes them keeps the loan alive: [`Rooms`]
//! for what a get writes, a [`Bytes`] for each value of a put. So a buffer is held until the last of
//! them is gone, whoever has dropped what else. The thread that drops the last one may be one of the
//! runtime, which never waits for the interpreter: it puts the buffers into the [`Bin`] of their client,
//! and the next call of that client gives them back.
//!
//! What is not promised: that the caller keeps its hands off the memory meanwhile. Bytes of a get are
//! verified where they lie; what somebody else writes over them afterwards nobody can see.
#![expect(unsafe_code, reason = "Python's buffers are memory that nothing in Rust owns")]

use std::{ops::Range, ptr::NonNull, slice, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use pyo3::{buffer::PyUntypedBuffer, exceptions::PyTypeError, prelude::*, types::PyMemoryView};

use crate::errors;

/// Buffers whose requests have ended, to be given back by a thread that holds the interpreter.
#[derive(Debug, Default)]
pub(crate) struct Bin(Mutex<Vec<Vec<PyUntypedBuffer>>>);

impl Bin {
    /// Gives back what has gathered.
    pub(crate) fn empty(&self, py: Python<'_>) {
        let ended = std::mem::take(&mut *self.0.lock());
        ended.into_iter().flatten().for_each(|buffer| buffer.release(py));
    }
}

/// The buffers of one request.
#[derive(Debug)]
pub(crate) struct Loan {
    buffers: Vec<PyUntypedBuffer>,
    bin: Arc<Bin>,
}

impl Drop for Loan {
    fn drop(&mut self) {
        self.bin.0.lock().push(std::mem::take(&mut self.buffers));
    }
}

/// Where a buffer lies. It is never read or written but through a loan that holds the buffer.
#[derive(Debug, Clone, Copy)]
struct Place {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address; who uses it holds the loan, and the buffers of a loan may be used by any thread.
unsafe impl Send for Place {}
// SAFETY: as above; writing needs `&mut Rooms`.
unsafe impl Sync for Place {}

impl Place {
    fn of(buffer: &PyUntypedBuffer) -> Self {
        let bytes = buffer.len_bytes();
        // An empty buffer may have no address at all.
        let start = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        Self { start, bytes }
    }

    fn addresses(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.bytes
    }
}

/// Buffers that a request writes, in the order given.
#[derive(Debug)]
pub(crate) struct Rooms {
    places: Vec<Place>,
    _loan: Arc<Loan>,
}

impl Rooms {
    /// Takes each of `buffers` for writing. They must be writable and contiguous, and no two may share a
    /// byte, because what was verified in one would be written over through the other.
    pub(crate) fn take(buffers: &Bound<'_, PyAny>, bin: &Arc<Bin>) -> PyResult<Self> {
        let (places, loan) = take("buffers", buffers, bin, true)?;
        let mut sorted: Vec<(usize, &Place)> = places.iter().enumerate().collect();
        sorted.retain(|(_, place)| place.bytes > 0);
        sorted.sort_unstable_by_key(|(_, place)| place.start);
        for pair in sorted.windows(2) {
            if let [(one, before), (other, after)] = pair
                && before.addresses().end > after.addresses().start
            {
                let text = format!("buffers: {one} and {other} share memory, each needs its own");
                return Err(errors::invalid(buffers.py(), &text));
            }
        }
        Ok(Self { places, _loan: loan })
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }

    /// Bytes of the buffer at `index`; 0 if there is none.
    pub(crate) fn bytes(&self, index: usize) -> usize {
        self.places.get(index).map_or(0, |place| place.bytes)
    }

    /// A part of the buffer at `index`; none if it has no such bytes.
    pub(crate) fn slice(&mut self, index: usize, range: Range<usize>) -> Option<&mut [u8]> {
        let place = self.places.get(index)?;
        // SAFETY: the loan holds a contiguous, writable buffer of so many bytes there; its memory shares
        // no byte with another of them, and `&mut self` lets nobody else have a slice of it.
        let whole = unsafe { slice::from_raw_parts_mut(place.start.as_ptr(), place.bytes) };
        whole.get_mut(range)
    }
}

/// Takes each of `values` for reading, without a copy.
pub(crate) fn lend(values: &Bound<'_, PyAny>, bin: &Arc<Bin>) -> PyResult<Vec<Bytes>> {
    let (places, loan) = take("values", values, bin, false)?;
    let lent = |place| Bytes::from_owner(Lent { place, _loan: Arc::clone(&loan) });
    Ok(places.into_iter().map(lent).collect())
}

/// A buffer that a request reads.
#[derive(Debug)]
struct Lent {
    place: Place,
    _loan: Arc<Loan>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the loan holds a contiguous buffer of so many bytes there.
        unsafe { slice::from_raw_parts(self.place.start.as_ptr(), self.place.bytes) }
    }
}

/// A copy of the bytes of `object`; none if it has no buffer.
pub(crate) fn copy(object: &Bound<'_, PyAny>) -> PyResult<Option<Bytes>> {
    let buffer = match buffer_of(object) {
        Ok(buffer) => buffer,
        Err(error) if error.is_instance_of::<PyTypeError>(object.py()) => return Ok(None),
        Err(error) => return Err(error),
    };
    if !buffer.is_c_contiguous() {
        let text = format!("{} is not contiguous", kind_of(object));
        return Err(errors::invalid(object.py(), &text));
    }
    let place = Place::of(&buffer);
    // SAFETY: `buffer` holds a contiguous buffer of so many bytes there.
    let bytes = unsafe { slice::from_raw_parts(place.start.as_ptr(), place.bytes) };
    Ok(Some(Bytes::copy_from_slice(bytes)))
}

fn take(
    name: &str,
    objects: &Bound<'_, PyAny>,
    bin: &Arc<Bin>,
    writable: bool,
) -> PyResult<(Vec<Place>, Arc<Loan>)> {
    let py = objects.py();
    let mut buffers = Vec::new();
    for (index, object) in objects.try_iter()?.enumerate() {
        let object = object?;
        let refuse = |what: &str| {
            errors::invalid(py, &format!("{name}: {index} is {} and {what}", kind_of(&object)))
        };
        let buffer = match buffer_of(&object) {
            Ok(buffer) => buffer,
            Err(_no_buffer) => {
                let memory = memory_of(&object)
                    .map_err(|error| refuse(&format!("has no buffer: {}", error.value(py))))?;
                buffer_of(&memory)?
            }
        };
        if !buffer.is_c_contiguous() {
            return Err(refuse("not contiguous"));
        }
        if writable && buffer.readonly() {
            return Err(refuse("read-only, a writable one is needed"));
        }
        buffers.push(buffer);
    }
    let places = buffers.iter().map(Place::of).collect();
    Ok((places, Arc::new(Loan { buffers, bin: Arc::clone(bin) })))
}

/// The buffer of an object, through a view: some objects, such as arrays of ctypes, do not say how their
/// elements lie, and a view always does.
fn buffer_of(object: &Bound<'_, PyAny>) -> PyResult<PyUntypedBuffer> {
    let view = PyMemoryView::from(object)?;
    PyUntypedBuffer::get(view.as_any())
}

/// The memory of a tensor, as an object with a buffer.
fn memory_of<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let tensors = object.py().import("kvstrata._tensors")?;
    tensors.call_method1("memory_of", (object,))
}

fn kind_of(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_unnamed| "an object".to_owned(), |name| name.to_string())
}
