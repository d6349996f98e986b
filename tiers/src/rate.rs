//! How fast bytes come, from how fast they came.
//!
//! What was known fades by the time spent moving bytes, by bytes, and by the time since: so single
//! transfers do not count for much while there are many, and what is old gives way to what is new. Two
//! in a row that are far off in the same direction, or a long one, are a change (another client, a
//! throttled drive, a heated one), and replace what was known before. Nothing fades while nothing comes:
//! what was known last is the best there is, and its age is told with it.

use std::time::Duration;

use tokio::time::Instant;

/// Seconds of transfers in which what was known counts half.
const HALF_LIFE_BUSY_SECS: f64 = 1.0;
/// Seconds by the clock in which it does: what routers are told follows within these at the latest.
const HALF_LIFE_SECS: f64 = 2.0;
/// Bytes in which it does.
const HALF_LIFE_BYTES: f64 = 268_435_456.0;
/// A transfer that took so much more or less than what was known is far off. Below it fading is fast
/// enough, and neighbours on the device cause as much.
const FAR_OFF: f64 = 1.5;

/// Bytes and the time they took.
#[derive(Debug, Clone, Copy)]
struct Sum {
    bytes: f64,
    secs: f64,
}

impl Sum {
    /// Seconds for each byte.
    fn cost(self) -> f64 {
        self.secs / self.bytes
    }

    fn plus(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, secs: self.secs + other.secs }
    }

    /// Fades by `new`, and by `idle` seconds, and adds it at this cost.
    fn blended(self, new: Self, idle: f64, cost: f64) -> Self {
        let secs = new.bytes * cost;
        let half_lives =
            secs / HALF_LIFE_BUSY_SECS + new.bytes / HALF_LIFE_BYTES + idle / HALF_LIFE_SECS;
        let kept = (-half_lives).exp2();
        Self { bytes: self.bytes * kept + new.bytes, secs: self.secs * kept + secs }
    }
}

/// In which direction a transfer was far off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Off {
    Slower,
    Faster,
}

/// See the module.
#[derive(Debug, Clone, Default)]
pub struct Rate {
    /// Past transfers, faded; none before the first one.
    past: Option<Sum>,
    /// The last transfer and its direction, if it was far off.
    far: Option<(Off, Sum)>,
    /// When the last one was told of.
    at: Option<Instant>,
}

impl Rate {
    /// Takes note of a transfer that has ended now. One of no bytes says nothing.
    pub fn take(&mut self, bytes: u64, elapsed: Duration) {
        if bytes == 0 {
            return;
        }
        let now = Instant::now();
        let new = Sum { bytes: bytes as f64, secs: elapsed.as_secs_f64().max(1e-9) };
        let since = self.at.replace(now).map_or(0.0, |at| (now - at).as_secs_f64());
        let idle = (since - new.secs).max(0.0);
        let Some(past) = self.past else {
            self.past = Some(new);
            return;
        };
        let off = match new.cost() / past.cost() {
            ratio if ratio > FAR_OFF => Some(Off::Slower),
            ratio if ratio < 1.0 / FAR_OFF => Some(Off::Faster),
            _ => None,
        };
        self.past = Some(match (off, self.far) {
            (Some(off), Some((before, last))) if off == before => last.plus(new),
            (Some(_), _) if new.secs >= HALF_LIFE_BUSY_SECS => new,
            // It may be the only one: it counts as the least that would have been far off, however old
            // what was known is.
            (Some(Off::Slower), _) => past.blended(new, 0.0, past.cost() * FAR_OFF),
            (Some(Off::Faster), _) => past.blended(new, 0.0, past.cost() / FAR_OFF),
            (None, _) => past.blended(new, idle, new.cost()),
        });
        self.far = off.map(|off| (off, new));
    }

    /// Seconds for each byte, if anything is known.
    #[must_use]
    pub fn cost(&self) -> Option<f64> {
        self.past.map(Sum::cost)
    }

    /// Time since the last transfer that was told of.
    #[must_use]
    pub fn age(&self) -> Option<Duration> {
        self.at.map(|at| at.elapsed())
    }

    /// Whether the last transfer was as expected: not the first of a change.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.past.is_some() && self.far.is_none()
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    /// A transfer at some bandwidth; returns how long it took.
    async fn transfer(rate: &mut Rate, bytes: u64, per_second: f64) -> Duration {
        let elapsed = Duration::from_secs_f64(bytes as f64 / per_second);
        advance(elapsed).await;
        rate.take(bytes, elapsed);
        elapsed
    }

    /// What is known in shares of what it is.
    fn accuracy(rate: &Rate, per_second: f64) -> f64 {
        rate.cost().unwrap() * per_second
    }

    #[tokio::test(start_paused = true)]
    async fn it_follows_a_change_after_three_transfers_or_a_second_and_back() {
        for bytes in [2_000_000, 50_000_000, 400_000_000] {
            let mut rate = Rate::default();
            for per_second in [2e9, 2e8, 2e9, 6e9, 2e9, 1e9, 2e9] {
                let (mut transfers, mut elapsed) = (0, Duration::ZERO);
                while transfers < 3 && elapsed < Duration::from_secs(1) {
                    elapsed += transfer(&mut rate, bytes, per_second).await;
                    transfers += 1;
                }
                let off = accuracy(&rate, per_second);
                assert!((0.8..1.25).contains(&off), "{bytes} at {per_second}: {off}");
                // What was known for long does not hold it back.
                for _ in 0..100 {
                    transfer(&mut rate, bytes, per_second).await;
                }
                let off = accuracy(&rate, per_second);
                assert!((0.99..1.01).contains(&off), "{bytes} at {per_second}: {off}");
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_was_held_up_counts_as_what_it_is() {
        let mut rate = Rate::default();
        for _ in 0..100 {
            transfer(&mut rate, 50_000_000, 2e9).await;
        }
        transfer(&mut rate, 50_000_000, 2e8).await;
        let off = accuracy(&rate, 2e9);
        assert!((0.99..1.1).contains(&off) && !rate.is_settled(), "{off}");
        transfer(&mut rate, 50_000_000, 2e9).await;
        assert!(rate.is_settled());
        transfer(&mut rate, 50_000_000, 2e8).await;
        let off = accuracy(&rate, 2e9);
        assert!((0.9..1.6).contains(&off), "every other one: {off}");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_old_counts_half_every_two_seconds_once_there_is_something_new() {
        let mut rate = Rate::default();
        for _ in 0..1000 {
            transfer(&mut rate, 50_000_000, 2e9).await;
        }
        let mut fresh = rate.clone();
        transfer(&mut fresh, 10_000_000, 1.6e9).await;
        advance(Duration::from_secs(10)).await;
        assert_eq!(rate.age().unwrap().as_secs(), 10);
        assert!((0.999..1.001).contains(&accuracy(&rate, 2e9)), "nothing fades by itself");
        transfer(&mut rate, 10_000_000, 1.6e9).await;
        let (at_once, later) = (accuracy(&fresh, 1.6e9), accuracy(&rate, 1.6e9));
        assert!(at_once < 0.82 && later > 0.88, "{at_once} and {later} of what the new one says");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_overflows() {
        let mut rate = Rate::default();
        rate.take(0, Duration::from_secs(1));
        assert_eq!((rate.cost(), rate.age(), rate.is_settled()), (None, None, false));
        rate.take(1, Duration::MAX);
        assert!(rate.cost().unwrap().is_finite());
        rate.take(u64::MAX, Duration::ZERO);
        rate.take(u64::MAX, Duration::ZERO);
        assert!(rate.cost().unwrap() > 0.0);
    }
}
