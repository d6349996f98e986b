//! Keeping room: which segment goes, what of it is written again, and in which order it leaves.
//!
//! The segment goes whose room costs the least writing, see [`survey`](super::survey). *Hot* is what was used more
//! recently than the coldest share of all blocks on the tier, by the ages of the one map: so the order
//! in which blocks leave is that of their last use, as if the tier were one list, and not that of
//! their writing. What is hot is appended again, within the write budget and never more than most of
//! a segment, so that each reclaim gains room.
//!
//! Order: the map and its readers are told, then the index, then the file goes, then the directory is
//! synced, and only then the index forgets the segment. A crash in between leaves a segment without
//! live blocks, never one whose removed blocks would be taken for new.
//!
//! Who shares the disk may take what is left of it. Then the tier gives way, but only down to half of
//! what it had: below that it exchanges its oldest segment for a new one, and if others take that room
//! too, it stops writing and goes on serving what it has.

use std::{io, time::Duration};

use tokio::time::Instant;

use super::{
    OpLabel, RejectLabel,
    device::{SegmentId, Space, SyncPoint},
    format::{Kind, Place, Tombstone},
    index::{Change, IndexKey, Known},
    item::Item,
    segments::Segment,
    victim::{Victim, record_bytes, wanted},
    writer::Writer,
};
use crate::{error::ErrorKind, store::Wanted, tier::Tier};

/// A segment that was passed over so often goes next, so that tombstones and numbers come to an end.
const PASSED_OVER_MAX: u32 = 256;
/// The most of a segment that is written again, in percent.
const KEEP_PERCENT_MAX: u64 = 75;
/// The share of the write burst that writing again must leave for new blocks.
const MOVE_RESERVE: f64 = 0.5;
/// Payload read before it is written again, in bytes.
const MOVE_BYTES_MAX: u64 = 4 << 20;
/// The share of the disk that is left to others (and to the index): 1 / this.
const FLOOR_DIVISOR: u64 = 20;
/// The most that is left to others, in bytes.
const FLOOR_BYTES_MAX: u64 = 4 << 30;
/// Of the most that the tier has had, others can take this part: 1 / this.
const GIVE_WAY_DIVISOR: u64 = 2;
/// How long nothing is reclaimed for a disk that others fill, after they took what was.
const IN_VAIN_PAUSE: Duration = Duration::from_secs(60);
/// How long an answer of the disk about its room is believed: making a segment asks by itself.
const SPACE_VALID: Duration = Duration::from_millis(500);
/// Segments reclaimed in a row before waiting puts get their turn.
const RECLAIMS_IN_A_ROW: usize = 4;
/// Segments beyond twice those that the capacity holds whole: more are merged.
const SMALL_SEGMENTS_MAX: u64 = 64;

/// What of a disk is left to others, in bytes.
pub(super) fn floor_bytes(space: &Space) -> u64 {
    (space.total_bytes / FLOOR_DIVISOR).min(FLOOR_BYTES_MAX)
}

/// Why nothing can be appended now.
#[derive(Debug, Clone, Copy)]
pub(super) struct Refusal {
    pub(super) kind: ErrorKind,
    pub(super) what: &'static str,
}

/// What of a victim may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keep {
    /// What is hot.
    Hot,
    /// Everything: the segment is merged with others.
    All,
    /// Nothing: there are too many blocks.
    Nothing,
}

impl Writer {
    /// Makes sure that there is a segment to write to.
    pub(super) async fn ensure_open(&mut self) -> Result<(), Refusal> {
        if self.open.is_some() {
            return Ok(());
        }
        let mut reclaimed = false;
        loop {
            // Segments that were cut are small: it may take many to make room for one.
            let over = !self.fits_capacity();
            // What was just given back may be taken again, whatever else the disk lacks.
            let made = if !over && self.fits_disk(!reclaimed) {
                self.create()
            } else {
                Err(io::ErrorKind::StorageFull.into())
            };
            match made {
                Ok(()) => {
                    self.in_vain = None;
                    return Ok(());
                }
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    // Others may fill the disk: that is no reason to give them everything.
                    let may = over || !reclaimed && self.may_give_way();
                    if may && Box::pin(self.reclaim(Keep::Nothing)).await {
                        reclaimed |= !over;
                        continue;
                    }
                    if reclaimed && !over {
                        self.in_vain = Some(Instant::now());
                    }
                    if !self.reclaiming {
                        self.core.state.full();
                    }
                    let what = "write to nvme: it is full and nothing could be reclaimed";
                    return Err(Refusal { kind: ErrorKind::Unavailable, what });
                }
                Err(error) => {
                    self.core.metrics.errors(OpLabel::Create).inc();
                    self.core.state.failed(&error);
                    let what = "write to nvme: no segment could be made";
                    return Err(Refusal { kind: ErrorKind::Unavailable, what });
                }
            }
        }
    }

    /// Whether the configured capacity allows one more segment.
    fn fits_capacity(&self) -> bool {
        let file_bytes = self.core.segments.totals().file_bytes;
        file_bytes.saturating_add(self.core.config.segment_bytes) <= self.core.config.capacity_bytes
    }

    /// Whether the disk has room for one more segment, and for what is left to others.
    fn fits_disk(&mut self, with_floor: bool) -> bool {
        // Asking looks at each segment: not for every group that is written.
        let known = self.space.filter(|(then, _)| then.elapsed() < SPACE_VALID);
        let space = known.map_or_else(|| self.core.device.space(), |(_, space)| Ok(space));
        match space {
            Ok(space) => {
                self.space = known.or_else(|| Some((Instant::now(), space)));
                let floor = if with_floor { floor_bytes(&space) } else { 0 };
                let needed = self.core.config.segment_bytes.saturating_add(floor);
                space.available_bytes >= needed
            }
            // Then creating it will tell.
            Err(_unknown) => true,
        }
    }

    /// Whether reclaiming makes sense on a disk that others fill: not if they took what was reclaimed
    /// for the last segment.
    fn may_give_way(&self) -> bool {
        self.in_vain.is_none_or(|then| then.elapsed() >= IN_VAIN_PAUSE)
    }

    /// Whether one more segment fits, or others have taken so much that nothing more is given up.
    fn has_room(&mut self) -> bool {
        let bytes = self.core.segments.totals().file_bytes;
        self.peak_bytes = self.peak_bytes.max(bytes);
        let given_way = bytes <= self.peak_bytes / GIVE_WAY_DIVISOR;
        self.fits_capacity() && (given_way || self.fits_disk(true))
    }

    /// Reclaims until one more segment fits, there are not too many blocks, and none is without a
    /// live one; or a few times.
    pub(super) async fn keep_room(&mut self) {
        for _ in 0..RECLAIMS_IN_A_ROW {
            let has_room = self.has_room();
            let totals = self.core.segments.totals();
            let config = &self.core.config;
            let crowd = config.capacity_bytes / config.segment_bytes * 2 + SMALL_SEGMENTS_MAX;
            let keep = if totals.live_blocks > config.blocks_max {
                Keep::Nothing
            } else if totals.segments > crowd {
                Keep::All
            } else if self.core.segments.dead().is_some() || !has_room {
                Keep::Hot
            } else {
                return;
            };
            if !self.reclaim(keep).await {
                return;
            }
        }
    }

    /// The map is full: the coldest part goes.
    pub(super) async fn shed(&mut self) {
        self.reclaim(Keep::Nothing).await;
    }

    /// Reclaims one segment; false if there is none, or it could not be done.
    async fn reclaim(&mut self, keep: Keep) -> bool {
        if self.reclaiming {
            return false;
        }
        self.reclaiming = true;
        self.settle().await;
        if keep == Keep::Hot {
            self.await_offer().await;
        }
        let done = match self.choose(keep).await {
            Some(victim) => self.empty(victim, keep).await,
            None => false,
        };
        self.reclaiming = false;
        done
    }

    async fn choose(&mut self, keep: Keep) -> Option<Victim> {
        let mut closed = self.core.segments.closed();
        match keep {
            // The oldest needs no room for its tombstones: there is nothing before them.
            Keep::Nothing => closed.truncate(1),
            Keep::All => {
                closed.sort_by_key(|(_, segment)| segment.file_bytes);
                closed.truncate(1);
            }
            Keep::Hot => {
                self.survey.refresh(self.core.above().as_deref(), &closed);
                let dead = self.core.segments.dead();
                let dead = dead.and_then(|dead| closed.iter().position(|(id, _)| *id == dead));
                let due =
                    closed.first().filter(|(_, s)| s.passed_over >= PASSED_OVER_MAX).map(|_| 0);
                let offered = |segment: &Segment| segment.offered;
                let holds = self.core.feed.holds();
                let offered = holds.then(|| self.survey.cheapest(&closed, offered)).flatten();
                let cheapest = || offered.or_else(|| self.survey.cheapest(&closed, |_| true));
                let chosen = dead.or(due).or_else(cheapest).unwrap_or(0);
                closed.swap(0, chosen);
                closed.truncate(1);
            }
        }
        let (id, segment) = closed.pop()?;
        self.core.segments.pass_over(id);
        Some(Victim::look_at(&self.core, id, segment).await)
    }

    /// Writes again what should stay, tells everybody what leaves, and deletes the segment.
    async fn empty(&mut self, victim: Victim, keep: Keep) -> bool {
        if !self.move_tombstones(&victim).await {
            return false;
        }
        match keep {
            Keep::Nothing => {}
            Keep::All => self.move_blocks(&victim, 0).await,
            Keep::Hot => {
                self.move_blocks(&victim, self.survey.cold()).await;
            }
        }
        if self.core.feed.holds() && !victim.segment.offered && victim.segment.live_blocks > 0 {
            self.core.metrics.uncopied_segments.inc();
        }
        self.let_go(&victim);
        self.delete(&victim)
    }

    /// Keeps the tombstones that still have something to kill; false if they could not be written.
    async fn move_tombstones(&mut self, victim: &Victim) -> bool {
        let mut kept = Vec::new();
        for entry in victim.entries.iter().filter(|entry| entry.kind == Kind::Tombstones) {
            let payload = match victim.read(self.core.device.as_ref(), entry).await {
                Ok(scanned) => scanned.payload,
                Err(trouble) => {
                    self.core.note(victim.id, &trouble);
                    continue;
                }
            };
            let segments = &self.core.segments;
            kept.extend(
                Tombstone::decode_all(&payload)
                    .into_iter()
                    .filter(|tombstone| segments.any_up_to(tombstone.barrier.segment, victim.id)),
            );
        }
        let fit = Self::tombstones_max(self.core.config.segment_bytes);
        let items = kept.chunks(fit).map(|kept| Item::old_tombstones(kept.to_vec()));
        let items: Vec<Item> = items.collect();
        items.is_empty() || self.append_and_land(items).await
    }

    /// Appends again the blocks that were used after `cold`, the hottest first in doubt.
    async fn move_blocks(&mut self, victim: &Victim, cold: u64) {
        let chosen = victim.chosen(cold, self.core.config.segment_bytes * KEEP_PERCENT_MAX / 100);
        let mut items = Vec::new();
        let mut bytes = 0;
        for entry in chosen {
            let record = record_bytes(entry);
            if !self.budget.allows(record, MOVE_RESERVE) {
                self.core.metrics.rejected(RejectLabel::Budget).inc();
                break;
            }
            let scanned = match victim.read(self.core.device.as_ref(), entry).await {
                Ok(scanned) => scanned,
                Err(trouble) => {
                    self.core.note(victim.id, &trouble);
                    continue;
                }
            };
            let namespace = self.core.namespaces.get(entry.key.namespace.as_bytes());
            let Ok(namespace) = namespace else { continue };
            let from = wanted(victim.id, entry);
            items.push(Item::moved(from, scanned.header, scanned.payload, &namespace));
            bytes += record;
            if bytes >= MOVE_BYTES_MAX {
                self.append_and_land(std::mem::take(&mut items)).await;
                bytes = 0;
            }
        }
        if !items.is_empty() {
            self.append_and_land(items).await;
        }
    }

    /// Event and map, then the index. What the index cannot tell leaves as well.
    fn let_go(&mut self, victim: &Victim) {
        let blocks = victim.entries.iter().filter(|entry| entry.kind == Kind::Block);
        let mut leaving: Vec<Wanted> = blocks.map(|entry| wanted(victim.id, entry)).collect();
        if !victim.whole {
            leaving.extend(self.indexed_in(victim.id));
        }
        let mut unknown = 0;
        leaving.retain(|block| {
            let key = IndexKey::of(block);
            match self.look_up(&key) {
                Ok(current) => {
                    current.and_then(|(place, _)| place.location()) == Some(block.location)
                }
                Err(_error) => {
                    unknown += 1;
                    true
                }
            }
        });
        self.core.metrics.errors(OpLabel::Index).inc_by(unknown);
        if let Some(above) = self.core.above() {
            above.leaving(Tier::Nvme, &leaving);
        }
        let removed = leaving.iter().map(|block| Change::Remove(IndexKey::of(block)));
        let count = u64::try_from(leaving.len()).unwrap_or(u64::MAX);
        self.core.metrics.reclaimed_blocks.inc_by(count);
        if let Err(error) = self.index(removed) {
            // They stay in line, and point to a segment that is not there: a restart drops them.
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, "nvme index does not take that blocks have left");
        }
    }

    /// What the index has in a segment whose records cannot all be read: a look at all of it.
    fn indexed_in(&self, id: SegmentId) -> Vec<Wanted> {
        let mut found = Vec::new();
        let loaded = self.core.index.load(&mut |known| {
            if let Known::Block(key, entry) = known
                && Place::of(entry.location).segment == id
            {
                found.push(key.at(entry.location));
            }
            Ok(())
        });
        if let Err(error) = loaded {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, "nvme index cannot be read");
        }
        found
    }

    fn delete(&mut self, victim: &Victim) -> bool {
        let segment = self.core.segments.remove(victim.id);
        // What the disk said before is not what it would say now.
        self.space = None;
        if let Err(error) = self.core.device.remove(victim.id) {
            self.core.metrics.errors(OpLabel::Create).inc();
            tracing::warn!(%error, segment = victim.id.0, "nvme segment cannot be deleted");
            // Its room is not free. It has no live block: the next try, or a restart, deletes it.
            if let Some(segment) = segment {
                let segment = Segment { live_bytes: 0, live_blocks: 0, ..segment };
                self.core.segments.insert(victim.id, segment);
            }
            self.core.state.failed(&error);
            return false;
        }
        if let Err(error) = self.core.device.sync_directory(SyncPoint::Deleted) {
            // It may come back, so what kills its blocks must stay: no more is reclaimed or written.
            self.core.metrics.errors(OpLabel::Sync).inc();
            self.core.state.poison(&error);
            return false;
        }
        self.core.metrics.reclaimed_segments.inc();
        // The highest number stays known, so that it is not used again.
        if victim.id.0 + 1 < self.next_segment
            && let Err(error) = self.index([Change::Forget(victim.id)])
        {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, "nvme index does not forget a segment");
        }
        true
    }
}
