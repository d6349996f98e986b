//! A get over the bulk port: payload is read into the sink's own memory where it lends some, else into
//! one buffer for each part, which is used again if nobody has kept it; and hashed as it comes.

use std::time::Duration;

use kvstrata_proto::v1;
use kvstrata_tiers::{error::Result, tier::Tier};
use tokio::time::Instant;

use super::connection::{Connection, Reader, next_header, refusal};
use crate::{
    bulk::{
        body::{Get, ID_BYTES, Place, STOP_AT_MISS, read_miss},
        frame::{Header, Kind},
        shared_body::{BY_PLACE, Spot},
    },
    client::{
        GetSink,
        assemble::{Assembler, Piece},
        lookup::tier_of,
        status::broken_contract,
    },
};

const DOING: &str = "get";
/// Bytes read into a sink's memory before they are hashed: they are still in the cache then.
const SLICE_BYTES: usize = 256 << 10;

/// Asks for blocks and hands what comes to the assembler, to the end.
pub(in crate::client) async fn get<S: GetSink>(
    connection: &mut Connection,
    asked: v1::GetRequest,
    (stall, until): (Duration, Instant),
    assembler: &mut Assembler<'_>,
    sink: &mut S,
) -> Result<()> {
    let request = connection.begin();
    let by_place = if connection.shared.is_some() { BY_PLACE } else { 0 };
    let flags = by_place | if asked.stop_at_miss { STOP_AT_MISS } else { 0 };
    let get = Get {
        namespace: asked.namespace_id.as_ref().try_into().unwrap_or_default(),
        lease: <[u8; ID_BYTES]>::try_from(asked.lease_id.as_ref()).unwrap_or_default(),
        deadline_ms: asked.deadline_ms,
        parts: asked.parts,
        hashes: asked.hashes,
    };
    connection.out.push(|heads| get.push(heads, request, flags));
    connection.out.flush(&mut connection.to).await?;
    loop {
        let header = next_header(DOING, &mut connection.from, request, (stall, until)).await?;
        match header.kind {
            Kind::Block => {
                let place = Place::read(&connection.from.fixed(&header).await?);
                let bytes = usize::try_from(header.payload_bytes).unwrap_or(usize::MAX);
                let piece = piece_of(&place, bytes);
                assembler.begin(&piece, tier(&header)?)?;
                if let Some(room) = assembler.room(&piece, sink) {
                    for slice in room.chunks_mut(SLICE_BYTES) {
                        connection.from.exactly(slice).await?;
                        assembler.landed(slice);
                    }
                } else {
                    read(&mut connection.from, assembler, bytes).await?;
                }
                assembler.end(&piece, sink);
                connection.took(header.payload_bytes).await?;
            }
            Kind::Pinned => {
                let spot = Spot::read(&connection.from.fixed(&header).await?);
                let Some(shared) = &mut connection.shared else {
                    return Err(broken_contract(DOING, "a place in memory that is not shared"));
                };
                let piece = piece_of(&spot.place, spot.place.part_bytes as usize);
                assembler.begin(&piece, tier(&header)?)?;
                let damaged = shared.copy(&spot, &piece, assembler, sink)?;
                connection.let_go(damaged, false).await?;
            }
            Kind::Miss => {
                let (start, end) = read_miss(connection.from.body(&header).await?)?;
                let reason = header.flags.into();
                assembler.miss(&v1::GetMiss { start, end, reason }, sink)?;
            }
            Kind::End => {
                connection.from.body(&header).await?;
                return connection.let_go(false, true).await;
            }
            Kind::Refused => return Err(refusal(DOING, connection.from.body(&header).await?)),
            _ => return Err(broken_contract(DOING, "a frame that does not answer a get")),
        }
    }
}

fn tier(header: &Header) -> Result<Tier> {
    let tier = v1::Tier::try_from(i32::from(header.flags)).ok().and_then(tier_of);
    tier.ok_or_else(|| broken_contract(DOING, "data without a tier"))
}

fn piece_of(place: &Place, bytes: usize) -> Piece {
    Piece {
        index: place.position,
        part: place.part,
        offset: place.offset as usize,
        bytes,
        part_bytes: place.part_bytes as usize,
        checksum: place.checksum,
    }
}

/// Reads a piece into a buffer of ours.
async fn read(from: &mut Reader, assembler: &mut Assembler<'_>, bytes: usize) -> Result<()> {
    let mut left = bytes;
    while left > 0
        && let Some(buffer) = assembler.buffer()
    {
        let read = from.append_some(buffer, left).await?;
        assembler.filled(read);
        left = left.saturating_sub(read);
    }
    Ok(())
}
