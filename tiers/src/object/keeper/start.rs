//! The start: takes the ordinal, and finds what this node has in the bucket.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Keeper, RETRY_MIN, tend_every};
use crate::{
    key::IndexKey,
    map::Location,
    object::{
        Core,
        catalog::{PackInfo, digest},
        format::Role,
        manifest_log::{ManifestLog, adopt},
        names::PackId,
        owner::{Claim, OwnerError},
        rebuild::{Rebuilt, RebuiltPack, rebuild},
    },
    store::{Found, Wanted},
    tier::Tier,
};

/// How long a start may take: a log of millions of blocks from a slow bucket.
const START_DEADLINE: Duration = Duration::from_secs(600);

impl Keeper {
    /// Takes the ordinal and finds what is there.
    pub(super) async fn start(&mut self) {
        self.start_at = None;
        let core = Arc::clone(&self.core);
        let deadline = Instant::now() + START_DEADLINE;
        if self.is_ward() {
            return self.start_ward(deadline).await;
        }
        let probed = core.bucket.probe().await;
        if probed.as_ref().is_ok_and(|probe| !probe.conditional_create) {
            let url = core.bucket.url();
            tracing::error!(url, "object store has no conditional create: the tier is read-only");
            return self.read_only(deadline).await;
        }
        let taken = match probed {
            Ok(_) => self.take(deadline).await,
            Err(error) => Err(error.into()),
        };
        match taken {
            Ok(taken) => {
                self.begin(taken).await;
                core.filled();
            }
            Err(error) => {
                tracing::warn!(%error, "object tier does not start yet");
                self.start_at = Some(self.later());
            }
        }
    }

    pub(super) async fn take(
        &self,
        deadline: Instant,
    ) -> Result<(ManifestLog, Rebuilt), OwnerError> {
        let Core { config, bucket, .. } = self.core.as_ref();
        let role = if self.is_ward() { Role::Ward } else { Role::Own };
        let whose = (&self.seat.owner, Claim::of(&config.holder, role));
        let now = self.core.now_unix_ms();
        adopt(Arc::clone(bucket), whose, self.local.clone(), now, deadline).await
    }

    /// What is there is found and served, and the ordinal is written for from now on.
    pub(super) async fn begin(&mut self, (log, rebuilt): (ManifestLog, Rebuilt)) {
        let removed = self.fill(rebuilt).await;
        let removal = (!removed.is_empty()).then(|| log.removal(removed));
        self.log = Some(log);
        removal.into_iter().for_each(|removal| self.note(removal));
        self.seat.epoch.hold();
        self.retry = RETRY_MIN;
        let now = Instant::now();
        (self.beat_at, self.tend_at) = (now, now + tend_every(self.core.config.delete_grace));
    }

    /// Serves what is there, and writes nothing.
    async fn read_only(&mut self, deadline: Instant) {
        match rebuild(&self.core.bucket, &self.seat.owner, deadline).await {
            Ok(rebuilt) => {
                // Nothing can be written of what was removed meanwhile.
                drop(self.fill(rebuilt).await);
                self.core.filled();
            }
            Err(error) => {
                tracing::warn!(%error, "object tier does not start yet");
                self.start_at = Some(self.later());
            }
        }
    }

    /// Puts what was found into the catalog and the map; returns what was removed meanwhile, which is
    /// not in the map again.
    async fn fill(&mut self, rebuilt: Rebuilt) -> Vec<IndexKey> {
        // Another node may have had the ordinal meanwhile.
        self.reconcile(&rebuilt);
        self.room.found(rebuilt.waiting);
        let mut places: HashMap<u64, Location> = HashMap::new();
        // The newest first: what older ones have of the same blocks is not needed.
        for pack in rebuilt.packs.into_iter().rev() {
            if self.core.catalog.number_of(&pack.id).is_none() {
                self.fill_pack(pack, &mut places);
                // Each takes about a millisecond: reads go on meanwhile.
                tokio::task::yield_now().await;
            }
        }
        let packs = self.packs();
        tracing::info!(
            ordinal = self.seat.owner.ordinal,
            packs = packs.len(),
            blocks = packs.iter().map(|pack| pack.live_blocks).sum::<u64>(),
            manifests = rebuilt.reads.manifests,
            cached = rebuilt.reads.cached,
            footers = rebuilt.reads.footers,
            "object packs found"
        );
        let removed = self.seat.unfound.lock().take().unwrap_or_default();
        let found = removed.iter().filter_map(|key| Some(key.at(*places.get(&digest(key))?)));
        let found: Vec<Wanted> = found.collect();
        if let Some(above) = self.core.above() {
            above.leaving(Tier::Object, &found);
        }
        for block in &found {
            self.core.catalog.kill(block.location);
        }
        removed.into_iter().collect()
    }

    /// What another node has dropped or removed that had the ordinal meanwhile leaves here, too.
    fn reconcile(&mut self, rebuilt: &Rebuilt) {
        let there: HashMap<PackId, &RebuiltPack> =
            rebuilt.packs.iter().map(|pack| (pack.id, pack)).collect();
        let (mut dropped, mut removed) = (HashSet::new(), HashSet::new());
        for known in self.packs() {
            match there.get(&known.info.id) {
                Some(pack) => removed.extend(self.core.catalog.retain(known.number, &pack.footer)),
                None => drop(dropped.insert(known.number)),
            }
        }
        self.drop_packs(&dropped);
        if let Some(above) = self.core.above().filter(|_| !removed.is_empty()) {
            above.gone(Tier::Object, &mut |location| removed.contains(&location));
        }
    }

    fn fill_pack(&mut self, pack: RebuiltPack, places: &mut HashMap<u64, Location>) {
        let RebuiltPack { id, bytes, footer } = pack;
        let name = id.name(&self.seat.owner.cluster);
        let info = PackInfo {
            id,
            name,
            bytes,
            created_unix_ms: footer.created_unix_ms,
            made_at: self.core.touches(),
        };
        let number = self.core.catalog.insert(info, &footer);
        let known: HashMap<_, _> = footer
            .namespaces
            .iter()
            .filter_map(|(id, encoded)| {
                let namespace = self.core.namespaces.restore(id, encoded).ok().flatten()?;
                Some((*id, namespace))
            })
            .collect();
        let above = self.core.above();
        for (index, entry) in footer.entries.iter().enumerate() {
            let Some(location) = number.location(index) else { continue };
            let found = known.get(&entry.key.namespace).zip(above.as_ref());
            let is_kept = found.is_some_and(|(namespace, above)| {
                let found = Found {
                    namespace: Arc::clone(namespace),
                    hash: entry.key.hash,
                    len: entry.len,
                    checksums: entry.checksums(),
                    location,
                    replaces: false,
                };
                above.found(Tier::Object, found)
            });
            if is_kept {
                places.insert(digest(&entry.key), location);
            } else {
                self.core.catalog.kill(location);
                self.unheld.add(&entry.key);
            }
        }
    }
}
