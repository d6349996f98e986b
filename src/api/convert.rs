//! Wire to domain and back: total functions, the only code that knows both.
//!
//! What a request says is checked here once, before anything is allocated for it; an error names the
//! field, the value and the range.

use bytes::Bytes;
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    error::{Error, Result},
    limits::{PART_BYTES_MAX, PARTS_MAX},
    namespace::{Identity, NamespaceSpec, PartSpec},
    tier::{Tier, TierCounts},
};

use crate::{
    cluster::plan::Found,
    flow,
    lease::{Granted, LeaseLimits},
    limits::{
        CLIENT_NAME_BYTES_MAX, GET_BLOCKS_MAX, LOOKUP_HASHES_MAX, MESSAGE_BYTES_MAX, PUT_BLOCKS_MAX,
    },
    members::{Member, Members, Roster},
    metrics::{Answer, Missed, PutLabel},
};

/// Bytes of the digests that stand for what may be secret: enough to tell a few apart.
const DIGEST_BYTES: usize = 8;

/// Makes the specification of a namespace; the tenant comes from the authenticated identity.
///
/// # Errors
/// `Invalid` if neither kind is given or there are too many parts.
pub(super) fn namespace_spec(
    tenant: &str,
    kind: Option<wire::open_request::Kind>,
) -> Result<NamespaceSpec> {
    use wire::open_request::Kind;
    match kind {
        None => Err(Error::invalid("kind: nothing given, namespace or opaque required")),
        Some(Kind::Opaque(opaque)) => Ok(NamespaceSpec::Opaque {
            tenant: tenant.to_owned(),
            name: opaque.name,
            bytes_max: opaque.bytes_max,
        }),
        Some(Kind::Namespace(given)) => {
            if given.parts.len() > PARTS_MAX {
                let count = given.parts.len();
                return Err(Error::invalid(format!(
                    "namespace.parts: {count} given, 1 to {PARTS_MAX} allowed"
                )));
            }
            Ok(NamespaceSpec::Engine(Box::new(identity(tenant, given))))
        }
    }
}

fn identity(tenant: &str, given: wire::Namespace) -> Identity {
    let part =
        |part: wire::Part| PartSpec { group: part.group, rank: part.rank, bytes: part.bytes };
    Identity {
        tenant: tenant.to_owned(),
        model: given.model,
        weights: given.weights,
        engine: given.engine,
        layout: given.layout,
        dtype: given.dtype,
        block_tokens: given.block_tokens,
        parts: given.parts.into_iter().map(part).collect(),
        split: given.split,
        hash_algorithm: given.hash_algorithm,
        hash_bytes: given.hash_bytes,
        hash_root: given.hash_root.to_vec(),
        lora: given.lora.to_vec(),
        cache_salt: given.cache_salt.to_vec(),
    }
}

/// What a namespace was declared as, for people: what may be secret is told as a digest.
#[must_use]
pub(super) fn declared(identity: &Identity) -> wire::Namespace {
    let part =
        |part: &PartSpec| wire::Part { group: part.group, rank: part.rank, bytes: part.bytes };
    let digest = |bytes: &[u8]| match bytes {
        [] => Bytes::new(),
        _ => Bytes::copy_from_slice(&blake3::hash(bytes).as_bytes()[..DIGEST_BYTES]),
    };
    wire::Namespace {
        model: identity.model.clone(),
        weights: identity.weights.clone(),
        engine: identity.engine.clone(),
        layout: identity.layout.clone(),
        dtype: identity.dtype.clone(),
        block_tokens: identity.block_tokens,
        parts: identity.parts.iter().map(part).collect(),
        split: identity.split.clone(),
        hash_algorithm: identity.hash_algorithm.clone(),
        hash_bytes: identity.hash_bytes,
        hash_root: digest(&identity.hash_root),
        lora: digest(&identity.lora),
        cache_salt: digest(&identity.cache_salt),
    }
}

/// Checks a name that is kept for logs and stats.
///
/// # Errors
/// `Invalid` if it is too long.
pub(crate) fn label(field: &str, text: String) -> Result<String> {
    if text.len() > CLIENT_NAME_BYTES_MAX {
        return Err(Error::invalid(format!(
            "{field}: {} bytes given, 0 to {CLIENT_NAME_BYTES_MAX} allowed",
            text.len()
        )));
    }
    Ok(text)
}

/// What this server accepts.
#[must_use]
pub(super) fn limits(leases: LeaseLimits) -> wire::Limits {
    wire::Limits {
        lookup_hashes_max: flow::count(LOOKUP_HASHES_MAX),
        put_blocks_max: flow::count(PUT_BLOCKS_MAX),
        get_blocks_max: flow::count(GET_BLOCKS_MAX),
        message_bytes_max: flow::count(MESSAGE_BYTES_MAX),
        part_bytes_max: u32::try_from(PART_BYTES_MAX).unwrap_or(u32::MAX),
        lease_bytes_max: leases.session_bytes_max,
        lease_ttl_ms_max: flow::millis(leases.ttl_max),
    }
}

/// The members of the cluster.
#[must_use]
pub(super) fn members(members: &Members) -> wire::MemberList {
    let member = |member: &Member| wire::Member {
        index: member.index,
        name: member.name.clone(),
        endpoint: member.endpoint.clone(),
        zone: member.zone.clone(),
        host: member.host.clone(),
        bulk: member.bulk.as_ref().map(|bulk| wire::BulkPort {
            tcp: bulk.tcp.clone(),
            unix: bulk.unix.clone(),
            instance: bulk.instance.clone(),
        }),
        draining: member.draining,
        engines: member.engines,
        version: member.version.clone(),
        http: member.http.clone(),
    };
    wire::MemberList {
        epoch: members.epoch,
        self_: members.answering,
        members: members.list.iter().map(member).collect(),
    }
}

/// A lease as the client sees it.
#[must_use]
pub(super) fn lease(granted: &Granted) -> wire::Lease {
    wire::Lease {
        lease_id: granted.id.as_bytes().to_vec().into(),
        blocks: granted.blocks,
        bytes: granted.bytes,
        ttl_ms: flow::millis(granted.ttl),
    }
}

/// A run, and who has it.
#[must_use]
pub(super) fn found(found: &Found) -> wire::Run {
    let Found { run, holder, est_load } = *found;
    let is_own = holder == Roster::OWN;
    let locality = if is_own { wire::Locality::Local } else { wire::Locality::Remote };
    wire::Run {
        start: run.start,
        end: run.end,
        tier: tier(run.tier).into(),
        holder,
        locality: locality.into(),
        est_load_ms: est_load.as_secs_f32() * 1000.0,
        pending: run.pending,
    }
}

/// Counts by tier.
#[must_use]
pub(super) fn counts(counts: TierCounts) -> wire::TierCounts {
    let TierCounts { dram, nvme, object, pending, miss } = counts;
    wire::TierCounts { dram, nvme, object, pending, miss }
}

/// Counts by tier, as labels.
#[must_use]
pub(crate) fn answers(counts: TierCounts) -> [(Answer, u32); 5] {
    [
        (Answer::Dram, counts.dram),
        (Answer::Nvme, counts.nvme),
        (Answer::Object, counts.object),
        (Answer::Pending, counts.pending),
        (Answer::Miss, counts.miss),
    ]
}

/// A tier on the wire.
#[must_use]
pub(crate) fn tier(tier: Tier) -> wire::Tier {
    match tier {
        Tier::Dram => wire::Tier::Dram,
        Tier::Nvme => wire::Tier::Nvme,
        Tier::Object => wire::Tier::Object,
    }
}

/// A put outcome on the wire.
#[must_use]
pub(crate) fn put_outcome(outcome: PutLabel) -> wire::PutOutcome {
    match outcome {
        PutLabel::Stored => wire::PutOutcome::Stored,
        PutLabel::PartStored => wire::PutOutcome::PartStored,
        PutLabel::Duplicate => wire::PutOutcome::Duplicate,
        PutLabel::DuplicateDiffers => wire::PutOutcome::DuplicateDiffers,
        PutLabel::Pending => wire::PutOutcome::Pending,
        PutLabel::Refused => wire::PutOutcome::Refused,
        PutLabel::Corrupt => wire::PutOutcome::Corrupt,
        PutLabel::NotDurable => wire::PutOutcome::NotDurable,
    }
}

/// Why a block of a get has no bytes, on the wire.
#[must_use]
pub(crate) fn miss_reason(reason: Missed) -> wire::MissReason {
    match reason {
        Missed::Absent => wire::MissReason::Absent,
        Missed::Pending => wire::MissReason::Pending,
        Missed::Corrupt => wire::MissReason::Corrupt,
        Missed::Timeout => wire::MissReason::Timeout,
        Missed::Busy => wire::MissReason::Busy,
    }
}
