//! What the object tier counts: requests, their outcomes, bytes and money.

use std::sync::atomic::AtomicU64;

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::label_values;

/// Seconds of a request: from one in the same rack to one that nearly times out.
const REQUEST_SECONDS: [f64; 13] = [
    0.001, 0.003, 0.005, //
    0.01, 0.03, 0.05, //
    0.1, 0.3, 0.5, //
    1.0, 3.0, 5.0, //
    10.0,
];

label_values! {
    /// A kind of request.
    OpLabel {
        /// Reading an object or a range of it.
        Get = "get",
        /// Asking for the length of an object.
        Head = "head",
        /// Writing a whole object.
        Put = "put",
        /// Writing an object that must not exist.
        Create = "create",
        /// Writing one part of an object.
        Part = "part",
        /// Beginning, completing or aborting an upload in parts.
        Multipart = "multipart",
        /// Removing an object.
        Delete = "delete",
        /// One page of names.
        List = "list",
    }
}

label_values! {
    /// How one request ended.
    OutcomeLabel {
        /// As it should.
        Ok = "ok",
        /// There is no such object.
        NotFound = "not_found",
        /// There is such an object already.
        Exists = "exists",
        /// No permission.
        Refused = "refused",
        /// The store asked to slow down.
        Throttled = "throttled",
        /// No answer in time.
        Timeout = "timeout",
        /// An answer of a wrong length.
        Damaged = "damaged",
        /// Any other failure.
        Failed = "failed",
        /// Whoever asked went away.
        Cancelled = "cancelled",
    }
}

label_values! {
    /// Why a request was not sent.
    UnsentLabel {
        /// The store is taken to be down.
        Breaker = "breaker",
        /// Too many retries already.
        Budget = "budget",
        /// No place before the deadline.
        Limit = "limit",
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    op: OpLabel,
    outcome: OutcomeLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Op {
    op: OpLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    reason: UnsentLabel,
}

/// The counters of requests to the store.
#[derive(Debug, Clone)]
pub struct ObjectMetrics {
    requests: Family<Request, Counter>,
    seconds: Family<Op, Histogram, fn() -> Histogram>,
    unsent: Family<Reason, Counter>,
    /// Requests asked for: those that are not retries. Requests sent are at most twice as many.
    pub asked_requests: Counter,
    /// Requests sent again.
    pub retried_requests: Counter,
    /// Requests under way.
    pub requests_in_flight: Gauge,
    /// Requests that may be under way now.
    pub concurrency_limit: Gauge,
    /// Whether the store is taken to be down.
    pub breaker_open: Gauge,
    /// Times that it was.
    pub breaker_openings: Counter,
    /// Bytes of objects read.
    pub read_bytes: Counter,
    /// Bytes of objects written, retries included.
    pub written_bytes: Counter,
    /// What the requests cost by the table of prices.
    pub request_cost_dollars: Counter<f64, AtomicU64>,
}

fn request_seconds() -> Histogram {
    Histogram::new(REQUEST_SECONDS)
}

impl ObjectMetrics {
    /// Makes the counters and names them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("kvstrata_object");
        let metrics = Self {
            requests: Family::default(),
            seconds: Family::new_with_constructor(request_seconds),
            unsent: Family::default(),
            asked_requests: Counter::default(),
            retried_requests: Counter::default(),
            requests_in_flight: Gauge::default(),
            concurrency_limit: Gauge::default(),
            breaker_open: Gauge::default(),
            breaker_openings: Counter::default(),
            read_bytes: Counter::default(),
            written_bytes: Counter::default(),
            request_cost_dollars: Counter::default(),
        };
        metrics.name_families(registry);
        let mut counter = |name: &str, help: &str, counter: &Counter| {
            registry.register(name, help, counter.clone());
        };
        counter("asked_requests", "Requests asked for, without retries", &metrics.asked_requests);
        counter("retried_requests", "Requests sent again", &metrics.retried_requests);
        counter("breaker_openings", "Times that requests were paused", &metrics.breaker_openings);
        counter("read_bytes", "Bytes of objects read", &metrics.read_bytes);
        counter("written_bytes", "Bytes of objects written", &metrics.written_bytes);
        let mut gauge = |name: &str, help: &str, gauge: &Gauge| {
            registry.register(name, help, gauge.clone());
        };
        gauge("requests_in_flight", "Requests under way", &metrics.requests_in_flight);
        gauge("concurrency_limit", "Requests that may be under way", &metrics.concurrency_limit);
        gauge("breaker_open", "1 while requests are paused", &metrics.breaker_open);
        registry.register(
            "request_cost_dollars",
            "Estimated cost of the requests",
            metrics.request_cost_dollars.clone(),
        );
        metrics
    }

    fn name_families(&self, registry: &mut Registry) {
        registry.register(
            "requests",
            "Requests sent, by operation and outcome",
            self.requests.clone(),
        );
        registry.register("request_seconds", "Time of a request", self.seconds.clone());
        registry.register("unsent_requests", "Requests not sent, by reason", self.unsent.clone());
        for op in OpLabel::ALL {
            for outcome in OutcomeLabel::ALL {
                drop(self.requests(*op, *outcome));
            }
            drop(self.seconds.get_or_create_owned(&Op { op: *op }));
        }
        for reason in UnsentLabel::ALL {
            drop(self.unsent(*reason));
        }
    }

    /// Requests of one kind that ended in one way.
    #[must_use]
    pub fn requests(&self, op: OpLabel, outcome: OutcomeLabel) -> Counter {
        self.requests.get_or_create_owned(&Request { op, outcome })
    }

    /// Requests that were not sent.
    #[must_use]
    pub fn unsent(&self, reason: UnsentLabel) -> Counter {
        self.unsent.get_or_create_owned(&Reason { reason })
    }

    /// All requests sent and ended.
    #[must_use]
    pub fn sent_requests(&self) -> u64 {
        let outcomes = OpLabel::ALL
            .iter()
            .flat_map(|op| OutcomeLabel::ALL.iter().map(|outcome| self.requests(*op, *outcome)));
        outcomes.map(|counter| counter.get()).sum()
    }

    pub(super) fn took(&self, op: OpLabel, seconds: f64) {
        self.seconds.get_or_create_owned(&Op { op }).observe(seconds);
    }
}
