//! What an object store charges.

use std::{fmt, str::FromStr};

use super::metrics::OpLabel;
use crate::{
    error::{Error, Result},
    limits::GIB,
};

/// Prices of an object store, finite and in whatever currency. An estimate: traffic out of the region
/// and minimum storage times are not in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// Of 1000 requests that write or list.
    pub put: f64,
    /// Of 1000 requests that read.
    pub get: f64,
    /// Of one GiB for a month.
    pub gib: f64,
}

// Prices are finite.
impl Eq for Prices {}

impl Default for Prices {
    /// In dollars: the list prices of S3 Standard in us-east-1 in 2026, which are those of 2017.
    fn default() -> Self {
        Self { put: 0.005, get: 0.0004, gib: 0.023 }
    }
}

impl Prices {
    /// One request.
    #[must_use]
    pub fn request(&self, op: OpLabel) -> f64 {
        match op {
            OpLabel::Get | OpLabel::Head => self.gets(1),
            OpLabel::Put | OpLabel::Create | OpLabel::Part | OpLabel::Multipart | OpLabel::List => {
                self.puts(1)
            }
            OpLabel::Delete => 0.0,
        }
    }

    /// Requests that write or list.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn puts(&self, count: u64) -> f64 {
        count as f64 / 1e3 * self.put
    }

    /// Requests that read.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn gets(&self, count: u64) -> f64 {
        count as f64 / 1e3 * self.get
    }

    /// So many bytes, for a month.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn month(&self, bytes: u64) -> f64 {
        bytes as f64 / GIB as f64 * self.gib
    }
}

impl fmt::Display for Prices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "put={},get={},gib={}", self.put, self.get, self.gib)
    }
}

impl FromStr for Prices {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut prices = Self::default();
        for item in text.split(',') {
            let refuse = || {
                Error::invalid(
                    "put=PRICE, get=PRICE and gib=PRICE, with commas between them and prices of at \
                     least 0",
                )
            };
            let (name, price) = item.split_once('=').ok_or_else(refuse)?;
            let price: f64 = price.parse().map_err(|source| refuse().because(source))?;
            let place = match name {
                "put" => &mut prices.put,
                "get" => &mut prices.get,
                "gib" => &mut prices.gib,
                _ => return Err(refuse()),
            };
            if !price.is_finite() || price < 0.0 {
                return Err(refuse());
            }
            *place = price;
        }
        Ok(prices)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_read_as_written() {
        let prices: Prices = "get=0.001,put=0.01".parse().unwrap();
        assert_eq!(prices, Prices { put: 0.01, get: 0.001, gib: 0.023 });
        assert_eq!(prices.to_string().parse::<Prices>().unwrap(), prices);
        for bad in ["", "put", "put=", "put=x", "put=-1", "put=nan", "egress=1", "put=1;get=1"] {
            let error = bad.parse::<Prices>().unwrap_err().to_string();
            assert!(error.contains("put=PRICE"), "{bad}: {error}");
        }
    }
}
