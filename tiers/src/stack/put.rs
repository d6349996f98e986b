//! Put: claims, pieces, seals.
//!
//! A batch claims parts of blocks that are absent; a claim makes the block *pending* for lookups and
//! keeps other batches from writing the same part. Memory is taken when the first piece of a block
//! comes. A part is verified in the arena, after our own copy, so that what is sealed is what was
//! checked. When the last part of a block is done, whichever batch brings it, the block is sealed and
//! readable. A batch that ends, however it ends, gives up what it claimed and did not complete; a
//! fragment whose other parts never come is evicted like any block.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use super::{
    ContextId, Shared,
    claim::{Claim, Offer, check_offer, claim_known, claim_parts, join},
    context::Parent,
    piece::{Filled, Piece, PutOutcome, Span, Writing},
};
use crate::{
    block::BlockHash,
    checksum::PartHasher,
    dram::{BlockWriter, slot_bytes},
    error::{Error, ErrorKind, Result},
    limits::RETRY_AFTER_PINNED,
    map::{BatchId, Entry, Hashed, Map, Shard, StagedPart, Staging, stored},
    namespace::Namespace,
    tier::Tier,
};

/// One position of an open batch.
#[derive(Debug)]
struct Position {
    at: Hashed,
    len: u32,
    /// Offered parts that are not done yet; 0 when the position is settled.
    left: u32,
    /// This batch has made it readable.
    readable: bool,
}

/// An open put. Dropping it gives up what it did not complete.
#[derive(Debug)]
pub struct PutBatch {
    shared: Arc<Shared>,
    namespace: Arc<Namespace>,
    id: BatchId,
    context: ContextId,
    parts: Vec<u32>,
    positions: Vec<Position>,
    claims: Vec<Claim>,
    open: HashMap<(u32, u32), Writing>,
    /// (position, part) done, of positions whose other parts are missing.
    done: HashSet<(u32, u32)>,
    retry_after: Option<Duration>,
    stored: bool,
}

/// How storing a part changed its block.
enum Seal {
    Readable,
    Fragment,
    Gone,
}

impl PutBatch {
    pub(super) fn open(
        shared: &Arc<Shared>,
        namespace: &Arc<Namespace>,
        offer: Offer<'_>,
    ) -> Result<Self> {
        check_offer(shared, namespace, &offer)?;
        let declared = u32::try_from(namespace.layout().parts().len()).unwrap_or(u32::MAX);
        let parts = match offer.parts {
            [] => (0..declared).collect(),
            some => some.to_vec(),
        };
        let index = namespace.index();
        let parent = match offer.parent.map(|hash| shared.map.hashed(index, hash)) {
            None => Parent::None,
            Some(at) => shared.map.with(at, |shard| match shard.entry(at) {
                Some(entry) => Parent::Present(entry.context),
                None => Parent::Absent(at.key),
            }),
        };
        let tail = offer.hashes.iter().next_back().map(|hash| shared.map.hashed(index, hash).key);
        let mut batch = Self {
            shared: Arc::clone(shared),
            namespace: Arc::clone(namespace),
            id: shared.next_batch(),
            context: shared.contexts.join(parent, tail),
            positions: Vec::with_capacity(offer.hashes.len()),
            claims: Vec::with_capacity(offer.hashes.len()),
            open: HashMap::new(),
            done: HashSet::new(),
            retry_after: None,
            stored: false,
            parts,
        };
        for (position, hash) in offer.hashes.iter().enumerate() {
            let sums = position * batch.parts.len()..(position + 1) * batch.parts.len();
            let sums = offer.checksums.get(sums).unwrap_or_default();
            batch.claim(hash, offer.lengths.get(position).copied(), sums);
        }
        Ok(batch)
    }

    fn claim(&mut self, hash: BlockHash, len: Option<u32>, sums: &[u64]) {
        let at = self.shared.map.hashed(self.namespace.index(), hash);
        let len = len.unwrap_or(self.namespace.layout().bytes_max());
        let claim = self.claim_here(at, len, sums, false).unwrap_or_else(|| {
            // Outside the lock: making room locks other shards.
            let has_room = self.shared.make_index_room(self.namespace.account(), self.context);
            let added = if has_room { self.claim_here(at, len, sums, true) } else { None };
            added.unwrap_or(Claim::Refused)
        });
        match claim {
            Claim::Differs => {
                self.shared.metrics.duplicate_differs.inc();
            }
            Claim::Refused => self.refuse(),
            Claim::Wanted | Claim::Duplicate | Claim::Pending => {}
        }
        let left = match claim {
            Claim::Wanted => u32::try_from(self.parts.len()).unwrap_or(u32::MAX),
            Claim::Duplicate | Claim::Differs | Claim::Pending | Claim::Refused => 0,
        };
        self.positions.push(Position { at, len, left, readable: false });
        self.claims.push(claim);
    }

    /// `None`: the block is unknown, and `may_add` does not allow a new entry.
    fn claim_here(&self, at: Hashed, len: u32, sums: &[u64], may_add: bool) -> Option<Claim> {
        self.shared.map.with(at, |shard| {
            if let Some(id) = shard.find(at) {
                return Some(claim_known(shard.get_mut(id)?, self.id, &self.parts, sums, len));
            }
            if !may_add {
                return None;
            }
            let mut staging = Box::new(Staging::new(self.namespace.layout().parts().len()));
            claim_parts(&mut staging, self.id, &self.parts);
            let mut entry = Entry::new(at.key, len);
            entry.staging = Some(staging);
            shard.insert(at, entry);
            self.shared.map.count(true);
            Some(Claim::Wanted)
        })
    }

    fn refuse(&mut self) {
        self.shared.metrics.refused.inc();
        self.retry_after = Some(RETRY_AFTER_PINNED);
    }

    /// What is wanted, for each position of the offer.
    #[must_use]
    pub fn claims(&self) -> &[Claim] {
        &self.claims
    }

    /// When to offer again what was refused.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry_after
    }

    /// Takes some bytes of a wanted position; pieces of one part come in order of offset. Returns
    /// the outcome when all offered parts of the position are done.
    ///
    /// # Errors
    /// `Invalid` or `LayoutMismatch` naming position, part, value and range. The batch stays usable.
    ///
    /// # Blocking
    /// Copies the bytes; with the last piece of a part, reads the whole part once.
    pub fn write(&mut self, piece: Piece<'_>) -> Result<Option<PutOutcome>> {
        let Piece { position, part, offset, data, checksum, part_bytes } = piece;
        let bytes = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let span = Span { position, part, offset, bytes, checksum, part_bytes };
        let copy = |room: &mut [u8]| {
            room.copy_from_slice(data);
            data.len()
        };
        Ok(self.fill(span, copy)?.outcome)
    }

    /// Lets `fill` write some bytes of a wanted position where they will stay. It is handed the room
    /// for all of them and returns how many it has written, from the beginning on; the next call gives
    /// a span that begins behind them. It is not called when there is no room for the block.
    ///
    /// # Errors
    /// As those of [`write`](Self::write).
    ///
    /// # Blocking
    /// With the last bytes of a part, reads the whole part once.
    pub fn fill(&mut self, span: Span, fill: impl FnOnce(&mut [u8]) -> usize) -> Result<Filled> {
        let len = self.check_span(&span)?;
        let slot = (span.position, span.part);
        let mut writing = match self.open.remove(&slot) {
            Some(writing) => writing,
            None => match self.begin(&span, len) {
                Some(writing) => writing,
                None => {
                    self.refuse();
                    self.settle(span.position);
                    return Ok(Filled { bytes: 0, outcome: Some(PutOutcome::Refused) });
                }
            },
        };
        let filled = writing.fill(&span, fill);
        if filled.is_err() || !writing.is_whole() {
            self.open.insert(slot, writing);
            return filled.map(|bytes| Filled { bytes, outcome: None });
        }
        let outcome = self.complete(&span, writing);
        Ok(Filled { bytes: filled?, outcome })
    }

    /// Returns the length of the block, if the bytes belong to this batch.
    fn check_span(&self, span: &Span) -> Result<u32> {
        let position = usize::try_from(span.position).unwrap_or(usize::MAX);
        let Some(known) = self.positions.get(position) else {
            return Err(Error::invalid(format!(
                "index: {} given, 0 to {} allowed by the offer",
                span.position,
                self.positions.len().saturating_sub(1)
            )));
        };
        if known.left == 0 {
            return Err(Error::invalid(format!(
                "index: {} given, but the bytes of that position are not wanted (any more)",
                span.position
            )));
        }
        if !self.parts.contains(&span.part) {
            return Err(Error::invalid(format!(
                "part: {} given for index {}, one of {:?} required by the offer",
                span.part, span.position, self.parts
            )));
        }
        if self.done.contains(&(span.position, span.part)) {
            return Err(Error::invalid(format!(
                "part: {} given for index {}, which has come whole already",
                span.part, span.position
            )));
        }
        let part = usize::try_from(span.part).unwrap_or(usize::MAX);
        let lengths = self.namespace.layout().lengths(known.len);
        let declared = lengths.get(part).copied().unwrap_or(0);
        let given = span.whole();
        if given != u64::from(declared) {
            return Err(Error::new(
                ErrorKind::LayoutMismatch,
                format!(
                    "part {} of index {}: {given} bytes given, exactly {declared} declared",
                    span.part, span.position
                ),
            ));
        }
        Ok(known.len)
    }

    /// Takes the writer of a claimed part, making room for the block if it is the first one.
    fn begin(&self, span: &Span, len: u32) -> Option<Writing> {
        let at = self.position(span.position)?.at;
        let part = usize::try_from(span.part).ok()?;
        let layout = self.namespace.layout();
        let spec = layout.parts().get(part)?;
        let writer = match self.take_writer(at, part, None)? {
            Some(writer) => writer,
            None => {
                let lengths = layout.lengths(len);
                let slot = slot_bytes(len, layout.is_opaque());
                let account = self.namespace.account();
                let writers = self.shared.make_room(account, (slot, &lengths), self.context)?;
                self.take_writer(at, part, Some(writers))??
            }
        };
        let id = self.namespace.id();
        let hasher = PartHasher::new(id, &at.key.hash, spec.group, spec.rank);
        Some(Writing::new(writer, hasher))
    }

    /// `None`: the claim is gone (the block was removed). `Some(None)`: the block has no memory yet.
    fn take_writer(
        &self,
        at: Hashed,
        part: usize,
        memory: Option<Vec<BlockWriter>>,
    ) -> Option<Option<BlockWriter>> {
        self.shared.map.with(at, |shard| {
            let id = shard.find(at)?;
            let staging = shard.get_mut(id)?.staging.as_mut()?;
            // Memory of ours may have another length than what another batch has claimed since.
            if !staging.parts.get(part)?.is_claimed_by(self.id) {
                return None;
            }
            if let Some(memory) = memory {
                staging.install(memory);
            }
            match staging.parts.get_mut(part)? {
                StagedPart::Claimed(_, writer) => Some(writer.take()),
                StagedPart::Absent(_) | StagedPart::Done(..) => None,
            }
        })
    }

    fn complete(&mut self, span: &Span, writing: Writing) -> Option<PutOutcome> {
        let position = self.position(span.position)?;
        let (at, part) = (position.at, usize::try_from(span.part).ok()?);
        let (sum, writer) = (writing.checksum(), writing.into_writer());
        if sum != span.checksum {
            self.give_back(at, part, writer);
            self.settle(span.position);
            return Some(PutOutcome::Corrupt);
        }
        let slot = (span.position, span.part);
        let seal = self.shared.map.with(at, |shard| self.store_part(shard, at, part, writer, sum));
        self.shared.settled.tell();
        match seal {
            Seal::Gone => {
                self.settle(span.position);
                Some(PutOutcome::Refused)
            }
            Seal::Readable => {
                self.stored = true;
                self.part_done(slot, PutOutcome::Stored)
            }
            Seal::Fragment => {
                self.stored = true;
                self.part_done(slot, PutOutcome::PartStored)
            }
        }
    }

    fn part_done(&mut self, slot: (u32, u32), outcome: PutOutcome) -> Option<PutOutcome> {
        let position = self.positions.get_mut(usize::try_from(slot.0).ok()?)?;
        position.left = position.left.saturating_sub(1);
        position.readable |= outcome == PutOutcome::Stored;
        if position.left > 0 {
            self.done.insert(slot);
            return None;
        }
        Some(outcome)
    }

    fn store_part(
        &self,
        shard: &mut Shard,
        at: Hashed,
        part: usize,
        writer: BlockWriter,
        sum: u64,
    ) -> Seal {
        let Some(id) = shard.find(at) else { return Seal::Gone };
        let Some(entry) = shard.get_mut(id) else { return Seal::Gone };
        let Some(staging) = entry.staging.as_mut() else { return Seal::Gone };
        // Another's claim is of a later entry, with other memory: the block was removed meanwhile.
        match staging.parts.get_mut(part).filter(|place| place.is_claimed_by(self.id)) {
            Some(place) => *place = StagedPart::Done(writer, sum),
            None => return Seal::Gone,
        }
        if entry.context == 0 {
            entry.context = self.context;
            self.shared.contexts.hold(self.context, self.namespace.block_tokens());
        }
        let slot = slot_bytes(entry.len, self.namespace.layout().is_opaque());
        let class = (slot, self.namespace.account().lane());
        if !staging.is_complete() {
            if let Some(writer) = staging.writers().next() {
                writer.set_owner(Map::owner(at, id));
            }
            shard.enter_order(id, class, at.code);
            shard.touch(id, self.shared.map.ages(1));
            return Seal::Fragment;
        }
        let joined = entry.staging.take().and_then(|staging| join(*staging, entry.len));
        let Some((payload, checksums)) = joined else {
            debug_assert!(false, "the parts of a block lie in one slot");
            self.shared.forget_unread(shard.remove(at));
            return Seal::Gone;
        };
        payload.set_owner(Map::owner(at, id));
        self.shared.count_readable(&self.namespace, &payload);
        entry.payload = Some(payload);
        entry.checksums = checksums;
        // The age that a fragment had is not in the extent's sum.
        entry.age = 0;
        shard.enter_order(id, class, at.code);
        shard.touch(id, self.shared.map.ages(1));
        shard.push(stored(at.key, Tier::Dram));
        Seal::Readable
    }

    fn position(&self, position: u32) -> Option<&Position> {
        self.positions.get(usize::try_from(position).ok()?)
    }

    /// Puts memory back under a part that was not completed.
    fn give_back(&self, at: Hashed, part: usize, writer: BlockWriter) {
        self.shared.map.with(at, |shard| {
            let Some(id) = shard.find(at) else { return };
            let staging = shard.get_mut(id).and_then(|entry| entry.staging.as_mut());
            let place = staging.and_then(|staging| staging.parts.get_mut(part));
            if let Some(StagedPart::Claimed(owner, place)) = place
                && *owner == self.id
            {
                *place = Some(writer);
            }
        });
    }

    /// Ends a position: its claims are given up, and an entry that nothing is left of goes away.
    fn settle(&mut self, position: u32) {
        let number = position;
        let Some(position) = usize::try_from(position).ok().and_then(|p| self.positions.get_mut(p))
        else {
            return;
        };
        position.left = 0;
        let at = position.at;
        for part in 0..self.parts.len() {
            let Some(part) = self.parts.get(part).copied() else { continue };
            if let Some(writing) = self.open.remove(&(number, part)) {
                self.give_back(
                    at,
                    usize::try_from(part).unwrap_or(usize::MAX),
                    writing.into_writer(),
                );
            }
        }
        let id = self.id;
        let gone = self.shared.map.with(at, |shard| {
            let entry = shard.find(at)?;
            let staging = shard.get_mut(entry)?.staging.as_mut()?;
            for part in &mut staging.parts {
                if let StagedPart::Claimed(owner, writer) = part
                    && *owner == id
                {
                    *part = StagedPart::Absent(writer.take());
                }
            }
            if staging.is_empty() { shard.remove(at) } else { None }
        });
        self.shared.settled.tell();
        self.shared.forget_unread(gone);
    }

    /// Ends the batch: what it stored is touched tail first, what is still open is given up.
    pub fn finish(mut self) {
        if std::mem::take(&mut self.stored) {
            let both = self.positions.iter().zip(&self.claims);
            let wanted = both.filter(|(_, claim)| **claim == Claim::Wanted);
            let keys: Vec<Hashed> = wanted.map(|(position, _)| position.at).collect();
            self.shared.touch_keys(&keys);
        }
    }
}

impl Drop for PutBatch {
    fn drop(&mut self) {
        for position in 0..self.positions.len() {
            let number = u32::try_from(position).unwrap_or(u32::MAX);
            if self.positions.get(position).is_some_and(|position| position.left > 0) {
                self.settle(number);
            }
        }
        self.shared.contexts.let_go(self.context, 0);
        // In chain order: a run of a prefix should lie together on nvme, too.
        let readable = self.positions.iter().filter(|position| position.readable);
        self.shared.demote_later(readable.map(|position| position.at));
    }
}
