//! What an object tier costs in a month.
//!
//! Blocks are written in packs, each uploaded and noted in the log; what follows one another is read by
//! one request, up to a length. The bytes are those of the blocks: compression makes
//! them fewer. Requests and storage are paid, traffic within a region is not.

use std::time::Duration;

use kvstrata_tiers::object::{Prices, RUN_BYTES_MAX, bucket::BucketConfig};
use serde::Serialize;

/// Requests to note a pack in the log: fewer when there are many at a time.
const NOTE_REQUESTS: u64 = 1;
/// A twelfth of a year.
const MONTH: Duration = Duration::from_secs(730 * 3600);

/// What an object tier did in a time.
#[derive(Debug, Clone, Copy)]
pub struct ObjectLoad {
    /// The time, above zero.
    pub elapsed: Duration,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes of a pack.
    pub pack_bytes: u64,
    /// Blocks written to it.
    pub written_blocks: u64,
    /// Blocks read from it.
    pub read_blocks: u64,
    /// Stretches of blocks that follow one another, in which they were read.
    pub stretches: u64,
    /// Blocks that it holds in the end.
    pub stored_blocks: u64,
}

/// What it comes to in a month.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bill {
    /// Requests that write.
    pub puts: u64,
    /// Requests that read.
    pub gets: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes stored, at the end of the load.
    pub stored_bytes: u64,
    /// What the writing requests cost.
    pub put_cost: f64,
    /// What the reading requests cost.
    pub get_cost: f64,
    /// What the storage costs.
    pub storage_cost: f64,
}

impl Bill {
    /// All together.
    #[must_use]
    pub fn cost(&self) -> f64 {
        self.put_cost + self.get_cost + self.storage_cost
    }
}

impl ObjectLoad {
    /// What a month costs in which it goes on as it is.
    #[must_use]
    pub fn bill(&self, prices: &Prices) -> Bill {
        let per_month = |count: u64| {
            let month = u128::from(count) * MONTH.as_millis() / self.elapsed.as_millis().max(1);
            u64::try_from(month).unwrap_or(u64::MAX)
        };
        let bytes = |blocks: u64| blocks.saturating_mul(self.block_bytes);
        let written_bytes = bytes(self.written_blocks);
        let packs = written_bytes.div_ceil(self.pack_bytes.max(1));
        let pack_requests = BucketConfig::default().put_requests(self.pack_bytes) + NOTE_REQUESTS;
        // Each stretch is a request, and one more for each length that it is longer than one.
        let gets = self.stretches.max(bytes(self.read_blocks).div_ceil(RUN_BYTES_MAX));
        let puts = per_month(packs.saturating_mul(pack_requests));
        let gets = per_month(gets);
        let stored_bytes = bytes(self.stored_blocks);
        Bill {
            puts,
            gets,
            written_bytes: per_month(written_bytes),
            read_bytes: per_month(bytes(self.read_blocks)),
            stored_bytes,
            put_cost: prices.puts(puts),
            get_cost: prices.gets(gets),
            storage_cost: prices.month(stored_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::limits::MIB;

    use super::*;

    #[test]
    fn a_month_has_the_requests_of_its_packs_and_stretches() {
        let prices = Prices { put: 1.0, get: 2.0, gib: 3.0 };
        let load = ObjectLoad {
            // A hundredth of a month.
            elapsed: MONTH / 100,
            block_bytes: MIB,
            pack_bytes: 32 * MIB,
            written_blocks: 1024,
            read_blocks: 10,
            stretches: 5,
            stored_blocks: 2048,
        };
        let bill = load.bill(&prices);
        // 32 packs in one request each, and one to note it.
        assert_eq!((bill.puts, bill.gets), (32 * 2 * 100, 500));
        assert_eq!((bill.written_bytes, bill.read_bytes), (102_400 * MIB, 1000 * MIB));
        assert_eq!((bill.put_cost, bill.get_cost, bill.storage_cost), (6.4, 1.0, 6.0));
        assert!((bill.cost() - 13.4).abs() < 1e-9);
        // Larger packs go in parts of 8 MiB, with a request before and one behind.
        let large = ObjectLoad { pack_bytes: 64 * MIB, ..load };
        assert_eq!(large.bill(&prices).puts, 16 * 11 * 100);
        // One long stretch is read in pieces.
        let long = ObjectLoad { read_blocks: 80, stretches: 1, ..load };
        assert_eq!(long.bill(&prices).gets, 2000);
        let much =
            ObjectLoad { written_blocks: u64::MAX, elapsed: Duration::from_millis(1), ..load };
        assert_eq!(much.bill(&prices).written_bytes, u64::MAX);
    }
}
