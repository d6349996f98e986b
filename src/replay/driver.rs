//! One engine: its own connection and session, one request at a time, in the order given.
//!
//! For each request: look up all blocks with a lease, get the prefix that was found and check every
//! byte, offer and put the rest, give the lease back. The server touches a put's blocks when it ends
//! and a lease's blocks when it is given back, tail first both; so missed blocks enter first and hit
//! blocks are touched after them, which is the order that [`sim`](crate::sim) simulates.
//!
//! Where servers are killed, a request that was under way is repeated on the next one and counts
//! once; what was asked of the old one is in the ledger, answered or not.

use std::{ops::Range, sync::Arc};

use bytes::{Bytes, BytesMut};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::{
    sync::mpsc,
    time::{Duration, Instant, timeout},
};

use super::{
    ledger::{Change, Ledger},
    link::{Link, Shared, hashes_of},
    pace::Hits,
    payload::{Checker, PartIdentity},
    process::START_DEADLINE,
    tally::{PutCounts, Tally},
};
use crate::client::{
    FetchedBlock, GetOptions, GetSink, Handle, HashList, Lease, LeaseAsk, LookupOptions,
    MissReason, PutBatch, PutOutcome, PutReport,
};

/// The most payload that one put carries, in bytes; a longer rest of a request goes in several.
const PUT_BATCH_BYTES_MAX: usize = 64 << 20;
/// How long a client waits for a killed server to be back: its start, and checks of what it has.
const RETURN_DEADLINE: Duration = Duration::from_secs(4 * START_DEADLINE.as_secs());

/// One client and what it has counted.
pub(super) struct Driver {
    name: String,
    shared: Shared,
    link: Link,
    checker: Checker,
    tally: Tally,
}

/// One request: its position in the trace, and its blocks.
struct Request {
    position: usize,
    blocks: Vec<u32>,
    hashes: HashList,
}

impl Driver {
    /// Connects, opens the trace's namespace and a session.
    pub(super) async fn connect(shared: Shared, number: usize) -> Result<Self> {
        let engines = shared.client.instance.as_deref().unwrap_or("replay");
        let name = format!("{engines}/{number}");
        let link = Link::open(&shared, &name).await?;
        let checker = Checker::new(shared.source.clone(), shared.block_bytes as usize);
        Ok(Self { name, shared, link, checker, tally: Tally::new()? })
    }

    /// Replays the requests whose positions come from `requests`, until there are no more.
    pub(super) async fn run(mut self, mut requests: mpsc::Receiver<usize>) -> Result<Tally> {
        let trace = Arc::clone(&self.shared.trace);
        while let Some(position) = requests.recv().await {
            let Some(request) = trace.request(position) else { break };
            let blocks: Vec<_> = request.blocks().collect();
            let hashes = hashes_of(&blocks);
            self.tally.references += blocks.len() as u64;
            if !blocks.is_empty() {
                self.finish(&Request { position, blocks, hashes }).await?;
            }
            self.tally.requests += 1;
            self.shared.progress.inc(request.blocks_count().into());
        }
        Ok(self.tally)
    }

    /// Replays one request, on as many servers as it takes.
    async fn finish(&mut self, request: &Request) -> Result<()> {
        let hits = self.tally.hits();
        let mark = self.tally.mark();
        while let Err(error) = self.replay(request).await {
            self.follow(error).await?;
            self.tally.give_up(&mark);
        }
        if let Some(disturbed) = &self.shared.disturbed {
            let references = request.blocks.len() as u64;
            disturbed.pace.finish(Hits { references, hits: self.tally.hits() - hits });
        }
        Ok(())
    }

    /// Connects to the next server after an error that the end of the last one explains; any other
    /// error is returned.
    async fn follow(&mut self, mut error: Error) -> Result<()> {
        loop {
            let explained = match error.kind() {
                ErrorKind::Unavailable | ErrorKind::Timeout | ErrorKind::Cancelled => true,
                ErrorKind::Invalid
                | ErrorKind::Unauthenticated
                | ErrorKind::UnknownNamespace
                | ErrorKind::LayoutMismatch
                | ErrorKind::LeaseExpired
                | ErrorKind::Exhausted { .. }
                | ErrorKind::Corrupt
                | ErrorKind::Unsupported
                | ErrorKind::Internal => false,
            };
            if self.shared.disturbed.is_none() || !explained {
                return Err(error);
            }
            let left = self.link.generation;
            let next =
                self.shared.serving.wait_for(|now| now.generation > left && now.endpoint.is_some());
            if !matches!(timeout(RETURN_DEADLINE, next).await, Ok(Ok(_))) {
                return Err(error);
            }
            match Link::open(&self.shared, &self.name).await {
                Ok(link) => {
                    self.link = link;
                    return Ok(());
                }
                // Killed again meanwhile: then the one after that.
                Err(again) => error = again,
            }
        }
    }

    async fn replay(&mut self, request: &Request) -> Result<()> {
        let hashes = &request.hashes;
        let ask = LeaseAsk { session: &self.link.session, ttl: Duration::ZERO, bytes_max: 0 };
        let options = LookupOptions { lease: Some(ask), ..LookupOptions::default() };
        let started = Instant::now();
        let found = self.link.handle.lookup(hashes, options).await?;
        self.tally.lookup.record(started.elapsed());
        self.tally.looked_up(&found);
        self.tally.lookup_hashes_max = self.tally.lookup_hashes_max.max(hashes.len() as u64);
        let prefix = found.prefix_blocks as usize;
        self.get(request, prefix, found.lease.as_ref()).await?;
        self.put(request, prefix..hashes.len()).await?;
        if let Some(lease) = found.lease {
            self.link.client.release(lease).await?;
        }
        self.remove(request).await
    }

    /// Gets the first `prefix` blocks.
    async fn get(&mut self, request: &Request, prefix: usize, lease: Option<&Lease>) -> Result<()> {
        if prefix == 0 {
            return Ok(());
        }
        let hashes = request.hashes.slice(0..prefix);
        let leased = lease.map_or(0, |lease| lease.blocks);
        let options = GetOptions { lease, ..GetOptions::default() };
        let started = Instant::now();
        let mut sink = Sink {
            handle: &self.link.handle,
            checker: &mut self.checker,
            tally: &mut self.tally,
            leased,
            blocks: &request.blocks,
            ledger: self.shared.disturbed.as_ref().map(|disturbed| &disturbed.ledger),
        };
        let summary = self.link.handle.get(&hashes, options, &mut sink).await?;
        self.tally.get.record(started.elapsed());
        self.tally.got += summary;
        Ok(())
    }

    /// Puts the blocks at `missed`, head first in batches; several are then touched as one.
    async fn put(&mut self, request: &Request, missed: Range<usize>) -> Result<()> {
        let per_batch = (PUT_BATCH_BYTES_MAX / self.shared.block_bytes.max(1) as usize).max(1);
        for start in missed.clone().step_by(per_batch) {
            let positions = start..missed.end.min(start + per_batch);
            let batch = self.batch(&request.hashes, positions.clone());
            let blocks = request.blocks.get(positions).unwrap_or_default();
            let started = Instant::now();
            let result = self.put_batch(blocks, &batch).await;
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
            self.link.handle.touch(&request.hashes.slice(missed)).await?;
        }
        Ok(())
    }

    /// Puts one batch, with the ledger where there is one.
    async fn put_batch(&self, blocks: &[u32], batch: &PutBatch) -> Result<PutReport> {
        let Link { handle, session, .. } = &self.link;
        let Some(disturbed) = &self.shared.disturbed else {
            return handle.put(session, batch).await;
        };
        disturbed.ledger.begin(Change::Put, blocks).await?;
        let result = handle.put(session, batch).await;
        let acknowledged = match &result {
            Ok(report) if batch.durable => durable(blocks, &report.outcomes),
            Ok(_) | Err(_) => Vec::new(),
        };
        disturbed.ledger.end(Change::Put, blocks, &acknowledged).await?;
        result
    }

    fn batch(&self, hashes: &HashList, positions: Range<usize>) -> PutBatch {
        let parent = positions.start.checked_sub(1).and_then(|before| hashes.get(before));
        let chosen = hashes.slice(positions);
        let block_bytes = self.shared.block_bytes as usize;
        let mut bytes = BytesMut::zeroed(block_bytes * chosen.len());
        for (hash, out) in chosen.iter().zip(bytes.chunks_exact_mut(block_bytes)) {
            let identity = PartIdentity { namespace: self.link.handle.id(), hash: &hash, part: 0 };
            self.shared.source.fill(identity, out);
        }
        let bytes = bytes.freeze();
        let value = |at: usize| bytes.slice(at * block_bytes..(at + 1) * block_bytes);
        let values: Vec<Bytes> = (0..chosen.len()).map(value).collect();
        let durable = self.shared.durable;
        PutBatch { hashes: chosen, parts: Vec::new(), values, parent, durable }
    }

    /// Removes one of the request's blocks, if it is this request's turn.
    async fn remove(&mut self, request: &Request) -> Result<()> {
        let Some(disturbed) = &self.shared.disturbed else { return Ok(()) };
        let chosen = disturbed.removals.after(request.position, request.blocks.len());
        let Some((at, block)) = chosen.and_then(|at| Some((at, *request.blocks.get(at)?))) else {
            return Ok(());
        };
        disturbed.ledger.begin(Change::Remove, &[block]).await?;
        let result = self.link.handle.remove(&request.hashes.slice(at..at + 1)).await;
        let acknowledged: &[u32] = if result.is_ok() { &[block] } else { &[] };
        disturbed.ledger.end(Change::Remove, &[block], acknowledged).await?;
        self.tally.removed += u64::from(result?);
        Ok(())
    }
}

/// The blocks of a durable put that the server has promised to keep.
fn durable(blocks: &[u32], outcomes: &[PutOutcome]) -> Vec<u32> {
    let pairs = blocks.iter().zip(outcomes);
    let promised = pairs.filter(|(_, outcome)| matches!(outcome, PutOutcome::Stored));
    promised.map(|(block, _)| *block).collect()
}

/// Checks every byte as it arrives.
struct Sink<'a> {
    handle: &'a Handle,
    checker: &'a mut Checker,
    tally: &'a mut Tally,
    leased: u32,
    blocks: &'a [u32],
    ledger: Option<&'a Ledger>,
}

impl Sink<'_> {
    /// Whether a client of ours may have removed the block at `position` under the reader's hands.
    fn may_be_removed(&self, position: u32) -> bool {
        let block = self.blocks.get(position as usize);
        self.ledger.zip(block).is_some_and(|(ledger, block)| ledger.may_be_removed(*block))
    }
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
        // What was damaged here was delivered; it is counted as damage.
        if reason == MissReason::CorruptHere {
            return;
        }
        for position in positions {
            if position < self.leased && !self.may_be_removed(position) {
                self.tally.lease_failures += 1;
            } else {
                self.tally.gone += 1;
            }
        }
    }
}
