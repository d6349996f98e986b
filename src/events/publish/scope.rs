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

#[cfg(test)]
mod tests {
    use kvstrata_tiers::namespace::PartSpec;

    use super::*;
    use crate::{api::tests::node, auth::ONLY_TENANT, openers::Opener};

    /// Opens a namespace in the name of an instance; returns its index.
    fn open(node: &Node, instance: &str, keep_tokens: bool, change: fn(&mut Identity)) -> u32 {
        let mut identity = Identity {
            tenant: ONLY_TENANT.to_owned(),
            model: "m".into(),
            engine: "vllm".into(),
            dtype: "bf16".into(),
            block_tokens: 16,
            parts: vec![PartSpec { group: 0, rank: 0, bytes: 4096 }],
            hash_algorithm: "sha256".into(),
            hash_bytes: 32,
            ..Identity::default()
        };
        change(&mut identity);
        let spec = NamespaceSpec::Engine(Box::new(identity));
        let index = node.namespaces.open(spec, keep_tokens).unwrap().namespace.index();
        let opener = Opener {
            instance: instance.to_owned(),
            host: String::new(),
            zone: String::new(),
            client_version: String::new(),
            at: Instant::now(),
        };
        node.openers.note(index, opener);
        index
    }

    fn told(node: &Node, target: &str) -> Vec<u32> {
        let target: EventTarget = target.parse().unwrap();
        let scope = of(node, &target, target.worker.as_deref());
        scope.into_iter().filter(|(_, terms)| terms.open).map(|(index, _)| index).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_is_told_of_what_it_can_load_now() {
        let node = node(Vec::new());
        let plain = open(&node, "a", true, |_| {});
        let lora = open(&node, "a", true, |identity| identity.lora = vec![1]);
        open(&node, "a", false, |identity| identity.lora = vec![2]);
        open(&node, "a", true, |identity| identity.model = "other".into());
        open(&node, "a", true, |identity| identity.tenant = "other".into());
        open(&node, "a", true, |identity| identity.cache_salt = vec![0xff]);
        open(&node, "b@c", true, |_| {});
        assert_eq!(told(&node, "llm-d=tcp://h:1,model=m,worker=a"), [plain, lora]);
        assert_eq!(told(&node, "llm-d=tcp://h:1,model=m,worker=b"), Vec::<u32>::new());
        assert_eq!(told(&node, "dynamo=tcp://*:1,model=m"), [plain, lora]);
        // It was started anew with other weights.
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        let new = open(&node, "a", true, |identity| identity.weights = "2".into());
        assert_eq!(told(&node, "llm-d=tcp://h:1,model=m,worker=a"), [new]);
        let open_to_all: EventTarget = "llm-d=tcp://h:1,model=m".parse().unwrap();
        assert_eq!(workers(&node, &open_to_all), ["a"]);
    }
}
