//! The random ids that clients hold: whoever knows one may use what it names.

use std::fmt;

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use rand::TryRng;

/// The length of an id on the wire, in bytes: 128 random bits cannot be guessed or met twice.
pub const ID_BYTES: usize = 16;

/// A session.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId([u8; ID_BYTES]);

/// A lease.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId([u8; ID_BYTES]);

impl SessionId {
    /// A new id.
    ///
    /// # Errors
    /// `Internal` if the system has no randomness.
    pub fn random() -> Result<Self> {
        random().map(Self)
    }

    /// Reads the id in `field` of a request.
    ///
    /// # Errors
    /// `Invalid` if it has another length.
    pub fn read(field: &str, bytes: &[u8]) -> Result<Self> {
        read(field, bytes).map(Self)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }
}

impl LeaseId {
    /// A new id.
    ///
    /// # Errors
    /// `Internal` if the system has no randomness.
    pub fn random() -> Result<Self> {
        random().map(Self)
    }

    /// Reads the id in `field` of a request.
    ///
    /// # Errors
    /// `Invalid` if it has another length.
    pub fn read(field: &str, bytes: &[u8]) -> Result<Self> {
        read(field, bytes).map(Self)
    }

    /// The bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; ID_BYTES] {
        &self.0
    }
}

/// A number that nobody can predict.
///
/// # Errors
/// `Internal` if the system has no randomness.
pub fn random_seed() -> Result<u64> {
    let [a, b, c, d, e, f, g, h, ..] = random()?;
    Ok(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

fn random() -> Result<[u8; ID_BYTES]> {
    let mut bytes = [0; ID_BYTES];
    match rand::rngs::SysRng.try_fill_bytes(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(why) => Err(Error::new(ErrorKind::Internal, "make a random id").because(why)),
    }
}

fn read(field: &str, bytes: &[u8]) -> Result<[u8; ID_BYTES]> {
    match bytes.try_into() {
        Ok(id) => Ok(id),
        Err(_other_length) => Err(Error::invalid(format!(
            "{field}: {} bytes given, {ID_BYTES} required",
            bytes.len()
        ))),
    }
}

/// Ids are secrets of a kind: logs get the first four bytes.
fn short(id: [u8; ID_BYTES], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    id.iter().take(4).try_for_each(|byte| write!(f, "{byte:02x}"))?;
    f.write_str("..")
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        short(self.0, f)
    }
}

impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        short(self.0, f)
    }
}
