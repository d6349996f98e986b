//! File systems of a size and with rights of a test's choice, where mounting is permitted.

use std::{path::Path, process::Command};

use crate::skipped;

/// A tmpfs of its own. It goes away with this.
#[derive(Debug)]
pub(crate) struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    /// Mounts one with these options for `test`, or returns `None` after saying that the test (or
    /// this part of it) is skipped.
    pub(crate) fn mount(test: &str, options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(directory.path())
            .output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(directory)),
            Ok(output) => {
                skipped::say(test, "no mounting", String::from_utf8_lossy(&output.stderr).trim());
                None
            }
            Err(error) => {
                skipped::say(test, "no mounting", &error.to_string());
                None
            }
        }
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: a server that is still ending keeps it busy. A mount that stays harms nobody.
        drop(Command::new("umount").arg("--lazy").arg(self.path()).output());
    }
}
