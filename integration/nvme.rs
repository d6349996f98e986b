//! The nvme tier of real server processes: what survives how they end, and what damage costs.
//!
//! - [`durable`]: `STORED` of a durable put survives SIGKILL, also for duplicates of what was in dram
//!   only; what nvme cannot take, and everything after a failed sync, is `NOT_DURABLE` and readable;
//!   without the tier it is `UNIMPLEMENTED`.
//! - [`restart`]: after SIGTERM and after SIGKILL everything is found on nvme with the cost of loading
//!   it, comes with right bytes and is promoted; what was removed stays removed; a start reads less
//!   than 1 % of what is stored; a SIGTERM right after a put loses nothing of it.
//! - [`full`]: on a full disk puts go on, durable ones say so, reads go on, the log stays short, and
//!   with room again all is as before.
//! - [`identity`]: a directory of another node is set aside, one in use or not writable is refused by
//!   name, blocks of another secret are dropped, a lost index is made anew.
//! - [`damage`]: a flipped bit costs exactly its block, for good; bad segment files cost themselves.
//! - [`described`]: what was described of blocks, and the wishes for hash schemes, survive SIGKILL; a lost
//!   index takes the former.
//! - [`calls`]: the system calls of appending: large writes, synced before they are indexed, and a
//!   small index.

mod calls;
mod damage;
mod described;
mod durable;
mod full;
mod identity;
mod restart;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use kvstrata_proto::v1::{GetResponse, MissReason, PutOutcome, RemoveRequest, get_response};

use crate::{
    harness::{Builder, SERVER_WAIT, Server, wait_until},
    wire::{Wire, hashes, payload_of},
};

/// Blocks put or asked for at once: with 64 KiB each, 4 MiB.
const BATCH: usize = 64;
/// Blocks that wait for the cleaner.
const QUEUED: &str = "kvstrata_demote_queue_blocks";
/// Blocks on nvme.
const ON_NVME: &str = "kvstrata_nvme_blocks";

/// What outlives the servers of a test: the tier's directory and the secret.
pub(crate) struct Home {
    data: tempfile::TempDir,
    configuration: Arc<tempfile::TempDir>,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self {
            data: tempfile::tempdir().unwrap(),
            configuration: Arc::new(tempfile::tempdir().unwrap()),
        }
    }

    /// That of another node of the same install.
    pub(crate) fn beside(&self) -> Self {
        Self { configuration: Arc::clone(&self.configuration), ..Self::new() }
    }

    /// A server on it, with 64 MiB of dram and 512 MiB of nvme in segments of 4 MiB.
    pub(crate) fn server(&self) -> Builder {
        self.server_at(self.data.path())
    }

    /// The same on another directory.
    fn server_at(&self, data: &Path) -> Builder {
        Server::builder()
            .home(self.configuration.path())
            .dram("64MiB")
            .set("memory.limit", "512MiB")
            .set("node.name", "node-a")
            .set("nvme.path", data.to_str().unwrap())
            .set("nvme.capacity", "512MiB")
            .set("nvme.segment_bytes", "4MiB")
    }

    /// The tier's own directory.
    pub(crate) fn tier(&self) -> PathBuf {
        self.data.path().join("kvstrata-nvme")
    }

    /// The segment files, oldest first.
    fn segments(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.tier().join("segments")).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files
    }
}

/// Puts blocks, durable or not; all must be stored.
pub(crate) async fn store(wire: &mut Wire, numbers: impl IntoIterator<Item = u64>, durable: bool) {
    let numbers: Vec<u64> = numbers.into_iter().collect();
    for batch in numbers.chunks(BATCH) {
        let outcomes =
            if durable { wire.put_durable(batch).await.unwrap() } else { wire.put(batch).await };
        assert_eq!(outcomes, vec![PutOutcome::Stored; batch.len()]);
    }
}

/// Gets blocks; returns how many are there. None may have wrong bytes.
pub(crate) async fn count_right(wire: &mut Wire, numbers: impl IntoIterator<Item = u64>) -> usize {
    let numbers: Vec<u64> = numbers.into_iter().collect();
    let mut right = 0;
    for batch in numbers.chunks(BATCH) {
        let blocks = wire.get(batch).await;
        for (number, block) in batch.iter().zip(blocks) {
            let Some(block) = block else { continue };
            assert!(block == payload_of(*number, wire.block_bytes), "wrong bytes of {number}");
            right += 1;
        }
    }
    right
}

/// Waits until the cleaner has nothing to do and nvme has so many blocks.
async fn wait_copied(server: &Server, blocks: f64) {
    wait_until("all is on nvme", SERVER_WAIT, async || {
        (server.metric(QUEUED).await, server.metric(ON_NVME).await) == (0.0, blocks)
    })
    .await;
}

/// Removes blocks; returns how many were there.
pub(crate) async fn remove(wire: &mut Wire, numbers: impl IntoIterator<Item = u64>) -> u32 {
    let (namespace_id, hashes) = (wire.namespace_id.clone(), hashes(numbers));
    let request = RemoveRequest { namespace_id, hashes };
    wire.client.remove(request).await.unwrap().into_inner().removed
}

/// Positions of a get that are misses, with their reasons.
async fn misses(wire: &mut Wire, numbers: &[u64]) -> Vec<(u64, MissReason)> {
    let request = wire.get_request(numbers.iter().copied());
    let mut responses = wire.client.get(request).await.unwrap().into_inner();
    let mut misses = Vec::new();
    while let Some(GetResponse { message }) = responses.message().await.unwrap() {
        if let Some(get_response::Message::Miss(miss)) = message {
            let range = usize::try_from(miss.start).unwrap()..usize::try_from(miss.end).unwrap();
            misses.extend(numbers[range].iter().map(|number| (*number, miss.reason())));
        }
    }
    misses
}
