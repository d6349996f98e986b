//! Puts: offer a batch, learn what is wanted, send that.
//!
//! The request stream is lazy: it holds the offer, then waits for the answer, then packs one message
//! at a time as the connection takes them. So nothing is copied ahead of the network, and what is in
//! flight is bounded by the HTTP/2 window. Values are reference-counted buffers and are not copied
//! before they are encoded.

use std::{ops::Range, time::Duration};

use bytes::Bytes;
use futures_util::{FutureExt, Stream, StreamExt, future, stream};
use kvstrata_proto::v1::{self, put_response::Message};
use kvstrata_tiers::{
    block::{BlockHash, HASH_BYTES_MAX},
    checksum::part_checksum,
    error::{Error, ErrorKind, Result},
    namespace::PartSpec,
};
use tokio::{
    sync::oneshot,
    time::{Instant, timeout_at},
};
use tonic::{
    GrpcMethod, Request, Status, Streaming, client::Grpc, codegen::http::uri::PathAndQuery,
};

use super::{
    Handle, HashList, MESSAGE_BYTES_MAX, bulk,
    codec::RoomyCodec,
    connect::{timed_out, within},
    pack::Packer,
    status::{broken_contract, error_of},
    verbs::wire_parent,
};

const DOING: &str = "put";
/// What a part adds to an offer, at most: its checksum, or its checksum and its length.
const OFFER_BYTES_PER_PART: usize = 8 + 5;
/// What an offer has besides its blocks, at most: ids, the parent, up to 1024 part indices.
const OFFER_OVERHEAD_BYTES: usize = 8 << 10;
const SERVICE: &str = "kvstrata.v1.BlockCache";
const METHOD: &str = "Put";
const PATH: &str = "/kvstrata.v1.BlockCache/Put";

/// Blocks to store, in chain order.
#[derive(Debug, Clone)]
pub struct PutBatch {
    /// Their hashes.
    pub hashes: HashList,
    /// Indices into the declared parts that are sent, ascending; empty: all.
    pub parts: Vec<u32>,
    /// One value for each (block, part), blocks outermost.
    pub values: Vec<Bytes>,
    /// Hash before the first one; `None` at the root.
    pub parent: Option<BlockHash>,
    /// Acknowledge when synced and indexed on nvme, not when readable from dram.
    pub durable: bool,
}

/// What became of one block of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PutOutcome {
    /// Readable now.
    Stored,
    /// The parts sent are here, other parts of the block are missing.
    PartStored,
    /// It was here with the same bytes.
    Duplicate,
    /// It was here with other bytes; the first stays.
    DuplicateDiffers,
    /// Another put of the same part is in flight.
    Pending,
    /// No room without hurting others; see [`PutReport::retry_after`].
    Refused,
    /// The bytes did not match their checksum at the server.
    Corrupt,
    /// Readable now, but not on nvme, as [`PutBatch::durable`] asked.
    NotDurable,
}

/// What became of a batch: one outcome for each block.
#[derive(Debug, Clone, Default)]
pub struct PutReport {
    /// In the order of the batch.
    pub outcomes: Vec<PutOutcome>,
    /// Bytes that were sent, because they were wanted.
    pub sent_bytes: u64,
    /// How long to wait before offering refused blocks again.
    pub retry_after: Option<Duration>,
}

impl PutReport {
    /// How many blocks had this outcome.
    #[must_use]
    pub fn count(&self, outcome: PutOutcome) -> u64 {
        self.outcomes.iter().filter(|each| **each == outcome).count() as u64
    }
}

impl Handle {
    /// Offers `batch` with checksums and sends what the server wants of it.
    ///
    /// `session` owns the put: if it ends, what was not acknowledged is given up. A batch of more
    /// blocks than one stream takes goes in several, head first, and is then touched tail first as
    /// one, so that the order in which its blocks will be evicted is that of one batch.
    ///
    /// # Errors
    /// `Invalid` if values and layout do not fit, named by position, part, length and range;
    /// `Exhausted` if not one block was taken for lack of room. A refused block is an outcome.
    ///
    /// # Cancel safety
    /// Safe: what was acknowledged stays, the rest is given up, and putting again is idempotent.
    pub async fn put(&self, session: &super::Session, batch: &PutBatch) -> Result<PutReport> {
        self.check(&batch.hashes)?;
        let parts = self.chosen_parts(&batch.parts)?;
        self.check_values(batch, &parts)?;
        let mut total = PutReport::default();
        let mut parent = batch.parent;
        let until = Instant::now() + self.client.options().transfer_deadline;
        let server = self.client.server();
        let blocks_max = self.put_blocks_max(parts.len());
        for (start, hashes) in batch.hashes.chunks(blocks_max) {
            let last = hashes.len().checked_sub(1).and_then(|last| hashes.get(last));
            let values = start * parts.len()..(start + hashes.len()) * parts.len();
            let slice = PutBatch {
                hashes,
                parts: batch.parts.clone(),
                values: batch.values.get(values).unwrap_or_default().to_vec(),
                parent,
                durable: batch.durable,
            };
            // Boxed: the future of a stream takes over 16 KiB, which every caller would carry.
            let one = self.put_slice(session.id(), slice, &parts, until);
            server.breaker.admit(DOING)?;
            let report = server.breaker.note(Box::pin(one).await)?;
            total.outcomes.extend(report.outcomes);
            total.sent_bytes += report.sent_bytes;
            total.retry_after = total.retry_after.max(report.retry_after);
            parent = last;
        }
        if batch.hashes.len() > blocks_max {
            self.touch(&batch.hashes).await?;
        }
        refuse_if_all_refused(total)
    }

    /// Blocks of one put stream: the server's limit, or what an offer in one message can name.
    fn put_blocks_max(&self, parts: usize) -> usize {
        let block_bytes = HASH_BYTES_MAX + parts * OFFER_BYTES_PER_PART;
        let message_bytes = self.limits().message_bytes_max.min(MESSAGE_BYTES_MAX);
        let fitting = message_bytes.saturating_sub(OFFER_OVERHEAD_BYTES) / block_bytes;
        self.limits().put_blocks_max.min(fitting).max(1)
    }

    fn check_values(&self, batch: &PutBatch, parts: &[(u32, PartSpec)]) -> Result<()> {
        let (given, due) = (batch.values.len(), batch.hashes.len() * parts.len());
        if given != due {
            return Err(Error::invalid(format!(
                "values: {given} given, exactly {due} required ({} blocks x {} parts)",
                batch.hashes.len(),
                parts.len()
            )));
        }
        let limit = self.limits().part_bytes_max;
        for (at, (value, (part, spec))) in batch.values.iter().zip(parts.iter().cycle()).enumerate()
        {
            let declared = spec.bytes as usize;
            let fits =
                if self.is_opaque() { value.len() <= limit } else { value.len() == declared };
            if !fits {
                let (position, length) = (at / parts.len(), value.len());
                let range = if self.is_opaque() {
                    format!("0 to {limit} allowed")
                } else {
                    format!("exactly {declared} declared")
                };
                return Err(Error::invalid(format!(
                    "values: position {position}, part {part}: {length} bytes given, {range}"
                )));
            }
        }
        Ok(())
    }

    async fn put_slice(
        &self,
        session_id: Bytes,
        slice: PutBatch,
        parts: &[(u32, PartSpec)],
        until: Instant,
    ) -> Result<PutReport> {
        let asked = slice.hashes.len();
        let (offer, checksums) = self.offer(session_id, &slice, parts);
        let lengths = offer.lengths.clone();
        // A durable put may be silent for as long as the server waits for nvme.
        let stall = self.client.options().stall_deadline * if slice.durable { 2 } else { 1 };
        let within = (stall, until);
        let indices: Vec<u32> = parts.iter().map(|(part, _)| *part).collect();
        let mut progress = Progress::new(asked);
        if let Some(mut connection) = self.client.bulk(&offer.session_id).await? {
            let (values, checksums) = (&slice.values, &checksums);
            let batch = bulk::Batch { parts: &indices, values, checksums };
            let putting = bulk::put(&mut connection, offer, &batch, progress, within);
            let progress = putting.await?;
            self.client.keep_bulk(connection);
            let sent_bytes = progress.sent_bytes(&lengths, parts);
            return progress.finish(sent_bytes);
        }
        let target = self.limits().message_bytes_max.min(MESSAGE_BYTES_MAX);
        let packer = Packer::new(indices, slice.values, checksums, target);
        let (answer, wanted) = oneshot::channel();
        let mut replies = self.start_put(offer, packer, wanted).await?;
        let Some(Message::Wanted(first)) = self.next_reply(&mut replies, within).await? else {
            return Err(broken_contract(DOING, "the first message is not what it wants"));
        };
        let ranges = progress.wanted(&first)?;
        // A closed channel means that the stream has failed: the next reply says why.
        let _closed = answer.send(ranges);
        while let Some(message) = self.next_reply(&mut replies, within).await? {
            let Message::Results(results) = message else {
                return Err(broken_contract(DOING, "it said twice what it wants"));
            };
            progress.results(&results)?;
        }
        let sent_bytes = progress.sent_bytes(&lengths, parts);
        progress.finish(sent_bytes)
    }

    fn offer(
        &self,
        session_id: Bytes,
        slice: &PutBatch,
        parts: &[(u32, PartSpec)],
    ) -> (v1::PutOffer, Vec<u64>) {
        let blocks = slice.hashes.iter().zip(slice.values.chunks(parts.len().max(1)));
        let mut checksums = Vec::with_capacity(slice.values.len());
        for (hash, values) in blocks {
            checksums.extend(parts.iter().zip(values).map(|((_, spec), value)| {
                part_checksum(self.id(), &hash, spec.group, spec.rank, value)
            }));
        }
        let length = |value: &Bytes| u32::try_from(value.len()).unwrap_or(u32::MAX);
        let lengths =
            if self.is_opaque() { slice.values.iter().map(length).collect() } else { Vec::new() };
        let offer = v1::PutOffer {
            session_id,
            namespace_id: self.wire_id(),
            hashes: slice.hashes.packed(),
            parts: slice.parts.clone(),
            checksums: checksums.clone(),
            parent: wire_parent(slice.parent.as_ref(), slice.hashes.hash_bytes()),
            lengths,
            durable: slice.durable,
        };
        (offer, checksums)
    }

    async fn start_put(
        &self,
        offer: v1::PutOffer,
        packer: Packer,
        wanted: oneshot::Receiver<Vec<Range<usize>>>,
    ) -> Result<Streaming<v1::PutResponse>> {
        let deadline = self.client.options().call_deadline;
        let mut grpc = Grpc::new(self.client.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let mut request = Request::new(request_stream(offer, packer, wanted));
        request.extensions_mut().insert(GrpcMethod::new(SERVICE, METHOD));
        let call = async {
            grpc.ready().await.map_err(|error| Status::from_error(error.into()))?;
            let path = PathAndQuery::from_static(PATH);
            grpc.streaming(request, path, RoomyCodec::default()).await
        };
        within(DOING, deadline, call).await.map(tonic::Response::into_inner)
    }

    async fn next_reply(
        &self,
        replies: &mut Streaming<v1::PutResponse>,
        (stall, until): (Duration, Instant),
    ) -> Result<Option<Message>> {
        let options = self.client.options();
        let next = tokio::time::timeout(stall, replies.message());
        let reply = timeout_at(until, next)
            .await
            .map_err(|_elapsed| timed_out(DOING, options.transfer_deadline))?
            .map_err(|_elapsed| timed_out(DOING, stall))?
            .map_err(|status| error_of(DOING, &status))?;
        match reply.map(|reply| reply.message) {
            None => Ok(None),
            Some(Some(message)) => Ok(Some(message)),
            Some(None) => Err(broken_contract(DOING, "a message of an unknown kind")),
        }
    }
}

/// The offer, then, once it is known what is wanted, the data.
fn request_stream(
    offer: v1::PutOffer,
    packer: Packer,
    wanted: oneshot::Receiver<Vec<Range<usize>>>,
) -> impl Stream<Item = v1::PutRequest> + Send + 'static {
    let first = v1::put_request::Message::Offer(offer);
    let data = wanted.map(|answer| {
        let ranges = answer.unwrap_or_default();
        stream::iter(packer.messages(ranges))
    });
    let data = data.flatten_stream().map(v1::put_request::Message::Data);
    let messages = stream::once(future::ready(first)).chain(data);
    messages.map(|message| v1::PutRequest { message: Some(message) })
}

/// What is known of each position so far.
pub(super) struct Progress {
    outcomes: Vec<Option<PutOutcome>>,
    wanted: Vec<Range<usize>>,
    retry_after: Option<Duration>,
}

impl Progress {
    fn new(asked: usize) -> Self {
        Self { outcomes: vec![None; asked], wanted: Vec::new(), retry_after: None }
    }

    pub(super) fn wanted(&mut self, wanted: &v1::PutWanted) -> Result<Vec<Range<usize>>> {
        let mut end = 0;
        for range in &wanted.ranges {
            let positions = range.start as usize..range.end as usize;
            if positions.start < end || positions.is_empty() || positions.end > self.outcomes.len()
            {
                return Err(broken_contract(DOING, "what it wants is not in the offer"));
            }
            end = positions.end;
            self.wanted.push(positions);
        }
        if wanted.retry_after_ms > 0 {
            self.retry_after = Some(Duration::from_millis(wanted.retry_after_ms.into()));
        }
        Ok(self.wanted.clone())
    }

    pub(super) fn results(&mut self, results: &v1::PutResults) -> Result<()> {
        for result in &results.results {
            let positions = result.start as usize..result.end as usize;
            let outcome = outcome_of(result.outcome());
            match (self.outcomes.get_mut(positions), outcome) {
                (Some(slots), Some(outcome)) => slots.fill(Some(outcome)),
                _ => return Err(broken_contract(DOING, "a result outside of the offer")),
            }
        }
        Ok(())
    }

    /// Bytes of what was wanted; `lengths` are those of an opaque namespace's values.
    fn sent_bytes(&self, lengths: &[u32], parts: &[(u32, PartSpec)]) -> u64 {
        if !lengths.is_empty() {
            let wanted = self.wanted.iter().filter_map(|positions| lengths.get(positions.clone()));
            return wanted.flatten().copied().map(u64::from).sum();
        }
        let blocks: usize = self.wanted.iter().map(ExactSizeIterator::len).sum();
        let block_bytes: u64 = parts.iter().map(|(_, spec)| u64::from(spec.bytes)).sum();
        block_bytes * blocks as u64
    }

    fn finish(self, sent_bytes: u64) -> Result<PutReport> {
        let outcomes: Option<Vec<_>> = self.outcomes.into_iter().collect();
        let outcomes =
            outcomes.ok_or_else(|| broken_contract(DOING, "a block without a result"))?;
        Ok(PutReport { outcomes, sent_bytes, retry_after: self.retry_after })
    }
}

fn refuse_if_all_refused(report: PutReport) -> Result<PutReport> {
    let refused = report.count(PutOutcome::Refused);
    let (Some(retry_after), true) = (report.retry_after, refused > 0) else {
        return Ok(report);
    };
    if refused < report.outcomes.len() as u64 {
        return Ok(report);
    }
    Err(Error::new(
        ErrorKind::Exhausted { retry_after },
        format!("put: no room for any of {refused} blocks now; try again after {retry_after:?}"),
    ))
}

fn outcome_of(wire: v1::PutOutcome) -> Option<PutOutcome> {
    match wire {
        v1::PutOutcome::Stored => Some(PutOutcome::Stored),
        v1::PutOutcome::PartStored => Some(PutOutcome::PartStored),
        v1::PutOutcome::Duplicate => Some(PutOutcome::Duplicate),
        v1::PutOutcome::DuplicateDiffers => Some(PutOutcome::DuplicateDiffers),
        v1::PutOutcome::Pending => Some(PutOutcome::Pending),
        v1::PutOutcome::Refused => Some(PutOutcome::Refused),
        v1::PutOutcome::Corrupt => Some(PutOutcome::Corrupt),
        v1::PutOutcome::NotDurable => Some(PutOutcome::NotDurable),
        v1::PutOutcome::Unspecified => None,
    }
}
