//! Who may write and delete in the name of an ordinal: the holder of its newest epoch.
//!
//! ```text
//! open      LIST epochs -> newest holder is another and alive: refuse, by its name, see below
//!                       -> create the next epoch on the condition that nobody has -> LIST again
//! beat      every minute: still the newest? -> write the sign of life
//! fenced    a newer epoch exists: whoever holds an older one neither writes nor deletes any more
//! ```
//! Invariants
//! - An epoch has one holder: its object is made once, by a conditional create.
//! - Who writes to the log is decided there ([`manifest_log`](super::manifest_log)): a newcomer closes
//!   the logs of all older epochs before it begins its own, by objects that the older holders would
//!   have to create. The LIST of [`still_owner`] only stops early what could not succeed, and deletes.
//! - A holder that may be alive is not pushed aside by another: it wins by being younger than
//!   [`TAKEOVER_AFTER`]. The same holder may come back at once, its own predecessor is fenced then.
//! - Who holds an ordinal as a [ward](Role::Ward) gives way at once to the node whose own it is, and
//!   what is [released](Role::Released) is anybody's.
//!
//! Clocks: ages compare the wall clock of one node with that of another. Skew makes a takeover early
//! or late, never unsafe: what is safe rests on conditional creates alone. A sign of life from the
//! future counts as fresh.

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use thiserror::Error;
use tokio::time::Instant;

use super::{
    bucket::{Bucket, BucketError, BucketErrorKind},
    format::{Alive, EpochRecord, HOLDER_BYTES_MAX, Role},
    names::{ClusterName, EpochId, Owner},
};
use crate::error::{Error as TierError, ErrorKind};

/// How often the holder should [`beat`].
pub const BEAT_EVERY: Duration = Duration::from_secs(60);
/// How long a holder must have been silent before another may take its ordinal: many beats, and longer
/// than a node needs to start again.
pub const TAKEOVER_AFTER: Duration = Duration::from_secs(600);
/// How often a lost race for the next epoch is tried again. Each round is somebody else's success.
const OPEN_TRIES: u32 = 16;
/// The longest epoch record or sign of life that is read, in bytes.
const RECORD_BYTES_MAX: u64 = 16 * 1024;
/// Older epochs that are kept for whoever wants to know who held the ordinal.
const EPOCHS_KEPT: usize = 8;

const _: () = assert!(TAKEOVER_AFTER.as_secs() >= 5 * BEAT_EVERY.as_secs());

/// Why an ordinal cannot be held, written or read.
#[derive(Debug, Error)]
pub enum OwnerError {
    /// Somebody else has it and was alive a moment ago.
    #[error(
        "ordinal {ordinal} of the object tier is held by {holder:?}, alive {} s ago; stop that node, \
         or give this one another ordinal; if it is gone for good, wait until it has been silent for \
         {} s, or delete {sign:?} and {epoch_name:?} from the bucket",
        age.as_secs(),
        TAKEOVER_AFTER.as_secs()
    )]
    Held {
        /// The ordinal.
        ordinal: u32,
        /// Who has it.
        holder: String,
        /// How long ago it was alive.
        age: Duration,
        /// The object with its sign of life.
        sign: String,
        /// The object that says that it has the epoch.
        epoch_name: String,
    },
    /// Somebody else opened a newer epoch: this process must not write or delete any more.
    #[error(
        "epoch {epoch} of ordinal {ordinal} is over: a newer one was opened; write nothing more"
    )]
    Fenced {
        /// The ordinal.
        ordinal: u32,
        /// The epoch that is over.
        epoch: u64,
    },
    /// Again and again somebody was faster.
    #[error("open an epoch of ordinal {ordinal}: somebody else was faster {OPEN_TRIES} times")]
    Contended {
        /// The ordinal.
        ordinal: u32,
    },
    /// The log changed under the reader again and again.
    #[error("read the manifests of ordinal {ordinal}: they changed again and again")]
    Unsettled {
        /// The ordinal.
        ordinal: u32,
    },
    /// An object of the log is not what was written.
    #[error("read {name:?}: it is damaged")]
    Damaged {
        /// The object.
        name: String,
    },
    /// An object of the log is of another version: it is left alone, and so is the whole log.
    #[error(
        "read {name:?}: a newer version of this program wrote it; run that one, or give this node \
         another cluster name or ordinal"
    )]
    Newer {
        /// The object.
        name: String,
    },
    /// The name of the node cannot be written.
    #[error("node name: {bytes} bytes given, 1 to {HOLDER_BYTES_MAX} allowed")]
    Holder {
        /// Bytes of the name.
        bytes: usize,
    },
    /// The bucket failed.
    #[error(transparent)]
    Bucket(#[from] BucketError),
}

impl From<OwnerError> for TierError {
    fn from(error: OwnerError) -> Self {
        let kind = match &error {
            OwnerError::Held { .. } | OwnerError::Holder { .. } => ErrorKind::Invalid,
            OwnerError::Newer { .. } => ErrorKind::Unsupported,
            OwnerError::Fenced { .. }
            | OwnerError::Contended { .. }
            | OwnerError::Unsettled { .. } => ErrorKind::Unavailable,
            OwnerError::Damaged { .. } => ErrorKind::Corrupt,
            OwnerError::Bucket(failed) => bucket_kind(failed),
        };
        Self::new(kind, "hold an ordinal of the object tier").because(error)
    }
}

fn bucket_kind(error: &BucketError) -> ErrorKind {
    match error.kind() {
        BucketErrorKind::NotFound | BucketErrorKind::Damaged => ErrorKind::Corrupt,
        BucketErrorKind::Refused | BucketErrorKind::Failed => ErrorKind::Unavailable,
        BucketErrorKind::Busy(retry_after) => ErrorKind::Exhausted { retry_after },
        BucketErrorKind::Timeout => ErrorKind::Timeout,
        BucketErrorKind::Unsupported => ErrorKind::Unsupported,
    }
}

/// Who wants to open an epoch, and as what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim<'a> {
    /// The lasting name of the node, or whatever else should be known to have done it.
    pub holder: &'a str,
    /// As what the epoch will be held.
    pub role: Role,
    /// Although another holder is alive.
    pub force: bool,
}

impl<'a> Claim<'a> {
    /// That of the node itself.
    #[must_use]
    pub fn own(holder: &'a str) -> Self {
        Self::of(holder, Role::Own)
    }

    /// That of a node in this role.
    pub(super) fn of(holder: &'a str, role: Role) -> Self {
        Self { holder, role, force: false }
    }

    /// That of somebody who knows that the holder is gone, so that another can have the ordinal.
    #[must_use]
    pub fn release(by: &'a str, force: bool) -> Self {
        Self { holder: by, role: Role::Released, force }
    }
}

/// What was seen of who has an ordinal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sighting {
    /// Its newest epoch.
    pub epoch: u64,
    /// What the epoch's object says, if it can be read.
    pub record: Option<EpochRecord>,
    /// Who was seen last in it, and when, in milliseconds since 1970.
    pub last: Option<(String, u64)>,
}

impl Sighting {
    /// As what it is held, as far as that can be read.
    #[must_use]
    pub fn role(&self) -> Role {
        self.record.as_ref().map_or(Role::Own, |record| record.role)
    }

    /// For how long nothing has been seen of whoever has it.
    #[must_use]
    pub fn age(&self, now_unix_ms: u64) -> Duration {
        let seen = self.last.as_ref().map_or(0, |(_, at)| *at);
        Duration::from_millis(now_unix_ms.saturating_sub(seen))
    }

    /// Who has it and may be alive.
    #[must_use]
    pub fn alive(&self, now_unix_ms: u64) -> Option<&str> {
        let is_alive = self.role().is_held() && self.age(now_unix_ms) < TAKEOVER_AFTER;
        let (holder, _) = self.last.as_ref().filter(|_| is_alive)?;
        Some(holder)
    }

    fn refuse(&self, owner: &Owner, claim: Claim<'_>, now_unix_ms: u64) -> Result<(), OwnerError> {
        let returns = self.role() == Role::Ward && claim.role == Role::Own;
        match self.alive(now_unix_ms).filter(|other| *other != claim.holder) {
            Some(other) if !returns && !claim.force => Err(OwnerError::Held {
                ordinal: owner.ordinal,
                holder: other.to_owned(),
                age: self.age(now_unix_ms),
                sign: owner.alive_name(),
                epoch_name: owner.epoch(self.epoch).name(&owner.cluster),
            }),
            Some(_) | None => Ok(()),
        }
    }
}

/// An epoch that this process has opened. It may be over at any time: see [`still_owner`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ownership {
    /// Whose packs.
    pub owner: Owner,
    /// The epoch.
    pub epoch: u64,
    /// What the epoch's object says.
    pub record: EpochRecord,
    /// The epochs before it, as far as they are still known, oldest first.
    pub(super) older: Vec<u64>,
    /// The one right before it, if it could be read.
    pub(super) previous: Option<(u64, EpochRecord)>,
}

impl Ownership {
    pub(super) fn fenced(&self) -> OwnerError {
        OwnerError::Fenced { ordinal: self.owner.ordinal, epoch: self.epoch }
    }
}

/// Opens the next epoch of an ordinal.
///
/// # Errors
/// `Held` while another holder is alive, and what the bucket says: `Unsupported` if it has no
/// conditional creates.
///
/// # Cancel safety
/// The epoch may or may not have been opened; opening another one is always right.
pub async fn open_epoch(
    bucket: &Bucket,
    owner: &Owner,
    claim: Claim<'_>,
    now_unix_ms: u64,
    deadline: Instant,
) -> Result<Ownership, OwnerError> {
    let holder = claim.holder;
    if !(1..=HOLDER_BYTES_MAX).contains(&holder.len()) {
        return Err(OwnerError::Holder { bytes: holder.len() });
    }
    for _ in 0..OPEN_TRIES {
        let older = epochs(bucket, owner, deadline).await?;
        let mut previous = None;
        if let Some(&newest) = older.last() {
            let seen = sight(bucket, owner, newest, deadline).await?;
            seen.refuse(owner, claim, now_unix_ms)?;
            previous = seen.record.map(|record| (newest, record));
        }
        let epoch = older.last().map_or(1, |newest| newest.saturating_add(1));
        let adopted_from = previous.as_ref().filter(|(_, record)| record.holder != holder);
        let record = EpochRecord {
            cluster: owner.cluster.clone(),
            id: owner.epoch(epoch),
            holder: holder.to_owned(),
            role: claim.role,
            opened_unix_ms: now_unix_ms,
            adopted_from: adopted_from.map(|(epoch, _)| *epoch),
        };
        let name = owner.epoch(epoch).name(&owner.cluster);
        if !bucket.create(&name, Bytes::from(record.encode()), deadline).await? {
            continue;
        }
        // Old epochs are deleted: a slow newcomer may have made again one that is long over.
        if epochs(bucket, owner, deadline).await?.last() == Some(&epoch) {
            return Ok(Ownership { owner: owner.clone(), epoch, record, older, previous });
        }
    }
    Err(OwnerError::Contended { ordinal: owner.ordinal })
}

/// Looks at who has an ordinal; `None` if it has no epochs: nobody ever had it.
///
/// # Errors
/// What the bucket says.
///
/// # Cancel safety
/// Safe.
pub async fn look(
    bucket: &Bucket,
    owner: &Owner,
    deadline: Instant,
) -> Result<Option<Sighting>, OwnerError> {
    match epochs(bucket, owner, deadline).await?.last() {
        Some(&newest) => Ok(Some(sight(bucket, owner, newest, deadline).await?)),
        None => Ok(None),
    }
}

/// The newest epoch of each ordinal of a cluster that has any.
///
/// # Errors
/// What the bucket says.
///
/// # Cancel safety
/// Safe.
pub async fn newest_epochs(
    bucket: &Bucket,
    cluster: &ClusterName,
    deadline: Instant,
) -> Result<BTreeMap<u32, u64>, OwnerError> {
    let listed = bucket.list(&cluster.epochs_prefix(), deadline).await?;
    let mut newest = BTreeMap::new();
    for (_, id) in listed.iter().filter_map(|object| EpochId::parse(&object.name)) {
        let known = newest.entry(id.ordinal).or_insert(id.epoch);
        *known = id.epoch.max(*known);
    }
    Ok(newest)
}

/// Whether no newer epoch exists. It may exist a moment later: only conditional creates decide.
///
/// # Errors
/// What the bucket says; then nothing is known.
///
/// # Cancel safety
/// Safe.
pub async fn still_owner(
    bucket: &Bucket,
    held: &Ownership,
    deadline: Instant,
) -> Result<bool, OwnerError> {
    let newest = epochs(bucket, &held.owner, deadline).await?.last().copied();
    Ok(newest.is_none_or(|newest| newest <= held.epoch))
}

/// Leaves a sign of life, every [`BEAT_EVERY`].
///
/// # Errors
/// `Fenced` if the epoch is over, then nothing was written; what the bucket says.
///
/// # Cancel safety
/// Safe: the sign may or may not have been written.
pub async fn beat(
    bucket: &Bucket,
    held: &Ownership,
    now_unix_ms: u64,
    deadline: Instant,
) -> Result<(), OwnerError> {
    if !still_owner(bucket, held, deadline).await? {
        return Err(held.fenced());
    }
    let EpochRecord { cluster, id, holder, .. } = held.record.clone();
    let alive = Alive { cluster, id, holder, seen_unix_ms: now_unix_ms };
    let body = vec![Bytes::from(alive.encode())];
    Ok(bucket.put(&held.owner.alive_name(), body, deadline).await?)
}

/// Deletes the objects of epochs that are long over, once nobody can write in them any more.
pub(super) async fn forget_old_epochs(
    bucket: &Bucket,
    held: &Ownership,
    deadline: Instant,
) -> Result<(), OwnerError> {
    let kept_from = held.older.len().saturating_sub(EPOCHS_KEPT);
    for &epoch in held.older.get(..kept_from).unwrap_or_default() {
        let name = held.owner.epoch(epoch).name(&held.owner.cluster);
        bucket.delete(&name, deadline).await?;
    }
    Ok(())
}

/// What an epoch's object says; `None` if it is not there or cannot be read.
pub(super) async fn read_epoch(
    bucket: &Bucket,
    owner: &Owner,
    epoch: u64,
    deadline: Instant,
) -> Result<Option<EpochRecord>, OwnerError> {
    let name = owner.epoch(epoch).name(&owner.cluster);
    let bytes = read_if_there(bucket, &name, deadline).await?;
    let record = bytes.and_then(|bytes| EpochRecord::decode(&bytes).ok());
    Ok(record.filter(|record| record.id == owner.epoch(epoch) && record.cluster == owner.cluster))
}

/// What there is to see of an epoch.
pub(super) async fn sight(
    bucket: &Bucket,
    owner: &Owner,
    epoch: u64,
    deadline: Instant,
) -> Result<Sighting, OwnerError> {
    let record = read_epoch(bucket, owner, epoch, deadline).await?;
    let alive = read_alive(bucket, owner, deadline).await?.filter(|it| it.id.epoch == epoch);
    let opened = record.as_ref().map(|record| (record.holder.clone(), record.opened_unix_ms));
    let beaten = alive.map(|alive| (alive.holder, alive.seen_unix_ms));
    let last = opened.into_iter().chain(beaten).max_by_key(|(_, at)| *at);
    Ok(Sighting { epoch, record, last })
}

async fn read_alive(
    bucket: &Bucket,
    owner: &Owner,
    deadline: Instant,
) -> Result<Option<Alive>, OwnerError> {
    let bytes = read_if_there(bucket, &owner.alive_name(), deadline).await?;
    let alive = bytes.and_then(|bytes| Alive::decode(&bytes).ok());
    Ok(alive.filter(|alive| alive.id.ordinal == owner.ordinal && alive.cluster == owner.cluster))
}

async fn read_if_there(
    bucket: &Bucket,
    name: &str,
    deadline: Instant,
) -> Result<Option<Bytes>, OwnerError> {
    match bucket.get_whole(name, RECORD_BYTES_MAX, deadline).await {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == BucketErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The epochs of an ordinal, oldest first.
async fn epochs(bucket: &Bucket, owner: &Owner, deadline: Instant) -> Result<Vec<u64>, OwnerError> {
    let listed = bucket.list(&owner.epochs_prefix(), deadline).await?;
    let ids = listed.iter().filter_map(|object| EpochId::parse(&object.name));
    let mut epochs: Vec<_> = ids.map(|(_, id)| id.epoch).collect();
    epochs.sort_unstable();
    Ok(epochs)
}

#[cfg(test)]
mod tests;
