//! The nvme tier of this node, made from its settings: directory, device, index, store and writer.

use std::{io, sync::Arc};

use kvstrata_tiers::{
    namespace::NamespaceTable,
    nvme::{
        NvmeConfig, NvmeMetrics, NvmeParts, NvmeStore, Writer,
        device::{self, Engine},
        directory::{Directory, DirectoryError},
        index::Index,
    },
};
use thiserror::Error;
use tracing::{info, warn};

use crate::{
    budget::Budget,
    config::{Config, NvmeEngine, NvmePlan, NvmeSpace, Problems, Size},
    id,
};

/// Why there is no nvme tier although one is asked for.
#[derive(Debug, Error)]
pub enum NvmeError {
    /// The directory cannot be used.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// The settings do not fit the disk.
    #[error(transparent)]
    Plan(#[from] Problems),
    /// The disk cannot be used.
    #[error("nvme.path: {doing}: {source}")]
    Disk {
        /// What failed.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The tier cannot be made.
    #[error("open the nvme tier: {0}")]
    Store(#[from] kvstrata_tiers::error::Error),
}

/// The tier, before its writer runs.
#[derive(Debug)]
pub(crate) struct NvmeTier {
    pub(crate) store: Arc<NvmeStore>,
    pub(crate) writer: Writer,
    /// Held for as long as the tier is open.
    pub(crate) directory: Directory,
}

/// Opens the tier; `None` if the settings name no path.
///
/// # Blocking
/// Opens the index: up to a second or two.
pub(crate) fn open(
    config: &Config,
    budget: &Budget,
    node: &str,
    namespaces: &Arc<NamespaceTable>,
    metrics: impl FnOnce() -> NvmeMetrics,
) -> Result<Option<NvmeTier>, NvmeError> {
    let Some(path) = config.nvme.path.given() else { return Ok(None) };
    let directory = Directory::open(&path.0, node, id::random_bytes()?)?;
    let engine = match config.nvme.engine {
        NvmeEngine::Auto => Engine::Auto,
        NvmeEngine::IoUring => Engine::Uring,
        NvmeEngine::Pread => Engine::Pread,
    };
    let disk = |doing| move |source| NvmeError::Disk { doing, source };
    let device = device::open(&directory.segments(), engine).map_err(disk("open the segments"))?;
    let space = device.space().map_err(disk("ask how full the disk is"))?;
    let space = NvmeSpace { available: space.available_bytes, used: space.allocated_bytes };
    let plan = config.nvme.resolve(space).map_err(|problem| Problems(vec![problem]))?;
    let Some(plan) = plan else { return Ok(None) };
    say(&plan, &directory);
    let metrics = metrics();
    let index =
        open_index(&directory, budget.nvme_index, &metrics).map_err(disk("open the index"))?;
    let config = NvmeConfig {
        capacity_bytes: plan.capacity_bytes,
        segment_bytes: plan.segment_bytes,
        blocks_max: budget.nvme_blocks_max(),
        daily_write_bytes: plan.daily_write_bytes,
        store: directory.store(),
        seed: id::random_seed()?,
    };
    let namespaces = Arc::clone(namespaces);
    let parts = NvmeParts { device, index, namespaces, metrics };
    let (store, writer) = NvmeStore::new(config, parts)?;
    Ok(Some(NvmeTier { store, writer, directory }))
}

fn say(plan: &NvmePlan, directory: &Directory) {
    if plan.exceeds_space {
        warn!(
            capacity = %Size(plan.capacity_bytes),
            "nvme.capacity is more than the file system has room for now"
        );
    }
    info!(
        path = %plan.path.display(),
        capacity = %Size(plan.capacity_bytes),
        segment = %Size(plan.segment_bytes),
        daily_writes = %Size(plan.daily_write_bytes),
        started_empty = directory.started_empty.as_ref().map(ToString::to_string),
        "nvme tier opened"
    );
}

/// Opens the index. One that is damaged is dropped: it is made again from the segments.
#[cfg(feature = "rocksdb")]
fn open_index(
    directory: &Directory,
    memory_bytes: u64,
    metrics: &NvmeMetrics,
) -> io::Result<Arc<dyn Index>> {
    use kvstrata_tiers::nvme::index::RocksIndex;

    let path = directory.index();
    let index = match RocksIndex::open(&path, memory_bytes) {
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            warn!(%error, "nvme index is damaged, making it anew from the segments");
            metrics.index_rebuilds.inc();
            RocksIndex::destroy(&path)?;
            RocksIndex::open(&path, memory_bytes)?
        }
        opened => opened?,
    };
    Ok(Arc::new(index))
}

#[cfg(not(feature = "rocksdb"))]
fn open_index(_: &Directory, _: u64, _: &NvmeMetrics) -> io::Result<Arc<dyn Index>> {
    let what = "this program was built without the feature `rocksdb`, which an nvme tier needs";
    Err(io::Error::new(io::ErrorKind::Unsupported, what))
}
