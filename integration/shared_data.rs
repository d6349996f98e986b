//! Finds the data that is too large to commit, and says loudly when it is not there.
//!
//! A test that needs such a file asks [`find`] and returns if there is none. Each such skip prints
//! one line straight to the process's stderr and not through the test harness, which would swallow it
//! in a test that passes; a summary counts those lines.

use std::path::{Path, PathBuf};

use crate::skipped;

/// Names the folder that holds `traces/` and `kv/`.
const VARIABLE: &str = "KVSTRATA_SHARED_DATA";

/// The file `name` of the shared data for `test`, or `None` after saying that the test is skipped.
pub(crate) fn find(test: &str, name: &str) -> Option<PathBuf> {
    let path = folder().join(name);
    if path.exists() {
        return Some(path);
    }
    let details = format!("looked for {}; set {VARIABLE}", path.display());
    skipped::say(test, "no shared data", &details);
    None
}

fn folder() -> PathBuf {
    match std::env::var_os(VARIABLE) {
        Some(folder) if !folder.is_empty() => PathBuf::from(folder),
        _ => Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/data"),
    }
}
