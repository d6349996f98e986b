//! Whether a server answers, so that one that does not is an error at once and not after a deadline.
//!
//! The first call that is not answered in time, or is answered that the server is away, opens the
//! breaker: for a pause every call fails without being sent. Then one call is let through; the others go
//! on failing until it has been answered, or until the pause is over once more. Each failure of such a
//! call doubles the pause, from [`PAUSE_MIN`] to [`PAUSE_MAX`]. Any other answer closes the breaker, an
//! error, too: whoever answers is there.

use std::time::Duration;

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::time::Instant;

/// The first pause: shorter than a server takes to start again.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// The longest pause: how late a server that is back is found, at most.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Breaker(Mutex<Option<Open>>);

#[derive(Debug)]
struct Open {
    pause: Duration,
    /// When the next call is let through.
    until: Instant,
    /// A call was let through, and nothing is known of it yet.
    is_tried: bool,
}

impl Breaker {
    /// Lets a call through, or not.
    ///
    /// # Errors
    /// `Unavailable` while the server is not asked.
    pub(super) fn admit(&self, doing: &str) -> Result<()> {
        let mut open = self.0.lock();
        let Some(open) = open.as_mut() else { return Ok(()) };
        let now = Instant::now();
        if now < open.until {
            let left = open.until.duration_since(now).as_millis();
            let text =
                format!("{doing}: the server did not answer; it is not asked for {left} more ms");
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        (open.until, open.is_tried) = (now + open.pause, true);
        Ok(())
    }

    /// Takes note of what came of a call that was let through; returns it.
    pub(super) fn note<T>(&self, outcome: Result<T>) -> Result<T> {
        let failed = outcome.as_ref().err().is_some_and(|error| {
            matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout)
        });
        let mut open = self.0.lock();
        if !failed {
            *open = None;
            return outcome;
        }
        let pause = match open.as_ref() {
            None => PAUSE_MIN,
            Some(Open { pause, is_tried: true, .. }) => (*pause * 2).min(PAUSE_MAX),
            // A call from before the breaker was opened: it says nothing new.
            Some(Open { is_tried: false, .. }) => return outcome,
        };
        *open = Some(Open { pause, until: Instant::now() + pause, is_tried: false });
        outcome
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn fail(breaker: &Breaker, kind: ErrorKind) {
        breaker.note::<()>(Err(Error::new(kind, "test"))).unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_away_is_asked_by_one_call_at_a_time_less_and_less_often() {
        let breaker = Breaker::default();
        // All that were under way fail: one pause, not one for each.
        for _ in 0..100 {
            breaker.admit("test").unwrap();
        }
        for _ in 0..100 {
            fail(&breaker, ErrorKind::Timeout);
        }
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let start = Instant::now();
            while let Err(refused) = breaker.admit("test") {
                assert_eq!(refused.kind(), ErrorKind::Unavailable);
                advance(Duration::from_millis(10)).await;
            }
            assert!(breaker.admit("test").is_err(), "one at a time");
            pauses.push(u64::try_from(start.elapsed().as_millis()).unwrap());
            fail(&breaker, ErrorKind::Unavailable);
        }
        assert_eq!(pauses, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        advance(PAUSE_MAX).await;
        breaker.admit("test").unwrap();
        breaker.note(Ok(())).unwrap();
        (0..10).for_each(|_| breaker.admit("test").unwrap());
    }

    #[tokio::test(start_paused = true)]
    async fn a_call_that_was_dropped_keeps_nobody_out_for_long() {
        let breaker = Breaker::default();
        fail(&breaker, ErrorKind::Unavailable);
        advance(PAUSE_MIN).await;
        breaker.admit("test").unwrap();
        assert!(breaker.admit("test").is_err());
        advance(PAUSE_MIN).await;
        breaker.admit("test").unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_answers_with_an_error_is_there() {
        let breaker = Breaker::default();
        fail(&breaker, ErrorKind::Invalid);
        breaker.admit("test").unwrap();
        fail(&breaker, ErrorKind::Timeout);
        fail(&breaker, ErrorKind::UnknownNamespace);
        breaker.admit("test").unwrap();
    }
}
