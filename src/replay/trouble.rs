//! Everything that must not be in a replay, each with its numbers.
//!
//! Some rules hold for every server. Others hold only for one that was left alone: one that is killed
//! forgets what it had not written, and its own counts with it, and is held to its ledger instead.

use super::{Disturbance, ReplayOptions, report::Measured};
use crate::trace::Trace;

/// What was found so far.
#[derive(Debug, Default)]
struct Found(Vec<String>);

impl Found {
    /// A number that must be 0.
    fn none(&mut self, what: &str, number: u64) {
        if number > 0 {
            self.0.push(format!("{what}: {number}"));
        }
    }

    /// Two numbers that must be the same.
    fn equal(&mut self, what: &str, one: u64, other: u64) {
        if one != other {
            self.0.push(format!("{what}: {one} is not {other}"));
        }
    }
}

/// All problems, in words.
pub(super) fn problems(trace: &Trace, options: &ReplayOptions, measured: &Measured) -> Vec<String> {
    let mut found = Found::default();
    check_bytes(&mut found, measured);
    match &measured.disturbance {
        None => check_kept(&mut found, trace, options, measured),
        Some(disturbance) => check_ledger(&mut found, disturbance),
    }
    check_counts(&mut found, trace, measured);
    if options.alone && measured.disturbance.is_none() {
        check_server(&mut found, measured);
    }
    found.0
}

fn check_bytes(found: &mut Found, measured: &Measured) {
    let Measured { tally, before, after, .. } = measured;
    found.none("wrong bytes", tally.wrong_bytes);
    found.none("blocks that failed verification at the client", tally.got.corrupt_here);
    found.none("blocks damaged on the way to the server", tally.put.corrupt);
    found.none("duplicate_differs", tally.put.duplicate_differs);
    found.none("blocks promised under a lease and not delivered", tally.lease_failures);
    let corrupt = after.corrupt.saturating_sub(before.corrupt);
    found.none("parts that failed verification at the server", corrupt);
}

/// What was stored and has not left is there.
fn check_kept(found: &mut Found, trace: &Trace, options: &ReplayOptions, measured: &Measured) {
    let Measured { tally, opt, .. } = measured;
    let evicted = measured.left();
    // Engines with other homes may store a block at each, before one home has heard of the other's.
    let homes = measured.servers.min(options.clients).max(1) as u64;
    let storable = u64::from(trace.blocks_unique()) * homes + evicted;
    let again = tally.put.stored.saturating_sub(storable);
    found.none("blocks stored again that had not left", again);
    if evicted > 0 {
        return;
    }
    found.none("blocks found and gone, although nothing was evicted", tally.gone);
    let taken = tally.put.stored + tally.put.duplicate + tally.put.not_durable;
    if options.clients == 1 && taken == tally.put.offered() {
        let lost = opt.hits.saturating_sub(tally.hits());
        found.none(
            "blocks stored by the only client and not found, although nothing was evicted",
            lost,
        );
    }
}

/// What was acknowledged holds, whatever became of the process.
fn check_ledger(found: &mut Found, disturbance: &Disturbance) {
    found.none("durable blocks lost", disturbance.lost_blocks);
    found.none("removed blocks back again", disturbance.resurrected_blocks);
    found.none("wrong bytes after a restart", disturbance.audit_wrong_bytes);
}

fn check_counts(found: &mut Found, trace: &Trace, measured: &Measured) {
    let tally = &measured.tally;
    let answered: u64 = tally.looked_up.iter().sum();
    found.equal("hits, pending and misses against references", answered, tally.references);
    found.equal("references replayed against the trace", tally.references, trace.references());
    found.equal("requests replayed against the trace", tally.requests, trace.len() as u64);
    let read = tally.got.blocks() + tally.got.missed;
    let readable = tally.hits().saturating_sub(tally.behind_pending);
    found.equal("blocks delivered and not delivered against hits", read, readable);
    found.equal("bytes checked against bytes delivered", tally.checked_bytes, tally.got.bytes);
    let offered = tally.references.saturating_sub(readable);
    found.equal("outcomes of puts against blocks not found", tally.put.offered(), offered);
}

/// Nobody else was there, so the server must have counted the same.
fn check_server(found: &mut Found, measured: &Measured) {
    let Measured { tally, before, after, .. } = measured;
    let [dram, nvme, ..] = tally.looked_up;
    let since = |after: u64, before: u64| after.saturating_sub(before);
    let asked = since(after.lookups.asked, before.lookups.asked);
    found.equal("blocks asked, as the server counts", asked, tally.references);
    for (tier, counted, ours) in [
        ("dram", since(after.lookups.dram, before.lookups.dram), dram),
        ("nvme", since(after.lookups.nvme, before.lookups.nvme), nvme),
    ] {
        found.equal(&format!("hits in {tier}, as the server counts"), counted, ours);
    }
    found.equal("leases left", u64::from(after.leases), u64::from(before.leases));
    found.equal("staging bytes left", after.staging_bytes, before.staging_bytes);
}
