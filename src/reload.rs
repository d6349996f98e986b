//! Files that may change while a server or a client runs: tokens and certificates.
//!
//! They are looked at once a second by their content, which is the same whatever replaces a file: an
//! editor, a rename, or the links that the kubelet turns. A change is taken when it was seen twice in a
//! row, so that files which are written one after the other are taken together; one that cannot be used
//! is logged and counted once, and what was loaded before stays in force.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::{ReloadOutcome, Reloaded, TrustMetrics};

/// How often files are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// The longest file that is read: a chain of certificates takes a few KiB, 65,536 tokens some MiB.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// The contents of files that are loaded together, in the order of their paths.
pub(crate) type Contents = [Vec<u8>];

type Load = Box<dyn Fn(&Contents) -> Result<()> + Send + Sync>;

/// Files that are loaded together, and what loads them.
pub(crate) struct Watched {
    what: Reloaded,
    /// Key of the setting that names the file, and its path.
    files: Vec<(&'static str, PathBuf)>,
    load: Load,
    /// What was looked at last; an error is content, too.
    seen: blake3::Hash,
    /// What was taken, or was found to be of no use.
    taken: blake3::Hash,
}

impl Watched {
    /// Loads the files for the first time.
    ///
    /// # Errors
    /// `Invalid` with the setting, the path and why.
    pub(crate) fn open(
        what: Reloaded,
        files: Vec<(&'static str, PathBuf)>,
        load: impl Fn(&Contents) -> Result<()> + Send + Sync + 'static,
    ) -> Result<Self> {
        let contents = read_all(&files)?;
        let seen = digest(Ok(&contents));
        let watched = Self { what, files, load: Box::new(load), seen, taken: seen };
        (watched.load)(&contents).map_err(|error| watched.named(&error))?;
        Ok(watched)
    }

    /// Says in which files an error is.
    fn named(&self, error: &Error) -> Error {
        let files = self.files.iter().map(|(key, path)| format!("{key} ({})", path.display()));
        Error::invalid(format!("{}: {error}", files.collect::<Vec<_>>().join(", ")))
    }

    /// Takes a change that was seen before, too; none if there is nothing to take.
    fn look(&mut self) -> Option<Result<()>> {
        let (contents, settled) = self.see();
        if settled { self.take(contents) } else { None }
    }

    /// Takes a change that is seen for the first time, too, for whoever looks now and then; none if there is
    /// nothing to take.
    pub(crate) fn look_once(&mut self) -> Option<Result<()>> {
        let (contents, _settled) = self.see();
        self.take(contents)
    }

    /// The contents, and whether they are what was seen before.
    fn see(&mut self) -> (Result<Vec<Vec<u8>>>, bool) {
        let contents = read_all(&self.files);
        let seen = digest(contents.as_deref());
        let settled = seen == self.seen;
        self.seen = seen;
        (contents, settled)
    }

    fn take(&mut self, contents: Result<Vec<Vec<u8>>>) -> Option<Result<()>> {
        if self.seen == self.taken {
            return None;
        }
        self.taken = self.seen;
        let loaded = contents
            .and_then(|contents| (self.load)(&contents).map_err(|error| self.named(&error)));
        Some(loaded)
    }
}

/// Looks at the files until `stop`.
///
/// # Cancel safety
/// Safe: what was taken stays.
pub(crate) async fn follow(
    mut watched: Vec<Watched>,
    metrics: TrustMetrics,
    stop: CancellationToken,
) {
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    while stop.run_until_cancelled(ticks.tick()).await.is_some() {
        // A file system may hang; the other tasks of this thread should not.
        let looking = tokio::task::spawn_blocking(move || {
            let taken: Vec<_> = watched.iter_mut().map(|one| (one.what, one.look())).collect();
            (watched, taken)
        });
        let Ok((back, taken)) = looking.await else { return };
        watched = back;
        for (what, loaded) in taken {
            match loaded {
                None => {}
                Some(Ok(())) => {
                    metrics.record_reload(what, ReloadOutcome::Ok);
                    info!(what = what.name(), "files changed and were loaded");
                }
                Some(Err(error)) => {
                    metrics.record_reload(what, ReloadOutcome::Failed);
                    warn!(what = what.name(), %error, "files changed and cannot be used, what was loaded before stays");
                }
            }
        }
    }
}

fn read_all(files: &[(&'static str, PathBuf)]) -> Result<Vec<Vec<u8>>> {
    files.iter().map(|(key, path)| read(path).map_err(|error| unread(key, path, error))).collect()
}

fn unread(key: &str, path: &Path, error: io::Error) -> Error {
    Error::new(ErrorKind::Invalid, format!("{key}: read {}", path.display())).because(error)
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    fs::File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut content)?;
    if u64::try_from(content.len()).is_ok_and(|bytes| bytes > FILE_BYTES_MAX) {
        let text = format!("longer than {FILE_BYTES_MAX} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(content)
}

fn digest(contents: Result<&Contents, &Error>) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new();
    match contents {
        Ok(contents) => contents.iter().for_each(|content| {
            hasher.update(blake3::hash(content).as_bytes());
        }),
        Err(error) => {
            hasher.update(error.to_string().as_bytes());
        }
    }
    hasher.finalize()
}
