//! Each thing that can be wrong is said, and said of nothing else.

use std::{collections::BTreeMap, time::Duration};

use super::{
    checks::diagnose,
    cluster::{Said, Visited},
    observe::{Observed, Shm, Way},
};
use crate::{
    client::{self, LeaseTotals, NamespaceStats, Opener, Stats, TierStats, TierTotals},
    console::problems::{Finding, Level, Peer},
};

fn tier(name: &str) -> TierStats {
    TierStats { tier: name.to_owned(), capacity_bytes: 1 << 30, ..TierStats::default() }
}

fn opener(instance: &str) -> Opener {
    Opener {
        instance: instance.to_owned(),
        node: "host".to_owned(),
        client_version: concat!("kvstrata ", env!("CARGO_PKG_VERSION")).to_owned(),
        opened_ms_ago: 1000,
    }
}

fn namespace(id: &str, fields: &[(&'static str, &str)]) -> NamespaceStats {
    let mut declared =
        BTreeMap::from([("dtype", "bf16".to_owned()), ("hash_root", "01".to_owned())]);
    declared.extend(fields.iter().map(|(field, value)| (*field, (*value).to_owned())));
    NamespaceStats {
        namespace_id: id.repeat(8),
        model: "m".to_owned(),
        engine: "vllm".to_owned(),
        lookups: TierTotals { asked: 100, dram: 90, miss: 10, ..TierTotals::default() },
        put_blocks: 100,
        declared,
        openers: vec![opener("a:1"), opener("b:1")],
        ..NamespaceStats::default()
    }
}

/// A setup with which all is well.
fn healthy() -> Observed {
    Observed {
        stats: Stats {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tiers: vec![tier("dram"), tier("nvme")],
            namespaces: vec![namespace("aa", &[])],
            lease_totals: Some(LeaseTotals {
                granted: 40,
                released: 39,
                expired: 1,
                session_ended: 0,
            }),
            ..Stats::default()
        },
        ways: vec![Way { name: "gRPC", optional: false, outcome: Ok(Duration::from_millis(1)) }],
        members: Vec::new(),
        shm: Some(Shm { total: 8 << 30, free: 8 << 30 }),
    }
}

/// What is said that is not fine, of a setup that `change` has made worse.
fn said(change: impl FnOnce(&mut Observed)) -> Vec<Finding> {
    let mut observed = healthy();
    change(&mut observed);
    diagnose(&observed).into_iter().filter(|finding| finding.level != Level::Fine).collect()
}

/// That one thing is said, at this level, with these words.
fn only(change: impl FnOnce(&mut Observed), level: Level, what: &str, words: &[&str]) {
    let said = said(change);
    let [Finding { level: found, what: named, seen, advice }] = said.as_slice() else {
        panic!("{said:?}");
    };
    assert_eq!((*found, named.as_str()), (level, what));
    for word in words {
        assert!(seen.contains(word) || advice.contains(word), "{word}: {seen}; {advice}");
    }
    assert!(!advice.is_empty());
}

#[test]
fn of_a_healthy_setup_nothing_is_said_but_what_is_fine() {
    assert!(said(|_same| {}).is_empty());
    let findings = diagnose(&healthy());
    let shared = findings.iter().find(|finding| finding.what == "namespace").unwrap();
    assert!(shared.seen.contains("shared by 2: a:1 on host, b:1 on host"), "{}", shared.seen);
}

#[test]
fn engines_that_differ_only_in_the_hash_root_are_a_problem_and_others_a_note() {
    let second = |fields: &[(&'static str, &str)]| namespace("bb", fields);
    only(
        |seen| seen.stats.namespaces.push(second(&[("hash_root", "02")])),
        Level::Problem,
        "hash root",
        &["m has 2 namespaces", "hash_root (01; 02)", "PYTHONHASHSEED"],
    );
    only(
        |seen| seen.stats.namespaces.push(second(&[("dtype", "fp8")])),
        Level::Note,
        "identity",
        &["dtype (bf16; fp8)"],
    );
    only(
        |seen| seen.stats.namespaces.push(second(&[("dtype", "fp8"), ("hash_root", "")])),
        Level::Note,
        "identity",
        &["dtype (bf16; fp8), hash_root (none; 01)"],
    );
}

#[test]
fn puts_without_hits_are_a_problem() {
    let lookups = |asked| TierTotals { asked, miss: asked, ..TierTotals::default() };
    let change = |put, asked| {
        move |seen: &mut Observed| {
            seen.stats.namespaces[0].put_blocks = put;
            seen.stats.namespaces[0].lookups = lookups(asked);
        }
    };
    only(change(64, 64), Level::Problem, "hits", &["64 blocks put, 64 asked for, 0 of them hits"]);
    only(change(64, 0), Level::Note, "hits", &["nobody asks"]);
    only(change(0, 64), Level::Note, "hits", &["nothing is stored"]);
    assert!(said(change(63, 63)).is_empty(), "too few to tell");
}

#[test]
fn leases_that_run_into_their_deadlines_are_a_problem() {
    let totals = |released, expired| LeaseTotals {
        granted: released + expired,
        released,
        expired,
        session_ended: 0,
    };
    let change = |totals| move |seen: &mut Observed| seen.stats.lease_totals = Some(totals);
    only(change(totals(7, 9)), Level::Problem, "leases", &["9 expired", "give them back"]);
    assert!(said(change(totals(8, 8))).is_empty());
    assert!(said(change(totals(0, 15))).is_empty(), "too few to tell");
}

#[test]
fn another_version_is_a_note() {
    only(
        |seen| seen.stats.namespaces[0].openers[1].client_version = "kvstrata 0.0.9".to_owned(),
        Level::Note,
        "versions",
        &["b:1 (kvstrata 0.0.9)"],
    );
    let others = said(|seen| seen.stats.version = "9.9.9".to_owned());
    assert_eq!(others.len(), 1);
    assert!(others[0].seen.contains("the server runs kvstrata 9.9.9"), "{}", others[0].seen);
    assert!(others[0].seen.contains("this command"), "{}", others[0].seen);
}

#[test]
fn the_machine_and_the_ways_are_looked_at() {
    only(
        |seen| seen.shm = Some(Shm { total: 64 << 20, free: 64 << 20 }),
        Level::Note,
        "/dev/shm",
        &["64.0 MiB", "--shm-size"],
    );
    let failed = |optional| {
        move |seen: &mut Observed| {
            let outcome = Err("no answer".to_owned());
            seen.ways.push(Way { name: "bulk port", optional, outcome });
        }
    };
    only(failed(true), Level::Note, "bulk port", &["no answer"]);
    only(failed(false), Level::Problem, "bulk port", &["no answer"]);
}

#[test]
fn a_server_that_loses_or_damages_is_told_of() {
    only(|seen| seen.stats.tiers.truncate(1), Level::Note, "tiers", &["dram", "nvme.path"]);
    only(|seen| seen.stats.corrupt = 3, Level::Problem, "bytes", &["3 parts"]);
    only(|seen| seen.stats.namespaces.clear(), Level::Note, "namespaces", &["none is open"]);
}

/// A member that answers, as `change` has it, of a cluster of `a`, `b` and `c`.
fn visited(name: &str, change: impl FnOnce(&mut Said)) -> Visited {
    let peer = |name: &&str| Peer {
        name: (*name).to_owned(),
        zone: "z".to_owned(),
        host: format!("host-of-{name}"),
        version: "1.0.0".to_owned(),
        ..Peer::default()
    };
    let mut said = Said {
        took: Duration::from_millis(2),
        advertised: format!("{name}:9400"),
        stats: Stats { node: name.to_owned(), version: "1.0.0".to_owned(), ..Stats::default() },
        members: ["a", "b", "c"].iter().map(peer).collect(),
        probe: "ab".to_owned(),
    };
    change(&mut said);
    Visited { name: name.to_owned(), endpoint: format!("{name}:9400"), outcome: Ok(said) }
}

/// `a`, `b` and `c`, of which the last one is as `change` has it.
fn cluster(change: impl FnOnce(&mut Said)) -> Vec<Visited> {
    vec![visited("a", |_same| {}), visited("b", |_same| {}), visited("c", change)]
}

#[test]
fn members_that_are_alike_are_fine_and_each_is_named() {
    assert!(said(|seen| seen.members = cluster(|_same| {})).is_empty());
    let mut observed = healthy();
    observed.members = cluster(|_same| {});
    let fine = diagnose(&observed);
    let about = |what: &str| fine.iter().filter(|finding| finding.what == what).count();
    assert_eq!([about("member"), about("lists"), about("secret")], [3, 1, 1]);
    observed.members.truncate(1);
    assert!(diagnose(&observed).iter().all(|finding| finding.what != "member"), "one is alone");
}

#[test]
fn members_that_are_not_as_the_others_are_named() {
    let of = |change: fn(&mut Said)| move |seen: &mut Observed| seen.members = cluster(change);
    let unheard = of(|said| said.members.truncate(1));
    only(unheard, Level::Problem, "lists", &["a lists a, b, c", "c lists a", "cluster.seeds"]);
    let other = of(|said| said.probe.clear());
    only(other, Level::Problem, "secret", &["c has another secret", "identity.secret_file"]);
    let newer = of(|said| said.stats.version = "1.1.0".to_owned());
    only(newer, Level::Note, "versions", &["a, b 1.0.0; c 1.1.0"]);
    let draining = of(|said| said.members.iter_mut().for_each(|it| it.draining = it.name == "c"));
    only(draining, Level::Note, "draining", &["c is about to leave"]);
}

#[test]
fn members_of_one_name_are_a_problem() {
    let same = |seen: &mut Observed| {
        seen.members = cluster(|_same| {});
        seen.members.push(visited("c", |said| said.advertised = "d:9400".to_owned()));
    };
    only(same, Level::Problem, "names", &["several nodes are called c", "node.name"]);
}

#[test]
fn a_member_that_does_not_answer_is_a_problem_and_the_others_are_looked_at_all_the_same() {
    let silent = |seen: &mut Observed| {
        seen.members = cluster(|_same| {});
        seen.members[1].outcome = Err("refused".to_owned());
    };
    only(silent, Level::Problem, "member", &["b at b:9400", "refused"]);
}

#[test]
fn what_members_know_of_themselves_is_said_once_and_with_their_name() {
    let finding = |what: &str, problem| client::Finding {
        what: what.to_owned(),
        seen: "so it is".to_owned(),
        advice: "do that".to_owned(),
        problem,
    };
    let wrong = |seen: &mut Observed| {
        seen.members = cluster(|said| {
            said.stats.findings = vec![finding("nvme", true), finding("hash root", true)];
        });
    };
    only(wrong, Level::Problem, "nvme", &["c: so it is", "do that"]);
    let noted = |seen: &mut Observed| {
        seen.members = cluster(|said| said.stats.findings = vec![finding("puts", false)]);
    };
    only(noted, Level::Note, "puts", &["c: so it is"]);
}

#[test]
fn engines_with_other_hash_roots_are_found_on_whatever_nodes_they_are() {
    let elsewhere = |seen: &mut Observed| {
        seen.members = cluster(|said| {
            said.stats.namespaces =
                vec![namespace("aa", &[]), namespace("bb", &[("hash_root", "02")])];
        });
    };
    only(elsewhere, Level::Problem, "hash root", &["m has 2 namespaces", "hash_root (01; 02)"]);
}
