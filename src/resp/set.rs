//! SET: the value goes from the socket to where it stays.
//!
//! Its checksum is made as it comes. The last byte is held back until the words behind the value have
//! been read, so that a value is not readable before it is known whether the command means what we do.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use kvstrata_tiers::{
    block::BlockHash,
    checksum::PartHasher,
    error::Result,
    stack::{PutOutcome, Span},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    time::timeout_at,
};

use super::{
    Resp,
    connection::{Connection, Next},
    input::{Input, Word, slow},
    key::{Half, Key},
    space::Place,
};
use crate::{
    api::Call,
    flow::{PutAsk, PutFlow},
    limits::RESP_KEY_BYTES_MAX,
    metrics::{Op, PutLabel, RespDrop},
    node::Node,
};

/// The longest option.
const OPTION_BYTES_MAX: usize = 32;

/// What the words behind a value say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Options {
    Plain,
    /// Only if there is none.
    IfAbsent,
    Unknown,
}

/// A value on its way.
struct Storing {
    place: Place,
    /// Set for the second one of a pair: the block of the first.
    payload: Option<BlockHash>,
    flow: PutFlow,
    call: Call,
    hasher: PartHasher,
    bytes: u32,
}

/// Reads a value, stores it, and says so.
pub(super) async fn run<R, W>(connection: &mut Connection<R, W>, arguments: usize) -> Result<Next>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let key = connection.input.word(RESP_KEY_BYTES_MAX).await?;
    let bytes = connection.input.length().await?;
    connection.input.expect(bytes);
    let mut storing = begin(connection, key, bytes).await;
    let mut left = bytes;
    if let Ok(storing) = &mut storing {
        left -= storing.take_all_but_one(&mut connection.input).await?;
    }
    connection.input.skip(left.saturating_sub(1)).await?;
    let mut last = [0];
    let last = last.get_mut(..left.min(1)).unwrap_or_default();
    connection.input.exactly(last).await?;
    connection.input.end().await?;
    let options = options(&mut connection.input, arguments - 2).await?;
    let stored = match storing {
        Ok(storing) => finish(&connection.resp, storing, last, options).await,
        Err(reason) => Err(reason),
    };
    match stored {
        Ok(Outcome::Known) if options == Options::IfAbsent => connection.replies.nil(),
        Ok(_) => connection.replies.simple("OK"),
        Err(reason) => {
            connection.resp.node.metrics.resp.record_dropped(reason);
            connection.replies.simple("OK");
        }
    }
    Ok(Next::GoOn)
}

/// Stores a value with its last byte, if that is meant.
async fn finish(
    resp: &Resp,
    storing: Storing,
    last: &[u8],
    options: Options,
) -> Result<Outcome, RespDrop> {
    let (place, payload) = (storing.place.clone(), storing.payload);
    let outcome = storing.finish(last, options)?;
    if let Some(payload) = payload.filter(|_| outcome == Outcome::Stored) {
        resp.pairs.note(&resp.node, place, payload).await;
    }
    Ok(outcome)
}

/// What became of a value that was not dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Stored,
    /// There was one, or somebody else is about to store it.
    Known,
}

/// Claims the place of a value.
async fn begin<R, W>(
    connection: &mut Connection<R, W>,
    key: Word,
    bytes: usize,
) -> Result<Storing, RespDrop>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let Word::Short(key) = key else { return Err(RespDrop::Key) };
    let key = Key::read(&key);
    let node = Arc::clone(&connection.resp.node);
    let longest = node.stack.block_bytes_max();
    let bytes =
        u32::try_from(bytes).ok().filter(|bytes| (1..=longest).contains(&u64::from(*bytes)));
    let bytes = bytes.ok_or(RespDrop::Length)?;
    let refused = |_error| RespDrop::Room;
    let (bearer, session) = connection.session().map_err(refused)?;
    let place = connection.resp.spaces.open(&node, bearer.tenant(), &key).map_err(refused)?;
    make_whole(&node, &place, &key).await?;
    let call = connection.resp.calls.begin(Op::Put);
    let ask = PutAsk {
        session: session.id(),
        namespace_id: place.namespace.id().as_bytes(),
        hashes: &Bytes::copy_from_slice(place.hash.as_bytes()),
        parts: &[],
        checksums: &[],
        parent: &[],
        lengths: &[bytes],
        durable: false,
    };
    match PutFlow::open(&node, &bearer, &ask) {
        Ok((flow, _wanted)) => {
            let hasher = PartHasher::new(place.namespace.id(), &place.hash, 0, 0);
            let second = key.pair.filter(|pair| pair.half == Half::Metadata);
            let payload = second.map(|pair| pair.twin);
            Ok(Storing { place, payload, flow, call, hasher, bytes })
        }
        Err(error) => {
            call.finish(Some(&error));
            Err(RespDrop::Room)
        }
    }
}

/// Sees to it that two values that belong together are of one making: the first one takes away what is
/// left of an earlier pair, and the second one is of no use without the first.
async fn make_whole(node: &Node, place: &Place, key: &Key) -> Result<(), RespDrop> {
    let Some(pair) = &key.pair else { return Ok(()) };
    let twin = place.of(pair.twin);
    let (this_is_here, twin_is_here) = (place.len(node).is_some(), twin.len(node).is_some());
    match (pair.half, this_is_here, twin_is_here) {
        (Half::Metadata, _, false) => Err(RespDrop::Torn),
        (Half::KvBytes, true, false) => gone(place.remove(node).await),
        (Half::KvBytes, false, true) => gone(twin.remove(node).await),
        (Half::Metadata, _, true) | (Half::KvBytes, true, true) | (Half::KvBytes, false, false) => {
            Ok(())
        }
    }
}

/// What cannot be taken away must not be joined by something new.
fn gone(removed: Result<bool>) -> Result<(), RespDrop> {
    removed.map(drop).map_err(|_error| RespDrop::Torn)
}

impl Storing {
    /// Reads all bytes but the last one, as long as they are wanted; returns how many were read.
    async fn take_all_but_one<R>(&mut self, input: &mut Input<R>) -> Result<usize>
    where
        R: AsyncRead + Unpin,
    {
        let mut offset = 0;
        while offset + 1 < self.bytes && !self.flow.is_complete() {
            let deadline = input.deadline();
            let filling = poll_fn(|cx| self.poll_fill(cx, offset, input));
            offset += timeout_at(deadline, filling).await.map_err(slow)??;
            self.flow.hear();
        }
        Ok(usize::try_from(offset).unwrap_or(usize::MAX))
    }

    /// One read: how many bytes.
    fn poll_fill<R: AsyncRead + Unpin>(
        &mut self,
        cx: &mut Context<'_>,
        offset: u32,
        input: &mut Input<R>,
    ) -> Poll<Result<u32>> {
        let mut read = Poll::Ready(Ok(0));
        let hasher = &mut self.hasher;
        let filled = self.flow.fill(span(self.bytes, offset, self.bytes - 1 - offset, 0), |room| {
            read = input.poll_some(cx, room);
            let bytes = match &read {
                Poll::Ready(Ok(bytes)) => *bytes,
                Poll::Ready(Err(_)) | Poll::Pending => 0,
            };
            hasher.update(room.get(..bytes).unwrap_or_default());
            bytes
        });
        match (filled, read) {
            (Err(refused), _) => Poll::Ready(Err(refused)),
            (Ok(_), read) => read.map_ok(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX)),
        }
    }

    /// Stores the value with its last byte, if that is meant.
    fn finish(mut self, last: &[u8], options: Options) -> Result<Outcome, RespDrop> {
        let mut outcome = Ok(Outcome::Known);
        let mut failure = None;
        if options == Options::Unknown {
            outcome = Err(RespDrop::Option);
        } else if !self.flow.is_complete() {
            self.hasher.update(last);
            let span = span(self.bytes, self.bytes - 1, 1, self.hasher.checksum());
            let filled = self.flow.fill(span, |room| {
                room.copy_from_slice(last);
                last.len()
            });
            outcome = match &filled {
                Ok(filled) if filled.outcome == Some(PutOutcome::Stored) => Ok(Outcome::Stored),
                Ok(_) | Err(_) => Err(RespDrop::Room),
            };
            failure = filled.err();
        }
        let results = self.flow.results();
        let refused = results.ranges.iter().any(|(_, _, label)| *label == PutLabel::Refused);
        self.call.finish(failure.as_ref());
        if refused { Err(RespDrop::Room) } else { outcome }
    }
}

/// Some bytes of the one value of a put.
fn span(whole: u32, offset: u32, bytes: u32, checksum: u64) -> Span {
    Span { position: 0, part: 0, offset, bytes, checksum, part_bytes: whole }
}

/// Reads the words behind a value.
async fn options<R: AsyncRead + Unpin>(input: &mut Input<R>, words: usize) -> Result<Options> {
    let mut options = Options::Plain;
    let mut left = words;
    while left > 0 {
        left -= 1;
        let word = input.word(OPTION_BYTES_MAX).await?.into_bytes().to_ascii_uppercase();
        match word.as_slice() {
            b"NX" if options == Options::Plain => options = Options::IfAbsent,
            b"EX" | b"PX" | b"EXAT" | b"PXAT" if left > 0 => {
                left -= 1;
                let time = input.word(OPTION_BYTES_MAX).await?.into_bytes();
                if time.is_empty() || !time.iter().all(u8::is_ascii_digit) {
                    options = Options::Unknown;
                }
            }
            _ => options = Options::Unknown,
        }
    }
    Ok(options)
}
