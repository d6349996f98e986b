//! Replaying: what a segment holds beyond what the index knows of it, in the order of the log.

use std::sync::Arc;

use super::{
    DamageLabel, OpLabel,
    aligned::PAGE,
    device::{SegmentId, SyncPoint},
    format::{Entry, Kind, Place, Tombstone},
    index::{Change, IndexEntry, IndexKey},
    item::bytes_of,
    recover::{CHANGES_MAX, Header, State},
    scan::{Scanner, read_table, read_trailer},
    writer::Writer,
};
use crate::tier::Tier;

impl Writer {
    /// Takes what a segment holds beyond what the index knows of it.
    pub(super) async fn replay(
        &mut self,
        id: SegmentId,
        file_bytes: u64,
        header: &Header,
        state: &mut State,
    ) {
        let progress = state.progress.get(&id).copied();
        let (generation, from) = match (header.generation(), progress) {
            (Some(found), Some(known)) if known.generation == found => (found, known.bytes),
            (Some(found), _) => (found, 0),
            (None, Some(known)) => (known.generation, known.bytes),
            (None, None) => return self.leave_or_drop(id, file_bytes, header),
        };
        if self.core.segments.get(id).is_none() {
            self.add_segment(id, generation, file_bytes, from);
        }
        self.replay_from(id, generation, (from, file_bytes), state).await;
    }

    async fn replay_from(
        &mut self,
        id: SegmentId,
        generation: u64,
        (from, file_bytes): (u64, u64),
        state: &mut State,
    ) {
        if from >= file_bytes {
            return;
        }
        let device = Arc::clone(&self.core.device);
        state.found.read_bytes += PAGE;
        let trailer = read_trailer(device.as_ref(), id, generation, file_bytes).await;
        let trailer = trailer.unwrap_or_else(|trouble| {
            self.core.note(id, &trouble);
            None
        });
        let sealed_at = trailer.map(|trailer| trailer.data_bytes);
        if let Some(trailer) = trailer {
            if from >= trailer.data_bytes {
                return;
            }
            state.found.read_bytes += trailer.table_bytes;
            match read_table(device.as_ref(), id, &trailer).await {
                Ok(table) => {
                    self.publish_end(id, trailer.data_bytes);
                    let entries = table.into_entries().into_iter();
                    for entry in entries.filter(|entry| u64::from(entry.unit) * PAGE >= from) {
                        self.replay_entry(id, generation, entry, state).await;
                    }
                    self.indexed(id, generation, trailer.data_bytes, state);
                    return;
                }
                Err(trouble) => self.core.note(id, &trouble),
            }
        }
        let end = sealed_at.unwrap_or(file_bytes);
        // A process that was killed may have written what it did not sync. Whoever is told that a block
        // is here may take that for durable.
        if let Err(error) = device.sync(id, SyncPoint::Records).await {
            self.core.metrics.errors(OpLabel::Sync).inc();
            return self.core.state.poison(&error);
        }
        let mut scanner = Scanner::new(device.as_ref(), id, generation, (from, end));
        let nothing_known = state.progress.is_empty();
        if nothing_known {
            // The index knows nothing: there is no saying where the segment ended.
            scanner = scanner.searching();
        }
        while let Some(scanned) = scanner.next(true).await {
            self.publish_end(id, scanner.at());
            self.replay_entry(id, generation, scanned.entry, state).await;
        }
        let holes = scanner.holes().iter().map(|hole| &hole.trouble);
        holes.chain(scanner.failure()).for_each(|trouble| self.core.note(id, trouble));
        if let Some(torn) = scanner.torn().filter(|_| nothing_known) {
            self.core.note(id, torn);
        }
        state.found.read_bytes += scanner.bytes_read();
        let data_bytes = scanner.at();
        self.publish_end(id, data_bytes);
        self.indexed(id, generation, data_bytes, state);
        let ends = sealed_at.is_none() && data_bytes < file_bytes && scanner.failure().is_none();
        if ends && !state.stuck {
            self.cut(id, data_bytes);
        }
    }

    fn publish_end(&self, id: SegmentId, bytes: u64) {
        self.core.segments.update(id, |segment| {
            segment.data_bytes = segment.data_bytes.max(bytes);
        });
    }

    fn indexed(&mut self, segment: SegmentId, generation: u64, bytes: u64, state: &mut State) {
        state.changes.push(Change::Indexed { segment, generation, bytes });
        self.apply(state);
    }

    /// Cuts a segment behind its last record: what was allocated for more is given back.
    fn cut(&self, id: SegmentId, bytes: u64) {
        match self.core.device.truncate(id, bytes) {
            Ok(()) => {
                self.core.segments.update(id, |segment| segment.file_bytes = bytes);
            }
            Err(error) => {
                self.core.metrics.errors(OpLabel::Write).inc();
                tracing::warn!(%error, segment = id.0, "nvme segment keeps its unused room");
            }
        }
    }

    /// A file that nobody vouches for holds nothing if it was never written to. Else it is left alone.
    fn leave_or_drop(&self, id: SegmentId, file_bytes: u64, header: &Header) {
        if !matches!(header, Header::Unwritten) {
            tracing::warn!(segment = id.0, file_bytes, "unknown nvme segment is left alone");
            return;
        }
        if let Err(error) = self.core.device.remove(id) {
            tracing::warn!(%error, segment = id.0, file_bytes, "empty nvme segment stays");
            self.add_segment(id, 0, file_bytes, 0);
        }
    }

    async fn replay_entry(
        &mut self,
        id: SegmentId,
        generation: u64,
        entry: Entry,
        state: &mut State,
    ) {
        state.found.replayed += 1;
        match entry.kind {
            Kind::Namespace => {
                // Damaged: counted, and its blocks are not taken.
                let _whole: bool = self.restore(entry.key.namespace, &entry.encoded, state);
                state.changes.push(Change::Namespace(entry.key.namespace, entry.encoded));
            }
            Kind::Block => self.replay_block(id, generation, &entry, state),
            Kind::Tombstones => {
                let start = u64::from(entry.unit) * PAGE;
                let end = start + u64::from(entry.units) * PAGE;
                let device = Arc::clone(&self.core.device);
                let mut scanner = Scanner::new(device.as_ref(), id, generation, (start, end));
                match scanner.read_record(true).await {
                    Ok(scanned) => {
                        for tombstone in Tombstone::decode_all(&scanned.payload) {
                            self.replay_tombstone(tombstone, state);
                        }
                    }
                    Err(trouble) => {
                        self.core.metrics.damaged(DamageLabel::Note).inc();
                        self.core.note(id, &trouble);
                    }
                }
                state.found.read_bytes += scanner.bytes_read();
            }
        }
        if state.changes.len() >= CHANGES_MAX {
            self.apply(state);
        }
    }

    fn replay_block(&mut self, id: SegmentId, generation: u64, entry: &Entry, state: &mut State) {
        let place = Place { segment: id, unit: entry.unit };
        let Some(location) = place.location() else { return };
        // What the index has may be newer, if its order was lost with its files.
        let current = self.latest(&entry.key, state);
        if current.is_some_and(|(known, _)| known >= place) {
            return;
        }
        let checksums = entry.checksums();
        let known = IndexEntry { location, generation, len: entry.len, checksums };
        if self.take_block(entry.key, &known, state) {
            if let Some((old, bytes)) = current {
                self.core.segments.sub_live(old.segment, bytes);
            }
            state.latest.insert(entry.key, Some((place, bytes_of(&known))));
            state.changes.push(Change::Put(entry.key, known));
        }
    }

    fn replay_tombstone(&mut self, tombstone: Tombstone, state: &mut State) {
        let Some((place, bytes)) = self.latest(&tombstone.key, state) else { return };
        if place >= tombstone.barrier {
            return;
        }
        if let Some(above) = self.core.above() {
            above.leaving(Tier::Nvme, &[tombstone.key.at(place.location_or_nowhere())]);
        }
        self.core.segments.sub_live(place.segment, bytes);
        self.core.segments.forbid(place);
        state.latest.insert(tombstone.key, None);
        state.changes.push(Change::Remove(tombstone.key));
    }

    /// The current place of a block, with what was replayed and is not in the index yet.
    fn latest(&self, key: &IndexKey, state: &State) -> Option<(Place, u64)> {
        state.latest.get(key).copied().unwrap_or_else(|| self.current(key))
    }
}
