//! Deletes what nobody needs any more, long after nobody does.

use std::time::Duration;

use futures_util::{
    FutureExt,
    stream::{self, StreamExt},
};
use tokio::time::Instant;

use super::ManifestLog;
use crate::object::{
    format::ManifestRecord,
    names::{ManifestId, PackId},
    owner::{OwnerError, still_owner},
};

/// Objects that are deleted in one round.
const DELETES_MAX: usize = 1024;
/// Objects that are deleted at a time.
const DELETES_AT_ONCE: usize = 16;

/// What a round deleted.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Collected {
    /// Packs.
    pub packs: Vec<PackId>,
    /// Objects of the log.
    pub manifests: usize,
}

impl ManifestLog {
    /// Deletes the objects of packs that were dropped, and of manifests that were superseded, at least
    /// `grace` ago: longer than whoever found them before may still read them. A start begins the time
    /// anew.
    ///
    /// # Errors
    /// `Fenced`, then nothing was deleted; what the bucket says, then some may be.
    ///
    /// # Cancel safety
    /// Safe: what was deleted is deleted again.
    pub async fn collect(
        &mut self,
        now_unix_ms: u64,
        grace: Duration,
        deadline: Instant,
    ) -> Result<Collected, OwnerError> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        let due = |since: u64| since.saturating_add(grace_ms) <= now_unix_ms;
        let packs = self.dropped.iter().filter(|(_, since)| due(**since)).map(|(id, _)| *id);
        let packs: Vec<PackId> = packs.take(DELETES_MAX).collect();
        let manifests = self.doomed.iter().filter(|(_, since)| due(*since)).map(|(id, _)| *id);
        let manifests: Vec<ManifestId> = manifests.take(DELETES_MAX).collect();
        if packs.is_empty() && manifests.is_empty() {
            return Ok(Collected::default());
        }
        self.check_still_owner(deadline).await?;
        let cluster = &self.parts.held.owner.cluster;
        let names = manifests.iter().map(|id| id.name(cluster)).collect();
        self.delete(names, deadline).await?;
        self.doomed.retain(|(id, _)| !manifests.contains(id));
        if let Some(local) = self.parts.local.as_ref().filter(|_| !manifests.is_empty()) {
            local.keep_only(self.window.iter().map(|(id, _)| *id).collect()).await;
        }
        // Last: who asks must know of every one that is not there any more.
        let cluster = &self.parts.held.owner.cluster;
        let names = packs.iter().map(|id| id.name(cluster)).collect();
        self.delete(names, deadline).await?;
        for pack in &packs {
            self.dropped.remove(pack);
        }
        Ok(Collected { packs, manifests: manifests.len() })
    }

    /// Drops packs that are in the bucket and that nobody will name any more: what a fenced holder
    /// uploaded late, or a failed upload left. Reads the names of all packs of the cluster.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn sweep(
        &mut self,
        now_unix_ms: u64,
        deadline: Instant,
    ) -> Result<Vec<PackId>, OwnerError> {
        self.check()?;
        self.settle(deadline).await?;
        if self.lost {
            return Ok(Vec::new());
        }
        let unnamed_from = self.unnamed.first().copied().unwrap_or(self.next_pack);
        let own = self.parts.held.epoch;
        let abandoned = |id: &PackId| {
            let over = id.epoch < own || (id.epoch == own && id.seq < unnamed_from);
            over && !self.packs.contains(id) && !self.dropped.contains_key(id)
        };
        let listed = self.source(deadline).list_packs().await?;
        let left = listed.into_iter().filter(|(id, _)| abandoned(id)).collect();
        let left = self.source(deadline).deletable(left).await?;
        let records = left.iter().map(|id| ManifestRecord::Dropped(*id)).collect();
        self.append(records, now_unix_ms, deadline).await?;
        Ok(left)
    }

    /// Checks that the epoch is not over. What is deleted next was dropped in this log before, so a
    /// holder that is fenced in this moment deletes nothing that the newer one uses.
    pub(super) async fn check_still_owner(&mut self, deadline: Instant) -> Result<(), OwnerError> {
        self.check()?;
        self.fenced = !still_owner(&self.parts.bucket, &self.parts.held, deadline).await?;
        self.check()
    }

    async fn delete(&self, names: Vec<String>, deadline: Instant) -> Result<(), OwnerError> {
        // Boxed: without it the compiler does not see that this can move between threads.
        let deletes = names.iter().map(|name| self.parts.bucket.delete(name, deadline).boxed());
        let deletes = deletes.collect::<Vec<_>>();
        let mut deletes = stream::iter(deletes).buffer_unordered(DELETES_AT_ONCE);
        while let Some(deleted) = deletes.next().await {
            deleted?;
        }
        Ok(())
    }
}
