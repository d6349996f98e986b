//! Get: blocks in the order asked, packed into messages of about one mebibyte; misses are data.
//!
//! The stream is made by polling. A few blocks load ahead, in order, so that a colder tier is kept
//! busy; a reader that stalls holds no more than those, and not for long after its deadline. Payload is not copied here: each piece is a
//! view of the arena that keeps its memory alive until tonic has written it out.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{
    FutureExt, StreamExt,
    stream::{self, BoxStream},
};
use kvstrata_proto::v1 as wire;
use kvstrata_tiers::{
    block::{BlockHash, Hashes},
    error::Result,
    namespace::{BlockLayout, Namespace},
    stack::{Block, Fetch, Promotions, Stack},
    tier::Tier,
};
use tokio::time::Instant;
use tonic::Status;

use super::{Node, convert, delivered::Delivered, period, status, watched};
use crate::{
    id::{LeaseId, SessionId},
    limits::{
        GET_BLOCKS_AHEAD, GET_BLOCKS_MAX, GET_BYTES_AHEAD, GET_DEADLINE_DEFAULT, GET_DEADLINE_MAX,
        GET_MESSAGE_BYTES, GET_MESSAGE_PARTS_MAX, GET_STALL_MAX,
    },
    metrics::{Missed, ServerMetrics},
};

/// The responses to one get; the first item is the error of a request that cannot be served.
pub(super) fn responses(
    node: &Node,
    tenant: &str,
    request: wire::GetRequest,
) -> BoxStream<'static, Result<wire::GetResponse, Status>> {
    let call = match GetCall::begin(node, tenant, request) {
        Ok(call) => call,
        Err(why) => return stream::iter([Err(status::from_error(&why))]).boxed(),
    };
    let end = call.deadline + GET_STALL_MAX;
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

/// One position of a get: what was found, and how long that took.
struct Found {
    fetch: Result<Fetch>,
    elapsed: Duration,
}

struct GetCall {
    stack: Stack,
    metrics: ServerMetrics,
    /// Indices into the declared parts, never empty.
    parts: Arc<[u32]>,
    stop_at_miss: bool,
    deadline: Instant,
    found: BoxStream<'static, Found>,
    /// What is asked for.
    asked: (Arc<Namespace>, Bytes),
    /// From where on the request is touched at its end. What a lease covers is not: its release does
    /// that. A lease covers the head that was in dram; behind it are blocks loaded now.
    touch_from: Option<u32>,
    delivered: Delivered,
    position: u32,
    count: u32,
    packer: Packer,
}

/// How many blocks load ahead of the reader.
fn blocks_ahead(layout: &BlockLayout) -> usize {
    let (least, most) = GET_BLOCKS_AHEAD.into_inner();
    // Of opaque blocks only the longest is known, which most are not.
    let blocks =
        if layout.is_opaque() { least } else { GET_BYTES_AHEAD / layout.block_bytes().max(1) };
    usize::try_from(blocks.clamp(least, most)).unwrap_or(1)
}

impl GetCall {
    fn begin(node: &Node, tenant: &str, request: wire::GetRequest) -> Result<Self> {
        let namespace = node.namespace(tenant, &request.namespace_id)?;
        let count = namespace.hashes(&request.hashes, GET_BLOCKS_MAX, "hashes")?.len();
        let wait =
            period("deadline_ms", request.deadline_ms, GET_DEADLINE_DEFAULT, GET_DEADLINE_MAX)?;
        let touch_from = request.lease_id.is_empty().then_some(0);
        let asked = (Arc::clone(&namespace), request.hashes.clone());
        if touch_from.is_none() {
            let session = SessionId::read("session_id", &request.session_id)?;
            node.leases.check(session, LeaseId::read("lease_id", &request.lease_id)?)?;
        }
        let deadline = Instant::now() + wait;
        let declared = convert::count(namespace.layout().parts().len());
        let parts: Arc<[u32]> = if request.parts.is_empty() {
            (0..declared).collect()
        } else {
            request.parts.as_slice().into()
        };
        let wanted: Arc<[u32]> = request.parts.into();
        let ahead = blocks_ahead(namespace.layout());
        let loads = Loads {
            promotions: Arc::new(node.stack.promotions()),
            stack: node.stack.clone(),
            namespace,
            hashes: request.hashes,
        };
        let found = stream::iter(0..count)
            .map(move |position| loads.load(position, Arc::clone(&wanted), deadline))
            .buffered(ahead)
            .boxed();
        Ok(Self {
            stack: node.stack.clone(),
            metrics: node.metrics.clone(),
            parts,
            stop_at_miss: request.stop_at_miss,
            deadline,
            found,
            asked,
            touch_from,
            delivered: Delivered::new(node.stack.clone()),
            position: 0,
            count: convert::count(count),
            packer: Packer::default(),
        })
    }

    /// The next message; none at the end.
    async fn next(&mut self) -> Result<Option<wire::GetResponse>> {
        self.delivered.resume();
        let message = self.make_next().await;
        self.delivered.hand();
        message
    }

    async fn make_next(&mut self) -> Result<Option<wire::GetResponse>> {
        loop {
            if let Some(message) = self.packer.ready.pop_front() {
                return Ok(Some(message));
            }
            if self.position >= self.count {
                self.touch()?;
                self.delivered.finish();
                self.packer.flush();
                return Ok(self.packer.ready.pop_front());
            }
            let found = match self.found.next().now_or_never() {
                Some(found) => found,
                None => {
                    // The next block takes a while: what is packed should not wait for it.
                    self.packer.flush_data();
                    if let Some(message) = self.packer.ready.pop_front() {
                        return Ok(Some(message));
                    }
                    self.found.next().await
                }
            };
            match found {
                Some(found) => self.take(found)?,
                None => self.position = self.count,
            }
        }
    }

    /// Counts the request as used, tail first, once.
    fn touch(&mut self) -> Result<()> {
        if let Some(from) = self.touch_from.take() {
            let (namespace, hashes) = &self.asked;
            let from = usize::try_from(from).unwrap_or(0) * namespace.hash_bytes();
            let hashes = hashes.get(from..).unwrap_or_default();
            self.stack.touch(namespace, Hashes::new(hashes, namespace.hash_bytes())?);
        }
        Ok(())
    }

    fn take(&mut self, found: Found) -> Result<()> {
        let position = self.position;
        self.position = self.position.saturating_add(1);
        let missed = match found.fetch? {
            Fetch::Hit(block) => {
                if block.tier() != Tier::Dram {
                    self.touch_from.get_or_insert(position);
                }
                self.deliver(position, &block, found.elapsed);
                None
            }
            Fetch::Pending => Some(Missed::Pending),
            Fetch::Corrupt => Some(Missed::Corrupt),
            Fetch::Timeout => Some(Missed::Timeout),
            Fetch::Busy => Some(Missed::Busy),
            Fetch::Miss => Some(Missed::Absent),
        };
        if let Some(reason) = missed {
            self.miss(position, self.position, reason);
        }
        if self.position < self.count && Instant::now() >= self.deadline {
            self.miss(self.position, self.count, Missed::Timeout);
        }
        Ok(())
    }

    fn deliver(&mut self, position: u32, block: &Block, elapsed: Duration) {
        let bytes = self.packer.push_block(position, &self.parts, block);
        self.delivered.block(block.tier(), bytes, elapsed);
        self.metrics.record_get(convert::tier_label(block.tier()), bytes, elapsed);
    }

    fn miss(&mut self, start: u32, end: u32, reason: Missed) {
        self.delivered.gap();
        self.packer.push_miss(start, end, reason);
        self.metrics.record_missed(reason, u64::from(end.saturating_sub(start)));
        self.position = if self.stop_at_miss { self.count } else { end };
    }
}

/// Loads the blocks of one get.
struct Loads {
    stack: Stack,
    promotions: Arc<Promotions>,
    namespace: Arc<Namespace>,
    hashes: Bytes,
}

impl Loads {
    fn load(
        &self,
        position: usize,
        parts: Arc<[u32]>,
        deadline: Instant,
    ) -> impl Future<Output = Found> + Send + use<> {
        let hash = self.hash(position);
        let (stack, namespace) = (self.stack.clone(), Arc::clone(&self.namespace));
        let promotions = Arc::clone(&self.promotions);
        async move {
            let started = Instant::now();
            let fetch = match hash {
                Ok(Some(hash)) => {
                    stack.get_within(&promotions, &namespace, hash, &parts, deadline).await
                }
                Ok(None) => Ok(Fetch::Miss),
                Err(why) => Err(why),
            };
            Found { fetch, elapsed: started.elapsed() }
        }
    }

    fn hash(&self, position: usize) -> Result<Option<BlockHash>> {
        Ok(Hashes::new(&self.hashes, self.namespace.hash_bytes())?.get(position))
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
    /// Adds the parts of a block; returns their bytes.
    fn push_block(&mut self, index: u32, parts: &[u32], block: &Block) -> u64 {
        self.flush_miss();
        if self.tier.is_some_and(|tier| tier != block.tier()) {
            self.flush_data();
        }
        self.tier = Some(block.tier());
        let mut bytes = 0_u64;
        for &part in parts {
            let Some(view) = block.part(part) else { continue };
            let checksum = view.checksum();
            let data = Bytes::from_owner(view);
            bytes = bytes.saturating_add(u64::try_from(data.len()).unwrap_or(u64::MAX));
            let part_bytes = convert::count(data.len());
            self.push_part(wire::PartData { index, part, offset: 0, data, checksum, part_bytes });
        }
        bytes
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
            part.offset = offset.saturating_add(convert::count(data.len()));
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
