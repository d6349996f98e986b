//! Counts requests, also those that nobody waits for any more, and what they cost.

use tokio::time::Instant;

use crate::object::{
    metrics::{ObjectMetrics, OpLabel, OutcomeLabel},
    prices::Prices,
};

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
