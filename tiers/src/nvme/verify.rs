//! An offline check of a directory of segments and its index: everything is read, nothing is changed.
//!
//! ```text
//! each segment, newest first   header, every record (checksum of the payload, of each part, layout),
//!                              entry table and trailer against the records, the index for each block
//! the index                    every entry: its segment is there, of its generation, and its record
//! ```
//! A block is *live* if the index names its record. A record that the index does not name is dead
//! weight, unless nothing removed it: then the index lacks it, which costs a block. Records that the
//! index has not heard of yet (a process ended before) are counted apart: the next start takes them.
//!
//! Memory: a few bytes for each segment, each tombstone and each kind of problem, all bounded; one
//! block at a time. Beyond the bounds problems are counted and not listed, and what the index lacks is
//! not told.

mod index;
mod lost;
mod segment;

use std::{
    collections::{BTreeMap, HashMap},
    fmt, io,
    sync::Arc,
};

pub use self::lost::LostIndex;
use super::{
    aligned::PAGE,
    device::{Device, SegmentId},
    format::Place,
    index::{Index, Known},
    scan::{First, generation_of_trailer, read_first},
};
use crate::{
    namespace::{BlockLayout, NamespaceId, layout_of},
    nvme::index::IndexKey,
};

/// Problems listed; more are only counted.
const PROBLEMS_MAX: usize = 1000;
/// Damaged places remembered, to tell which entries of the index they cost.
const HOLES_MAX: usize = 65_536;
/// Tombstones remembered, to tell what the index lacks from what was removed: 100 MiB of memory.
const TOMBSTONES_MAX: usize = 4 << 20;

/// What can be wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// A file is of another store, version, or number.
    Stranger,
    /// The first page of a segment is damaged.
    SegmentHeader,
    /// A record is damaged: its header, or the tombstones or the namespace that it holds.
    Record,
    /// The bytes of a block are not those that were written.
    Payload,
    /// The bytes of a block were wrong before they were written.
    Parts,
    /// A block is not as its namespace declares, or its namespace is not known.
    Layout,
    /// The entry table of a segment is damaged, or does not say what the records say.
    Table,
    /// The trailer of a segment is damaged.
    Trailer,
    /// The disk failed to read it.
    Unreadable,
    /// Entries of the index name a segment that is not there.
    Missing,
    /// Entries of the index name another generation of the segment.
    Generation,
    /// Entries of the index name places behind the end of the segment.
    Truncated,
    /// An entry of the index names a place where another record, or none, is.
    Misplaced,
    /// An entry of the index says something else than the record.
    Entry,
    /// A block that nothing removed is not in the index.
    Lacking,
    /// Entries of the index cannot be decoded.
    Undecodable,
    /// The index cannot be read.
    Index,
}

impl What {
    /// The name, as it is printed.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Stranger => "stranger",
            Self::SegmentHeader => "segment header",
            Self::Record => "record",
            Self::Payload => "payload",
            Self::Parts => "part checksum",
            Self::Layout => "layout",
            Self::Table => "entry table",
            Self::Trailer => "trailer",
            Self::Unreadable => "unreadable",
            Self::Missing => "missing segment",
            Self::Generation => "other generation",
            Self::Truncated => "truncated segment",
            Self::Misplaced => "misplaced entry",
            Self::Entry => "index entry",
            Self::Lacking => "lacking entry",
            Self::Undecodable => "undecodable entry",
            Self::Index => "index",
        }
    }
}

/// One thing that is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Problem {
    /// In which segment; 0 for what is not in any.
    pub segment: u64,
    /// At which page of it; 0 for the segment as a whole.
    pub page: u32,
    /// What it is.
    pub what: What,
    /// How many blocks it costs.
    pub blocks: u64,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, page, what, blocks } = self;
        write!(f, "segment {segment} page {page}: {}, costs {blocks} blocks", what.name())
    }
}

/// What a check found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Segments of the store.
    pub segments: u64,
    /// Files that were made and not written to.
    pub empty: u64,
    /// Records of all kinds.
    pub records: u64,
    /// Blocks whose record the index names.
    pub live_blocks: u64,
    /// Bytes of their records.
    pub live_bytes: u64,
    /// Bytes of records that can go: blocks that the index does not name.
    pub dead_bytes: u64,
    /// Blocks that the index has not heard of yet.
    pub unindexed_blocks: u64,
    /// Tombstones.
    pub tombstones: u64,
    /// Namespaces.
    pub namespaces: u64,
    /// Entries of the index.
    pub entries: u64,
    /// Bytes read from segments.
    pub bytes_read: u64,
    /// What is wrong, the first ones.
    pub problems: Vec<Problem>,
    /// How many problems there are.
    pub problem_count: u64,
    /// How many blocks they cost.
    pub lost_blocks: u64,
}

impl Report {
    fn add(&mut self, segment: SegmentId, page: u32, what: What, blocks: u64) {
        self.problem_count += 1;
        self.lost_blocks += blocks;
        if self.problems.len() < PROBLEMS_MAX {
            self.problems.push(Problem { segment: segment.0, page, what, blocks });
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(f, "{problem}")?;
        }
        let unlisted = self.problem_count - u64::try_from(self.problems.len()).unwrap_or(0);
        if unlisted > 0 {
            writeln!(f, "and {unlisted} more")?;
        }
        writeln!(f, "segments          {}", self.segments)?;
        writeln!(f, "records           {}", self.records)?;
        writeln!(f, "live blocks       {}", self.live_blocks)?;
        writeln!(f, "live bytes        {}", self.live_bytes)?;
        writeln!(f, "dead bytes        {}", self.dead_bytes)?;
        writeln!(f, "not yet indexed   {}", self.unindexed_blocks)?;
        writeln!(f, "tombstones        {}", self.tombstones)?;
        writeln!(f, "namespaces        {}", self.namespaces)?;
        writeln!(f, "index entries     {}", self.entries)?;
        writeln!(f, "bytes read        {}", self.bytes_read)?;
        writeln!(f, "problems          {}", self.problem_count)?;
        writeln!(f, "blocks lost       {}", self.lost_blocks)
    }
}

/// How far a check is, in bytes of segment files: done, and in all.
pub type Progress<'a> = dyn FnMut(u64, u64) + Send + 'a;

/// What is known of a segment, once it was read.
#[derive(Debug, Default)]
struct Summary {
    generation: u64,
    /// Pages of its records.
    end: u32,
    /// Blocks whose record the index names.
    matched: u64,
    /// Damaged places: from and up to which page.
    holes: Vec<(u32, u32)>,
}

/// A check under way.
struct Check<'a> {
    device: &'a dyn Device,
    index: &'a dyn Index,
    report: Report,
    layouts: HashMap<NamespaceId, BlockLayout>,
    /// How far the index knows each segment: generation and bytes.
    indexed: BTreeMap<SegmentId, (u64, u64)>,
    summaries: BTreeMap<SegmentId, Summary>,
    strangers: Vec<SegmentId>,
    hole_count: usize,
    /// For each removed block the latest barrier, by a short digest of its key.
    removed: HashMap<u64, Place>,
}

/// Checks the segments of `store` on `device` and their `index`. Nothing else may use them meanwhile.
///
/// # Errors
/// If the segments cannot be listed. Everything else is a problem of the report.
///
/// # Blocking
/// Calls the index.
///
/// # Cancel safety
/// Safe.
pub async fn verify(
    device: Arc<dyn Device>,
    index: Arc<dyn Index>,
    store: [u8; 16],
    progress: &mut Progress<'_>,
) -> io::Result<Report> {
    let files = device.list()?;
    let total: u64 = files.iter().map(|(_, bytes)| *bytes).sum();
    let mut check = Check {
        device: device.as_ref(),
        index: index.as_ref(),
        report: Report::default(),
        layouts: HashMap::new(),
        indexed: BTreeMap::new(),
        summaries: BTreeMap::new(),
        strangers: Vec::new(),
        hole_count: 0,
        removed: HashMap::new(),
    };
    check.load_outline();
    let mut done = 0;
    // The newest first: what a tombstone kills is older.
    for (id, file_bytes) in files.into_iter().rev() {
        check.segment(id, file_bytes, store).await;
        done += file_bytes;
        progress(done, total);
    }
    check.entries().await;
    check.report.namespaces = u64::try_from(check.layouts.len()).unwrap_or(u64::MAX);
    check.report.problems.sort_by_key(|problem| (problem.segment, problem.page, problem.what));
    Ok(check.report)
}

impl Check<'_> {
    /// Namespaces and segments of the index.
    fn load_outline(&mut self) {
        let (mut layouts, mut indexed) = (HashMap::new(), BTreeMap::new());
        let mut damaged = 0;
        let loaded = self.index.load(&mut |known| {
            match known {
                Known::Namespace(id, encoded) => match layout_of(&encoded) {
                    Ok(layout) => drop(layouts.insert(id, layout)),
                    Err(_damage) => damaged += 1,
                },
                Known::Indexed { segment, generation, bytes } => {
                    indexed.insert(segment, (generation, bytes));
                }
                Known::Block(..) | Known::Described(..) => {}
            }
            Ok(())
        });
        match loaded.map(|undecodable| undecodable + damaged) {
            Ok(0) => {}
            Ok(count) => self.report.add(SegmentId(0), 0, What::Undecodable, count),
            Err(error) => {
                tracing::warn!(%error, "nvme index cannot be read");
                self.report.add(SegmentId(0), 0, What::Index, 0);
            }
        }
        (self.layouts, self.indexed) = (layouts, indexed);
    }

    /// Reads one segment.
    async fn segment(&mut self, id: SegmentId, file_bytes: u64, store: [u8; 16]) {
        self.report.bytes_read += PAGE;
        let known = self.indexed.get(&id).map(|(generation, _)| *generation);
        let generation = match read_first(self.device, id, store).await {
            First::Ours(header) => Some(header.generation),
            First::Stranger(_) => {
                self.strangers.push(id);
                return;
            }
            First::Unwritten if known.is_none() => {
                self.report.empty += 1;
                return;
            }
            First::Unwritten | First::Unreadable(_) => {
                self.report.add(id, 0, What::SegmentHeader, 0);
                match known {
                    Some(generation) => Some(generation),
                    None => generation_of_trailer(self.device, id, file_bytes).await,
                }
            }
        };
        self.report.segments += 1;
        if let Some(generation) = generation {
            self.records(id, generation, file_bytes).await;
        }
    }

    /// A damaged place, whose price the index will tell.
    fn hole(&mut self, summary: &mut Summary, id: SegmentId, (from, to): (u32, u32)) {
        self.hole_count += 1;
        if self.hole_count <= HOLES_MAX {
            summary.holes.push((from, to));
        } else {
            self.report.add(id, from, What::Record, 0);
        }
    }
}

/// A digest of a key, short enough to remember millions.
fn digest(key: &IndexKey) -> u64 {
    let bytes = [key.namespace.as_bytes().as_slice(), key.hash.as_bytes().as_slice()].concat();
    super::format::checksum(&bytes)
}
