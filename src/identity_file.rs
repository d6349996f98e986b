//! The file that holds the install's secret: the key of all namespace ids.
//!
//! It is generated on the first start and kept outside every data directory, so that wiping data or
//! turning on tenants later renames nothing. 64 hex digits and a newline, so that it can be made by
//! hand and mounted as a Kubernetes secret. The secret is never printed.

use std::{
    env, fs,
    io::{self, Write},
    os::unix::fs::{OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use kvstrata_tiers::namespace::Secret;
use rand::TryRng;
use thiserror::Error;
use tracing::{info, warn};

use crate::config::Identity;

/// The longest file read: the digits and some white space.
const FILE_BYTES_MAX: u64 = 256;

/// Why there is no secret.
#[derive(Debug, Error)]
pub enum IdentityError {
    /// Nothing says where the file is.
    #[error(
        "identity.secret_file: auto given, but neither XDG_CONFIG_HOME nor HOME is set; give a path"
    )]
    NoDirectory,
    /// The file cannot be read or made.
    #[error(
        "identity.secret_file: {path}: {doing}; generate 64 hex digits there, or give a path that can be written"
    )]
    File {
        /// Where it should be.
        path: PathBuf,
        /// What failed.
        doing: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file holds something else.
    #[error("identity.secret_file: {path}: {length} bytes found; 64 hex digits required")]
    Content {
        /// Where it is.
        path: PathBuf,
        /// How long its content is; never the content.
        length: usize,
    },
}

/// Where a secret comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It was there.
    Found,
    /// It was made by this start.
    Generated,
}

/// Loads the secret, or generates it if the file does not exist.
///
/// # Errors
/// If there is no place for the file, it cannot be read or made, or it holds something else.
pub fn load_or_generate(config: &Identity) -> Result<(Secret, Origin), IdentityError> {
    let path = match config.secret_file.given() {
        Some(path) => path.0.clone(),
        None => default_path(env::var_os("XDG_CONFIG_HOME"), env::var_os("HOME"))?,
    };
    let failed = |doing| {
        let path = path.clone();
        move |source| IdentityError::File { path, doing, source }
    };
    let mut origin = Origin::Found;
    match read(&path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => {
            generate(&path).map_err(failed("generate secret"))?;
            info!(path = %path.display(), "identity secret generated");
            origin = Origin::Generated;
        }
        Err(why) => return Err(failed("read secret")(why)),
        Ok(_) => {}
    }
    let text = read(&path).map_err(failed("read secret"))?;
    let mut secret = [0; 32];
    match hex::decode_to_slice(text.trim(), &mut secret) {
        Ok(()) => Ok((Secret::new(secret), origin)),
        Err(_content_stays_unprinted) => Err(IdentityError::Content { path, length: text.len() }),
    }
}

fn default_path(
    config_home: Option<std::ffi::OsString>,
    home: Option<std::ffi::OsString>,
) -> Result<PathBuf, IdentityError> {
    let directory = match (config_home.filter(|path| !path.is_empty()), home) {
        (Some(config_home), _) => PathBuf::from(config_home),
        (None, Some(home)) => PathBuf::from(home).join(".config"),
        (None, None) => return Err(IdentityError::NoDirectory),
    };
    Ok(directory.join("kvstrata").join("identity"))
}

fn read(path: &Path) -> io::Result<String> {
    let metadata = fs::metadata(path)?;
    if metadata.len() > FILE_BYTES_MAX {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "file is too long for a secret"));
    }
    if metadata.permissions().mode() & 0o004 != 0 {
        warn!(path = %path.display(), "identity secret is readable by everybody on this host");
    }
    fs::read_to_string(path)
}

/// Makes the file so that two servers starting at once agree: the first link wins.
fn generate(path: &Path) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(directory)?;
    let mut secret = [0; 32];
    let mut tag = [0; 8];
    let mut random = rand::rngs::SysRng;
    random.try_fill_bytes(&mut secret).map_err(io::Error::other)?;
    random.try_fill_bytes(&mut tag).map_err(io::Error::other)?;
    let draft = directory.join(format!(".identity-{}", hex::encode(tag)));
    let made = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| {
            writeln!(file, "{}", hex::encode(secret))?;
            file.sync_all()
        })
        .and_then(|()| match fs::hard_link(&draft, path) {
            Err(why) if why.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        });
    // The draft may not exist if it could not be made.
    match fs::remove_file(&draft) {
        Err(why) if why.kind() != io::ErrorKind::NotFound => made.and(Err(why)),
        _ => made,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Auto, PathText};

    fn at(path: &Path) -> Identity {
        Identity { secret_file: Auto::Given(PathText(path.to_path_buf())), ..Identity::default() }
    }

    #[test]
    fn the_first_start_generates_and_the_next_ones_load() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep").join("identity");
        assert_eq!(load_or_generate(&at(&path)).unwrap().1, Origin::Generated);
        let first = fs::read_to_string(&path).unwrap();
        assert_eq!(load_or_generate(&at(&path)).unwrap().1, Origin::Found);
        assert_eq!(fs::read_to_string(&path).unwrap(), first);
        assert_eq!(first.trim().len(), 64);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1, "no draft is left");
    }

    #[test]
    fn a_file_with_something_else_is_refused_without_printing_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("identity");
        fs::write(&path, "hunter2").unwrap();
        let refused = load_or_generate(&at(&path)).unwrap_err().to_string();
        assert!(refused.contains("7 bytes found") && !refused.contains("hunter2"), "{refused}");
    }

    #[test]
    fn the_default_is_the_users_configuration_directory() {
        let path = |xdg: Option<&str>, home: Option<&str>| {
            default_path(xdg.map(Into::into), home.map(Into::into)).ok()
        };
        assert_eq!(path(Some("/x"), Some("/h")), Some("/x/kvstrata/identity".into()));
        assert_eq!(path(Some(""), Some("/h")), Some("/h/.config/kvstrata/identity".into()));
        assert_eq!(path(None, None), None);
    }
}
