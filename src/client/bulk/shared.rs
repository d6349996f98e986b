//! Shared memory from the client's side: the server's arena to copy from, and a staging of ours to copy
//! to, both beside the frames of a Unix socket.

use std::sync::Arc;

use bytes::Bytes;
use kvstrata_tiers::error::{Error, Result};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

use super::connection::{Connection, Writer, refusal};
use crate::{
    bulk::{
        body::Place,
        frame::Kind,
        output::Output,
        shared_body::{DAMAGED, HAS_REGIONS, Regions, Spot, Staged, push_number},
    },
    client::{
        GetSink,
        assemble::{Assembler, Piece},
        status::broken_contract,
    },
    limits::SHM_REGIONS_MAX,
    shm::{
        map::{Mapping, Staging},
        socket::Files,
    },
};

const DOING: &str = "share memory";
/// What a put writes into the staging at a time.
const STAGED_PIECE_BYTES: usize = 256 << 10;
/// How many of those the staging has: together they stay in a cache that cores share.
const STAGED_PIECES: usize = 8;
/// The arena of a server, mapped.
struct Arena {
    instance: Bytes,
    regions: Box<[Mapping]>,
}

/// The arena that was mapped last: one for all connections to a server.
#[derive(Default)]
pub(super) struct Known(Mutex<Option<Arc<Arena>>>);

/// What a connection shares with its server.
pub(super) struct Shared {
    arena: Arc<Arena>,
    /// Bytes that are copied before the server is told.
    release_after: usize,
    copied: usize,
    /// The pin of the latest block that was copied, and the latest that the server was told of.
    done: u64,
    released: u64,
    staging: Staging,
    /// Pieces of the staging that the server has copied.
    free: Arc<Semaphore>,
    /// The piece of it that comes next.
    next: usize,
}

impl Known {
    fn of(&self, instance: &Bytes) -> Option<Arc<Arena>> {
        self.0.lock().clone().filter(|arena| arena.instance == instance)
    }
}

impl Connection {
    /// Shares memory with the server; none if it does not want to.
    ///
    /// # Errors
    /// Whatever ends the connection, and regions that could be taken away while they are read.
    pub(super) async fn share(&mut self, files: &Files, known: &Known) -> Result<Option<Shared>> {
        let request = self.begin();
        let staging = Staging::new(STAGED_PIECES * STAGED_PIECE_BYTES)?;
        let sent = staging.file().try_clone();
        files.send(vec![sent.map_err(|error| Error::invalid(DOING).because(error))?]);
        let arena = known.of(self.instance());
        let (flags, expected) =
            if arena.is_some() { (HAS_REGIONS, 0) } else { (0, SHM_REGIONS_MAX) };
        files.expect(expected);
        let staging_bytes = u64::try_from(staging.len()).unwrap_or(u64::MAX);
        self.out.push(|heads| push_number(heads, (Kind::Map, flags), request, staging_bytes));
        self.out.flush(&mut self.to).await?;
        let header = self.from.header().await?;
        let header = header.ok_or_else(|| broken_contract(DOING, "no answer"))?;
        let body = self.from.body(&header).await?;
        files.expect(0);
        match header.kind {
            Kind::Arena => {}
            Kind::Refused if header.request == request => {
                let error = refusal(DOING, body);
                tracing::debug!(%error, "blocks go over the Unix socket");
                return Ok(None);
            }
            Kind::Refused => return Err(refusal(DOING, body)),
            _ => return Err(broken_contract(DOING, "a frame that does not answer it")),
        }
        let regions = Regions::read(&body)?;
        let arena = match arena {
            Some(arena) => arena,
            None => {
                let arena = map(self.instance().clone(), &regions, files)?;
                *known.0.lock() = Some(Arc::clone(&arena));
                arena
            }
        };
        let release_after = usize::try_from(regions.pinned_bytes_max / 4).unwrap_or(usize::MAX);
        Ok(Some(Shared {
            arena,
            release_after,
            copied: 0,
            done: 0,
            released: 0,
            staging,
            free: Arc::new(Semaphore::new(STAGED_PIECES)),
            next: 0,
        }))
    }
}

fn map(instance: Bytes, told: &Regions, files: &Files) -> Result<Arc<Arena>> {
    let come = files.take();
    if come.len() != told.lengths.len() {
        let (come, told) = (come.len(), told.lengths.len());
        return Err(broken_contract(DOING, &format!("{come} of {told} regions")));
    }
    let regions = come.iter().zip(&told.lengths).map(|(file, bytes)| Mapping::new(file, *bytes));
    let regions = regions.collect::<Result<_>>()?;
    Ok(Arc::new(Arena { instance, regions }))
}

impl Shared {
    /// Copies a part from where it lies, hashes the copy, and hands it to the assembler; returns
    /// whether its block has turned out to be damaged.
    pub(super) fn copy<S: GetSink>(
        &mut self,
        spot: &Spot,
        piece: &Piece,
        assembler: &mut Assembler<'_>,
        sink: &mut S,
    ) -> Result<bool> {
        let outside = || broken_contract("get", "a place that is not in the arena");
        let region = usize::try_from(spot.region).ok();
        let region = region.and_then(|region| self.arena.regions.get(region));
        let region = region.ok_or_else(outside)?;
        let offset = usize::try_from(spot.offset).map_err(|_beyond| outside())?;
        let is_inside = match assembler.room(piece, sink) {
            Some(room) => region.bytes(offset, piece.bytes).map(|from| {
                if let Some(hasher) = assembler.hasher() {
                    hasher.copy(from, room.into());
                }
            }),
            None => assembler.hashed_buffer().and_then(|(buffer, hasher)| {
                region.append(offset, piece.bytes, buffer, hasher).then_some(())
            }),
        };
        is_inside.ok_or_else(outside)?;
        self.copied = self.copied.saturating_add(piece.bytes);
        let damaged = assembler.damaged_blocks();
        assembler.end(piece, sink);
        if assembler.is_between_blocks() {
            self.done = spot.pin;
        }
        Ok(assembler.damaged_blocks() > damaged)
    }

    /// Whether the server is to be told of what has been copied: now and then, or `now` if there is any.
    pub(super) fn is_due(&self, now: bool) -> bool {
        (now || self.copied >= self.release_after) && self.done > self.released
    }

    /// Appends that all that has been copied is let go, and whether the last of it is `damaged`.
    pub(super) fn release(&mut self, out: &mut Vec<u8>, damaged: bool) {
        let flags = if damaged { DAMAGED } else { 0 };
        push_number(out, (Kind::Release, flags), 0, self.done);
        (self.released, self.copied) = (self.done, 0);
    }

    /// Pieces of the staging that are free, told of by whoever reads the answers.
    pub(super) fn free(&self) -> Arc<Semaphore> {
        Arc::clone(&self.free)
    }

    /// Sends a value by the staging.
    pub(super) async fn send(
        &mut self,
        value: &Bytes,
        place: Place,
        request: u32,
        (out, to): (&mut Output<Bytes>, &mut Writer),
    ) -> Result<()> {
        let mut place = place;
        for piece in value.chunks(STAGED_PIECE_BYTES) {
            let free = match self.free.try_acquire() {
                Ok(free) => free,
                Err(_none) => {
                    // The server should know of all that it is to copy.
                    out.flush(to).await?;
                    let free = self.free.acquire().await;
                    free.map_err(|_closed| broken_contract(DOING, "closed"))?
                }
            };
            // Free again when the server says so.
            free.forget();
            let offset = self.next * STAGED_PIECE_BYTES;
            self.next = (self.next + 1) % STAGED_PIECES;
            if !self.staging.write(offset, piece) {
                return Err(broken_contract(DOING, "a piece outside of the staging"));
            }
            let bytes = u32::try_from(piece.len()).unwrap_or(u32::MAX);
            let offset = u64::try_from(offset).unwrap_or(u64::MAX);
            let staged = Staged { place, bytes, offset };
            out.push(|heads| staged.push(heads, request));
            place.offset = place.offset.saturating_add(bytes);
        }
        if self.free.available_permits() < STAGED_PIECES / 2 {
            out.flush(to).await?;
        }
        Ok(())
    }
}
