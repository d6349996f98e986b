//! Capacities as people write them.

use std::{fmt, str::FromStr};

use bytesize::ByteSize;
use kvstrata_tiers::error::{Error, Result};

use crate::trace::Trace;

/// How large a cache is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Capacity {
    /// A part of the trace's distinct blocks, in percent; above 0.
    Percent(f64),
    /// Bytes of KV.
    Bytes(ByteSize),
    /// Room for every block of the trace.
    Unlimited,
}

impl Capacity {
    /// The capacity in whole blocks, rounded down; never more than the trace has.
    ///
    /// # Errors
    /// `Invalid` if it is given in bytes and the bytes of a block are not known, or if it is too
    /// small for one block.
    pub fn blocks(&self, trace: &Trace, block_bytes: Option<u64>) -> Result<u32> {
        let unique = trace.blocks_unique();
        let blocks = match self {
            Self::Percent(percent) => of_percent(unique, *percent),
            Self::Bytes(bytes) => {
                let block = block_bytes.filter(|bytes| *bytes > 0).ok_or_else(|| {
                    Error::invalid(format!(
                        "capacity: {self} given, which needs --model or --block-bytes to become \
                         blocks"
                    ))
                })?;
                u32::try_from(bytes.as_u64() / block).unwrap_or(u32::MAX)
            }
            Self::Unlimited => unique,
        };
        if blocks == 0 {
            return Err(Error::invalid(format!(
                "capacity: {self} given, at least one block needed"
            )));
        }
        Ok(blocks.min(unique))
    }
}

fn of_percent(unique: u32, percent: f64) -> u32 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a percentage above 0 of a u32; the cast saturates above"
    )]
    let blocks = (f64::from(unique) * percent / 100.0).floor() as u32;
    blocks
}

impl fmt::Display for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => write!(f, "{percent} %"),
            Self::Bytes(bytes) => write!(f, "{}", bytes.display().iec()),
            Self::Unlimited => f.write_str("unlimited"),
        }
    }
}

impl FromStr for Capacity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = || {
            Error::invalid(format!(
                "capacity: {text} given; a percentage above 0 (5%), a size (64GiB) or `unlimited` \
                 allowed"
            ))
        };
        if text == "unlimited" {
            return Ok(Self::Unlimited);
        }
        if let Some(percent) = text.strip_suffix('%') {
            let percent: f64 = percent.trim().parse().map_err(|source| refuse().because(source))?;
            let allowed = percent.is_finite() && percent > 0.0;
            return if allowed { Ok(Self::Percent(percent)) } else { Err(refuse()) };
        }
        // A bare number would be read as bytes; more likely a unit was forgotten.
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(refuse());
        }
        let size: ByteSize = text.parse().map_err(|why: String| refuse().because(why))?;
        if size.as_u64() == 0 { Err(refuse()) } else { Ok(Self::Bytes(size)) }
    }
}

/// One tier of a hierarchy: `dram=5%`.
#[derive(Debug, Clone, PartialEq)]
pub struct TierCapacity {
    /// The tier: dram, nvme or object.
    pub name: String,
    /// Its size.
    pub capacity: Capacity,
}

/// The tiers, hot to cold.
const TIERS: [&str; 3] = ["dram", "nvme", "object"];

impl FromStr for TierCapacity {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (name, capacity) =
            text.split_once('=').filter(|(name, _)| TIERS.contains(name)).ok_or_else(|| {
                Error::invalid(format!(
                    "tier: {text} given, dram=CAPACITY, nvme=CAPACITY or object=CAPACITY allowed"
                ))
            })?;
        Ok(Self { name: name.to_owned(), capacity: capacity.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_read_as_written() {
        assert_eq!("0.5%".parse::<Capacity>().unwrap(), Capacity::Percent(0.5));
        assert_eq!("64GiB".parse::<Capacity>().unwrap(), Capacity::Bytes(ByteSize::gib(64)));
        assert_eq!("unlimited".parse::<Capacity>().unwrap(), Capacity::Unlimited);
        for bad in ["", "%", "-1%", "0%", "nan%", "inf%", "12", "0GiB", "GiB", "x"] {
            let error = bad.parse::<Capacity>().unwrap_err().to_string();
            assert!(error.contains(&format!("capacity: {bad} given")), "{error}");
        }
        assert!("ram=5%".parse::<TierCapacity>().is_err());
        assert!("dram".parse::<TierCapacity>().is_err());
    }

    #[test]
    fn capacities_become_whole_blocks() {
        let trace = Trace::of(&[&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]);
        let blocks = |text: &str, bytes| text.parse::<Capacity>().unwrap().blocks(&trace, bytes);
        assert_eq!(blocks("55%", None).unwrap(), 5);
        assert_eq!(blocks("500%", None).unwrap(), 10);
        assert_eq!(blocks("7KiB", Some(1024)).unwrap(), 7);
        assert_eq!(blocks("unlimited", None).unwrap(), 10);
        assert!(blocks("7KiB", None).unwrap_err().to_string().contains("--model"));
        assert!(blocks("1%", None).unwrap_err().to_string().contains("at least one block"));
    }
}
