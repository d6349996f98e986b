//! The log of an ordinal's packs in the bucket: which there are, which are dropped, what was removed.
//!
//! ```text
//! open     close the logs of older epochs -> read them -> adopt orphans -> say that the epoch has begun
//! append   create object n+1 on the condition that nobody has
//! compact  say all that counts again, some objects at a time; the last is a base: what is before is
//!          superseded, and deleted later
//! collect  delete what was dropped or superseded long ago
//! ```
//! Invariants
//! - One writer. A newcomer creates the next object in the log of every older epoch; the older holder
//!   has to create the same one, fails, and is fenced for good. What it wrote before is in the log.
//! - A pack is named after it was uploaded, and its object is deleted long after `Dropped` was written.
//!   So a log names no pack that is not there, unless somebody else deleted it, and a fenced holder
//!   deletes nothing that a newer one uses.
//! - What was accepted is written in order: after a failure it stays queued, and an append that may have
//!   been done is tried again with the same bytes, so that it is done once.
//! - A removal is said until no pack has the block any more that is older than it, named or about to be.
//!   A dropped pack is said until its object is deleted.
//!
//! Why not one object that is replaced: its size is that of all footers, and each pack would write it.
//! Why compaction reads the log instead of memory: nothing else needs all footers to stay in memory.

mod collect;
mod compact;
mod open;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    mem,
    sync::Arc,
};

use bytes::Bytes;
use tokio::time::Instant;

use self::compact::Compaction;
pub use self::{collect::Collected, open::adopt};
use super::{
    bucket::{Bucket, BucketErrorKind},
    format::{Manifest, ManifestRecord},
    local::Local,
    names::{ManifestId, PackId, Seq},
    owner::{OwnerError, Ownership},
    rebuild::{Source, note_removed},
};
use crate::{key::IndexKey, limits::MIB};

/// Objects after the last base that are few enough.
const TAIL_OBJECTS_MIN: usize = 64;
/// Objects after the last base that are too many, however large the base is: a start reads them all.
const TAIL_OBJECTS_MAX: usize = 1024;
/// Bytes of one object of the log, unless one record is larger: one small upload.
const OBJECT_BYTES_MAX: u64 = 8 * MIB;
/// Keys in one record of removed blocks: 4 MiB.
const KEYS_MAX: usize = 65_536;

/// What a log needs.
#[derive(Debug, Clone)]
pub struct LogParts {
    /// Where it is.
    pub bucket: Arc<Bucket>,
    /// In whose name it is written.
    pub held: Ownership,
    /// Where copies of its objects are kept.
    pub local: Option<Local>,
    object_bytes_max: u64,
}

impl LogParts {
    /// The parts of the log of an epoch.
    #[must_use]
    pub fn new(bucket: Arc<Bucket>, held: Ownership, local: Option<Local>) -> Self {
        Self { bucket, held, local, object_bytes_max: OBJECT_BYTES_MAX }
    }
}

/// Records that make one object.
#[derive(Debug)]
struct Batch {
    records: Vec<ManifestRecord>,
    now_unix_ms: u64,
}

/// The log of the ordinal that this process holds. Once fenced, everything fails with `Fenced`.
#[derive(Debug)]
pub struct ManifestLog {
    parts: LogParts,
    fenced: bool,
    /// The number of the next object.
    next: u64,
    /// The number of the next pack.
    next_pack: u64,
    /// Packs of this epoch that got a number and were neither named nor dropped.
    unnamed: BTreeSet<u64>,
    queue: VecDeque<Batch>,
    /// The objects that count, oldest first, and their bytes.
    window: VecDeque<(ManifestId, u64)>,
    base_bytes: u64,
    tail_objects: usize,
    tail_bytes: u64,
    /// Some of the log cannot be read: it should be written anew.
    lost: bool,
    /// The last objects of older logs, which close them for as long as an older holder may sleep.
    closing: BTreeSet<ManifestId>,
    /// Superseded objects, and since when.
    doomed: VecDeque<(ManifestId, u64)>,
    packs: BTreeSet<PackId>,
    /// Dropped packs whose objects may be there, and since when.
    dropped: BTreeMap<PackId, u64>,
    /// What was removed since the last base, and what that one repeats.
    removed: HashMap<IndexKey, Seq>,
    compaction: Option<Compaction>,
}

impl ManifestLog {
    /// In whose name it is written.
    #[must_use]
    pub fn held(&self) -> &Ownership {
        &self.parts.held
    }

    /// Numbers the next pack. It must be named by `Pack`, or given up by `Dropped`: until then removals
    /// of blocks that may be in it are kept.
    pub fn next_pack(&mut self) -> PackId {
        let at = Seq { epoch: self.parts.held.epoch, seq: self.next_pack };
        self.unnamed.insert(self.next_pack);
        self.next_pack += 1;
        self.parts.held.owner.pack(at)
    }

    /// Whether packs have a number and are neither named nor given up.
    #[must_use]
    pub fn has_unnamed(&self) -> bool {
        !self.unnamed.is_empty()
    }

    /// Whether there is no pack, nor an object of one that was dropped, nor anything left to say.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let packs = self.packs.is_empty() && self.dropped.is_empty() && self.unnamed.is_empty();
        packs && self.queue.is_empty() && !self.lost
    }

    /// The record that removes blocks from all packs that have a number by now.
    #[must_use]
    pub fn removal(&self, keys: Vec<IndexKey>) -> ManifestRecord {
        let before = Seq { epoch: self.parts.held.epoch, seq: self.next_pack };
        ManifestRecord::Removed { keys, before }
    }

    /// Writes records, in order, with those of earlier calls that failed before them. When it returns
    /// `Ok`, everything accepted so far survives. Nothing is written for no records but what is queued.
    ///
    /// # Errors
    /// `Fenced`, then nothing of this is or will be written. What the bucket says: the records are
    /// accepted all the same and must not be given again; call this with none to try again.
    ///
    /// # Cancel safety
    /// As after an error of the bucket.
    pub async fn append(
        &mut self,
        records: Vec<ManifestRecord>,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<(), OwnerError> {
        self.check()?;
        self.enqueue(records, now_unix_ms);
        self.settle(deadline).await
    }

    fn check(&self) -> Result<(), OwnerError> {
        if self.fenced { Err(self.parts.held.fenced()) } else { Ok(()) }
    }

    /// Queues records in objects of a bounded size.
    fn enqueue(&mut self, records: Vec<ManifestRecord>, now_unix_ms: u64) {
        let mut batch = Vec::new();
        let mut bytes = 0;
        for record in records.into_iter().flat_map(divide) {
            if bytes + record.bytes() > self.parts.object_bytes_max && !batch.is_empty() {
                self.queue.push_back(Batch { records: mem::take(&mut batch), now_unix_ms });
                bytes = 0;
            }
            bytes += record.bytes();
            batch.push(record);
        }
        if !batch.is_empty() {
            self.queue.push_back(Batch { records: batch, now_unix_ms });
        }
    }

    /// Writes what is queued.
    async fn settle(&mut self, deadline: Instant) -> Result<(), OwnerError> {
        while let Some(batch) = self.queue.front_mut() {
            let owner = &self.parts.held.owner;
            let id = owner.manifest(Seq { epoch: self.parts.held.epoch, seq: self.next });
            // Given back at once: the batch stays as it is until it is written.
            let records = mem::take(&mut batch.records);
            let manifest = Manifest { cluster: owner.cluster.clone(), id, records };
            let body = Bytes::from(manifest.encode());
            batch.records = manifest.records;
            let name = id.name(&owner.cluster);
            if !create(&self.parts.bucket, &name, &body, deadline).await? {
                self.fenced = true;
                return self.check();
            }
            if let Some(batch) = self.queue.pop_front() {
                self.apply(id, body.len(), batch);
            }
            if let Some(local) = &self.parts.local {
                local.store(id, body).await;
            }
        }
        Ok(())
    }

    /// Notes what an object that was written says.
    fn apply(&mut self, id: ManifestId, bytes: usize, batch: Batch) {
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.next = id.at.seq + 1;
        self.window.push_back((id, bytes));
        self.tail_objects += 1;
        self.tail_bytes += bytes;
        for record in batch.records {
            match record {
                ManifestRecord::Pack(footer) => {
                    self.has_name(footer.id);
                    if !self.dropped.contains_key(&footer.id) {
                        self.packs.insert(footer.id);
                    }
                }
                ManifestRecord::Dropped(pack) => {
                    self.has_name(pack);
                    self.packs.remove(&pack);
                    self.dropped.entry(pack).or_insert(batch.now_unix_ms);
                }
                ManifestRecord::Removed { keys, before } => {
                    note_removed(&mut self.removed, keys, before);
                }
                ManifestRecord::Base { from } => self.supersede(from, batch.now_unix_ms),
            }
        }
    }

    fn has_name(&mut self, pack: PackId) {
        if pack.epoch == self.parts.held.epoch {
            self.unnamed.remove(&pack.seq);
        }
    }

    fn source(&self, deadline: Instant) -> Source<'_> {
        let LogParts { bucket, held, local, .. } = &self.parts;
        Source { bucket, owner: &held.owner, local: local.as_ref(), deadline }
    }
}

/// Creates an object, or finds that it is there with the same bytes: then it was created before, by a
/// call whose answer was lost. False if it is another's.
async fn create(
    bucket: &Bucket,
    name: &str,
    body: &Bytes,
    deadline: Instant,
) -> Result<bool, OwnerError> {
    if bucket.create(name, body.clone(), deadline).await? {
        return Ok(true);
    }
    let bytes_max = u64::try_from(body.len()).unwrap_or(u64::MAX);
    match bucket.get_whole(name, bytes_max, deadline).await {
        Ok(there) => Ok(there == *body),
        // A longer one.
        Err(error) if error.kind() == BucketErrorKind::Damaged => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// A record in pieces of a bounded size, where it can be in pieces.
fn divide(record: ManifestRecord) -> Vec<ManifestRecord> {
    match record {
        ManifestRecord::Removed { keys, before } if keys.len() > KEYS_MAX => {
            let pieces = keys.chunks(KEYS_MAX).map(<[IndexKey]>::to_vec);
            pieces.map(|keys| ManifestRecord::Removed { keys, before }).collect()
        }
        whole => vec![whole],
    }
}

#[cfg(test)]
mod tests;
