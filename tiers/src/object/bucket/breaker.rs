//! Stops asking a store that is down, and always finds out when it is back.
//!
//! ```text
//! closed --several failures in a row--> open --after a pause--> half open: one request may pass
//!   ^                                    ^                          |
//!   +------------- it succeeds ----------|--------------------------+
//!                                        +------ it fails: a longer pause
//! ```
//! A request that passes and is given up counts as neither: the next one may pass at once. So there is
//! no state that requests cannot leave.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use prometheus_client::metrics::{counter::Counter, gauge::Gauge};
use tokio::time::Instant;

/// Failures in a row that open it: more than one bad connection's worth, far fewer than a full queue.
pub(super) const FAILURES_MAX: u32 = 10;
/// The first pause; doubled with each failed probe.
pub(super) const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause: a store that is back is noticed within this.
pub(super) const PAUSE_MAX: Duration = Duration::from_secs(30);

#[derive(Debug)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
        pause: Duration,
    },
    /// `probing`: the one request is under way.
    HalfOpen {
        pause: Duration,
        probing: bool,
    },
}

/// Whether requests are sent at all.
#[derive(Debug)]
pub(super) struct Breaker {
    state: Mutex<State>,
    open: Gauge,
    openings: Counter,
}

/// Leave to send one request. Dropped without an outcome it changes nothing.
#[derive(Debug)]
pub(super) struct Pass {
    breaker: Arc<Breaker>,
    probe: bool,
    told: bool,
}

impl Breaker {
    pub(super) fn new(open: Gauge, openings: Counter) -> Arc<Self> {
        open.set(0);
        Arc::new(Self { state: Mutex::new(State::Closed { failures: 0 }), open, openings })
    }

    /// How long no request passes, if none does now.
    pub(super) fn closed_for(&self, now: Instant) -> Option<Duration> {
        match &*self.state.lock() {
            State::Open { until, .. } if *until > now => Some(*until - now),
            State::HalfOpen { probing: true, .. } => Some(PAUSE_MIN),
            State::Closed { .. } | State::Open { .. } | State::HalfOpen { .. } => None,
        }
    }

    /// Leave to send a request.
    ///
    /// # Errors
    /// How long none passes.
    pub(super) fn pass(self: &Arc<Self>, now: Instant) -> Result<Pass, Duration> {
        let mut state = self.state.lock();
        let probe = match &mut *state {
            State::Closed { .. } => false,
            State::Open { until, .. } if *until > now => return Err(*until - now),
            State::Open { pause, .. } => {
                *state = State::HalfOpen { pause: *pause, probing: true };
                true
            }
            State::HalfOpen { probing: true, .. } => return Err(PAUSE_MIN),
            State::HalfOpen { probing, .. } => {
                *probing = true;
                true
            }
        };
        Ok(Pass { breaker: Arc::clone(self), probe, told: false })
    }

    fn worked(&self, probe: bool) {
        let mut state = self.state.lock();
        match &mut *state {
            State::Closed { failures } => *failures = 0,
            // One that was sent before it opened does not say that the store is back.
            State::Open { .. } | State::HalfOpen { .. } if !probe => {}
            State::Open { .. } | State::HalfOpen { .. } => {
                *state = State::Closed { failures: 0 };
                self.open.set(0);
                tracing::info!("object store answers again");
            }
        }
    }

    fn failed(&self, probe: bool, now: Instant) {
        let mut state = self.state.lock();
        match &mut *state {
            State::Closed { failures } => {
                *failures += 1;
                if *failures < FAILURES_MAX {
                    return;
                }
                *state = State::Open { until: now + PAUSE_MIN, pause: PAUSE_MIN };
                self.open.set(1);
                self.openings.inc();
                tracing::warn!(failures = FAILURES_MAX, "object store fails, pausing requests");
            }
            State::HalfOpen { pause, .. } if probe => {
                let pause = (*pause * 2).min(PAUSE_MAX);
                *state = State::Open { until: now + pause, pause };
            }
            State::Open { .. } | State::HalfOpen { .. } => {}
        }
    }

    fn given_up(&self) {
        if let State::HalfOpen { probing, .. } = &mut *self.state.lock() {
            *probing = false;
        }
    }
}

impl Pass {
    /// The store did its work, whatever it answered.
    pub(super) fn worked(mut self) {
        self.told = true;
        self.breaker.worked(self.probe);
    }

    /// It did not.
    pub(super) fn failed(mut self, now: Instant) {
        self.told = true;
        self.breaker.failed(self.probe, now);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.probe && !self.told {
            self.breaker.given_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn breaker() -> Arc<Breaker> {
        Breaker::new(Gauge::default(), Counter::default())
    }

    fn fail(breaker: &Arc<Breaker>, times: u32) {
        for _ in 0..times {
            breaker.pass(Instant::now()).unwrap().failed(Instant::now());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn failures_in_a_row_open_it_and_one_success_between_does_not() {
        let breaker = breaker();
        fail(&breaker, FAILURES_MAX - 1);
        breaker.pass(Instant::now()).unwrap().worked();
        fail(&breaker, FAILURES_MAX - 1);
        assert_eq!(breaker.closed_for(Instant::now()), None);
        fail(&breaker, 1);
        assert_eq!(breaker.pass(Instant::now()).unwrap_err(), PAUSE_MIN);
        assert_eq!((breaker.open.get(), breaker.openings.get()), (1, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn after_the_pause_one_request_passes_and_closes_it() {
        let breaker = breaker();
        fail(&breaker, FAILURES_MAX);
        tokio::time::advance(PAUSE_MIN).await;
        let probe = breaker.pass(Instant::now()).unwrap();
        assert!(breaker.pass(Instant::now()).is_err(), "a second one passes beside the probe");
        probe.worked();
        assert!(breaker.pass(Instant::now()).is_ok());
        assert_eq!(breaker.open.get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn failed_probes_double_the_pause_up_to_its_bound() {
        let breaker = breaker();
        fail(&breaker, FAILURES_MAX);
        let mut pause = PAUSE_MIN;
        for _ in 0..10 {
            assert_eq!(breaker.closed_for(Instant::now()), Some(pause));
            tokio::time::advance(pause).await;
            fail(&breaker, 1);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        assert_eq!(pause, PAUSE_MAX);
        tokio::time::advance(pause).await;
        breaker.pass(Instant::now()).unwrap().worked();
        assert_eq!(breaker.closed_for(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_that_is_given_up_lets_the_next_one_pass() {
        let breaker = breaker();
        fail(&breaker, FAILURES_MAX);
        tokio::time::advance(PAUSE_MIN).await;
        drop(breaker.pass(Instant::now()).unwrap());
        breaker.pass(Instant::now()).unwrap().worked();
        assert_eq!(breaker.closed_for(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_success_does_not_close_it() {
        let breaker = breaker();
        let old = breaker.pass(Instant::now()).unwrap();
        fail(&breaker, FAILURES_MAX);
        old.worked();
        assert!(breaker.pass(Instant::now()).is_err());
    }
}
