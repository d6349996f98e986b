//! A put over the bulk port: values go to the socket from where they are, while results come in.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_proto::v1;
use kvstrata_tiers::error::{Error, Result};
use tokio::{
    sync::{Semaphore, oneshot},
    time::{Instant, timeout_at},
};

use super::{
    connection::{Connection, Reader, Writer, next_header, refusal},
    shared::Shared,
};
use crate::{
    bulk::{
        body::{DURABLE, Offer, Place, Want, read_results},
        frame::{Header, Kind, push},
        input::lost,
        output::Output,
    },
    client::{connect::timed_out, put::Progress, status::broken_contract},
    limits::BULK_BATCH_BYTES,
};

const DOING: &str = "put";

/// The values that an offer speaks of.
pub(in crate::client) struct Batch<'a> {
    /// Indices of the parts of each block.
    pub(in crate::client) parts: &'a [u32],
    /// One for each (block, part).
    pub(in crate::client) values: &'a [Bytes],
    /// One for each value.
    pub(in crate::client) checksums: &'a [u64],
}

/// Offers blocks and sends what is wanted of them; returns what became of them.
pub(in crate::client) async fn put(
    connection: &mut Connection,
    offered: v1::PutOffer,
    batch: &Batch<'_>,
    mut progress: Progress,
    (stall, until): (Duration, Instant),
) -> Result<Progress> {
    let request = connection.begin();
    let flags = if offered.durable { DURABLE } else { 0 };
    let offer = Offer {
        namespace: offered.namespace_id.as_ref().try_into().unwrap_or_default(),
        parent: offered.parent,
        hashes: offered.hashes,
        parts: offered.parts,
        checksums: offered.checksums,
        lengths: offered.lengths,
    };
    let Connection { from, to, out, payload_bytes_max, shared, .. } = connection;
    let free = shared.as_ref().map(Shared::free);
    out.push(|heads| offer.push(heads, request, flags));
    out.flush(to).await?;
    let header = next_header(DOING, from, request, (stall, until)).await?;
    let body = from.body(&header).await?;
    match header.kind {
        Kind::Want => {}
        Kind::Refused => return Err(refusal(DOING, body)),
        _ => return Err(broken_contract(DOING, "the first frame is not what it wants")),
    }
    let Want { retry_after_ms, ranges } = Want::read(body)?;
    let ranges = ranges.into_iter().map(|(start, end)| v1::Range { start, end }).collect();
    let wanted = progress.wanted(&v1::PutWanted { ranges, retry_after_ms })?;
    let (all_sent, sent) = oneshot::channel();
    let sending = async {
        let how = (*payload_bytes_max, shared.as_mut());
        send(request, batch, wanted, how, (out, to)).await?;
        // Whoever waits for it has failed otherwise.
        let _told = all_sent.send(());
        Ok::<(), Error>(())
    };
    let receiving = receive(request, from, (sent, free), &mut progress, (stall, until));
    let both = async { tokio::try_join!(sending, receiving) };
    let late = |_elapsed| timed_out(DOING, stall);
    timeout_at(until, both).await.map_err(late)??;
    Ok(progress)
}

/// Sends the blocks that are wanted, by shared memory or in pieces of at most `payload_bytes_max`.
async fn send(
    request: u32,
    batch: &Batch<'_>,
    wanted: Vec<Range<usize>>,
    (payload_bytes_max, mut shared): (usize, Option<&mut Shared>),
    (out, to): (&mut Output<Bytes>, &mut Writer),
) -> Result<()> {
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    for position in wanted.into_iter().flatten() {
        for (ordinal, part) in batch.parts.iter().enumerate() {
            let at = position * batch.parts.len() + ordinal;
            let (Some(value), Some(checksum)) = (batch.values.get(at), batch.checksums.get(at))
            else {
                return Err(broken_contract(DOING, "it wants what was not offered"));
            };
            let whole = Place {
                position: number(position),
                part: *part,
                offset: 0,
                part_bytes: number(value.len()),
                checksum: *checksum,
            };
            if let Some(shared) = shared.as_deref_mut() {
                shared.send(value, whole, request, (&mut *out, &mut *to)).await?;
                continue;
            }
            for start in (0..value.len()).step_by(payload_bytes_max) {
                let end = value.len().min(start.saturating_add(payload_bytes_max));
                let place = Place { offset: number(start), ..whole };
                let bytes = number(end - start);
                out.push_payload(value.clone(), start..end, |heads| {
                    place.push(heads, (Kind::Data, 0), request, bytes);
                });
                if out.payload_bytes() >= BULK_BATCH_BYTES || out.is_full() {
                    out.flush(to).await?;
                }
            }
        }
    }
    out.push(|heads| push(heads, (Kind::Finish, 0), request, 0, |_body| {}));
    out.flush(to).await
}

/// Takes results until the put is over. While there is something to send, silence is not the server's.
async fn receive(
    request: u32,
    from: &mut Reader,
    (mut sent, free): (oneshot::Receiver<()>, Option<Arc<Semaphore>>),
    progress: &mut Progress,
    within: (Duration, Instant),
) -> Result<()> {
    let mut is_sent = false;
    loop {
        let header = if is_sent {
            next_header(DOING, from, request, within).await?
        } else {
            tokio::select! {
                biased;
                header = from.header() => {
                    let header: Option<Header> = header?;
                    header.ok_or_else(|| lost(std::io::ErrorKind::UnexpectedEof.into()))?
                }
                _all = &mut sent => {
                    is_sent = true;
                    continue;
                }
            }
        };
        let body = from.body(&header).await?;
        match header.kind {
            Kind::Results => {
                let result = |(start, end, outcome)| {
                    let outcome = i32::try_from(outcome).unwrap_or(0);
                    v1::PutResult { start, end, outcome }
                };
                let results = read_results(body)?.into_iter().map(result).collect();
                progress.results(&v1::PutResults { results })?;
            }
            Kind::Taken => {
                if let Some(free) = &free {
                    free.add_permits(1);
                }
            }
            Kind::End => return Ok(()),
            Kind::Refused => return Err(refusal(DOING, body)),
            _ => return Err(broken_contract(DOING, "a frame that does not answer a put")),
        }
    }
}
