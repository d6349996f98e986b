//! Wire to domain and back: total functions, the only code that knows both.
//!
//! What a request says is checked here once, before anything is allocated for it; an error names the
//! field, the value and the range.

use std::time::Duration;

use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    block::BlockHash,
    error::{Error, Result},
    limits::{PART_BYTES_MAX, PARTS_MAX},
    namespace::{Identity, Namespace, NamespaceSpec, PartSpec},
    stack::{Claim, PutOutcome},
    tier::{Run, Tier, TierCounts},
};

use crate::{
    lease::{Granted, LeaseLimits},
    limits::{
        CLIENT_NAME_BYTES_MAX, GET_BLOCKS_MAX, LOOKUP_HASHES_MAX, MESSAGE_BYTES_MAX, PUT_BLOCKS_MAX,
    },
    metrics::{Answer, Missed, PutLabel, TierLabel},
};

/// Makes the specification of a namespace; the tenant comes from the authenticated identity.
///
/// # Errors
/// `Invalid` if neither kind is given or there are too many parts.
pub(super) fn namespace_spec(
    tenant: String,
    kind: Option<wire::open_request::Kind>,
) -> Result<NamespaceSpec> {
    use wire::open_request::Kind;
    match kind {
        None => Err(Error::invalid("kind: nothing given, namespace or opaque required")),
        Some(Kind::Opaque(opaque)) => {
            Ok(NamespaceSpec::Opaque { tenant, name: opaque.name, bytes_max: opaque.bytes_max })
        }
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

fn identity(tenant: String, given: wire::Namespace) -> Identity {
    let part =
        |part: wire::Part| PartSpec { group: part.group, rank: part.rank, bytes: part.bytes };
    Identity {
        tenant,
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

/// Checks a name that is kept for logs and stats.
///
/// # Errors
/// `Invalid` if it is too long.
pub(super) fn label(field: &str, text: String) -> Result<String> {
    if text.len() > CLIENT_NAME_BYTES_MAX {
        return Err(Error::invalid(format!(
            "{field}: {} bytes given, 0 to {CLIENT_NAME_BYTES_MAX} allowed",
            text.len()
        )));
    }
    Ok(text)
}

/// Reads the hash before the first one; empty means the root.
///
/// # Errors
/// `Invalid` if it has another length than the namespace declares.
pub(super) fn parent(namespace: &Namespace, bytes: &[u8]) -> Result<Option<BlockHash>> {
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.len() != namespace.hash_bytes() {
        return Err(Error::invalid(format!(
            "parent: {} bytes given, 0 or hash_bytes {} allowed",
            bytes.len(),
            namespace.hash_bytes()
        )));
    }
    BlockHash::new(bytes).map(Some)
}

/// What this server accepts.
#[must_use]
pub(super) fn limits(leases: LeaseLimits) -> wire::Limits {
    wire::Limits {
        lookup_hashes_max: count(LOOKUP_HASHES_MAX),
        put_blocks_max: count(PUT_BLOCKS_MAX),
        get_blocks_max: count(GET_BLOCKS_MAX),
        message_bytes_max: count(MESSAGE_BYTES_MAX),
        part_bytes_max: u32::try_from(PART_BYTES_MAX).unwrap_or(u32::MAX),
        lease_bytes_max: leases.session_bytes_max,
        lease_ttl_ms_max: millis(leases.ttl_max),
    }
}

/// A lease as the client sees it.
#[must_use]
pub(super) fn lease(granted: &Granted) -> wire::Lease {
    wire::Lease {
        lease_id: granted.id.as_bytes().to_vec().into(),
        blocks: granted.blocks,
        bytes: granted.bytes,
        ttl_ms: millis(granted.ttl),
    }
}

/// A run on this node, with the estimated time to load all of it.
#[must_use]
pub(super) fn run(run: &Run, holder: u32, est_load: Duration) -> wire::Run {
    wire::Run {
        start: run.start,
        end: run.end,
        tier: tier(run.tier).into(),
        holder,
        locality: wire::Locality::Local.into(),
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
pub(super) fn answers(counts: TierCounts) -> [(Answer, u32); 5] {
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
pub(super) fn tier(tier: Tier) -> wire::Tier {
    match tier {
        Tier::Dram => wire::Tier::Dram,
        Tier::Nvme => wire::Tier::Nvme,
        Tier::Object => wire::Tier::Object,
    }
}

/// A tier in metrics.
#[must_use]
pub(super) fn tier_label(tier: Tier) -> TierLabel {
    match tier {
        Tier::Dram => TierLabel::Dram,
        Tier::Nvme => TierLabel::Nvme,
        Tier::Object => TierLabel::Object,
    }
}

/// What becomes of a position that is not wanted.
#[must_use]
pub(super) fn claim(claim: Claim) -> Option<PutLabel> {
    match claim {
        Claim::Wanted => None,
        Claim::Duplicate => Some(PutLabel::Duplicate),
        Claim::Differs => Some(PutLabel::DuplicateDiffers),
        Claim::Pending => Some(PutLabel::Pending),
        Claim::Refused => Some(PutLabel::Refused),
    }
}

/// What became of a position that was wanted.
#[must_use]
pub(super) fn outcome(outcome: PutOutcome) -> PutLabel {
    match outcome {
        PutOutcome::Stored => PutLabel::Stored,
        PutOutcome::PartStored => PutLabel::PartStored,
        PutOutcome::Refused => PutLabel::Refused,
        PutOutcome::Corrupt => PutLabel::Corrupt,
    }
}

/// A put outcome on the wire.
#[must_use]
pub(super) fn put_outcome(outcome: PutLabel) -> wire::PutOutcome {
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
pub(super) fn miss_reason(reason: Missed) -> wire::MissReason {
    match reason {
        Missed::Absent => wire::MissReason::Absent,
        Missed::Pending => wire::MissReason::Pending,
        Missed::Corrupt => wire::MissReason::Corrupt,
        Missed::Timeout => wire::MissReason::Timeout,
        Missed::Busy => wire::MissReason::Busy,
    }
}

/// A duration on the wire.
#[must_use]
pub(super) fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

/// A count on the wire; counts are bounded far below.
#[must_use]
pub(super) fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
