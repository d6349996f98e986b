//! A put on a connection: the flow with what is to be told of it.

use std::{
    future::poll_fn,
    pin::pin,
    task::{Context, Poll},
};

use kvstrata_tiers::{
    error::{Error, Result},
    stack::Span,
};
use tokio::{
    io::AsyncRead,
    sync::OwnedSemaphorePermit,
    time::{Instant, timeout_at},
};

use super::{
    body::{DURABLE, Offer, Place, Want, push_results},
    frame::{Header, Kind, bare},
    get::number,
    input::{Input, slow},
};
use crate::{
    api::{Call, convert},
    auth::Bearer,
    flow::{PutAsk, PutFlow, Results, millis},
    id::SessionId,
    node::Node,
};

/// Frames of data after which results are told although the put goes on.
const RESULTS_EVERY: u32 = 32;

/// A put under way.
pub(super) struct OpenPut {
    pub(super) request: u32,
    flow: PutFlow,
    call: Call,
    /// Results that were not told yet.
    results: Results,
    frames: u32,
    /// The client has sent all.
    finished: bool,
    _room: Option<OwnedSemaphorePermit>,
}

/// Claims what is offered.
///
/// # Errors
/// What the offer can be refused for, by field.
pub(super) fn open(
    node: &Node,
    bearer: &Bearer,
    session: Option<SessionId>,
    header: &Header,
    offer: &Offer,
) -> Result<(PutFlow, Want)> {
    let session = session.ok_or_else(|| {
        Error::invalid("session_id: the connection's hello names none, and a put needs one")
    })?;
    let ask = PutAsk {
        session,
        namespace_id: &offer.namespace,
        hashes: &offer.hashes,
        parts: &offer.parts,
        checksums: &offer.checksums,
        parent: &offer.parent,
        lengths: &offer.lengths,
        durable: header.flags & DURABLE != 0,
    };
    let (flow, wanted) = PutFlow::open(node, bearer, &ask)?;
    let retry_after_ms = wanted.retry_after.map_or(0, millis);
    Ok((flow, Want { retry_after_ms, ranges: wanted.ranges }))
}

impl OpenPut {
    /// A put that was opened, and its first answers.
    pub(super) fn new(
        request: u32,
        (mut flow, want): (PutFlow, Want),
        call: Call,
        room: Option<OwnedSemaphorePermit>,
    ) -> (Self, Vec<u8>) {
        let mut answers = Vec::new();
        want.push(&mut answers, request);
        let results = flow.results();
        let (frames, finished) = (0, false);
        let mut put = Self { request, flow, call, results, frames, finished, _room: room };
        put.push_results(&mut answers);
        (put, answers)
    }

    /// Reads the payload of a frame to where it will stay.
    ///
    /// # Errors
    /// Of the outer result: the connection is lost. Of the inner one: the put is refused; then the rest
    /// of the payload is still to be skipped, as many bytes as the number says.
    pub(super) async fn take<R: AsyncRead + Unpin>(
        &mut self,
        place: Place,
        payload_bytes: u32,
        input: &mut Input<R>,
    ) -> Result<(u32, Result<()>)> {
        self.flow.hear();
        let (mut offset, mut left) = (place.offset, payload_bytes);
        while left > 0 {
            let span = Span {
                position: place.position,
                part: place.part,
                offset,
                bytes: left,
                checksum: place.checksum,
                part_bytes: place.part_bytes,
            };
            let deadline = input.deadline();
            let filling = poll_fn(|cx| self.poll_fill(cx, span, input));
            let filled = timeout_at(deadline, filling).await.map_err(|_elapsed| slow())??;
            match filled {
                Ok((bytes, goes_on)) => {
                    offset = offset.saturating_add(bytes);
                    left = left.saturating_sub(bytes);
                    if !goes_on {
                        break;
                    }
                }
                Err(error) => return Ok((left, Err(error))),
            }
        }
        self.flow.hear();
        self.note_frame();
        Ok((left, Ok(())))
    }

    /// Has `copy` write the bytes of a part to where they will stay, from the given byte of `place` on;
    /// it tells how many it has written.
    ///
    /// # Errors
    /// Why the put is refused.
    pub(super) fn store(
        &mut self,
        place: Place,
        bytes: u32,
        copy: impl FnOnce(&mut [u8]) -> usize,
    ) -> Result<()> {
        let span = Span {
            position: place.position,
            part: place.part,
            offset: place.offset,
            bytes,
            checksum: place.checksum,
            part_bytes: place.part_bytes,
        };
        self.flow.hear();
        self.flow.fill(span, copy)?;
        self.note_frame();
        Ok(())
    }

    /// Takes the results of a frame of data into account.
    fn note_frame(&mut self) {
        let results = self.flow.results();
        self.results.append(results);
        self.frames = self.frames.saturating_add(1);
    }

    /// One read: how many bytes, and whether more of them are wanted.
    fn poll_fill<R: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        span: Span,
        input: &mut Input<R>,
    ) -> Poll<Result<Result<(u32, bool)>>> {
        let mut read = Poll::Ready(Ok(0));
        let filled = self.flow.fill(span, |room| {
            read = input.poll_some(cx, room);
            match &read {
                Poll::Ready(Ok(bytes)) => *bytes,
                Poll::Ready(Err(_)) | Poll::Pending => 0,
            }
        });
        match (filled, read) {
            (_, Poll::Ready(Err(lost))) => Poll::Ready(Err(lost)),
            (Err(refused), _) => Poll::Ready(Ok(Err(refused))),
            (Ok(filled), Poll::Ready(Ok(_))) => {
                let bytes = u32::try_from(filled.bytes).unwrap_or(u32::MAX);
                Poll::Ready(Ok(Ok((bytes, filled.outcome.is_none()))))
            }
            (Ok(_), Poll::Pending) => Poll::Pending,
        }
    }

    /// The client has sent all.
    ///
    /// # Errors
    /// Why the put was given up before.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.finished = true;
        self.flow.finish()
    }

    /// The answers that are due, and whether the put is over with them.
    pub(super) fn answers(&mut self) -> (Vec<u8>, bool) {
        let over = self.finished && self.flow.is_answered();
        let mut answers = Vec::new();
        if over || self.finished || self.frames >= RESULTS_EVERY {
            self.push_results(&mut answers);
        }
        if over {
            answers.extend(bare(Kind::End, self.request));
        }
        (answers, over)
    }

    fn push_results(&mut self, answers: &mut Vec<u8>) {
        self.frames = 0;
        let ranges = std::mem::take(&mut self.results).ranges;
        if ranges.is_empty() {
            return;
        }
        let results = ranges.into_iter().map(|(start, end, outcome)| {
            (start, end, u32::from(number(convert::put_outcome(outcome))))
        });
        push_results(answers, self.request, results);
    }

    /// More data would only wait for nvme.
    pub(super) fn is_full(&self) -> bool {
        self.flow.is_full()
    }

    /// When it is given up unless the client says more; none if nothing is expected of it.
    pub(super) fn silent_at(&self, reads: bool) -> Option<Instant> {
        (!self.finished).then(|| self.flow.expect(reads))
    }

    /// Every wanted position is settled.
    pub(super) fn is_complete(&self) -> bool {
        self.flow.is_complete()
    }

    /// Ends the call that it is.
    pub(super) fn end(self, failure: Option<&Error>) {
        self.call.finish(failure);
    }

    fn poll_durable(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let results = {
            let next = pin!(self.flow.durable_results());
            next.poll(cx)
        };
        results.map(|results| {
            self.results.append(results);
            self.frames = RESULTS_EVERY;
        })
    }
}

/// Waits until nvme has given results to one of the puts; returns which.
///
/// # Cancel safety
/// Safe.
pub(super) async fn next_durable(puts: &mut [OpenPut]) -> usize {
    poll_fn(|cx| {
        for (at, put) in puts.iter_mut().enumerate() {
            if put.poll_durable(cx).is_ready() {
                return Poll::Ready(at);
            }
        }
        Poll::Pending
    })
    .await
}
