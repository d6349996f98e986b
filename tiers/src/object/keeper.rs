//! The one who writes for this node: holds its epoch, tells the bucket what packs there are and what
//! was removed, and finds after a start what is there.
//!
//! ```text
//! start    take the ordinal -> read its log -> packs into the catalog, blocks into the map
//! note     a pack was uploaded: it is named in the log, with the next ones or a moment later
//! remove   named in the log before it is acknowledged
//! beat     a sign of life, so that nobody takes the ordinal meanwhile
//! tend     packs that are too old or too many leave; objects that nobody needs are deleted
//! ```
//! A start that fails is tried again for as long as the node runs: the other tiers do not wait for it.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use super::{
    Core,
    bucket::BucketErrorKind,
    catalog::{PackInfo, PackNumber, digest},
    format::{Footer, ManifestRecord},
    local::Local,
    manifest_log::{LogParts, ManifestLog},
    names::PackId,
    owner::{BEAT_EVERY, OwnerError, beat, open_epoch},
    rebuild::{Rebuilt, RebuiltPack, rebuild},
};
use crate::{
    error::{Error, ErrorKind, Result},
    key::IndexKey,
    map::Location,
    store::{Found, Wanted},
    tier::Tier,
};

/// Operations that wait for the keeper; more wait outside.
pub(super) const QUEUE_MAX: usize = 256;
/// How long a start may take: a log of millions of blocks from a slow bucket.
const START_DEADLINE: Duration = Duration::from_secs(600);
/// How long one write of the log may take.
const LOG_DEADLINE: Duration = Duration::from_secs(20);
/// How long a pack waits to be named with others.
const NAME_DELAY: Duration = Duration::from_secs(2);
/// Records of packs that are named at once when there are so many.
const NAMED_TOGETHER: usize = 16;
/// When what failed is tried again, at first.
const RETRY_MIN: Duration = Duration::from_secs(1);
/// The longest time until what failed is tried again.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// How often it is looked what should leave and what can be deleted.
const TEND_EVERY: Duration = Duration::from_secs(30);
/// When the next step of a compaction comes.
const TEND_AGAIN: Duration = Duration::from_millis(100);
/// How often it is looked for packs that nobody will name any more: the names of all are listed for it.
const SWEEP_EVERY: Duration = Duration::from_secs(24 * 60 * 60);
/// How long an object stays after nobody needs it any more: longer than the deadline of a read and the
/// longest lease.
const DELETE_GRACE: Duration = Duration::from_secs(4200);

/// What the keeper is asked to do.
#[derive(Debug)]
pub(super) enum Keep {
    /// Number the next pack; nobody is told while the node does not hold its ordinal.
    Number { done: oneshot::Sender<PackId> },
    /// Name a pack that was uploaded, without blocks that were removed meanwhile.
    Name { footer: Box<Footer>, unwanted: Vec<IndexKey> },
    /// A number that no pack will have.
    GiveUp(PackId),
    /// Write down that blocks were removed.
    Remove { keys: Vec<IndexKey>, done: oneshot::Sender<Result<()>> },
    /// The object of a pack is not there.
    Lost(PackNumber),
    /// The map is full: the coldest pack goes.
    Shed,
    /// Finish and end.
    Close { done: oneshot::Sender<()> },
}

/// The task that writes to the bucket, but for packs. It ends when the store is closed or dropped.
#[derive(Debug)]
pub(super) struct Keeper {
    core: Arc<Core>,
    queue: mpsc::Receiver<Keep>,
    local: Local,
    log: Option<ManifestLog>,
    /// What the log is to be told, and who waits for that.
    records: Vec<ManifestRecord>,
    waiting: Vec<oneshot::Sender<Result<()>>>,
    /// Packs among what the log was told and has not written.
    unnamed: u64,
    start_at: Option<Instant>,
    flush_at: Option<Instant>,
    beat_at: Instant,
    tend_at: Instant,
    sweep_at: Instant,
    retry: Duration,
}

impl Keeper {
    pub(super) fn new(core: Arc<Core>, queue: mpsc::Receiver<Keep>) -> Self {
        let now = Instant::now();
        Self {
            local: Local::new(core.config.local.clone()),
            core,
            queue,
            log: None,
            records: Vec::new(),
            waiting: Vec::new(),
            unnamed: 0,
            start_at: Some(now),
            flush_at: None,
            beat_at: now,
            tend_at: now,
            sweep_at: now + SWEEP_EVERY,
            retry: RETRY_MIN,
        }
    }

    /// Works until the store is closed.
    pub(super) async fn run(mut self) {
        loop {
            let due = self.due();
            tokio::select! {
                biased;
                op = self.queue.recv() => {
                    let Some(op) = op else { break };
                    if self.serve(op).await {
                        break;
                    }
                }
                () = sleep_until(due) => self.work().await,
            }
        }
        self.core.epoch.end();
    }

    /// When there is something to do by itself.
    fn due(&self) -> Instant {
        let held = self.log.is_some().then_some(self.beat_at.min(self.tend_at));
        let dues = [self.start_at, self.flush_at, held];
        let far = Instant::now() + RETRY_MAX;
        dues.into_iter().flatten().min().unwrap_or(far)
    }

    async fn work(&mut self) {
        let now = Instant::now();
        let is_due = |at: Option<Instant>| at.is_some_and(|at| at <= now);
        if is_due(self.start_at) {
            self.start().await;
        }
        if is_due(self.flush_at) {
            self.flush().await;
        }
        if self.log.is_some() && self.beat_at <= now {
            self.beat().await;
        }
        if self.log.is_some() && self.tend_at <= now {
            self.tend().await;
        }
    }

    /// Does an operation; true if that was the last one.
    async fn serve(&mut self, op: Keep) -> bool {
        match op {
            Keep::Number { done } => {
                if let Some(log) = &mut self.log {
                    let id = log.next_pack();
                    if done.send(id).is_err() {
                        self.note(ManifestRecord::Dropped(id));
                    }
                }
            }
            Keep::Name { footer, unwanted } => {
                // First what was removed: a kill between the two must not bring it back.
                if let Some(log) = self.log.as_ref().filter(|_| !unwanted.is_empty()) {
                    let removal = log.removal(unwanted);
                    self.note(removal);
                }
                self.note(ManifestRecord::Pack(*footer));
            }
            Keep::GiveUp(id) => self.note(ManifestRecord::Dropped(id)),
            Keep::Remove { keys, done } => self.remove(keys, done),
            Keep::Lost(number) => self.drop_packs(&[number]),
            Keep::Shed => {
                let coldest = self.by_heat().into_iter().take(1);
                self.drop_packs(&coldest.map(|(number, _)| number).collect::<Vec<_>>());
            }
            Keep::Close { done } => {
                self.flush().await;
                if done.send(()).is_err() {
                    tracing::warn!("object tier closed later than anybody waited for it");
                }
                return true;
            }
        }
        if self.flush_at.is_some_and(|at| at <= Instant::now()) && self.queue.is_empty() {
            self.flush().await;
        }
        false
    }

    /// Notes what the log is to be told soon.
    fn note(&mut self, record: ManifestRecord) {
        self.records.push(record);
        let now = Instant::now();
        let at = if self.records.len() >= NAMED_TOGETHER { now } else { now + NAME_DELAY };
        self.flush_at = Some(self.flush_at.map_or(at, |before| before.min(at)));
    }

    /// What was removed is named at once: somebody waits.
    fn remove(&mut self, keys: Vec<IndexKey>, done: oneshot::Sender<Result<()>>) {
        let Some(log) = &self.log else {
            let what = "remove from the object tier: it is read-only now, and what was removed may \
                        come back with a restart";
            drop(done.send(Err(Error::new(ErrorKind::Unavailable, what))));
            return;
        };
        if !keys.is_empty() {
            let removal = log.removal(keys);
            self.records.push(removal);
        }
        self.waiting.push(done);
        self.flush_at = Some(Instant::now());
    }

    /// Tells the log what there is to tell.
    async fn flush(&mut self) {
        self.flush_at = None;
        let Some(log) = &mut self.log else { return };
        let now = self.core.now_unix_ms();
        let records = std::mem::take(&mut self.records);
        let is_pack = |record: &&ManifestRecord| matches!(record, ManifestRecord::Pack(_));
        self.unnamed += u64::try_from(records.iter().filter(is_pack).count()).unwrap_or(0);
        match log.append(records, now, Instant::now() + LOG_DEADLINE).await {
            Ok(()) => {
                self.retry = RETRY_MIN;
                self.core.metrics.named_packs.inc_by(std::mem::take(&mut self.unnamed));
                for done in self.waiting.drain(..) {
                    // Whoever asked may have gone.
                    drop(done.send(Ok(())));
                }
            }
            Err(error) if self.is_over(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "object log cannot be written now");
                self.flush_at = Some(self.later());
            }
        }
    }

    async fn beat(&mut self) {
        let Some(log) = &self.log else { return };
        let deadline = Instant::now() + LOG_DEADLINE;
        let beaten = beat(&self.core.bucket, log.held(), self.core.now_unix_ms(), deadline).await;
        self.beat_at = Instant::now() + BEAT_EVERY;
        if let Err(error) = beaten
            && !self.is_over(&error)
        {
            tracing::warn!(%error, "object tier leaves no sign of life now");
            self.beat_at = self.later();
        }
    }

    /// When to try again what has failed.
    fn later(&mut self) -> Instant {
        let at = Instant::now() + self.retry;
        self.retry = (self.retry * 2).min(RETRY_MAX);
        at
    }

    /// Whether an error says that another node has the ordinal now. Then nothing is written any more,
    /// until this node gets it back; what is there is served.
    fn is_over(&mut self, error: &OwnerError) -> bool {
        if !matches!(error, OwnerError::Fenced { .. }) {
            return false;
        }
        tracing::error!(%error, "object tier is read-only");
        self.core.epoch.lose();
        self.log = None;
        self.records.clear();
        let what = "remove from the object tier: another node has its packs now";
        for done in self.waiting.drain(..) {
            drop(done.send(Err(Error::new(ErrorKind::Unavailable, what))));
        }
        self.start_at = Some(Instant::now() + RETRY_MAX);
        true
    }

    /// Takes the ordinal and finds what is there.
    async fn start(&mut self) {
        self.start_at = None;
        let core = Arc::clone(&self.core);
        let deadline = Instant::now() + START_DEADLINE;
        match self.take(deadline).await {
            Ok((log, rebuilt)) => {
                let removed = self.fill(rebuilt).await;
                if !removed.is_empty() {
                    self.note(log.removal(removed));
                }
                core.epoch.hold();
                core.filled();
                self.log = Some(log);
                self.retry = RETRY_MIN;
                (self.beat_at, self.tend_at) = (Instant::now(), Instant::now() + TEND_EVERY);
            }
            Err(OwnerError::Bucket(error)) if error.kind() == BucketErrorKind::Unsupported => {
                tracing::error!(%error, "object store has no conditional create: read-only");
                self.read_only(deadline).await;
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
        let parts = LogParts::new(bucket, held, local).without_unnamed();
        ManifestLog::open(parts, now, deadline).await
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
    async fn fill(&self, rebuilt: Rebuilt) -> Vec<IndexKey> {
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

    async fn tend(&mut self) {
        self.expire();
        let (now, deadline) = (self.core.now_unix_ms(), Instant::now() + LOG_DEADLINE);
        let Some(log) = &mut self.log else { return };
        let sweeps = self.sweep_at <= Instant::now();
        let mut more = false;
        let collected = async {
            if sweeps {
                log.sweep(now, deadline).await?;
            }
            let collected = log.collect(now, DELETE_GRACE, deadline).await?;
            // One step: who removes something waits meanwhile.
            more = log.needs_compaction() && log.compact(now, deadline).await?;
            Ok::<_, OwnerError>(collected)
        };
        match collected.await {
            Ok(collected) => {
                let packs = u64::try_from(collected.packs.len()).unwrap_or(0);
                self.core.metrics.deleted_packs.inc_by(packs);
                if sweeps {
                    self.sweep_at = Instant::now() + SWEEP_EVERY;
                }
            }
            Err(error) if self.is_over(&error) => {}
            Err(error) => tracing::warn!(%error, "object garbage stays for now"),
        }
        self.tend_at = Instant::now() + if more { TEND_AGAIN } else { TEND_EVERY };
    }

    /// Drops packs that are too old, and the coldest while there are too many.
    fn expire(&mut self) {
        let config = &self.core.config;
        let ttl_ms = config.ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        let now = self.core.now_unix_ms();
        let packs = self.core.catalog.packs();
        let old = packs.iter().filter(|pack| {
            let age_ms = now.saturating_sub(pack.info.created_unix_ms);
            ttl_ms.is_some_and(|ttl_ms| age_ms > ttl_ms) || pack.live_blocks == 0
        });
        let old: Vec<PackNumber> = old.map(|pack| pack.number).collect();
        self.drop_packs(&old);
        let capacity = self.core.config.capacity_bytes;
        let mut over = self.core.catalog.totals().bytes.saturating_sub(capacity);
        if capacity == 0 || over == 0 {
            return;
        }
        let mut coldest = Vec::new();
        for (number, bytes) in self.by_heat() {
            if over == 0 {
                break;
            }
            over = over.saturating_sub(bytes);
            coldest.push(number);
        }
        self.drop_packs(&coldest);
    }

    /// All packs with their bytes, the one first whose blocks were used the longest ago.
    fn by_heat(&self) -> Vec<(PackNumber, u64)> {
        let mut hottest: HashMap<PackNumber, u64> = HashMap::new();
        let Some(above) = self.core.above() else { return Vec::new() };
        above.survey(Tier::Object, &mut |location, _len, age| {
            let known = hottest.entry(PackNumber::of(location).0).or_default();
            *known = age.max(*known);
        });
        let mut packs: Vec<_> = self.core.catalog.packs();
        packs.sort_by_key(|pack| (hottest.get(&pack.number).copied().unwrap_or(0), pack.number));
        packs.into_iter().map(|pack| (pack.number, pack.info.bytes)).collect()
    }

    /// Packs leave: nobody finds their blocks any more, and the log says so.
    fn drop_packs(&mut self, numbers: &[PackNumber]) {
        let removed = numbers.iter().filter_map(|number| self.core.catalog.remove(*number));
        let removed: Vec<_> = removed.collect();
        if removed.is_empty() {
            return;
        }
        if let Some(above) = self.core.above() {
            let gone = &mut |location| numbers.contains(&PackNumber::of(location).0);
            self.core.metrics.collected_blocks.inc_by(above.gone(Tier::Object, gone));
        }
        for info in removed {
            self.core.metrics.dropped_packs.inc();
            self.note(ManifestRecord::Dropped(info.id));
        }
    }
}
