//! Gets: stream, verify, deliver.

use std::time::Duration;

use kvstrata_proto::v1::{self, get_response::Message};
use kvstrata_tiers::{
    error::{Error, Result},
    namespace::PartSpec,
};
use tokio::time::{Instant, timeout_at};
use tonic::Streaming;

use super::{
    ClientOptions, GetSink, GetSummary, Handle, HashList, Lease,
    assemble::{Assembler, Piece},
    bulk,
    connect::{timed_out, within},
    lookup::{millis, tier_of},
    status::broken_contract,
};

const DOING: &str = "get";

/// How to get.
#[derive(Debug, Clone, Default)]
pub struct GetOptions<'a> {
    /// Indices into the declared parts, ascending; empty: all.
    pub parts: Vec<u32>,
    /// Read under this lease, so that nothing covered can be evicted on the way.
    pub lease: Option<&'a Lease>,
    /// How long the server may try; `None` takes its default. The client waits for
    /// [`ClientOptions::transfer_deadline`](super::ClientOptions) in any case.
    pub deadline: Option<Duration>,
    /// End after the first miss: later blocks are of no use.
    pub stop_at_miss: bool,
}

/// How long a get waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// For what comes next.
    pub(super) stall: Duration,
    /// For all of it.
    pub(super) until: Instant,
}

impl Handle {
    /// Fetches the blocks of `hashes` in order and hands each to `sink` when it is whole and
    /// verified. What came before a failure is a legal partial answer: the sink has seen it.
    ///
    /// More hashes than one request takes are fetched in several, one after the other. Blocks that are on
    /// other members, as a lookup has said or says now, are read from them, in the order asked; one that is
    /// gone or slow is a miss for its blocks.
    ///
    /// # Errors
    /// `Invalid` for undeclared parts or wrong hash lengths; `Timeout` when the stream stands still;
    /// `Internal` when the server leaves the order asked. A miss is never an error.
    ///
    /// # Cancel safety
    /// Safe: a dropped get stops the stream, and what the sink has seen is whole.
    pub async fn get<S: GetSink>(
        &self,
        hashes: &HashList,
        options: GetOptions<'_>,
        sink: &mut S,
    ) -> Result<GetSummary> {
        self.check(hashes)?;
        let parts = self.chosen_parts(&options.parts)?;
        let ClientOptions { stall_deadline: stall, transfer_deadline, .. } = *self.client.options();
        let patience = Patience { stall, until: Instant::now() + transfer_deadline };
        if self.client.server().members().list.len() > 1 {
            // Boxed as below.
            return Box::pin(self.get_spread(hashes, &parts, &options, patience, sink)).await;
        }
        self.get_here((0, hashes), &parts, &options, patience, sink).await
    }

    /// Fetches all blocks from the server that the client is at; `base` is added to their positions.
    pub(super) async fn get_here<S: GetSink>(
        &self,
        (base, hashes): (usize, &HashList),
        parts: &[(u32, PartSpec)],
        options: &GetOptions<'_>,
        patience: Patience,
        sink: &mut S,
    ) -> Result<GetSummary> {
        let server = self.client.server();
        let mut total = GetSummary::default();
        for (start, slice) in hashes.chunks(self.limits().get_blocks_max) {
            // Boxed: the future of a stream is large, and every caller would carry it.
            let one = self.get_slice((base + start, slice), parts, options, patience, sink);
            server.breaker.admit(DOING)?;
            let summary = server.breaker.note(Box::pin(one).await)?;
            total += summary;
            if options.stop_at_miss && total.missed > 0 {
                break;
            }
        }
        Ok(total)
    }

    async fn get_slice<S: GetSink>(
        &self,
        (base, hashes): (usize, HashList),
        parts: &[(u32, PartSpec)],
        options: &GetOptions<'_>,
        patience: Patience,
        sink: &mut S,
    ) -> Result<GetSummary> {
        let base = u32::try_from(base).map_err(|_too_many| {
            Error::invalid(format!("hashes: {base} given, at most {} allowed", u32::MAX))
        })?;
        let request = self.get_request(&hashes, options);
        let mut assembler = Assembler::new(self.id(), parts, (base, hashes));
        if let Some(mut connection) = self.client.bulk(&request.session_id).await? {
            let within = (patience.stall, patience.until);
            bulk::get(&mut connection, request, within, &mut assembler, sink).await?;
            self.client.keep_bulk(connection);
            return assembler.finish(options.stop_at_miss);
        }
        let deadline = self.client.options().call_deadline.min(patience.stall);
        let mut wire = self.client.wire();
        let reply = within(DOING, deadline, wire.get(request)).await?;
        let mut stream = reply.into_inner();
        while let Some(message) = self.next_message(&mut stream, patience).await? {
            take(message, &mut assembler, sink)?;
        }
        assembler.finish(options.stop_at_miss)
    }

    fn get_request(&self, hashes: &HashList, options: &GetOptions<'_>) -> v1::GetRequest {
        v1::GetRequest {
            namespace_id: self.wire_id(),
            hashes: hashes.packed(),
            parts: options.parts.clone(),
            session_id: options.lease.map(|lease| lease.session.clone()).unwrap_or_default(),
            lease_id: options.lease.map(|lease| lease.id.clone()).unwrap_or_default(),
            deadline_ms: options.deadline.map_or(0, millis),
            stop_at_miss: options.stop_at_miss,
        }
    }

    async fn next_message(
        &self,
        stream: &mut Streaming<v1::GetResponse>,
        patience: Patience,
    ) -> Result<Option<Message>> {
        let next = within(DOING, patience.stall, stream.message());
        let transfer = self.client.options().transfer_deadline;
        let reply = timeout_at(patience.until, next)
            .await
            .map_err(|_elapsed| timed_out(DOING, transfer))??;
        match reply {
            None => Ok(None),
            Some(v1::GetResponse { message: Some(message) }) => Ok(Some(message)),
            Some(v1::GetResponse { message: None }) => {
                Err(broken_contract(DOING, "a message of an unknown kind"))
            }
        }
    }
}

fn take<S: GetSink>(message: Message, assembler: &mut Assembler<'_>, sink: &mut S) -> Result<()> {
    match message {
        Message::Miss(miss) => assembler.miss(&miss, sink),
        Message::Data(data) => {
            let tier = tier_of(data.tier());
            let tier = tier.ok_or_else(|| broken_contract(DOING, "data without a tier"))?;
            data.parts.into_iter().try_for_each(|part| {
                let piece = Piece {
                    index: part.index,
                    part: part.part,
                    offset: part.offset as usize,
                    bytes: part.data.len(),
                    part_bytes: part.part_bytes as usize,
                    checksum: part.checksum,
                };
                assembler.piece(&piece, part.data, tier, sink)
            })
        }
    }
}
