//! Appending: records get their places, are encoded into pages and handed to the disk. What follows
//! when they are there is in [`land`](super::land).

use std::{
    collections::{HashSet, VecDeque},
    pin::pin,
    sync::Arc,
};

use super::{
    RejectLabel,
    aligned::{PAGE, PAGE_BYTES},
    chunks::Chunks,
    device::SegmentId,
    format::{Entry, Frame, Kind, Place, RecordHeader, SegmentHeader, Shape, Tombstone, checksum},
    gather::Gather,
    index::{Change, IndexEntry, IndexKey},
    item::{Bytes, Item, Then},
    pipeline::{Group, Placed},
    reclaim::Refusal,
    seal::Open,
    writer::{GIVE_WAY_MAX, Writer},
};
use crate::{error::ErrorKind, map::Checksums};

/// Writes under way at once, when somebody waits for them and when nobody does: as many as it takes
/// to keep a disk busy, and few enough to leave it to reads.
const WRITES_URGENT: usize = 4;
/// See [`WRITES_URGENT`].
const WRITES_BACKGROUND: usize = 2;
/// Bytes of a block from which on the disk takes them from where they are: to copy fewer is cheaper
/// than one more piece of a write.
const LEND_BYTES_MIN: usize = 32 << 10;
const TOO_LARGE: Refusal =
    Refusal { kind: ErrorKind::Invalid, what: "write to nvme: it does not fit into a segment" };
const FAILED: Refusal =
    Refusal { kind: ErrorKind::Unavailable, what: "write to nvme: writing failed a moment ago" };

impl Writer {
    /// Hands all items, in order, to the disk; they are answered when they are there, or when they
    /// could not be written. `urgent`: somebody waits.
    pub(super) async fn append(&mut self, items: Vec<Item>, urgent: bool) {
        let mut items = VecDeque::from(items);
        while !items.is_empty() {
            if let Err(why) = self.ensure_open().await {
                return self.refuse_all(items, &why);
            }
            if self.open.as_ref().is_some_and(|open| self.is_full_for(open, &items)) {
                self.seal().await;
                continue;
            }
            while self.pipeline.is_full() {
                self.advance().await;
            }
            let group = self.place(&mut items);
            if group.placed.is_empty()
                && self.open.as_ref().is_some_and(|open| open.at == 0)
                && let Some(item) = items.pop_front()
            {
                // It would not fit into the next one either.
                self.refuse(item, RejectLabel::Size, &TOO_LARGE);
                continue;
            }
            self.write(group, urgent).await;
            if self.pipeline.has_failed() {
                self.settle().await;
            }
            if self.open.is_none() && self.core.state.check().is_err() {
                // Each further try would leave a segment behind.
                return self.refuse_all(items, &FAILED);
            }
        }
    }

    /// As [`append`](Self::append), and waits until all of it is there; false if some of it is not.
    pub(super) async fn append_and_land(&mut self, items: Vec<Item>) -> bool {
        self.settle().await;
        let before = self.failures;
        self.append(items, false).await;
        self.settle().await;
        self.failures == before
    }

    /// Places items into the open segment until one does not fit.
    fn place(&mut self, items: &mut VecDeque<Item>) -> Group {
        let mut group = Group::default();
        let Some(mut open) = self.open.take() else { return group };
        group.start = open.at;
        open.at = open.at.max(PAGE);
        while let Some(item) = items.pop_front() {
            if !self.fit(&open, std::iter::once(&item)) {
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

    /// Whether the open segment is to end before these items are placed. They stay together if they
    /// can: the parts of a group would be small writes.
    fn is_full_for(&self, open: &Open, items: &VecDeque<Item>) -> bool {
        let bytes: u64 = items.iter().map(Item::bytes).sum();
        let together = bytes <= self.group_bytes_max() * 2;
        open.at > 0 && !self.fit(open, items.iter().take(if together { items.len() } else { 1 }))
    }

    fn fit<'a>(&self, open: &Open, items: impl Iterator<Item = &'a Item>) -> bool {
        let (mut bytes, mut table) = (0, open.table.bytes());
        let mut new = HashSet::new();
        for item in items {
            bytes += item.bytes();
            table += Entry::BYTES + item.sums.len() * 8;
            if let Some((id, encoded)) = &item.namespace
                && !open.namespaces.contains(id)
                && new.insert(*id)
            {
                bytes += Shape::of(0, encoded.len()).bytes();
                table += Entry::BYTES + encoded.len();
            }
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
            // What clients wish may have changed since.
            if self.known.get(&id) != Some(&encoded) {
                self.known.insert(id, encoded.clone());
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
            if matches!(item.then, Then::Put(_)) {
                group.changes.extend(self.description(&item.key));
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

    /// Encodes a group and hands it over, the one beside the other.
    async fn write(&mut self, mut group: Group, urgent: bool) {
        if group.placed.is_empty() {
            return;
        }
        let Some(open) = &self.open else { return };
        let (id, generation) = (open.id, open.generation);
        self.pipeline.begin(id);
        let mut chunks = Chunks::of(group.end - group.start);
        let mut full = Vec::new();
        if group.start == 0 {
            let page = self.segment_header(id, generation);
            chunks.push(&page, &mut self.pipeline.buffers, &mut full);
        }
        let mut at = group.start;
        for Placed { header, item } in &mut group.placed {
            let buffers = &mut self.pipeline.buffers;
            header.payload_sum = checksum(item.bytes.as_ref());
            let Frame { head, whole, behind } = header.frame(item.bytes.as_ref());
            chunks.push(&head, buffers, &mut full);
            match &item.bytes {
                Bytes::Arena(block) if whole >= LEND_BYTES_MIN && Gather::can_lend(block) => {
                    chunks.lend(block, whole, buffers, &mut full);
                }
                bytes => {
                    let whole = bytes.as_ref().get(..whole).unwrap_or_default();
                    chunks.push(whole, buffers, &mut full);
                }
            }
            chunks.push(&behind, buffers, &mut full);
            for chunk in full.drain(..) {
                self.make_way(urgent).await;
                if !self.pipeline.has_failed() {
                    let len = u64::try_from(chunk.len()).unwrap_or(0);
                    self.pipeline.write(at, chunk).await;
                    at += len;
                }
            }
        }
        debug_assert!(chunks.is_complete(), "fewer bytes than were announced");
        self.budget.spend(at - group.start);
        self.pipeline.complete(group);
    }

    fn segment_header(&self, segment: SegmentId, generation: u64) -> [u8; PAGE_BYTES] {
        let (store, bytes) = (self.core.config.store, self.core.config.segment_bytes);
        let mut page = [0; PAGE_BYTES];
        SegmentHeader { segment, generation, store, bytes }.encode(&mut page);
        page
    }

    /// Waits until there is room for one more write, and until reads have had their turn if nobody
    /// waits for it.
    async fn make_way(&mut self, urgent: bool) {
        let most = if urgent { WRITES_URGENT } else { WRITES_BACKGROUND };
        while self.pipeline.writes() >= most && !self.pipeline.has_failed() {
            self.advance().await;
        }
        let core = Arc::clone(&self.core);
        let mut reads = pin!(core.reads.give_way(GIVE_WAY_MAX));
        while !urgent && !self.pipeline.has_failed() {
            tokio::select! {
                biased;
                () = &mut reads => return,
                progress = self.pipeline.progress() => self.follow(progress),
            }
        }
    }
}

/// The header of the next record, without the checksum of its payload: it is there when it is encoded.
fn header_of(open: &mut Open, item: &Item) -> RecordHeader {
    let payload = item.bytes.as_ref();
    let header = RecordHeader {
        kind: item.kind,
        generation: open.generation,
        unit: u32::try_from(open.at / PAGE).unwrap_or(u32::MAX),
        key: item.key,
        len: u32::try_from(payload.len()).unwrap_or(u32::MAX),
        layout: item.layout,
        payload_sum: 0,
        parts: item.sums.len(),
        sums: item.sums.clone(),
    };
    open.at += header.shape().bytes();
    header
}
