//! The header of every frame: pure encode and decode, bounded before anything is made for it.
//!
//! ```text
//! offset  bytes
//!      0      2   magic           "KB"
//!      2      1   kind
//!      3      1   flags           by kind, else 0
//!      4      4   request         chosen by the client; 0 is the connection itself
//!      8      4   body bytes      bounded for each kind
//!     12      4   payload bytes   0 but for data and blocks
//!     16      8   checksum        XXH3-64 of the body, seeded by the XXH3-64 of the 16 bytes before
//! ```
//! Then the body, then the payload. The checksum covers header and body and never the payload, which
//! has that of its part: so a peer that has lost its place, or that makes one up, is noticed with its
//! first frame, and payload is read where it will stay without looking at it on the way.
//! Numbers are little-endian.

use std::ops::RangeInclusive;

use kvstrata_tiers::{block::HASH_BYTES_MAX, error::Error, limits::PARTS_MAX};
use thiserror::Error as ThisError;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{
    body::PLACE_BYTES,
    shared_body::{SPOT_BYTES, STAGED_BYTES},
};
use crate::limits::{
    BULK_PAYLOAD_BYTES_MAX, BULK_TEXT_BYTES_MAX, BULK_TOKEN_BYTES_MAX, GET_BLOCKS_MAX,
    MESSAGE_BYTES_MAX, PUT_BLOCKS_MAX, SHM_REGIONS_MAX,
};

/// Bytes of a header.
pub(crate) const HEADER_BYTES: usize = 24;
/// The version of the protocol that this build speaks.
pub(crate) const VERSION: u16 = 1;
/// How every frame begins.
const MAGIC: [u8; 2] = *b"KB";
/// The bytes of a header that seed its checksum.
const SEED_BYTES: usize = 16;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Client: who it is and what it can take; first and once.
    Hello,
    /// Client: asks for blocks.
    Get,
    /// Client: offers blocks.
    Offer,
    /// Client: bytes of a wanted part.
    Data,
    /// Client: all of a put has been sent.
    Finish,
    /// Client: does not want the answer any more.
    Cancel,
    /// Client: may be sent so many more bytes of payload.
    Credit,
    /// Client: asks to share memory ([`crate::shm`]).
    Map,
    /// Client: bytes of a wanted part are in its staging.
    Staged,
    /// Client: has copied what it was told the place of.
    Release,
    /// Server: the answer to hello.
    Welcome,
    /// Server: bytes of a part.
    Block,
    /// Server: positions without bytes.
    Miss,
    /// Server: the request is answered.
    End,
    /// Server: what it wants of an offer.
    Want,
    /// Server: what became of positions of a put.
    Results,
    /// Server: the request, or the connection, ends for this reason.
    Refused,
    /// Server: the memory that it shares.
    Arena,
    /// Server: where a part lies in it.
    Pinned,
    /// Server: what was in the staging has been copied.
    Taken,
}

impl Kind {
    const ALL: [(u8, Self); 20] = [
        (1, Self::Hello),
        (2, Self::Get),
        (3, Self::Offer),
        (4, Self::Data),
        (5, Self::Finish),
        (6, Self::Cancel),
        (7, Self::Credit),
        (8, Self::Map),
        (9, Self::Staged),
        (10, Self::Release),
        (17, Self::Welcome),
        (18, Self::Block),
        (19, Self::Miss),
        (20, Self::End),
        (21, Self::Want),
        (22, Self::Results),
        (23, Self::Refused),
        (24, Self::Arena),
        (25, Self::Pinned),
        (26, Self::Taken),
    ];

    fn read(number: u8) -> Option<Self> {
        Self::ALL.iter().find(|(known, _)| *known == number).map(|(_, kind)| *kind)
    }

    fn number(self) -> u8 {
        Self::ALL.iter().find(|(_, kind)| *kind == self).map_or(0, |(number, _)| *number)
    }

    /// How long its body may be, in bytes.
    fn body_bytes(self) -> RangeInclusive<usize> {
        match self {
            Self::Hello => 24..=24 + BULK_TOKEN_BYTES_MAX,
            Self::Get => 56..=56 + 4 * PARTS_MAX + HASH_BYTES_MAX * GET_BLOCKS_MAX,
            Self::Offer => 52..=MESSAGE_BYTES_MAX,
            Self::Data | Self::Block => PLACE_BYTES..=PLACE_BYTES,
            Self::Finish | Self::Cancel | Self::End | Self::Taken => 0..=0,
            Self::Map | Self::Release => 8..=8,
            Self::Staged => STAGED_BYTES..=STAGED_BYTES,
            Self::Pinned => SPOT_BYTES..=SPOT_BYTES,
            Self::Arena => 8..=8 + 8 * SHM_REGIONS_MAX,
            Self::Credit => 4..=4,
            Self::Welcome => 24..=24,
            Self::Miss => 8..=8,
            Self::Want => 4..=4 + 8 * PUT_BLOCKS_MAX,
            Self::Results => 0..=12 * PUT_BLOCKS_MAX,
            Self::Refused => 8..=8 + BULK_TEXT_BYTES_MAX,
        }
    }

    /// How long its payload may be, in bytes.
    fn payload_bytes(self) -> RangeInclusive<usize> {
        match self {
            Self::Data | Self::Block => 1..=BULK_PAYLOAD_BYTES_MAX,
            Self::Hello
            | Self::Get
            | Self::Offer
            | Self::Finish
            | Self::Cancel
            | Self::Credit
            | Self::Welcome
            | Self::Miss
            | Self::End
            | Self::Want
            | Self::Results
            | Self::Refused
            | Self::Map
            | Self::Staged
            | Self::Release
            | Self::Arena
            | Self::Pinned
            | Self::Taken => 0..=0,
        }
    }
}

/// What is wrong with a frame: the peer has lost its place, is of another kind, or is hostile.
#[derive(Debug, ThisError, PartialEq, Eq)]
pub(crate) enum Broken {
    #[error("frame: it begins with {0:02x?}, \"KB\" required")]
    Magic([u8; 2]),
    #[error("frame: kind {0} is not known")]
    Kind(u8),
    #[error("frame: {what} of {given} bytes given for {kind:?}, {least} to {most} allowed")]
    Length { kind: Kind, what: &'static str, given: u32, least: usize, most: usize },
    #[error("frame: the checksum of header and body is wrong")]
    Checksum,
    #[error("frame: {kind:?}: {what}")]
    Body { kind: Kind, what: &'static str },
    #[error("frame: {0:?} is not for this side, or not now")]
    Unexpected(Kind),
}

impl From<Broken> for Error {
    fn from(broken: Broken) -> Self {
        Self::invalid(broken.to_string())
    }
}

/// A header that is within its bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u8,
    pub(crate) request: u32,
    pub(crate) body_bytes: usize,
    pub(crate) payload_bytes: u32,
    seed: u64,
    checksum: u64,
}

impl Header {
    /// Reads a header and checks its lengths.
    pub(crate) fn read(bytes: &[u8; HEADER_BYTES]) -> Result<Self, Broken> {
        let [m0, m1, kind, flags, rest @ ..] = *bytes;
        let [r0, r1, r2, r3, b0, b1, b2, b3, p0, p1, p2, p3, checksum @ ..] = rest;
        if [m0, m1] != MAGIC {
            return Err(Broken::Magic([m0, m1]));
        }
        let kind = Kind::read(kind).ok_or(Broken::Kind(kind))?;
        let body_bytes = u32::from_le_bytes([b0, b1, b2, b3]);
        let payload_bytes = u32::from_le_bytes([p0, p1, p2, p3]);
        let body = bounded(kind, "a body", body_bytes, &kind.body_bytes())?;
        bounded(kind, "a payload", payload_bytes, &kind.payload_bytes())?;
        Ok(Self {
            kind,
            flags,
            request: u32::from_le_bytes([r0, r1, r2, r3]),
            body_bytes: body,
            payload_bytes,
            seed: xxh3_64(bytes.get(..SEED_BYTES).unwrap_or_default()),
            checksum: u64::from_le_bytes(checksum),
        })
    }

    /// Checks header and body against their checksum.
    pub(crate) fn verify(&self, body: &[u8]) -> Result<(), Broken> {
        let right = xxh3_64_with_seed(body, self.seed) == self.checksum;
        if right { Ok(()) } else { Err(Broken::Checksum) }
    }
}

fn bounded(
    kind: Kind,
    what: &'static str,
    given: u32,
    allowed: &RangeInclusive<usize>,
) -> Result<usize, Broken> {
    let (least, most) = (*allowed.start(), *allowed.end());
    match usize::try_from(given) {
        Ok(bytes) if allowed.contains(&bytes) => Ok(bytes),
        _ => Err(Broken::Length { kind, what, given, least, most }),
    }
}

/// Appends a frame without its payload to `out`; `write` appends the body.
pub(crate) fn push(
    out: &mut Vec<u8>,
    (kind, flags): (Kind, u8),
    request: u32,
    payload_bytes: u32,
    write: impl FnOnce(&mut Vec<u8>),
) {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER_BYTES]);
    write(out);
    let Some((header, body)) =
        out.get_mut(start..).and_then(|frame| frame.split_at_mut_checked(HEADER_BYTES))
    else {
        return;
    };
    let body_bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut seed = [0; SEED_BYTES];
    let fields = MAGIC
        .into_iter()
        .chain([kind.number(), flags])
        .chain(request.to_le_bytes())
        .chain(body_bytes.to_le_bytes())
        .chain(payload_bytes.to_le_bytes());
    for (to, from) in seed.iter_mut().zip(fields) {
        *to = from;
    }
    let checksum = xxh3_64_with_seed(body, xxh3_64(&seed));
    for (to, from) in header.iter_mut().zip(seed.into_iter().chain(checksum.to_le_bytes())) {
        *to = from;
    }
}

/// A frame of nothing but its header.
pub(crate) fn bare(kind: Kind, request: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES);
    push(&mut out, (kind, 0), request, 0, |_body| {});
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(frame: &[u8]) -> Result<Header, Broken> {
        Header::read(frame[..HEADER_BYTES].try_into().unwrap())
    }

    #[test]
    fn a_frame_reads_as_it_was_written() {
        let mut out = vec![9; 3];
        push(&mut out, (Kind::Block, 2), 7, 4096, |body| body.extend_from_slice(&[5; 24]));
        let frame = &out[3..];
        let read = header(frame).unwrap();
        assert_eq!((read.kind, read.flags, read.request), (Kind::Block, 2, 7));
        assert_eq!((read.body_bytes, read.payload_bytes), (24, 4096));
        read.verify(&frame[HEADER_BYTES..]).unwrap();
        assert_eq!(read.verify(&[4; 24]), Err(Broken::Checksum));
    }

    #[test]
    fn every_bit_of_header_and_body_is_covered() {
        let mut frame = Vec::new();
        push(&mut frame, (Kind::Block, 2), 7, 4096, |body| body.extend_from_slice(&[5; 24]));
        for bit in 0..frame.len() * 8 {
            let mut changed = frame.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            let read = header(&changed);
            let refused = read.and_then(|read| {
                read.verify(
                    changed.get(HEADER_BYTES..HEADER_BYTES + read.body_bytes).unwrap_or(&[]),
                )
            });
            assert!(refused.is_err(), "bit {bit}");
        }
    }

    #[test]
    fn lengths_are_bounded_by_kind() {
        for (kind, body_bytes, payload_bytes) in [
            (Kind::Hello, u32::MAX, 0),
            (Kind::Offer, 9 << 20, 0),
            (Kind::Data, 24, u32::MAX),
            (Kind::Data, 24, 0),
            (Kind::Data, 25, 1),
            (Kind::Get, 56, 1),
        ] {
            let mut frame = [0; HEADER_BYTES];
            frame[..2].copy_from_slice(&MAGIC);
            frame[2] = kind.number();
            frame[8..12].copy_from_slice(&body_bytes.to_le_bytes());
            frame[12..16].copy_from_slice(&payload_bytes.to_le_bytes());
            let refused = Header::read(&frame).unwrap_err();
            assert!(matches!(refused, Broken::Length { .. }), "{refused}");
        }
    }

    #[test]
    fn other_protocols_are_known_by_their_first_bytes() {
        let http = *b"GET / HTTP/1.1\r\nHost: a\r\n";
        let refused = Header::read(http[..HEADER_BYTES].try_into().unwrap()).unwrap_err();
        assert_eq!(refused, Broken::Magic(*b"GE"));
    }
}
