//! What an offer may claim: the checks of its fields, and the rules for each part of a block.

use super::Shared;
use crate::{
    block::{BlockHash, Hashes},
    dram::{Payload, seal},
    error::{Error, Result},
    map::{BatchId, Checksums, Entry, StagedPart, Staging},
    namespace::Namespace,
};

/// A batch of blocks in chain order.
#[derive(Debug, Clone, Copy)]
pub struct Offer<'a> {
    /// Their hashes.
    pub hashes: Hashes<'a>,
    /// Which declared parts will be sent, ascending; empty: all.
    pub parts: &'a [u32],
    /// One checksum for each (block, part), blocks outermost; empty: unknown.
    pub checksums: &'a [u64],
    /// The block before the first one.
    pub parent: Option<BlockHash>,
    /// Opaque namespaces only: the length of each value.
    pub lengths: &'a [u32],
}

/// What the stack wants of one position of an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Send the bytes of all offered parts.
    Wanted,
    /// It is here with these bytes (or with bytes that cannot be compared).
    Duplicate,
    /// It is here with other bytes, which stay.
    Differs,
    /// Another put of it is in flight (or it stands earlier in this offer).
    Pending,
    /// There is no room that may be taken.
    Refused,
}

/// Claims `parts` of a block that the map knows.
pub(super) fn claim_known(
    entry: &mut Entry,
    id: BatchId,
    parts: &[u32],
    sums: &[u64],
    len: u32,
) -> Claim {
    let same_sums = |known: &dyn Fn(usize) -> Option<u64>| {
        parts.iter().zip(sums).all(|(part, sum)| {
            usize::try_from(*part).ok().and_then(known).is_none_or(|known| known == *sum)
        })
    };
    let Some(staging) = entry.staging.as_mut() else {
        let same = entry.len == len && same_sums(&|part| entry.checksums.get(part));
        return if same { Claim::Duplicate } else { Claim::Differs };
    };
    if entry.len != len {
        return Claim::Pending;
    }
    let part_of = |part: &u32| staging.parts.get(usize::try_from(*part).unwrap_or(usize::MAX));
    if parts.iter().any(|part| part_of(part).is_none_or(StagedPart::is_claimed)) {
        return Claim::Pending;
    }
    if parts.iter().any(|part| matches!(part_of(part), Some(StagedPart::Absent(_)))) {
        claim_parts(staging, id, parts);
        return Claim::Wanted;
    }
    let known = |part: usize| match staging.parts.get(part) {
        Some(StagedPart::Done(_, sum)) => Some(*sum),
        Some(StagedPart::Absent(_) | StagedPart::Claimed(..)) | None => None,
    };
    if same_sums(&known) { Claim::Duplicate } else { Claim::Differs }
}

/// Claims `parts`, none of which is claimed. What a put that was cut short has left of them is
/// written anew: nobody was told that it can be read.
pub(super) fn claim_parts(staging: &mut Staging, id: BatchId, parts: &[u32]) {
    for part in parts {
        let part = usize::try_from(*part).unwrap_or(usize::MAX);
        if let Some(place) = staging.parts.get_mut(part) {
            let writer = match std::mem::replace(place, StagedPart::Absent(None)) {
                StagedPart::Absent(writer) | StagedPart::Claimed(_, writer) => writer,
                StagedPart::Done(writer, _) => Some(writer),
            };
            *place = StagedPart::Claimed(id, writer);
        }
    }
}

/// Seals a complete block.
pub(super) fn join(staging: Staging, len: u32) -> Option<(Payload, Checksums)> {
    let mut writers = Vec::with_capacity(staging.parts.len());
    let mut sums = Vec::with_capacity(staging.parts.len());
    for part in staging.parts {
        match part {
            StagedPart::Done(writer, sum) => {
                writers.push(writer);
                sums.push(sum);
            }
            StagedPart::Absent(_) | StagedPart::Claimed(..) => return None,
        }
    }
    Some((seal(writers, len).ok()?, Checksums::new(sums)))
}

/// Refuses parts that the namespace does not declare, or that are named twice.
pub(super) fn check_parts(namespace: &Namespace, parts: &[u32]) -> Result<()> {
    let declared = namespace.layout().parts().len();
    for part in parts {
        if usize::try_from(*part).map_or(true, |part| part >= declared) {
            return Err(Error::invalid(format!(
                "parts: {part} given, 0 to {} declared by the namespace",
                declared - 1
            )));
        }
    }
    if !parts.is_sorted_by(|a, b| a < b) {
        return Err(Error::invalid(format!(
            "parts: {parts:?} given, ascending without repetition required"
        )));
    }
    Ok(())
}

/// Refuses an offer that can never work, naming the field.
pub(super) fn check_offer(shared: &Shared, namespace: &Namespace, offer: &Offer<'_>) -> Result<()> {
    check_parts(namespace, offer.parts)?;
    let layout = namespace.layout();
    let blocks = offer.hashes.len();
    let parts = if offer.parts.is_empty() { layout.parts().len() } else { offer.parts.len() };
    if !offer.checksums.is_empty() && offer.checksums.len() != blocks * parts {
        return Err(Error::invalid(format!(
            "checksums: {} given, 0 or {} required (blocks times parts)",
            offer.checksums.len(),
            blocks * parts
        )));
    }
    let lengths = if layout.is_opaque() { blocks } else { 0 };
    if offer.lengths.len() != lengths {
        return Err(Error::invalid(format!(
            "lengths: {} given, {lengths} required (one for each block of an opaque namespace)",
            offer.lengths.len()
        )));
    }
    let max = shared.pool.block_bytes_max().min(u64::from(layout.bytes_max()));
    let longest = offer.lengths.iter().copied().map(u64::from).max();
    let longest = longest.unwrap_or_else(|| layout.block_bytes());
    if longest > max || offer.lengths.contains(&0) {
        return Err(Error::invalid(format!(
            "lengths: {longest} bytes given, 1 to {max} allowed by the namespace and the dram extents"
        )));
    }
    Ok(())
}
