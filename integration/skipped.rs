//! Says loudly that a test, or a part of one, could not run where it is.

use std::io::Write;

/// What a line about a skipped test starts with; a summary of all tests looks for it.
pub(crate) const SKIPPED: &str = "SKIPPED (";

/// Says on the process's stderr that `test` is skipped for lack of something.
pub(crate) fn say(test: &str, lack: &str, details: &str) {
    let line = format!("{SKIPPED}{lack}): {test} ({details})\n");
    // `eprintln!` is captured by the harness; a handle is not.
    std::io::stderr().write_all(line.as_bytes()).expect("stderr must take a line");
}
