//! A log line that is written now and then, however often there is reason for it.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time between two lines.
const INTERVAL: Duration = Duration::from_secs(10);

/// When the last line was written, and what was left out since.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Mutex<Option<(Instant, u64)>>);

impl Seldom {
    /// Whether to write now: then how many were left out before, else `None`.
    pub(crate) fn turn(&self) -> Option<u64> {
        let now = Instant::now();
        let mut last = self.0.lock();
        match &mut *last {
            Some((at, left_out)) if now - *at < INTERVAL => {
                *left_out += 1;
                None
            }
            known => Some(known.replace((now, 0)).map_or(0, |(_, left_out)| left_out)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_is_one_line_that_says_how_large_it_was() {
        let seldom = Seldom::default();
        assert_eq!(seldom.turn(), Some(0));
        for _ in 0..500 {
            assert_eq!(seldom.turn(), None);
        }
        tokio::time::advance(INTERVAL).await;
        assert_eq!(seldom.turn(), Some(500));
        assert_eq!(seldom.turn(), None);
        tokio::time::advance(INTERVAL * 2).await;
        assert_eq!(seldom.turn(), Some(1));
    }
}
