//! Where the values of foreign keys are: one opaque namespace for all keys that differ in their chunk
//! only, and one for all others.
//!
//! A namespace is opened by the first value that is stored in it; what is only asked for opens none. They
//! are never closed, so they are bounded: keys of further ones share that of keys that say nothing.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    error::Result,
    namespace::{Namespace, NamespaceSpec},
    stack::{Answer, Ask},
};

use super::key::{KEYS, Key, PREFIX};
use crate::{api::convert, limits::RESP_NAMESPACES_MAX, node::Node};

/// The namespaces of the listener.
#[derive(Debug, Default)]
pub(super) struct Spaces {
    /// Opened since the start, of all tenants.
    opened: AtomicUsize,
}

/// Where the value of a key is, or would be.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) namespace: Arc<Namespace>,
    pub(super) hash: BlockHash,
}

impl Spaces {
    /// Where the value of a key would be read; none if nothing like it was ever stored.
    pub(super) fn find(node: &Node, tenant: &str, key: &Key) -> Option<Place> {
        let known = |name| node.namespaces.known(&spec(tenant, name));
        let namespace = known(&key.space).or_else(|| known(KEYS))?;
        Some(Place { namespace, hash: key.hash })
    }

    /// Where the value of a key is to be stored.
    ///
    /// # Errors
    /// `Exhausted` over the number of namespaces of the node.
    pub(super) fn open(&self, node: &Node, tenant: &str, key: &Key) -> Result<Place> {
        let spec_of = |name| spec(tenant, name);
        let namespace = match node.namespaces.known(&spec_of(&key.space)) {
            Some(known) => known,
            // Relaxed: a few more do no harm.
            None if self.opened.load(Ordering::Relaxed) >= RESP_NAMESPACES_MAX => {
                node.namespaces.open(spec_of(KEYS), false)?.namespace
            }
            None => {
                let opened = node.namespaces.open(spec_of(&key.space), false)?;
                self.opened.fetch_add(1, Ordering::Relaxed);
                opened.namespace
            }
        };
        Ok(Place { namespace, hash: key.hash })
    }

    /// How many values of a tenant there are.
    pub(super) fn values(node: &Node, tenant: &str) -> u64 {
        let ours = |spec: &NamespaceSpec| match spec {
            NamespaceSpec::Opaque { tenant: owner, name, .. } => {
                owner == tenant && name.starts_with(PREFIX)
            }
            NamespaceSpec::Engine(_) => false,
        };
        let namespaces = node.namespaces.list();
        let ours = namespaces.iter().filter(|namespace| ours(namespace.spec()));
        // Relaxed: a number for people.
        ours.map(|namespace| namespace.counters().blocks.load(Ordering::Relaxed)).sum()
    }
}

impl Place {
    /// The length of the value, if it can be read now.
    pub(super) fn len(&self, node: &Node) -> Option<u64> {
        length(&self.lookup(node)?)
    }

    /// As [`len`](Self::len), for a client that asks whether it is there: it counts as a lookup.
    pub(super) fn ask(&self, node: &Node) -> Option<u64> {
        let answer = self.lookup(node)?;
        node.metrics.record_lookup(convert::answers(answer.counts));
        length(&answer)
    }

    /// The same place for another block.
    pub(super) fn of(&self, hash: BlockHash) -> Self {
        Self { namespace: Arc::clone(&self.namespace), hash }
    }

    /// Takes the value away, on all tiers; returns whether there was one.
    pub(super) async fn remove(&self, node: &Node) -> Result<bool> {
        let packed = self.hash.as_bytes();
        let hashes = Hashes::new(packed, packed.len())?;
        Ok(node.stack.remove(&self.namespace, hashes).await? > 0)
    }

    fn lookup(&self, node: &Node) -> Option<Answer> {
        let packed = self.hash.as_bytes();
        let hashes = Hashes::new(packed, packed.len()).ok()?;
        Some(node.stack.lookup(&self.namespace, hashes, Ask::default()))
    }
}

/// The bytes of the one block that was asked for, if it can be read.
fn length(answer: &Answer) -> Option<u64> {
    let bytes = || answer.runs.iter().map(|run| run.bytes).sum();
    (answer.prefix_blocks > 0).then(bytes)
}

fn spec(tenant: &str, name: &str) -> NamespaceSpec {
    NamespaceSpec::Opaque { tenant: tenant.to_owned(), name: name.to_owned(), bytes_max: 0 }
}
