//! `kvstrata get`: writes the value of a key.

use std::{fs::File, io::Write, ops::Range, path::PathBuf};

use bytes::Bytes;
use bytesize::ByteSize;
use kvstrata_tiers::error::{Error, ErrorKind, Result};

use super::{
    stdout,
    target::{Target, hashes_of},
};
use crate::client::{FetchedBlock, GetOptions, GetSink, MissReason};

const EXAMPLES: &str = "\
Examples:
  kvstrata get greeting
  kvstrata get greeting -o hello.txt

The exit code is 1 if the key is not stored.";

/// Write the value of a key to standard output or a file
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The key
    pub key: String,

    /// The file to write instead of standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Where from.
    #[command(flatten)]
    pub target: Target,
}

/// Fetches, verifies and writes the value. Nothing is written before all of it is verified.
///
/// # Errors
/// `Unavailable` if there is no value that can be read; `Invalid` if the file cannot be written.
///
/// # Cancel safety
/// Safe up to the moment at which the file is written.
pub async fn run(args: Args) -> Result<()> {
    let handle = args.target.open().await?;
    let mut value = Value::default();
    let hashes = hashes_of(std::slice::from_ref(&args.key));
    handle.get(&hashes, GetOptions::default(), &mut value).await?;
    let Some(pieces) = value.pieces else {
        let why = value.missed.map_or("not stored", reason);
        return Err(Error::new(ErrorKind::Unavailable, format!("get: {}: {why}", args.key)));
    };
    match &args.output {
        None => pieces.iter().try_for_each(|piece| stdout::write(piece)),
        Some(path) => {
            let failed = |error| Error::invalid(format!("write {}", path.display())).because(error);
            let mut file = File::create(path).map_err(failed)?;
            pieces.iter().try_for_each(|piece| file.write_all(piece)).map_err(failed)?;
            let len = ByteSize(pieces.iter().map(|piece| piece.len() as u64).sum());
            stdout::print(&format!("{}: {len} to {}\n", args.key, path.display()))
        }
    }
}

fn reason(reason: MissReason) -> &'static str {
    match reason {
        MissReason::Absent => "not stored",
        MissReason::Pending => "being stored now; try again",
        MissReason::Corrupt => "its bytes were damaged and have been removed; put it again",
        MissReason::CorruptHere => "its bytes were damaged on the way; try again",
        MissReason::Timeout => "the tier that has it did not answer in time; try again",
        MissReason::Busy => "the tier that has it is overloaded; try again",
    }
}

#[derive(Default)]
struct Value {
    pieces: Option<Vec<Bytes>>,
    missed: Option<MissReason>,
}

impl GetSink for Value {
    fn block(&mut self, block: FetchedBlock<'_>) {
        self.pieces = Some(block.pieces().to_vec());
    }

    fn miss(&mut self, _positions: Range<u32>, reason: MissReason) {
        self.missed = Some(reason);
    }
}
