//! The process registry, and the families of the server.
//!
//! Families are registered once and resolved where a component is built; a request records its
//! outcome once, at its end. `docs/metrics.md` is tested against this registry.

mod cluster;
mod costs;
mod events;
mod fanout;
mod handover;
mod labels;
mod publish;
mod resp;
mod schemes;
mod store;
mod tenants;
mod trust;

use std::time::Duration;

pub use cluster::ClusterMetrics;
pub use costs::CostMetrics;
pub use events::EventMetrics;
pub use fanout::FanoutMetrics;
pub use handover::HandoverMetrics;
pub use labels::{
    Answer, DatagramOutcome, Door, EventBatch, FilterOf, HandoverOutcome, Judge, LeaseEnd, Missed,
    Op, Outcome, PeerAnswer, PutLabel, RateLabel, ReloadOutcome, Reloaded, RespCommand, RespDrop,
    ResyncReason, RouterEvent, RouterLabel, TierLabel, TierStateLabel, UnindexedLabel, Unproven,
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram, info::Info},
    registry::{Registry, Unit},
};
pub use publish::{Part, PublishMetrics, Shown};
pub use resp::RespMetrics;
pub use schemes::SchemeMetrics;
pub use store::StoreGauges;
pub use tenants::TenantMetrics;
pub use trust::TrustMetrics;

/// Upper bounds for whole calls, in seconds. A lookup should stay in the second line; a get of tens
/// of gigabytes ends in the last.
const RPC_SECONDS: [f64; 16] = [
    0.000_1, 0.000_2, 0.000_5, //
    0.001, 0.002, 0.005, //
    0.01, 0.02, 0.05, //
    0.1, 0.2, 0.5, //
    1.0, 5.0, 20.0, 60.0,
];

/// Upper bounds for loading one block, in seconds: dram in the first line, nvme in the second and
/// third, object storage in the last.
const LOAD_SECONDS: [f64; 15] = [
    0.000_01, 0.000_05, 0.000_1, 0.000_2, 0.000_5, //
    0.001, 0.002, 0.005, //
    0.01, 0.02, 0.05, //
    0.1, 0.5, 2.0, 10.0,
];

/// The prefix of all our names.
pub const PREFIX: &str = "kvstrata";

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTier {
    tier: TierLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByAnswer {
    answer: Answer,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByMissed {
    reason: Missed,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByEnd {
    reason: LeaseEnd,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByOutcome {
    outcome: PutLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByCall {
    op: Op,
    outcome: Outcome,
}

/// The families of the server; clones share them.
#[derive(Debug, Clone)]
pub struct ServerMetrics {
    rpc_seconds: Family<ByCall, Histogram>,
    lookup_asked_blocks: Counter,
    lookup_blocks: Family<ByAnswer, Counter>,
    get_blocks: Family<ByTier, Counter>,
    get_bytes: Family<ByTier, Counter>,
    get_seconds: Family<ByTier, Histogram>,
    get_missed_blocks: Family<ByMissed, Counter>,
    put_blocks: Family<ByOutcome, Counter>,
    put_bytes: Counter,
    leases_ended: Family<ByEnd, Counter>,
    /// Leases granted.
    pub leases_granted: Counter,
    /// Leases held now.
    pub leases: Gauge,
    /// Bytes under lease now; a block under two leases counts twice.
    pub leased_bytes: Gauge,
    /// Sessions opened.
    pub sessions_opened: Counter,
    /// Sessions open now.
    pub sessions: Gauge,
    /// gRPC connections open now.
    pub connections: Gauge,
    /// Bulk connections open now.
    pub bulk_connections: Gauge,
    /// Bytes that clients were told the places of and have not let go.
    pub shared_pinned_bytes: Gauge,
    /// Calls in progress, sessions not counted.
    pub calls_in_flight: Gauge,
    /// Groups of namespaces that differ only in their hash root.
    pub hash_root_mismatches: Gauge,
    /// Requests that panicked.
    pub request_panics: Counter,
    /// Who was not let in.
    pub trust: TrustMetrics,
    /// What tenants have.
    pub tenants: TenantMetrics,
    /// Gossip and members.
    pub cluster: ClusterMetrics,
    /// The RESP listener.
    pub resp: RespMetrics,
    /// The events of engines.
    pub events: EventMetrics,
    /// What routers are told.
    pub publish: PublishMetrics,
    /// What loading costs.
    pub costs: CostMetrics,
    /// The index of hash schemes.
    pub schemes: SchemeMetrics,
    /// Lookups that ask other members.
    pub fanout: FanoutMetrics,
    /// What goes to other members.
    pub handover: HandoverMetrics,
}

fn rpc_histogram() -> Histogram {
    Histogram::new(RPC_SECONDS)
}

fn load_histogram() -> Histogram {
    Histogram::new(LOAD_SECONDS)
}

impl ServerMetrics {
    /// Registers all families, and makes every series whose labels are known, so that a dashboard
    /// shows 0 and not nothing.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            rpc_seconds: Family::new_with_constructor(rpc_histogram),
            get_seconds: Family::new_with_constructor(load_histogram),
            lookup_asked_blocks: Counter::default(),
            lookup_blocks: Family::default(),
            get_blocks: Family::default(),
            get_bytes: Family::default(),
            get_missed_blocks: Family::default(),
            put_blocks: Family::default(),
            put_bytes: Counter::default(),
            leases_ended: Family::default(),
            leases_granted: Counter::default(),
            leases: Gauge::default(),
            leased_bytes: Gauge::default(),
            sessions_opened: Counter::default(),
            sessions: Gauge::default(),
            connections: Gauge::default(),
            bulk_connections: Gauge::default(),
            shared_pinned_bytes: Gauge::default(),
            calls_in_flight: Gauge::default(),
            hash_root_mismatches: Gauge::default(),
            request_panics: Counter::default(),
            trust: TrustMetrics::register(registry),
            tenants: TenantMetrics::register(registry),
            cluster: ClusterMetrics::register(registry),
            resp: RespMetrics::register(registry),
            events: EventMetrics::register(registry),
            publish: PublishMetrics::register(registry),
            costs: CostMetrics::register(registry),
            schemes: SchemeMetrics::register(registry),
            fanout: FanoutMetrics::register(registry),
            handover: HandoverMetrics::register(registry),
        };
        metrics.register_data(registry);
        metrics.register_clients(registry);
        metrics.make_series();
        metrics
    }

    fn register_data(&self, registry: &mut Registry) {
        let version = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "The version that runs", version);
        registry.register(
            "lookup_asked_blocks",
            "Blocks asked in lookups; the sum of lookup_blocks over all answers",
            self.lookup_asked_blocks.clone(),
        );
        registry.register(
            "lookup_blocks",
            "Blocks asked in lookups, by the answer for the prefix",
            self.lookup_blocks.clone(),
        );
        registry.register(
            "get_blocks",
            "Blocks delivered, by the tier they were read from",
            self.get_blocks.clone(),
        );
        registry.register_with_unit(
            "get",
            "Payload delivered, by the tier it was read from",
            Unit::Bytes,
            self.get_bytes.clone(),
        );
        registry.register_with_unit(
            "get_load",
            "Time to have one block of a get in hand, by the tier it was read from",
            Unit::Seconds,
            self.get_seconds.clone(),
        );
        registry.register(
            "get_missed_blocks",
            "Blocks of gets that were not delivered, by reason",
            self.get_missed_blocks.clone(),
        );
        registry.register(
            "put_blocks",
            "Blocks offered, by what became of them",
            self.put_blocks.clone(),
        );
        registry.register_with_unit(
            "put",
            "Payload received in puts",
            Unit::Bytes,
            self.put_bytes.clone(),
        );
    }

    fn register_clients(&self, registry: &mut Registry) {
        registry.register_with_unit(
            "rpc",
            "Time from a call's start to its end, by call and gRPC code",
            Unit::Seconds,
            self.rpc_seconds.clone(),
        );
        let counters: [(&str, &str, &Counter); 3] = [
            ("leases_granted", "Leases granted", &self.leases_granted),
            ("sessions_opened", "Sessions opened", &self.sessions_opened),
            (
                "request_panics",
                "Requests that panicked: a defect, each answered with INTERNAL",
                &self.request_panics,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        let gauges: [(&str, &str, &Gauge); 7] = [
            ("leases", "Leases held now", &self.leases),
            ("sessions", "Sessions open now", &self.sessions),
            ("connections", "gRPC connections open now", &self.connections),
            ("bulk_connections", "Bulk connections open now", &self.bulk_connections),
            (
                "shared_pinned_bytes",
                "Memory that clients read in place now",
                &self.shared_pinned_bytes,
            ),
            ("calls_in_flight", "Calls in progress, sessions not counted", &self.calls_in_flight),
            (
                "hash_root_mismatches",
                "Groups of namespaces that differ only in their hash root: no hits between them",
                &self.hash_root_mismatches,
            ),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        registry.register_with_unit(
            "leased",
            "Bytes under lease now; a block under two leases counts twice",
            Unit::Bytes,
            self.leased_bytes.clone(),
        );
        registry.register("leases_ended", "Leases ended, by reason", self.leases_ended.clone());
    }

    fn make_series(&self) {
        for &op in Op::ALL {
            drop(self.rpc_seconds.get_or_create(&ByCall { op, outcome: Outcome::Ok }));
        }
        for &tier in TierLabel::ALL {
            drop(self.get_blocks.get_or_create(&ByTier { tier }));
            drop(self.get_bytes.get_or_create(&ByTier { tier }));
            drop(self.get_seconds.get_or_create(&ByTier { tier }));
        }
        for &answer in Answer::ALL {
            drop(self.lookup_blocks.get_or_create(&ByAnswer { answer }));
        }
        for &reason in Missed::ALL {
            drop(self.get_missed_blocks.get_or_create(&ByMissed { reason }));
        }
        for &outcome in PutLabel::ALL {
            drop(self.put_blocks.get_or_create(&ByOutcome { outcome }));
        }
        for &reason in LeaseEnd::ALL {
            drop(self.leases_ended.get_or_create(&ByEnd { reason }));
        }
    }

    /// Records the end of a call.
    pub fn record_call(&self, op: Op, outcome: Outcome, elapsed: Duration) {
        let series = ByCall { op, outcome };
        self.rpc_seconds.get_or_create(&series).observe(elapsed.as_secs_f64());
    }

    /// Records what a lookup said, in blocks by [`Answer`]; the sum is what was asked.
    pub fn record_lookup(&self, blocks: [(Answer, u32); 5]) {
        for (answer, count) in blocks {
            let count = u64::from(count);
            self.lookup_asked_blocks.inc_by(count);
            self.lookup_blocks.get_or_create(&ByAnswer { answer }).inc_by(count);
        }
    }

    /// Records one delivered block.
    pub fn record_get(&self, tier: TierLabel, bytes: u64, elapsed: Duration) {
        let series = ByTier { tier };
        self.get_blocks.get_or_create(&series).inc();
        self.get_bytes.get_or_create(&series).inc_by(bytes);
        self.get_seconds.get_or_create(&series).observe(elapsed.as_secs_f64());
    }

    /// Records blocks that a get did not deliver.
    pub fn record_missed(&self, reason: Missed, blocks: u64) {
        self.get_missed_blocks.get_or_create(&ByMissed { reason }).inc_by(blocks);
    }

    /// Records what became of offered blocks.
    pub fn record_put(&self, outcome: PutLabel, blocks: u64) {
        self.put_blocks.get_or_create(&ByOutcome { outcome }).inc_by(blocks);
    }

    /// Records received payload.
    pub fn record_put_bytes(&self, bytes: u64) {
        self.put_bytes.inc_by(bytes);
    }

    /// Offered blocks of which this became, since the start.
    #[must_use]
    pub fn put_blocks(&self, outcome: PutLabel) -> u64 {
        self.put_blocks.get_or_create(&ByOutcome { outcome }).get()
    }

    /// Blocks that gets did not deliver for this reason, since the start.
    #[must_use]
    pub fn missed(&self, reason: Missed) -> u64 {
        self.get_missed_blocks.get_or_create(&ByMissed { reason }).get()
    }

    /// Records ended leases.
    pub fn record_leases_ended(&self, reason: LeaseEnd, count: u64) {
        self.leases_ended.get_or_create(&ByEnd { reason }).inc_by(count);
    }

    /// Leases that ended so, since the start.
    #[must_use]
    pub fn leases_ended(&self, reason: LeaseEnd) -> u64 {
        self.leases_ended.get_or_create(&ByEnd { reason }).get()
    }

    /// Blocks that lookups said this about, since the start.
    #[must_use]
    pub fn lookup_blocks(&self, answer: Answer) -> u64 {
        self.lookup_blocks.get_or_create(&ByAnswer { answer }).get()
    }

    /// Blocks and bytes delivered from a tier, since the start.
    #[must_use]
    pub fn delivered(&self, tier: TierLabel) -> (u64, u64) {
        let series = ByTier { tier };
        (self.get_blocks.get_or_create(&series).get(), self.get_bytes.get_or_create(&series).get())
    }
}
