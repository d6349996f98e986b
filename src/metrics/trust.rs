//! The families of who was not let in, and of what was loaded again.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family},
    registry::Registry,
};

use super::labels::{Door, ReloadOutcome, Reloaded, Unproven};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByRefusal {
    door: Door,
    reason: Unproven,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByDoor {
    door: Door,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByReload {
    what: Reloaded,
    outcome: ReloadOutcome,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct TrustMetrics {
    unauthenticated: Family<ByRefusal, Counter>,
    tls_failures: Family<ByDoor, Counter>,
    reloads: Family<ByReload, Counter>,
}

impl TrustMetrics {
    /// Registers the families, with every series.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            unauthenticated: Family::default(),
            tls_failures: Family::default(),
            reloads: Family::default(),
        };
        registry.register(
            "unauthenticated_requests",
            "Requests refused for their token",
            metrics.unauthenticated.clone(),
        );
        registry.register(
            "tls_failures",
            "Connections that did not get through the TLS handshake",
            metrics.tls_failures.clone(),
        );
        registry.register(
            "reloads",
            "Times that changed files were loaded while the server ran",
            metrics.reloads.clone(),
        );
        for &door in Door::ALL {
            drop(metrics.tls_failures.get_or_create(&ByDoor { door }));
            for &reason in Unproven::ALL {
                drop(metrics.unauthenticated.get_or_create(&ByRefusal { door, reason }));
            }
        }
        for &what in Reloaded::ALL {
            for &outcome in ReloadOutcome::ALL {
                drop(metrics.reloads.get_or_create(&ByReload { what, outcome }));
            }
        }
        metrics
    }

    /// Records a request without a valid token.
    pub fn record_unauthenticated(&self, door: Door, reason: Unproven) {
        self.unauthenticated.get_or_create(&ByRefusal { door, reason }).inc();
    }

    /// Requests refused so, since the start.
    #[must_use]
    pub fn unauthenticated(&self, door: Door, reason: Unproven) -> u64 {
        self.unauthenticated.get_or_create(&ByRefusal { door, reason }).get()
    }

    /// Records a handshake that failed.
    pub fn record_tls_failure(&self, door: Door) {
        self.tls_failures.get_or_create(&ByDoor { door }).inc();
    }

    /// Records what became of files that have changed.
    pub fn record_reload(&self, what: Reloaded, outcome: ReloadOutcome) {
        self.reloads.get_or_create(&ByReload { what, outcome }).inc();
    }

    /// Times that files were loaded again with this outcome, since the start.
    #[must_use]
    pub fn reloads(&self, what: Reloaded, outcome: ReloadOutcome) -> u64 {
        self.reloads.get_or_create(&ByReload { what, outcome }).get()
    }
}
