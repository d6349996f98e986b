//! A get in a cluster: blocks may be on several members, which are read one after the other, so that blocks come
//! in the order asked.
//!
//! Where a block is, a lookup has said ([`Placements`](super::placements)), perhaps that of another process: so at
//! the first block that its own server lacks, a get looks up what is left, once. The server that the client is at
//! answers as ever, with its errors. What another member does not deliver is a miss, whatever the reason: the
//! blocks of others are worth as much without it.

use std::ops::Range;

use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    namespace::PartSpec,
    tier::Tier,
};
use tokio::time::{Duration, Instant, timeout_at};

use super::{
    FetchedBlock, GetOptions, GetSink, GetSummary, Handle, HashList, LookupOptions, MissReason,
    PiecePlace,
    connect::timed_out,
    get::Patience,
    placements::{Name, Route},
};
use crate::limits::HOLDER_SILENCE_MAX;

const DOING: &str = "get from a holder";
/// What is left of a deadline is divided by this for the silence of one holder, so that there is time for others.
const SILENCE_DIVISOR: u32 = 2;
/// And by this for the end, so that misses are told before the deadline.
const MARGIN_DIVISOR: u32 = 16;
/// The shortest deadline that can be told.
const LEFT_MIN: Duration = Duration::from_millis(1);

/// The deadlines of all of it.
#[derive(Clone, Copy)]
struct Clock {
    patience: Patience,
    /// When the caller's own deadline is, if there is one.
    due: Option<Instant>,
}

/// Blocks on their way to the sink.
struct Track<'s, S> {
    sink: &'s mut S,
    /// The position that comes next.
    next: u32,
    summary: GetSummary,
    missed: Vec<Range<u32>>,
    /// They come from another member.
    is_remote: bool,
    /// The first block that is not there is not told: it may be elsewhere.
    holds_back: bool,
    /// It has come: what follows will be asked for again.
    held: bool,
}

impl Handle {
    /// Fetches blocks from wherever they are.
    pub(super) async fn get_spread<S: GetSink>(
        &self,
        hashes: &HashList,
        parts: &[(u32, PartSpec)],
        options: &GetOptions<'_>,
        patience: Patience,
        sink: &mut S,
    ) -> Result<GetSummary> {
        let due = options.deadline.map(|deadline| Instant::now() + deadline);
        let clock = Clock { patience, due };
        let mut total = GetSummary::default();
        let (mut from, mut may_ask) = (0, true);
        while from < hashes.len() {
            let rest = hashes.slice(from..hashes.len());
            let Route { blocks, holder } = self.placements.route(&rest);
            let slice = (from, &rest.slice(0..blocks));
            let options = &GetOptions { deadline: clock.left(), ..options.clone() };
            if let Some(holder) = holder {
                total += self.get_from(&holder, slice, parts, (options, clock), sink).await;
                from += blocks;
            } else {
                let mut track = Track::new(sink, from)?;
                track.holds_back = may_ask;
                let stop_at_miss = options.stop_at_miss || may_ask;
                let own = GetOptions { stop_at_miss, ..options.clone() };
                self.get_here(slice, parts, &own, patience, &mut track).await?;
                total += track.summary;
                from = track.next as usize;
                if track.held {
                    may_ask = false;
                    let missing = hashes.slice(from..hashes.len());
                    self.ask_where(&missing, options.stop_at_miss, clock).await;
                }
            }
            if options.stop_at_miss && total.missed > 0 {
                break;
            }
        }
        Ok(total)
    }

    /// Has it found out, and remembered, where `hashes` are.
    async fn ask_where(&self, hashes: &HashList, prefix_only: bool, clock: Clock) {
        let options = LookupOptions { sparse: !prefix_only, ..LookupOptions::default() };
        let hashes = hashes.slice(0..self.limits().lookup_hashes_max);
        let asking = self.lookup(&hashes, options);
        match timeout_at(clock.patience().until, asking).await {
            Ok(Ok(_found)) => {}
            Ok(Err(error)) => tracing::debug!(%error, "not known whether blocks are elsewhere"),
            Err(_elapsed) => tracing::debug!("no time to know whether blocks are elsewhere"),
        }
    }

    /// Fetches blocks from another member; what does not come is a miss, and is not looked for there again.
    async fn get_from<S: GetSink>(
        &self,
        holder: &Name,
        (base, hashes): (usize, &HashList),
        parts: &[(u32, PartSpec)],
        (options, clock): (&GetOptions<'_>, Clock),
        sink: &mut S,
    ) -> GetSummary {
        let Ok(mut track) = Track::new(sink, base) else { return GetSummary::default() };
        track.is_remote = true;
        // Leases are of the server that has granted them.
        let options = &GetOptions { lease: None, ..options.clone() };
        let (start, end) = (track.next, track.next.saturating_add(blocks_of(hashes)));
        let patience = clock.patience();
        let reading =
            self.read_from(holder, (base, hashes), parts, (options, patience), &mut track);
        let ended = match timeout_at(patience.until, reading).await {
            Ok(ended) => ended,
            Err(_elapsed) => Err(timed_out(DOING, patience.stall)),
        };
        if let Err(error) = ended {
            tracing::info!(%holder, %error, "blocks of a holder are misses");
            self.placements.forget_holder(holder);
            if track.next < end {
                track.miss(track.next..end, reason_of(&error));
            }
        }
        for Range { start: first, end } in track.missed {
            let (first, end) = (first.saturating_sub(start), end.saturating_sub(start));
            self.placements.forget(&hashes.slice(first as usize..end as usize));
        }
        track.summary
    }

    async fn read_from<S: GetSink>(
        &self,
        holder: &str,
        slice: (usize, &HashList),
        parts: &[(u32, PartSpec)],
        (options, patience): (&GetOptions<'_>, Patience),
        track: &mut Track<'_, S>,
    ) -> Result<()> {
        let there = self.at(&self.client.holder(holder).await?);
        let before = track.next;
        match there.get_here(slice, parts, options, patience, track).await {
            // Nobody has opened it there since that server was started.
            Err(error) if error.kind() == ErrorKind::UnknownNamespace && track.next == before => {
                there.open_again().await?;
                there.get_here(slice, parts, options, patience, track).await.map(drop)
            }
            ended => ended.map(drop),
        }
    }
}

impl Clock {
    /// What is left of the caller's deadline; not nothing, which would be a server's default.
    fn left(&self) -> Option<Duration> {
        let left = |due: Instant| due.saturating_duration_since(Instant::now());
        self.due.map(|due| left(due).max(LEFT_MIN))
    }

    /// How long the next holder is waited for.
    fn patience(&self) -> Patience {
        let Patience { stall, until } = self.patience;
        let left = self.left().unwrap_or(Duration::MAX);
        let now = Instant::now();
        let within = left.saturating_sub(left / MARGIN_DIVISOR);
        Patience {
            stall: stall.min(HOLDER_SILENCE_MAX).min(left / SILENCE_DIVISOR),
            until: now.checked_add(within).map_or(until, |end| end.min(until)),
        }
    }
}

/// Why blocks are a miss whose holder has failed.
fn reason_of(error: &Error) -> MissReason {
    match error.kind() {
        ErrorKind::Timeout => MissReason::Timeout,
        ErrorKind::Exhausted { .. } => MissReason::Busy,
        ErrorKind::Invalid
        | ErrorKind::Unauthenticated
        | ErrorKind::UnknownNamespace
        | ErrorKind::LayoutMismatch
        | ErrorKind::LeaseExpired
        | ErrorKind::Unavailable
        | ErrorKind::Cancelled
        | ErrorKind::Corrupt
        | ErrorKind::Unsupported
        | ErrorKind::Internal => MissReason::Absent,
    }
}

fn blocks_of(hashes: &HashList) -> u32 {
    u32::try_from(hashes.len()).unwrap_or(u32::MAX)
}

impl<'s, S> Track<'s, S> {
    /// To `sink`, from this position on.
    fn new(sink: &'s mut S, from: usize) -> Result<Self> {
        let next = u32::try_from(from).map_err(|_too_many| {
            Error::invalid(format!("hashes: {from} given, at most {} allowed", u32::MAX))
        })?;
        Ok(Self {
            sink,
            next,
            summary: GetSummary::default(),
            missed: Vec::new(),
            is_remote: false,
            holds_back: false,
            held: false,
        })
    }
}

impl<S: GetSink> GetSink for Track<'_, S> {
    fn room(&mut self, place: PiecePlace) -> Option<&mut [u8]> {
        if self.held { None } else { self.sink.room(place) }
    }

    fn block(&mut self, block: FetchedBlock<'_>) {
        if self.held {
            return;
        }
        let (tier, bytes): (Tier, usize) = (block.tier, block.len());
        self.next = block.position + 1;
        self.summary.count(tier, bytes);
        self.summary.remote += u64::from(self.is_remote);
        self.sink.block(block);
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        self.held |= self.holds_back && reason == MissReason::Absent;
        if self.held {
            return;
        }
        self.next = positions.end;
        self.summary.missed += u64::from(positions.end.saturating_sub(positions.start));
        self.summary.corrupt_here += u64::from(reason == MissReason::CorruptHere);
        self.missed.push(positions.clone());
        self.sink.miss(positions, reason);
    }
}
