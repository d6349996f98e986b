//! The random ids that clients hold: whoever of their tenant knows one may use what it names.

use std::{fmt, marker::PhantomData};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use rand::TryRng;

/// The length of an id on the wire, in bytes: 128 random bits cannot be guessed or met twice.
pub const ID_BYTES: usize = 16;

/// What an id names: keeps ids of different things apart.
pub trait Named: Copy + Ord + std::hash::Hash {}

/// Names a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OfSession {}

/// Names a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OfLease {}

/// Names a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OfReservation {}

impl Named for OfSession {}
impl Named for OfLease {}
impl Named for OfReservation {}

/// The id of one thing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Id<Of: Named> {
    bytes: [u8; ID_BYTES],
    of: PhantomData<Of>,
}

/// A session.
pub type SessionId = Id<OfSession>;

/// A lease.
pub type LeaseId = Id<OfLease>;

/// Bytes that are about to be loaded.
pub type ReservationId = Id<OfReservation>;

impl<Of: Named> Id<Of> {
    /// A new id.
    ///
    /// # Errors
    /// `Internal` if the system has no randomness.
    pub fn random() -> Result<Self> {
        Ok(Self { bytes: random()?, of: PhantomData })
    }

    /// Reads the id in `field` of a request.
    ///
    /// # Errors
    /// `Invalid` if it has another length.
    pub fn read(field: &str, bytes: &[u8]) -> Result<Self> {
        match bytes.try_into() {
            Ok(bytes) => Ok(Self { bytes, of: PhantomData }),
            Err(_other_length) => Err(Error::invalid(format!(
                "{field}: {} bytes given, {ID_BYTES} required",
                bytes.len()
            ))),
        }
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; ID_BYTES] {
        &self.bytes
    }
}

/// Ids are secrets of a kind: logs get the first four bytes.
impl<Of: Named> fmt::Debug for Id<Of> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes.iter().take(4).try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str("..")
    }
}

/// A number that nobody can predict.
///
/// # Errors
/// `Internal` if the system has no randomness.
pub fn random_seed() -> Result<u64> {
    let [a, b, c, d, e, f, g, h, ..] = random_bytes()?;
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// Bytes that name something for good.
///
/// # Errors
/// `Internal` if the system has no randomness.
pub fn random_bytes() -> Result<[u8; ID_BYTES]> {
    random()
}

/// A key or a token that nobody can guess.
///
/// # Errors
/// `Internal` if the system has no randomness.
pub fn random_key() -> Result<[u8; 32]> {
    random()
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    match rand::rngs::SysRng.try_fill_bytes(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(why) => Err(Error::new(ErrorKind::Internal, "make a random id").because(why)),
    }
}
