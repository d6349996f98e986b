//! What a server holds and has done.

use std::{collections::BTreeMap, time::Duration};

use kvstrata_proto::v1;
use kvstrata_tiers::{error::Result, tier::Tier};
use serde::Serialize;

use super::{Client, lookup::tier_of};

/// A server's state and totals since its start.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Stats {
    /// Name of the node.
    pub node: String,
    /// Version of the server.
    pub version: String,
    /// Milliseconds since its start.
    pub uptime_ms: u64,
    /// One entry for each tier it has, hot to cold.
    pub tiers: Vec<TierStats>,
    /// Blocks known.
    pub index_blocks: u64,
    /// Memory of the index, in bytes.
    pub index_bytes: u64,
    /// Open sessions.
    pub sessions: u32,
    /// Leases in force.
    pub leases: u32,
    /// Bytes they cover.
    pub leased_bytes: u64,
    /// Bytes of puts in flight.
    pub staging_bytes: u64,
    /// Puts whose key was here with other bytes.
    pub duplicate_differs: u64,
    /// Parts that failed verification.
    pub corrupt: u64,
    /// Blocks asked in lookups, by answer.
    pub lookups: TierTotals,
    /// Open namespaces.
    pub namespaces: Vec<NamespaceStats>,
    /// What a person should know now.
    pub warnings: Vec<String>,
    /// What is not as it should be, in words: the warnings in their parts, and what may be meant.
    pub findings: Vec<Finding>,
    /// Leases since the start, by what became of them; `None` for whoever is no operator.
    pub lease_totals: Option<LeaseTotals>,
    /// Names of other hash schemes.
    pub schemes: Vec<SchemeStats>,
    /// What tenants have and may have: the client's own, or, for an operator, those with a quota.
    pub tenants: Vec<TenantStats>,
}

/// What a tenant has, and may have and do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TenantStats {
    /// Its name.
    pub tenant: String,
    /// Dram, nvme and object.
    pub tiers: Vec<TenantTier>,
    /// Requests that it may make; none: any number.
    pub requests_per_second: Option<u64>,
    /// Bytes of puts and gets that it may move; none: any number.
    pub bytes_per_second: Option<u64>,
    /// Requests refused since the start because there were too many.
    pub refused_for_requests: u64,
    /// Requests refused since the start because of the bytes of those before them.
    pub refused_for_bytes: u64,
}

/// What a tenant has on a tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct TenantTier {
    /// Its name: dram, nvme or object.
    pub tier: String,
    /// Bytes of slots in dram, of blocks on the others.
    pub used_bytes: u64,
    /// Bytes that others leave alone.
    pub floor_bytes: u64,
    /// Bytes that it has at most; none: any number.
    pub max_bytes: Option<u64>,
    /// Blocks that its quota kept from the tier since the start.
    pub refused_blocks: u64,
}

/// Something that is not as it should be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about, in a word or two.
    pub what: String,
    /// What is so.
    pub seen: String,
    /// What to do.
    pub advice: String,
    /// Whether it keeps the cache from working; otherwise it may be meant.
    pub problem: bool,
}

/// The index of one hash scheme.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SchemeStats {
    /// Its name.
    pub scheme: String,
    /// Blocks that are in it.
    pub entries: u64,
    /// Memory that they take, in bytes.
    pub bytes: u64,
}

/// Leases since the start: `granted` is the sum of the others and of those in force.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct LeaseTotals {
    /// Given out.
    pub granted: u64,
    /// Given back.
    pub released: u64,
    /// Ended by their deadline.
    pub expired: u64,
    /// Ended with their session.
    pub session_ended: u64,
}

/// One tier.
#[derive(Debug, Clone, Default, Serialize)]
pub struct TierStats {
    /// Its name: dram, nvme or object.
    pub tier: String,
    /// What it can hold, in bytes.
    pub capacity_bytes: u64,
    /// What blocks take of that, in bytes.
    pub used_bytes: u64,
    /// Blocks it holds.
    pub blocks: u64,
    /// Blocks evicted since the start.
    pub evicted_blocks: u64,
    /// Blocks read since the start.
    pub get_blocks: u64,
    /// Bytes read since the start.
    pub get_bytes: u64,
}

/// Blocks asked in lookups: the other fields sum to `asked`.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct TierTotals {
    /// All of them.
    pub asked: u64,
    /// In a prefix, in dram.
    pub dram: u64,
    /// In a prefix, on nvme.
    pub nvme: u64,
    /// In a prefix, in the object store.
    pub object: u64,
    /// In a prefix, with a put in flight.
    pub pending: u64,
    /// Not in a prefix.
    pub miss: u64,
}

/// One namespace.
#[derive(Debug, Clone, Default, Serialize)]
pub struct NamespaceStats {
    /// Its id, in hex.
    pub namespace_id: String,
    /// Model, or the name of an opaque namespace.
    pub model: String,
    /// Engine.
    pub engine: String,
    /// Hash root, in hex, shortened.
    pub hash_root: String,
    /// Blocks held.
    pub blocks: u64,
    /// Bytes of them.
    pub bytes: u64,
    /// Blocks asked in lookups, by answer.
    pub lookups: TierTotals,
    /// Blocks stored since the start.
    pub put_blocks: u64,
    /// What was declared, by field, as text; empty for an opaque namespace. Of hash root, LoRA and salt
    /// a digest.
    pub declared: BTreeMap<&'static str, String>,
    /// Whether token ids that are told are kept.
    pub keep_tokens: bool,
    /// By which names its blocks can be found, too.
    pub hash_schemes: Vec<String>,
    /// The last few that opened it since the start, oldest first.
    pub openers: Vec<Opener>,
}

/// Who opened a namespace, in its own words.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Opener {
    /// The engine instance.
    pub instance: String,
    /// The host it runs on.
    pub node: String,
    /// The client it runs, like `kvstrata 0.1.0`.
    pub client_version: String,
    /// How long ago, in milliseconds.
    pub opened_ms_ago: u64,
}

impl Stats {
    /// The entry of `tier`, if the server has that tier.
    #[must_use]
    pub fn tier(&self, tier: Tier) -> Option<&TierStats> {
        self.tiers.iter().find(|entry| entry.tier == tier.name())
    }
}

impl Client {
    /// Asks what the server holds and has done.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: it changes nothing.
    pub async fn stats(&self) -> Result<Stats> {
        let mut wire = self.wire();
        let call = wire.stats(self.request(v1::StatsRequest {}));
        let reply = self.call("read stats", call).await?;
        self.server().learn_members(reply.members.clone());
        Ok(Stats::from(reply))
    }
}

impl From<v1::StatsResponse> for Stats {
    fn from(wire: v1::StatsResponse) -> Self {
        Self {
            node: wire.node,
            version: wire.version,
            uptime_ms: wire.uptime_ms,
            tiers: wire.tiers.into_iter().map(TierStats::from).collect(),
            index_blocks: wire.index_blocks,
            index_bytes: wire.index_bytes,
            sessions: wire.sessions,
            leases: wire.leases,
            leased_bytes: wire.leased_bytes,
            staging_bytes: wire.staging_bytes,
            duplicate_differs: wire.duplicate_differs,
            corrupt: wire.corrupt,
            lookups: wire.lookups.unwrap_or_default().into(),
            namespaces: wire.namespaces.into_iter().map(NamespaceStats::from).collect(),
            warnings: wire.warnings,
            findings: wire.findings.into_iter().map(Finding::from).collect(),
            lease_totals: wire.lease_totals.map(LeaseTotals::from),
            schemes: wire.schemes.into_iter().map(SchemeStats::from).collect(),
            tenants: wire.tenants.into_iter().map(TenantStats::from).collect(),
        }
    }
}

impl Stats {
    /// How long the server has been up.
    #[must_use]
    pub fn uptime(&self) -> Duration {
        Duration::from_millis(self.uptime_ms)
    }
}

impl From<v1::TierStats> for TierStats {
    fn from(wire: v1::TierStats) -> Self {
        Self {
            tier: tier_of(wire.tier()).map_or("unknown", Tier::name).to_owned(),
            capacity_bytes: wire.capacity_bytes,
            used_bytes: wire.used_bytes,
            blocks: wire.blocks,
            evicted_blocks: wire.evicted_blocks,
            get_blocks: wire.get_blocks,
            get_bytes: wire.get_bytes,
        }
    }
}

impl From<v1::TenantStats> for TenantStats {
    fn from(wire: v1::TenantStats) -> Self {
        Self {
            tenant: wire.tenant,
            tiers: wire.tiers.into_iter().map(TenantTier::from).collect(),
            requests_per_second: Some(wire.requests_per_second).filter(|rate| *rate > 0),
            bytes_per_second: Some(wire.bytes_per_second).filter(|rate| *rate > 0),
            refused_for_requests: wire.refused_for_requests,
            refused_for_bytes: wire.refused_for_bytes,
        }
    }
}

impl From<v1::TenantTier> for TenantTier {
    fn from(wire: v1::TenantTier) -> Self {
        Self {
            tier: tier_of(wire.tier()).map_or("unknown", Tier::name).to_owned(),
            used_bytes: wire.used_bytes,
            floor_bytes: wire.floor_bytes,
            max_bytes: wire.max_bytes,
            refused_blocks: wire.refused_blocks,
        }
    }
}

impl From<v1::Finding> for Finding {
    fn from(wire: v1::Finding) -> Self {
        let v1::Finding { what, seen, advice, problem } = wire;
        Self { what, seen, advice, problem }
    }
}

impl From<v1::SchemeStats> for SchemeStats {
    fn from(wire: v1::SchemeStats) -> Self {
        let v1::SchemeStats { scheme, entries, bytes } = wire;
        Self { scheme, entries, bytes }
    }
}

impl From<v1::TierTotals> for TierTotals {
    fn from(wire: v1::TierTotals) -> Self {
        Self {
            asked: wire.asked,
            dram: wire.dram,
            nvme: wire.nvme,
            object: wire.object,
            pending: wire.pending,
            miss: wire.miss,
        }
    }
}

impl From<v1::NamespaceStats> for NamespaceStats {
    fn from(wire: v1::NamespaceStats) -> Self {
        Self {
            namespace_id: hex::encode(&wire.namespace_id),
            model: wire.model,
            engine: wire.engine,
            hash_root: wire.hash_root,
            blocks: wire.blocks,
            bytes: wire.bytes,
            lookups: wire.lookups.unwrap_or_default().into(),
            put_blocks: wire.put_blocks,
            declared: wire.declared.map(by_field).unwrap_or_default(),
            keep_tokens: wire.keep_tokens,
            hash_schemes: wire.hash_schemes,
            openers: wire.openers.into_iter().map(Opener::from).collect(),
        }
    }
}

fn by_field(declared: v1::Namespace) -> BTreeMap<&'static str, String> {
    let parts: Vec<_> = declared
        .parts
        .iter()
        .map(|part| format!("{}/{}: {} B", part.group, part.rank, part.bytes))
        .collect();
    BTreeMap::from([
        ("model", declared.model),
        ("weights", declared.weights),
        ("engine", declared.engine),
        ("layout", declared.layout),
        ("dtype", declared.dtype),
        ("block_tokens", declared.block_tokens.to_string()),
        ("parts", parts.join(", ")),
        ("split", declared.split),
        ("hash_algorithm", declared.hash_algorithm),
        ("hash_bytes", declared.hash_bytes.to_string()),
        ("hash_root", hex::encode(&declared.hash_root)),
        ("lora", hex::encode(&declared.lora)),
        ("cache_salt", hex::encode(&declared.cache_salt)),
    ])
}

impl From<v1::Opener> for Opener {
    fn from(wire: v1::Opener) -> Self {
        let v1::Opener { instance, node, client_version, opened_ms_ago, .. } = wire;
        Self { instance, node, client_version, opened_ms_ago }
    }
}

impl From<v1::LeaseTotals> for LeaseTotals {
    fn from(wire: v1::LeaseTotals) -> Self {
        let v1::LeaseTotals { granted, released, expired, session_ended } = wire;
        Self { granted, released, expired, session_ended }
    }
}
