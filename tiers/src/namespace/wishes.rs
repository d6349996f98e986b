//! What clients want done with the blocks of a namespace: no part of its identity, kept with it on disk.

use std::collections::BTreeSet;

/// The wishes of a client that opens a namespace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Wishes {
    /// Token ids given to `describe` are kept.
    pub keep_tokens: bool,
    /// Names of the hash schemes by which its blocks are to be found, too. They mean nothing here.
    pub hash_schemes: BTreeSet<String>,
}

impl From<bool> for Wishes {
    fn from(keep_tokens: bool) -> Self {
        Self { keep_tokens, hash_schemes: BTreeSet::new() }
    }
}

/// The names as one text.
pub(super) fn join(hash_schemes: &BTreeSet<String>) -> String {
    hash_schemes.iter().map(String::as_str).collect::<Vec<_>>().join(",")
}

/// The names of a text that [`join`] made; none if it did not.
pub(super) fn split(text: &str) -> Option<BTreeSet<String>> {
    let names: BTreeSet<String> = text.split(',').map(str::to_owned).collect();
    (join(&names) == text && !names.contains("")).then_some(names)
}
