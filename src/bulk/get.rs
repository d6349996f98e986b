//! A get on a connection: the flow's blocks as frames, as far as there is credit.

use std::{ops::Range, sync::Arc};

use futures_util::FutureExt;
use kvstrata_tiers::{
    checksum::PartHasher,
    error::{Error, ErrorKind, Result},
    stack::PartBytes,
};
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::{
    body::{Get, ID_BYTES, Place, STOP_AT_MISS, push_miss},
    frame::{Header, Kind, push},
    lane::Lane,
    output::Output,
    refused,
    shared_body::Spot,
};
use crate::{
    api::{Call, convert},
    auth::Bearer,
    costs::Via,
    flow::{GetAsk, GetFlow, Ready, Step, count},
    id::{LeaseId, SessionId},
    limits::{
        BULK_BATCH_BYTES, BULK_CREDIT_BYTES_MIN, BULK_PIECE_BYTES, BULK_TOLD_BYTES, GET_STALL_MAX,
    },
    node::Node,
    shm::pins::{Pinned, Pins},
};

/// A get that is being answered.
pub(super) struct Sending {
    request: u32,
    cancelled: CancellationToken,
    call: Call,
    flow: GetFlow,
    /// A block of which something is still to be sent.
    rest: Option<Rest>,
    /// When the client must have taken it all.
    end: Instant,
    failure: Option<Error>,
    /// Blocks are told the places of, unless there is no room for it; none: they are sent.
    pins: Option<Arc<Pins>>,
    /// Bytes told the places of since something was last written.
    told: usize,
    _room: Option<OwnedSemaphorePermit>,
}

struct Rest {
    ready: Ready,
    /// Which of the parts asked for comes next, and from where.
    ordinal: usize,
    offset: usize,
    /// Of what has been appended of that part, unless it needs none.
    hasher: Option<PartHasher>,
}

/// What kept pieces from being appended.
enum Pushed {
    /// Nothing: there are no more.
    All,
    /// There are enough for one write.
    Full,
    /// The part is not right: its last piece was not appended.
    Damaged,
    /// Credit for so many bytes is missing.
    NoCredit(usize),
    /// The client has as much pinned as it may.
    NoRoom,
}

/// Whether a get goes on.
pub(super) enum Made {
    More,
    Done,
}

/// Checks what is asked for and begins to load it.
///
/// # Errors
/// What the request can be refused for, by field.
pub(super) fn begin(
    node: &Node,
    bearer: &Bearer,
    (session, via): (Option<SessionId>, Via),
    header: &Header,
    get: Get,
) -> Result<GetFlow> {
    let lease = match (get.lease, session) {
        (id, _) if id == [0; ID_BYTES] => None,
        (id, Some(session)) => Some((session, LeaseId::read("lease_id", &id)?)),
        (_, None) => {
            let text = "lease_id: given, but the connection's hello names no session";
            return Err(Error::invalid(text));
        }
    };
    let ask = GetAsk {
        namespace_id: &get.namespace,
        hashes: get.hashes,
        parts: get.parts,
        lease,
        deadline_ms: get.deadline_ms,
        stop_at_miss: header.flags & STOP_AT_MISS != 0,
        via,
    };
    GetFlow::begin(node, bearer, ask)
}

impl Sending {
    pub(super) fn new(
        (request, cancelled): (u32, CancellationToken),
        call: Call,
        flow: GetFlow,
        room: Option<OwnedSemaphorePermit>,
        pins: Option<Arc<Pins>>,
    ) -> Self {
        let end = flow.deadline() + GET_STALL_MAX;
        let (rest, failure, told) = (None, None, 0);
        Self { request, cancelled, call, flow, rest, end, failure, pins, told, _room: room }
    }

    /// What was made is being written.
    pub(super) fn hand(&mut self) {
        self.told = 0;
        self.flow.hand();
    }

    /// It has been written.
    pub(super) fn resume(&mut self) {
        self.flow.resume();
    }

    /// It has been answered.
    pub(super) fn finish(self, lane: &Lane) {
        lane.end(self.request);
        self.call.finish(self.failure.as_ref());
    }

    /// Appends what comes next: as many frames as one write takes, or fewer if the next one takes a
    /// while; the last one at the end.
    ///
    /// # Cancel safety
    /// Safe: what was not appended is by the next call.
    pub(super) async fn advance(&mut self, lane: &Lane, out: &mut Output<PartBytes>) -> Made {
        match self.fill(lane, out).await {
            Ok(Made::More) => return Made::More,
            Ok(Made::Done) => {
                out.push(|heads| push(heads, (Kind::End, 0), self.request, 0, |_body| {}));
            }
            Err(error) => {
                out.push(|heads| refused(&error).push(heads, self.request));
                self.failure = Some(error);
            }
        }
        Made::Done
    }

    async fn fill(&mut self, lane: &Lane, out: &mut Output<PartBytes>) -> Result<Made> {
        loop {
            if self.cancelled.is_cancelled() {
                return Err(cancelled());
            }
            match self.push_block(lane, out) {
                Pushed::All => {}
                Pushed::Full => return Ok(Made::More),
                Pushed::Damaged => {
                    if let Some(rest) = self.rest.take() {
                        let miss = self.flow.damaged(&rest.ready);
                        self.push_step(miss, out);
                    }
                }
                Pushed::NoCredit(_) | Pushed::NoRoom if !out.is_empty() => return Ok(Made::More),
                Pushed::NoRoom => {
                    let Self { cancelled: token, end, pins, .. } = &*self;
                    let room = async {
                        if let Some(pins) = pins {
                            pins.wait().await;
                        }
                    };
                    within(token, *end, room).await?;
                    continue;
                }
                Pushed::NoCredit(least) => {
                    let Self { cancelled: token, end, .. } = &*self;
                    within(token, *end, lane.wait_credit(least)).await?;
                    continue;
                }
            }
            let step = match self.flow.next_unverified().now_or_never() {
                Some(step) => step?,
                // The next block takes a while: what is packed should not wait for it.
                None if !out.is_empty() => return Ok(Made::More),
                None => {
                    let Self { flow, cancelled: token, end, .. } = self;
                    within(token, *end, flow.next_unverified()).await??
                }
            };
            match step {
                Some(step) => self.push_step(step, out),
                None => return Ok(Made::Done),
            }
        }
    }

    fn push_step(&mut self, step: Step, out: &mut Output<PartBytes>) {
        match step {
            Step::Block(ready) => {
                self.rest = Some(Rest { ready, ordinal: 0, offset: 0, hasher: None });
            }
            Step::Miss(start, end, reason) => {
                let reason = number(convert::miss_reason(reason));
                out.push(|heads| push_miss(heads, self.request, (start, end), reason));
            }
        }
    }

    /// Appends the block whose turn it is: where it lies if the client has asked for that, else its bytes.
    fn push_block(&mut self, lane: &Lane, out: &mut Output<PartBytes>) -> Pushed {
        let (Some(pins), Some(rest)) = (&self.pins, &self.rest) else {
            return self.push_pieces(lane, out);
        };
        if (rest.ordinal, rest.offset) != (0, 0) {
            return self.push_pieces(lane, out);
        }
        if self.told >= BULK_TOLD_BYTES {
            return Pushed::Full;
        }
        match pins.pin(&rest.ready.block) {
            Pinned::As(pin) => {
                self.told = self.told.saturating_add(rest.ready.block.len());
                self.push_places(&Arc::clone(pins), pin, out);
                Pushed::All
            }
            Pinned::Full => Pushed::NoRoom,
            Pinned::Busy => self.push_pieces(lane, out),
        }
    }

    /// Appends where the parts of the block whose turn it is lie. They are not verified: the client does
    /// that with its copy, and tells of what is not right.
    fn push_places(&mut self, pins: &Pins, pin: u64, out: &mut Output<PartBytes>) {
        let Some(rest) = self.rest.take() else { return };
        let tier = number(convert::tier(rest.ready.block.tier()));
        for &part in self.flow.parts().iter() {
            let Some(view) = rest.ready.block.part(part) else { continue };
            let Some((region, offset)) = pins.arena().place(view.as_ref()) else { continue };
            let part_bytes = count(view.as_ref().len());
            let position = rest.ready.position;
            let checksum = view.checksum();
            let place = Place { position, part, offset: 0, part_bytes, checksum };
            let spot = Spot { place, pin, region, offset };
            out.push(|heads| spot.push(heads, tier, self.request));
        }
        self.flow.deliver(&rest.ready);
    }

    /// Appends the pieces of the block whose turn it is. Each is verified just before it leaves, and the
    /// last one of a part only leaves if the whole part is right.
    fn push_pieces(&mut self, lane: &Lane, out: &mut Output<PartBytes>) -> Pushed {
        let Some(rest) = &mut self.rest else { return Pushed::All };
        let tier = number(convert::tier(rest.ready.block.tier()));
        while let Some(&part) = self.flow.parts().get(rest.ordinal) {
            let view = rest.ready.block.part(part);
            let whole = view.as_ref().map_or(0, |view| view.as_ref().len());
            let left = whole.saturating_sub(rest.offset);
            let Some(view) = view.filter(|_| left > 0) else {
                (rest.ordinal, rest.offset) = (rest.ordinal + 1, 0);
                continue;
            };
            if out.payload_bytes() >= BULK_BATCH_BYTES || out.is_full() {
                return Pushed::Full;
            }
            let most = left.min(BULK_PIECE_BYTES);
            let least = most.min(usize::try_from(BULK_CREDIT_BYTES_MIN).unwrap_or(usize::MAX));
            let Some(bytes) = lane.take_credit(least, most) else { return Pushed::NoCredit(least) };
            let range = rest.offset..rest.offset + bytes;
            if !rest.check(part, &view, range.clone()) {
                lane.add_credit(count(bytes));
                return Pushed::Damaged;
            }
            let place = Place {
                position: rest.ready.position,
                part,
                offset: count(rest.offset),
                part_bytes: count(whole),
                checksum: view.checksum(),
            };
            let request = self.request;
            rest.offset = range.end;
            out.push_payload(view, range, |heads| {
                place.push(heads, (Kind::Block, tier), request, count(bytes));
            });
        }
        if let Some(rest) = self.rest.take() {
            self.flow.deliver(&rest.ready);
        }
        Pushed::All
    }
}

impl Rest {
    /// Takes a piece of a part into account; false if it is the last one and the part is not right.
    fn check(&mut self, part: u32, view: &PartBytes, piece: Range<usize>) -> bool {
        let block = &self.ready.block;
        if block.is_verified() {
            return true;
        }
        let bytes = view.as_ref();
        if piece == (0..bytes.len()) {
            return block.is_right(part);
        }
        if piece.start == 0 {
            self.hasher = block.hasher(part);
        }
        let Some(hasher) = &mut self.hasher else { return false };
        hasher.update(bytes.get(piece.clone()).unwrap_or_default());
        piece.end < bytes.len() || hasher.checksum() == view.checksum()
    }
}

/// The number of a value of the gRPC contract; all are small.
pub(super) fn number(value: impl Into<i32>) -> u8 {
    u8::try_from(value.into()).unwrap_or(0)
}

/// The error of a request that the client does not want any more.
pub(super) fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the client has cancelled it")
}

async fn within<T>(
    token: &CancellationToken,
    end: Instant,
    work: impl Future<Output = T>,
) -> Result<T> {
    tokio::select! {
        biased;
        done = work => Ok(done),
        () = token.cancelled() => Err(cancelled()),
        () = sleep_until(end) => {
            let text = "get: its time is over, and its answer was not read";
            Err(Error::new(ErrorKind::Timeout, text))
        }
    }
}
