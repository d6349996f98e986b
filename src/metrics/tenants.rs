//! What tenants have, by tenant: the one label whose values an operator chooses.
//!
//! Only tenants that the tenants file names, or has named since the start, have series, and they are
//! [bounded](kvstrata_tiers::limits::LANES_MAX). Whoever may read metrics is an operator where there are tokens.

use std::sync::Arc;

use kvstrata_tiers::{
    account::{Account, Accounts},
    tier::Tier,
};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};

use super::labels::{RateLabel, TierLabel};
use crate::auth::{RateTable, Rates};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTenantTier {
    tenant: Arc<str>,
    tier: TierLabel,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByTenantLimit {
    tenant: Arc<str>,
    limit: RateLabel,
}

/// See the module; clones share the families.
#[derive(Debug, Clone)]
pub struct TenantMetrics {
    bytes: Family<ByTenantTier, Gauge>,
    refused_blocks: Family<ByTenantTier, Counter>,
    refused_requests: Family<ByTenantLimit, Counter>,
}

impl TenantMetrics {
    /// Registers the families, which have no series yet.
    #[must_use]
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            bytes: Family::default(),
            refused_blocks: Family::default(),
            refused_requests: Family::default(),
        };
        registry.register_with_unit(
            "tenant",
            "What a tenant of the tenants file has on a tier",
            Unit::Bytes,
            metrics.bytes.clone(),
        );
        registry.register(
            "tenant_refused_blocks",
            "Blocks that a tenant's quota kept from a tier",
            metrics.refused_blocks.clone(),
        );
        registry.register(
            "tenant_refused_requests",
            "Requests of a tenant refused for what it may do in a second",
            metrics.refused_requests.clone(),
        );
        metrics
    }

    /// Shows what is so now.
    pub fn show(&self, accounts: &Accounts, rates: &RateTable) {
        for account in accounts.list().iter().filter(|account| account.has_had_quota()) {
            self.show_one(account, &rates.of(account.tenant()));
        }
    }

    fn show_one(&self, account: &Account, rates: &Rates) {
        let tenant: Arc<str> = account.tenant().into();
        let holding = account.holding();
        for ((tier, bytes), refused) in
            Tier::ALL.into_iter().zip(holding.bytes).zip(holding.refused)
        {
            let labels = ByTenantTier { tenant: Arc::clone(&tenant), tier: tier.into() };
            self.bytes.get_or_create(&labels).set(i64::try_from(bytes).unwrap_or(i64::MAX));
            raise(&self.refused_blocks.get_or_create(&labels), refused);
        }
        let (requests, bytes) = rates.refused();
        for (limit, refused) in [(RateLabel::Requests, requests), (RateLabel::Bytes, bytes)] {
            let labels = ByTenantLimit { tenant: Arc::clone(&tenant), limit };
            raise(&self.refused_requests.get_or_create(&labels), refused);
        }
    }
}

/// Brings a counter to what was counted elsewhere.
fn raise(counter: &Counter, to: u64) {
    counter.inner().fetch_max(to, std::sync::atomic::Ordering::Relaxed);
}
