//! How far the clients of a replay have got, and what they hit before and after each kill.

use std::{collections::VecDeque, time::Duration};

use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};

/// Requests before a kill, and after it, whose hits are compared. Enough to even out the requests,
/// few enough to see what a restart costs before the cache is warm again.
pub(super) const WINDOW_REQUESTS: usize = 50;

/// References, and how many of them were hits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Hits {
    pub(super) references: u64,
    pub(super) hits: u64,
}

/// Counts finished requests. All clients of a replay share one.
#[derive(Debug)]
pub(super) struct Pace {
    finished: watch::Sender<u64>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Since when requests can finish, and how many had before.
    since: (Instant, u64),
    /// The latest requests since the last kill.
    recent: VecDeque<Hits>,
    /// How many more requests count as right after a kill.
    after_left: usize,
    before: Hits,
    after: Hits,
}

impl Pace {
    pub(super) fn new() -> Self {
        let state = State {
            since: (Instant::now(), 0),
            recent: VecDeque::with_capacity(WINDOW_REQUESTS),
            after_left: 0,
            before: Hits::default(),
            after: Hits::default(),
        };
        Self { finished: watch::Sender::new(0), state: Mutex::new(state) }
    }

    /// Takes a finished request.
    pub(super) fn finish(&self, request: Hits) {
        let mut state = self.state.lock();
        if state.after_left > 0 {
            state.after_left -= 1;
            state.after.add(request);
        }
        if state.recent.len() == WINDOW_REQUESTS {
            state.recent.pop_front();
        }
        state.recent.push_back(request);
        drop(state);
        self.finished.send_modify(|finished| *finished += 1);
    }

    /// How many have finished.
    pub(super) fn finished(&self) -> u64 {
        *self.finished.borrow()
    }

    /// Waits until `count` have finished.
    ///
    /// # Cancel safety
    /// Safe: it only waits.
    pub(super) async fn reach(&self, count: u64) {
        // An error would mean that the sender is gone, which is part of this.
        drop(self.finished.subscribe().wait_for(|finished| *finished >= count).await);
    }

    /// The mean time between two requests that finished since the server serves.
    pub(super) fn mean(&self) -> Duration {
        let (since, before) = self.state.lock().since;
        let finished = self.finished().saturating_sub(before).max(1);
        since.elapsed() / u32::try_from(finished).unwrap_or(u32::MAX)
    }

    /// The server was killed: what was finished lately was before it, what follows is after it.
    pub(super) fn killed(&self) {
        let mut state = self.state.lock();
        let recent = std::mem::take(&mut state.recent);
        recent.into_iter().for_each(|request| state.before.add(request));
        state.after_left = WINDOW_REQUESTS;
    }

    /// The server serves again.
    pub(super) fn serves(&self) {
        self.state.lock().since = (Instant::now(), self.finished());
    }

    /// What was hit right before kills, and right after them.
    pub(super) fn windows(&self) -> (Hits, Hits) {
        let state = self.state.lock();
        (state.before, state.after)
    }
}

impl Hits {
    fn add(&mut self, other: Self) {
        self.references += other.references;
        self.hits += other.hits;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn windows_are_the_requests_next_to_kills() {
        let pace = Pace::new();
        let finish = |count: usize, hits| {
            (0..count).for_each(|_| pace.finish(Hits { references: 10, hits }));
        };
        finish(WINDOW_REQUESTS * 2, 1);
        finish(WINDOW_REQUESTS, 9);
        pace.killed();
        finish(WINDOW_REQUESTS, 5);
        finish(WINDOW_REQUESTS * 3, 8);
        let window = WINDOW_REQUESTS as u64;
        let expected = |hits| Hits { references: window * 10, hits: window * hits };
        assert_eq!(pace.windows(), (expected(9), expected(5)));
        assert_eq!(pace.finished(), window * 7);
        pace.reach(window * 7).await;
    }

    #[tokio::test(start_paused = true)]
    async fn the_mean_is_that_of_the_server_that_runs() {
        let pace = Pace::new();
        tokio::time::advance(Duration::from_secs(100)).await;
        pace.finish(Hits::default());
        assert_eq!(pace.mean(), Duration::from_secs(100));
        pace.serves();
        tokio::time::advance(Duration::from_secs(1)).await;
        (0..4).for_each(|_| pace.finish(Hits::default()));
        assert_eq!(pace.mean(), Duration::from_millis(250));
    }
}
