//! Says again all that counts in a log, so that what is before can go.
//!
//! A step reads some objects from the front of the log and writes one; between steps others may append.
//! What is said from the first object of a compaction up to its base makes the base, appended records
//! among them. One that is never finished supersedes nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use tokio::time::Instant;

use super::{KEYS_MAX, ManifestLog, TAIL_OBJECTS_MAX, TAIL_OBJECTS_MIN};
use crate::{
    key::IndexKey,
    object::{
        format::{Footer, ManifestRecord},
        names::{ManifestId, PackId, Seq},
        owner::OwnerError,
        rebuild::mark_of,
    },
};

/// A compaction under way.
#[derive(Debug)]
pub(super) struct Compaction {
    /// The number of its first object.
    from: u64,
    /// Objects that are still to be said again, oldest first.
    sources: VecDeque<ManifestId>,
    /// Packs that it has said.
    said: HashSet<PackId>,
    /// What was removed before it began.
    removed: HashMap<IndexKey, Seq>,
    /// What of that some pack still has.
    needed: HashMap<IndexKey, Seq>,
    /// What the next object says, and its bytes.
    part: Vec<ManifestRecord>,
    part_bytes: u64,
    /// Packs from this one on had no name when it began: what was removed from them is needed.
    unnamed_from: Seq,
}

impl Compaction {
    /// The object to read next, unless there is enough for one to write.
    fn next_source(&self, enough: u64) -> Option<ManifestId> {
        self.sources.front().copied().filter(|_| self.part_bytes < enough)
    }

    /// Says again what counts of the first source and is not said yet.
    fn say_again(&mut self, records: Vec<ManifestRecord>, packs: &BTreeSet<PackId>) {
        self.sources.pop_front();
        for record in records {
            // Dropped packs and removals are said at the end.
            let ManifestRecord::Pack(footer) = record else { continue };
            if packs.contains(&footer.id) && self.said.insert(footer.id) {
                self.note_needed(&footer);
                let record = ManifestRecord::Pack(footer);
                self.part_bytes += record.bytes();
                self.part.push(record);
            }
        }
    }

    fn note_needed(&mut self, footer: &Footer) {
        if self.removed.is_empty() {
            return;
        }
        for entry in &footer.entries {
            let removed = self.removed.get(&entry.key).filter(|before| footer.id.at() < **before);
            if let Some(before) = removed {
                self.needed.insert(entry.key, *before);
            }
        }
    }

    /// The removals that have to be said again.
    fn removals(self) -> Vec<ManifestRecord> {
        let mut needed = self.needed;
        needed.extend(self.removed.into_iter().filter(|(_, at)| *at > self.unnamed_from));
        let mut by_barrier = BTreeMap::<Seq, Vec<IndexKey>>::new();
        for (key, before) in needed {
            by_barrier.entry(before).or_default().push(key);
        }
        let records = by_barrier.into_iter().flat_map(|(before, keys)| {
            let pieces = keys.chunks(KEYS_MAX).map(<[IndexKey]>::to_vec).collect::<Vec<_>>();
            pieces.into_iter().map(move |keys| ManifestRecord::Removed { keys, before })
        });
        records.collect()
    }
}

impl ManifestLog {
    /// Whether so much was written since the last base that [`compact`](Self::compact) is worth it. A
    /// base is written once its tail is half as large: each byte of the log is written about three times.
    #[must_use]
    pub fn needs_compaction(&self) -> bool {
        let large = self.tail_bytes.saturating_mul(2) >= self.base_bytes;
        let long = self.tail_objects > TAIL_OBJECTS_MIN && large;
        self.compaction.is_some() || self.lost || long || self.tail_objects > TAIL_OBJECTS_MAX
    }

    /// Does one step of a compaction, which it begins if none is under way. True if more are to come;
    /// other calls may come between.
    ///
    /// # Errors
    /// `Fenced`; what the bucket says: call it again later. `Damaged` if an object of the log cannot be
    /// read any more; the next start goes on without it.
    ///
    /// # Cancel safety
    /// Safe: the next call goes on.
    pub async fn compact(
        &mut self,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<bool, OwnerError> {
        self.check()?;
        let ended = self.compaction.is_none() && !self.queue.is_empty();
        self.settle(deadline).await?;
        if ended {
            // It may have been the end of the last one.
            return Ok(self.needs_compaction());
        }
        if self.compaction.is_none() {
            self.compaction = Some(self.begin_compaction());
        }
        let enough = self.parts.object_bytes_max;
        while let Some(id) = self.compaction.as_ref().and_then(|it| it.next_source(enough)) {
            let object = self.source(deadline).need_object(id).await?;
            if let Some(compaction) = &mut self.compaction {
                compaction.say_again(object.records, &self.packs);
            }
        }
        let mut part = Vec::new();
        if let Some(compaction) = &mut self.compaction {
            part = std::mem::take(&mut compaction.part);
            compaction.part_bytes = 0;
        }
        let more = self.compaction.as_ref().is_some_and(|it| !it.sources.is_empty());
        if !more {
            part.extend(self.end_compaction());
        }
        self.enqueue(part, now_unix_ms);
        self.settle(deadline).await?;
        Ok(more)
    }

    fn begin_compaction(&mut self) -> Compaction {
        let unnamed_from = self.unnamed.first().copied().unwrap_or(self.next_pack);
        Compaction {
            from: self.next,
            sources: self.window.iter().map(|(id, _)| *id).collect(),
            said: HashSet::new(),
            removed: std::mem::take(&mut self.removed),
            needed: HashMap::new(),
            part: Vec::new(),
            part_bytes: 0,
            unnamed_from: Seq { epoch: self.parts.held.epoch, seq: unnamed_from },
        }
    }

    /// The records that end a base.
    fn end_compaction(&mut self) -> Vec<ManifestRecord> {
        let Some(compaction) = self.compaction.take() else { return Vec::new() };
        let from = compaction.from;
        let mut records = compaction.removals();
        records.extend(self.dropped.keys().map(|pack| ManifestRecord::Dropped(*pack)));
        records.push(mark_of(self.parts.held.epoch));
        records.push(ManifestRecord::Base { from });
        records
    }

    /// Notes that a base was written.
    pub(super) fn supersede(&mut self, from: u64, now_unix_ms: u64) {
        let epoch = self.parts.held.epoch;
        while let Some(&(id, _)) = self.window.front()
            && id.at < (Seq { epoch, seq: from })
        {
            self.window.pop_front();
            if !self.closing.contains(&id) {
                self.doomed.push_back((id, now_unix_ms));
            }
        }
        self.base_bytes = self.window.iter().map(|(_, bytes)| bytes).sum();
        self.tail_objects = 0;
        self.tail_bytes = 0;
        self.lost = false;
    }
}
