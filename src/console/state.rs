//! What the page is told: one object of JSON, for whoever asks.

use std::{sync::atomic::Ordering, time::Duration};

use kvstrata_tiers::{
    namespace::{Namespace, NamespaceSpec},
    store::StoreUsage,
    tier::Tier,
};
use serde::Serialize;
use tokio::time::Instant;

use super::{
    history::{Sample, Totals},
    problems::Finding,
    problems_of,
    slow::SlowLoad,
};
use crate::{
    auth::Bearer,
    costs::{TierCost, TierState},
    limits::{CONSOLE_MEMBERS_MAX, CONSOLE_NAMESPACES_MAX, CONSOLE_SAMPLE_INTERVAL},
    members::{Member, Roster},
    node::Node,
};

/// Whether the node takes work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// It finds what is on its disk.
    Starting,
    /// It does.
    Ready,
    /// It is about to end.
    Draining,
}

/// What the page is told.
#[derive(Debug, Serialize)]
pub(crate) struct State {
    node: String,
    version: &'static str,
    uptime_ms: u64,
    phase: Phase,
    /// Whether this is of the whole node, or of one tenant only.
    operator: bool,
    tenant: Option<String>,
    epoch: u64,
    members: Vec<MemberView>,
    /// All of them, also those that are not listed.
    member_count: usize,
    problems: Vec<Finding>,
    /// Blocks asked in lookups since the start: dram, nvme, object, pending, miss.
    lookups: [u64; 5],
    namespaces: Vec<NamespaceView>,
    namespace_count: usize,
    slowest: Vec<SlowView>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    whole: Option<Whole>,
}

/// What concerns the whole node.
#[derive(Debug, Serialize)]
struct Whole {
    tiers: Vec<TierView>,
    interval_ms: u64,
    history: Vec<Sample>,
    sessions: usize,
    leases: usize,
    leased_bytes: u64,
    leased_bytes_max: u64,
    staging_bytes: u64,
    index_blocks: u64,
    index_bytes: u64,
}

#[derive(Debug, Serialize)]
struct MemberView {
    name: String,
    own: bool,
    endpoint: String,
    http: String,
    zone: String,
    host: String,
    version: String,
    draining: bool,
    engines: u32,
}

#[derive(Debug, Serialize)]
struct TierView {
    tier: &'static str,
    capacity_bytes: u64,
    used_bytes: u64,
    blocks: u64,
    evicted_blocks: u64,
    get_blocks: u64,
    get_bytes: u64,
    /// Whether its device is `ok`, `degraded` or `down`.
    state: &'static str,
    /// Bytes per second of the loads that were measured last; none were yet if absent.
    load_bytes_per_second: Option<f64>,
    queued_bytes: u64,
}

#[derive(Debug, Serialize)]
struct NamespaceView {
    id: String,
    model: String,
    engine: String,
    blocks: u64,
    bytes: u64,
    put_blocks: u64,
    /// As [`State::lookups`].
    lookups: [u64; 5],
    openers: usize,
}

#[derive(Debug, Serialize)]
struct SlowView {
    tier: &'static str,
    bytes: u64,
    took_ms: f64,
    namespace: String,
    ago_ms: u64,
}

impl State {
    /// What `bearer` is told of a node.
    pub(crate) fn of(node: &Node, bearer: &Bearer, phase: Phase) -> Self {
        let is_operator = bearer.is_operator();
        let tenant = (!is_operator).then(|| bearer.tenant());
        let members = node.roster.now();
        let shown = node.namespaces.list();
        let own = shown.iter().filter(|of| tenant.is_none_or(|tenant| of.tenant() == tenant));
        let mut namespaces: Vec<_> = own.map(|of| namespace(node, of)).collect();
        let lookups = match tenant {
            None => Totals::of(&node.metrics).answers,
            Some(_) => sum(&namespaces),
        };
        let namespace_count = namespaces.len();
        namespaces.sort_by_key(|of| std::cmp::Reverse((of.bytes, of.put_blocks)));
        namespaces.truncate(CONSOLE_NAMESPACES_MAX);
        Self {
            node: node.name.clone(),
            version: env!("CARGO_PKG_VERSION"),
            uptime_ms: millis(node.started.elapsed()),
            phase,
            operator: is_operator,
            tenant: tenant.map(str::to_owned),
            epoch: members.epoch,
            members: members.list.iter().take(CONSOLE_MEMBERS_MAX).map(member).collect(),
            member_count: members.list.len(),
            problems: problems_of(node, bearer),
            lookups,
            namespaces,
            namespace_count,
            slowest: node.console.slow.slowest(tenant).into_iter().map(slow).collect(),
            whole: is_operator.then(|| Whole::of(node)),
        }
    }
}

impl Whole {
    fn of(node: &Node) -> Self {
        let usage = node.stack.usage();
        let (leases, leased_bytes) = node.leases.usage();
        let dram = StoreUsage {
            capacity_bytes: usage.dram_capacity_bytes,
            used_bytes: usage.dram_used_bytes,
            blocks: usage.dram_blocks,
            evicted_blocks: usage.evicted_blocks,
        };
        let tiers = std::iter::once((Tier::Dram, dram)).chain(node.stack.colder_usage());
        let costs = node.costs.snapshot();
        let totals = Totals::of(&node.metrics);
        Self {
            tiers: tiers.map(|(of, usage)| tier(node, &costs, of, usage)).collect(),
            interval_ms: millis(CONSOLE_SAMPLE_INTERVAL),
            history: node.console.history.lock().samples(totals, Instant::now()),
            sessions: node.sessions.count(),
            leases,
            leased_bytes,
            leased_bytes_max: node.leases.limits().total_bytes_max,
            staging_bytes: usage.staging_bytes,
            index_blocks: usage.index_blocks,
            index_bytes: usage.index_bytes,
        }
    }
}

fn tier(node: &Node, costs: &[TierCost], tier: Tier, usage: StoreUsage) -> TierView {
    let (get_blocks, get_bytes) = node.metrics.delivered(tier.into());
    let of_tier = || costs.iter().filter(|cost| cost.tier == tier);
    let measured = of_tier().filter_map(|cost| Some((cost.sample_age?, cost.bandwidth)));
    TierView {
        tier: tier.name(),
        capacity_bytes: usage.capacity_bytes,
        used_bytes: usage.used_bytes,
        blocks: usage.blocks,
        evicted_blocks: usage.evicted_blocks,
        get_blocks,
        get_bytes,
        state: match node.costs.state(tier) {
            TierState::Ok => "ok",
            TierState::Degraded => "degraded",
            TierState::Down => "down",
        },
        load_bytes_per_second: measured.min_by_key(|(age, _)| *age).map(|(_, bandwidth)| bandwidth),
        queued_bytes: of_tier().map(|cost| cost.queued_bytes).max().unwrap_or(0),
    }
}

fn namespace(node: &Node, namespace: &Namespace) -> NamespaceView {
    let (model, engine) = match namespace.spec() {
        NamespaceSpec::Engine(identity) => (identity.model.clone(), identity.engine.clone()),
        NamespaceSpec::Opaque { name, .. } => (name.clone(), "opaque".to_owned()),
    };
    let counters = namespace.counters();
    // Relaxed: counters.
    NamespaceView {
        id: namespace.id().short(),
        model,
        engine,
        blocks: counters.blocks.load(Ordering::Relaxed),
        bytes: counters.bytes.load(Ordering::Relaxed),
        put_blocks: counters.put_blocks.load(Ordering::Relaxed),
        lookups: counters.lookups.each_ref().map(|count| count.load(Ordering::Relaxed)),
        openers: node.openers.of(namespace.index()).len(),
    }
}

fn sum(namespaces: &[NamespaceView]) -> [u64; 5] {
    namespaces.iter().fold([0; 5], |sums, of| {
        let mut more = of.lookups.into_iter();
        sums.map(|sum| sum.saturating_add(more.next().unwrap_or_default()))
    })
}

fn member(member: &Member) -> MemberView {
    MemberView {
        name: member.name.clone(),
        own: member.index == Roster::OWN,
        endpoint: member.endpoint.clone(),
        http: member.http.clone(),
        zone: member.zone.clone(),
        host: member.host.clone(),
        version: member.version.clone(),
        draining: member.draining,
        engines: member.engines,
    }
}

fn slow(load: SlowLoad) -> SlowView {
    SlowView {
        tier: load.tier.name(),
        bytes: load.bytes,
        took_ms: load.took.as_secs_f64() * 1e3,
        namespace: load.namespace,
        ago_ms: millis(load.at.elapsed()),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
