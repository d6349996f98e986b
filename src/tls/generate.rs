//! A certificate for servers that live as long as a test or a replay.

use std::{
    fs,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::TlsOptions;

/// Names that the certificate is for.
const NAMES: [&str; 2] = ["localhost", "127.0.0.1"];

/// Files with a certificate that is its own CA, and its key.
#[derive(Debug, Clone)]
pub(crate) struct Generated {
    /// The certificate, which is what a client is to trust, too.
    pub(crate) cert_file: PathBuf,
    /// Its key, readable by its owner only.
    pub(crate) key_file: PathBuf,
}

impl Generated {
    /// Makes them in `directory`, for this host.
    ///
    /// # Errors
    /// `Internal` if none can be made, `Unavailable` if it cannot be written.
    pub(crate) fn create(directory: &Path) -> Result<Self> {
        let names = NAMES.map(str::to_owned).to_vec();
        let made = rcgen::generate_simple_self_signed(names);
        let made = made.map_err(|error| {
            Error::new(ErrorKind::Internal, "generate a certificate").because(error)
        })?;
        let (cert_file, key_file) = (directory.join("tls.crt"), directory.join("tls.key"));
        write_private(&cert_file, &made.cert.pem())?;
        write_private(&key_file, &made.signing_key.serialize_pem())?;
        Ok(Self { cert_file, key_file })
    }

    /// The options of a client that trusts the certificate.
    pub(crate) fn trusted(&self) -> TlsOptions {
        TlsOptions { ca_file: Some(self.cert_file.clone()), ..TlsOptions::default() }
    }
}

/// Writes a file of its owner's.
pub(crate) fn write_private(path: &Path, text: &str) -> Result<()> {
    let file =
        fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
        Error::new(ErrorKind::Unavailable, format!("write {}", path.display())).because(error)
    })
}
