//! How often a tenant may ask, and how many bytes it may move: two buckets that fill with time.
//!
//! A bucket holds what a second brings. A request takes one from the first; bytes are taken from the second
//! when they have moved, so that nothing is counted that did not come, and whoever moves much at once owes
//! the rest: it is asked to wait until it owes nothing. What a tenant does costs no other tenant anything
//! but two additions.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::{Mutex, RwLock};
use tokio::time::Instant;

use crate::limits::{RATE_BURST, RATE_WAIT_MAX, RATE_WAIT_MIN};

/// What a tenant may do in a second; none: as much as it likes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests, of whatever kind, at least 1.
    pub requests: Option<u64>,
    /// Payload of puts and gets together, at least 1.
    pub bytes: Option<u64>,
}

/// A bucket of what a second brings. Kept as the time at which it will be full again.
#[derive(Debug, Default)]
struct Bucket {
    /// 0: there is no bound.
    per_second: AtomicU64,
    full_at: Mutex<Option<Instant>>,
    refused: AtomicU64,
}

impl Bucket {
    /// How long so many take to come; none without a bound.
    fn time_of(&self, count: u64) -> Option<Duration> {
        let per_second = u128::from(self.per_second.load(Ordering::Relaxed));
        let nanos = (u128::from(count) * 1_000_000_000).checked_div(per_second)?;
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// Takes `count` if the bucket has that many and is not empty.
    ///
    /// # Errors
    /// How long until it will have.
    fn take(&self, count: u64, now: Instant) -> Result<(), Duration> {
        let Some(time) = self.time_of(count) else { return Ok(()) };
        let mut full_at = self.full_at.lock();
        let next = full_at.map_or(now, |at| at.max(now)) + time;
        // One always fits into a full bucket.
        let wait = (next - now).saturating_sub(RATE_BURST.max(time));
        if wait.is_zero() {
            *full_at = Some(next);
            return Ok(());
        }
        self.refused.fetch_add(1, Ordering::Relaxed);
        Err(wait.clamp(RATE_WAIT_MIN, RATE_WAIT_MAX))
    }

    /// Takes `count`, whether or not the bucket has that many.
    fn owe(&self, count: u64, now: Instant) {
        let Some(time) = self.time_of(count) else { return };
        let mut full_at = self.full_at.lock();
        // An owed year is as good as any more.
        let next = full_at.map_or(now, |at| at.max(now)).checked_add(time);
        *full_at = next.or(*full_at);
    }
}

/// What one tenant may do in a second, and has done.
#[derive(Debug, Default)]
pub struct Rates {
    requests: Bucket,
    bytes: Bucket,
}

impl Rates {
    /// Counts a request.
    ///
    /// # Errors
    /// `Exhausted` with the time until the next one.
    pub fn request(&self) -> Result<()> {
        self.request_at(Instant::now)
    }

    fn request_at(&self, now: impl FnOnce() -> Instant) -> Result<()> {
        if self.requests.per_second.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        self.requests.take(1, now()).map_err(|wait| spent("requests_per_second", wait))
    }

    /// Asked before bytes are moved.
    ///
    /// # Errors
    /// `Exhausted` with the time until nothing is owed for those that were.
    pub fn may_move(&self) -> Result<()> {
        if self.bytes.per_second.load(Ordering::Relaxed) == 0 {
            return Ok(());
        }
        self.bytes.take(0, Instant::now()).map_err(|wait| spent("bytes_per_second", wait))
    }

    /// Counts bytes that have moved.
    pub fn moved(&self, bytes: u64) {
        if self.bytes.per_second.load(Ordering::Relaxed) > 0 {
            self.bytes.owe(bytes, Instant::now());
        }
    }

    /// What it may do in a second.
    #[must_use]
    pub fn limits(&self) -> RateLimits {
        let of = |bucket: &Bucket| Some(bucket.per_second.load(Ordering::Relaxed));
        let given = |rate: &u64| *rate > 0;
        RateLimits {
            requests: of(&self.requests).filter(given),
            bytes: of(&self.bytes).filter(given),
        }
    }

    /// Requests refused since the start: for their number, and for the bytes of those before them.
    #[must_use]
    pub fn refused(&self) -> (u64, u64) {
        let of = |bucket: &Bucket| bucket.refused.load(Ordering::Relaxed);
        (of(&self.requests), of(&self.bytes))
    }

    fn set(&self, limits: RateLimits) {
        self.requests.per_second.store(limits.requests.unwrap_or(0), Ordering::Relaxed);
        self.bytes.per_second.store(limits.bytes.unwrap_or(0), Ordering::Relaxed);
    }
}

fn spent(field: &str, retry_after: Duration) -> Error {
    let kind = ErrorKind::Exhausted { retry_after };
    Error::new(kind, format!("{field}: the tenant has used up what it may do in a second"))
}

/// The rates of all tenants; those of one are shared by all who come in for it.
#[derive(Debug, Default)]
pub struct RateTable(RwLock<HashMap<Box<str>, Arc<Rates>>>);

impl RateTable {
    /// Those of a tenant, made now if there are none. Tenants are as many as the tokens file names.
    #[must_use]
    pub fn of(&self, tenant: &str) -> Arc<Rates> {
        if let Some(known) = self.0.read().get(tenant) {
            return Arc::clone(known);
        }
        Arc::clone(self.0.write().entry(tenant.into()).or_default())
    }

    /// Gives tenants these limits and all others none.
    pub fn set(&self, limits: &[(&str, RateLimits)]) {
        let rates: Vec<_> =
            limits.iter().map(|(tenant, limits)| (self.of(tenant), *limits)).collect();
        for other in self.0.read().values() {
            if !rates.iter().any(|(given, _)| Arc::ptr_eq(given, other)) {
                other.set(RateLimits::default());
            }
        }
        rates.iter().for_each(|(rates, limits)| rates.set(*limits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENTH: Duration = Duration::from_millis(100);

    fn bucket(per_second: u64) -> Bucket {
        Bucket { per_second: AtomicU64::new(per_second), ..Bucket::default() }
    }

    /// How many of one per millisecond are let through in so many seconds.
    fn let_through(bucket: &Bucket, seconds: u64) -> u64 {
        let start = Instant::now();
        let ask = |ms| bucket.take(1, start + Duration::from_millis(ms)).is_ok();
        (0..seconds * 1000).map(|ms| u64::from(ask(ms))).sum()
    }

    #[test]
    fn a_rate_holds_over_time_with_a_second_of_it_at_once() {
        for rate in [1, 10, 100, 700] {
            let passed = let_through(&bucket(rate), 20);
            assert!((21 * rate).abs_diff(passed) <= 1, "{rate}: {passed}");
        }
        assert_eq!(let_through(&bucket(0), 2), 2000, "no bound");
    }

    #[test]
    fn who_is_refused_is_told_when_to_come_again_and_is_let_in_then() {
        let (bucket, start) = (bucket(10), Instant::now());
        (0..10).for_each(|_| bucket.take(1, start).unwrap());
        assert_eq!(bucket.take(1, start), Err(TENTH));
        assert_eq!(bucket.take(1, start + TENTH / 2), Err(TENTH / 2));
        assert_eq!(bucket.take(1, start + TENTH), Ok(()));
        assert_eq!(bucket.refused.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn what_has_moved_is_owed_and_paid_with_time() {
        let (bucket, start) = (bucket(1000), Instant::now());
        bucket.take(0, start).unwrap();
        bucket.owe(5000, start);
        assert_eq!(bucket.take(0, start), Err(Duration::from_secs(4)));
        assert_eq!(bucket.take(0, start + Duration::from_secs(4)), Ok(()));
        bucket.owe(u64::MAX, start);
        assert_eq!(bucket.take(0, start), Err(RATE_WAIT_MAX));
    }

    #[test]
    fn one_tenants_limit_is_no_others() {
        let table = RateTable::default();
        let limits = RateLimits { requests: Some(1), bytes: None };
        table.set(&[("a", limits)]);
        let (a, b) = (table.of("a"), table.of("b"));
        a.request().unwrap();
        let error = a.request().unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::Exhausted { .. }), "{error}");
        assert!(error.to_string().contains("requests_per_second"), "{error}");
        (0..100).for_each(|_| b.request().unwrap());
        assert_eq!((a.limits(), a.refused(), b.refused()), (limits, (1, 0), (0, 0)));
        table.set(&[]);
        (0..100).for_each(|_| a.request().unwrap());
    }
}
