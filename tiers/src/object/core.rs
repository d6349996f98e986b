//! What the parts of the tier share, and how they are put together.

use std::{
    fmt,
    path::PathBuf,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use tokio::sync::{mpsc, watch};

use super::{
    PackMetrics,
    bucket::Bucket,
    catalog::Catalog,
    keeper::Keeper,
    local::Local,
    names::Owner,
    packer::{ObjectAdmission, Packer, Victim},
    reader::Fetcher,
    seats::{Seat, Seats},
    store::ObjectStore,
    wards::Wards,
};
use crate::{
    error::{Error, Result},
    limits::MIB,
    namespace::NamespaceTable,
    seldom::Seldom,
    store::{Above, Runs},
};

/// The smallest pack, in bytes: below it requests cost more than bytes.
pub const PACK_BYTES_MIN: u64 = MIB;
/// The largest pack, in bytes: two of them are in memory while they are made.
pub const PACK_BYTES_MAX: u64 = 64 * MIB;

/// The least capacity, in packs: a few that are live or wait for their deletion, one on its way, and one
/// for what is packed again.
pub const CAPACITY_PACKS_MIN: u64 = 5;

/// Milliseconds since 1970.
pub type Clock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Sizes and rules of the tier.
#[derive(Debug, Clone)]
pub struct ObjectConfig {
    /// Whose packs: the cluster and the ordinal of this node.
    pub owner: Owner,
    /// The lasting name of this node, by which another one with its ordinal is told.
    pub holder: String,
    /// Directory for a copy of the log, so that a start reads little from the bucket.
    pub local: PathBuf,
    /// Bytes of packs that this node may have in the bucket, those included that were dropped and wait
    /// for their deletion; at least 5 packs, or 0 for no limit.
    pub capacity_bytes: u64,
    /// How long a pack stays after it was made. What of it was used since is packed again.
    pub ttl: Option<Duration>,
    /// How long an object stays after nobody needs it any more: longer than the deadline of a read and
    /// the longest lease.
    pub delete_grace: Duration,
    /// Which blocks are stored.
    pub admission: ObjectAdmission,
    /// Bytes of a pack, 1 to 64 MiB.
    pub pack_bytes: u64,
}

/// What the tier is made of.
pub struct ObjectParts {
    /// Where packs lie.
    pub bucket: Arc<Bucket>,
    /// The tier whose runs are packed.
    pub runs: Arc<dyn Runs>,
    /// Where the namespaces found in packs go.
    pub namespaces: Arc<NamespaceTable>,
    /// What it counts.
    pub metrics: PackMetrics,
    /// The wall clock.
    pub clock: Clock,
}

impl fmt::Debug for ObjectParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectParts").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

/// What the parts share.
pub(super) struct Core {
    pub(super) config: ObjectConfig,
    pub(super) bucket: Arc<Bucket>,
    pub(super) catalog: Catalog,
    pub(super) namespaces: Arc<NamespaceTable>,
    pub(super) metrics: PackMetrics,
    pub(super) above: OnceLock<Weak<dyn Above>>,
    pub(super) seats: Seats,
    pub(super) failed_packs: Seldom,
    /// What is packed again of packs that are given up; one at a time.
    pub(super) repacks: mpsc::Sender<Vec<Victim>>,
    filled: watch::Sender<bool>,
    clock: Clock,
}

impl Core {
    pub(super) fn above(&self) -> Option<Arc<dyn Above>> {
        self.above.get()?.upgrade()
    }

    pub(super) fn now_unix_ms(&self) -> u64 {
        (self.clock)()
    }

    /// The map's clock of touches.
    pub(super) fn touches(&self) -> u64 {
        self.above().map_or(0, |above| above.clock())
    }

    /// All that was in the bucket is in the map.
    pub(super) fn filled(&self) {
        self.filled.send_replace(true);
    }

    pub(super) async fn wait_filled(&self) {
        // The sender lives as long as this.
        drop(self.filled.subscribe().wait_for(|filled| *filled).await);
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("config", &self.config)
            .field("bucket", &self.bucket)
            .field("packs", &self.catalog.totals())
            .finish_non_exhaustive()
    }
}

/// The tasks of the tier: run them for as long as it is used.
#[derive(Debug)]
pub struct ObjectTasks {
    fetcher: Fetcher,
    packer: Packer,
    keeper: Keeper,
    wards: Wards,
}

impl ObjectTasks {
    /// Reads, packs and keeps the log, until the store is closed.
    ///
    /// # Cancel safety
    /// As a kill: what was uploaded and is not named yet is found by the next start.
    pub async fn run(self) {
        let Self { fetcher, packer, keeper, wards } = self;
        tokio::join!(fetcher.run(), packer.run(), keeper.run(), wards.run());
    }
}

impl ObjectStore {
    /// Makes the tier and its tasks, which do nothing before they [run](ObjectTasks::run).
    ///
    /// # Errors
    /// `Invalid` for a size out of its range.
    pub fn open(config: ObjectConfig, parts: ObjectParts) -> Result<(Arc<Self>, ObjectTasks)> {
        let bytes = config.pack_bytes;
        if !(PACK_BYTES_MIN..=PACK_BYTES_MAX).contains(&bytes) {
            return Err(Error::invalid(format!(
                "object.pack_bytes: {bytes} given, {PACK_BYTES_MIN} to {PACK_BYTES_MAX} allowed"
            )));
        }
        let (capacity, least) = (config.capacity_bytes, bytes * CAPACITY_PACKS_MIN);
        if (1..least).contains(&capacity) {
            return Err(Error::invalid(format!(
                "object.capacity: {capacity} given, at least {least} needed for packs of {bytes}"
            )));
        }
        let ObjectParts { bucket, runs, namespaces, metrics, clock } = parts;
        let (own, queue) = Seat::new(config.owner.clone());
        let local = Some(Local::new(config.local.clone()));
        let (repacks, victims) = mpsc::channel(1);
        let core = Arc::new(Core {
            config,
            bucket: Arc::clone(&bucket),
            catalog: Catalog::default(),
            namespaces,
            metrics: metrics.clone(),
            above: OnceLock::new(),
            seats: Seats::new(Arc::clone(&own)),
            failed_packs: Seldom::default(),
            repacks,
            filled: watch::Sender::new(false),
            clock,
        });
        let (reads, fetcher) = Fetcher::new(bucket, metrics);
        let tasks = ObjectTasks {
            fetcher,
            packer: Packer::new(Arc::clone(&core), runs, victims),
            keeper: Keeper::new(Arc::clone(&core), (own, queue), local),
            wards: Wards::new(Arc::clone(&core)),
        };
        Ok((Arc::new(Self::new(core, reads)), tasks))
    }
}
