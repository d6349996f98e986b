//! How many requests may be under way: more while they go well, half when the store says "slow down".
//!
//! Additive increase, multiplicative decrease, as in TCP. Requests that were sent before the last cut
//! do not cut again: their answers are news of the same jam. Waiting is first come, first served, and
//! safe to give up.

use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

#[derive(Debug)]
struct State {
    /// The limit, between 1 and the bound.
    limit: f64,
    /// Permits that exist, free or held; over the limit only until they come back.
    permits: usize,
    cut_at: Option<Instant>,
}

/// The limit on requests under way.
#[derive(Debug)]
pub(super) struct Limit {
    state: Mutex<State>,
    free: Arc<Semaphore>,
    limit_max: f64,
    shown: Gauge,
}

/// A place for one request.
#[derive(Debug)]
pub(super) struct Place {
    limit: Arc<Limit>,
    permit: Option<OwnedSemaphorePermit>,
    since: Instant,
}

impl Limit {
    /// Begins at its bound: a store that wants less says so.
    pub(super) fn new(requests_max: usize, shown: Gauge) -> Arc<Self> {
        // A semaphore has no more permits than this, and no store takes so many requests.
        let permits = requests_max.clamp(1, 65_536);
        let limit = u16::try_from(permits).map_or(65_536.0, f64::from);
        let state = State { limit, permits, cut_at: None };
        let limit = Self {
            state: Mutex::new(state),
            free: Arc::new(Semaphore::new(permits)),
            limit_max: limit,
            shown,
        };
        limit.show(&limit.state.lock());
        Arc::new(limit)
    }

    /// Waits for a place.
    ///
    /// # Cancel safety
    /// Safe.
    pub(super) async fn place(self: &Arc<Self>) -> Option<Place> {
        let permit = Arc::clone(&self.free).acquire_owned().await.ok()?;
        Some(Place { limit: Arc::clone(self), permit: Some(permit), since: Instant::now() })
    }

    fn show(&self, state: &State) {
        self.shown.set(i64::try_from(whole(state.limit)).unwrap_or(i64::MAX));
    }
}

/// The limit in whole requests.
fn whole(limit: f64) -> usize {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and 65536"
    )]
    let whole = limit as usize;
    whole
}

impl Place {
    /// The store answered: a little more may be under way.
    pub(super) fn well(self) {
        let limit = Arc::clone(&self.limit);
        let mut state = limit.state.lock();
        state.limit = (state.limit + 1.0 / state.limit).min(limit.limit_max);
        if state.permits < whole(state.limit) {
            state.permits += 1;
            limit.free.add_permits(1);
        }
        limit.show(&state);
    }

    /// The store asked to slow down: half as much from now on.
    pub(super) fn slow_down(self) {
        let limit = Arc::clone(&self.limit);
        let mut state = limit.state.lock();
        if state.cut_at.is_some_and(|cut_at| self.since <= cut_at) {
            return;
        }
        state.cut_at = Some(Instant::now());
        state.limit = (state.limit / 2.0).max(1.0);
        let over = state.permits - whole(state.limit).min(state.permits);
        state.permits -= limit.free.forget_permits(over);
        limit.show(&state);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.limit.state.lock();
        if state.permits > whole(state.limit)
            && let Some(permit) = self.permit.take()
        {
            permit.forget();
            state.permits -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt;

    use super::*;

    fn take(limit: &Arc<Limit>) -> Option<Place> {
        limit.place().now_or_never().flatten()
    }

    fn take_all(limit: &Arc<Limit>) -> Vec<Place> {
        std::iter::from_fn(|| take(limit)).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn one_jam_halves_it_once() {
        let limit = Limit::new(16, Gauge::default());
        let places = take_all(&limit);
        assert_eq!(places.len(), 16);
        for place in places {
            place.slow_down();
        }
        assert_eq!(take_all(&limit).len(), 8);
        assert_eq!(limit.shown.get(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn it_never_falls_below_one_and_comes_back_by_successes() {
        let limit = Limit::new(8, Gauge::default());
        for _ in 0..10 {
            tokio::time::advance(Duration::from_millis(1)).await;
            take(&limit).unwrap().slow_down();
        }
        assert_eq!(take_all(&limit).len(), 1);
        for _ in 0..100 {
            take(&limit).unwrap().well();
        }
        assert_eq!(take_all(&limit).len(), 8);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_under_way_keep_their_places_when_it_is_cut() {
        let limit = Limit::new(4, Gauge::default());
        let mut places = take_all(&limit);
        places.pop().unwrap().slow_down();
        assert_eq!(limit.shown.get(), 2);
        assert!(take(&limit).is_none(), "3 are under way and 2 allowed");
        drop(places.pop());
        assert!(take(&limit).is_none(), "2 are under way and 2 allowed");
        drop(places.pop());
        assert!(take(&limit).is_some());
    }
}
