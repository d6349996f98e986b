//! Put: one batch. An offer, then bytes for what is wanted, straight into staging.
//!
//! Dropping the flow, for whatever reason, drops the batch, which gives up every claim that did not
//! complete. A batch also ends with its session, and when the client is silent for too long, because
//! claims keep others waiting. A client that does not read its answers may keep the flow from being
//! asked anything: so the claims are watched from outside of it.
//!
//! In a durable put the results of stored blocks wait until nvme has them, see [`super::durable`].

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;
use kvstrata_tiers::{
    block::BlockHash,
    error::{Error, ErrorKind, Result},
    namespace::Namespace,
    stack::{Claim, Filled, Offer, Piece, PutBatch, PutOutcome, Span},
    tier::Tier,
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::durable::Durable;
use crate::{
    auth::{Bearer, Rates},
    id::SessionId,
    limits::{DURABLE_DEADLINE, PUT_BLOCKS_MAX, PUT_IDLE_MAX},
    metrics::{PutLabel, ServerMetrics},
    node::Node,
    session::{PutGuard, Session},
};

/// What is offered.
#[derive(Debug)]
pub(crate) struct PutAsk<'a> {
    /// The session that owns the put.
    pub(crate) session: SessionId,
    /// Id of the namespace.
    pub(crate) namespace_id: &'a [u8],
    /// Packed hashes.
    pub(crate) hashes: &'a Bytes,
    /// Indices into the declared parts; empty: all.
    pub(crate) parts: &'a [u32],
    /// One checksum for each (block, part), blocks outermost.
    pub(crate) checksums: &'a [u64],
    /// Hash before the first one; empty at the root.
    pub(crate) parent: &'a [u8],
    /// The length of each value of an opaque namespace.
    pub(crate) lengths: &'a [u32],
    /// Results of stored blocks wait for nvme.
    pub(crate) durable: bool,
}

/// What is wanted of an offer.
#[derive(Debug)]
pub(crate) struct Wanted {
    /// Positions, each from the first to before the second.
    pub(crate) ranges: Vec<(u32, u32)>,
    /// When to offer again what was refused.
    pub(crate) retry_after: Option<Duration>,
}

/// Outcomes as ranges of positions.
#[derive(Debug, Default)]
pub(crate) struct Results {
    /// From the first position to before the second.
    pub(crate) ranges: Vec<(u32, u32, PutLabel)>,
}

impl Results {
    /// Adds a position, which joins the last range if it follows it with the same outcome.
    pub(crate) fn push(&mut self, position: u32, outcome: PutLabel) {
        let end = position.saturating_add(1);
        match self.ranges.last_mut() {
            Some((_, last, same)) if *last == position && *same == outcome => *last = end,
            _ => self.ranges.push((position, end, outcome)),
        }
    }

    /// Adds later results.
    pub(crate) fn append(&mut self, later: Self) {
        for (start, end, outcome) in later.ranges {
            match self.ranges.last_mut() {
                Some((_, last, same)) if *last == start && *same == outcome => *last = end,
                _ => self.ranges.push((start, end, outcome)),
            }
        }
    }
}

/// A put under way.
pub(crate) struct PutFlow {
    session: Arc<Session>,
    _open: PutGuard,
    metrics: ServerMetrics,
    rates: Arc<Rates>,
    held: Arc<Mutex<Held>>,
    /// Wanted positions that are not settled.
    missing: usize,
    /// Positions that were settled before all their bytes had come, which nobody wants any more.
    dropped: HashSet<u32>,
    /// Results that nobody has asked for.
    known: Results,
    /// Results that wait for nvme; none unless the put is durable.
    durable: Option<Durable>,
    /// Ends the watch over the claims; none when every wanted position is complete.
    watch: Option<DropGuard>,
}

/// The claims of a batch, shared with the task that watches over them.
struct Held {
    /// None when every wanted position is complete, or when they were given up.
    claims: Option<PutBatch>,
    given_up: Option<GivenUp>,
    /// When the client was last heard.
    heard: Instant,
}

/// Why claims were given up although their put goes on.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GivenUp {
    /// The session that owned them has ended.
    SessionEnded,
    /// The client said nothing for too long.
    Silence,
}

impl GivenUp {
    /// What the client is told.
    pub(crate) fn error(self) -> Error {
        match self {
            Self::SessionEnded => Error::new(ErrorKind::Cancelled, "put: its session has ended"),
            Self::Silence => {
                let text = format!("put: no message within {} s", PUT_IDLE_MAX.as_secs());
                Error::new(ErrorKind::Timeout, text)
            }
        }
    }
}

impl Held {
    /// The claims, if there is still something that bytes for `position` can be for.
    fn claims(&mut self, position: u32) -> Result<&mut PutBatch> {
        if let Some(why) = self.given_up {
            return Err(why.error());
        }
        self.claims.as_mut().ok_or_else(|| {
            Error::invalid(format!(
                "data.parts.index: {position} given, but every wanted position is complete"
            ))
        })
    }
}

impl PutFlow {
    /// Claims what is offered and absent; returns what is wanted.
    ///
    /// # Errors
    /// What the offer can be refused for, by field.
    pub(crate) fn open(node: &Node, bearer: &Bearer, ask: &PutAsk<'_>) -> Result<(Self, Wanted)> {
        let session = node.session(bearer, ask.session)?;
        let namespace = node.namespace(bearer, ask.namespace_id)?;
        let hashes = namespace.hashes(ask.hashes, PUT_BLOCKS_MAX, "hashes")?;
        if ask.durable && !node.stack.has_tier(Tier::Nvme) {
            let text = "durable: true given, but this node has no nvme tier; false allowed";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        bearer.rates().may_move()?;
        let open = session.begin_put()?;
        let offer = Offer {
            hashes,
            parts: ask.parts,
            checksums: ask.checksums,
            parent: parent(&namespace, ask.parent)?,
            lengths: ask.lengths,
        };
        let batch = node.stack.put(&namespace, offer)?;
        node.told.offered(node, &namespace, hashes);
        let retry_after = batch.retry_after();
        let (ranges, known, missing) = sort_claims(batch.claims());
        let durable =
            ask.durable.then(|| Durable::new(node.stack.clone(), namespace, ask.hashes.clone()));
        let held = Held { claims: Some(batch), given_up: None, heard: Instant::now() };
        let mut flow = Self {
            session,
            _open: open,
            metrics: node.metrics.clone(),
            rates: Arc::clone(bearer.rates()),
            held: Arc::new(Mutex::new(held)),
            missing,
            dropped: HashSet::new(),
            known,
            durable,
            watch: None,
        };
        if missing == 0 {
            flow.finish()?;
        } else {
            let gone = CancellationToken::new();
            flow.watch = Some(gone.clone().drop_guard());
            let watching = watch(Arc::clone(&flow.held), flow.session.ended().clone(), gone);
            node.tasks.spawn("put watch", watching);
        }
        Ok((flow, Wanted { ranges, retry_after }))
    }

    /// The session that owns it.
    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    /// Stores a piece.
    ///
    /// # Errors
    /// What the piece can be refused for; what became of those before it stays known.
    pub(crate) fn write(&mut self, piece: Piece<'_>) -> Result<()> {
        if self.dropped.contains(&piece.position) {
            return Ok(());
        }
        let bytes = piece.data.len();
        let outcome = self.held.lock().claims(piece.position)?.write(piece)?;
        self.take(piece.position, Filled { bytes, outcome })
    }

    /// Lets bytes be written in place, see [`PutBatch::fill`]. With an outcome no more are wanted.
    ///
    /// # Errors
    /// As those of [`write`](Self::write).
    pub(crate) fn fill(
        &mut self,
        span: Span,
        fill: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<Filled> {
        if self.dropped.contains(&span.position) {
            return Ok(Filled { bytes: 0, outcome: Some(PutOutcome::Refused) });
        }
        let filled = self.held.lock().claims(span.position)?.fill(span, fill)?;
        self.take(span.position, filled)?;
        Ok(filled)
    }

    fn take(&mut self, position: u32, filled: Filled) -> Result<()> {
        let bytes = u64::try_from(filled.bytes).unwrap_or(u64::MAX);
        self.session.counters().put_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.metrics.record_put_bytes(bytes);
        self.rates.moved(bytes);
        if let Some(outcome) = filled.outcome {
            match outcome {
                PutOutcome::Refused | PutOutcome::Corrupt => self.dropped.insert(position),
                PutOutcome::Stored | PutOutcome::PartStored => false,
            };
            self.known.push(position, label(outcome));
            self.missing = self.missing.saturating_sub(1);
        }
        if self.missing == 0 { self.finish() } else { Ok(()) }
    }

    /// The results that are known and were not asked for yet, but for those that wait for nvme.
    pub(crate) fn results(&mut self) -> Results {
        let known = std::mem::take(&mut self.known);
        let known = match &mut self.durable {
            Some(durable) => durable.hold(known),
            None => known,
        };
        self.count(known)
    }

    /// The results that nvme gives next; waits for ever if none wait for it.
    ///
    /// # Cancel safety
    /// Safe: results are kept until they are returned.
    pub(crate) async fn durable_results(&mut self) -> Results {
        let Some(durable) = &mut self.durable else { return std::future::pending().await };
        let results = durable.next().await;
        self.hear();
        self.count(results)
    }

    fn count(&self, results: Results) -> Results {
        for (start, end, outcome) in &results.ranges {
            self.metrics.record_put(*outcome, u64::from(end.saturating_sub(*start)));
        }
        results
    }

    /// Every wanted position is settled.
    pub(crate) fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Every result that can be known has been told.
    pub(crate) fn is_answered(&self) -> bool {
        self.durable.as_ref().is_none_or(Durable::is_idle)
    }

    /// More data would only wait for nvme.
    pub(crate) fn is_full(&self) -> bool {
        self.durable.as_ref().is_some_and(Durable::is_full)
    }

    /// The client has said something.
    pub(crate) fn hear(&self) {
        self.held.lock().heard = Instant::now();
    }

    /// When a client that is silent is given up. While it is not `read` from, the silence is ours.
    pub(crate) fn expect(&self, read: bool) -> Instant {
        let mut held = self.held.lock();
        if !read {
            held.heard = Instant::now() + DURABLE_DEADLINE;
        }
        held.heard + PUT_IDLE_MAX
    }

    /// Ends the claims well, whether or not all of them are complete.
    ///
    /// # Errors
    /// Why they were given up before.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.watch = None;
        let (claims, given_up) = {
            let mut held = self.held.lock();
            (held.claims.take(), held.given_up)
        };
        if let Some(claims) = claims {
            claims.finish();
        }
        given_up.map_or(Ok(()), |why| Err(why.error()))
    }
}

impl Drop for PutFlow {
    /// The watch ends a moment later; whoever is told of a failed put may offer again at once.
    fn drop(&mut self) {
        let claims = self.held.lock().claims.take();
        drop(claims);
    }
}

/// Gives claims up when their session ends or their client is silent, until they are `gone`.
async fn watch(held: Arc<Mutex<Held>>, ended: CancellationToken, gone: CancellationToken) {
    let why = loop {
        let silent_at = held.lock().heard + PUT_IDLE_MAX;
        tokio::select! {
            biased;
            () = gone.cancelled() => return,
            () = ended.cancelled() => break GivenUp::SessionEnded,
            () = sleep_until(silent_at) => {
                if held.lock().heard + PUT_IDLE_MAX <= Instant::now() {
                    break GivenUp::Silence;
                }
            }
        }
    };
    let claims = {
        let mut held = held.lock();
        held.given_up = Some(why);
        held.claims.take()
    };
    drop(claims);
}

/// Reads the hash before the first one; empty means the root.
///
/// # Errors
/// `Invalid` if it has another length than the namespace declares.
pub(crate) fn parent(namespace: &Namespace, bytes: &[u8]) -> Result<Option<BlockHash>> {
    if bytes.is_empty() {
        return Ok(None);
    }
    if bytes.len() != namespace.hash_bytes() {
        return Err(Error::invalid(format!(
            "parent: {} bytes given, 0 or hash_bytes {} allowed",
            bytes.len(),
            namespace.hash_bytes()
        )));
    }
    BlockHash::new(bytes).map(Some)
}

/// What becomes of a position that is not wanted.
fn unwanted(claim: Claim) -> Option<PutLabel> {
    match claim {
        Claim::Wanted => None,
        Claim::Duplicate => Some(PutLabel::Duplicate),
        Claim::Differs => Some(PutLabel::DuplicateDiffers),
        Claim::Pending => Some(PutLabel::Pending),
        Claim::Refused => Some(PutLabel::Refused),
    }
}

/// What became of a position that was wanted.
fn label(outcome: PutOutcome) -> PutLabel {
    match outcome {
        PutOutcome::Stored => PutLabel::Stored,
        PutOutcome::PartStored => PutLabel::PartStored,
        PutOutcome::Refused => PutLabel::Refused,
        PutOutcome::Corrupt => PutLabel::Corrupt,
    }
}

/// What is wanted, what is not and why, and how many positions are wanted.
fn sort_claims(claims: &[Claim]) -> (Vec<(u32, u32)>, Results, usize) {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    let mut results = Results::default();
    let mut wanted = 0;
    for (position, claim) in (0..).zip(claims) {
        if let Some(outcome) = unwanted(*claim) {
            results.push(position, outcome);
            continue;
        }
        wanted += 1;
        match ranges.last_mut() {
            Some((_, end)) if *end == position => *end = position.saturating_add(1),
            _ => ranges.push((position, position.saturating_add(1))),
        }
    }
    (ranges, results, wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_become_ranges() {
        use Claim::{Differs, Duplicate, Wanted};
        let (ranges, results, wanted) =
            sort_claims(&[Duplicate, Duplicate, Wanted, Wanted, Differs, Wanted, Duplicate]);
        assert_eq!((ranges, wanted), (vec![(2, 4), (5, 6)], 3));
        let expected = [
            (0, 2, PutLabel::Duplicate),
            (4, 5, PutLabel::DuplicateDiffers),
            (6, 7, PutLabel::Duplicate),
        ];
        assert_eq!(results.ranges, expected);
    }

    #[test]
    fn results_out_of_order_stay_apart() {
        let mut results = Results::default();
        [3, 4, 1].into_iter().for_each(|position| results.push(position, PutLabel::Stored));
        assert_eq!(results.ranges, [(3, 5, PutLabel::Stored), (1, 2, PutLabel::Stored)]);
    }
}
