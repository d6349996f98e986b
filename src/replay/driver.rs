//! One engine: its own connection and session, one request at a time, in the order given.
//!
//! For each request: look up all blocks with a lease, get the prefix that was found and check every
//! byte, offer and put the rest, give the lease back. The server touches a put's blocks when it ends
//! and a lease's blocks when it is given back, tail first both; so missed blocks enter first and hit
//! blocks are touched after them, which is the order that [`sim`](crate::sim) simulates.

use std::{ops::Range, sync::Arc};

use bytes::{Bytes, BytesMut};
use indicatif::ProgressBar;
use kvstrata_tiers::{
    block::HASH_BYTES_MAX,
    error::{ErrorKind, Result},
    namespace::{Identity, PartSpec},
};
use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use super::{
    payload::{Checker, PartIdentity, Source},
    tally::{PutCounts, Tally},
};
use crate::{
    client::{
        Client, ClientOptions, FetchedBlock, GetOptions, GetSink, Handle, HashList, Lease,
        LeaseAsk, LookupOptions, MissReason, NamespaceSpec, PutBatch, Session,
    },
    trace::Trace,
};

/// The most payload that one put carries, in bytes; a longer rest of a request goes in several.
const PUT_BATCH_BYTES_MAX: usize = 64 << 20;

/// What all clients of one replay have in common.
#[derive(Debug, Clone)]
pub(super) struct Shared {
    pub(super) trace: Arc<Trace>,
    pub(super) endpoint: String,
    pub(super) block_bytes: u32,
    pub(super) source: Source,
    pub(super) progress: ProgressBar,
}

/// One client and what it has counted.
pub(super) struct Driver {
    shared: Shared,
    client: Client,
    handle: Handle,
    session: Session,
    checker: Checker,
    tally: Tally,
}

impl Driver {
    /// Connects, opens the trace's namespace and a session.
    pub(super) async fn connect(shared: Shared, number: usize) -> Result<Self> {
        let client = Client::connect(&shared.endpoint, ClientOptions::default()).await?;
        let handle = client.open(namespace(&shared)).await?;
        let session = client.session(&format!("replay/{number}")).await?;
        let checker = Checker::new(shared.source.clone(), shared.block_bytes as usize);
        Ok(Self { shared, client, handle, session, checker, tally: Tally::new()? })
    }

    /// Replays the requests whose positions come from `requests`, until there are no more.
    pub(super) async fn run(mut self, mut requests: mpsc::Receiver<usize>) -> Result<Tally> {
        let trace = Arc::clone(&self.shared.trace);
        while let Some(request) = requests.recv().await.and_then(|at| trace.request(at)) {
            let hashes = hashes_of(request.blocks(), request.blocks_count() as usize);
            self.tally.references += hashes.len() as u64;
            if !hashes.is_empty() {
                self.replay(&hashes).await?;
            }
            self.tally.requests += 1;
            self.shared.progress.inc(hashes.len() as u64);
        }
        Ok(self.tally)
    }

    async fn replay(&mut self, hashes: &HashList) -> Result<()> {
        let ask = LeaseAsk { session: &self.session, ttl: Duration::ZERO, bytes_max: 0 };
        let options = LookupOptions { lease: Some(ask), sparse: false };
        let started = Instant::now();
        let found = self.handle.lookup(hashes, options).await?;
        self.tally.lookup.record(started.elapsed());
        self.tally.looked_up(found.counts);
        self.tally.lookup_hashes_max = self.tally.lookup_hashes_max.max(hashes.len() as u64);
        let prefix = found.prefix_blocks as usize;
        self.get(&hashes.slice(0..prefix), found.lease.as_ref()).await?;
        self.put(hashes, prefix..hashes.len()).await?;
        match found.lease {
            Some(lease) => self.client.release(lease).await,
            None => Ok(()),
        }
    }

    async fn get(&mut self, hashes: &HashList, lease: Option<&Lease>) -> Result<()> {
        if hashes.is_empty() {
            return Ok(());
        }
        let leased = lease.map_or(0, |lease| lease.blocks);
        let options = GetOptions { lease, ..GetOptions::default() };
        let started = Instant::now();
        let mut sink = Sink {
            handle: &self.handle,
            checker: &mut self.checker,
            tally: &mut self.tally,
            leased,
        };
        let summary = self.handle.get(hashes, options, &mut sink).await?;
        self.tally.get.record(started.elapsed());
        self.tally.got += summary;
        Ok(())
    }

    /// Puts the blocks at `missed`, head first in batches; several are then touched as one.
    async fn put(&mut self, hashes: &HashList, missed: Range<usize>) -> Result<()> {
        let per_batch = (PUT_BATCH_BYTES_MAX / self.shared.block_bytes.max(1) as usize).max(1);
        for start in missed.clone().step_by(per_batch) {
            let batch = self.batch(hashes, start..missed.end.min(start + per_batch));
            let started = Instant::now();
            let result = self.handle.put(&self.session, &batch).await;
            self.tally.put_latency.record(started.elapsed());
            match result {
                Ok(report) => self.tally.put(&report),
                Err(error) if matches!(error.kind(), ErrorKind::Exhausted { .. }) => {
                    let refused = batch.hashes.len() as u64;
                    self.tally.put += PutCounts { refused, ..PutCounts::default() };
                }
                Err(error) => return Err(error),
            }
        }
        if missed.len() > per_batch {
            self.handle.touch(&hashes.slice(missed)).await?;
        }
        Ok(())
    }

    fn batch(&self, hashes: &HashList, positions: Range<usize>) -> PutBatch {
        let parent = positions.start.checked_sub(1).and_then(|before| hashes.get(before));
        let chosen = hashes.slice(positions);
        let block_bytes = self.shared.block_bytes as usize;
        let mut bytes = BytesMut::zeroed(block_bytes * chosen.len());
        for (hash, out) in chosen.iter().zip(bytes.chunks_exact_mut(block_bytes)) {
            let identity = PartIdentity { namespace: self.handle.id(), hash: &hash, part: 0 };
            self.shared.source.fill(identity, out);
        }
        let bytes = bytes.freeze();
        let value = |at: usize| bytes.slice(at * block_bytes..(at + 1) * block_bytes);
        let values: Vec<Bytes> = (0..chosen.len()).map(value).collect();
        PutBatch { hashes: chosen, parts: Vec::new(), values, parent, durable: false }
    }
}

/// Checks every byte as it arrives.
struct Sink<'a> {
    handle: &'a Handle,
    checker: &'a mut Checker,
    tally: &'a mut Tally,
    leased: u32,
}

impl GetSink for Sink<'_> {
    fn block(&mut self, block: FetchedBlock<'_>) {
        let identity = PartIdentity { namespace: self.handle.id(), hash: &block.hash, part: 0 };
        let wrong = self.checker.wrong_bytes(identity, block.pieces());
        self.tally.checked_bytes += block.len() as u64;
        self.tally.wrong_bytes += wrong;
        self.tally.wrong_blocks += u64::from(wrong > 0);
    }

    fn miss(&mut self, positions: Range<u32>, reason: MissReason) {
        let missed = u64::from(positions.end - positions.start);
        let covered = u64::from(positions.end.min(self.leased).saturating_sub(positions.start));
        // What was damaged here was delivered; it is counted as damage.
        if reason != MissReason::CorruptHere {
            self.tally.lease_failures += covered;
            self.tally.gone += missed - covered;
        }
    }
}

/// The hash of a trace's block: BLAKE3 of its id (u64, little-endian). Ids name whole prefixes, so
/// there is nothing to chain.
fn hashes_of(ids: impl Iterator<Item = u32>, count: usize) -> HashList {
    let mut packed = BytesMut::with_capacity(count * HASH_BYTES_MAX);
    for id in ids {
        packed.extend_from_slice(blake3::hash(&u64::from(id).to_le_bytes()).as_bytes());
    }
    HashList::of_full(packed.freeze())
}

/// Another trace or another kind of payload is another namespace: their blocks never meet.
fn namespace(shared: &Shared) -> NamespaceSpec {
    let weights = match &shared.source {
        Source::Generated => "generated".to_owned(),
        Source::Sampled(sample) => format!("sampled {}", blake3::hash(sample).to_hex()),
    };
    NamespaceSpec::Engine(Box::new(Identity {
        tenant: String::new(),
        model: format!("replay of {}", shared.trace.name()),
        weights,
        engine: "replay".to_owned(),
        layout: "replay-v1".to_owned(),
        dtype: "bytes".to_owned(),
        block_tokens: shared.trace.block_tokens(),
        parts: vec![PartSpec { group: 0, rank: 0, bytes: shared.block_bytes }],
        split: "none".to_owned(),
        hash_algorithm: "blake3".to_owned(),
        hash_bytes: 32,
        hash_root: Vec::new(),
        lora: Vec::new(),
        cache_salt: Vec::new(),
    }))
}
