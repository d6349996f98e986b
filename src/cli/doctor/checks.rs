//! What can be wrong, and what to do about it, in words. No I/O: what was seen comes in, what to say
//! goes out.

use std::collections::{BTreeMap, BTreeSet};

use bytesize::ByteSize;

use super::{
    cluster,
    observe::{Observed, Shm, Way},
};
use crate::{
    client::{NamespaceStats, Stats},
    console::problems::Finding,
    numbers::count,
};

/// Below this /dev/shm is too small for the memory that an engine shares: container runtimes give
/// 64 MiB, engines take gigabytes.
const SHM_BYTES_MIN: u64 = 1 << 30;
/// Blocks put and asked for from which on a namespace should have had a hit.
const BLOCKS_ENOUGH: u64 = 64;
/// Leases from which on it counts how they end.
const LEASES_ENOUGH: u64 = 16;

/// Everything there is to say, in the order in which one would look.
#[must_use]
pub(super) fn diagnose(seen: &Observed) -> Vec<Finding> {
    let stats = &seen.stats;
    let mut findings = vec![server(seen)];
    findings.extend(versions(stats));
    findings.extend(seen.ways.iter().map(way));
    findings.extend(shm(seen.shm.as_ref()));
    findings.extend(tiers(stats));
    findings.extend(cluster::findings(&seen.members));
    findings.extend(namespaces(stats));
    findings.extend(roots(seen));
    findings.extend(leases(stats));
    findings.extend(bytes(stats));
    findings
}

fn server(seen: &Observed) -> Finding {
    let Stats { node, version, .. } = &seen.stats;
    let up =
        humantime::format_duration(std::time::Duration::from_secs(seen.stats.uptime().as_secs()));
    Finding::fine("server", format!("{node} runs kvstrata {version}, up {up}"))
}

/// Whoever does not run what the server runs.
fn versions(stats: &Stats) -> Option<Finding> {
    let ours = format!("kvstrata {}", env!("CARGO_PKG_VERSION"));
    let server = format!("kvstrata {}", stats.version);
    let openers = stats.namespaces.iter().flat_map(|namespace| &namespace.openers);
    let others: BTreeSet<_> = openers
        .filter(|opener| opener.client_version != server && !opener.client_version.is_empty())
        .map(|opener| format!("{} ({})", opener.instance, opener.client_version))
        .chain((ours != server).then(|| format!("this command ({ours})")))
        .collect();
    if others.is_empty() {
        return None;
    }
    let others: Vec<_> = others.into_iter().collect();
    Some(Finding::note(
        "versions",
        format!("the server runs {server}, others do not: {}", others.join(", ")),
        "formats carry versions and neighbouring ones meet as clean misses; bring them together \
         when you can",
    ))
}

fn way(way: &Way) -> Finding {
    match &way.outcome {
        Ok(took) => Finding::fine(
            way.name,
            format!("64 KiB there and back, verified, in {:.1} ms", took.as_secs_f64() * 1e3),
        ),
        Err(why) if way.optional => Finding::note(
            way.name,
            format!("not used: {why}"),
            "blocks take the next best way; see docs/configuration.md to switch it on",
        ),
        Err(why) => Finding::problem(
            way.name,
            format!("blocks do not come back: {why}"),
            "look at the server's log; without this nothing is cached",
        ),
    }
}

fn shm(shm: Option<&Shm>) -> Option<Finding> {
    let Shm { total, free } = *shm?;
    let seen =
        format!("/dev/shm of this machine has {}, {} of it free", ByteSize(total), ByteSize(free));
    if total >= SHM_BYTES_MIN {
        return Some(Finding::fine("/dev/shm", seen));
    }
    Some(Finding::note(
        "/dev/shm",
        seen,
        "an engine that runs here needs more for its offloading memory: run its container with --shm-size, or \
         mount an emptyDir with medium: Memory at /dev/shm",
    ))
}

fn tiers(stats: &Stats) -> Option<Finding> {
    let names: Vec<_> = stats
        .tiers
        .iter()
        .map(|tier| format!("{} {}", tier.tier, ByteSize(tier.capacity_bytes)))
        .collect();
    match stats.tiers.as_slice() {
        // Whoever is no operator is told of none.
        [] => None,
        [_dram] => Some(Finding::note(
            "tiers",
            format!("{} only", names.join(", ")),
            "a restart loses everything: set nvme.path, or object.url, to keep it",
        )),
        _ => Some(Finding::fine("tiers", names.join(", "))),
    }
}

fn namespaces(stats: &Stats) -> Vec<Finding> {
    if stats.namespaces.is_empty() {
        return vec![Finding::note(
            "namespaces",
            "none is open",
            "no engine has come by since the start: is its endpoint set to this server?",
        )];
    }
    let mut findings = Vec::new();
    for namespace in &stats.namespaces {
        findings.extend(shared_by(namespace));
        findings.extend(hits(namespace));
    }
    findings
}

/// In what namespaces of one model differ, on whatever members they are.
fn roots(seen: &Observed) -> Vec<Finding> {
    let others =
        seen.members.iter().filter_map(|member| Some(&member.outcome.as_ref().ok()?.stats));
    let mut by_model: BTreeMap<&str, Vec<&NamespaceStats>> = BTreeMap::new();
    for namespace in std::iter::once(&seen.stats).chain(others).flat_map(|stats| &stats.namespaces)
    {
        let known = by_model.entry(&namespace.model).or_default();
        if !namespace.declared.is_empty()
            && known.iter().all(|known| known.declared != namespace.declared)
        {
            known.push(namespace);
        }
    }
    by_model.iter().filter_map(|(model, of)| differences(model, of)).collect()
}

/// A namespace as a person may call it.
fn called(namespace: &NamespaceStats) -> String {
    let id = namespace.namespace_id.get(..8).unwrap_or_default();
    format!("{} of {} ({id})", namespace.model, namespace.engine)
}

fn shared_by(namespace: &NamespaceStats) -> Option<Finding> {
    let openers: Vec<_> = namespace
        .openers
        .iter()
        .map(|opener| match opener.instance.as_str() {
            "" => "a client without a name".to_owned(),
            instance => format!("{instance} on {}", opener.node),
        })
        .collect();
    let seen = match openers.as_slice() {
        [] => return None,
        [only] => format!("{}: opened by {only}", called(namespace)),
        several => format!(
            "{}: shared by {}: {}",
            called(namespace),
            count(several.len() as u64),
            several.join(", ")
        ),
    };
    Some(Finding::fine("namespace", seen))
}

fn hits(namespace: &NamespaceStats) -> Option<Finding> {
    let lookups = &namespace.lookups;
    let hits = lookups.dram + lookups.nvme + lookups.object;
    let (put, asked) = (namespace.put_blocks, lookups.asked);
    let numbers = format!(
        "{}: {} blocks put, {} asked for, {} of them hits",
        called(namespace),
        count(put),
        count(asked),
        count(hits)
    );
    if put >= BLOCKS_ENOUGH && asked >= BLOCKS_ENOUGH && hits == 0 {
        return Some(Finding::problem(
            "hits",
            numbers,
            "what is put is not what is asked for: the engine that asks hashes otherwise (seed, \
             hash algorithm), or no prompt ever repeats",
        ));
    }
    if put >= BLOCKS_ENOUGH && asked == 0 {
        return Some(Finding::note(
            "hits",
            numbers,
            "nobody asks for what is stored: an engine that only stores, or one that asks under \
             another namespace",
        ));
    }
    if asked >= BLOCKS_ENOUGH && put == 0 && hits == 0 {
        return Some(Finding::note(
            "hits",
            numbers,
            "nothing is stored: blocks are put when the engine offloads them; has it offloaded \
             anything yet?",
        ));
    }
    None
}

/// In what namespaces of one model differ.
fn differences(model: &str, of: &[&NamespaceStats]) -> Option<Finding> {
    let [first, _, ..] = of else {
        return None;
    };
    let differing: Vec<&str> = first
        .declared
        .keys()
        .copied()
        .filter(|field| {
            of.iter().any(|other| other.declared.get(field) != first.declared.get(field))
        })
        .collect();
    let values = |field: &&str| {
        let values: BTreeSet<_> =
            of.iter().filter_map(|namespace| namespace.declared.get(field)).collect();
        let values: Vec<_> = values
            .iter()
            .map(|value| if value.is_empty() { "none" } else { value.as_str() })
            .collect();
        format!("{field} ({})", values.join("; "))
    };
    let listed: Vec<_> = differing.iter().map(values).collect();
    let seen = format!(
        "{model} has {} namespaces that share nothing; they differ in {}",
        of.len(),
        listed.join(", ")
    );
    if differing == ["hash_root"] {
        return Some(Finding::problem(
            "hash root",
            seen,
            "these engines hash the same tokens to different keys, so none hits what another put: \
             give all of them the same PYTHONHASHSEED, or none where the engine's default root is \
             fixed, and a portable hash algorithm such as sha256_cbor",
        ));
    }
    Some(Finding::note("identity", seen, "right if they are meant to be apart"))
}

fn leases(stats: &Stats) -> Option<Finding> {
    let totals = stats.lease_totals?;
    let seen = format!(
        "{} granted; {} given back, {} expired, {} ended with their session; {} in force over {}",
        count(totals.granted),
        count(totals.released),
        count(totals.expired),
        count(totals.session_ended),
        count(stats.leases.into()),
        ByteSize(stats.leased_bytes)
    );
    let ended = totals.released + totals.expired + totals.session_ended;
    if ended >= LEASES_ENOUGH && totals.expired > ended / 2 {
        return Some(Finding::problem(
            "leases",
            seen,
            "most leases run into their deadline: an engine takes them and does not give them \
             back, and what they cover cannot be evicted meanwhile; update its adapter",
        ));
    }
    (totals.granted > 0).then(|| Finding::fine("leases", seen))
}

fn bytes(stats: &Stats) -> Option<Finding> {
    if stats.corrupt > 0 {
        return Some(Finding::problem(
            "bytes",
            format!("{} parts failed verification; each was a miss", count(stats.corrupt)),
            "check the memory and the disk of this node: kvstrata_corrupt_blocks says by tier",
        ));
    }
    (!stats.tiers.is_empty()).then(|| Finding::fine("bytes", "no part failed verification"))
}
