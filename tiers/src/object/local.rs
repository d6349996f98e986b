//! A copy of the log in a local directory, so that a start reads little from the bucket.
//!
//! ```text
//! <directory>/of                      the epoch record of whoever wrote here last
//! <directory>/{epoch:010}-{seq:010}   objects of the log, byte for byte
//! ```
//! An object of the log is made once and never changes, so a copy is never stale: it is whole, by its
//! checksum, or it is read from the bucket again. What could make copies wrong is another bucket of the
//! same name, or one that was emptied; `of` is compared with the bucket's record of that epoch, and
//! if they differ nothing here is used.
//!
//! Files are written beside, synced and renamed. Nothing depends on them: every failure is a warning.
//! The footers of packs are in the objects of the log, so there is no file for each pack.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
    sync::Arc,
};

use bytes::Bytes;
use tracing::warn;

use super::{format::EpochRecord, names::ManifestId};

const OF: &str = "of";

/// A directory with a copy of the log of one ordinal. It has one user at a time.
#[derive(Debug, Clone)]
pub struct Local {
    dir: Arc<Path>,
}

impl Local {
    /// A copy in this directory, which is made if it is not there. Whatever else is in it may be
    /// deleted.
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir: dir.into() }
    }

    /// Whose copy it is, as far as it says.
    pub(super) async fn whose(&self) -> Option<EpochRecord> {
        let bytes = self.blocking(|dir| fs::read(dir.join(OF))).await.ok()?;
        EpochRecord::decode(&bytes).ok()
    }

    /// Says whose copy it is from now on.
    pub(super) async fn sign(&self, record: &EpochRecord) {
        let bytes = record.encode();
        let signed = self.blocking(move |dir| write(dir, OF, &bytes)).await;
        warn_if_failed(signed, "sign the copy of the object tier's log");
    }

    /// The bytes of an object, if there is a copy; whoever decodes them checks that they are right.
    pub(super) async fn read(&self, id: ManifestId) -> Option<Bytes> {
        self.blocking(move |dir| fs::read(dir.join(file_name(id)))).await.ok().map(Bytes::from)
    }

    /// Keeps a copy of an object.
    pub(super) async fn store(&self, id: ManifestId, bytes: Bytes) {
        let stored = self.blocking(move |dir| write(dir, &file_name(id), &bytes)).await;
        warn_if_failed(stored, "copy an object of the object tier's log");
    }

    /// Deletes the copies of all objects but these, which are sorted.
    pub(super) async fn keep_only(&self, ids: Vec<ManifestId>) {
        let kept: Vec<String> = ids.into_iter().map(file_name).collect();
        let swept = self.blocking(move |dir| {
            let others = |name: &str| name != OF && !kept.iter().any(|kept| kept == name);
            delete(dir, others)
        });
        warn_if_failed(swept.await, "delete old copies of the object tier's log");
    }

    /// Deletes everything.
    pub(super) async fn clear(&self) {
        // `of` first: copies without it are not used.
        let cleared = self.blocking(|dir| {
            if let Err(error) = fs::remove_file(dir.join(OF))
                && error.kind() != io::ErrorKind::NotFound
            {
                return Err(error);
            }
            delete(dir, |_| true)
        });
        warn_if_failed(cleared.await, "delete a copy of the object tier's log that is not ours");
    }

    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let dir = Arc::clone(&self.dir);
        let done = tokio::task::spawn_blocking(move || work(&dir)).await;
        done.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

fn file_name(id: ManifestId) -> String {
    format!("{:010}-{:010}", id.at.epoch, id.at.seq)
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let draft = dir.join(format!("{name}.draft"));
    let mut file = File::create(&draft)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&draft, dir.join(name))?;
    File::open(dir)?.sync_all()
}

fn delete(dir: &Path, which: impl Fn(&str) -> bool) -> io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_str().is_none_or(&which) && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn warn_if_failed(done: io::Result<()>, doing: &'static str) {
    if let Err(error) = done {
        warn!(%error, doing, "the next start reads more from the bucket");
    }
}

#[cfg(test)]
mod tests;
