//! What one client counted, and how counts of several clients add up.

use std::{ops::AddAssign, time::Duration};

use hdrhistogram::Histogram;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use crate::client::{GetSummary, Locality, Lookup, PutOutcome, PutReport, Run};

/// The longest time that a histogram tells apart, in microseconds: ten minutes.
const LATENCY_MICROS_MAX: u64 = 600_000_000;
/// Decimal digits that a histogram keeps.
const LATENCY_DIGITS: u8 = 3;

/// Times of one verb.
#[derive(Debug, Clone)]
pub struct Latency {
    micros: Histogram<u64>,
    busy: Duration,
}

impl Latency {
    pub(super) fn new() -> Result<Self> {
        let micros = Histogram::new_with_max(LATENCY_MICROS_MAX, LATENCY_DIGITS)
            .map_err(|error| Error::new(ErrorKind::Internal, "make histogram").because(error))?;
        Ok(Self { micros, busy: Duration::ZERO })
    }

    /// Takes the time of one call.
    pub fn record(&mut self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.micros.saturating_record(micros);
        self.busy += took;
    }

    /// How many calls there were.
    #[must_use]
    pub fn calls(&self) -> u64 {
        self.micros.len()
    }

    /// The time within which this share of the calls ended, 0 to 1.
    #[must_use]
    pub fn quantile(&self, share: f64) -> Duration {
        Duration::from_micros(self.micros.value_at_quantile(share))
    }

    /// The longest call.
    #[must_use]
    pub fn max(&self) -> Duration {
        Duration::from_micros(self.micros.max())
    }

    /// All calls together.
    #[must_use]
    pub fn busy(&self) -> Duration {
        self.busy
    }

    fn add(&mut self, other: &Self) {
        self.micros += &other.micros;
        self.busy += other.busy;
    }
}

/// The outcomes of puts, in blocks. Their sum is what was offered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct PutCounts {
    /// Stored by this put.
    pub stored: u64,
    /// Present with the same bytes.
    pub duplicate: u64,
    /// Present with other bytes: an error here, because bytes follow from the identity.
    pub duplicate_differs: u64,
    /// Another client's put of it was in flight.
    pub pending: u64,
    /// No room.
    pub refused: u64,
    /// Damaged on the way to the server.
    pub corrupt: u64,
    /// Readable, and not on nvme although that was asked for: every other outcome.
    pub not_durable: u64,
}

/// Counts before a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mark {
    looked_up: [u64; 5],
    remote: u64,
    behind_pending: u64,
    got: GetSummary,
    checked_bytes: u64,
    gone: u64,
    put: PutCounts,
    put_bytes: u64,
}

/// Everything that one client counted.
#[derive(Debug, Clone)]
pub struct Tally {
    /// Requests replayed.
    pub requests: u64,
    /// Blocks that these requests name, counted from the trace.
    pub references: u64,
    /// Hits in dram, nvme and object, pending and missed, as the lookups said.
    pub looked_up: [u64; 5],
    /// Of the hits, those on other nodes than the one asked.
    pub remote: u64,
    /// Of the hits, those behind a block whose put was in flight: found, and not to be read as one
    /// prefix. They are offered again.
    pub behind_pending: u64,
    /// The longest lookup, in hashes.
    pub lookup_hashes_max: u64,
    /// What gets delivered.
    pub got: GetSummary,
    /// Bytes compared.
    pub checked_bytes: u64,
    /// Bytes that differed.
    pub wrong_bytes: u64,
    /// Blocks with a byte that differed.
    pub wrong_blocks: u64,
    /// Blocks promised by a lease and not delivered.
    pub lease_failures: u64,
    /// Blocks found, not covered by a lease, and gone when they were read.
    pub gone: u64,
    /// Blocks removed on purpose.
    pub removed: u64,
    /// Requests repeated because their server was killed.
    pub repeated: u64,
    /// What became of offered blocks.
    pub put: PutCounts,
    /// Bytes sent in puts.
    pub put_bytes: u64,
    /// Times of lookups.
    pub lookup: Latency,
    /// Times of gets.
    pub get: Latency,
    /// Times of puts.
    pub put_latency: Latency,
}

impl Tally {
    /// Starts from nothing.
    ///
    /// # Errors
    /// `Internal` if a histogram cannot be made.
    pub fn new() -> Result<Self> {
        Ok(Self {
            requests: 0,
            references: 0,
            looked_up: [0; 5],
            remote: 0,
            behind_pending: 0,
            lookup_hashes_max: 0,
            got: GetSummary::default(),
            checked_bytes: 0,
            wrong_bytes: 0,
            wrong_blocks: 0,
            lease_failures: 0,
            gone: 0,
            removed: 0,
            repeated: 0,
            put: PutCounts::default(),
            put_bytes: 0,
            lookup: Latency::new()?,
            get: Latency::new()?,
            put_latency: Latency::new()?,
        })
    }

    /// Blocks found readable, on all tiers together.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.looked_up.iter().take(3).sum()
    }

    /// Takes the answer to one lookup.
    pub fn looked_up(&mut self, found: &Lookup) {
        let before = self.hits();
        for (total, count) in self.looked_up.iter_mut().zip(found.counts.to_array()) {
            *total += u64::from(count);
        }
        let prefix = u64::from(found.prefix_blocks);
        self.behind_pending += (self.hits() - before).saturating_sub(prefix);
        let elsewhere = |run: &&Run| run.locality == Locality::Remote && !run.pending;
        let remote = found.runs.iter().filter(elsewhere);
        self.remote += remote.map(|run| u64::from(run.end.saturating_sub(run.start))).sum::<u64>();
    }

    /// Takes the outcome of one put.
    pub fn put(&mut self, report: &PutReport) {
        let count = |outcome| report.count(outcome);
        let put = PutCounts {
            stored: count(PutOutcome::Stored) + count(PutOutcome::PartStored),
            duplicate: count(PutOutcome::Duplicate),
            duplicate_differs: count(PutOutcome::DuplicateDiffers),
            pending: count(PutOutcome::Pending),
            refused: count(PutOutcome::Refused),
            corrupt: count(PutOutcome::Corrupt),
            not_durable: count(PutOutcome::NotDurable),
        };
        self.put += put;
        self.put_bytes += report.sent_bytes;
    }

    /// What a request that is about to start may have to give up again.
    pub(super) fn mark(&self) -> Mark {
        Mark {
            looked_up: self.looked_up,
            remote: self.remote,
            behind_pending: self.behind_pending,
            got: self.got,
            checked_bytes: self.checked_bytes,
            gone: self.gone,
            put: self.put,
            put_bytes: self.put_bytes,
        }
    }

    /// Forgets what a request counted that has to be repeated, so that it counts once. What is wrong
    /// stays counted, and times stay recorded.
    pub(super) fn give_up(&mut self, mark: &Mark) {
        self.looked_up = mark.looked_up;
        self.remote = mark.remote;
        self.behind_pending = mark.behind_pending;
        let corrupt_here = self.got.corrupt_here;
        self.got = GetSummary { corrupt_here, ..mark.got };
        self.checked_bytes = mark.checked_bytes;
        self.gone = mark.gone;
        let PutCounts { corrupt, duplicate_differs, .. } = self.put;
        self.put = PutCounts { corrupt, duplicate_differs, ..mark.put };
        self.put_bytes = mark.put_bytes;
        self.repeated += 1;
    }

    /// Adds what another client counted.
    pub fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.references += other.references;
        for (total, count) in self.looked_up.iter_mut().zip(other.looked_up) {
            *total += count;
        }
        self.remote += other.remote;
        self.behind_pending += other.behind_pending;
        self.lookup_hashes_max = self.lookup_hashes_max.max(other.lookup_hashes_max);
        self.got += other.got;
        self.checked_bytes += other.checked_bytes;
        self.wrong_bytes += other.wrong_bytes;
        self.wrong_blocks += other.wrong_blocks;
        self.lease_failures += other.lease_failures;
        self.gone += other.gone;
        self.removed += other.removed;
        self.repeated += other.repeated;
        self.put += other.put;
        self.put_bytes += other.put_bytes;
        self.lookup.add(&other.lookup);
        self.get.add(&other.get);
        self.put_latency.add(&other.put_latency);
    }
}

impl AddAssign for PutCounts {
    fn add_assign(&mut self, other: Self) {
        self.stored += other.stored;
        self.duplicate += other.duplicate;
        self.duplicate_differs += other.duplicate_differs;
        self.pending += other.pending;
        self.refused += other.refused;
        self.corrupt += other.corrupt;
        self.not_durable += other.not_durable;
    }
}

impl PutCounts {
    /// Blocks offered.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.stored
            + self.duplicate
            + self.duplicate_differs
            + self.pending
            + self.refused
            + self.corrupt
            + self.not_durable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_that_is_repeated_counts_once_and_hides_nothing() {
        let mut tally = Tally::new().unwrap();
        tally.looked_up = [5, 0, 0, 0, 5];
        tally.put.stored = 5;
        let mark = tally.mark();
        tally.looked_up = [9, 0, 0, 0, 11];
        tally.put.stored = 9;
        tally.put.corrupt = 1;
        tally.checked_bytes = 100;
        tally.wrong_bytes = 3;
        tally.lease_failures = 2;
        tally.give_up(&mark);
        assert_eq!((tally.looked_up, tally.put.stored), ([5, 0, 0, 0, 5], 5));
        assert_eq!((tally.checked_bytes, tally.repeated), (0, 1));
        assert_eq!((tally.wrong_bytes, tally.lease_failures, tally.put.corrupt), (3, 2, 1));
    }
}
