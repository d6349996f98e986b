//! Stats: what this node holds and has done, for people.

use std::sync::atomic::Ordering;

use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    namespace::{Namespace, NamespaceSpec},
    store::StoreUsage,
    tier::Tier,
};

use super::{Node, convert};
use crate::{flow, metrics::Answer};

/// Hex digits of a hash root that are shown.
const ROOT_DIGITS: usize = 16;

pub(super) fn of(node: &Node) -> wire::StatsResponse {
    let usage = node.stack.usage();
    let (leases, leased_bytes) = node.leases.usage();
    let dram = StoreUsage {
        capacity_bytes: usage.dram_capacity_bytes,
        used_bytes: usage.dram_used_bytes,
        blocks: usage.dram_blocks,
        evicted_blocks: usage.evicted_blocks,
    };
    let tiers = std::iter::once((Tier::Dram, dram)).chain(node.stack.colder_usage());
    let mismatches = node.namespaces.root_mismatches();
    wire::StatsResponse {
        node: node.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        uptime_ms: u64::try_from(node.started.elapsed().as_millis()).unwrap_or(u64::MAX),
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
        namespaces: node
            .namespaces
            .list()
            .iter()
            .map(|namespace| of_namespace(namespace))
            .collect(),
        warnings: mismatches.iter().map(ToString::to_string).collect(),
        members: Some(convert::members(&node.members)),
    }
}

fn of_tier(node: &Node, tier: Tier, usage: StoreUsage) -> wire::TierStats {
    let (get_blocks, get_bytes) = node.metrics.delivered(flow::tier_label(tier));
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

fn of_namespace(namespace: &Namespace) -> wire::NamespaceStats {
    let (model, engine, hash_root) = match namespace.spec() {
        NamespaceSpec::Engine(identity) => {
            let mut root = hex::encode(&identity.hash_root);
            root.truncate(ROOT_DIGITS);
            (identity.model.clone(), identity.engine.clone(), root)
        }
        NamespaceSpec::Opaque { name, .. } => (name.clone(), "opaque".to_owned(), String::new()),
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
    }
}
