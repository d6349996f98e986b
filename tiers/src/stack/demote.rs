//! Demotion: a copy of a dram block on a colder tier.
//!
//! A copy that a tier has made and no map knows would be lost, and one that was cancelled half-way may
//! have been made. So the [cleaner](super::clean) owns the work, whoever asked for it: who stops
//! waiting loses the answer, not the copy. Where no cleaner runs, the caller does the work.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use super::{Shared, load::Flight};
use crate::{
    block::BlockHash,
    dram::Payload,
    error::{Error, ErrorKind, Result},
    limits::RETRY_AFTER_QUOTA,
    map::{Entry, Hashed, Location, stored},
    metrics::Undemoted,
    namespace::Namespace,
    store::{BlockStore, BoxFuture, Outgoing, Urgency, Wanted},
    tier::Tier,
};

/// What became of a demotion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Demotion {
    /// The tier has it now.
    Copied,
    /// The tier had it.
    There,
    /// The block is not in dram (any more).
    Gone,
    /// Its tenant has on the tier what it may have.
    OverQuota,
}

/// What the map says of a block that is to be demoted.
pub(super) enum Candidate {
    /// It is in dram and not there: bytes of memory that the demotion will hold, whether it has been
    /// read, and whether it is due: it has not come from the object tier just for one use.
    Resident { bytes: u64, reused: bool, due: bool },
    /// The tier has it.
    There,
    /// It is not in dram.
    Gone,
}

/// Work that is done whether or not somebody waits for it.
pub(super) struct Job {
    /// Bytes of memory that it holds meanwhile.
    pub(super) bytes: u64,
    pub(super) work: BoxFuture<'static, ()>,
}

/// Whether a tier may have a copy that it has failed to make.
fn may_be_there(kind: ErrorKind) -> bool {
    match kind {
        ErrorKind::Exhausted { .. } | ErrorKind::Invalid | ErrorKind::Unsupported => false,
        ErrorKind::Unauthenticated
        | ErrorKind::UnknownNamespace
        | ErrorKind::LayoutMismatch
        | ErrorKind::LeaseExpired
        | ErrorKind::Unavailable
        | ErrorKind::Timeout
        | ErrorKind::Cancelled
        | ErrorKind::Corrupt
        | ErrorKind::Internal => true,
    }
}

impl Shared {
    /// Whether the stack has this tier.
    pub(super) fn has_tier(&self, tier: Tier) -> bool {
        tier == Tier::Dram || self.store(tier).is_some()
    }

    /// The colder tier of this kind.
    pub(super) fn store(&self, tier: Tier) -> Option<&Arc<dyn BlockStore>> {
        self.cold.iter().find(|store| store.tier() == tier)
    }

    /// Copies a block to a colder tier for somebody who waits for it.
    pub(super) async fn demote(
        self: &Arc<Self>,
        namespace: &Arc<Namespace>,
        hash: BlockHash,
        tier: Tier,
    ) -> Result<bool> {
        let Some(store) = self.store(tier) else { return Ok(false) };
        let at = self.map.hashed(namespace.index(), hash);
        let bytes = match self.candidate(tier, at) {
            Candidate::Resident { bytes, .. } => bytes,
            Candidate::There => return Ok(true),
            Candidate::Gone => return Ok(self.has_colder(at, tier)),
        };
        let block = (Arc::clone(namespace), at);
        let work = Arc::clone(self).copy_down(Arc::clone(store), block, Urgency::Durable);
        let (tell, told) = oneshot::channel();
        let work = Box::pin(async move {
            // Whoever asked may have gone.
            drop(tell.send(work.await));
        });
        let job = Job { bytes, work };
        let alone = match self.cleaner.inbox() {
            Some(inbox) => inbox.send(job).await.err().map(|mpsc::error::SendError(job)| job),
            None => Some(job),
        };
        if let Some(job) = alone {
            job.work.await;
        }
        let ended = || Error::new(ErrorKind::Unavailable, "demote: the cleaner has ended");
        let copied = told.await.map_err(|_dropped| ended())?;
        let demotion = copied.inspect_err(|error| {
            self.metrics.undemoted(Undemoted::of(error.kind())).inc();
        })?;
        Ok(match demotion {
            Demotion::Copied | Demotion::There => true,
            Demotion::Gone => false,
            Demotion::OverQuota => {
                self.metrics.undemoted(Undemoted::Quota).inc();
                let retry_after = RETRY_AFTER_QUOTA;
                let what = "store on nvme: the tenant has what it may have there (nvme_max)";
                return Err(Error::new(ErrorKind::Exhausted { retry_after }, what));
            }
        })
    }

    /// Looks whether a block should be demoted.
    pub(super) fn candidate(&self, tier: Tier, at: Hashed) -> Candidate {
        self.map.with(at, |shard| {
            let Some(entry) = shard.entry(at) else { return Candidate::Gone };
            if entry.cold(tier).is_some() {
                return Candidate::There;
            }
            match &entry.payload {
                Some(_) => Candidate::Resident {
                    bytes: entry.slot_bytes(),
                    reused: entry.context == 0,
                    due: entry.lacks(tier),
                },
                None => Candidate::Gone,
            }
        })
    }

    /// Whether a tier that is colder than `tier` has a block.
    fn has_colder(&self, at: Hashed, tier: Tier) -> bool {
        let has = |entry: &Entry| entry.tiers().any(|other| other > tier);
        self.map.with(at, |shard| shard.entry(at).is_some_and(has))
    }

    /// Copies a block to `store` and tells the map, unless the block has gone.
    pub(super) async fn copy_down(
        self: Arc<Self>,
        store: Arc<dyn BlockStore>,
        (namespace, at): (Arc<Namespace>, Hashed),
        urgency: Urgency,
    ) -> Result<Demotion> {
        let tier = store.tier();
        // One at a time for each block: a second copy would be on the tier and in no map.
        let mut turn = Flight::join(&self.demotions, at.key).turn().await;
        let outgoing = self.map.with(at, |shard| {
            let entry = shard.entry(at).ok_or(Demotion::Gone)?;
            if entry.cold(tier).is_some() {
                return Err(Demotion::There);
            }
            Ok(Outgoing {
                namespace: Arc::clone(&namespace),
                hash: at.key.hash,
                payload: entry.payload.clone().ok_or(Demotion::Gone)?,
                checksums: entry.checksums.clone(),
                urgency,
                reused: entry.context == 0,
            })
        });
        let outgoing = match outgoing {
            Ok(outgoing) => outgoing,
            Err(nothing_to_do) => return Ok(nothing_to_do),
        };
        let bytes = u64::try_from(outgoing.payload.as_ref().len()).unwrap_or(u64::MAX);
        let admitted =
            if tier == Tier::Nvme { namespace.account().admit_to_nvme(bytes) } else { None };
        if tier == Tier::Nvme && admitted.is_none() {
            return Ok(Demotion::OverQuota);
        }
        let payload = outgoing.payload.clone();
        let _copying = self.early.begin(at.key, tier);
        let put = store.put(outgoing).await;
        let copied = put.inspect_err(|error| turn.leaves(may_be_there(error.kind())))?;
        let Err(location) = self.keep_copy(tier, at, &payload, copied) else {
            turn.leaves(false);
            self.metrics.stored(tier).inc();
            self.metrics.demoted(urgency).inc();
            return Ok(Demotion::Copied);
        };
        let unwanted = Wanted { namespace: *namespace.id(), hash: at.key.hash, location };
        let removed = store.remove(&[unwanted]).await;
        turn.leaves(removed.is_err());
        removed.map(|()| Demotion::Gone)
    }

    /// Tells the map of a copy. If the block was removed, or removed and put again meanwhile, or the
    /// copy has left already: the place of a copy that nobody wants.
    fn keep_copy(
        &self,
        tier: Tier,
        at: Hashed,
        payload: &Payload,
        made: Location,
    ) -> Result<(), Location> {
        self.map.with(at, |shard| {
            let now = self.early.take(at.key, made);
            let unwanted = now.unwrap_or(made);
            let location = now.ok_or(unwanted)?;
            let entry = shard.find(at).and_then(|id| shard.get_mut(id)).ok_or(unwanted)?;
            if !entry.payload.as_ref().is_some_and(|here| here.is_same(payload)) {
                return Err(unwanted);
            }
            let len = entry.len;
            // The tier may have found an older copy meanwhile: this is the newer place.
            if entry.cold_mut(tier).ok_or(unwanted)?.replace(location).is_none() {
                shard.push(stored(at.key, tier));
                self.count_copy(tier, (at.key.namespace, len), true);
            }
            Ok(())
        })
    }

    /// Queues blocks that have become readable for demotion to nvme, in this order.
    pub(super) fn demote_later(&self, keys: impl Iterator<Item = Hashed>) {
        if self.store(Tier::Nvme).is_none() {
            return;
        }
        let dropped = self.cleaner.queue(keys.map(|at| at.key));
        self.metrics.undemoted(Undemoted::QueueFull).inc_by(dropped);
    }
}
