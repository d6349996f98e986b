//! `kvstrata put`: stores a file under a key.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use bytesize::ByteSize;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::{
    stdout,
    target::{Target, hashes_of},
};
use crate::client::{PutBatch, PutOutcome};

const EXAMPLES: &str = "\
Examples:
  kvstrata put greeting hello.txt
  date | kvstrata put now -
  kvstrata put --endpoint kvstrata-0.kvstrata:9400 --namespace team-a greeting hello.txt

The first value of a key stays: putting other bytes under it fails until the key is gone.";

/// Store a file under a key
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The key: any text
    pub key: String,

    /// The file, or - for standard input
    pub file: PathBuf,

    /// Where to.
    #[command(flatten)]
    pub target: Target,
}

/// Stores the file and says what became of it.
///
/// # Errors
/// `Invalid` if the file cannot be read or is too long, or the key has other bytes; `Exhausted` or
/// `Unavailable` if the server cannot take it now.
///
/// # Cancel safety
/// Safe: a value is stored whole or not at all.
pub async fn run(args: Args) -> Result<()> {
    let handle = args.target.open().await?;
    let value = read(&args.file, handle.limits().part_bytes_max)?;
    let len = value.len() as u64;
    let session = handle.client().session("cli/put").await?;
    let batch = PutBatch {
        hashes: hashes_of(std::slice::from_ref(&args.key)),
        parts: Vec::new(),
        values: vec![value],
        parent: None,
        durable: false,
    };
    let report = handle.put(&session, &batch).await?;
    let key = &args.key;
    match report.outcomes.first() {
        Some(PutOutcome::Stored | PutOutcome::PartStored) => {
            stdout::print(&format!("{key}: stored {}\n", ByteSize(len)))
        }
        Some(PutOutcome::Duplicate) => {
            stdout::print(&format!("{key}: was stored already, with the same bytes\n"))
        }
        Some(PutOutcome::DuplicateDiffers) => {
            Err(Error::invalid(format!("put: {key} has other bytes, and the first ones stay")))
        }
        Some(PutOutcome::Pending) => {
            Err(unavailable(format!("put: another client is storing {key} now; try again")))
        }
        Some(PutOutcome::Corrupt) => {
            Err(unavailable(format!("put: {key} was damaged on the way; try again")))
        }
        Some(PutOutcome::NotDurable) => {
            Err(unavailable(format!("put: {key} is stored, but not on nvme; try again")))
        }
        Some(PutOutcome::Refused) | None => {
            Err(unavailable(format!("put: no room for {key} now; try again")))
        }
    }
}

fn unavailable(what: String) -> Error {
    Error::new(ErrorKind::Unavailable, what)
}

/// Reads at most `limit` bytes, so that a huge file is refused and not loaded.
fn read(path: &Path, limit: usize) -> Result<Bytes> {
    let shown = path.display();
    let failed = |error: io::Error| Error::invalid(format!("read {shown}")).because(error);
    let source: Box<dyn Read> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(path).map_err(failed)?)
    };
    let mut bytes = Vec::new();
    source.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > limit {
        let limit = ByteSize(limit as u64);
        return Err(Error::invalid(format!("put: {shown} is longer than the {limit} allowed")));
    }
    Ok(bytes.into())
}
