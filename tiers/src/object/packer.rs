//! Packing: the blocks of a sealed run that are worth it go into packs, in the order of their puts.
//!
//! A run is looked at when it is sealed, again now and then while it holds blocks that were not worth
//! it, and at last before it leaves. Nothing is gathered from elsewhere: what was put together is read
//! together.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

mod repack;

pub(super) use self::repack::Victim;
use super::{
    Core,
    catalog::{PackInfo, PackNumber},
    format::{Block, CodingPolicy, Footer, PackBuilder, PackEntry, Refused},
    keeper::Keep,
    names::PackId,
};
use crate::{
    error::{Error, ErrorKind, Result},
    key::IndexKey,
    map::Location,
    store::{Above, RunBlock, RunId, Runs, Uncopied, Wanted},
    tier::Tier,
};

/// How often runs are looked at again.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);
/// How long a run that was looked at is left alone, unless it is about to leave.
const LOOK_AGAIN: Duration = Duration::from_secs(120);
/// Bytes of blocks that are read and encoded in one piece.
const STEP_BYTES: u64 = 8 << 20;
/// A pack that would be smaller, in parts of a full one, waits for more blocks of its run to be worth
/// it, for as long as the run stays.
const PACK_MIN_DIVISOR: u64 = 4;
/// How long nothing new is packed after an upload failed, or found no room.
const FAILED_PAUSE: Duration = Duration::from_secs(5);
/// How long an upload may take.
const UPLOAD_DEADLINE: Duration = Duration::from_secs(300);

/// Which blocks are worth storing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ObjectAdmission {
    /// Those that were read since they were put, which are read again more often than others, and those
    /// of long chains, which cost more to compute again.
    #[default]
    Worthwhile,
    /// All of them.
    All,
}

impl ObjectAdmission {
    fn admits(self, block: Uncopied) -> bool {
        match self {
            Self::Worthwhile => block.reused || block.in_long_chain,
            Self::All => true,
        }
    }
}

/// What is known of a run.
#[derive(Debug, Clone, Copy)]
struct Look {
    at: Instant,
    /// Every block of it that is there has been copied.
    complete: bool,
}

/// The task that fills packs and uploads them. It ends with the keeper.
#[derive(Debug)]
pub(super) struct Packer {
    core: Arc<Core>,
    runs: Arc<dyn Runs>,
    looks: HashMap<RunId, Look>,
    /// Packs of which is to be packed again what stays.
    victims: mpsc::Receiver<Vec<Victim>>,
}

/// Where a block of a new pack is from.
#[derive(Debug)]
enum Packed {
    /// A run of nvme.
    Copied(RunBlock),
    /// Another pack.
    Moved(Wanted),
}

impl Packed {
    /// Tells the map of the block's place in the pack; false if it does not want it any more.
    fn tell(&self, above: &dyn Above, to: Location) -> bool {
        match self {
            Self::Copied(block) => {
                above.copied(&block.wanted(), Tier::Object, to, &block.checksums)
            }
            Self::Moved(from) => above.moved(Tier::Object, from, to),
        }
    }
}

impl Packer {
    pub(super) fn new(
        core: Arc<Core>,
        runs: Arc<dyn Runs>,
        victims: mpsc::Receiver<Vec<Victim>>,
    ) -> Self {
        Self { core, runs, looks: HashMap::new(), victims }
    }

    /// Packs what there is to pack, for as long as the node may write.
    pub(super) async fn run(mut self) {
        let (mut next, mut failed) = (Instant::now(), false);
        loop {
            if !self.core.seats.own().epoch.wait().await {
                break;
            }
            tokio::select! {
                () = self.core.seats.own().epoch.lost() => {
                    self.runs.hold_unoffered(false);
                    continue;
                }
                Some(victims) = self.victims.recv() => {
                    self.repack(victims).await;
                    continue;
                }
                () = sleep_until(next) => {}
                () = self.runs.sealed_more(), if !failed => {}
            }
            next = Instant::now() + LOOK_INTERVAL;
            let looked = self.look().await;
            // A bucket that fails must not hold up nvme.
            self.runs.hold_unoffered(looked.is_ok());
            failed = looked.is_err();
            if let Err(error) = looked {
                self.failed(&error);
                // Nothing new meanwhile; but what makes room does not wait for what lacks it.
                next = Instant::now() + FAILED_PAUSE;
            }
        }
        self.runs.hold_unoffered(false);
    }

    /// Counts and tells a failure, unless the tier is closed: its end is none.
    fn failed(&self, error: &Error) {
        if self.core.seats.own().is_closed() {
            return;
        }
        self.core.metrics.pack_failures.inc();
        if let Some(left_out) = self.core.failed_packs.turn() {
            tracing::warn!(%error, left_out, "object packs cannot be made now");
        }
    }

    /// Looks at all runs that are due.
    async fn look(&mut self) -> Result<()> {
        let sealed = self.runs.sealed();
        self.looks.retain(|run, _| sealed.binary_search(run).is_ok());
        let leaving = self.runs.next_to_leave();
        let later = sealed.into_iter().filter(|run| !leaving.contains(run));
        for (run, leaves) in
            leaving.iter().map(|run| (*run, true)).chain(later.map(|run| (run, false)))
        {
            if let Ok(victims) = self.victims.try_recv() {
                self.repack(victims).await;
            }
            let due = self
                .looks
                .get(&run)
                .is_none_or(|look| !look.complete && (leaves || look.at.elapsed() >= LOOK_AGAIN));
            if due {
                let complete = self.pack_run(run, leaves).await?;
                self.looks.insert(run, Look { at: Instant::now(), complete });
            }
            if leaves || self.looks.get(&run).is_some_and(|look| look.complete) {
                self.runs.offered(run);
            }
        }
        Ok(())
    }

    /// Packs what is worth it of one run; whether nothing is left in it.
    async fn pack_run(&mut self, run: RunId, leaves: bool) -> Result<bool> {
        let Some(above) = self.core.above() else { return Ok(false) };
        let blocks = self.runs.contents(run).await?;
        let wanted: Vec<Wanted> = blocks.iter().map(RunBlock::wanted).collect();
        let uncopied = above.uncopied(Tier::Nvme, Tier::Object, &wanted);
        let lacking = uncopied.iter().flatten().count();
        let admission = self.core.config.admission;
        let mut chosen: Vec<RunBlock> = blocks
            .into_iter()
            .zip(uncopied)
            .filter(|(_, uncopied)| uncopied.is_some_and(|block| admission.admits(block)))
            .map(|(block, _)| block)
            .collect();
        let complete = chosen.len() == lacking;
        let bytes: u64 = chosen.iter().map(|block| u64::from(block.len)).sum();
        let least = self.core.config.pack_bytes / PACK_MIN_DIVISOR;
        if chosen.is_empty() || !complete && !leaves && bytes < least {
            return Ok(complete);
        }
        while !chosen.is_empty() {
            chosen = self.pack(chosen).await?;
        }
        Ok(complete)
    }

    /// Makes one pack of the first of these blocks; returns those that did not fit.
    async fn pack(&mut self, blocks: Vec<RunBlock>) -> Result<Vec<RunBlock>> {
        // Before the first block is read: what is removed from then on is noted for this pack, too.
        let id = self.number(false).await?;
        let mut rest = VecDeque::from(blocks);
        match self.fill(&mut rest).await {
            Ok((builder, packed)) => self.settle(id, builder, packed).await?,
            Err(error) => {
                self.give_up(id, 0).await?;
                return Err(error);
            }
        }
        Ok(rest.into())
    }

    /// A number for a pack, if there is room for it in the bucket.
    async fn number(&self, again: bool) -> Result<PackId> {
        let (done, number) = oneshot::channel();
        self.core.seats.own().keep(Keep::Number { again, done }).await?;
        let lost = |_dropped| Error::new(ErrorKind::Unavailable, "pack without an epoch");
        number.await.map_err(lost)?
    }

    /// There will be no pack of this number, but perhaps so many bytes of it.
    async fn give_up(&self, id: PackId, bytes: u64) -> Result<()> {
        self.core.seats.own().keep(Keep::GiveUp { id, bytes }).await
    }

    fn builder(&self) -> PackBuilder {
        let config = &self.core.config;
        let cluster = config.owner.cluster.clone();
        PackBuilder::new(cluster, config.pack_bytes, CodingPolicy::Compressed)
    }

    /// Fills a pack with the first of these blocks.
    async fn fill(&self, rest: &mut VecDeque<RunBlock>) -> Result<(PackBuilder, Vec<Packed>)> {
        let mut builder = self.builder();
        let (mut packed, mut is_full) = (Vec::new(), false);
        while !is_full && !rest.is_empty() {
            let step = self.read_some(rest).await?;
            let encoded = tokio::task::spawn_blocking(move || encode(builder, step)).await;
            let step = encoded
                .map_err(|error| Error::new(ErrorKind::Internal, "encode a pack").because(error))?;
            builder = step.builder;
            packed.extend(step.packed.into_iter().map(Packed::Copied));
            is_full = !step.left.is_empty();
            step.left.into_iter().rev().for_each(|block| rest.push_front(block));
        }
        Ok((builder, packed))
    }

    /// Reads the next blocks, with their bytes. What has left since the look is left out.
    async fn read_some(&self, rest: &mut VecDeque<RunBlock>) -> Result<Vec<(RunBlock, Vec<u8>)>> {
        let (mut step, mut bytes) = (Vec::new(), 0);
        while bytes < STEP_BYTES
            && let Some(block) = rest.pop_front()
        {
            bytes += u64::from(block.len);
            if let Some(payload) = self.runs.read(&block).await? {
                step.push((block, payload));
            }
        }
        Ok(step)
    }

    /// Uploads a pack, if anything is in it, and tells the map, and the keeper, who makes sure that it is
    /// found again.
    async fn settle(&self, id: PackId, builder: PackBuilder, blocks: Vec<Packed>) -> Result<()> {
        if blocks.is_empty() {
            return self.give_up(id, 0).await;
        }
        let pack = builder.finish(id, self.core.now_unix_ms());
        let (bytes, name) = (pack.bytes(), id.name(&self.core.config.owner.cluster));
        let deadline = Instant::now() + UPLOAD_DEADLINE;
        if let Err(error) = self.core.bucket.put(&name, pack.body, deadline).await {
            self.give_up(id, bytes).await?;
            return Err(error.into());
        }
        let footer = pack.footer;
        self.count(&footer);
        let (created_unix_ms, made_at) = (footer.created_unix_ms, self.core.touches());
        let info = PackInfo { id, name, bytes, created_unix_ms, made_at };
        let number = self.core.catalog.insert(info, &footer);
        let unwanted = self.tell(number, &footer, &blocks);
        let again = matches!(blocks.first(), Some(Packed::Moved(_)));
        self.core.seats.own().keep(Keep::Name { footer: Box::new(footer), unwanted, again }).await
    }

    fn count(&self, footer: &Footer) {
        let metrics = &self.core.metrics;
        let sum = |of: fn(&PackEntry) -> u32| footer.entries.iter().map(|e| u64::from(of(e))).sum();
        metrics.packs_made.inc();
        metrics.packed_blocks.inc_by(u64::try_from(footer.entries.len()).unwrap_or(0));
        metrics.packed_bytes.inc_by(sum(|entry| entry.len));
        metrics.stored_bytes.inc_by(sum(|entry| entry.stored));
    }

    /// Tells the map of the blocks of a pack; those that it does not want any more: removed while they
    /// were packed, they must not come back with the pack.
    fn tell(&self, number: PackNumber, footer: &Footer, blocks: &[Packed]) -> Vec<IndexKey> {
        let mut unwanted = Vec::new();
        let above = self.core.above();
        for (index, (block, entry)) in blocks.iter().zip(&footer.entries).enumerate() {
            let Some(location) = number.location(index) else { continue };
            let is_wanted =
                above.as_ref().is_some_and(|above| block.tell(above.as_ref(), location));
            if !is_wanted {
                self.core.catalog.kill(location);
                unwanted.push(entry.key);
            }
        }
        unwanted
    }
}

/// What came of adding blocks to a pack.
struct Step {
    builder: PackBuilder,
    packed: Vec<RunBlock>,
    /// Those for which there was no room.
    left: Vec<RunBlock>,
}

/// Adds blocks to a pack until it is full.
fn encode(mut builder: PackBuilder, blocks: Vec<(RunBlock, Vec<u8>)>) -> Step {
    let (mut packed, mut left) = (Vec::new(), Vec::new());
    for (block, payload) in blocks {
        if !left.is_empty() {
            left.push(block);
            continue;
        }
        let (namespace, hash) = (block.namespace.as_ref(), block.hash);
        let sums = block.checksums.as_slice();
        match builder.push(&Block { namespace, hash, sums, payload: &payload }) {
            Ok(_) => packed.push(block),
            Err(Refused::Full) => left.push(block),
            // It stays on nvme.
            Err(Refused::Invalid) => {}
        }
    }
    Step { builder, packed, left }
}
