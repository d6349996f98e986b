//! Put: one stream is one batch. Offer, then bytes for what is wanted, copied straight into staging.
//!
//! The responses are made by polling, without a task or a queue of their own: the client's pace of
//! reading results and sending bytes is the only pace there is, and dropping the stream, for whatever
//! reason, drops the batch, which gives up every claim that did not complete. A batch also ends with
//! its session, and when the client is silent for too long, because claims keep others waiting.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering},
};

use futures_util::{Stream, stream};
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    stack::{Claim, Offer, Piece, PutBatch},
};
use tonic::{Status, Streaming};

use super::{Node, convert, status};
use crate::{
    id::SessionId,
    limits::{PUT_BLOCKS_MAX, PUT_IDLE_MAX},
    metrics::PutLabel,
    session::{PutGuard, Session},
};

/// The responses to one put stream.
pub(super) fn responses(
    node: Arc<Node>,
    tenant: String,
    incoming: Streaming<wire::PutRequest>,
) -> impl Stream<Item = Result<wire::PutResponse, Status>> {
    let call = PutCall { node, tenant, incoming, outbox: VecDeque::new(), batch: None };
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
    outbox: VecDeque<wire::PutResponse>,
    /// None before the offer.
    batch: Option<OpenBatch>,
}

struct OpenBatch {
    session: Arc<Session>,
    _open: PutGuard,
    /// None when every wanted position is complete.
    claims: Option<PutBatch>,
    missing: usize,
}

impl PutCall {
    /// The next response; none at the end of the stream.
    async fn next(&mut self) -> Result<Option<wire::PutResponse>, Status> {
        loop {
            if let Some(response) = self.outbox.pop_front() {
                return Ok(Some(response));
            }
            let Some(request) = self.receive().await? else {
                if let Some(claims) = self.batch.take().and_then(|batch| batch.claims) {
                    claims.finish();
                }
                return Ok(None);
            };
            self.take(request).await.map_err(|why| status::from_error(&why))?;
        }
    }

    async fn receive(&mut self) -> Result<Option<wire::PutRequest>, Status> {
        let message = tokio::time::timeout(PUT_IDLE_MAX, self.incoming.message());
        let received = match &self.batch {
            None => message.await,
            Some(batch) => match batch.session.ended().run_until_cancelled(message).await {
                Some(received) => received,
                None => return Err(Status::cancelled("put: its session has ended")),
            },
        };
        match received {
            Ok(Ok(request)) => Ok(request),
            Ok(Err(failed)) => {
                let code = status::of_unreadable(failed.code(), failed.message());
                Err(Status::new(code, failed.message()))
            }
            // Nothing waits for a batch that is complete; a client may be slow to close it.
            Err(_elapsed) if self.batch.as_ref().is_some_and(|batch| batch.claims.is_none()) => {
                Ok(None)
            }
            Err(_elapsed) => {
                let text = format!("put: no message within {} s", PUT_IDLE_MAX.as_secs());
                Err(Status::deadline_exceeded(text))
            }
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
        if offer.durable {
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
        self.send(results);
        let claims = if missing == 0 {
            batch.finish();
            None
        } else {
            Some(batch)
        };
        self.batch = Some(OpenBatch { session, _open: open, claims, missing });
        Ok(())
    }

    async fn store(&mut self, data: wire::PutData) -> Result<()> {
        let Some(batch) = &mut self.batch else { return Ok(()) };
        let mut results = Results::default();
        let mut bytes = 0_u64;
        for part in data.parts {
            let Some(claims) = &mut batch.claims else {
                return Err(Error::invalid(format!(
                    "data.parts.index: {} given, but every wanted position is complete",
                    part.index
                )));
            };
            let outcome = claims.write(Piece {
                position: part.index,
                part: part.part,
                offset: part.offset,
                data: &part.data,
                checksum: part.checksum,
                part_bytes: part.part_bytes,
            })?;
            bytes = bytes.saturating_add(u64::try_from(part.data.len()).unwrap_or(u64::MAX));
            if let Some(outcome) = outcome {
                results.push(part.index, convert::outcome(outcome));
                batch.missing = batch.missing.saturating_sub(1);
            }
            if batch.missing == 0
                && let Some(claims) = batch.claims.take()
            {
                claims.finish();
            }
            // A message of many large parts must not keep the other calls of this thread waiting.
            tokio::task::consume_budget().await;
        }
        batch.session.counters().put_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.node.metrics.record_put_bytes(bytes);
        self.send(results);
        Ok(())
    }

    fn send(&mut self, results: Results) {
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
struct Results {
    ranges: Vec<(u32, u32, PutLabel)>,
}

impl Results {
    /// Adds a position, which joins the last range if it follows it with the same outcome.
    fn push(&mut self, position: u32, outcome: PutLabel) {
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
