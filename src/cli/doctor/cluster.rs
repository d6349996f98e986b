//! What the members of a cluster say when each is asked: whether they answer, know one another, hold the
//! same secret and run what the others run. What was seen comes in, what to say goes out.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use crate::{
    client::Stats,
    console::problems::{self, Finding, Peer},
};

/// What findings of a node are about that are said of the cluster as a whole, from what all nodes have.
const SAID_TOGETHER: [&str; 6] = ["hash root", "versions", "draining", "zones", "hosts", "homes"];

/// A member that was asked.
#[derive(Debug, Clone)]
pub(super) struct Visited {
    /// Its name; the endpoint for one that nobody has named.
    pub name: String,
    /// Where it was asked.
    pub endpoint: String,
    /// What it said, or why it did not answer.
    pub outcome: Result<Said, String>,
}

/// What a member says.
#[derive(Debug, Clone, Default)]
pub(super) struct Said {
    /// How long it took to ask for it, connection and all.
    pub took: Duration,
    /// Where it says that it is.
    pub advertised: String,
    /// Of itself.
    pub stats: Stats,
    /// Of the members that it knows.
    pub members: Vec<Peer>,
    /// The id that it has for a namespace that is the same everywhere, in hex.
    pub probe: String,
}

/// What there is to say of members together; nothing of one that is alone.
pub(super) fn findings(visited: &[Visited]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if visited.len() > 1 {
        findings.extend(visited.iter().map(answer));
        findings.extend(names(visited));
        findings.extend(lists(visited));
        findings.extend(secrets(visited));
    }
    findings.extend(problems::of_cluster(&peers(visited)));
    findings.extend(visited.iter().enumerate().flat_map(|(at, member)| own(member, at == 0)));
    findings
}

fn answer(member: &Visited) -> Finding {
    let Visited { name, endpoint, outcome } = member;
    match outcome {
        Ok(said) => Finding::fine(
            "member",
            format!("{name} at {endpoint} answers in {:.1} ms", said.took.as_secs_f64() * 1e3),
        ),
        Err(why) => Finding::problem(
            "member",
            format!("{name} at {endpoint} does not answer: {why}"),
            "look at its pod and its log, and whether this machine can reach that address; with TLS its \
             certificate must be for the name that it advertises",
        ),
    }
}

/// Whether several go by one name.
fn names(visited: &[Visited]) -> Vec<Finding> {
    let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for member in visited.iter().filter(|member| member.outcome.is_ok()) {
        by_name.entry(&member.name).or_default().push(&member.endpoint);
    }
    let shared = by_name.into_iter().filter(|(_, endpoints)| endpoints.len() > 1);
    let problem = |(name, endpoints): (&str, Vec<&str>)| {
        let seen = format!("several nodes are called {name}: at {}", endpoints.join(", "));
        let advice =
            "members are told apart by their names: set node.name (the chart takes the pod's)";
        Finding::problem("names", seen, advice)
    };
    shared.map(problem).collect()
}

/// Whether those that answer list one another.
fn lists(visited: &[Visited]) -> Option<Finding> {
    let said: Vec<_> = answers(visited)
        .map(|(name, said)| {
            let names: BTreeSet<_> = said.members.iter().map(|peer| peer.name.as_str()).collect();
            (name, names)
        })
        .collect();
    let (_, first) = said.first()?;
    if said.iter().all(|(_, names)| names == first) {
        return (said.len() > 1)
            .then(|| Finding::fine("lists", format!("all list the same {} members", first.len())));
    }
    let listed: Vec<_> = said
        .iter()
        .map(|(name, names)| {
            format!("{name} lists {}", names.iter().copied().collect::<Vec<_>>().join(", "))
        })
        .collect();
    Some(Finding::problem(
        "lists",
        format!("the members do not know one another: {}", listed.join("; ")),
        "a change takes seconds to be known everywhere: ask again. If it stays so they do not hear each \
         other: see that cluster.listen can be reached over UDP, that cluster.name and the secret are the \
         same everywhere, and that cluster.seeds names the others",
    ))
}

/// Whether equal things have equal names everywhere.
fn secrets(visited: &[Visited]) -> Option<Finding> {
    let said: Vec<_> = answers(visited).collect();
    let (_, first) = said.first()?;
    let others: Vec<_> = said
        .iter()
        .filter(|(_, other)| other.probe != first.probe)
        .map(|(name, _)| *name)
        .collect();
    if others.is_empty() {
        let seen = "all compute the same ids: they have the same secret";
        return (said.len() > 1).then(|| Finding::fine("secret", seen));
    }
    Some(Finding::problem(
        "secret",
        format!(
            "{} has another secret than the first: equal blocks have other ids there",
            others.join(", ")
        ),
        "give every node the same identity.secret_file (the chart: one Secret); its blocks are those of \
         nobody else until then",
    ))
}

fn answers(visited: &[Visited]) -> impl Iterator<Item = (&str, &Said)> {
    visited.iter().filter_map(|member| Some((member.name.as_str(), member.outcome.as_ref().ok()?)))
}

/// Every member that is known to anybody, each as it says itself where it answers.
fn peers(visited: &[Visited]) -> Vec<Peer> {
    let mut peers: Vec<Peer> = Vec::new();
    for (name, said) in answers(visited) {
        let itself = said.members.iter().filter(|peer| peer.name == name);
        peers.extend(
            itself.map(|peer| Peer { version: said.stats.version.clone(), ..peer.clone() }),
        );
    }
    for peer in answers(visited).flat_map(|(_, said)| &said.members) {
        if !peers.iter().any(|known| known.name == peer.name) {
            peers.push(peer.clone());
        }
    }
    peers
}

/// What a member says is wrong with itself. What is looked at of the first in more detail is not said twice.
fn own(member: &Visited, is_first: bool) -> Vec<Finding> {
    let Ok(said) = &member.outcome else { return Vec::new() };
    let is_said = |what: &str| SAID_TOGETHER.contains(&what) || is_first && what == "bytes";
    let findings = said.stats.findings.iter().filter(|finding| !is_said(&finding.what));
    findings
        .map(|finding| {
            let seen = format!("{}: {}", member.name, finding.seen);
            match finding.problem {
                true => Finding::problem(&finding.what, seen, &finding.advice),
                false => Finding::note(&finding.what, seen, &finding.advice),
            }
        })
        .collect()
}
