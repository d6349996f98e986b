//! The start: what is on the disk goes into the map, with as little reading as possible.
//!
//! 1. The segments: their first pages say which they are. Strangers (of another store, of another
//!    version, under another's name, or of nobody knows whom) are left alone, whoever vouches for them.
//! 2. The index: every block whose segment is there with the same generation is current.
//! 3. What the segments hold beyond what the index knows of them, oldest first: by their entry table
//!    if they are sealed, else record by record, verifying every byte. Behind the last one that is
//!    whole is where a crash was; the file is cut there.
//!
//! The index follows the log in its order, so what it lacks are the latest records, and replaying them
//! in order gives what the writer had: a later record of a block wins, a tombstone kills those before
//! it. If the index is damaged, or cannot say all, it is dropped and everything is replayed.
//!
//! A disk that fails is asked again; what it does not deliver is passed over. If the index does not
//! take what the segments hold, replaying ends and so does writing, until the next start: replaying
//! the rest behind newer writes would break the order.
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
    aligned::PAGE,
    device::SegmentId,
    format::{Place, SegmentHeader},
    index::{Change, IndexEntry, IndexKey, Known},
    item::bytes_of,
    scan::{First, generation_of_trailer, read_first},
    segments::Segment,
    writer::Writer,
};
use crate::{
    error::ErrorKind,
    namespace::{Namespace, NamespaceId},
    store::Found,
    tier::Tier,
};

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
    /// Blocks that came back with what was described of them.
    pub described: u64,
    /// Bytes read from segments.
    pub read_bytes: u64,
    /// Whether the index was made anew.
    pub rebuilt: bool,
    /// How long it took.
    pub elapsed: Duration,
}

/// The files that may be segments of ours: their length, and what their first page says.
type Files = BTreeMap<SegmentId, (u64, Header)>;

/// What the first page of a segment says.
#[derive(Debug, Clone, Copy)]
pub(super) enum Header {
    Read(SegmentHeader),
    /// It was made, and not written to.
    Unwritten,
    /// It is damaged; the trailer may say the generation.
    Unreadable(Option<u64>),
}

impl Header {
    pub(super) fn generation(&self) -> Option<u64> {
        match self {
            Self::Read(header) => Some(header.generation),
            Self::Unwritten => None,
            Self::Unreadable(generation) => *generation,
        }
    }
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
    /// The index does not take changes: replaying has ended.
    pub(super) stuck: bool,
    pub(super) progress: BTreeMap<SegmentId, Progress>,
    pub(super) changes: Vec<Change>,
    /// Where these changes put blocks; `None` for those that they remove.
    pub(super) latest: HashMap<IndexKey, Option<(Place, u64)>>,
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
        let (ours, strangers) = self.read_headers(&files, &mut state).await;
        if !self.load_index(&ours, &mut state) {
            self.rebuild(&mut state);
        }
        self.forget_missing(&ours, &strangers, &mut state);
        // What is stale must not be taken for newer than what is replayed.
        self.apply(&mut state);
        for (id, (file_bytes, header)) in &ours {
            if !state.stuck {
                self.replay(*id, *file_bytes, header, &mut state).await;
            }
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
            described = found.described,
            read_bytes = found.read_bytes,
            rebuilt = found.rebuilt,
            elapsed_ms = found.elapsed.as_millis(),
            "nvme tier recovered"
        );
    }

    /// The first pages of all files: those that may be ours, and how many strangers there are.
    async fn read_headers(
        &mut self,
        files: &[(SegmentId, u64)],
        state: &mut State,
    ) -> (Files, HashSet<SegmentId>) {
        let (mut ours, mut strangers) = (Files::new(), HashSet::new());
        let mut left_bytes = 0;
        for (id, file_bytes) in files {
            state.found.read_bytes += PAGE;
            let device = self.core.device.as_ref();
            let first = read_first(device, *id, self.core.config.store).await;
            let file = match first {
                // No place can name it.
                _ if (Place { segment: *id, unit: 0 }).location().is_none() => None,
                First::Ours(header) => Some(Header::Read(header)),
                First::Unwritten => Some(Header::Unwritten),
                First::Unreadable(trouble) => {
                    self.core.metrics.damaged(DamageLabel::Segment).inc();
                    self.core.note(*id, &trouble);
                    let generation = generation_of_trailer(device, *id, *file_bytes).await;
                    Some(Header::Unreadable(generation))
                }
                First::Stranger(why) => {
                    tracing::debug!(segment = id.0, ?why, "nvme segment is left alone");
                    None
                }
            };
            let Some(header) = file else {
                self.core.metrics.damaged(DamageLabel::Segment).inc();
                strangers.insert(*id);
                left_bytes += *file_bytes;
                continue;
            };
            ours.insert(*id, (*file_bytes, header));
        }
        for id in ours.keys().chain(&strangers) {
            self.is_used(*id);
        }
        if !strangers.is_empty() {
            let segments = strangers.len();
            tracing::warn!(
                segments,
                left_bytes,
                "nvme segments of another store or version are left alone"
            );
        }
        (ours, strangers)
    }

    /// A number that no new segment may have; false if no segment can have it.
    fn is_used(&mut self, id: SegmentId) -> bool {
        let possible = Place { segment: id, unit: 0 }.location().is_some();
        if possible {
            self.next_segment = self.next_segment.max(id.0.saturating_add(1));
        }
        possible
    }

    /// Takes what the index knows; false if it cannot be relied on.
    fn load_index(&mut self, files: &Files, state: &mut State) -> bool {
        let index = Arc::clone(&self.core.index);
        let mut senseless = 0;
        let loaded = index.load(&mut |known| {
            match known {
                Known::Namespace(id, encoded) => {
                    senseless += u64::from(!self.restore(id, &encoded, state));
                }
                Known::Indexed { segment, .. } if !self.is_used(segment) => senseless += 1,
                Known::Indexed { segment, generation, bytes } => {
                    state.progress.insert(segment, Progress { generation, bytes });
                    let Some((file_bytes, header)) = files.get(&segment) else { return Ok(()) };
                    // A damaged first page: the index vouches for the generation.
                    if header.generation().is_none_or(|found| found == generation) {
                        self.add_segment(segment, generation, *file_bytes, bytes);
                    }
                }
                Known::Block(key, entry) => self.load_block(key, &entry, state),
                Known::Described(key, description) => {
                    self.load_description(key, description, state);
                }
            }
            Ok(())
        });
        match loaded.map(|undecodable| undecodable + senseless) {
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

    /// Takes a namespace; false if its bytes are damaged.
    pub(super) fn restore(&mut self, id: NamespaceId, encoded: &[u8], state: &mut State) -> bool {
        match self.core.namespaces.restore(&id, encoded) {
            Ok(Some(namespace)) => {
                self.known.insert(id, encoded.to_vec());
                state.namespaces.insert(id, namespace);
                true
            }
            Ok(None) => {
                state.strangers.insert(id);
                true
            }
            Err(error) => {
                self.core.metrics.damaged(DamageLabel::Note).inc();
                tracing::warn!(%error, namespace = id.short(), "nvme namespace cannot be read");
                error.kind() != ErrorKind::Corrupt
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
            replaces: true,
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
        state.found.described = 0;
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

    fn forget_missing(&self, ours: &Files, strangers: &HashSet<SegmentId>, state: &mut State) {
        // How far a stranger is indexed stays known: what was removed must not come back with it.
        let missing = |id: &SegmentId| !ours.contains_key(id) && !strangers.contains(id);
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
        if changes.is_empty() || state.stuck {
            return;
        }
        let applied: io::Result<()> =
            changes.chunks(CHANGES_MAX).try_for_each(|changes| self.index(changes.iter().cloned()));
        if let Err(error) = applied {
            self.core.metrics.errors(OpLabel::Index).inc();
            tracing::warn!(%error, "nvme index does not take what the segments hold");
            self.core.state.poison(&error);
            state.stuck = true;
            return;
        }
        state.latest.clear();
    }
}
