//! Stats: what this node holds and has done, for people.
//!
//! Whoever is no operator is told of its own tenant only: sums over its namespaces in place of those of
//! the node, and nothing of tiers, leases and staging, which all tenants share.

use std::sync::{Arc, atomic::Ordering};

use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    account::Account,
    namespace::{Namespace, NamespaceSpec},
    store::StoreUsage,
    tier::Tier,
};

use super::{Node, convert};
use crate::{
    auth::{Bearer, RateLimits, Rates},
    console::{
        self,
        problems::{Finding, Level},
    },
    flow,
    metrics::{Answer, LeaseEnd},
    openers::Opener,
    schemes::Scheme,
};

/// Hex digits of a hash root that are shown.
const ROOT_DIGITS: usize = 16;

pub(super) fn of(node: &Node, bearer: &Bearer) -> wire::StatsResponse {
    let mut namespaces = node.namespaces.list();
    let findings = console::problems_of(node, bearer);
    if bearer.is_operator() {
        let accounts = node.namespaces.accounts().list();
        let named = accounts.iter().filter(|account| account.has_had_quota());
        let rates = |account: &Account| node.rates.of(account.tenant());
        let tenants = named.map(|account| of_tenant(account, &rates(account))).collect();
        return wire::StatsResponse { tenants, ..of_node(node, &namespaces, findings) };
    }
    let tenant = bearer.tenant();
    namespaces.retain(|namespace| namespace.tenant() == tenant);
    let namespaces: Vec<_> =
        namespaces.iter().map(|namespace| of_namespace(node, namespace)).collect();
    let sum = |of: fn(&wire::TierTotals) -> u64| {
        namespaces.iter().filter_map(|namespace| namespace.lookups.as_ref()).map(of).sum()
    };
    wire::StatsResponse {
        index_blocks: namespaces.iter().map(|namespace| namespace.blocks).sum(),
        sessions: flow::count(node.sessions.count_of(tenant)),
        lookups: Some(totals([
            sum(|sums| sums.dram),
            sum(|sums| sums.nvme),
            sum(|sums| sums.object),
            sum(|sums| sums.pending),
            sum(|sums| sums.miss),
        ])),
        namespaces,
        tenants: vec![of_tenant(&node.namespaces.accounts().of(tenant), bearer.rates())],
        ..about(node, findings)
    }
}

/// What is no secret of any tenant.
fn about(node: &Node, findings: Vec<Finding>) -> wire::StatsResponse {
    let problems = findings.iter().filter(|finding| finding.level == Level::Problem);
    wire::StatsResponse {
        node: node.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_ms: u64::try_from(node.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        members: Some(convert::members(&node.roster.now())),
        warnings: problems.map(|of| format!("{}: {}", of.seen, of.advice)).collect(),
        findings: findings.into_iter().map(of_finding).collect(),
        ..wire::StatsResponse::default()
    }
}

fn of_finding(finding: Finding) -> wire::Finding {
    let Finding { level, what, seen, advice } = finding;
    wire::Finding { what, seen, advice, problem: level == Level::Problem }
}

fn of_node(
    node: &Node,
    namespaces: &[Arc<Namespace>],
    findings: Vec<Finding>,
) -> wire::StatsResponse {
    let usage = node.stack.usage();
    let (leases, leased_bytes) = node.leases.usage();
    let dram = StoreUsage {
        capacity_bytes: usage.dram_capacity_bytes,
        used_bytes: usage.dram_used_bytes,
        blocks: usage.dram_blocks,
        evicted_blocks: usage.evicted_blocks,
    };
    let tiers = std::iter::once((Tier::Dram, dram)).chain(node.stack.colder_usage());
    wire::StatsResponse {
        tiers: tiers.map(|(tier, usage)| of_tier(node, tier, usage)).collect(),
        index_blocks: usage.index_blocks,
        index_bytes: usage.index_bytes,
        sessions: flow::count(node.sessions.count()),
        leases: flow::count(leases),
        leased_bytes,
        staging_bytes: usage.staging_bytes,
        duplicate_differs: usage.duplicate_differs,
        corrupt: usage.corrupt,
        lookups: Some(lookups(node)),
        namespaces: namespaces.iter().map(|namespace| of_namespace(node, namespace)).collect(),
        lease_totals: Some(lease_totals(node)),
        schemes: Scheme::ALL.iter().map(|scheme| of_scheme(node, *scheme)).collect(),
        ..about(node, findings)
    }
}

fn of_tier(node: &Node, tier: Tier, usage: StoreUsage) -> wire::TierStats {
    let (get_blocks, get_bytes) = node.metrics.delivered(tier.into());
    wire::TierStats {
        tier: convert::tier(tier).into(),
        capacity_bytes: usage.capacity_bytes,
        used_bytes: usage.used_bytes,
        blocks: usage.blocks,
        evicted_blocks: usage.evicted_blocks,
        get_blocks,
        get_bytes,
    }
}

fn of_tenant(account: &Account, rates: &Rates) -> wire::TenantStats {
    let (holding, quota) = (account.holding(), account.quota());
    let bounds = [
        (quota.dram_floor, quota.dram_max),
        (quota.nvme_floor, quota.nvme_max),
        (0, quota.object_max),
    ];
    let both = holding.bytes.into_iter().zip(holding.refused).zip(bounds);
    let tiers = Tier::ALL.into_iter().zip(both);
    let tiers = tiers.map(|(tier, ((used_bytes, refused_blocks), (floor_bytes, max)))| {
        let max_bytes = (max < u64::MAX).then_some(max);
        let tier = convert::tier(tier).into();
        wire::TenantTier { tier, used_bytes, floor_bytes, max_bytes, refused_blocks }
    });
    let (refused_for_requests, refused_for_bytes) = rates.refused();
    let RateLimits { requests, bytes } = rates.limits();
    wire::TenantStats {
        tenant: account.tenant().to_owned(),
        tiers: tiers.collect(),
        requests_per_second: requests.unwrap_or(0),
        bytes_per_second: bytes.unwrap_or(0),
        refused_for_requests,
        refused_for_bytes,
    }
}

fn of_scheme(node: &Node, scheme: Scheme) -> wire::SchemeStats {
    let (entries, bytes) = node.schemes.usage(scheme);
    wire::SchemeStats { scheme: scheme.name().to_owned(), entries, bytes }
}

fn lookups(node: &Node) -> wire::TierTotals {
    let blocks = |answer| node.metrics.lookup_blocks(answer);
    totals([
        blocks(Answer::Dram),
        blocks(Answer::Nvme),
        blocks(Answer::Object),
        blocks(Answer::Pending),
        blocks(Answer::Miss),
    ])
}

/// The only constructor of totals, so that they sum to what was asked.
fn totals([dram, nvme, object, pending, miss]: [u64; 5]) -> wire::TierTotals {
    let asked = dram + nvme + object + pending + miss;
    wire::TierTotals { asked, dram, nvme, object, pending, miss }
}

fn lease_totals(node: &Node) -> wire::LeaseTotals {
    let ended = |reason| node.metrics.leases_ended(reason);
    wire::LeaseTotals {
        granted: node.metrics.leases_granted.get(),
        released: ended(LeaseEnd::Released),
        expired: ended(LeaseEnd::Expired),
        session_ended: ended(LeaseEnd::Session),
    }
}

fn of_namespace(node: &Node, namespace: &Namespace) -> wire::NamespaceStats {
    let (model, engine, hash_root) = match namespace.spec() {
        NamespaceSpec::Engine(identity) => {
            let mut root = hex::encode(&identity.hash_root);
            root.truncate(ROOT_DIGITS);
            (identity.model.clone(), identity.engine.clone(), root)
        }
        NamespaceSpec::Opaque { name, .. } => (name.clone(), "opaque".to_owned(), String::new()),
    };
    let declared = match namespace.spec() {
        NamespaceSpec::Engine(identity) => Some(convert::declared(identity)),
        NamespaceSpec::Opaque { .. } => None,
    };
    let counters = namespace.counters();
    let lookups = counters.lookups.each_ref().map(|count| count.load(Ordering::Relaxed));
    wire::NamespaceStats {
        namespace_id: namespace.id().as_bytes().to_vec().into(),
        model,
        engine,
        hash_root,
        blocks: counters.blocks.load(Ordering::Relaxed),
        bytes: counters.bytes.load(Ordering::Relaxed),
        lookups: Some(totals(lookups)),
        put_blocks: counters.put_blocks.load(Ordering::Relaxed),
        declared,
        keep_tokens: namespace.keeps_tokens(),
        hash_schemes: namespace.hash_schemes().into_iter().collect(),
        openers: node.openers.of(namespace.index()).into_iter().map(of_opener).collect(),
    }
}

fn of_opener(opener: Opener) -> wire::Opener {
    let Opener { instance, host, zone, client_version, at } = opener;
    let opened_ms_ago = u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX);
    wire::Opener { instance, node: host, zone, client_version, opened_ms_ago }
}
