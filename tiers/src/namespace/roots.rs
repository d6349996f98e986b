//! Hash roots: clients that should share blocks and never will, because their hashes begin differently.

use std::{collections::BTreeSet, fmt};

use super::Identity;

/// How many differing roots of one model are listed: each restart of an engine without a fixed seed
/// brings another one, and each open says what it found.
const ROOTS_LISTED_MAX: usize = 8;

/// Clients of one model whose hash chains start differently: they can never hit each other's blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootMismatch {
    /// Whose clients they are.
    pub tenant: String,
    /// The model they share.
    pub model: String,
    /// The engine they share.
    pub engine: String,
    /// How many different roots were seen.
    pub roots_seen: usize,
    /// Some of them (at most eight), hex, shortened.
    pub roots: Vec<String>,
}

impl fmt::Display for RootMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "clients of model {:?} on {} use {} different hash roots ({}{}) and can never share a \
             block: give all of them one hash seed (vLLM: PYTHONHASHSEED) and hash algorithm",
            self.model,
            self.engine,
            self.roots_seen,
            self.roots.join(", "),
            if self.roots_seen > self.roots.len() { ", .." } else { "" }
        )
    }
}

/// The roots of clients that differ in nothing else.
#[derive(Debug)]
pub(super) struct Roots {
    tenant: String,
    model: String,
    engine: String,
    seen: BTreeSet<Vec<u8>>,
}

impl Roots {
    /// None yet, of clients like this one.
    pub(super) fn of(identity: &Identity) -> Self {
        Self {
            tenant: identity.tenant.clone(),
            model: identity.model.clone(),
            engine: identity.engine.clone(),
            seen: BTreeSet::new(),
        }
    }

    /// A client's root was seen.
    pub(super) fn see(&mut self, identity: &Identity) {
        self.seen.insert(identity.hash_root.clone());
    }

    /// What there is to tell if there are several.
    pub(super) fn mismatch(&self) -> Option<RootMismatch> {
        (self.seen.len() > 1).then(|| RootMismatch {
            tenant: self.tenant.clone(),
            model: self.model.clone(),
            engine: self.engine.clone(),
            roots_seen: self.seen.len(),
            roots: self.seen.iter().take(ROOTS_LISTED_MAX).map(|root| short_hex(root)).collect(),
        })
    }
}

fn short_hex(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "none".to_owned();
    }
    bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}
