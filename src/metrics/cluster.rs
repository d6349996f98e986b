//! The families of gossip, and of who is a member.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

use super::labels::DatagramOutcome;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDatagram {
    outcome: DatagramOutcome,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct ClusterMetrics {
    /// Nodes in the member list, this one among them.
    pub members: Gauge,
    /// The version of the member list.
    pub epoch: Gauge,
    /// Nodes that live and are not listed, for what they say of themselves.
    pub left_out: Gauge,
    /// Names that more than one living node has.
    pub names_twice: Gauge,
    /// Seeds that could not be resolved the last time.
    pub seeds_unresolved: Gauge,
    /// Bytes of datagrams that were sent.
    pub sent_bytes: Counter,
    /// Bytes of datagrams that came.
    pub received_bytes: Counter,
    /// Datagrams that were not sent: too long, or the system did not take them.
    pub unsent: Counter,
    datagrams: Family<ByDatagram, Counter>,
}

impl ClusterMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            members: Gauge::default(),
            epoch: Gauge::default(),
            left_out: Gauge::default(),
            names_twice: Gauge::default(),
            seeds_unresolved: Gauge::default(),
            sent_bytes: Counter::default(),
            received_bytes: Counter::default(),
            unsent: Counter::default(),
            datagrams: Family::default(),
        };
        let gauges = [
            ("cluster_members", "Nodes in the member list, this one among them", &metrics.members),
            ("cluster_epoch", "Version of the member list", &metrics.epoch),
            (
                "cluster_members_left_out",
                "Nodes that live and are not listed, for what they say of themselves",
                &metrics.left_out,
            ),
            (
                "cluster_names_twice",
                "Names that more than one living node has",
                &metrics.names_twice,
            ),
            (
                "cluster_seeds_unresolved",
                "Seeds that could not be resolved the last time",
                &metrics.seeds_unresolved,
            ),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        let counters = [
            ("cluster_sent_bytes", "Bytes of gossip that were sent", &metrics.sent_bytes),
            ("cluster_received_bytes", "Bytes of datagrams that came", &metrics.received_bytes),
            (
                "cluster_datagrams_unsent",
                "Datagrams of gossip that were too long, or that the system did not take",
                &metrics.unsent,
            ),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
        registry.register(
            "cluster_datagrams",
            "Datagrams that came to the port of gossip",
            metrics.datagrams.clone(),
        );
        for &outcome in DatagramOutcome::ALL {
            drop(metrics.datagrams.get_or_create(&ByDatagram { outcome }));
        }
        metrics.members.set(1);
        metrics.epoch.set(1);
        metrics
    }

    /// Records a datagram that came.
    pub fn record_datagram(&self, outcome: DatagramOutcome) {
        self.datagrams.get_or_create(&ByDatagram { outcome }).inc();
    }

    /// Datagrams with this outcome since the start.
    #[must_use]
    pub fn datagrams(&self, outcome: DatagramOutcome) -> u64 {
        self.datagrams.get_or_create(&ByDatagram { outcome }).get()
    }
}
