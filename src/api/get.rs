//! Get: what the flow brings, packed into messages of about one mebibyte.
//!
//! The stream is made by polling; a reader that stalls holds no more than what loads ahead and what is
//! packed, and not for long after its deadline. Payload is not copied here: each piece is a view of the
//! arena that keeps its memory alive until tonic has written it out.

use std::collections::VecDeque;

use bytes::Bytes;
use futures_util::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{error::Result, stack::Block, tier::Tier};
use tonic::Status;

use super::{Node, convert, status, watched};
use crate::{
    auth::Bearer,
    costs::Via,
    flow::{self, GetAsk, GetFlow, Ready, Step},
    id::{LeaseId, SessionId},
    limits::{GET_MESSAGE_BYTES, GET_MESSAGE_PARTS_MAX, GET_STALL_MAX},
    metrics::Missed,
};

/// The responses to one get; the first item is the error of a request that cannot be served.
pub(super) fn responses(
    node: &Node,
    bearer: &Bearer,
    request: wire::GetRequest,
) -> BoxStream<'static, Result<wire::GetResponse, Status>> {
    let call = match GetCall::begin(node, bearer, request) {
        Ok(call) => call,
        Err(why) => return stream::iter([Err(status::from_error(&why))]).boxed(),
    };
    let end = call.flow.deadline() + GET_STALL_MAX;
    let responses = stream::unfold(Some(call), async |call| {
        let mut call = call?;
        match call.next().await {
            Ok(Some(response)) => Some((Ok(response), Some(call))),
            Ok(None) => None,
            Err(why) => Some((Err(status::from_error(&why)), None)),
        }
    });
    watched::until(&node.tasks, "get", end, responses.boxed()).boxed()
}

struct GetCall {
    flow: GetFlow,
    packer: Packer,
    ended: bool,
}

impl GetCall {
    fn begin(node: &Node, bearer: &Bearer, request: wire::GetRequest) -> Result<Self> {
        let lease = if request.lease_id.is_empty() {
            None
        } else {
            let session = SessionId::read("session_id", &request.session_id)?;
            Some((session, LeaseId::read("lease_id", &request.lease_id)?))
        };
        let ask = GetAsk {
            namespace_id: &request.namespace_id,
            hashes: request.hashes,
            parts: request.parts,
            lease,
            deadline_ms: request.deadline_ms,
            stop_at_miss: request.stop_at_miss,
            via: Via::Network,
        };
        let flow = GetFlow::begin(node, bearer, ask)?;
        Ok(Self { flow, packer: Packer::default(), ended: false })
    }

    /// The next message; none at the end.
    async fn next(&mut self) -> Result<Option<wire::GetResponse>> {
        self.flow.resume();
        let message = self.make_next().await;
        self.flow.hand();
        message
    }

    async fn make_next(&mut self) -> Result<Option<wire::GetResponse>> {
        loop {
            if let Some(message) = self.packer.ready.pop_front() {
                return Ok(Some(message));
            }
            if self.ended {
                return Ok(None);
            }
            let step = match self.flow.next().now_or_never() {
                Some(step) => step?,
                None => {
                    // The next block takes a while: what is packed should not wait for it.
                    self.packer.flush_data();
                    if let Some(message) = self.packer.ready.pop_front() {
                        return Ok(Some(message));
                    }
                    self.flow.next().await?
                }
            };
            match step {
                Some(Step::Block(Ready { position, block, .. })) => {
                    self.packer.push_block(position, self.flow.parts(), &block);
                }
                Some(Step::Miss(start, end, reason)) => self.packer.push_miss(start, end, reason),
                None => {
                    self.ended = true;
                    self.packer.flush();
                }
            }
        }
    }
}

/// Packs blocks and misses into messages, in order.
#[derive(Debug, Default)]
struct Packer {
    ready: VecDeque<wire::GetResponse>,
    parts: Vec<wire::PartData>,
    bytes: usize,
    tier: Option<Tier>,
    miss: Option<(u32, u32, Missed)>,
}

impl Packer {
    /// Adds the parts of a block.
    fn push_block(&mut self, index: u32, parts: &[u32], block: &Block) {
        self.flush_miss();
        if self.tier.is_some_and(|tier| tier != block.tier()) {
            self.flush_data();
        }
        self.tier = Some(block.tier());
        for &part in parts {
            let Some(view) = block.part(part) else { continue };
            let checksum = view.checksum();
            let data = Bytes::from_owner(view);
            let part_bytes = flow::count(data.len());
            self.push_part(wire::PartData { index, part, offset: 0, data, checksum, part_bytes });
        }
    }

    /// Adds a part: whole if it fits into a message, in pieces otherwise.
    fn push_part(&mut self, mut part: wire::PartData) {
        let full = self.parts.len() >= GET_MESSAGE_PARTS_MAX;
        if full || self.bytes.saturating_add(part.data.len()) > GET_MESSAGE_BYTES {
            self.flush_parts();
        }
        while part.data.len() > GET_MESSAGE_BYTES {
            let data = part.data.split_to(GET_MESSAGE_BYTES);
            let offset = part.offset;
            part.offset = offset.saturating_add(flow::count(data.len()));
            self.push_piece(wire::PartData { data, offset, ..part.clone() });
            self.flush_parts();
        }
        self.push_piece(part);
    }

    fn push_piece(&mut self, part: wire::PartData) {
        self.bytes = self.bytes.saturating_add(part.data.len());
        self.parts.push(part);
    }

    /// Adds positions without bytes, which join the last ones if they follow for the same reason.
    fn push_miss(&mut self, start: u32, end: u32, reason: Missed) {
        self.flush_data();
        match &mut self.miss {
            Some((_, last, same)) if *last == start && *same == reason => *last = end,
            _ => {
                self.flush_miss();
                self.miss = Some((start, end, reason));
            }
        }
    }

    fn flush(&mut self) {
        self.flush_miss();
        self.flush_data();
    }

    fn flush_data(&mut self) {
        self.flush_parts();
        self.tier = None;
    }

    fn flush_parts(&mut self) {
        let Some(tier) = self.tier else { return };
        if self.parts.is_empty() {
            return;
        }
        let parts = std::mem::take(&mut self.parts);
        self.bytes = 0;
        let data = wire::GetData { parts, tier: convert::tier(tier).into() };
        self.push(wire::get_response::Message::Data(data));
    }

    fn flush_miss(&mut self) {
        let Some((start, end, reason)) = self.miss.take() else { return };
        let reason = convert::miss_reason(reason);
        let miss = wire::GetMiss { start, end, reason: reason.into() };
        self.push(wire::get_response::Message::Miss(miss));
    }

    fn push(&mut self, message: wire::get_response::Message) {
        self.ready.push_back(wire::GetResponse { message: Some(message) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = GET_MESSAGE_BYTES;

    fn part(index: u32, len: usize) -> wire::PartData {
        let part_bytes = u32::try_from(len).unwrap();
        let data = vec![7; len].into();
        wire::PartData { index, part: 0, offset: 0, data, checksum: 1, part_bytes }
    }

    /// The messages: (index, offset, length) of each piece, or the range of a miss.
    fn messages(packer: &mut Packer) -> Vec<Vec<(u32, u32, usize)>> {
        packer.flush();
        let pieces = |parts: Vec<wire::PartData>| {
            parts.iter().map(|part| (part.index, part.offset, part.data.len())).collect()
        };
        packer
            .ready
            .drain(..)
            .map(|response| match response.message.unwrap() {
                wire::get_response::Message::Data(data) => pieces(data.parts),
                wire::get_response::Message::Miss(miss) => vec![(miss.start, miss.end, 0)],
            })
            .collect()
    }

    fn packer() -> Packer {
        Packer { tier: Some(Tier::Dram), ..Packer::default() }
    }

    #[test]
    fn small_parts_share_a_message_and_are_never_split() {
        let mut packer = packer();
        (0..3).for_each(|index| packer.push_part(part(index, MIB / 2 - 1)));
        let half = MIB / 2 - 1;
        let expected = vec![vec![(0, 0, half), (1, 0, half)], vec![(2, 0, half)]];
        assert_eq!(messages(&mut packer), expected);
    }

    #[test]
    fn a_large_part_comes_in_pieces_in_order_of_offset() {
        let mut packer = packer();
        packer.push_part(part(0, 10));
        packer.push_part(part(1, 2 * MIB + 5));
        packer.push_part(part(2, 10));
        let mib = u32::try_from(MIB).unwrap();
        let expected = vec![
            vec![(0, 0, 10)],
            vec![(1, 0, MIB)],
            vec![(1, mib, MIB)],
            vec![(1, 2 * mib, 5), (2, 0, 10)],
        ];
        assert_eq!(messages(&mut packer), expected);
    }

    #[test]
    fn the_tiniest_parts_stay_within_the_message_limit() {
        let mut packer = packer();
        (0..1 << 20).for_each(|index| packer.push_part(part(u32::MAX - index, 1)));
        packer.flush();
        let longest = packer.ready.iter().map(prost::Message::encoded_len).max().unwrap();
        assert!(longest <= crate::limits::MESSAGE_BYTES_MAX, "{longest} bytes");
    }

    #[test]
    fn misses_in_a_row_are_one_and_stay_in_order_with_data() {
        let mut packer = packer();
        packer.push_part(part(0, 5));
        packer.push_miss(1, 2, Missed::Absent);
        packer.push_miss(2, 3, Missed::Absent);
        packer.push_miss(3, 9, Missed::Timeout);
        let expected = vec![vec![(0, 0, 5)], vec![(1, 3, 0)], vec![(3, 9, 0)]];
        assert_eq!(messages(&mut packer), expected);
    }
}
