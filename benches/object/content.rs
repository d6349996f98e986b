//! Fills a bucket as a node would that has packed a million blocks, without the blocks' bytes: they are
//! short. The footers and the log are what they would be.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, sync::Arc};

use futures_util::{StreamExt, stream};
use kvstrata_tiers::{
    namespace::{Namespace, NamespaceTable, Secret},
    object::{
        bucket::Bucket,
        format::{Block, CodingPolicy, Footer, ManifestRecord, PackBuilder},
        manifest_log::{ManifestLog, adopt},
        names::{ClusterName, Owner, PackId},
        owner::Claim,
    },
    testing::hash_of,
};
use tokio::time::Instant;

use super::{
    harness::SERVER_WAIT,
    node::{NOW_UNIX_MS, identity},
};

pub(crate) const PACKS: u64 = 4096;
/// A little over a million blocks in all.
pub(crate) const PACK_BLOCKS: u64 = 245;
pub(crate) const CLUSTER: &str = "bench";
pub(crate) const NODE: &str = "bench-0";
/// Bytes of a block: what the tier says of them would be the same for 128 KiB, with which packs are full.
const BLOCK: u32 = 256;
/// As many as a node names together when it is busy.
const NAMED_TOGETHER: usize = 16;
const SECRET: [u8; 32] = [9; 32];

/// Writes the secret for which the content is made into the configuration of a server.
pub(crate) fn write_secret(home: &Path) {
    let directory = home.join("kvstrata");
    fs::create_dir_all(&directory).unwrap();
    let file = directory.join("identity");
    fs::write(&file, hex::encode(SECRET)).unwrap();
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Makes the packs and their log.
pub(crate) async fn fill(bucket: &Arc<Bucket>) {
    let table = NamespaceTable::new(Secret::new(SECRET), false);
    let namespace = table.open(identity("u8", BLOCK), true).unwrap().namespace;
    let owner = Owner { cluster: ClusterName::new(CLUSTER).unwrap(), ordinal: 0 };
    let soon = || Instant::now() + SERVER_WAIT;
    let opened =
        adopt(Arc::clone(bucket), (&owner, Claim::own(NODE)), None, NOW_UNIX_MS, soon()).await;
    let (mut log, _) = opened.unwrap();
    let ids: Vec<PackId> = (0..PACKS).map(|_| log.next_pack()).collect();
    for (group, ids) in (0_u64..).zip(ids.chunks(NAMED_TOGETHER)) {
        let first = group * NAMED_TOGETHER as u64 * PACK_BLOCKS;
        let firsts = (first..).step_by(PACK_BLOCKS as usize);
        let uploads = ids
            .iter()
            .zip(firsts)
            .map(|(id, first)| upload(bucket, *id, &owner.cluster, &namespace, first));
        let footers: Vec<Footer> = stream::iter(uploads).buffered(NAMED_TOGETHER).collect().await;
        name(&mut log, footers).await;
    }
}

async fn name(log: &mut ManifestLog, footers: Vec<Footer>) {
    let records = footers.into_iter().map(ManifestRecord::Pack).collect();
    log.append(records, NOW_UNIX_MS, Instant::now() + SERVER_WAIT).await.unwrap();
}

async fn upload(
    bucket: &Bucket,
    id: PackId,
    cluster: &ClusterName,
    namespace: &Namespace,
    first: u64,
) -> Footer {
    let mut builder = PackBuilder::new(cluster.clone(), 1 << 20, CodingPolicy::Raw);
    for number in first..first + PACK_BLOCKS {
        let payload = [number as u8; BLOCK as usize];
        let block = Block { namespace, hash: hash_of(number), sums: &[number], payload: &payload };
        builder.push(&block).unwrap();
    }
    let pack = builder.finish(id, NOW_UNIX_MS);
    let deadline = Instant::now() + SERVER_WAIT;
    bucket.put(&id.name(cluster), pack.body, deadline).await.unwrap();
    pack.footer
}
