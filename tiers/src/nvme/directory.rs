//! The tier's own directory: whose it is, who has it open, and what happens to what is not ours.
//!
//! ```text
//! <nvme.path>/kvstrata-nvme/           <nvme.path>/kvstrata-nvme.aside-1/ ... -8/
//!     identity    whose it is              what was found there and is not this node's
//!     lock        who has it open
//!     segments/   the blocks
//!     index/      where they are
//!
//! identity:  kvstrata-nvme 1           version of everything in the directory
//!            store 00112233...         16 random bytes, in every segment too
//!            node NAME                 escaped as in Rust
//!            check 0123456789abcdef    XXH3-64 of the lines above
//! ```
//! Invariants: one process at a time, by a lock on the file `lock` that the kernel gives back however
//! the process ends. Nothing is deleted and nothing is mixed: what another node, another version or
//! somebody else left there is moved aside as a whole, by one rename.
//!
//! Crash behaviour: `identity` is written last, by a rename, after everything else is on disk. A
//! directory with nothing but what comes before that is one whose making was interrupted, and is
//! finished. Why not a lock beside the directory: whoever moves or mounts the directory moves its
//! lock with it.

use std::{
    ffi::OsStr,
    fmt,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, RenameFlags, renameat_with};
use thiserror::Error;
use tracing::warn;
use xxhash_rust::xxh3::xxh3_64;

/// The directory that is made in `nvme.path`.
const NAME: &str = "kvstrata-nvme";
/// The version of everything in the directory. Another one is not read: it is moved aside.
const VERSION: u32 = 1;
/// How often something may be moved aside before somebody has to look.
const ASIDE_MAX: u32 = 8;
/// How often the directory may be moved away under us before that is an error.
const LOCK_TRIES: u32 = 8;
/// The longest identity that is read, in bytes: a name of 253 escaped characters and the other lines.
const IDENTITY_BYTES_MAX: u64 = 4096;
/// The longest note of a lock holder that is read, in bytes.
const HOLDER_BYTES_MAX: u64 = 1024;

const IDENTITY: &str = "identity";
const DRAFT: &str = "identity.draft";
const LOCK: &str = "lock";
const SEGMENTS: &str = "segments";
const INDEX: &str = "index";
const OBJECT: &str = "object";

/// Why the directory cannot be used.
#[derive(Debug, Error)]
pub enum DirectoryError {
    /// Another process has it open.
    #[error(
        "nvme.path: {path}: in use by {holder}; stop that process, or give this one another directory"
    )]
    Held {
        /// The directory.
        path: PathBuf,
        /// Who says to have it.
        holder: String,
    },
    /// Something failed.
    #[error(
        "nvme.path: {path}: {doing}: {source}; a directory that this process can write is required"
    )]
    Io {
        /// What it failed on.
        path: PathBuf,
        /// What was being done.
        doing: &'static str,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// There is no free name to move something aside to.
    #[error(
        "nvme.path: {path}: it is not this node's ({reason}), and {ASIDE_MAX} directories are set \
         aside already; delete those that nobody needs of {path}.aside-1 to {path}.aside-{ASIDE_MAX}"
    )]
    TooManyAside {
        /// The directory.
        path: PathBuf,
        /// Why it is not this node's.
        reason: Reason,
    },
}

/// Why a directory was started empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reason {
    /// There was none.
    New,
    /// It belongs to another node, of this name.
    OtherNode(String),
    /// It was written in another version.
    OtherVersion(u32),
    /// Its identity cannot be read.
    Damaged,
    /// It holds something else.
    Foreign,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New => f.write_str("there was none"),
            Self::OtherNode(name) => write!(f, "it belongs to node {name}"),
            Self::OtherVersion(version) => {
                write!(f, "it has format version {version}, and this program reads {VERSION}")
            }
            Self::Damaged => f.write_str("its identity is damaged"),
            Self::Foreign => f.write_str("it holds files without an identity"),
        }
    }
}

/// The directory of one nvme tier, held by this process until it is dropped.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    store: [u8; 16],
    /// `None` if it was kept, with what is in it.
    pub started_empty: Option<Reason>,
    /// Closing it gives the directory back.
    _lock: File,
}

impl Directory {
    /// Opens or makes the directory in `path` for the node of this name. `random` becomes the store's
    /// id if a new one is made.
    ///
    /// What is there and is not this node's is moved aside, with a warning that says why and where to.
    ///
    /// # Errors
    /// If another process has it open, if it cannot be written, or if too much is set aside already.
    ///
    /// # Blocking
    /// For some writes and syncs to the disk.
    pub fn open(path: &Path, node: &str, random: [u8; 16]) -> Result<Self, DirectoryError> {
        let node = node.escape_default().to_string();
        make(path, "make the directory")?;
        let own = path.join(NAME);
        let mut set_aside = None;
        for _ in 0..LOCK_TRIES {
            // What is clearly somebody else's is not even locked: that would leave a file in it.
            if matches!(find(&own, &node)?, Found::Not(Reason::Foreign)) && !own.join(LOCK).exists()
            {
                set_aside = Some(move_aside(path, &own, Reason::Foreign)?);
            }
            make(&own, "make the tier's directory")?;
            let Some(mut lock) = lock(&own)? else { continue };
            match find(&own, &node)? {
                Found::Ours(store) => {
                    make(&own.join(SEGMENTS), "make the directory of segments")?;
                    make(&own.join(INDEX), "make the directory of the index")?;
                    sign(&mut lock, &own, &node)?;
                    return Ok(Self { path: own, store, started_empty: set_aside, _lock: lock });
                }
                Found::Nothing => {
                    found(path, &own, &Identity { node: node.clone(), store: random })?;
                    sign(&mut lock, &own, &node)?;
                    let started_empty = set_aside.or(Some(Reason::New));
                    return Ok(Self { path: own, store: random, started_empty, _lock: lock });
                }
                Found::Not(reason) => set_aside = Some(move_aside(path, &own, reason)?),
            }
        }
        let source = io::Error::other("it was moved away again and again");
        Err(DirectoryError::Io { path: own, doing: "lock the tier's directory", source })
    }

    /// Takes the directory in `path`, whichever node's it is, for somebody who only looks at it. The
    /// reason if it holds nothing that can be looked at.
    ///
    /// # Errors
    /// If another process has it open, or it cannot be read.
    ///
    /// # Blocking
    /// For some reads of the disk.
    pub fn inspect(path: &Path) -> Result<Result<Self, Reason>, DirectoryError> {
        let own = path.join(NAME);
        let identity = |own: &Path| match read_limited(&own.join(IDENTITY), IDENTITY_BYTES_MAX) {
            Ok(bytes) => Ok(Identity::of_text(&String::from_utf8(bytes).unwrap_or_default())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Err(Reason::New)),
            Err(source) => {
                Err(DirectoryError::Io { path: own.to_owned(), doing: "read its identity", source })
            }
        };
        // Nothing is made in what is not a tier's directory, not even a lock.
        if let Err(reason) = identity(&own)? {
            return Ok(Err(reason));
        }
        let Some(lock) = lock(&own)? else { return Ok(Err(Reason::New)) };
        let found = identity(&own)?;
        let open = |identity: Identity| {
            let store = identity.store;
            Self { path: own, store, started_empty: None, _lock: lock }
        };
        Ok(found.map(open))
    }

    /// Where segments are.
    #[must_use]
    pub fn segments(&self) -> PathBuf {
        self.path.join(SEGMENTS)
    }

    /// Where the index is.
    #[must_use]
    pub fn index(&self) -> PathBuf {
        self.path.join(INDEX)
    }

    /// Where the object tier keeps a copy of its log. It is not made here.
    #[must_use]
    pub fn object(&self) -> PathBuf {
        self.path.join(OBJECT)
    }

    /// The id of this store: whatever carries another one is not of this directory.
    #[must_use]
    pub fn store(&self) -> [u8; 16] {
        self.store
    }
}

/// What a directory says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    /// Escaped.
    node: String,
    store: [u8; 16],
}

impl Identity {
    fn to_text(&self) -> String {
        let store: String = self.store.iter().map(|byte| format!("{byte:02x}")).collect();
        let text = format!("{NAME} {VERSION}\nstore {store}\nnode {}\n", self.node);
        let check = xxh3_64(text.as_bytes());
        format!("{text}check {check:016x}\n")
    }

    /// Reads what [`to_text`](Self::to_text) wrote; the reason if it cannot be used.
    fn of_text(text: &str) -> Result<Self, Reason> {
        let version =
            text.lines().next().and_then(|line| line.strip_prefix(NAME)?.strip_prefix(' '));
        match version.and_then(|version| version.parse().ok()) {
            Some(VERSION) => Self::of_fields(text).ok_or(Reason::Damaged),
            Some(other) => Err(Reason::OtherVersion(other)),
            None => Err(Reason::Damaged),
        }
    }

    fn of_fields(text: &str) -> Option<Self> {
        let mut lines = text.lines().skip(1);
        let store = lines.next()?.strip_prefix("store ")?;
        let store = u128::from_str_radix(store, 16).ok()?.to_be_bytes();
        let node = lines.next()?.strip_prefix("node ")?.to_owned();
        let identity = Self { node, store };
        (identity.to_text() == text).then_some(identity)
    }
}

/// What is at the place of the tier's directory.
enum Found {
    /// Nothing, or what an interrupted start left.
    Nothing,
    /// The directory of this node.
    Ours([u8; 16]),
    /// Something else.
    Not(Reason),
}

fn find(own: &Path, node: &str) -> Result<Found, DirectoryError> {
    let failed = |doing| move |source| DirectoryError::Io { path: own.to_owned(), doing, source };
    match read_limited(&own.join(IDENTITY), IDENTITY_BYTES_MAX) {
        Ok(bytes) => {
            let text = String::from_utf8(bytes).unwrap_or_default();
            return Ok(match Identity::of_text(&text) {
                Ok(identity) if identity.node == node => Found::Ours(identity.store),
                Ok(identity) => Found::Not(Reason::OtherNode(identity.node)),
                Err(reason) => Found::Not(reason),
            });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            return Ok(Found::Not(Reason::Foreign));
        }
        Err(error) if error.kind() == io::ErrorKind::IsADirectory => {
            return Ok(Found::Not(Reason::Damaged));
        }
        Err(error) => return Err(failed("read its identity")(error)),
    }
    let entries = match fs::read_dir(own) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::Nothing),
        entries => entries.map_err(failed("list the tier's directory"))?,
    };
    for entry in entries {
        let entry = entry.map_err(failed("list the tier's directory"))?;
        let name = entry.file_name();
        let of_a_start = [LOCK, DRAFT].map(OsStr::new).contains(&name.as_os_str());
        let empty = || fs::read_dir(entry.path()).is_ok_and(|mut inside| inside.next().is_none());
        let place = [SEGMENTS, INDEX].map(OsStr::new).contains(&name.as_os_str());
        if !(of_a_start || place && empty()) {
            return Ok(Found::Not(Reason::Foreign));
        }
    }
    Ok(Found::Nothing)
}

/// Takes the lock; `None` if the directory was moved away before it was taken.
fn lock(own: &Path) -> Result<Option<File>, DirectoryError> {
    let path = own.join(LOCK);
    let failed = |source| DirectoryError::Io { path: path.clone(), doing: "open the lock", source };
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
    let file = match file {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(failed)?,
    };
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let note = read_limited(&path, HOLDER_BYTES_MAX).unwrap_or_default();
            let note = String::from_utf8_lossy(&note).trim().to_owned();
            let holder = if note.is_empty() { "another process".to_owned() } else { note };
            return Err(DirectoryError::Held { path: own.to_owned(), holder });
        }
        Err(TryLockError::Error(source)) => return Err(failed(source)),
    }
    let held = file.metadata().map_err(failed)?;
    match fs::metadata(&path) {
        Ok(there) if (there.dev(), there.ino()) == (held.dev(), held.ino()) => Ok(Some(file)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed(source)),
    }
}

/// Leaves a note in the lock for whoever finds it taken. Nothing depends on it.
fn sign(lock: &mut File, own: &Path, node: &str) -> Result<(), DirectoryError> {
    let signed = lock
        .set_len(0)
        .and_then(|()| writeln!(lock, "process {} (node {node})", std::process::id()));
    signed.map_err(|source| DirectoryError::Io {
        path: own.join(LOCK),
        doing: "write the lock's note",
        source,
    })
}

/// Makes everything in the directory, the identity last.
fn found(parent: &Path, own: &Path, identity: &Identity) -> Result<(), DirectoryError> {
    make(&own.join(SEGMENTS), "make the directory of segments")?;
    make(&own.join(INDEX), "make the directory of the index")?;
    let write = || {
        let draft = own.join(DRAFT);
        let mut file = File::create(&draft)?;
        file.write_all(identity.to_text().as_bytes())?;
        file.sync_all()?;
        // What the identity vouches for is on disk before it can be.
        sync_directory(own)?;
        fs::rename(&draft, own.join(IDENTITY))?;
        sync_directory(own)?;
        sync_directory(parent)
    };
    write().map_err(|source| DirectoryError::Io {
        path: own.to_owned(),
        doing: "write its identity",
        source,
    })
}

/// Renames the directory to the first free name beside it.
fn move_aside(parent: &Path, own: &Path, reason: Reason) -> Result<Reason, DirectoryError> {
    let failed = |source| DirectoryError::Io {
        path: own.to_owned(),
        doing: "move it aside, because it is not this node's",
        source,
    };
    for number in 1..=ASIDE_MAX {
        let to = parent.join(format!("{NAME}.aside-{number}"));
        match rename_to_free(own, &to) {
            Ok(()) => {
                sync_directory(parent).map_err(failed)?;
                warn!(
                    %reason, path = %own.display(), moved_to = %to.display(),
                    "nvme directory is not this node's, moved aside and started empty; what was moved can be deleted"
                );
                return Ok(reason);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => return Err(failed(source)),
        }
    }
    Err(DirectoryError::TooManyAside { path: own.to_owned(), reason })
}

/// Renames without ever replacing anything.
fn rename_to_free(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems cannot promise it. Nobody else makes these names, so looking will do.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
            match fs::symlink_metadata(to) {
                Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
                Err(error) if error.kind() == io::ErrorKind::NotFound => fs::rename(from, to),
                Err(error) => Err(error),
            }
        }
        renamed => renamed.map_err(io::Error::from),
    }
}

/// Makes a directory and those above it, each on disk before the next; one that exists is fine.
fn make(path: &Path, doing: &'static str) -> Result<(), DirectoryError> {
    let failed = |source| DirectoryError::Io { path: path.to_owned(), doing, source };
    let missing = path.ancestors().take_while(|above| !above.as_os_str().is_empty());
    let missing: Vec<_> = missing.take_while(|above| !above.is_dir()).collect();
    for above in missing.into_iter().rev() {
        match fs::create_dir(above) {
            // Somebody else made it meanwhile, or it is a file, which the next step will say.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && above.is_dir() => {}
            made => made.map_err(failed)?,
        }
        let parent = above.parent().filter(|parent| !parent.as_os_str().is_empty());
        sync_directory(parent.unwrap_or(Path::new("."))).map_err(failed)?;
    }
    Ok(())
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

fn read_limited(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
