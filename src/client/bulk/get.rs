//! A get over the bulk port: payload is read into the sink's own memory where it lends some, else into
//! one buffer for each block, which is used again if nobody has kept it.

use std::time::Duration;

use kvstrata_proto::v1;
use kvstrata_tiers::error::Result;
use tokio::time::Instant;

use super::connection::{Connection, next_header, refusal};
use crate::{
    bulk::{
        body::{Get, ID_BYTES, Place, STOP_AT_MISS, read_miss},
        frame::Kind,
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
    let flags = if asked.stop_at_miss { STOP_AT_MISS } else { 0 };
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
                let tier = v1::Tier::try_from(i32::from(header.flags)).ok().and_then(tier_of);
                let tier = tier.ok_or_else(|| broken_contract(DOING, "data without a tier"))?;
                let piece = Piece {
                    index: place.position,
                    part: place.part,
                    offset: place.offset as usize,
                    bytes,
                    part_bytes: place.part_bytes as usize,
                    checksum: place.checksum,
                };
                assembler.begin(&piece, tier)?;
                if let Some(room) = assembler.room(&piece, sink) {
                    for slice in room.chunks_mut(SLICE_BYTES) {
                        connection.from.exactly(slice).await?;
                        assembler.landed(slice);
                    }
                } else {
                    let mut data = assembler.buffer(bytes);
                    connection.from.append(&mut data, bytes).await?;
                    assembler.keep(data.freeze());
                }
                assembler.end(&piece, sink);
                connection.took(header.payload_bytes).await?;
            }
            Kind::Miss => {
                let (start, end) = read_miss(connection.from.body(&header).await?)?;
                let reason = header.flags.into();
                assembler.miss(&v1::GetMiss { start, end, reason }, sink)?;
            }
            Kind::End => return connection.from.body(&header).await.map(drop),
            Kind::Refused => return Err(refusal(DOING, connection.from.body(&header).await?)),
            _ => return Err(broken_contract(DOING, "a frame that does not answer a get")),
        }
    }
}
