//! Holds a server to what it has acknowledged, in both directions: what was acknowledged as durable is
//! found and brings the right bytes, and what was acknowledged as removed is neither found nor
//! brought.
//!
//! Nobody else may be asking for changes meanwhile.

use std::{collections::HashSet, ops::Range, time::Duration};

use kvstrata_tiers::error::Result;

use super::{
    ledger::Claims,
    link::{Link, Serving, Shared, hashes_of},
    payload::{Checker, PartIdentity},
};
use crate::client::{
    FetchedBlock, GetOptions, GetSink, Handle, HashList, LookupOptions, MissReason,
};

/// Blocks asked for at once: one lookup, and gets that fit into a small dram.
const BATCH_BLOCKS: usize = 1024;
/// How often a block is asked for again that a server could not bring just then.
const TRIES: u32 = 20;
/// How long to wait before that.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// What audits found, all together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Findings {
    /// Durable blocks asked for.
    pub(super) kept_checked: u64,
    /// Of these, not found or not brought.
    pub(super) lost: u64,
    /// Removed blocks asked for.
    pub(super) removed_checked: u64,
    /// Of these, found or brought.
    pub(super) resurrected: u64,
    /// Bytes that are not what they must be.
    pub(super) wrong_bytes: u64,
}

/// Asks the server at `serving` for everything in `claims`.
pub(super) async fn audit(
    shared: &Shared,
    serving: Serving,
    claims: &Claims,
    findings: &mut Findings,
) -> Result<()> {
    let link = Link::open_at(shared, serving, "audit").await?;
    let checker = Checker::new(shared.source.clone(), shared.block_bytes as usize);
    let mut auditor = Auditor { handle: &link.handle, checker, wrong_bytes: 0 };
    for blocks in claims.kept.chunks(BATCH_BLOCKS) {
        findings.kept_checked += blocks.len() as u64;
        findings.lost += auditor.lost(blocks).await?;
    }
    for blocks in claims.removed.chunks(BATCH_BLOCKS) {
        findings.removed_checked += blocks.len() as u64;
        let seen = auditor.look(&hashes_of(blocks)).await?;
        findings.resurrected += seen.found.union(&seen.brought).count() as u64;
    }
    findings.wrong_bytes += auditor.wrong_bytes;
    Ok(())
}

struct Auditor<'a> {
    handle: &'a Handle,
    checker: Checker,
    wrong_bytes: u64,
}

/// Positions in a list of blocks.
#[derive(Debug, Default)]
struct Seen {
    /// Found by a lookup.
    found: HashSet<u32>,
    /// Brought by a get.
    brought: HashSet<u32>,
    /// Not brought for a reason that passes.
    later: HashSet<u32>,
}

impl Auditor<'_> {
    /// How many of `blocks` are not there.
    async fn lost(&mut self, blocks: &[u32]) -> Result<u64> {
        let mut left = blocks.to_vec();
        let mut lost = 0;
        for _ in 0..TRIES {
            let seen = self.look(&hashes_of(&left)).await?;
            let mut again = Vec::new();
            for (position, block) in (0_u32..).zip(&left) {
                let there = seen.found.contains(&position) && seen.brought.contains(&position);
                if seen.later.contains(&position) {
                    again.push(*block);
                } else if !there {
                    lost += 1;
                }
            }
            left = again;
            if left.is_empty() {
                break;
            }
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
        Ok(lost + left.len() as u64)
    }

    async fn look(&mut self, hashes: &HashList) -> Result<Seen> {
        let mut seen = Seen::default();
        let options = LookupOptions { sparse: true, ..LookupOptions::default() };
        let found = self.handle.lookup(hashes, options).await?;
        let runs = found.runs.iter().chain(&found.sparse).filter(|run| !run.pending);
        seen.found.extend(runs.flat_map(|run| run.start..run.end));
        let mut sink = Sink { auditor: self, seen: &mut seen };
        let handle = sink.auditor.handle;
        handle.get(hashes, GetOptions::default(), &mut sink).await?;
        Ok(seen)
    }
}

struct Sink<'a, 'b> {
    auditor: &'a mut Auditor<'b>,
    seen: &'a mut Seen,
}

impl GetSink for Sink<'_, '_> {
    fn block(&mut self, block: FetchedBlock<'_>) {
        let Auditor { handle, checker, wrong_bytes } = &mut *self.auditor;
        let identity = PartIdentity { namespace: handle.id(), hash: &block.hash, part: 0 };
        *wrong_bytes += checker.wrong_bytes(identity, block.pieces());
        self.seen.brought.insert(block.position);
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        match reason {
            MissReason::Pending | MissReason::Timeout | MissReason::Busy => {
                self.seen.later.extend(positions);
            }
            // What is damaged is as good as lost.
            MissReason::Absent | MissReason::Corrupt | MissReason::CorruptHere => {}
        }
    }
}
