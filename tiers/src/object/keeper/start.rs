//! The start: takes the ordinal, and finds what this node has in the bucket.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Keeper, RETRY_MIN};
use crate::{
    key::IndexKey,
    map::Location,
    object::{
        Core,
        catalog::{PackInfo, digest},
        manifest_log::{LogParts, ManifestLog},
        names::PackId,
        owner::{OwnerError, open_epoch},
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
            Ok((log, rebuilt)) => {
                let removed = self.fill(rebuilt).await;
                let removal = (!removed.is_empty()).then(|| log.removal(removed));
                self.log = Some(log);
                removal.into_iter().for_each(|removal| self.note(removal));
                core.epoch.hold();
                core.filled();
                self.retry = RETRY_MIN;
                let now = Instant::now();
                (self.beat_at, self.tend_at) = (now, now + self.tend_every());
            }
            Err(error) => {
                tracing::warn!(%error, "object tier does not start yet");
                self.start_at = Some(self.later());
            }
        }
    }

    async fn take(&self, deadline: Instant) -> Result<(ManifestLog, Rebuilt), OwnerError> {
        let Core { config, bucket, .. } = self.core.as_ref();
        let now = self.core.now_unix_ms();
        let held = open_epoch(bucket, &config.owner, &config.holder, now, deadline).await?;
        let (bucket, local) = (Arc::clone(bucket), Some(self.local.clone()));
        ManifestLog::open(LogParts::new(bucket, held, local), now, deadline).await
    }

    /// Serves what is there, and writes nothing.
    async fn read_only(&mut self, deadline: Instant) {
        match rebuild(&self.core.bucket, &self.core.config.owner, deadline).await {
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
        let there: HashSet<PackId> = rebuilt.packs.iter().map(|pack| pack.id).collect();
        let known = self.core.catalog.packs().into_iter();
        let gone = known.filter(|pack| !there.contains(&pack.info.id)).map(|pack| pack.number);
        self.drop_packs(&gone.collect());
        let mut places: HashMap<u64, Location> = HashMap::new();
        for pack in rebuilt.packs {
            if self.core.catalog.number_of(&pack.id).is_none() {
                self.fill_pack(pack, &mut places);
                // Each takes about a millisecond: reads go on meanwhile.
                tokio::task::yield_now().await;
            }
        }
        let totals = self.core.catalog.totals();
        tracing::info!(
            packs = totals.packs,
            blocks = totals.live_blocks,
            manifests = rebuilt.reads.manifests,
            cached = rebuilt.reads.cached,
            footers = rebuilt.reads.footers,
            "object packs found"
        );
        let removed = self.core.unfound.lock().take().unwrap_or_default();
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

    fn fill_pack(&self, pack: RebuiltPack, places: &mut HashMap<u64, Location>) {
        let RebuiltPack { id, bytes, footer } = pack;
        let name = id.name(&self.core.config.owner.cluster);
        let info = PackInfo { id, name, bytes, created_unix_ms: footer.created_unix_ms };
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
                };
                above.found(Tier::Object, found)
            });
            if !is_kept {
                self.core.catalog.kill(location);
                continue;
            }
            // A newer pack stands in for an older one.
            if let Some(older) = places.insert(digest(&entry.key), location) {
                self.core.catalog.kill(older);
            }
        }
    }
}
