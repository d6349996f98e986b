//! How the bytes of a block become fewer: the coding is chosen block by block and noted beside each.
//!
//! The KV cache is made of floats whose high byte (sign and exponent) repeats and whose low byte
//! (mantissa) is noise. So of 2-byte elements the two planes are split, and only the high one is
//! compressed; elements of another width go through zstd as they are. What saves less than 3 % is
//! stored raw. Ratios and speeds: `benches/codec.rs`.
//!
//! The high bytes are unevenly common but do not repeat in any order: a search for matches costs time
//! and, as each one interrupts the entropy coding, space. So there zstd looks for long ones only, in
//! the smallest table, which is still enough for runs of one byte.
//!
//! ```text
//! raw           the bytes
//! zstd          one zstd frame of the bytes
//! planes-zstd   every first byte of two, as it is; then one zstd frame of every second byte
//! ```
//! Of an odd number of bytes the last one is a first byte.
//!
//! Decoding is bounded: it writes into the memory that the caller has for the block, allocates nothing
//! that grows with what it is given, and fails when the block does not come out exactly as long as it
//! should be. That the bytes are right is what the checksums of the parts say.

use std::{borrow::Cow, fmt};

use zstd::{
    bulk::{Compressor, Decompressor},
    zstd_safe::CParameter,
};

use super::format::Damage;

/// Higher levels are slower and, on the high plane, worse.
const LEVEL: i32 = 1;
/// The shortest match that is looked for in the high plane, and the bits of the table of them: the
/// longest and the fewest that zstd has.
const HIGH_PLANE: [CParameter; 2] = [CParameter::MinMatch(7), CParameter::HashLog(6)];
/// Of how many bytes one must be saved for a coding to be worth its time.
const SAVED_DIVISOR: usize = 33;
/// Bytes of a plane that are woven at a time.
const WEAVE_BYTES: usize = 4096;

/// How a block is stored. One byte, with 0 for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Coding {
    /// As it is.
    Raw,
    /// A zstd frame.
    Zstd,
    /// The low bytes of 2-byte elements as they are, and a zstd frame of the high bytes.
    PlanesZstd,
}

impl Coding {
    /// Its byte.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Raw => 1,
            Self::Zstd => 2,
            Self::PlanesZstd => 3,
        }
    }

    /// The coding of a byte.
    ///
    /// # Errors
    /// `Version` for one that is not known.
    pub fn of(number: u8) -> Result<Self, Damage> {
        match number {
            1 => Ok(Self::Raw),
            2 => Ok(Self::Zstd),
            3 => Ok(Self::PlanesZstd),
            _ => Err(Damage::Version),
        }
    }
}

/// Bytes of an element of a type, as far as the codec cares: 2 for floats of 16 bits, else 1.
#[must_use]
pub fn element_bytes(dtype: &str) -> u8 {
    let name = dtype.trim().to_ascii_lowercase();
    let name = name.rsplit_once('.').map_or(name.as_str(), |(_library, name)| name);
    if matches!(name, "bf16" | "bfloat16" | "fp16" | "f16" | "float16" | "half") { 2 } else { 1 }
}

/// Encodes one block; see [`Encoder`], which is cheaper for many.
#[must_use]
pub fn encode(payload: &[u8], element_bytes: u8) -> (Coding, Cow<'_, [u8]>) {
    let mut encoder = Encoder::default();
    match encoder.encode(payload, element_bytes) {
        (Coding::Raw, _same) => (Coding::Raw, Cow::Borrowed(payload)),
        (coding, stored) => (coding, Cow::Owned(stored.to_vec())),
    }
}

/// Encodes blocks, one after the other, in memory of its own: two zstd contexts, and twice the longest
/// block that it has seen.
#[derive(Default)]
pub struct Encoder {
    whole: Option<Compressor<'static>>,
    plane: Option<Compressor<'static>>,
    high: Vec<u8>,
    stored: Vec<u8>,
}

impl Encoder {
    /// The block as it should be stored.
    ///
    /// # Blocking
    /// Computes for milliseconds per MiB.
    pub fn encode<'a>(&'a mut self, payload: &'a [u8], element_bytes: u8) -> (Coding, &'a [u8]) {
        let coding = if element_bytes == 2 { Coding::PlanesZstd } else { Coding::Zstd };
        let longest = payload.len() - payload.len() / SAVED_DIVISOR;
        let fits = match coding {
            Coding::PlanesZstd => self.planes(payload, longest),
            Coding::Raw | Coding::Zstd => self.frame(payload, longest),
        };
        match fits.and_then(|bytes| self.stored.get(..bytes)) {
            Some(stored) if stored.len() < payload.len() => (coding, stored),
            _ => (Coding::Raw, payload),
        }
    }

    /// One frame; the bytes of it, if they are at most `longest`.
    fn frame(&mut self, payload: &[u8], longest: usize) -> Option<usize> {
        self.stored.resize(longest, 0);
        compress(&mut self.whole, &[], payload, &mut self.stored)
    }

    /// The low plane and a frame of the high one; the bytes of both, if they are at most `longest`.
    fn planes(&mut self, payload: &[u8], longest: usize) -> Option<usize> {
        let low_bytes = payload.len().div_ceil(2);
        self.stored.resize(longest, 0);
        self.high.resize(payload.len() - low_bytes, 0);
        let (low, frame) = self.stored.split_at_mut_checked(low_bytes)?;
        let (pairs, last) = payload.as_chunks::<2>();
        for ((low, high), pair) in low.iter_mut().zip(&mut self.high).zip(pairs) {
            [*low, *high] = *pair;
        }
        if let (Some(low), Some(last)) = (low.last_mut(), last.first()) {
            *low = *last;
        }
        Some(low_bytes + compress(&mut self.plane, &HIGH_PLANE, &self.high, frame)?)
    }
}

impl fmt::Debug for Encoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Encoder").field("bytes", &self.stored.capacity()).finish_non_exhaustive()
    }
}

/// Compresses into `out`; the bytes of the frame, if it fits.
fn compress(
    context: &mut Option<Compressor<'static>>,
    parameters: &[CParameter],
    payload: &[u8],
    out: &mut [u8],
) -> Option<usize> {
    let zstd = match context {
        Some(zstd) => zstd,
        None => {
            let mut zstd = Compressor::new(LEVEL).ok()?;
            parameters.iter().try_for_each(|parameter| zstd.set_parameter(*parameter)).ok()?;
            context.insert(zstd)
        }
    };
    zstd.compress_to_buffer(payload, out).ok()
}

/// Decodes one block; see [`Decoder`], which is cheaper for many.
///
/// # Errors
/// See [`Decoder::decode`].
///
/// # Blocking
/// Computes for up to a millisecond per MiB.
pub fn decode(coding: Coding, stored: &[u8], into: &mut [u8]) -> Result<(), Damage> {
    Decoder::default().decode(coding, stored, into)
}

/// Decodes blocks, one after the other. It keeps a zstd context, about 160 KiB: making one takes as
/// long as decoding some KiB.
#[derive(Default)]
pub struct Decoder {
    zstd: Option<Decompressor<'static>>,
}

impl Decoder {
    /// Decodes a block into `into`, which is as long as the block. After an error `into` holds
    /// anything.
    ///
    /// # Errors
    /// `Misplaced` for bytes that are not a block of this length.
    ///
    /// # Blocking
    /// Computes for up to a millisecond per MiB.
    pub fn decode(&mut self, coding: Coding, stored: &[u8], into: &mut [u8]) -> Result<(), Damage> {
        match coding {
            Coding::Raw if stored.len() == into.len() => into.copy_from_slice(stored),
            Coding::Raw => return Err(Damage::Misplaced),
            Coding::Zstd => self.decompress(stored, into)?,
            Coding::PlanesZstd => {
                let low_bytes = into.len().div_ceil(2);
                let (low, frame) = stored.split_at_checked(low_bytes).ok_or(Damage::Misplaced)?;
                self.decompress(frame, into.get_mut(low_bytes..).unwrap_or_default())?;
                weave(low, into);
            }
        }
        Ok(())
    }

    /// Fills all of `into` or fails.
    fn decompress(&mut self, frame: &[u8], into: &mut [u8]) -> Result<(), Damage> {
        let zstd = match &mut self.zstd {
            Some(zstd) => zstd,
            none => none.insert(Decompressor::new().map_err(|_no_memory| Damage::Misplaced)?),
        };
        let written = zstd.decompress_to_buffer(frame, into);
        let filled = written.is_ok_and(|written| written == into.len());
        if filled { Ok(()) } else { Err(Damage::Misplaced) }
    }
}

impl fmt::Debug for Decoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Decoder")
    }
}

/// Puts the elements of `into` together: their high bytes lie behind the room for the low ones.
///
/// In place, from the front: the elements up to one end, at most, where its own high byte was read
/// from, so nothing is overwritten that is still to be read.
fn weave(low: &[u8], into: &mut [u8]) {
    let mut piece = [0; WEAVE_BYTES];
    let high_bytes = into.len() - low.len();
    for start in (0..high_bytes).step_by(WEAVE_BYTES) {
        let bytes = WEAVE_BYTES.min(high_bytes - start);
        let from = low.len() + start;
        let (Some(piece), Some(high)) = (piece.get_mut(..bytes), into.get(from..from + bytes))
        else {
            return;
        };
        piece.copy_from_slice(high);
        let low = low.get(start..).unwrap_or_default();
        let (pairs, _) = into.get_mut(2 * start..).unwrap_or_default().as_chunks_mut::<2>();
        for ((low, high), pair) in low.iter().zip(piece.iter()).zip(pairs) {
            *pair = [*low, *high];
        }
    }
    if low.len() > high_bytes
        && let (Some(last), Some(low)) = (into.last_mut(), low.last())
    {
        *last = *low;
    }
}

#[cfg(test)]
mod tests;
