//! Opens the log of an epoch: nobody writes to older ones any more, and what they said is known.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
};

use tokio::time::Instant;
use tracing::{info, warn};

use super::{LogParts, ManifestLog, create};
use crate::object::{
    bucket::Bucket,
    format::{EpochRecord, Manifest, ManifestRecord},
    local::Local,
    names::{ManifestId, Owner, PackId, Seq},
    owner::{Claim, OwnerError, Ownership, forget_old_epochs, open_epoch, read_epoch},
    rebuild::{FIRST_SEQ, Folded, Log, LogObject, Read, Rebuilt, Source, Unnamed, mark_of},
};

/// Takes an ordinal, the node's own or a ward's: opens its next epoch, and its log.
///
/// # Errors
/// As for [`open_epoch`] and [`ManifestLog::open`].
///
/// # Cancel safety
/// Safe: do it again.
pub async fn adopt(
    bucket: Arc<Bucket>,
    (owner, claim): (&Owner, Claim<'_>),
    local: Option<Local>,
    now_unix_ms: u64,
    deadline: Instant,
) -> Result<(ManifestLog, Rebuilt), OwnerError> {
    let held = open_epoch(&bucket, owner, claim, now_unix_ms, deadline).await?;
    ManifestLog::open(LogParts::new(bucket, held, local), now_unix_ms, deadline).await
}

/// Closed logs of which the last object is kept: as many starts as an older holder may sleep through.
const CLOSING_MAX: usize = 64;

/// What is known of older logs.
#[derive(Debug)]
struct Older {
    folded: Folded,
    /// The objects that count and their bytes.
    window: BTreeMap<ManifestId, u64>,
    /// The last number in the log of each epoch, and whether that object closes it.
    ends: BTreeMap<u64, (u64, bool)>,
    base: Option<(Seq, Seq)>,
    superseded: Vec<ManifestId>,
}

impl ManifestLog {
    /// Opens the log of an epoch that was just opened, and says what packs there are.
    ///
    /// # Errors
    /// `Fenced` if a newer epoch was opened meanwhile; what the bucket says.
    ///
    /// # Cancel safety
    /// Safe: open another epoch.
    pub async fn open(
        parts: LogParts,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<(Self, Rebuilt), OwnerError> {
        let LogParts { bucket, held, local, .. } = &parts;
        if let Some(local) = local {
            clear_if_foreign(local, bucket, held, deadline).await?;
        }
        let source = Source { bucket, owner: &held.owner, local: local.as_ref(), deadline };
        let log = source.read_log().await?;
        let reads = log.reads;
        let mut older = Older::of(log);
        for epoch in older.open_logs(held) {
            older.close(&source, held, epoch).await?;
        }
        let unnamed = source.find_unnamed(&older.folded).await?;
        let mut opened = Self::after(parts, &older, now_unix_ms);
        opened.enqueue(beginning(opened.parts.held.epoch, &unnamed), now_unix_ms);
        opened.settle(deadline).await?;
        // The object that closed this log may be gone already, if this process slept for very long.
        opened.check_still_owner(deadline).await?;
        opened.settle_down(deadline).await;
        let rebuilt = older.folded.into_rebuilt(unnamed, reads);
        let (packs, adopted) = (rebuilt.packs.len(), rebuilt.adopted);
        info!(epoch = opened.parts.held.epoch, packs, adopted, "opened the object tier's log");
        if let Some(epoch) = rebuilt.lost_until {
            warn!(epoch, "packs are forgotten up to this epoch: their log cannot be read");
        }
        Ok((opened, rebuilt))
    }

    fn after(parts: LogParts, older: &Older, now_unix_ms: u64) -> Self {
        let of_base = |at: Seq| older.base.is_some_and(|(from, to)| (from..=to).contains(&at));
        let closing = older.closing(&parts.held.owner);
        let doomed = older.superseded.iter().filter(|id| !closing.contains(id));
        let bytes_of = |base: bool| {
            let objects = older.window.iter().filter(move |(id, _)| of_base(id.at) == base);
            objects.map(|(_, bytes)| *bytes)
        };
        Self {
            parts,
            fenced: false,
            next: FIRST_SEQ,
            next_pack: 1,
            unnamed: BTreeSet::new(),
            queue: VecDeque::new(),
            base_bytes: bytes_of(true).sum(),
            tail_objects: bytes_of(false).count(),
            tail_bytes: bytes_of(false).sum(),
            window: older.window.iter().map(|(id, bytes)| (*id, *bytes)).collect(),
            lost: older.folded.lost_until.is_some(),
            doomed: doomed.map(|id| (*id, now_unix_ms)).collect(),
            closing,
            packs: older.folded.packs.keys().copied().collect(),
            dropped: older.folded.dropped.iter().map(|id| (*id, now_unix_ms)).collect(),
            removed: older.folded.removed.clone(),
            compaction: None,
        }
    }

    /// What follows once the epoch has begun, and may fail.
    async fn settle_down(&self, deadline: Instant) {
        let LogParts { bucket, held, local, .. } = &self.parts;
        if let Err(error) = forget_old_epochs(bucket, held, deadline).await {
            warn!(%error, "old epochs of the object tier stay in the bucket");
        }
        if let Some(local) = local {
            local.keep_only(self.window.iter().map(|(id, _)| *id).collect()).await;
            local.sign(&held.record).await;
        }
    }
}

/// What an epoch says first.
fn beginning(epoch: u64, unnamed: &Unnamed) -> Vec<ManifestRecord> {
    let orphans = unnamed.orphans.iter().map(|pack| ManifestRecord::Pack(pack.footer.clone()));
    let leftovers = unnamed.leftovers.iter().map(|id: &PackId| ManifestRecord::Dropped(*id));
    orphans.chain(leftovers).chain([mark_of(epoch)]).collect()
}

impl Older {
    fn of(log: Log) -> Self {
        let Log { objects, base, superseded, lost_until, reads: _ } = log;
        let mut ends = BTreeMap::new();
        for id in &superseded {
            note_end(&mut ends, *id, false);
        }
        for object in &objects {
            note_end(&mut ends, object.id, object.closed_by().is_some());
        }
        let window = objects.iter().map(|object| (object.id, object.bytes)).collect();
        let folded = Folded::of(objects, lost_until);
        Self { folded, window, ends, base, superseded }
    }

    /// The older epochs whose holders might still write: what began last has closed those before it.
    fn open_logs(&self, held: &Ownership) -> Vec<u64> {
        let mut epochs: Vec<u64> = held.older.iter().chain(self.ends.keys()).copied().collect();
        epochs.sort_unstable();
        epochs.dedup();
        let closed = |epoch: &u64| self.ends.get(epoch).is_some_and(|(_, closed)| *closed);
        let open = |epoch: &u64| (self.folded.begun..held.epoch).contains(epoch) && !closed(epoch);
        epochs.into_iter().filter(open).collect()
    }

    /// The last objects of the newest logs. A log that is closed by one stays closed while it is there.
    fn closing(&self, owner: &Owner) -> BTreeSet<ManifestId> {
        let newest = self.ends.iter().rev().take(CLOSING_MAX);
        newest.map(|(epoch, (seq, _))| owner.manifest(Seq { epoch: *epoch, seq: *seq })).collect()
    }

    /// Closes the log of an older epoch behind whatever its holder still writes.
    async fn close(
        &mut self,
        source: &Source<'_>,
        held: &Ownership,
        epoch: u64,
    ) -> Result<(), OwnerError> {
        let cluster = &held.owner.cluster;
        let mut seq = self.ends.get(&epoch).map_or(FIRST_SEQ, |(last, _)| last + 1);
        loop {
            let id = held.owner.manifest(Seq { epoch, seq });
            let records = vec![mark_of(held.epoch)];
            let closing = Manifest { cluster: cluster.clone(), id, records };
            let body = bytes::Bytes::from(closing.encode());
            if create(source.bucket, &id.name(cluster), &body, source.deadline).await? {
                self.window.insert(id, body.len() as u64);
                self.ends.insert(epoch, (seq, true));
                if let Some(local) = source.local {
                    local.store(id, body).await;
                }
                return Ok(());
            }
            match source.read_object(id).await? {
                Read::There { object, .. } => {
                    let closed_by = object.closed_by();
                    self.meet(object);
                    match closed_by {
                        Some(newer) if newer > held.epoch => return Err(held.fenced()),
                        Some(_) => return Ok(()),
                        None => {}
                    }
                }
                Read::Damaged(_) => self.folded.lose(epoch),
            }
            seq += 1;
        }
    }

    /// Takes an object that the older holder wrote meanwhile.
    fn meet(&mut self, object: LogObject) {
        self.window.insert(object.id, object.bytes);
        note_end(&mut self.ends, object.id, object.closed_by().is_some());
        self.folded.take(object);
    }
}

fn note_end(ends: &mut BTreeMap<u64, (u64, bool)>, id: ManifestId, closed: bool) {
    let end = ends.entry(id.at.epoch).or_insert((id.at.seq, closed));
    if id.at.seq >= end.0 {
        *end = (id.at.seq, closed);
    }
}

/// Forgets local copies that are not of this log.
async fn clear_if_foreign(
    local: &Local,
    bucket: &Bucket,
    held: &Ownership,
    deadline: Instant,
) -> Result<(), OwnerError> {
    let ours = match local.whose().await {
        Some(record) => there_too(&record, bucket, held, deadline).await?,
        None => false,
    };
    if !ours {
        local.clear().await;
    }
    Ok(())
}

/// Whether the bucket has the same record of the epoch.
async fn there_too(
    record: &EpochRecord,
    bucket: &Bucket,
    held: &Ownership,
    deadline: Instant,
) -> Result<bool, OwnerError> {
    if record.cluster != held.owner.cluster || record.id.ordinal != held.owner.ordinal {
        return Ok(false);
    }
    let epoch = record.id.epoch;
    if let Some((previous, there)) = &held.previous
        && *previous == epoch
    {
        return Ok(there == record);
    }
    let there = read_epoch(bucket, &held.owner, epoch, deadline).await?;
    Ok(there.as_ref() == Some(record))
}
