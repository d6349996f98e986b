//! What is wrong, in words, and what to do about it. Pure: what is known comes in, sentences go out.
//!
//! [`of_node`] says what one node knows of itself, [`of_cluster`] what its members say together. The
//! page shows both, and so does `kvstrata doctor`, which asks every member.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use bytesize::ByteSize;
use kvstrata_tiers::{store::Ailment, tier::Tier};
use serde::Serialize;

use crate::{costs::TierState, numbers::count};

/// Leases over so many hundredths of what may be leased are near the limit.
const LEASED_PERCENT_MAX: u64 = 90;
/// Blocks of puts or gets from which on it counts that they were refused or late: a busy moment is none.
const BLOCKS_ENOUGH: u64 = 64;
/// Requests without a valid token from which on somebody should look.
const UNPROVEN_ENOUGH: u64 = 10;
/// An object tier that does not write yet so soon after the start is starting.
const STARTING_MAX: Duration = Duration::from_secs(60);
/// Engines of a cluster from which on it counts how they are spread.
const ENGINES_ENOUGH: u32 = 8;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// As it should be.
    Fine,
    /// It works, and may not be what was meant.
    Note,
    /// It keeps the cache from working.
    Problem,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was looked at.
    pub what: String,
    /// What was seen.
    pub seen: String,
    /// What to do; empty where nothing is to be done.
    pub advice: String,
}

impl Finding {
    pub(crate) fn fine(what: &str, seen: impl Into<String>) -> Self {
        Self { level: Level::Fine, what: what.to_owned(), seen: seen.into(), advice: String::new() }
    }

    pub(crate) fn note(what: &str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        let (seen, advice) = (seen.into(), advice.into());
        Self { level: Level::Note, what: what.to_owned(), seen, advice }
    }

    pub(crate) fn problem(what: &str, seen: impl Into<String>, advice: impl Into<String>) -> Self {
        let (seen, advice) = (seen.into(), advice.into());
        Self { level: Level::Problem, what: what.to_owned(), seen, advice }
    }
}

/// What a node knows of itself.
#[derive(Debug, Clone, Default)]
pub(crate) struct Facts {
    /// Since its start.
    pub uptime: Duration,
    /// Each group of clients that differ only in their hash root, in words.
    pub mismatches: Vec<String>,
    /// What is wrong with its colder tiers.
    pub ailments: Vec<(Tier, Ailment)>,
    /// How their devices read, where that is not as usual.
    pub devices: Vec<(Tier, TierState)>,
    /// Parts that failed verification, since the start.
    pub corrupt: u64,
    /// Requests that panicked, since the start.
    pub panics: u64,
    /// Changed files of tokens or certificates that could not be used, since the start.
    pub failed_reloads: u64,
    /// Bytes under lease, and how many may be.
    pub leased: (u64, u64),
    /// Of late: the figures below are of so long.
    pub window: Duration,
    /// Blocks of puts that were refused.
    pub refused: u64,
    /// Blocks of gets that did not come in time.
    pub late: u64,
    /// Requests without a valid token.
    pub unproven: u64,
    /// Members that left and have not come back, and how long ago.
    pub left: Vec<(String, Duration)>,
}

/// What is known of one member.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    /// Its name.
    pub name: String,
    /// `host:port` of the gRPC contract.
    pub endpoint: String,
    /// Its zone; empty when unknown.
    pub zone: String,
    /// The machine it runs on; empty when unknown.
    pub host: String,
    /// What it runs; empty when unknown.
    pub version: String,
    /// It will go away.
    pub draining: bool,
    /// Engine instances whose home it is.
    pub engines: u32,
}

/// Everything that is wrong with a node, worst first.
pub(crate) fn of_node(facts: &Facts) -> Vec<Finding> {
    let mut findings: Vec<_> = facts.mismatches.iter().map(|text| mismatch(text)).collect();
    findings.extend(facts.ailments.iter().filter_map(|(tier, is)| ailment(facts, *tier, *is)));
    findings.extend(facts.devices.iter().filter_map(|(tier, is)| device(*tier, *is)));
    findings.extend(corrupt(facts));
    findings.extend(panics(facts));
    findings.extend(reloads(facts));
    findings.extend(leases(facts));
    findings.extend(refused(facts));
    findings.extend(late(facts));
    findings.extend(unproven(facts));
    findings.extend(facts.left.iter().map(|(name, ago)| left(name, *ago)));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

fn mismatch(text: &str) -> Finding {
    let (seen, advice) = text.split_once(": ").unwrap_or((text, ""));
    Finding::problem("hash root", seen, advice)
}

fn ailment(facts: &Facts, tier: Tier, is: Ailment) -> Option<Finding> {
    if tier == Tier::Object && is == Ailment::ReadOnly && facts.uptime < STARTING_MAX {
        return None;
    }
    let (seen, advice) = match (tier, is) {
        (Tier::Object, Ailment::Away) => (
            "requests to the object store failed many times in a row, so none are sent for now",
            "it is tried again by itself, at least every 30 s; look at the store, the network to it \
             and its credentials. Blocks that only it has are misses until then",
        ),
        (Tier::Object, _) => (
            "the object tier writes nothing: another node has its ordinal, or the store cannot create \
             an object only if it is not there",
            "give each node its own ordinal (object.ordinal; the chart does), and use a store with \
             conditional creates. What is in the bucket is served all the same",
        ),
        (_, Ailment::Full) => (
            "the disk of the nvme tier is full and nothing could be reclaimed: it takes no writes now",
            "something else fills the disk: free some of it, or lower nvme.capacity. Reads go on",
        ),
        (_, Ailment::Failing | Ailment::Away) => (
            "writing to the disk of the nvme tier failed a moment ago; it is tried again",
            "look at the disk and at the log of this node. Reads go on",
        ),
        (_, Ailment::ReadOnly) => (
            "a sync of the nvme tier failed: it takes no writes until the restart of this node",
            "check the disk (dmesg, smartctl), replace it if need be, then restart this node. Reads go on",
        ),
    };
    Some(Finding::problem(tier.name(), seen, advice))
}

fn device(tier: Tier, is: TierState) -> Option<Finding> {
    let name = tier.name();
    match is {
        TierState::Ok => None,
        TierState::Degraded => Some(Finding::note(
            name,
            format!(
                "{name} loads several times slower than it used to, or has been silent for a second"
            ),
            "routers are told, and engines recompute what that is quicker for; see what else uses the \
             device or the way to it",
        )),
        TierState::Down => Some(Finding::problem(
            name,
            format!("nothing can be read from {name}: what only it has is a miss"),
            "look at the device and at the log of this node",
        )),
    }
}

fn corrupt(facts: &Facts) -> Option<Finding> {
    let seen = format!(
        "{} parts failed verification since the start; each was a miss and is gone",
        count(facts.corrupt)
    );
    let advice = "check the memory and the disk of this node: kvstrata_corrupt_blocks says by tier";
    (facts.corrupt > 0).then(|| Finding::problem("bytes", seen, advice))
}

fn panics(facts: &Facts) -> Option<Finding> {
    let seen = format!("{} requests panicked since the start", count(facts.panics));
    let advice = "that is a defect: report it, with the log of this node";
    (facts.panics > 0).then(|| Finding::problem("requests", seen, advice))
}

fn reloads(facts: &Facts) -> Option<Finding> {
    let seen = format!(
        "{} times since the start a changed file of tokens or certificates could not be used; what \
         was loaded before stays",
        count(facts.failed_reloads)
    );
    let advice = "the log says which file and why; the next change of it is looked at again";
    (facts.failed_reloads > 0).then(|| Finding::note("reload", seen, advice))
}

fn leases(facts: &Facts) -> Option<Finding> {
    let (bytes, limit) = facts.leased;
    let is_near = limit > 0 && bytes.saturating_mul(100) / limit >= LEASED_PERCENT_MAX;
    let seen = format!(
        "leases cover {} of the {} that may be leased: soon none are granted",
        ByteSize(bytes),
        ByteSize(limit)
    );
    let advice = "engines load more at a time than this node's memory is for, or do not give leases \
                  back: give it more memory, or more nodes";
    is_near.then(|| Finding::problem("leases", seen, advice))
}

fn refused(facts: &Facts) -> Option<Finding> {
    let seen = format!(
        "{} blocks of puts were refused within {}",
        count(facts.refused),
        minutes(facts.window)
    );
    let advice = "dram has no room that may be taken: leases and reads hold it, or one put is larger than \
                  it. More memory, or fewer blocks at a time";
    (facts.refused >= BLOCKS_ENOUGH).then(|| Finding::note("puts", seen, advice))
}

fn late(facts: &Facts) -> Option<Finding> {
    let seen = format!(
        "{} blocks of gets did not come in time within {}, a miss each",
        count(facts.late),
        minutes(facts.window)
    );
    let advice = "a colder tier is slower than what is asked of it: the slowest loads say which";
    (facts.late >= BLOCKS_ENOUGH).then(|| Finding::note("gets", seen, advice))
}

fn unproven(facts: &Facts) -> Option<Finding> {
    let seen = format!(
        "{} requests without a valid token within {}",
        count(facts.unproven),
        minutes(facts.window)
    );
    let advice = "a client has no token, or one that was taken out of the file: \
                  kvstrata_unauthenticated_requests says at which door";
    (facts.unproven >= UNPROVEN_ENOUGH).then(|| Finding::note("tokens", seen, advice))
}

fn left(name: &str, ago: Duration) -> Finding {
    Finding::note(
        "members",
        format!("{name} left the cluster {} ago and has not come back", minutes(ago)),
        "right if it was taken away; else look at its pod and its log. What only it had in memory is \
         gone; what it had in the object store is adopted after ten minutes",
    )
}

/// A time to the minute, and to the second below one.
fn minutes(time: Duration) -> String {
    match time.as_secs() {
        secs @ 0..60 => format!("{secs} s"),
        secs => format!("{} min", secs / 60),
    }
}

/// Everything that is wrong with members together, as far as it is known.
pub(crate) fn of_cluster(peers: &[Peer]) -> Vec<Finding> {
    let mut findings: Vec<_> = versions(peers).into_iter().collect();
    findings.extend(draining(peers));
    if peers.len() > 1 {
        findings.extend(zones(peers));
        findings.extend(hosts(peers));
        findings.extend(homes(peers));
    }
    findings
}

fn versions(peers: &[Peer]) -> Option<Finding> {
    let mut by_version: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for peer in peers.iter().filter(|peer| !peer.version.is_empty()) {
        by_version.entry(&peer.version).or_default().push(&peer.name);
    }
    if by_version.len() < 2 {
        return None;
    }
    let listed: Vec<_> =
        by_version.iter().map(|(version, names)| format!("{} {version}", listed(names))).collect();
    Some(Finding::note(
        "versions",
        format!("the members run different versions: {}", listed.join("; ")),
        "right while an upgrade rolls; if it does not go on, look at the pod that is next",
    ))
}

fn draining(peers: &[Peer]) -> Option<Finding> {
    let names: Vec<_> =
        peers.iter().filter(|peer| peer.draining).map(|peer| peer.name.as_str()).collect();
    let advice =
        "right while it is taken away or upgraded: its engines go to other homes meanwhile";
    (!names.is_empty())
        .then(|| Finding::note("draining", format!("{} is about to leave", listed(&names)), advice))
}

fn zones(peers: &[Peer]) -> Option<Finding> {
    let without: Vec<_> =
        peers.iter().filter(|peer| peer.zone.is_empty()).map(|peer| peer.name.as_str()).collect();
    if without.is_empty() {
        return None;
    }
    let seen = if without.len() == peers.len() {
        "no member knows its zone: engines of other zones are sent here as if they were near"
            .to_owned()
    } else {
        format!("{} does not know its zone, others do", listed(&without))
    };
    Some(Finding::note("zones", seen, "set node.zone; never mind if all of them are in one"))
}

fn hosts(peers: &[Peer]) -> Option<Finding> {
    let mut by_host: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for peer in peers.iter().filter(|peer| !peer.host.is_empty()) {
        let names = by_host.entry(&peer.host).or_default();
        // That a name is there twice is said elsewhere.
        if !names.contains(&peer.name.as_str()) {
            names.push(&peer.name);
        }
    }
    let shared: Vec<_> = by_host
        .iter()
        .filter(|(_, names)| names.len() > 1)
        .map(|(host, names)| format!("{} on {host}", listed(names)))
        .collect();
    let advice =
        "they share its memory and are lost together: spread them (the chart's anti-affinity)";
    (!shared.is_empty()).then(|| {
        Finding::note("hosts", format!("members share a machine: {}", shared.join("; ")), advice)
    })
}

fn homes(peers: &[Peer]) -> Option<Finding> {
    let staying: Vec<_> = peers.iter().filter(|peer| !peer.draining).collect();
    let engines: u32 = staying.iter().map(|peer| peer.engines).sum();
    let most = staying.iter().max_by_key(|peer| peer.engines)?;
    let members = u32::try_from(staying.len()).unwrap_or(u32::MAX);
    let is_uneven = engines >= ENGINES_ENOUGH && most.engines.saturating_mul(members) > 2 * engines;
    let seen = format!(
        "{} is the home of {} of {engines} engines, more than twice its share",
        most.name, most.engines
    );
    let advice = "right if they run on its machine or in its zone; else the others are not reached by \
                  their engines: are their endpoints set to the service?";
    is_uneven.then(|| Finding::note("homes", seen, advice))
}

/// A few names, and how many more there are.
fn listed(names: &[&str]) -> String {
    const NAMES_MAX: usize = 5;
    let names: BTreeSet<_> = names.iter().copied().collect();
    let shown: Vec<_> = names.iter().take(NAMES_MAX).copied().collect();
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

#[cfg(test)]
#[path = "problems_tests.rs"]
mod tests;
