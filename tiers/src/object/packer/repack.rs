//! Packing again: what is to stay of packs that are given up goes into a new one, as it is encoded.
//!
//! ```text
//! number -> footer of a victim -> which of its blocks stay -> neighbours in one ranged GET -> verified
//!        -> the next victim, while it fits -> uploaded -> map -> log -> the victims are dropped
//! ```
//! The victims are whole and readable until then: what fails costs nothing but the work.

use std::{cmp::Reverse, collections::HashMap, sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::Instant;

use super::{Packed, Packer, STEP_BYTES};
use crate::{
    error::{Error, ErrorKind, Result},
    namespace::{Namespace, NamespaceTable},
    object::{
        bucket::BucketErrorKind,
        catalog::{Contents, PackNumber},
        format::{PackBuilder, PackEntry},
        keeper::Keep,
        reader::GAP_BYTES_MAX,
        rebuild::Source,
    },
    store::Wanted,
    tier::Tier,
};

/// How long reading the victims of one pack may take.
const READ_DEADLINE: Duration = Duration::from_secs(300);

/// A pack that is given up, and what of it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::object) struct Victim {
    pub(in crate::object) number: PackNumber,
    /// The least age of what stays, on the map's clock of touches.
    pub(in crate::object) hot_from: u64,
    /// The most bytes that stay, as they are stored; what was used last comes first.
    pub(in crate::object) bytes_max: u64,
}

/// A block that goes from one pack to another.
#[derive(Debug)]
struct Moving {
    entry: PackEntry,
    from: Wanted,
}

/// A pack that is filled with what stays of others.
struct Filled {
    builder: PackBuilder,
    packed: Vec<Packed>,
    emptied: Vec<PackNumber>,
}

impl Packer {
    /// Packs again what stays of some packs, and tells the keeper which of them can be dropped.
    pub(super) async fn repack(&self, victims: Vec<Victim>) {
        let emptied = self.empty(&victims).await;
        if let Err(error) = &emptied {
            self.failed(error);
        }
        // It may have been closed meanwhile.
        drop(self.core.seats.own().keep(Keep::Repacked { emptied: emptied.ok() }).await);
    }

    async fn empty(&self, victims: &[Victim]) -> Result<Vec<PackNumber>> {
        // As for any pack: before the first block is read.
        let id = self.number(true).await?;
        match self.refill(victims).await {
            Ok(Filled { builder, packed, emptied }) => {
                let blocks = u64::try_from(packed.len()).unwrap_or(0);
                let bytes = builder.data_bytes();
                self.settle(id, builder, packed).await?;
                self.core.metrics.repacked_blocks.inc_by(blocks);
                self.core.metrics.repacked_bytes.inc_by(bytes);
                Ok(emptied)
            }
            Err(error) => {
                self.give_up(id, 0).await?;
                Err(error)
            }
        }
    }

    /// Fills a pack with what stays of the first of the victims, at least of one.
    async fn refill(&self, victims: &[Victim]) -> Result<Filled> {
        let deadline = Instant::now() + READ_DEADLINE;
        let (mut builder, mut packed, mut emptied) = (self.builder(), Vec::new(), Vec::new());
        let mut room = self.core.config.pack_bytes;
        for victim in victims {
            if let Some(contents) = self.core.catalog.contents(victim.number) {
                let chosen = self.choose(victim, &contents, deadline).await?;
                let bytes = chosen.iter().map(|block| u64::from(block.entry.stored)).sum();
                if bytes > room && !emptied.is_empty() {
                    break;
                }
                room = room.saturating_sub(bytes);
                let moved;
                (builder, moved) = self.take(builder, &contents, chosen, deadline).await?;
                packed.extend(moved.into_iter().map(Packed::Moved));
            }
            emptied.push(victim.number);
        }
        Ok(Filled { builder, packed, emptied })
    }

    /// The blocks of a victim that stay, in the order of their places.
    async fn choose(
        &self,
        victim: &Victim,
        contents: &Contents,
        deadline: Instant,
    ) -> Result<Vec<Moving>> {
        let (core, info) = (&self.core, &contents.info);
        let source =
            Source { bucket: &core.bucket, owner: &core.config.owner, local: None, deadline };
        let Some(footer) = source.read_footer(info.id, info.bytes).await? else {
            tracing::warn!(pack = info.name, "object pack cannot be read: nothing of it stays");
            return Ok(Vec::new());
        };
        let places = contents.live.iter().map(|(location, slot)| (slot.offset, *location));
        let places: HashMap<_, _> = places.collect();
        let live = footer.entries.into_iter().filter_map(|entry| {
            let from = entry.key.at(*places.get(&entry.offset)?);
            Some(Moving { entry, from })
        });
        let live: Vec<Moving> = live.collect();
        let Some(above) = core.above() else { return Ok(Vec::new()) };
        let wanted: Vec<Wanted> = live.iter().map(|block| block.from).collect();
        Ok(hottest(live, &above.ages(Tier::Object, &wanted), victim))
    }

    /// Moves blocks of a pack into another; returns those whose bytes are right.
    async fn take(
        &self,
        mut builder: PackBuilder,
        contents: &Contents,
        mut left: Vec<Moving>,
        deadline: Instant,
    ) -> Result<(PackBuilder, Vec<Wanted>)> {
        let mut packed = Vec::new();
        // Once more: the bytes may have been cut or mixed up on their way.
        for _ in 0..2 {
            let mut wrong = Vec::new();
            for run in runs(std::mem::take(&mut left)) {
                let Some(range) = span(&run) else { continue };
                let start = range.start;
                let bytes = match self.core.bucket.get(&contents.info.name, range, deadline).await {
                    Ok(bytes) => bytes,
                    Err(error) if error.kind() == BucketErrorKind::Damaged => {
                        wrong.extend(run);
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                };
                let namespaces = Arc::clone(&self.core.namespaces);
                let work = move || append(builder, &namespaces, run, (start, &bytes));
                let appended = tokio::task::spawn_blocking(work).await;
                let failed = |error| Error::new(ErrorKind::Internal, "fill a pack").because(error);
                let appended = appended.map_err(failed)?;
                builder = appended.builder;
                packed.extend(appended.packed);
                wrong.extend(appended.wrong);
            }
            left = wrong;
        }
        self.core.metrics.wrong_blocks.inc_by(u64::try_from(left.len()).unwrap_or(0));
        Ok((builder, packed))
    }
}

/// Those that stay of the live blocks of a victim, whose last uses are `ages`.
fn hottest(live: Vec<Moving>, ages: &[Option<u64>], victim: &Victim) -> Vec<Moving> {
    let aged = live.into_iter().zip(ages).filter_map(|(block, age)| Some(((*age)?, block)));
    let mut hot: Vec<_> = aged.filter(|(age, _)| *age >= victim.hot_from).collect();
    hot.sort_by_key(|(age, _)| Reverse(*age));
    let mut bytes = 0;
    hot.retain(|(_, block)| {
        bytes += u64::from(block.entry.stored);
        bytes <= victim.bytes_max
    });
    hot.sort_by_key(|(_, block)| block.entry.offset);
    hot.into_iter().map(|(_, block)| block).collect()
}

/// Where blocks lie, which are in the order of their places.
fn span(run: &[Moving]) -> Option<std::ops::Range<u64>> {
    Some(run.first()?.entry.range().start..run.last()?.entry.range().end)
}

/// Cuts blocks, in the order of their places, into what is read at a time: neighbours, and no more than
/// fits into memory beside a pack.
fn runs(blocks: Vec<Moving>) -> Vec<Vec<Moving>> {
    let mut runs: Vec<Vec<Moving>> = Vec::new();
    for block in blocks {
        let range = block.entry.range();
        let joins = |run: &&mut Vec<Moving>| {
            span(run).is_some_and(|span| {
                range.start - span.end <= GAP_BYTES_MAX && range.end - span.start <= STEP_BYTES
            })
        };
        match runs.last_mut().filter(joins) {
            Some(run) => run.push(block),
            None => runs.push(vec![block]),
        }
    }
    runs
}

/// What came of moving blocks.
struct Appended {
    builder: PackBuilder,
    packed: Vec<Wanted>,
    wrong: Vec<Moving>,
}

/// Adds blocks to a pack, from the bytes of another that begin at `start`.
fn append(
    mut builder: PackBuilder,
    namespaces: &NamespaceTable,
    run: Vec<Moving>,
    (start, bytes): (u64, &Bytes),
) -> Appended {
    let (mut packed, mut wrong) = (Vec::new(), Vec::new());
    let mut payload = Vec::new();
    for block in run {
        // What the map has is in a namespace that is open here.
        let Ok(namespace) = namespaces.get(block.entry.key.namespace.as_bytes()) else { continue };
        let range = block.entry.range();
        let part = |at: u64| usize::try_from(at - start).unwrap_or(usize::MAX);
        let stored = bytes.get(part(range.start)..part(range.end)).unwrap_or_default();
        if !is_right(&namespace, &block.entry, stored, &mut payload) {
            wrong.push(block);
        } else if builder.push_encoded(&namespace, block.entry, stored).is_ok() {
            packed.push(block.from);
        }
    }
    Appended { builder, packed, wrong }
}

/// Whether these are the bytes of a block, which are decoded into `payload` for it.
fn is_right(
    namespace: &Namespace,
    entry: &PackEntry,
    stored: &[u8],
    payload: &mut Vec<u8>,
) -> bool {
    payload.resize(usize::try_from(entry.len).unwrap_or(0), 0);
    let layout = namespace.layout();
    layout.digest() == entry.layout
        && entry.decode_block(stored, payload).is_ok()
        && layout.checksums(&entry.key, payload).as_ref() == Some(&entry.sums)
}
