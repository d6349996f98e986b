//! Each thing that can be wrong is said, and said of nothing else.

use super::*;

/// A node with which all is well.
fn healthy() -> Facts {
    Facts {
        uptime: Duration::from_secs(3600),
        leased: (89, 100),
        window: Duration::from_secs(600),
        refused: BLOCKS_ENOUGH - 1,
        late: BLOCKS_ENOUGH - 1,
        unproven: UNPROVEN_ENOUGH - 1,
        ..Facts::default()
    }
}

/// That one thing is said, at this level, with these words.
fn only(findings: &[Finding], level: Level, what: &str, words: &[&str]) {
    let [finding] = findings else { panic!("{findings:?}") };
    assert_eq!((finding.level, finding.what.as_str()), (level, what));
    for word in words {
        assert!(
            finding.seen.contains(word) || finding.advice.contains(word),
            "{word}: {finding:?}"
        );
    }
    assert!(!finding.seen.is_empty() && !finding.advice.is_empty(), "{finding:?}");
}

fn of(change: impl FnOnce(&mut Facts)) -> Vec<Finding> {
    let mut facts = healthy();
    change(&mut facts);
    of_node(&facts)
}

#[test]
fn of_a_healthy_node_nothing_is_said() {
    assert!(of_node(&healthy()).is_empty());
    assert!(of_node(&Facts::default()).is_empty());
}

#[test]
fn a_mismatch_of_roots_is_said_as_the_table_says_it() {
    let text = "clients of model \"m\" use 2 different hash roots: give all of them one hash seed";
    let said = of(|facts| facts.mismatches.push(text.to_owned()));
    only(&said, Level::Problem, "hash root", &["2 different hash roots", "one hash seed"]);
}

#[test]
fn each_ailment_of_each_tier_has_its_words() {
    for (tier, is, words) in [
        (Tier::Nvme, Ailment::Full, "nothing could be reclaimed"),
        (Tier::Nvme, Ailment::Failing, "failed a moment ago"),
        (Tier::Nvme, Ailment::ReadOnly, "until the restart"),
        (Tier::Object, Ailment::Away, "none are sent"),
        (Tier::Object, Ailment::ReadOnly, "ordinal"),
    ] {
        let said = of(|facts| facts.ailments.push((tier, is)));
        only(&said, Level::Problem, tier.name(), &[words]);
    }
    let starting = of(|facts| {
        facts.uptime = Duration::from_secs(1);
        facts.ailments.push((Tier::Object, Ailment::ReadOnly));
    });
    assert!(starting.is_empty());
}

#[test]
fn devices_that_are_slow_are_a_note_and_those_that_are_down_a_problem() {
    let said = |is| of(|facts| facts.devices.push((Tier::Nvme, is)));
    only(&said(TierState::Degraded), Level::Note, "nvme", &["slower"]);
    only(&said(TierState::Down), Level::Problem, "nvme", &["nothing can be read"]);
    assert!(said(TierState::Ok).is_empty());
}

#[test]
fn counts_are_said_from_where_on_they_count() {
    only(&of(|facts| facts.corrupt = 1), Level::Problem, "bytes", &["1 parts"]);
    only(&of(|facts| facts.panics = 2), Level::Problem, "requests", &["2 requests panicked"]);
    only(&of(|facts| facts.failed_reloads = 1), Level::Note, "reload", &["the log says"]);
    only(&of(|facts| facts.leased = (90, 100)), Level::Problem, "leases", &["90 B of the 100 B"]);
    only(&of(|facts| facts.refused += 1), Level::Note, "puts", &["64 blocks", "10 min"]);
    only(&of(|facts| facts.late += 1), Level::Note, "gets", &["64 blocks"]);
    only(&of(|facts| facts.unproven += 1), Level::Note, "tokens", &["10 requests"]);
    let left = |facts: &mut Facts| facts.left.push(("b".to_owned(), Duration::from_secs(59)));
    only(&of(left), Level::Note, "members", &["b left the cluster 59 s ago"]);
}

#[test]
fn the_worst_comes_first() {
    let said = of(|facts| {
        facts.left.push(("b".to_owned(), Duration::from_secs(1)));
        facts.corrupt = 1;
    });
    assert_eq!(
        said.iter().map(|said| said.what.as_str()).collect::<Vec<_>>(),
        ["bytes", "members"]
    );
}

fn peer(name: &str, change: impl FnOnce(&mut Peer)) -> Peer {
    let mut peer = Peer {
        name: name.to_owned(),
        endpoint: format!("{name}:9400"),
        zone: "z".to_owned(),
        host: format!("host-of-{name}"),
        version: "1.0.0".to_owned(),
        draining: false,
        engines: 4,
    };
    change(&mut peer);
    peer
}

fn with(change: impl FnOnce(&mut Peer)) -> Vec<Finding> {
    of_cluster(&[peer("a", |_same| {}), peer("b", |_same| {}), peer("c", change)])
}

#[test]
fn of_members_that_are_alike_nothing_is_said_and_of_one_alone_nothing_of_others() {
    assert!(with(|_same| {}).is_empty());
    assert!(of_cluster(&[peer("a", |peer| peer.zone.clear())]).is_empty());
    assert!(of_cluster(&[]).is_empty());
}

#[test]
fn members_that_differ_are_named() {
    let said = with(|peer| peer.version = "1.1.0".to_owned());
    only(&said, Level::Note, "versions", &["a, b 1.0.0; c 1.1.0"]);
    only(&with(|peer| peer.draining = true), Level::Note, "draining", &["c is about to leave"]);
    only(&with(|peer| peer.zone.clear()), Level::Note, "zones", &["c does not know its zone"]);
    let said = with(|peer| peer.host = "host-of-a".to_owned());
    only(&said, Level::Note, "hosts", &["a, c on host-of-a"]);
    only(&with(|peer| peer.engines = 17), Level::Note, "homes", &["17 of 25"]);
    assert!(with(|peer| peer.engines = 16).is_empty(), "twice the share");
    // A version that is not known is no other one.
    assert!(with(|peer| peer.version.clear()).is_empty());
}

#[test]
fn many_names_are_cut() {
    let peers: Vec<_> =
        (0..9).map(|at| peer(&format!("n{at}"), |peer| peer.draining = true)).collect();
    let said = of_cluster(&peers);
    only(&said, Level::Note, "draining", &["n0, n1, n2, n3, n4 and 4 more"]);
}
