//! What a simulated fleet did.

/// How something is spread over the nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Spread {
    /// Of all nodes.
    pub mean: f64,
    /// Of the node that has most.
    pub max: u64,
}

impl Spread {
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub(super) fn of(counts: &[u64]) -> Self {
        let sum: u64 = counts.iter().sum();
        let max = counts.iter().copied().max().unwrap_or(0);
        Self { mean: sum as f64 / counts.len().max(1) as f64, max }
    }

    /// How many times the mean the largest is; 1 is even.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn imbalance(&self) -> f64 {
        if self.mean > 0.0 { self.max as f64 / self.mean } else { 1.0 }
    }
}

/// See the module. Lookups are those of requests, one each.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// How many nodes there are.
    pub nodes: u64,
    /// Lookups.
    pub lookups: u64,
    /// Blocks that they asked for.
    pub asked_blocks: u64,
    /// Blocks of prefixes that homes had themselves.
    pub own_blocks: u64,
    /// Blocks of prefixes, with those of others.
    pub found_blocks: u64,
    /// Lookups by the members that they asked.
    pub by_members: Vec<u64>,
    /// Lookups by the rounds that they took.
    pub by_rounds: Vec<u64>,
    /// Answers of members that had nothing.
    pub nothing: u64,
    /// Members that did not answer, because they were lost.
    pub silent: u64,
    /// Lookups that there may have been more of.
    pub partial: u64,
    /// Milliseconds from the first request to the last.
    pub span_ms: u64,
    first_ms: Option<u64>,
    /// Engines by home, and requests.
    pub engines: Spread,
    /// See `engines`.
    pub requests_of_nodes: Spread,
    /// Engines that had to find another home.
    pub engines_moved: usize,
    /// Bytes of all filters together, in the end.
    pub filter_bytes: u64,
    /// Keys that others were told of one by one, by all nodes.
    pub additions: u64,
    /// Filters that others were told as a whole, by all nodes, and their bytes.
    pub generations: u64,
    /// See `generations`.
    pub generation_bytes: u64,
    /// Blocks of all nodes, in the end.
    pub resident_blocks: u64,
    /// By minute of the trace: blocks asked, own, found.
    pub minutes: Vec<[u64; 3]>,
}

/// One lookup.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lookup {
    /// Blocks asked for, those that the home has, those found.
    pub(super) blocks: [u32; 3],
    /// Members asked, in all rounds; those that had nothing, and that did not answer.
    pub(super) members: usize,
    pub(super) nothing: usize,
    pub(super) silent: usize,
    pub(super) rounds: usize,
    pub(super) is_partial: bool,
}

/// Milliseconds of a minute.
const MINUTE_MS: u64 = 60_000;

impl Outcome {
    /// A request comes at this time.
    pub(super) fn begin(&mut self, now_ms: u64) {
        let first = *self.first_ms.get_or_insert(now_ms);
        self.span_ms = now_ms.saturating_sub(first);
    }

    /// Counts a lookup.
    pub(super) fn count(&mut self, lookup: &Lookup) {
        let Lookup { blocks, members, nothing, silent, rounds, is_partial } = *lookup;
        let blocks = blocks.map(u64::from);
        self.lookups += 1;
        let [asked, own, found] = blocks;
        self.asked_blocks += asked;
        self.own_blocks += own;
        self.found_blocks += found;
        count(&mut self.by_members, members);
        count(&mut self.by_rounds, rounds);
        self.nothing += nothing as u64;
        self.silent += silent as u64;
        self.partial += u64::from(is_partial);
        let minute = usize::try_from(self.span_ms / MINUTE_MS).unwrap_or(usize::MAX);
        if self.minutes.len() <= minute {
            self.minutes.resize(minute + 1, [0; 3]);
        }
        for (sum, blocks) in self.minutes.last_mut().into_iter().flatten().zip(blocks) {
            *sum += blocks;
        }
    }

    /// Members asked by all lookups.
    #[must_use]
    pub fn asked_members(&self) -> u64 {
        (0..).zip(&self.by_members).map(|(members, lookups)| members * lookups).sum()
    }

    /// The most members that this share of the lookups asked, 0 to 1.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^53")]
    pub fn members_quantile(&self, share: f64) -> usize {
        let mut left = share * self.lookups as f64;
        let at = self.by_members.iter().position(|lookups| {
            left -= *lookups as f64;
            left <= 0.0
        });
        at.unwrap_or(0)
    }

    /// Lookups that asked anybody.
    #[must_use]
    pub fn asking(&self) -> u64 {
        self.by_members.iter().skip(1).sum()
    }

    /// Of the blocks asked from this minute of the trace on, which the homes had, and which were found, 0 to 1.
    #[must_use]
    pub fn hits_from(&self, minute: usize) -> [f64; 2] {
        let mut sums = [0; 3];
        for minute in self.minutes.iter().skip(minute) {
            for (sum, blocks) in sums.iter_mut().zip(minute) {
                *sum += blocks;
            }
        }
        let [asked, own, found] = sums;
        [own, found].map(|part| crate::sim::ratio(part, asked))
    }
}

fn count(counts: &mut Vec<u64>, at: usize) {
    if counts.len() <= at {
        counts.resize(at + 1, 0);
    }
    if let Some(count) = counts.get_mut(at) {
        *count += 1;
    }
}
