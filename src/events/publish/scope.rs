//! Which namespaces a worker can load from, and what is said of them.
//!
//! Whoever opened a namespace can load from it. Of those that one worker opened, only the ones that differ from
//! its latest in nothing but LoRA adapter and salt count: an instance that was started anew with other weights
//! has left the others behind, and the tokens of their blocks would be taken for hits.

use kvstrata_tiers::namespace::{Identity, Namespace, NamespaceSpec};
use tokio::time::Instant;

use super::announce::Terms;
use crate::{config::EventTarget, events::FIRST_BITS, node::Node};

/// A namespace with what is announced of it.
pub(super) type Scoped = (u32, Terms);

/// What is announced to a target: every namespace that might be, those that are not any more too.
pub(super) fn of(node: &Node, target: &EventTarget, worker: Option<&str>) -> Vec<Scoped> {
    let mut scoped = Vec::new();
    let mut latest: Option<(Instant, Identity)> = None;
    for namespace in node.namespaces.list() {
        let NamespaceSpec::Engine(identity) = namespace.spec() else { continue };
        let Some(terms) = terms(target, &namespace, identity) else { continue };
        let opened = opened_at(node, &namespace, worker);
        let shape = shape(identity);
        if let Some(at) = opened
            && latest.as_ref().is_none_or(|(before, _)| *before < at)
        {
            latest = Some((at, shape.clone()));
        }
        scoped.push((namespace.index(), terms, opened.is_some(), shape));
    }
    let of_latest = |shape: &Identity| latest.as_ref().is_some_and(|(_, latest)| latest == shape);
    let settle = |(index, terms, opened, shape): (u32, Terms, bool, Identity)| {
        (index, Terms { open: terms.open && opened && of_latest(&shape), ..terms })
    };
    scoped.into_iter().map(settle).collect()
}

/// The instances that have opened namespaces of the model, which are workers where none is named.
pub(super) fn workers(node: &Node, target: &EventTarget) -> Vec<String> {
    let mut workers = Vec::new();
    for namespace in node.namespaces.list() {
        let NamespaceSpec::Engine(identity) = namespace.spec() else { continue };
        if is_of(target, identity) {
            let openers = node.openers.of(namespace.index());
            workers.extend(openers.into_iter().map(|opener| opener.instance));
        }
    }
    workers.sort();
    workers.dedup();
    workers.retain(|worker| !worker.is_empty() && !worker.contains('@'));
    workers
}

fn is_of(target: &EventTarget, identity: &Identity) -> bool {
    (&target.tenant, &target.model, &target.engine)
        == (&identity.tenant, &identity.model, &identity.engine)
}

fn terms(target: &EventTarget, namespace: &Namespace, identity: &Identity) -> Option<Terms> {
    // A salt that is no text cannot be told, and without it the blocks would be taken for others.
    let salt = String::from_utf8(identity.cache_salt.clone()).ok()?;
    is_of(target, identity).then(|| Terms {
        block_tokens: identity.block_tokens,
        hash_bytes: namespace.hash_bytes(),
        first_bits: identity.engine == FIRST_BITS,
        salt,
        open: namespace.keeps_tokens(),
    })
}

/// When the worker opened it, the last time.
fn opened_at(node: &Node, namespace: &Namespace, worker: Option<&str>) -> Option<Instant> {
    let openers = node.openers.of(namespace.index()).into_iter();
    let ours = openers.filter(|opener| worker.is_none_or(|worker| opener.instance == worker));
    ours.map(|opener| opener.at).max()
}

/// What all namespaces of one worker have in common.
fn shape(identity: &Identity) -> Identity {
    Identity { lora: Vec::new(), cache_salt: Vec::new(), ..identity.clone() }
}
