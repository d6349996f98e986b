//! The object tier of this node, made from its settings: bucket, store and tasks.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use kvstrata_tiers::{
    error::Error,
    namespace::NamespaceTable,
    nvme::{NvmeStore, directory::Directory},
    object::{
        self, ObjectConfig, ObjectMetrics, ObjectParts, ObjectStore, ObjectTasks, PackMetrics,
        bucket::{Bucket, BucketConfig},
        names::{ClusterName, Owner},
    },
};
use prometheus_client::registry::Registry;
use tracing::info;

use crate::config::{Config, ObjectAdmission, Size};

/// The tier, before its tasks run.
#[derive(Debug)]
pub(crate) struct ObjectTier {
    pub(crate) store: Arc<ObjectStore>,
    pub(crate) tasks: ObjectTasks,
}

/// What the tier is above.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Below<'a> {
    pub(crate) nvme: &'a Arc<NvmeStore>,
    pub(crate) directory: &'a Directory,
    pub(crate) namespaces: &'a Arc<NamespaceTable>,
}

/// Opens the tier; `None` if the settings name no bucket. Nothing is sent to the bucket yet, so that
/// one that is away does not keep the other tiers from serving.
pub(crate) fn open(
    config: &Config,
    node: &str,
    below: Below<'_>,
    registry: &mut Registry,
) -> Result<Option<ObjectTier>, Error> {
    let settings = &config.object;
    let Some(bucket) = bucket(config, registry)? else { return Ok(None) };
    let (ordinal, cluster) = (settings.ordinal_of(node), &config.cluster.name);
    let config = ObjectConfig {
        owner: Owner { cluster: ClusterName::new(cluster)?, ordinal },
        holder: node.to_owned(),
        local: below.directory.object(),
        capacity_bytes: settings.capacity.given().map_or(0, |bytes| bytes.0),
        ttl: settings.ttl.given().map(|ttl| ttl.0),
        delete_grace: settings.delete_grace.0,
        admission: match settings.admission {
            ObjectAdmission::Worthwhile => object::ObjectAdmission::Worthwhile,
            ObjectAdmission::All => object::ObjectAdmission::All,
        },
        pack_bytes: settings.pack_bytes.0,
    };
    let parts = ObjectParts {
        bucket,
        runs: Arc::<NvmeStore>::clone(below.nvme),
        namespaces: Arc::clone(below.namespaces),
        metrics: PackMetrics::register(registry),
        clock: Arc::new(now_unix_ms),
    };
    let (store, tasks) = ObjectStore::open(config, parts)?;
    info!(
        url = %settings.url,
        cluster,
        ordinal,
        capacity = %settings.capacity,
        pack = %Size(settings.pack_bytes.0),
        "object tier opened"
    );
    Ok(Some(ObjectTier { store, tasks }))
}

/// The door to the bucket; `None` if the settings name none. Nothing is sent to it yet.
pub(crate) fn bucket(
    config: &Config,
    registry: &mut Registry,
) -> Result<Option<Arc<Bucket>>, Error> {
    let Some(url) = config.object.url.given() else { return Ok(None) };
    let requests = ObjectMetrics::register(registry);
    let prices = config.object.prices;
    let bucket = BucketConfig { url: url.0.clone(), prices, ..BucketConfig::default() };
    Ok(Some(Bucket::open(bucket, requests)?))
}

/// The wall clock, in milliseconds.
#[expect(clippy::disallowed_methods, reason = "the one place that hands it to the tier")]
pub(crate) fn now_unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
