//! The bytes of what lies in the bucket. Numbers are little-endian.
//!
//! ```text
//! pack: the stored bytes of each block, one behind the other; the footer; the trailer
//!
//! footer                               entry of a footer                 trailer: the last 64 bytes
//!  0  8 "KVSTRPKF"                      0 32 block hash                   0  8 "KVSTRPKT"
//!  8  2 version 1                      32  4 number of its namespace      8  2 version 1
//! 10  2 bytes of the cluster's name    36  4 stored bytes                10  2 zero
//! 12  4 ordinal                        40  4 bytes of the block          12  4 ordinal
//! 16  8 epoch                          44  8 layout digest               16  8 epoch
//! 24  8 seq                            52  2 count of part checksums     24  8 seq
//! 32  8 made, ms since 1970            54  1 coding                      32  8 where the footer is
//! 40  4 namespaces                     55  1 zero                        40  4 bytes of the footer
//! 44  4 entries                        56    8 for each checksum         44  4 entries
//! 48    the cluster's name                                               48  8 checksum of the footer
//!       for each namespace: 32 id,                                       56  8 XXH3-64 of 0..56
//!         4 length, encoded form
//!       the entries, in their order
//!       8 XXH3-64 of all before
//!
//! manifest                             record                            epoch             sign of life
//!  0  8 "KVSTRMAN"                      0  1 kind                         0  8 "KVSTREPO"   "KVSTRALV"
//!  8  2 version 1                       1  3 zero                         8  2 version 1
//! 10  2 bytes of the cluster's name     4  4 bytes behind this           10  2 bytes of the cluster's name
//! 12  4 ordinal                         8    what the kind says          12  4 ordinal
//! 16  8 epoch                                                            16  8 epoch
//! 24  8 seq                            kinds                             24  8 opened     seen, ms
//! 32  4 records                        1 pack: its footer                32  8 1 + the epoch taken over,
//! 36  4 zero                           2 dropped: 4 ordinal, 4 zero,          or 0        zero
//! 40    the cluster's name                8 epoch, 8 seq of the pack     40  2 bytes of the holder's name
//!       the records                    3 removed: 8 epoch, 8 seq, then   42  1 role     zero
//!       8 XXH3-64 of all before           for each block 32 namespace    43  5 zero
//!                                         id, 32 hash                    48    the cluster's name
//!                                      4 base: 8 seq                           the holder's name
//!                                                                              8 XXH3-64 of all before
//! ```
//! What a structure does not say: the place of a block in its pack is where the one before it ends.
//! There is one way to write each thing down, and no other is read: what decodes encodes to the same
//! bytes. Decoders take any bytes, do not panic, and allocate no more than a small multiple of them.
//!
//! Upgrades: every structure keeps its magic, the version behind it, and a checksum of all before as
//! its last 8 bytes; a trailer stays the last 64 bytes of its pack. A version that is not known is
//! [`Damage::Version`]: the object is left alone and its blocks are misses until a program that knows
//! it comes back. Version N reads what N-1 wrote.

mod build;
mod epoch;
mod footer;
mod manifest;
mod trailer;

pub use self::{
    build::{Block, CodingPolicy, Pack, PackBuilder, Refused},
    epoch::{Alive, EpochRecord, HOLDER_BYTES_MAX, Role},
    footer::{Footer, PackEntry},
    manifest::{Manifest, ManifestRecord},
    trailer::PackTrailer,
};
use super::names::ClusterName;
use crate::fields::Reader;
pub use crate::fields::{Damage, checksum};

/// The version of everything here.
pub const FORMAT_VERSION: u16 = 1;
/// Blocks in a pack: what 64 MiB of the smallest useful ones are.
pub const PACK_ENTRIES_MAX: usize = 65_536;
/// The longest footer, in bytes: as much is read to memory for each pack that a start looks at.
pub const FOOTER_BYTES_MAX: u32 = 16 << 20;
/// What one manifest should not exceed, in bytes. Whoever has more to say says it in several.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// The name of a cluster of so many bytes.
fn cluster(fields: &mut Reader<'_>, bytes: u16) -> Result<ClusterName, Damage> {
    let name = std::str::from_utf8(fields.take(bytes.into())?);
    let name = name.map_err(|_not_text| Damage::Misplaced)?;
    ClusterName::new(name).map_err(|_not_a_name| Damage::Misplaced)
}

/// A length as it is written.
fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(u32::MAX)
}

/// The length of a name as it is written.
fn short(bytes: usize) -> u16 {
    u16::try_from(bytes).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod fuzz_tests;
#[cfg(test)]
mod tests;
