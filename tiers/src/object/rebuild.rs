//! What packs an ordinal has, from the bucket alone: its log, and the footers of packs that no
//! object of the log names. No block is read.
//!
//! ```text
//! LIST manifests -> GET from the newest back to the last base -> fold
//! LIST packs     -> unnamed, not older than the log's last epoch: an upload that ended before it was
//!                   named -> GET trailer, GET footer -> an orphan, adopted
//!                -> unnamed, older: left by a holder that was fenced, or forgotten: a leftover
//! ```
//! Folding does not depend on the order of objects: ids of packs are never used twice, so a dropped
//! pack stays dropped; a removal kills the key in all packs numbered before it, whenever they are
//! named.
//!
//! Invariants
//! - Orphans come back at most once. An epoch begins by naming those of all older epochs; when it says
//!   that it has begun, what is unnamed and older is a leftover from then on. Without that rule
//!   removals would have to be kept for ever, because a late upload could bring a key back.
//! - What a newer version wrote is left alone: a pack, or the whole log.
//! - What cannot be read is not guessed. Where an object of the log is missing or damaged, it may have held removals: the packs of its
//!   epoch and of older ones are forgotten, a clean miss, and nothing is taken for an orphan or a
//!   leftover.
//!
//! Why the log is read backwards: names do not say which object is a base, and objects before it are
//! about to be deleted.

mod fold;
mod walk;

use std::ops::Range;

use bytes::Bytes;
use futures_util::{
    FutureExt,
    stream::{self, StreamExt, TryStreamExt},
};
use tokio::time::Instant;

pub(super) use self::fold::{Folded, note_removed};
use self::walk::Walk;
use super::{
    bucket::{Bucket, BucketErrorKind},
    format::{Damage, Footer, MANIFEST_BYTES_MAX, Manifest, ManifestRecord, PackTrailer},
    local::Local,
    names::{ManifestId, Owner, PackId, Seq},
    owner::OwnerError,
};

/// Objects of the log that are read at a time.
const MANIFESTS_AT_ONCE: usize = 16;
/// Packs of which the footer is read at a time: two small requests each.
const FOOTERS_AT_ONCE: usize = 32;
/// How often the log may change while it is read: it is compacted once in many objects.
const READ_TRIES: u32 = 4;
/// The number of the first object in the log of an epoch.
pub(super) const FIRST_SEQ: u64 = 1;

/// A pack and what is in it, without the blocks that were removed since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RebuiltPack {
    /// Which.
    pub id: PackId,
    /// Bytes of the object.
    pub bytes: u64,
    /// What is in it. The places of its blocks are right, but as some may be missing it must not be
    /// encoded.
    pub footer: Footer,
}

/// What an ordinal has.
#[derive(Debug, Default)]
pub struct Rebuilt {
    /// Its packs, in the order of their numbers.
    pub packs: Vec<RebuiltPack>,
    /// Packs that are not used any more, and whose objects may still be there.
    pub dropped: Vec<PackId>,
    /// Of these and of `leftovers`, those whose objects are there, and their bytes.
    pub waiting: Vec<(PackId, u64)>,
    /// How many of the packs no object of the log named.
    pub adopted: usize,
    /// Packs without a name that are not adopted.
    pub leftovers: Vec<PackId>,
    /// The newest epoch of which packs may be missing, because an object of the log could not be read.
    pub lost_until: Option<u64>,
    /// What it took.
    pub reads: Reads,
}

/// What a rebuild read.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Reads {
    /// Objects of the log, from the bucket.
    pub manifests: usize,
    /// Objects of the log, from the local directory.
    pub cached: usize,
    /// Footers of packs.
    pub footers: usize,
}

/// Says what packs an ordinal has, for somebody who only looks: nothing is written, and packs that
/// the holder is uploading at this moment may be among those adopted.
///
/// # Errors
/// What the bucket says; `Unsettled` if the holder compacts its log faster than it can be read.
///
/// # Cancel safety
/// Safe.
pub async fn rebuild(
    bucket: &Bucket,
    owner: &Owner,
    deadline: Instant,
) -> Result<Rebuilt, OwnerError> {
    let source = Source { bucket, owner, local: None, deadline };
    let log = source.read_log().await?;
    let folded = Folded::of(log.objects, log.lost_until);
    let unnamed = source.find_unnamed(&folded).await?;
    Ok(folded.into_rebuilt(unnamed, log.reads))
}

/// Where a log is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) bucket: &'a Bucket,
    pub(super) owner: &'a Owner,
    pub(super) local: Option<&'a Local>,
    pub(super) deadline: Instant,
}

/// One object of a log.
#[derive(Debug)]
pub(super) struct LogObject {
    pub(super) id: ManifestId,
    pub(super) bytes: u64,
    pub(super) records: Vec<ManifestRecord>,
}

impl LogObject {
    /// The newer epoch whose holder closed this log with it, if it only does that.
    pub(super) fn closed_by(&self) -> Option<u64> {
        let [only] = self.records.as_slice() else { return None };
        mark(only).filter(|epoch| *epoch > self.id.at.epoch)
    }

    /// The first object of the base that ends with it.
    fn base_from(&self) -> Option<Seq> {
        let from = self.records.iter().find_map(|record| match record {
            ManifestRecord::Base { from } => Some(*from),
            ManifestRecord::Pack(_)
            | ManifestRecord::Dropped(_)
            | ManifestRecord::Removed { .. } => None,
        })?;
        Some(Seq { epoch: self.id.at.epoch, seq: from.min(self.id.at.seq) })
    }
}

/// A record that removes nothing. In the log of its own epoch: the epoch has begun, orphans of older
/// ones are named before this. In the log of an older epoch: it is closed. No holder of that one would
/// write it, so it cannot be taken for his.
pub(super) fn mark_of(epoch: u64) -> ManifestRecord {
    ManifestRecord::Removed { keys: Vec::new(), before: Seq { epoch, seq: 0 } }
}

fn mark(record: &ManifestRecord) -> Option<u64> {
    match record {
        ManifestRecord::Removed { keys, before } if keys.is_empty() => Some(before.epoch),
        ManifestRecord::Removed { .. }
        | ManifestRecord::Pack(_)
        | ManifestRecord::Dropped(_)
        | ManifestRecord::Base { .. } => None,
    }
}

/// What came of reading one object.
#[derive(Debug)]
pub(super) enum Read {
    There { object: LogObject, cached: bool },
    Damaged(ManifestId),
}

/// What the end of an object says that is named like a pack.
enum End {
    Ours(RebuiltPack),
    /// It is damaged, another's or gone.
    NoPack(PackId),
    /// It is of a newer version, and left alone.
    Newer,
}

impl End {
    fn of_damage(id: PackId, damage: Damage) -> Self {
        match damage {
            Damage::Version => Self::Newer,
            Damage::Foreign | Damage::Checksum | Damage::Misplaced => Self::NoPack(id),
        }
    }
}

/// The part of a log that counts.
#[derive(Debug, Default)]
pub(super) struct Log {
    /// Oldest first: the last base and what follows it.
    pub(super) objects: Vec<LogObject>,
    /// The first and the last of the base among them.
    pub(super) base: Option<(Seq, Seq)>,
    /// What is there and counts no more.
    pub(super) superseded: Vec<ManifestId>,
    pub(super) lost_until: Option<u64>,
    pub(super) reads: Reads,
}

impl Source<'_> {
    /// Reads the log from its end back to the last base.
    pub(super) async fn read_log(&self) -> Result<Log, OwnerError> {
        for _ in 0..READ_TRIES {
            match self.try_read_log().await {
                Err(OwnerError::Bucket(error)) if error.kind() == BucketErrorKind::NotFound => {}
                read => return read,
            }
        }
        Err(OwnerError::Unsettled { ordinal: self.owner.ordinal })
    }

    async fn try_read_log(&self) -> Result<Log, OwnerError> {
        let listed = self.bucket.list(&self.owner.manifests_prefix(), self.deadline).await?;
        let ids = listed.iter().filter_map(|object| ManifestId::parse(&object.name));
        let mut ids: Vec<_> = ids.map(|(_, id)| id).collect();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut walk = Walk::default();
        // Boxed: without it the compiler does not see that this can move between threads.
        let reads = ids.iter().map(|id| self.read_object(*id).boxed()).collect::<Vec<_>>();
        let mut reads = stream::iter(reads).buffered(MANIFESTS_AT_ONCE);
        while let Some(read) = reads.next().await {
            if !walk.take(read?) {
                break;
            }
        }
        drop(reads);
        Ok(walk.into_log(&ids))
    }

    pub(super) async fn read_object(&self, id: ManifestId) -> Result<Read, OwnerError> {
        if let Some(local) = self.local
            && let Some(bytes) = local.read(id).await
            && let Ok(object) = self.decode(id, &bytes)
        {
            return Ok(Read::There { object, cached: true });
        }
        let name = id.name(&self.owner.cluster);
        let bytes = self.bucket.get_whole(&name, MANIFEST_BYTES_MAX, self.deadline).await?;
        let object = match self.decode(id, &bytes) {
            Ok(object) => object,
            Err(Damage::Version) => return Err(OwnerError::Newer { name }),
            Err(Damage::Foreign | Damage::Checksum | Damage::Misplaced) => {
                return Ok(Read::Damaged(id));
            }
        };
        if let Some(local) = self.local {
            local.store(id, bytes).await;
        }
        Ok(Read::There { object, cached: false })
    }

    /// Reads one object that must be there and whole.
    pub(super) async fn need_object(&self, id: ManifestId) -> Result<LogObject, OwnerError> {
        match self.read_object(id).await? {
            Read::There { object, .. } => Ok(object),
            Read::Damaged(id) => Err(OwnerError::Damaged { name: id.name(&self.owner.cluster) }),
        }
    }

    fn decode(&self, id: ManifestId, bytes: &[u8]) -> Result<LogObject, Damage> {
        let manifest = Manifest::decode(bytes)?;
        if manifest.cluster != self.owner.cluster || manifest.id != id {
            return Err(Damage::Misplaced);
        }
        let bytes = u64::try_from(bytes.len()).unwrap_or(u64::MAX);
        Ok(LogObject { id, bytes, records: manifest.records })
    }

    /// Looks for packs that no object of the log names.
    pub(super) async fn find_unnamed(&self, folded: &Folded) -> Result<Unnamed, OwnerError> {
        let mut found = Unnamed::default();
        if folded.lost_until.is_some() {
            return Ok(found);
        }
        let named = |id: &PackId| folded.packs.contains_key(id) || folded.dropped.contains(id);
        let mut unnamed = self.list_packs().await?;
        found.waiting = unnamed.clone();
        unnamed.retain(|(id, _)| !named(id));
        for end in self.read_ends(unnamed).await? {
            found.footers += 1;
            match end {
                End::Ours(pack) if pack.id.epoch >= folded.begun => found.orphans.push(pack),
                End::Ours(RebuiltPack { id, .. }) | End::NoPack(id) => found.leftovers.push(id),
                End::Newer => {}
            }
        }
        found.orphans.sort_unstable_by_key(|pack| pack.id);
        found.leftovers.sort_unstable();
        let left = |id: &PackId| folded.dropped.contains(id) || found.leftovers.contains(id);
        found.waiting.retain(|(id, _)| left(id));
        Ok(found)
    }

    /// Of packs that nobody names, those that may be deleted: all but those of newer versions.
    pub(super) async fn deletable(
        &self,
        packs: Vec<(PackId, u64)>,
    ) -> Result<Vec<PackId>, OwnerError> {
        let ends = self.read_ends(packs).await?.into_iter().filter_map(|end| match end {
            End::Ours(RebuiltPack { id, .. }) | End::NoPack(id) => Some(id),
            End::Newer => None,
        });
        Ok(ends.collect())
    }

    /// The packs of the ordinal that are in the bucket, and their bytes.
    pub(super) async fn list_packs(&self) -> Result<Vec<(PackId, u64)>, OwnerError> {
        let listed = self.bucket.list(&self.owner.cluster.packs_prefix(), self.deadline).await?;
        let packs = listed.iter().filter_map(|object| {
            let (_, id) = PackId::parse(&object.name)?;
            (id.ordinal == self.owner.ordinal).then_some((id, object.bytes))
        });
        Ok(packs.collect())
    }

    /// The footer of a pack of the ordinal; `None` if the object is not there, or is no such pack.
    pub(super) async fn read_footer(
        &self,
        id: PackId,
        bytes: u64,
    ) -> Result<Option<Footer>, OwnerError> {
        Ok(match self.read_end(id, bytes).await? {
            End::Ours(pack) => Some(pack.footer),
            End::NoPack(_) | End::Newer => None,
        })
    }

    /// Reads trailers and footers, in no order.
    async fn read_ends(&self, packs: Vec<(PackId, u64)>) -> Result<Vec<End>, OwnerError> {
        let ends = packs.into_iter().map(|(id, bytes)| self.read_end(id, bytes).boxed());
        let ends = ends.collect::<Vec<_>>();
        stream::iter(ends).buffer_unordered(FOOTERS_AT_ONCE).try_collect().await
    }

    async fn read_end(&self, id: PackId, bytes: u64) -> Result<End, OwnerError> {
        let name = id.name(&self.owner.cluster);
        let Some(trailer_at) = bytes.checked_sub(PackTrailer::BYTES as u64) else {
            return Ok(End::NoPack(id));
        };
        let Some(trailer) = self.get_if_there(&name, trailer_at..bytes).await? else {
            return Ok(End::NoPack(id));
        };
        let trailer = match PackTrailer::decode(&trailer, bytes) {
            Ok(trailer) => trailer,
            Err(damage) => return Ok(End::of_damage(id, damage)),
        };
        let Some(footer) = self.get_if_there(&name, trailer.footer_range()).await? else {
            return Ok(End::NoPack(id));
        };
        let ours = |footer: &Footer| footer.id == id && footer.cluster == self.owner.cluster;
        Ok(match trailer.footer(&footer) {
            Ok(footer) if ours(&footer) => End::Ours(RebuiltPack { id, bytes, footer }),
            Ok(_another) => End::NoPack(id),
            Err(damage) => End::of_damage(id, damage),
        })
    }

    async fn get_if_there(
        &self,
        name: &str,
        range: Range<u64>,
    ) -> Result<Option<Bytes>, OwnerError> {
        match self.bucket.get(name, range, self.deadline).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == BucketErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Packs that no object of the log names.
#[derive(Debug, Default)]
pub(super) struct Unnamed {
    pub(super) orphans: Vec<RebuiltPack>,
    pub(super) leftovers: Vec<PackId>,
    /// Objects of packs that are dropped or left over, and their bytes.
    pub(super) waiting: Vec<(PackId, u64)>,
    /// Footers that were read.
    pub(super) footers: usize,
}

#[cfg(test)]
mod tests;
