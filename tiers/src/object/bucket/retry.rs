//! The one place where a request is sent: paused, limited, timed, counted and, where that helps and is
//! affordable, sent again.
//!
//! Retries multiply load exactly when a store has too much of it, so they are paid from a bucket: each
//! request asked for puts in half a token, each retry takes one. However the store fails, what is sent
//! is at most twice what was asked for, and in the long run one and a half times. Nothing above this
//! retries again.

use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::{Instant, timeout_at};

use super::{
    breaker::{Breaker, Pass},
    error::{BucketError, BucketErrorKind, Fault, PAUSE_AFTER_BUSY},
    limit::{Limit, Place},
    meter::Meter,
};
use crate::object::metrics::{OpLabel, OutcomeLabel, UnsentLabel};

/// How often one request is sent, the first time included.
pub(super) const TRIES_MAX: u32 = 4;
/// Tokens for each request asked for: two of them pay a retry.
const TOKENS_EARNED: f64 = 0.5;
/// Tokens that may be saved up, for a burst of failures after a good time.
const TOKENS_MAX: f64 = 10.0;
/// The longest pause before the first retry; doubled with each further one.
const PAUSE: Duration = Duration::from_millis(100);
/// The same when the store asked to slow down.
const PAUSE_THROTTLED: Duration = Duration::from_millis(400);
/// A request that had at least this long and got no answer speaks against the store, not against
/// whoever set the deadline.
const BLAME_AFTER: Duration = Duration::from_millis(250);

/// One request as it is asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) op: OpLabel,
    /// For messages: a bare verb.
    pub(super) verb: &'static str,
    pub(super) name: &'a str,
    pub(super) deadline: Instant,
}

/// What a try that worked brought, and what to count it as.
pub(super) type Answer<T> = (T, OutcomeLabel);

/// Sends requests.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) limit: Arc<Limit>,
    pub(super) breaker: Arc<Breaker>,
    pub(super) meter: Meter,
    pub(super) request_timeout: Duration,
    budget: Budget,
    jitter: Jitter,
}

impl Sender {
    pub(super) fn new(requests_max: usize, request_timeout: Duration, meter: Meter) -> Self {
        let metrics = &meter.metrics;
        Self {
            limit: Limit::new(requests_max, metrics.concurrency_limit.clone()),
            breaker: Breaker::new(metrics.breaker_open.clone(), metrics.breaker_openings.clone()),
            budget: Budget::default(),
            jitter: Jitter::default(),
            request_timeout,
            meter,
        }
    }

    /// Sends a request, again if need be. `attempt` makes it; it gets how often it was sent before.
    pub(super) async fn send<T, F>(
        &self,
        call: Call<'_>,
        mut attempt: impl FnMut(u32) -> F,
    ) -> Result<T, BucketError>
    where
        F: Future<Output = Result<Answer<T>, Fault>>,
    {
        self.budget.earn();
        self.meter.metrics.asked_requests.inc();
        let mut tries = 0;
        loop {
            let (place, pass) = match self.enter(call).await {
                Ok(entered) => entered,
                Err(refused) => return Err(refused),
            };
            let fault = match self.once(call, place, pass, attempt(tries)).await {
                Ok(answer) => return Ok(answer),
                Err(fault) => fault,
            };
            tries += 1;
            let pause = self.jitter.pause(tries, fault.throttled);
            if !fault.transient || tries >= TRIES_MAX || Instant::now() + pause >= call.deadline {
                return Err(call.failed(fault, tries));
            }
            if self.breaker.closed_for(Instant::now()).is_some() {
                return Err(call.failed(fault, tries));
            }
            if !self.budget.spend() {
                self.meter.metrics.unsent(UnsentLabel::Budget).inc();
                let busy = Fault { kind: BucketErrorKind::Busy(PAUSE_AFTER_BUSY), ..fault };
                return Err(call.failed(busy, tries));
            }
            tokio::time::sleep(pause).await;
            self.meter.metrics.retried_requests.inc();
        }
    }

    /// Waits for a place and leave to send.
    async fn enter(&self, call: Call<'_>) -> Result<(Place, Pass), BucketError> {
        let busy = |pause| {
            self.meter.metrics.unsent(UnsentLabel::Breaker).inc();
            call.error(BucketErrorKind::Busy(pause), "the store fails, requests are paused")
        };
        if let Some(pause) = self.breaker.closed_for(Instant::now()) {
            return Err(busy(pause));
        }
        let late = || {
            self.meter.metrics.unsent(UnsentLabel::Limit).inc();
            call.error(BucketErrorKind::Timeout, "no place among the requests under way in time")
        };
        if call.deadline <= Instant::now() {
            return Err(late());
        }
        let place = timeout_at(call.deadline, self.limit.place()).await;
        let place = place.ok().flatten().ok_or_else(late)?;
        let pass = self.breaker.pass(Instant::now()).map_err(busy)?;
        Ok((place, pass))
    }

    /// Sends a request once.
    async fn once<T>(
        &self,
        call: Call<'_>,
        place: Place,
        pass: Pass,
        attempt: impl Future<Output = Result<Answer<T>, Fault>>,
    ) -> Result<T, Fault> {
        let began = Instant::now();
        let until = call.deadline.min(began + self.request_timeout);
        let sent = self.meter.sent(call.op);
        let answered = timeout_at(until, attempt).await;
        let answered =
            answered.unwrap_or_else(|_elapsed| Err(Fault::timeout(began.elapsed() >= BLAME_AFTER)));
        match answered {
            Ok((answer, outcome)) => {
                sent.ended(outcome);
                pass.worked();
                place.well();
                Ok(answer)
            }
            Err(fault) => {
                sent.ended(fault.outcome);
                if fault.down {
                    pass.failed(Instant::now());
                } else if fault.outcome != OutcomeLabel::Timeout {
                    pass.worked();
                }
                if fault.throttled {
                    place.slow_down();
                }
                Err(fault)
            }
        }
    }
}

impl Call<'_> {
    fn error(&self, kind: BucketErrorKind, why: &'static str) -> BucketError {
        BucketError::new(kind, format!("{} {}", self.verb, self.name)).because(Some(why.into()))
    }

    pub(super) fn failed(&self, fault: Fault, tries: u32) -> BucketError {
        let doing = match tries {
            1 => format!("{} {}", self.verb, self.name),
            _ => format!("{} {} ({tries} times)", self.verb, self.name),
        };
        let source = fault.source.or_else(|| {
            (fault.outcome == OutcomeLabel::Timeout).then(|| "no answer in time".into())
        });
        let kind = match fault.kind {
            BucketErrorKind::Failed if fault.throttled => BucketErrorKind::Busy(PAUSE_AFTER_BUSY),
            kind => kind,
        };
        BucketError::new(kind, doing).because(source)
    }
}

/// Pays for retries.
#[derive(Debug)]
struct Budget(Mutex<f64>);

impl Default for Budget {
    /// With what the first request needs for one retry.
    fn default() -> Self {
        Self(Mutex::new(1.0 - TOKENS_EARNED))
    }
}

impl Budget {
    fn earn(&self) {
        let mut tokens = self.0.lock();
        *tokens = (*tokens + TOKENS_EARNED).min(TOKENS_MAX);
    }

    fn spend(&self) -> bool {
        let mut tokens = self.0.lock();
        let enough = *tokens >= 1.0;
        if enough {
            *tokens -= 1.0;
        }
        enough
    }
}

/// Spreads retries, so that those who failed together do not come back together.
#[derive(Debug, Default)]
struct Jitter(RandomState);

impl Jitter {
    /// Between a half and the whole of a pause that doubles with each try.
    fn pause(&self, tries: u32, throttled: bool) -> Duration {
        let pause = if throttled { PAUSE_THROTTLED } else { PAUSE };
        let pause = pause * 2_u32.saturating_pow(tries.saturating_sub(1));
        let random = self.0.hash_one(Instant::now()) % 1024;
        let share = u32::try_from(random).unwrap_or(0);
        pause / 2 + pause / 2 * share / 1024
    }
}
