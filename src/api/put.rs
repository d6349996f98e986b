//! Put: one stream is one batch. Offer, then bytes for what is wanted, copied straight into staging.
//!
//! The responses are made by polling, without a task or a queue of their own: the client's pace of
//! reading results and sending bytes is the only pace there is, and dropping the stream, for whatever
//! reason, drops the batch, which gives up every claim that did not complete. A batch also ends with
//! its session, and when the client is silent for too long, because claims keep others waiting. A
//! client that does not read its responses keeps them from being polled: so the claims are watched
//! from outside of them.
//!
//! In a durable put the results of stored blocks wait until nvme has them, see [`super::durable`].

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
};

use futures_util::{Stream, stream};
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    stack::{Claim, Offer, Piece, PutBatch, PutOutcome},
    tier::Tier,
};
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, Streaming};

use super::{Node, convert, durable::Durable, status};
use crate::{
    id::SessionId,
    limits::{DURABLE_DEADLINE, PUT_BLOCKS_MAX, PUT_IDLE_MAX},
    metrics::PutLabel,
    session::{PutGuard, Session},
};

/// The responses to one put stream.
pub(super) fn responses(
    node: Arc<Node>,
    tenant: String,
    incoming: Streaming<wire::PutRequest>,
) -> impl Stream<Item = Result<wire::PutResponse, Status>> {
    let (outbox, batch) = (VecDeque::new(), None);
    let call = PutCall { node, tenant, incoming, closed: false, outbox, batch };
    stream::unfold(Some(call), async |call| {
        let mut call = call?;
        match call.next().await {
            Ok(Some(response)) => Some((Ok(response), Some(call))),
            Ok(None) => None,
            Err(status) => Some((Err(status), None)),
        }
    })
}

struct PutCall {
    node: Arc<Node>,
    tenant: String,
    incoming: Streaming<wire::PutRequest>,
    /// The client has sent all.
    closed: bool,
    outbox: VecDeque<wire::PutResponse>,
    /// None before the offer.
    batch: Option<OpenBatch>,
}

struct OpenBatch {
    session: Arc<Session>,
    _open: PutGuard,
    held: Arc<Mutex<Held>>,
    missing: usize,
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

/// Why claims were given up although their stream lives.
#[derive(Debug, Clone, Copy)]
enum GivenUp {
    SessionEnded,
    Silence,
}

impl GivenUp {
    fn error(self) -> Error {
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
    fn write(&mut self, part: &wire::PartData) -> Result<Option<PutOutcome>> {
        if let Some(why) = self.given_up {
            return Err(why.error());
        }
        let Some(claims) = &mut self.claims else {
            return Err(Error::invalid(format!(
                "data.parts.index: {} given, but every wanted position is complete",
                part.index
            )));
        };
        claims.write(Piece {
            position: part.index,
            part: part.part,
            offset: part.offset,
            data: &part.data,
            checksum: part.checksum,
            part_bytes: part.part_bytes,
        })
    }
}

impl OpenBatch {
    /// Stores parts until one is refused; what became of those before it is in `results`.
    async fn write(
        &mut self,
        parts: Vec<wire::PartData>,
        results: &mut Results,
        bytes: &mut u64,
    ) -> Result<()> {
        for part in parts {
            let outcome = self.held.lock().write(&part)?;
            *bytes = bytes.saturating_add(u64::try_from(part.data.len()).unwrap_or(u64::MAX));
            if let Some(outcome) = outcome {
                results.push(part.index, convert::outcome(outcome));
                self.missing = self.missing.saturating_sub(1);
            }
            if self.missing == 0 {
                self.finish()?;
            }
            // A message of many large parts must not keep the other calls of this thread waiting.
            tokio::task::consume_budget().await;
        }
        Ok(())
    }

    /// Every result that can be known has been told.
    fn is_answered(&self) -> bool {
        self.durable.as_ref().is_none_or(Durable::is_idle)
    }

    /// When a client that is silent is given up. While it is not `read` from, the silence is ours.
    fn expect(&self, read: bool) -> Instant {
        let mut held = self.held.lock();
        if !read {
            held.heard = Instant::now() + DURABLE_DEADLINE;
        }
        held.heard + PUT_IDLE_MAX
    }

    /// Ends the claims well, whether or not all of them are complete.
    fn finish(&mut self) -> Result<()> {
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

impl Drop for OpenBatch {
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

/// What a put goes on with.
enum Event {
    Received(wire::PutRequest),
    Durable(Results),
    /// The client has sent all.
    Closed,
}

fn received(message: Result<Option<wire::PutRequest>, Status>) -> Result<Event, Status> {
    match message {
        Ok(Some(request)) => Ok(Event::Received(request)),
        Ok(None) => Ok(Event::Closed),
        Err(failed) => {
            let code = status::of_unreadable(failed.code(), failed.message());
            Err(Status::new(code, failed.message()))
        }
    }
}

async fn next_durable(durable: &mut Option<Durable>) -> Results {
    match durable {
        Some(durable) => durable.next().await,
        None => std::future::pending().await,
    }
}

impl PutCall {
    /// The next response; none at the end of the stream.
    async fn next(&mut self) -> Result<Option<wire::PutResponse>, Status> {
        loop {
            if let Some(response) = self.outbox.pop_front() {
                return Ok(Some(response));
            }
            match self.next_event().await? {
                Event::Received(request) => {
                    self.take(request).await.map_err(|why| status::from_error(&why))?;
                }
                Event::Durable(results) => self.report(results),
                Event::Closed => {
                    self.closed = true;
                    let ended = self.batch.as_mut().map_or(Ok(()), OpenBatch::finish);
                    ended.map_err(|why| status::from_error(&why))?;
                    // What waits for nvme is still to be answered.
                    if self.batch.as_ref().is_none_or(OpenBatch::is_answered) {
                        self.batch = None;
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Waits for a message, for results of a durable put, or for the end of what has to be waited for.
    async fn next_event(&mut self) -> Result<Event, Status> {
        let Self { incoming, batch, closed, .. } = self;
        let Some(batch) = batch else {
            let message = tokio::time::timeout(PUT_IDLE_MAX, incoming.message()).await;
            let silence = || status::from_error(&GivenUp::Silence.error());
            return received(message.map_err(|_elapsed| silence())?);
        };
        if *closed && batch.is_answered() {
            return Ok(Event::Closed);
        }
        let session = Arc::clone(&batch.session);
        let reads = !*closed && !batch.durable.as_ref().is_some_and(Durable::is_full);
        let silent_at = batch.expect(reads);
        tokio::select! {
            biased;
            () = session.ended().cancelled() => {
                Err(status::from_error(&GivenUp::SessionEnded.error()))
            }
            results = next_durable(&mut batch.durable) => {
                batch.held.lock().heard = Instant::now();
                Ok(Event::Durable(results))
            }
            message = timeout_at(silent_at, incoming.message()), if reads => match message {
                Ok(message) => {
                    batch.held.lock().heard = Instant::now();
                    received(message)
                }
                // Nothing waits for a batch that is complete; a client may be slow to close it.
                Err(_elapsed) if batch.missing == 0 => Ok(Event::Closed),
                Err(_elapsed) => Err(status::from_error(&GivenUp::Silence.error())),
            },
        }
    }

    async fn take(&mut self, request: wire::PutRequest) -> Result<()> {
        use wire::put_request::Message;
        match (request.message, &mut self.batch) {
            (Some(Message::Offer(offer)), None) => self.open(&offer),
            (Some(Message::Data(data)), Some(_)) => self.store(data).await,
            (Some(Message::Offer(_)), Some(_)) => {
                Err(Error::invalid("offer: a second one given, one stream is one batch"))
            }
            (Some(Message::Data(_)), None) => {
                Err(Error::invalid("data: given first, the offer must come before it"))
            }
            (None, _) => Err(Error::invalid("message: nothing given, offer or data required")),
        }
    }

    fn open(&mut self, offer: &wire::PutOffer) -> Result<()> {
        let node = &self.node;
        let session = node.sessions.find(SessionId::read("session_id", &offer.session_id)?)?;
        let namespace = node.namespace(&self.tenant, &offer.namespace_id)?;
        let hashes = namespace.hashes(&offer.hashes, PUT_BLOCKS_MAX, "hashes")?;
        if offer.durable && !node.stack.has_tier(Tier::Nvme) {
            let text = "durable: true given, but this node has no nvme tier; false allowed";
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let open = session.begin_put()?;
        let batch = node.stack.put(
            &namespace,
            Offer {
                hashes,
                parts: &offer.parts,
                checksums: &offer.checksums,
                parent: convert::parent(&namespace, &offer.parent)?,
                lengths: &offer.lengths,
            },
        )?;
        let retry_after_ms = batch.retry_after().map_or(0, convert::millis);
        let (ranges, results, missing) = sort_claims(batch.claims());
        let wanted = wire::PutWanted { ranges, retry_after_ms };
        self.outbox.push_back(response(wire::put_response::Message::Wanted(wanted)));
        let durable = offer
            .durable
            .then(|| Durable::new(node.stack.clone(), namespace, offer.hashes.clone()));
        let held = Held { claims: Some(batch), given_up: None, heard: Instant::now() };
        let held = Arc::new(Mutex::new(held));
        let mut batch = OpenBatch { session, _open: open, held, missing, durable, watch: None };
        if missing == 0 {
            batch.finish()?;
        } else {
            let gone = CancellationToken::new();
            batch.watch = Some(gone.clone().drop_guard());
            let watching = watch(Arc::clone(&batch.held), batch.session.ended().clone(), gone);
            self.node.tasks.spawn("put watch", watching);
        }
        self.batch = Some(batch);
        self.send(results);
        Ok(())
    }

    async fn store(&mut self, data: wire::PutData) -> Result<()> {
        let Some(batch) = &mut self.batch else { return Ok(()) };
        let mut results = Results::default();
        let mut bytes = 0_u64;
        let stored = batch.write(data.parts, &mut results, &mut bytes).await;
        batch.session.counters().put_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.node.metrics.record_put_bytes(bytes);
        self.send(results);
        stored
    }

    /// Sends results, but for those that wait for nvme.
    fn send(&mut self, results: Results) {
        let results = match self.batch.as_mut().and_then(|batch| batch.durable.as_mut()) {
            Some(durable) => durable.hold(results),
            None => results,
        };
        self.report(results);
    }

    fn report(&mut self, results: Results) {
        if results.ranges.is_empty() {
            return;
        }
        let mut sent = Vec::with_capacity(results.ranges.len());
        for (start, end, outcome) in results.ranges {
            self.node.metrics.record_put(outcome, u64::from(end.saturating_sub(start)));
            let outcome = convert::put_outcome(outcome).into();
            sent.push(wire::PutResult { start, end, outcome });
        }
        let results = wire::PutResults { results: sent };
        self.outbox.push_back(response(wire::put_response::Message::Results(results)));
    }
}

/// Outcomes as ranges of positions.
#[derive(Debug, Default)]
pub(super) struct Results {
    pub(super) ranges: Vec<(u32, u32, PutLabel)>,
}

impl Results {
    /// Adds a position, which joins the last range if it follows it with the same outcome.
    pub(super) fn push(&mut self, position: u32, outcome: PutLabel) {
        let end = position.saturating_add(1);
        match self.ranges.last_mut() {
            Some((_, last, same)) if *last == position && *same == outcome => *last = end,
            _ => self.ranges.push((position, end, outcome)),
        }
    }
}

/// What is wanted, what is not and why, and how many positions are wanted.
fn sort_claims(claims: &[Claim]) -> (Vec<wire::Range>, Results, usize) {
    let mut ranges: Vec<wire::Range> = Vec::new();
    let mut results = Results::default();
    let mut wanted = 0;
    for (position, claim) in (0..).zip(claims) {
        if let Some(outcome) = convert::claim(*claim) {
            results.push(position, outcome);
            continue;
        }
        wanted += 1;
        match ranges.last_mut() {
            Some(last) if last.end == position => last.end = position.saturating_add(1),
            _ => ranges.push(wire::Range { start: position, end: position.saturating_add(1) }),
        }
    }
    (ranges, results, wanted)
}

fn response(message: wire::put_response::Message) -> wire::PutResponse {
    wire::PutResponse { message: Some(message) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_become_ranges() {
        use Claim::{Differs, Duplicate, Wanted};
        let (ranges, results, wanted) =
            sort_claims(&[Duplicate, Duplicate, Wanted, Wanted, Differs, Wanted, Duplicate]);
        let ranges: Vec<_> = ranges.iter().map(|range| (range.start, range.end)).collect();
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
