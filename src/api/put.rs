//! Put: one stream is one batch, in the messages of the contract.
//!
//! The responses are made by polling, without a task or a queue of their own: the client's pace of
//! reading results and sending bytes is the only pace there is, and dropping the stream, for whatever
//! reason, drops the flow and gives up what it claimed.

use std::{collections::VecDeque, sync::Arc};

use futures_util::{Stream, stream};
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    error::{Error, Result},
    stack::Piece,
};
use tokio::time::timeout_at;
use tonic::{Status, Streaming};

use super::{Node, convert, status};
use crate::{
    auth::Bearer,
    flow::{self, GivenUp, PutAsk, PutFlow, Results},
    id::SessionId,
    limits::PUT_IDLE_MAX,
};

/// The responses to one put stream.
pub(super) fn responses(
    node: Arc<Node>,
    bearer: Arc<Bearer>,
    incoming: Streaming<wire::PutRequest>,
) -> impl Stream<Item = Result<wire::PutResponse, Status>> {
    let (outbox, flow) = (VecDeque::new(), None);
    let call = PutCall { node, bearer, incoming, closed: false, outbox, flow };
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
    bearer: Arc<Bearer>,
    incoming: Streaming<wire::PutRequest>,
    /// The client has sent all.
    closed: bool,
    outbox: VecDeque<wire::PutResponse>,
    /// None before the offer.
    flow: Option<PutFlow>,
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
                    let ended = self.flow.as_mut().map_or(Ok(()), PutFlow::finish);
                    ended.map_err(|why| status::from_error(&why))?;
                    // What waits for nvme is still to be answered.
                    if self.flow.as_ref().is_none_or(PutFlow::is_answered) {
                        self.flow = None;
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Waits for a message, for results of a durable put, or for the end of what has to be waited for.
    async fn next_event(&mut self) -> Result<Event, Status> {
        let Self { incoming, flow, closed, .. } = self;
        let silence = || status::from_error(&GivenUp::Silence.error());
        let Some(flow) = flow else {
            let message = tokio::time::timeout(PUT_IDLE_MAX, incoming.message()).await;
            return received(message.map_err(|_elapsed| silence())?);
        };
        if *closed && flow.is_answered() {
            return Ok(Event::Closed);
        }
        let session = Arc::clone(flow.session());
        let reads = !*closed && !flow.is_full();
        let silent_at = flow.expect(reads);
        let complete = flow.is_complete();
        let message = tokio::select! {
            biased;
            () = session.ended().cancelled() => {
                return Err(status::from_error(&GivenUp::SessionEnded.error()));
            }
            results = flow.durable_results() => return Ok(Event::Durable(results)),
            message = timeout_at(silent_at, incoming.message()), if reads => message,
        };
        match message {
            Ok(message) => {
                flow.hear();
                received(message)
            }
            // Nothing waits for a batch that is complete; a client may be slow to close it.
            Err(_elapsed) if complete => Ok(Event::Closed),
            Err(_elapsed) => Err(silence()),
        }
    }

    async fn take(&mut self, request: wire::PutRequest) -> Result<()> {
        use wire::put_request::Message;
        match (request.message, &mut self.flow) {
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
        let ask = PutAsk {
            session: SessionId::read("session_id", &offer.session_id)?,
            namespace_id: &offer.namespace_id,
            hashes: &offer.hashes,
            parts: &offer.parts,
            checksums: &offer.checksums,
            parent: &offer.parent,
            lengths: &offer.lengths,
            durable: offer.durable,
        };
        let (mut flow, wanted) = PutFlow::open(&self.node, &self.bearer, &ask)?;
        let ranges = wanted.ranges.into_iter().map(|(start, end)| wire::Range { start, end });
        let retry_after_ms = wanted.retry_after.map_or(0, flow::millis);
        let wanted = wire::PutWanted { ranges: ranges.collect(), retry_after_ms };
        self.outbox.push_back(response(wire::put_response::Message::Wanted(wanted)));
        let results = flow.results();
        self.flow = Some(flow);
        self.report(results);
        Ok(())
    }

    async fn store(&mut self, data: wire::PutData) -> Result<()> {
        let Some(flow) = &mut self.flow else { return Ok(()) };
        let stored = write(flow, data.parts).await;
        let results = flow.results();
        self.report(results);
        stored
    }

    fn report(&mut self, results: Results) {
        if results.ranges.is_empty() {
            return;
        }
        let result = |(start, end, outcome)| {
            let outcome = convert::put_outcome(outcome).into();
            wire::PutResult { start, end, outcome }
        };
        let results = results.ranges.into_iter().map(result).collect();
        let results = wire::PutResults { results };
        self.outbox.push_back(response(wire::put_response::Message::Results(results)));
    }
}

/// Stores parts until one is refused; what became of those before it is known to the flow.
async fn write(flow: &mut PutFlow, parts: Vec<wire::PartData>) -> Result<()> {
    for part in parts {
        flow.write(Piece {
            position: part.index,
            part: part.part,
            offset: part.offset,
            data: &part.data,
            checksum: part.checksum,
            part_bytes: part.part_bytes,
        })?;
        // A message of many large parts must not keep the other calls of this thread waiting.
        tokio::task::consume_budget().await;
    }
    Ok(())
}

fn response(message: wire::put_response::Message) -> wire::PutResponse {
    wire::PutResponse { message: Some(message) }
}
