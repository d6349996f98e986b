//! `kvstrata verify`: reads everything that an nvme tier has on its disk and says what is damaged.

use std::{path::PathBuf, sync::Arc};

use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    nvme::{
        device::{Engine, open},
        directory::Directory,
        index::Index,
        verify::{LostIndex, Report, verify},
    },
};
use serde_json::{Value, json};

use super::{progress, stdout};

/// Memory for the index, in bytes: it is read from one end to the other.
#[cfg(feature = "rocksdb")]
const INDEX_MEMORY_BYTES: u64 = 64 << 20;

const EXAMPLES: &str = "\
Examples:
  Check what the nvme tier of this machine holds, with the server stopped:
    kvstrata verify /var/lib/kvstrata/nvme
  For a script:
    kvstrata verify --json /var/lib/kvstrata/nvme

Every byte is read: header, payload and part checksums of every record, entry tables and trailers
against the records, the index against the segments in both directions. No segment is changed. What is
damaged costs a miss when it is read, never wrong bytes; the server need not be kept from starting.
The exit code is 0 if nothing is wrong, 1 if something is, 64 if PATH holds no nvme tier.";

/// Check an nvme tier's directory, offline
///
/// The server that uses it must be stopped.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The directory that nvme.path names
    pub path: PathBuf,

    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Checks the directory and prints what was found.
///
/// # Errors
/// `Invalid` if there is no nvme tier in it; `Unavailable` if a server uses it; `Corrupt` if
/// something is wrong with it.
///
/// # Blocking
/// For reads of the index.
///
/// # Cancel safety
/// Safe.
pub async fn run(args: Args) -> Result<()> {
    let directory = Directory::inspect(&args.path)
        .map_err(|error| Error::new(ErrorKind::Unavailable, "verify").because(error))?;
    let directory = directory.map_err(|reason| {
        let path = args.path.display();
        Error::invalid(format!(
            "{path}: no nvme tier in it ({reason}); what nvme.path names is required"
        ))
    })?;
    let failed = |error| Error::new(ErrorKind::Unavailable, "verify").because(error);
    let device = open(&directory.segments(), Engine::Auto).map_err(failed)?;
    let template =
        "{bar:40} {percent:>3} % of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let bar = progress::bar(0, template);
    let mut progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let index = open_index(&directory);
    let report = verify(device, index, directory.store(), &mut progress).await.map_err(failed)?;
    bar.finish_and_clear();
    if args.json {
        stdout::print_json(&to_json(&report))?;
    } else {
        stdout::print(&report.to_string())?;
    }
    if report.problem_count == 0 {
        return Ok(());
    }
    let what = format!(
        "verify: {} problems, which cost {} blocks",
        report.problem_count, report.lost_blocks
    );
    Err(Error::new(ErrorKind::Corrupt, what))
}

/// The index; one that cannot be opened is one more problem.
#[cfg(feature = "rocksdb")]
fn open_index(directory: &Directory) -> Arc<dyn Index> {
    use kvstrata_tiers::nvme::index::RocksIndex;

    let path = directory.index();
    if !RocksIndex::exists(&path) {
        return Arc::new(LostIndex::new("there is none"));
    }
    match RocksIndex::open(&path, INDEX_MEMORY_BYTES) {
        Ok(index) => Arc::new(index),
        Err(error) => Arc::new(LostIndex::new(&error.to_string())),
    }
}

#[cfg(not(feature = "rocksdb"))]
fn open_index(_: &Directory) -> Arc<dyn Index> {
    Arc::new(LostIndex::new("this program was built without the feature `rocksdb`"))
}

fn to_json(report: &Report) -> Value {
    let problems = report.problems.iter().map(|problem| {
        json!({
            "segment": problem.segment,
            "page": problem.page,
            "what": problem.what.name(),
            "blocks": problem.blocks,
        })
    });
    json!({
        "segments": report.segments,
        "empty_segments": report.empty,
        "records": report.records,
        "live_blocks": report.live_blocks,
        "live_bytes": report.live_bytes,
        "dead_bytes": report.dead_bytes,
        "unindexed_blocks": report.unindexed_blocks,
        "tombstones": report.tombstones,
        "namespaces": report.namespaces,
        "index_entries": report.entries,
        "bytes_read": report.bytes_read,
        "problem_count": report.problem_count,
        "lost_blocks": report.lost_blocks,
        "problems": problems.collect::<Vec<_>>(),
    })
}
