//! The start: what is on the disk goes into the map, with as little reading as possible.
//!
//! 1. The segments: their first pages say which they are. Strangers are left alone.
//! 2. The index: every block whose segment is there with the same generation is current.
//! 3. What the segments hold beyond what the index knows of them, oldest first: by their entry table
//!    if they are sealed, else record by record, verifying every byte, up to the first that is not
//!    whole. That is where a crash was; the file is cut there.
//!
//! The index follows the log in its order, so what it lacks are the latest records, and replaying them
//! in order gives what the writer had: a later record of a block wins, a tombstone kills those before
//! it. If the index is damaged, or cannot say all, it is dropped and everything is replayed.
//!
//! No segment that was there before is written to again: what lies behind its last good record is
//! unknown.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    DamageLabel, OpLabel,
    aligned::PAGE_BYTES,
    device::SegmentId,
    format::{Damage, Entry, Kind, Place, SegmentHeader, Tombstone},
    index::{Change, IndexEntry, IndexKey, Known},
    item::bytes_of,
    scan::{Scanner, Trouble, read_header, read_table, read_trailer},
    segments::Segment,
    writer::Writer,
};
use crate::{
    map::Location,
    namespace::{Namespace, NamespaceId},
    store::{Found, Wanted},
    tier::Tier,
};

const PAGE: u64 = PAGE_BYTES as u64;
/// Changes applied to the index at once.
const CHANGES_MAX: usize = 4096;

/// What a start found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Blocks that can be read.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Segments that are there.
    pub segments: u64,
    /// Records that the index did not know.
    pub replayed: u64,
    /// Entries of the index that were dropped.
    pub stale: u64,
    /// Bytes read from segments.
    pub read_bytes: u64,
    /// Whether the index was made anew.
    pub rebuilt: bool,
    /// How long it took.
    pub elapsed: Duration,
}

/// How far the index knows a segment.
#[derive(Debug, Clone, Copy)]
struct Progress {
    generation: u64,
    bytes: u64,
}

/// What recovery knows so far.
#[derive(Default)]
struct State {
    namespaces: HashMap<NamespaceId, Arc<Namespace>>,
    progress: BTreeMap<SegmentId, Progress>,
    changes: Vec<Change>,
    found: Recovered,
}

impl Writer {
    pub(super) async fn recover(&mut self) -> Recovered {
        let started = Instant::now();
        let mut state = State::default();
        let files = match self.core.device.list() {
            Ok(files) => files,
            Err(error) => {
                self.core.metrics.errors(OpLabel::Read).inc();
                self.core.state.poison(&error);
                return state.found;
            }
        };
        let headers = self.read_headers(&files, &mut state).await;
        if !self.load_index(&files, &headers, &mut state) {
            self.rebuild(&mut state);
        }
        self.forget_missing(&files, &mut state);
        for (id, file_bytes) in &files {
            self.replay(*id, *file_bytes, headers.get(id).copied(), &mut state).await;
        }
        self.apply(&mut state);
        let totals = self.core.segments.totals();
        let mut found = state.found;
        (found.blocks, found.segments) = (totals.live_blocks, totals.segments);
        found.elapsed = started.elapsed();
        self.report(&found);
        found
    }

    fn report(&self, found: &Recovered) {
        let metrics = &self.core.metrics;
        metrics.recovered_blocks.inc_by(found.blocks);
        metrics.stale_entries.inc_by(found.stale);
        metrics.recovery_read_bytes.inc_by(found.read_bytes);
        metrics.recovery_seconds.set(found.elapsed.as_secs_f64());
        tracing::info!(
            blocks = found.blocks,
            bytes = found.bytes,
            segments = found.segments,
            replayed = found.replayed,
            stale = found.stale,
            read_bytes = found.read_bytes,
            rebuilt = found.rebuilt,
            elapsed_ms = found.elapsed.as_millis(),
            "nvme tier recovered"
        );
    }

    /// The first pages of all files; those that are missing cannot be relied on.
    async fn read_headers(
        &mut self,
        files: &[(SegmentId, u64)],
        state: &mut State,
    ) -> HashMap<SegmentId, SegmentHeader> {
        let mut headers = HashMap::with_capacity(files.len());
        for (id, _) in files {
            self.next_segment = self.next_segment.max(id.0 + 1);
            state.found.read_bytes += PAGE;
            match read_header(self.core.device.as_ref(), *id).await {
                Ok(header) if header.store == self.core.config.store => {
                    headers.insert(*id, header);
                }
                Ok(_other) => {
                    tracing::warn!(segment = id.0, "nvme segment of another store is left alone");
                    self.core.metrics.damaged(DamageLabel::Segment).inc();
                }
                // Made and not written to before the process ended.
                Err(Trouble::Damaged(Damage::Foreign)) => {}
                Err(trouble) => {
                    self.core.metrics.damaged(DamageLabel::Segment).inc();
                    self.note(*id, &trouble);
                }
            }
        }
        headers
    }

    /// Takes what the index knows; false if it cannot be relied on.
    fn load_index(
        &mut self,
        files: &[(SegmentId, u64)],
        headers: &HashMap<SegmentId, SegmentHeader>,
        state: &mut State,
    ) -> bool {
        let lengths: HashMap<_, _> = files.iter().copied().collect();
        let index = Arc::clone(&self.core.index);
        let loaded = index.load(&mut |known| {
            match known {
                Known::Namespace(id, encoded) => self.restore(id, &encoded, state),
                Known::Indexed { segment, generation, bytes } => {
                    self.next_segment = self.next_segment.max(segment.0 + 1);
                    state.progress.insert(segment, Progress { generation, bytes });
                    let Some(file_bytes) = lengths.get(&segment).copied() else { return Ok(()) };
                    let header = headers.get(&segment);
                    // A damaged first page: the index vouches for the generation.
                    if header.is_none_or(|header| header.generation == generation) {
                        self.add_segment(segment, generation, file_bytes, bytes);
                    }
                }
                Known::Block(key, entry) => self.load_block(key, &entry, state),
            }
            Ok(())
        });
        match loaded {
            Ok(0) => true,
            Ok(undecodable) => {
                tracing::warn!(undecodable, "nvme index holds damaged entries, making it anew");
                false
            }
            Err(error) => {
                tracing::warn!(%error, "nvme index cannot be read, making it anew");
                false
            }
        }
    }

    fn add_segment(&self, id: SegmentId, generation: u64, file_bytes: u64, data_bytes: u64) {
        let data_bytes = data_bytes.min(file_bytes);
        let closed = true;
        let segment = Segment { generation, file_bytes, data_bytes, closed, ..Segment::default() };
        self.core.segments.insert(id, segment);
    }

    fn restore(&mut self, id: NamespaceId, encoded: &[u8], state: &mut State) {
        match self.core.namespaces.restore(&id, encoded) {
            Ok(Some(namespace)) => {
                self.known.insert(id);
                state.namespaces.insert(id, namespace);
            }
            Ok(None) => tracing::warn!(
                namespace = id.short(),
                "nvme holds a namespace of another secret: its blocks are dropped"
            ),
            Err(error) => {
                self.core.metrics.damaged(DamageLabel::Note).inc();
                tracing::warn!(%error, namespace = id.short(), "nvme namespace cannot be read");
            }
        }
    }

    /// Takes a block that the index knows, if its record is there.
    fn load_block(&mut self, key: IndexKey, entry: &IndexEntry, state: &mut State) {
        let place = Place::of(entry.location);
        if self.core.segments.readable(place) == Some(entry.generation)
            && self.take_block(key, entry, state)
        {
            return;
        }
        state.found.stale += 1;
        state.changes.push(Change::Remove(key));
    }

    /// Puts a block into the map; false if it does not belong there.
    fn take_block(&mut self, key: IndexKey, entry: &IndexEntry, state: &mut State) -> bool {
        let Some(namespace) = state.namespaces.get(&key.namespace) else { return false };
        let layout = namespace.layout();
        let parts = layout.parts().len();
        let right_len = if layout.is_opaque() {
            (1..=layout.bytes_max()).contains(&entry.len)
        } else {
            u64::from(entry.len) == layout.block_bytes()
        };
        let right_sums = parts.checked_sub(1).is_some_and(|last| {
            entry.checksums.get(last).is_some() && entry.checksums.get(parts).is_none()
        });
        if !right_len || !right_sums {
            self.core.metrics.damaged(DamageLabel::Index).inc();
            return false;
        }
        let found = Found {
            namespace: Arc::clone(namespace),
            hash: key.hash,
            len: entry.len,
            checksums: entry.checksums.clone(),
            location: entry.location,
        };
        if self.core.above().is_some_and(|above| !above.found(Tier::Nvme, found)) {
            return false;
        }
        self.core.segments.add_live(Place::of(entry.location).segment, bytes_of(entry));
        state.found.bytes += u64::from(entry.len);
        true
    }

    /// Forgets all that the index said: everything is read from the segments.
    fn rebuild(&mut self, state: &mut State) {
        state.found.rebuilt = true;
        state.found.stale = 0;
        state.found.bytes = 0;
        state.changes.clear();
        state.progress.clear();
        self.known.clear();
        self.core.metrics.index_rebuilds.inc();
        self.core.metrics.damaged(DamageLabel::Index).inc();
        for (id, _) in self.core.segments.closed() {
            self.core.segments.remove(id);
        }
        if let Err(error) = self.core.index.clear() {
            self.core.metrics.errors(OpLabel::Index).inc();
            self.core.state.poison(&error);
        }
    }

    fn forget_missing(&self, files: &[(SegmentId, u64)], state: &mut State) {
        let missing = |id: &SegmentId| files.binary_search_by_key(id, |(id, _)| *id).is_err();
        let missing: Vec<_> = state.progress.keys().copied().filter(missing).collect();
        for id in missing {
            // The highest number stays known, so that it is not used again.
            if id.0 + 1 < self.next_segment {
                state.changes.push(Change::Forget(id));
            }
        }
    }

    /// Takes what a segment holds beyond what the index knows of it.
    async fn replay(
        &mut self,
        id: SegmentId,
        file_bytes: u64,
        header: Option<SegmentHeader>,
        state: &mut State,
    ) {
        let progress = state.progress.get(&id).copied();
        let (generation, from) = match (header, progress) {
            (Some(header), Some(known)) if known.generation == header.generation => {
                (header.generation, known.bytes)
            }
            (Some(header), _) => (header.generation, 0),
            (None, Some(known)) => (known.generation, known.bytes),
            (None, None) => return self.drop_unwritten(id, file_bytes),
        };
        if self.core.segments.get(id).is_none() {
            self.add_segment(id, generation, file_bytes, from);
        }
        let replayed = self.replay_from(id, generation, (from, file_bytes), state).await;
        if let Err(trouble) = replayed {
            self.note(id, &trouble);
        }
    }

    async fn replay_from(
        &mut self,
        id: SegmentId,
        generation: u64,
        (from, file_bytes): (u64, u64),
        state: &mut State,
    ) -> Result<(), Trouble> {
        if from >= file_bytes {
            return Ok(());
        }
        let device = Arc::clone(&self.core.device);
        state.found.read_bytes += PAGE;
        let trailer = read_trailer(device.as_ref(), id, generation, file_bytes).await?;
        let sealed_at = trailer.map(|trailer| trailer.data_bytes);
        if let Some(trailer) = trailer {
            if from >= trailer.data_bytes {
                return Ok(());
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
                    return Ok(());
                }
                Err(trouble) => self.note(id, &trouble),
            }
        }
        let end = sealed_at.unwrap_or(file_bytes);
        let mut scanner = Scanner::new(device.as_ref(), id, generation, (from, end));
        loop {
            let scanned = scanner.next(true).await;
            match scanned {
                Ok(Some(scanned)) => {
                    self.publish_end(id, scanner.at());
                    self.replay_entry(id, generation, scanned.entry, state).await;
                }
                Ok(None) => break,
                Err(trouble) => {
                    self.note(id, &trouble);
                    break;
                }
            }
        }
        state.found.read_bytes += scanner.bytes_read();
        let data_bytes = scanner.at();
        self.publish_end(id, data_bytes);
        self.indexed(id, generation, data_bytes, state);
        if sealed_at.is_none() && data_bytes < file_bytes {
            self.cut(id, data_bytes);
        }
        Ok(())
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

    /// A file that the index does not know and that says nothing of itself holds nothing.
    fn drop_unwritten(&self, id: SegmentId, file_bytes: u64) {
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
                self.restore(entry.key.namespace, &entry.encoded, state);
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
                        self.note(id, &trouble);
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
        self.apply(state);
        let current = self.current(&entry.key);
        if current.is_some_and(|(known, _)| known >= place) {
            return;
        }
        let checksums = entry.checksums();
        let known = IndexEntry { location, generation, len: entry.len, checksums };
        if self.take_block(entry.key, &known, state) {
            if let Some((old, bytes)) = current {
                self.core.segments.sub_live(old.segment, bytes);
            }
            state.changes.push(Change::Put(entry.key, known));
        }
    }

    fn replay_tombstone(&mut self, tombstone: Tombstone, state: &mut State) {
        self.apply(state);
        let Some((place, bytes)) = self.current(&tombstone.key) else { return };
        if place >= tombstone.barrier {
            return;
        }
        let IndexKey { namespace, hash } = tombstone.key;
        let nowhere = Location(std::num::NonZeroU64::MAX);
        let location = place.location().unwrap_or(nowhere);
        if let Some(above) = self.core.above() {
            above.leaving(Tier::Nvme, &[Wanted { namespace, hash, location }]);
        }
        self.core.segments.sub_live(place.segment, bytes);
        self.core.segments.forbid(place);
        state.changes.push(Change::Remove(tombstone.key));
    }

    /// Applies the changes so far.
    fn apply(&mut self, state: &mut State) {
        let changes = std::mem::take(&mut state.changes);
        if changes.is_empty() {
            return;
        }
        let applied: io::Result<()> =
            changes.chunks(CHANGES_MAX).try_for_each(|changes| self.index(changes));
        if let Err(error) = applied {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, "nvme index does not take what the segments hold");
        }
    }
}
