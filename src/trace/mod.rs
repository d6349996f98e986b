//! Request traces: who asked for which blocks, when.
//!
//! A trace lists requests in order of time; a request lists the blocks of its prompt in chain
//! order. Two requests that name the same block share the whole prefix up to it: that is what the
//! published traces promise, and what every count in [`sim`](crate::sim) rests on.
//!
//! Invariants: block ids are dense, `0..blocks_unique()`, numbered by first appearance in the file;
//! a request names a block at most once; requests are sorted by time, equal times in file order.
//!
//! Blocks stay **runs** of consecutive ids and are expanded lazily. The Claude Code day has 85
//! million references in 46,218 requests: 340 MB as a flat list, under 4 MB as runs.
//!
//! Flow: [`read()`] detects format and compression, `format` turns a line into ranges of file ids,
//! `intern` turns those into runs. [`generate`] writes traces of our own, [`model`] says
//! how many bytes a token is.

mod format;
pub mod generate;
mod intern;
mod lines;
pub mod model;
pub mod read;

use std::fmt;

use kvstrata_tiers::error::{Error, Result};

pub use self::{
    format::{Format, TimeUnit},
    read::{ReadOptions, read, read_from},
};

/// Blocks one request may name: 16 million tokens in 16-token blocks, far above any context window.
pub const BLOCKS_PER_REQUEST_MAX: u32 = 1 << 20;
/// Distinct blocks in one trace: the simulators keep about eight bytes for each.
pub const BLOCKS_UNIQUE_MAX: u32 = 1 << 28;
/// Runs in one trace, all requests together: 1 GiB of them.
pub const RUNS_MAX: usize = 1 << 27;

const _: () = assert!(BLOCKS_PER_REQUEST_MAX <= BLOCKS_UNIQUE_MAX);

/// A run of consecutive block ids: `first` to `first + count - 1`, in chain order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first id.
    pub first: u32,
    /// How many ids; at least 1.
    pub count: u32,
}

impl Run {
    /// The ids, in chain order.
    #[must_use]
    pub fn ids(self) -> std::ops::Range<u32> {
        self.first..self.end()
    }

    /// One past the last id.
    #[must_use]
    pub fn end(self) -> u32 {
        self.first.saturating_add(self.count)
    }
}

/// One request as stored. 32 bytes.
#[derive(Debug, Clone, Copy)]
struct Stored {
    timestamp_ms: u64,
    session: Option<u32>,
    input_tokens: u32,
    output_tokens: u32,
    runs_first: u32,
    runs_count: u32,
}

/// A whole trace in memory.
#[derive(Clone)]
pub struct Trace {
    name: String,
    format: Format,
    block_tokens: u32,
    requests: Vec<Stored>,
    runs: Vec<Run>,
    references: u64,
    blocks_unique: u32,
    sessions: u32,
    repeats_dropped: u64,
}

impl Trace {
    /// The file's name, for titles.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The format the trace was read from.
    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// Tokens in one block.
    #[must_use]
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// How many requests there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is no request. A trace that was read has at least one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Block references, all requests together.
    #[must_use]
    pub fn references(&self) -> u64 {
        self.references
    }

    /// Distinct blocks; ids run from 0 to one less.
    #[must_use]
    pub fn blocks_unique(&self) -> u32 {
        self.blocks_unique
    }

    /// Distinct sessions; 0 if the format knows none.
    #[must_use]
    pub fn sessions(&self) -> u32 {
        self.sessions
    }

    /// References left out because the same request had named the block before. Above zero the
    /// file's ids are not chained, and prefix hits are counted on what is left.
    #[must_use]
    pub fn repeats_dropped(&self) -> u64 {
        self.repeats_dropped
    }

    /// The requests in order of time.
    pub fn requests(
        &self,
    ) -> impl DoubleEndedIterator<Item = Request<'_>> + ExactSizeIterator + Clone {
        self.requests.iter().map(|stored| self.view(stored))
    }

    /// The request at `position`.
    #[must_use]
    pub fn request(&self, position: usize) -> Option<Request<'_>> {
        self.requests.get(position).map(|stored| self.view(stored))
    }

    fn view(&self, stored: &Stored) -> Request<'_> {
        let first = stored.runs_first as usize;
        let end = first.saturating_add(stored.runs_count as usize);
        Request {
            timestamp_ms: stored.timestamp_ms,
            session: stored.session,
            input_tokens: stored.input_tokens,
            output_tokens: stored.output_tokens,
            runs: self.runs.get(first..end).unwrap_or_default(),
        }
    }
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trace")
            .field("name", &self.name)
            .field("format", &self.format)
            .field("requests", &self.requests.len())
            .field("references", &self.references)
            .field("blocks_unique", &self.blocks_unique)
            .finish_non_exhaustive()
    }
}

/// One request of a [`Trace`].
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Milliseconds since the trace's own zero.
    pub timestamp_ms: u64,
    /// The session, numbered from 0; `None` if the format knows none.
    pub session: Option<u32>,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    runs: &'a [Run],
}

impl<'a> Request<'a> {
    /// The blocks as runs, in chain order.
    #[must_use]
    pub fn runs(&self) -> &'a [Run] {
        self.runs
    }

    /// The block ids in chain order; reversed, tail first.
    pub fn blocks(&self) -> impl DoubleEndedIterator<Item = u32> + Clone + use<'a> {
        self.runs.iter().flat_map(|run| run.ids())
    }

    /// How many blocks the request names.
    #[must_use]
    pub fn blocks_count(&self) -> u32 {
        self.runs.iter().fold(0, |sum, run| sum.saturating_add(run.count))
    }
}

/// What a request is apart from its blocks.
#[derive(Debug, Clone, Copy)]
struct Head {
    timestamp_ms: u64,
    session: Option<u32>,
    input_tokens: u32,
    output_tokens: u32,
}

/// Collects requests and holds the invariants of [`Trace`].
#[derive(Debug)]
struct TraceBuilder {
    trace: Trace,
    interner: intern::Interner,
    /// The request being added; kept to reuse its memory.
    current: Vec<Run>,
}

impl TraceBuilder {
    fn new(name: String, format: Format, block_tokens: u32) -> Self {
        let trace = Trace {
            name,
            format,
            block_tokens,
            requests: Vec::new(),
            runs: Vec::new(),
            references: 0,
            blocks_unique: 0,
            sessions: 0,
            repeats_dropped: 0,
        };
        Self { trace, interner: intern::Interner::default(), current: Vec::new() }
    }

    fn len(&self) -> usize {
        self.trace.requests.len()
    }

    /// Adds a request whose blocks are `ranges` of file ids.
    ///
    /// # Errors
    /// `Invalid` over a limit of this module.
    fn push(&mut self, head: Head, ranges: &[intern::FileRange]) -> Result<()> {
        self.current.clear();
        for range in ranges {
            self.interner.intern(*range, &mut self.current)?;
        }
        self.trace.repeats_dropped += intern::drop_repeats(&mut self.current);
        let runs_first = self.trace.runs.len();
        if runs_first.saturating_add(self.current.len()) > RUNS_MAX {
            return Err(Error::invalid(format!(
                "the trace has more than {RUNS_MAX} runs of consecutive block ids"
            )));
        }
        let index = |number: usize| {
            u32::try_from(number).map_err(|source| Error::invalid("count runs").because(source))
        };
        self.trace.requests.push(Stored {
            timestamp_ms: head.timestamp_ms,
            session: head.session,
            input_tokens: head.input_tokens,
            output_tokens: head.output_tokens,
            runs_first: index(runs_first)?,
            runs_count: index(self.current.len())?,
        });
        let blocks: u64 = self.current.iter().map(|run| u64::from(run.count)).sum();
        self.trace.references = self.trace.references.saturating_add(blocks);
        self.trace.runs.append(&mut self.current);
        Ok(())
    }

    fn finish(mut self, sessions: u32) -> Trace {
        self.trace.requests.sort_by_key(|request| request.timestamp_ms);
        self.trace.requests.shrink_to_fit();
        self.trace.runs.shrink_to_fit();
        self.trace.blocks_unique = self.interner.blocks_unique();
        self.trace.sessions = sessions;
        self.trace
    }
}

#[cfg(test)]
impl Trace {
    /// A trace of requests one second apart, each a list of block names.
    pub(crate) fn of(requests: &[&[u32]]) -> Self {
        let mut builder = TraceBuilder::new("test".to_owned(), Format::Mooncake, 64);
        for (second, blocks) in requests.iter().enumerate() {
            let head = Head {
                timestamp_ms: 1000 * second as u64,
                session: None,
                input_tokens: 64 * u32::try_from(blocks.len()).unwrap(),
                output_tokens: 1,
            };
            let ranges: Vec<_> = blocks
                .iter()
                .map(|id| intern::FileRange { first: i128::from(*id), count: 1 })
                .collect();
            builder.push(head, &ranges).unwrap();
        }
        builder.finish(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_blocks_become_one_run_and_expand_in_both_directions() {
        let trace = Trace::of(&[&[7, 8, 9], &[7, 8, 20, 21], &[30]]);
        assert_eq!((trace.references(), trace.blocks_unique(), trace.len()), (8, 6, 3));
        let second = trace.request(1).unwrap();
        assert_eq!(second.runs(), [Run { first: 0, count: 2 }, Run { first: 3, count: 2 }]);
        assert_eq!(second.blocks().collect::<Vec<_>>(), [0, 1, 3, 4]);
        assert_eq!(second.blocks().rev().collect::<Vec<_>>(), [4, 3, 1, 0]);
        assert_eq!(second.blocks_count(), 4);
        assert!(trace.request(3).is_none());
    }

    #[test]
    fn a_block_repeated_within_a_request_counts_once() {
        let trace = Trace::of(&[&[1, 2, 1, 3, 2]]);
        assert_eq!((trace.references(), trace.repeats_dropped()), (3, 2));
        assert_eq!(trace.request(0).unwrap().blocks().collect::<Vec<_>>(), [0, 1, 2]);
    }
}
