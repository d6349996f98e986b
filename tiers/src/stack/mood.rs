//! How the tier that the cleaner writes to is doing, and what follows from it.

use tokio::time::{Duration, Instant};

use crate::{
    admission::Admission,
    error::{Error, ErrorKind},
};

/// The first pause after a failure; it doubles with every further one.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause: how late it may be noticed that a tier is well again.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Trouble that comes again within this time is the same one: one line of log.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// What is known of the tier.
#[derive(Debug, Default)]
pub(super) struct Mood {
    /// Failures in a row, those within one pause counted once.
    failures: u32,
    paused_until: Option<Instant>,
    /// Until when it takes only blocks that have been read.
    short_until: Option<Instant>,
    warned: Option<Instant>,
}

impl Mood {
    /// The tier did what it was asked.
    pub(super) fn well(&mut self) {
        if self.failures > 0 {
            tracing::info!(failures = self.failures, "nvme takes demotions again");
        }
        self.failures = 0;
        self.paused_until = None;
    }

    /// The tier failed to take a block; says which sweep should look for it again.
    pub(super) fn trouble(
        &mut self,
        error: &Error,
        reused: bool,
        now: Instant,
    ) -> Option<Admission> {
        self.warn(error, now);
        let kind = error.kind();
        if let ErrorKind::Exhausted { retry_after } = kind {
            let until = now + retry_after.clamp(PAUSE_MIN, PAUSE_MAX);
            if !reused {
                self.short_until = Some(until);
                return Some(Admission::Reused);
            }
            self.paused_until = self.paused_until.max(Some(until));
            return Some(Admission::All);
        }
        if kind == ErrorKind::Invalid {
            // It is the block that does not fit; the tier is well.
            return None;
        }
        if self.paused_until(now).is_none() {
            let doubled = PAUSE_MIN.saturating_mul(1 << self.failures.min(16));
            self.failures = self.failures.saturating_add(1);
            self.paused_until = Some(now + doubled.min(PAUSE_MAX));
        }
        // A failure that is not said to pass is not tried again and again.
        kind.is_retryable().then_some(Admission::All)
    }

    /// Says so when trouble begins, not while it lasts.
    fn warn(&mut self, error: &Error, now: Instant) {
        let known = [self.short_until, self.paused_until, self.warned];
        let lasts = known.iter().flatten().any(|known| now < *known + WARN_INTERVAL);
        if self.failures == 0 && !lasts {
            self.warned = Some(now);
            tracing::warn!(%error, "nvme does not take all demotions; dram evicts some blocks for good");
        }
    }

    /// When to go on; none for now.
    pub(super) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.paused_until.filter(|until| now < *until)
    }

    /// It has failed, and not succeeded since.
    pub(super) fn is_troubled(&self) -> bool {
        self.failures > 0
    }

    /// What it takes now.
    pub(super) fn admission(&self, now: Instant) -> Admission {
        match self.short_until {
            Some(until) if now < until => Admission::Reused,
            Some(_) | None => Admission::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_double_up_to_a_bound_and_end_with_success() {
        let mut mood = Mood::default();
        let error = Error::new(ErrorKind::Unavailable, "write");
        let mut pauses = Vec::new();
        for _ in 0..10 {
            let now = Instant::now();
            assert_eq!(mood.trouble(&error, true, now), Some(Admission::All));
            // Those that were under way make it no longer.
            mood.trouble(&error, false, now);
            let until = mood.paused_until(now).unwrap();
            pauses.push(until.duration_since(now));
            tokio::time::sleep_until(until).await;
        }
        assert_eq!(pauses[..3], [100, 200, 400].map(Duration::from_millis));
        assert_eq!(pauses[9], PAUSE_MAX);
        mood.well();
        assert!(!mood.is_troubled() && mood.paused_until(Instant::now()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn trouble_that_lasts_is_told_once() {
        let mut mood = Mood::default();
        let kind = ErrorKind::Exhausted { retry_after: Duration::from_secs(1) };
        let error = Error::new(kind, "write");
        let start = Instant::now();
        for second in 0..1000 {
            mood.trouble(&error, false, start + Duration::from_secs(second));
        }
        assert_eq!(mood.warned, Some(start));
        let later = start + Duration::from_secs(2000);
        mood.trouble(&error, false, later);
        assert_eq!(mood.warned, Some(later));
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_budget_stops_only_what_nobody_read() {
        let mut mood = Mood::default();
        let now = Instant::now();
        let kind = ErrorKind::Exhausted { retry_after: Duration::from_secs(2) };
        let error = Error::new(kind, "write");
        assert_eq!(mood.trouble(&error, false, now), Some(Admission::Reused));
        assert_eq!((mood.admission(now), mood.paused_until(now)), (Admission::Reused, None));
        assert_eq!(mood.admission(now + Duration::from_secs(2)), Admission::All);
        assert_eq!(mood.trouble(&error, true, now), Some(Admission::All));
        assert_eq!(mood.paused_until(now), Some(now + Duration::from_secs(2)));
        let broken = Error::new(ErrorKind::Internal, "write");
        assert_eq!(mood.trouble(&broken, true, now), None);
    }
}
