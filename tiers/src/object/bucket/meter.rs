//! Counts requests, also those that nobody waits for any more, and what they cost.

use tokio::time::Instant;

use crate::{
    limits::GIB,
    object::metrics::{ObjectMetrics, OpLabel, OutcomeLabel},
};

/// What the store charges, in dollars. An estimate: traffic out of the region and minimum storage times
/// are not in it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// A thousand requests that write or list.
    pub thousand_puts: f64,
    /// A thousand requests that read.
    pub thousand_gets: f64,
    /// A GiB stored for a month.
    pub gib_month: f64,
}

impl Default for Prices {
    /// S3 Standard in us-east-1, the most quoted ones.
    fn default() -> Self {
        Self { thousand_puts: 0.005, thousand_gets: 0.0004, gib_month: 0.023 }
    }
}

impl Prices {
    /// One request.
    #[must_use]
    pub fn request(&self, op: OpLabel) -> f64 {
        match op {
            OpLabel::Get | OpLabel::Head => self.thousand_gets / 1e3,
            OpLabel::Put | OpLabel::Create | OpLabel::Part | OpLabel::Multipart | OpLabel::List => {
                self.thousand_puts / 1e3
            }
            OpLabel::Delete => 0.0,
        }
    }

    /// So many bytes, for a month.
    #[must_use]
    pub fn month(&self, bytes: u64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let gib = bytes as f64 / GIB as f64;
        gib * self.gib_month
    }
}

/// Counts requests.
#[derive(Debug)]
pub(super) struct Meter {
    pub(super) metrics: ObjectMetrics,
    pub(super) prices: Prices,
}

/// A request that was sent; if nobody says how it ended, it was cancelled.
#[derive(Debug)]
pub(super) struct Sent<'a> {
    meter: &'a Meter,
    op: OpLabel,
    since: Instant,
    outcome: OutcomeLabel,
}

impl Meter {
    /// A request is sent.
    pub(super) fn sent(&self, op: OpLabel) -> Sent<'_> {
        self.metrics.requests_in_flight.inc();
        self.metrics.request_cost_dollars.inc_by(self.prices.request(op));
        Sent { meter: self, op, since: Instant::now(), outcome: OutcomeLabel::Cancelled }
    }
}

impl Sent<'_> {
    /// It ended.
    pub(super) fn ended(mut self, outcome: OutcomeLabel) {
        self.outcome = outcome;
    }
}

impl Drop for Sent<'_> {
    fn drop(&mut self) {
        let metrics = &self.meter.metrics;
        metrics.requests_in_flight.dec();
        metrics.requests(self.op, self.outcome).inc();
        metrics.took(self.op, self.since.elapsed().as_secs_f64());
    }
}
