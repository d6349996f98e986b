//! Writing results to standard output.

use std::io::{self, Write};

use kvstrata_tiers::error::{Error, ErrorKind, Result};

/// Writes `text` to standard output in one go. A reader that has gone (`| head`) is no error.
///
/// # Errors
/// `Unavailable` if the output cannot be written for another reason, such as a full disk.
///
/// # Blocking
/// As long as the reader takes.
pub(super) fn print(text: &str) -> Result<()> {
    write(text.as_bytes())
}

/// Writes `bytes` to standard output in one go. A reader that has gone is no error.
///
/// # Errors
/// As [`print`].
///
/// # Blocking
/// As long as the reader takes.
pub(super) fn write(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(source) if source.kind() != io::ErrorKind::BrokenPipe => {
            Err(Error::new(ErrorKind::Unavailable, "write to standard output").because(source))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}
