//! What a node knows of itself, gathered for [`problems`](super::problems).

use std::time::Duration;

use kvstrata_tiers::namespace::RootMismatch;
use tokio::time::Instant;

use super::{
    history::Totals,
    problems::{self, Facts, Finding, Peer},
};
use crate::{
    auth::Bearer,
    costs::TierState,
    members::{Member, Members},
    metrics::{ReloadOutcome, Reloaded},
    node::Node,
};

/// How long "of late" is.
const WINDOW: Duration = Duration::from_secs(600);

/// What is wrong, as far as `bearer` may know: of the node and its members for an operator, of its own
/// clients for a tenant.
pub(crate) fn problems_of(node: &Node, bearer: &Bearer) -> Vec<Finding> {
    let mut mismatches = node.namespaces.root_mismatches();
    if !bearer.is_operator() {
        mismatches.retain(|mismatch| mismatch.tenant == bearer.tenant());
        let facts = Facts { mismatches: in_words(&mismatches), ..Facts::default() };
        return problems::of_node(&facts);
    }
    let mut findings = problems::of_node(&facts(node, in_words(&mismatches)));
    findings.extend(problems::of_cluster(&known(&node.roster.now())));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.level));
    findings
}

fn in_words(mismatches: &[RootMismatch]) -> Vec<String> {
    mismatches.iter().map(ToString::to_string).collect()
}

/// What a member list says of each.
pub(crate) fn known(members: &Members) -> Vec<Peer> {
    let peer = |member: &Member| Peer {
        name: member.name.clone(),
        endpoint: member.endpoint.clone(),
        zone: member.zone.clone(),
        host: member.host.clone(),
        version: member.version.clone(),
        draining: member.draining,
        engines: member.engines,
    };
    members.list.iter().map(peer).collect()
}

fn facts(node: &Node, mismatches: Vec<String>) -> Facts {
    let now = Instant::now();
    let recent = node.console.history.lock().recent(Totals::of(&node.metrics), now, WINDOW);
    let devices = node.stack.colder_usage().into_iter().map(|(tier, _)| tier);
    let (_, leased) = node.leases.usage();
    let uptime = node.started.elapsed();
    Facts {
        uptime,
        mismatches,
        ailments: node.stack.ailments(),
        devices: devices
            .map(|tier| (tier, node.costs.state(tier)))
            .filter(|(_, is)| *is != TierState::Ok)
            .collect(),
        corrupt: node.stack.usage().corrupt,
        panics: node.metrics.request_panics.get(),
        failed_reloads: Reloaded::ALL
            .iter()
            .map(|what| node.metrics.trust.reloads(*what, ReloadOutcome::Failed))
            .sum(),
        leased: (leased, node.leases.limits().total_bytes_max),
        window: WINDOW.min(uptime),
        refused: recent.refused,
        late: recent.late,
        unproven: recent.unproven,
        left: node.console.left(),
    }
}
