//! Appending: records are placed, encoded into pages, written, synced, indexed and answered.

use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::Arc,
    task::Poll,
};

use futures_util::{StreamExt, poll, stream::FuturesUnordered};

use super::{
    OpLabel, RejectLabel,
    aligned::{AlignedBuf, PAGE, PAGE_BYTES},
    chunks::Chunks,
    device::{SegmentId, SyncPoint, write_full},
    format::{Entry, Kind, Place, RecordHeader, SegmentHeader, Shape, Tombstone, checksum},
    index::{Change, IndexEntry, IndexKey},
    item::{Bytes, Item, Then},
    reclaim::Refusal,
    seal::Open,
    writer::{GIVE_WAY_MAX, GROUP_BYTES_MAX, Writer},
};
use crate::{
    error::{Error, ErrorKind},
    map::Checksums,
    namespace::NamespaceId,
};

/// Writes under way at once, when somebody waits for them and when nobody does: as many as it takes
/// to keep a disk busy, and few enough to leave it to reads.
const WRITES_URGENT: usize = 4;
/// See [`WRITES_URGENT`].
const WRITES_BACKGROUND: usize = 2;
/// Changes that the index may have refused before writing ends: 10 MiB of memory, and more than any
/// group has.
const UNINDEXED_MAX: usize = 65_536;
const TOO_LARGE: Refusal =
    Refusal { kind: ErrorKind::Invalid, what: "write to nvme: it does not fit into a segment" };
const FAILED: Refusal =
    Refusal { kind: ErrorKind::Unavailable, what: "write to nvme: writing failed a moment ago" };

/// A record with its place.
struct Placed {
    header: RecordHeader,
    item: Item,
}

/// Records that are written, synced and indexed together.
#[derive(Default)]
struct Group {
    placed: Vec<Placed>,
    changes: Vec<Change>,
    /// Bytes of the segment before and behind it.
    start: u64,
    end: u64,
    /// What became of blocks within this group, which the index does not know yet.
    latest: HashMap<IndexKey, Option<(Place, u64)>>,
    /// Places that die with it, and the bytes of their records.
    dead: Vec<(Place, u64)>,
    /// Namespaces that the index hears of with it.
    namespaces: Vec<NamespaceId>,
}

impl Writer {
    /// Writes all items, in order, and answers them; false if one could not be written. `urgent`:
    /// somebody waits.
    pub(super) async fn append(&mut self, items: Vec<Item>, urgent: bool) -> bool {
        let mut items = VecDeque::from(items);
        let mut well = true;
        while !items.is_empty() {
            if let Err(why) = self.ensure_open().await {
                self.refuse_all(items, &why);
                return false;
            }
            let group = self.place(&mut items);
            if group.placed.is_empty()
                && self.open.as_ref().is_some_and(|open| open.at == 0)
                && let Some(item) = items.pop_front()
            {
                // It would not fit into the next one either.
                self.refuse(item, RejectLabel::Size, &TOO_LARGE);
                well = false;
                continue;
            }
            let written = self.write(group, urgent).await;
            well &= written;
            if !written && self.open.is_none() && self.core.state.check().is_err() {
                // Each further try would leave a segment behind.
                self.refuse_all(items, &FAILED);
                return false;
            }
            self.seal_if_full(items.front()).await;
        }
        well
    }

    /// Places items into the open segment until one does not fit or the group is large enough.
    fn place(&mut self, items: &mut VecDeque<Item>) -> Group {
        let mut group = Group::default();
        let Some(mut open) = self.open.take() else { return group };
        group.start = open.at;
        open.at = open.at.max(PAGE);
        while let Some(item) = items.pop_front() {
            let first = group.placed.is_empty();
            if !first && open.at - group.start + item.bytes() > GROUP_BYTES_MAX
                || !self.fits(&open, &item)
            {
                items.push_front(item);
                break;
            }
            self.place_one(&mut open, &mut group, item);
        }
        if group.placed.is_empty() {
            // Nothing of it is written: if it is new, its header is still to come.
            open.at = group.start;
            self.open = Some(open);
            return group;
        }
        group.end = open.at;
        group.changes.push(Change::Indexed {
            segment: open.id,
            generation: open.generation,
            bytes: open.at,
        });
        self.open = Some(open);
        group
    }

    pub(super) fn fits(&self, open: &Open, item: &Item) -> bool {
        let mut bytes = item.bytes();
        let mut table = open.table.bytes() + Entry::BYTES + item.sums.len() * 8;
        if let Some((id, encoded)) = &item.namespace
            && !open.namespaces.contains(id)
        {
            bytes += Shape::of(0, encoded.len()).bytes();
            table += Entry::BYTES + encoded.len();
        }
        let table = u64::try_from(table).unwrap_or(u64::MAX).next_multiple_of(PAGE);
        open.at.max(PAGE) + bytes + table + PAGE <= self.core.config.segment_bytes
    }

    fn place_one(&mut self, open: &mut Open, group: &mut Group, mut item: Item) {
        let latest = |key: &IndexKey| match group.latest.get(key) {
            Some(known) => *known,
            None => self.current(key),
        };
        if let Then::Moved(from) = &item.then {
            // Removed, or put again, since it was read.
            let current = latest(&item.key).and_then(|(place, _)| place.location());
            if current != Some(from.location) {
                return;
            }
        }
        let before = if item.kind == Kind::Block { latest(&item.key) } else { None };
        if let Some((id, encoded)) = item.namespace.take()
            && open.namespaces.insert(id)
        {
            let key = IndexKey { namespace: id, ..IndexKey::NONE };
            if self.known.insert(id) {
                group.namespaces.push(id);
                group.changes.push(Change::Namespace(id, encoded.clone()));
            }
            let note = Item::note(Kind::Namespace, key, encoded);
            let header = header_of(open, &note);
            open.table.push(Entry::of(&header, note.bytes.as_ref()));
            group.placed.push(Placed { header, item: note });
        }
        let unit = u32::try_from(open.at / PAGE).unwrap_or(u32::MAX);
        let place = Place { segment: open.id, unit };
        self.set_tombstones(group, &mut item, place);
        let header = header_of(open, &item);
        open.table.push(Entry::of(&header, &[]));
        if item.kind == Kind::Block {
            group.dead.extend(before);
            group.latest.insert(item.key, Some((place, header.shape().bytes())));
            if let Some(location) = place.location() {
                let checksums = Checksums::new(item.sums.clone());
                let generation = open.generation;
                let entry = IndexEntry { location, generation, len: header.len, checksums };
                group.changes.push(Change::Put(item.key, entry));
            }
        }
        group.placed.push(Placed { header, item });
    }

    /// Gives new tombstones their barrier, and notes what they kill.
    fn set_tombstones(&self, group: &mut Group, item: &mut Item, barrier: Place) {
        if let Then::Removed(_, blocks) = &item.then {
            for block in blocks {
                let key = IndexKey::of(block);
                item.tombstones.push(Tombstone { key, barrier });
                let latest = group.latest.insert(key, None);
                group.dead.extend(latest.unwrap_or_else(|| self.current(&key)));
                group.changes.push(Change::Remove(key));
            }
        }
        if matches!(item.then, Then::Owed) {
            for Tombstone { key, barrier } in &item.tombstones {
                let latest = group.latest.get(key).copied();
                let latest = latest.unwrap_or_else(|| self.current(key));
                if let Some((place, bytes)) = latest.filter(|(place, _)| place < barrier) {
                    group.latest.insert(*key, None);
                    group.dead.push((place, bytes));
                    group.changes.push(Change::Remove(*key));
                }
            }
        }
        if !item.tombstones.is_empty() {
            item.bytes = Bytes::Heap(Tombstone::encode_all(&item.tombstones));
        }
    }

    /// Writes a group, makes it durable, indexes it, and answers. False if that failed.
    async fn write(&mut self, group: Group, urgent: bool) -> bool {
        if group.placed.is_empty() {
            return true;
        }
        let Some(open) = &self.open else { return false };
        let (id, generation) = (open.id, open.generation);
        let written = self.write_pages(id, generation, &group, urgent).await;
        if let Err(error) = written {
            self.core.metrics.errors(OpLabel::Write).inc();
            self.stop_writes(&error);
            self.abandon();
            return self.fail(id, group, "write records", &error);
        }
        self.core.metrics.syncs.inc();
        if let Err(error) = self.core.device.sync(id, SyncPoint::Records).await {
            self.core.metrics.errors(OpLabel::Sync).inc();
            self.core.state.poison(&error);
            self.abandon();
            return self.fail(id, group, "sync records", &error);
        }
        let indexed = self.index(&group.changes);
        self.account(id, &group);
        if let Err(error) = indexed {
            self.core.metrics.errors(OpLabel::Index).inc();
            self.stop_writes(&error);
            // The records are in the log: the next group, or a restart, indexes them.
            return self.fail_unindexed(id, group, &error);
        }
        self.core.state.well();
        self.answer(id, group);
        true
    }

    /// Writes stop for now: until there may be room, or for longer with each failure.
    fn stop_writes(&self, error: &io::Error) {
        if error.kind() == io::ErrorKind::StorageFull {
            self.core.state.full();
        } else {
            self.core.state.failed(error);
        }
    }

    /// Applies changes, behind those that could not be applied before: the index follows the log in
    /// its order, or recovery would take older records for newer ones. Opens the index again once if
    /// that fails. Too much that it does not take is the end of writing: a restart reads it in the log.
    pub(super) fn index(&mut self, changes: &[Change]) -> io::Result<()> {
        if self.unindexed.len() > UNINDEXED_MAX {
            return Err(io::Error::other("index: it has refused too many changes"));
        }
        self.unindexed.extend_from_slice(changes);
        let applied = self.core.index.apply(&self.unindexed).or_else(|error| {
            tracing::warn!(%error, "nvme index refuses changes, opening it again");
            self.core.index.reopen()?;
            self.core.index.apply(&self.unindexed)
        });
        match &applied {
            Ok(()) => self.unindexed.clear(),
            Err(error) if self.unindexed.len() > UNINDEXED_MAX => self.core.state.poison(error),
            Err(_) => {}
        }
        applied
    }

    /// Encodes a group and writes it, the one beside the other.
    async fn write_pages(
        &mut self,
        id: SegmentId,
        generation: u64,
        group: &Group,
        urgent: bool,
    ) -> io::Result<()> {
        let mut chunks = Chunks::of(group.end - group.start);
        let mut full = Vec::new();
        if group.start == 0 {
            let header = SegmentHeader {
                segment: id,
                generation,
                store: self.core.config.store,
                bytes: self.core.config.segment_bytes,
            };
            let mut page = [0; PAGE_BYTES];
            header.encode(&mut page);
            chunks.push(&page, &mut self.buffers, &mut full);
        }
        let core = Arc::clone(&self.core);
        let mut writes = FuturesUnordered::new();
        let (mut at, most) = (group.start, if urgent { WRITES_URGENT } else { WRITES_BACKGROUND });
        for placed in &group.placed {
            let (buffers, payload) = (&mut self.buffers, placed.item.bytes.as_ref());
            placed.header.encode(payload, &mut |bytes| chunks.push(bytes, buffers, &mut full));
            for chunk in full.drain(..) {
                while writes.len() >= most {
                    self.written(writes.next().await)?;
                }
                if !urgent {
                    core.reads.give_way(GIVE_WAY_MAX).await;
                }
                let len = u64::try_from(chunk.len()).unwrap_or(0);
                writes.push(write_full(core.device.as_ref(), id, at, chunk));
                at += len;
                // A write begins when it is first polled; the next is encoded meanwhile.
                if let Poll::Ready(done) = poll!(writes.next()) {
                    self.written(done)?;
                }
            }
        }
        while !writes.is_empty() {
            self.written(writes.next().await)?;
        }
        debug_assert!(chunks.is_complete(), "fewer bytes than were announced");
        self.budget.spend(group.end - group.start);
        Ok(())
    }

    /// Takes the buffer of a write back.
    fn written(&mut self, done: Option<(AlignedBuf, io::Result<()>)>) -> io::Result<()> {
        let Some((buffer, written)) = done else { return Ok(()) };
        self.buffers.give(buffer);
        written
    }

    /// Makes a group readable.
    fn account(&self, id: SegmentId, group: &Group) {
        let segments = &self.core.segments;
        segments.update(id, |segment| segment.data_bytes = group.end);
        for placed in &group.placed {
            let bytes = placed.header.shape().bytes();
            match placed.item.kind {
                Kind::Block => segments.add_live(id, bytes),
                Kind::Tombstones => {
                    segments.update(id, |segment| segment.tombstone_bytes += bytes);
                }
                Kind::Namespace => {}
            }
        }
        for (place, bytes) in &group.dead {
            segments.sub_live(place.segment, *bytes);
            segments.forbid(*place);
        }
    }

    /// Tells everybody. What nobody knows of is owed a tombstone: it would come back with a restart,
    /// whatever was removed meanwhile.
    fn answer(&mut self, id: SegmentId, group: Group) {
        let mut bytes = [0, 0];
        for Placed { header, item } in group.placed {
            let place = Place { segment: id, unit: header.unit };
            let [appended, moved] = &mut bytes;
            match item.then {
                Then::Put(done) => {
                    *appended += header.shape().bytes();
                    let location = place.location();
                    let location =
                        location.ok_or_else(|| Error::new(ErrorKind::Internal, "name a place"));
                    if done.send(location).is_err() {
                        self.owe(item.key, place.next());
                    }
                }
                // Whoever asked may have gone.
                Then::Removed(done, _) => drop(done.send(Ok(()))),
                Then::Moved(from) => {
                    *moved += header.shape().bytes();
                    let known = self.core.above().zip(place.location());
                    if let Some((above, to)) = known
                        && !above.moved(&from, to)
                    {
                        self.owe(item.key, place.next());
                    }
                }
                Then::Owed | Then::Nobody => {}
            }
        }
        let [appended, moved] = bytes;
        self.core.metrics.appended_bytes.inc_by(appended);
        self.core.metrics.moved_bytes.inc_by(moved);
    }

    /// Answers a group that was not written, or only in part.
    fn fail(
        &mut self,
        id: SegmentId,
        group: Group,
        doing: &'static str,
        error: &io::Error,
    ) -> bool {
        for namespace in &group.namespaces {
            // The index has not heard of it.
            self.known.remove(namespace);
        }
        let barrier = barrier_behind(id, group.end);
        for Placed { item, .. } in group.placed {
            self.core.metrics.rejected(RejectLabel::Error).inc();
            let error = Error::new(ErrorKind::Unavailable, doing).because(error.to_string());
            self.fail_one(item, barrier, error);
        }
        false
    }

    /// Answers a group that is in the log, and that the index did not take: what was removed is, and
    /// what was put is removed again, because nobody will know of it.
    fn fail_unindexed(&mut self, id: SegmentId, group: Group, error: &io::Error) -> bool {
        let barrier = barrier_behind(id, group.end);
        for Placed { item, .. } in group.placed {
            match item.then {
                Then::Removed(done, _) => drop(done.send(Ok(()))),
                Then::Put(_) | Then::Moved(_) => {
                    self.core.metrics.rejected(RejectLabel::Error).inc();
                    let what = Error::new(ErrorKind::Unavailable, "index records");
                    self.fail_one(item, barrier, what.because(error.to_string()));
                }
                Then::Owed | Then::Nobody => {}
            }
        }
        false
    }

    /// Stops writing to the open segment. What is on the disk behind its last good record is unknown
    /// and was refused: the index is told, at once if it can be, that there is nothing to be found.
    fn abandon(&mut self) {
        let Some(open) = self.open.take() else { return };
        self.core.segments.update(open.id, |segment| segment.closed = true);
        let done_with = Change::Indexed {
            segment: open.id,
            generation: open.generation,
            bytes: self.core.config.segment_bytes,
        };
        if let Err(error) = self.index(&[done_with]) {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, segment = open.id.0, "nvme index does not hear of a failed write");
        }
    }
}

/// Kills all that was placed in a segment so far.
fn barrier_behind(id: SegmentId, bytes: u64) -> Place {
    Place { segment: id, unit: u32::try_from(bytes / PAGE).unwrap_or(u32::MAX) }
}

fn header_of(open: &mut Open, item: &Item) -> RecordHeader {
    let payload = item.bytes.as_ref();
    let header = RecordHeader {
        kind: item.kind,
        generation: open.generation,
        unit: u32::try_from(open.at / PAGE).unwrap_or(u32::MAX),
        key: item.key,
        len: u32::try_from(payload.len()).unwrap_or(u32::MAX),
        layout: item.layout,
        payload_sum: checksum(payload),
        parts: item.sums.len(),
        sums: item.sums.clone(),
    };
    open.at += header.shape().bytes();
    header
}
