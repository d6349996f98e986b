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
    collections::{BTreeMap, HashMap, HashSet},
    io,
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    DamageLabel, OpLabel,
    aligned::PAGE_BYTES,
    device::SegmentId,
    format::{Damage, Place, SegmentHeader},
    index::{Change, IndexEntry, IndexKey, Known},
    item::bytes_of,
    scan::{Trouble, read_header},
    segments::Segment,
    writer::Writer,
};
use crate::{
    namespace::{Namespace, NamespaceId},
    store::Found,
    tier::Tier,
};

const PAGE: u64 = PAGE_BYTES as u64;
/// Changes applied to the index at once.
pub(super) const CHANGES_MAX: usize = 4096;

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
pub(super) struct Progress {
    pub(super) generation: u64,
    pub(super) bytes: u64,
}

/// What recovery knows so far.
#[derive(Default)]
pub(super) struct State {
    namespaces: HashMap<NamespaceId, Arc<Namespace>>,
    pub(super) progress: BTreeMap<SegmentId, Progress>,
    pub(super) changes: Vec<Change>,
    pub(super) found: Recovered,
    /// Namespaces of another secret, and how many of their blocks there were.
    strangers: HashSet<NamespaceId>,
    strange_blocks: u64,
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
        if state.strange_blocks > 0 {
            tracing::warn!(
                blocks = state.strange_blocks,
                namespaces = state.strangers.len(),
                "nvme blocks of another identity secret are dropped"
            );
        }
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

    pub(super) fn add_segment(
        &self,
        id: SegmentId,
        generation: u64,
        file_bytes: u64,
        data_bytes: u64,
    ) {
        let data_bytes = data_bytes.min(file_bytes);
        let closed = true;
        let segment = Segment { generation, file_bytes, data_bytes, closed, ..Segment::default() };
        self.core.segments.insert(id, segment);
    }

    pub(super) fn restore(&mut self, id: NamespaceId, encoded: &[u8], state: &mut State) {
        match self.core.namespaces.restore(&id, encoded) {
            Ok(Some(namespace)) => {
                self.known.insert(id);
                state.namespaces.insert(id, namespace);
            }
            Ok(None) => drop(state.strangers.insert(id)),
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
    pub(super) fn take_block(
        &mut self,
        key: IndexKey,
        entry: &IndexEntry,
        state: &mut State,
    ) -> bool {
        let Some(namespace) = state.namespaces.get(&key.namespace) else {
            state.strange_blocks += u64::from(state.strangers.contains(&key.namespace));
            return false;
        };
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
        state.strange_blocks = 0;
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

    /// Applies the changes so far.
    pub(super) fn apply(&mut self, state: &mut State) {
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
