//! The bodies of the frames of shared memory ([`crate::shm`]), as those of [`super::body`].

use bytes::Bytes;

use super::{
    body::{PLACE_BYTES, Place},
    frame::{Broken, Kind, push},
};

/// Flag of a get: say where blocks lie instead of sending them.
pub(crate) const BY_PLACE: u8 = 2;
/// Flag of a map: the client has the regions already.
pub(crate) const HAS_REGIONS: u8 = 1;
/// Flag of a release: the last of them was not right.
pub(crate) const DAMAGED: u8 = 1;

/// Bytes of a [`Spot`].
pub(crate) const SPOT_BYTES: usize = PLACE_BYTES + 20;
/// Bytes of a [`Staged`].
pub(crate) const STAGED_BYTES: usize = PLACE_BYTES + 12;

/// Where a whole part lies in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Spot {
    /// What it is; its offset in the part is 0.
    pub(crate) place: Place,
    /// Under which number its block stays there.
    pub(crate) pin: u64,
    /// In which region, and where.
    pub(crate) region: u32,
    pub(crate) offset: u64,
}

/// Where bytes of a wanted part lie in the client's staging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Staged {
    pub(crate) place: Place,
    pub(crate) bytes: u32,
    /// In the staging.
    pub(crate) offset: u64,
}

/// What a server shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Regions {
    /// Bytes that the client may have pinned at a time.
    pub(crate) pinned_bytes_max: u64,
    /// Bytes of each region.
    pub(crate) lengths: Vec<u64>,
}

fn u32_at(body: &[u8], at: usize) -> u32 {
    body.get(at..).and_then(<[u8]>::first_chunk).copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(body: &[u8], at: usize) -> u64 {
    body.get(at..).and_then(<[u8]>::first_chunk).copied().map_or(0, u64::from_le_bytes)
}

fn place_of(body: &[u8]) -> Place {
    Place::read(body.first_chunk().unwrap_or(&[0; PLACE_BYTES]))
}

impl Spot {
    /// Reads a body, of which every one is right.
    pub(crate) fn read(body: &[u8; SPOT_BYTES]) -> Self {
        Self {
            place: place_of(body),
            pin: u64_at(body, PLACE_BYTES),
            region: u32_at(body, PLACE_BYTES + 8),
            offset: u64_at(body, PLACE_BYTES + 12),
        }
    }

    /// Appends the frame.
    pub(crate) fn push(&self, out: &mut Vec<u8>, tier: u8, request: u32) {
        push(out, (Kind::Pinned, tier), request, 0, |body| {
            self.place.write(body);
            body.extend_from_slice(&self.pin.to_le_bytes());
            body.extend_from_slice(&self.region.to_le_bytes());
            body.extend_from_slice(&self.offset.to_le_bytes());
        });
    }
}

impl Staged {
    /// Reads a body, of which every one is right.
    pub(crate) fn read(body: &[u8; STAGED_BYTES]) -> Self {
        Self {
            place: place_of(body),
            bytes: u32_at(body, PLACE_BYTES),
            offset: u64_at(body, PLACE_BYTES + 4),
        }
    }

    /// Appends the frame.
    pub(crate) fn push(&self, out: &mut Vec<u8>, request: u32) {
        push(out, (Kind::Staged, 0), request, 0, |body| {
            self.place.write(body);
            body.extend_from_slice(&self.bytes.to_le_bytes());
            body.extend_from_slice(&self.offset.to_le_bytes());
        });
    }
}

impl Regions {
    pub(crate) fn read(body: &Bytes) -> Result<Self, Broken> {
        let (words, rest) = body.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_le_bytes(*word));
        match (words.next(), rest) {
            (Some(pinned_bytes_max), []) => Ok(Self { pinned_bytes_max, lengths: words.collect() }),
            _ => Err(Broken::Body { kind: Kind::Arena, what: "a length takes 8 bytes" }),
        }
    }

    pub(crate) fn push(&self, out: &mut Vec<u8>, request: u32) {
        push(out, (Kind::Arena, 0), request, 0, |body| {
            body.extend_from_slice(&self.pinned_bytes_max.to_le_bytes());
            for length in &self.lengths {
                body.extend_from_slice(&length.to_le_bytes());
            }
        });
    }
}

/// Reads the one number of a map (bytes of the staging) or a release (the last pin).
pub(crate) fn read_number(body: [u8; 8]) -> u64 {
    u64::from_le_bytes(body)
}

/// Appends a map or a release.
pub(crate) fn push_number(out: &mut Vec<u8>, (kind, flags): (Kind, u8), request: u32, number: u64) {
    push(out, (kind, flags), request, 0, |body| body.extend_from_slice(&number.to_le_bytes()));
}
