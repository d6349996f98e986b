//! The one who writes for one ordinal, this node's own or a ward's: holds its epoch, tells the bucket
//! what packs there are and what was removed, and finds after a start what is there.
//!
//! ```text
//! start    take the ordinal -> read its log -> packs into the catalog, blocks into the map
//! note     a pack was uploaded: it is named in the log, with the next ones or a moment later
//! remove   named in the log before it is acknowledged
//! beat     a sign of life, so that nobody takes the ordinal meanwhile
//! tend     packs that are too old, too empty or too many leave; objects that nobody needs are deleted
//! ```
//! A start that fails is tried again for as long as the node runs: the other tiers do not wait for it.
//! The keeper of a ward lets go instead, and when another holds the ordinal: its packs leave the map.

mod expire;
mod heat;
mod room;
mod start;
mod unheld;
mod ward;

use std::{collections::HashSet, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until},
};

use self::{expire::SWEEP_EVERY, heat::Heat, room::Room, unheld::Unheld};
use super::{
    Core,
    catalog::PackNumber,
    format::{Footer, ManifestRecord},
    local::Local,
    manifest_log::ManifestLog,
    names::PackId,
    owner::{BEAT_EVERY, OwnerError, beat},
    seats::Seat,
};
use crate::{
    error::{Error, ErrorKind, Result},
    key::IndexKey,
};

/// Operations that wait for the keeper; more wait outside.
pub(super) const QUEUE_MAX: usize = 256;
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

/// The same with this time until objects are deleted: none waits for much longer.
fn tend_every(delete_grace: Duration) -> Duration {
    TEND_EVERY.min(delete_grace)
}

/// What the keeper is asked to do.
#[derive(Debug)]
pub(super) enum Keep {
    /// Number the next pack, if there is room for it: the last room is for packing `again`. Nobody is
    /// told while the node does not hold its ordinal.
    Number { again: bool, done: oneshot::Sender<Result<PackId>> },
    /// Name a pack that was uploaded, without blocks that were removed meanwhile; whether it is of blocks
    /// that are packed `again`.
    Name { footer: Box<Footer>, unwanted: Vec<IndexKey>, again: bool },
    /// A number that no pack will have; as many bytes of it may be in the bucket.
    GiveUp { id: PackId, bytes: u64 },
    /// What stays of these packs is packed again and named; none if that has failed.
    Repacked { emptied: Option<Vec<PackNumber>> },
    /// Write down that blocks were removed.
    Remove { keys: Vec<IndexKey>, done: oneshot::Sender<Result<()>> },
    /// Write down that blocks were removed that may be in packs which are not named yet.
    Removed { keys: Vec<IndexKey>, done: oneshot::Sender<Result<()>> },
    /// The object of a pack is not there.
    Lost(PackNumber),
    /// Finish and end.
    Close { done: oneshot::Sender<()> },
}

/// The task that writes to the bucket, but for packs. It ends when the store is closed or dropped.
#[derive(Debug)]
pub(super) struct Keeper {
    core: Arc<Core>,
    seat: Arc<Seat>,
    queue: mpsc::Receiver<Keep>,
    /// Where a copy of the log is; not for a ward.
    local: Option<Local>,
    log: Option<ManifestLog>,
    /// What the log is to be told, and who waits for that.
    records: Vec<ManifestRecord>,
    waiting: Vec<oneshot::Sender<Result<()>>>,
    /// Packs among what the log was told and has not written.
    unnamed: u64,
    /// Packs were on their way when the epoch ended: whoever has it now may find them.
    abandoned: bool,
    unheld: Unheld,
    /// Nothing is left to do: the ward is another's.
    is_over: bool,
    room: Room,
    heat: Heat,
    /// Packs of which is being packed again what stays.
    victims: HashSet<PackNumber>,
    /// How often in a row that has failed.
    repack_failures: u32,
    start_at: Option<Instant>,
    flush_at: Option<Instant>,
    beat_at: Instant,
    tend_at: Instant,
    sweep_at: Instant,
    retry: Duration,
}

impl Keeper {
    pub(super) fn new(
        core: Arc<Core>,
        (seat, queue): (Arc<Seat>, mpsc::Receiver<Keep>),
        local: Option<Local>,
    ) -> Self {
        let now = Instant::now();
        Self {
            room: Room::new(&core.config),
            core,
            seat,
            queue,
            local,
            log: None,
            records: Vec::new(),
            waiting: Vec::new(),
            unnamed: 0,
            abandoned: false,
            unheld: Unheld::default(),
            is_over: false,
            heat: Heat::default(),
            victims: HashSet::new(),
            repack_failures: 0,
            start_at: Some(now),
            flush_at: None,
            beat_at: now,
            tend_at: now,
            sweep_at: now + SWEEP_EVERY,
            retry: RETRY_MIN,
        }
    }

    /// Works until the store is closed, or the ward is another's.
    pub(super) async fn run(mut self) {
        while !self.is_over {
            let due = self.due();
            tokio::select! {
                biased;
                op = self.queue.recv() => {
                    let Some(op) = op else { break };
                    if self.serve(op).await {
                        break;
                    }
                }
                () = self.seat.shed.notified() => self.shed(),
                () = sleep_until(due) => self.work().await,
            }
        }
        self.seat.epoch.end();
        if self.is_over {
            self.let_go();
        }
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
            Keep::Number { again, done } => self.number(again, done),
            Keep::Name { footer, .. } if self.log.is_none() => {
                // Another node has the ordinal now, and will not know of it.
                let number = self.core.catalog.number_of(&footer.id);
                self.drop_packs(&number.into_iter().collect());
            }
            Keep::Name { footer, unwanted, again } => {
                // First what was removed: a kill between the two must not bring it back.
                if let Some(log) = self.log.as_ref().filter(|_| !unwanted.is_empty()) {
                    let removal = log.removal(unwanted);
                    self.note(removal);
                }
                self.room.packed(footer.object_bytes(), again, self.core.now_unix_ms());
                self.note(ManifestRecord::Pack(*footer));
            }
            Keep::GiveUp { id, bytes } => {
                self.room.dropped(id, bytes);
                self.note(ManifestRecord::Dropped(id));
            }
            Keep::Repacked { emptied } => self.repacked(emptied),
            Keep::Remove { keys, done } => self.remove(keys, done),
            Keep::Removed { mut keys, done } => {
                let may_have = self.log.as_ref().map_or(self.abandoned, ManifestLog::has_unnamed);
                keys.retain(|key| may_have || self.unheld.may_have(key));
                if !keys.is_empty() {
                    self.remove(keys, done);
                } else {
                    // Whoever asked may have gone.
                    drop(done.send(Ok(())));
                }
            }
            Keep::Lost(number) => self.lose(number),
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
        if self.log.is_none() {
            return;
        }
        self.records.push(record);
        let now = Instant::now();
        let at = if self.records.len() >= NAMED_TOGETHER { now } else { now + NAME_DELAY };
        self.flush_at = Some(self.flush_at.map_or(at, |before| before.min(at)));
    }

    fn number(&mut self, again: bool, done: oneshot::Sender<Result<PackId>>) {
        let live_bytes = self.live_bytes();
        let Some(log) = &mut self.log else { return };
        if !self.room.has_place(live_bytes, again) {
            let waiting_bytes = self.room.waiting_bytes();
            let what = format!(
                "make a pack: object.capacity is taken: {live_bytes} bytes of packs, and \
                 {waiting_bytes} of those that have left and wait for their deletion"
            );
            let retry_after = tend_every(self.core.config.delete_grace);
            let full = Error::new(ErrorKind::Exhausted { retry_after }, what);
            // Whoever asked may have gone.
            drop(done.send(Err(full)));
            return;
        }
        let id = log.next_pack();
        if done.send(Ok(id)).is_err() {
            self.note(ManifestRecord::Dropped(id));
        }
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
            Err(error) if self.ends(&error) => {}
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
            && !self.ends(&error)
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

    /// Whether an error says that another node has the ordinal now. Then nothing is written any more;
    /// what is there is served, until this node gets its own ordinal back. A ward is let go.
    fn ends(&mut self, error: &OwnerError) -> bool {
        if !matches!(error, OwnerError::Fenced { .. }) {
            return false;
        }
        let ordinal = self.seat.owner.ordinal;
        self.is_over = self.is_ward();
        if self.is_over {
            tracing::info!(ordinal, "object packs given back: another node has them now");
            self.core.metrics.given_back.inc();
        } else {
            tracing::error!(%error, "object tier is read-only");
        }
        self.seat.epoch.lose();
        self.abandoned |= self.log.take().is_some_and(|log| log.has_unnamed());
        self.records.clear();
        let what = "remove from the object tier: another node has its packs now";
        for done in self.waiting.drain(..) {
            drop(done.send(Err(Error::new(ErrorKind::Unavailable, what))));
        }
        self.start_at = Some(Instant::now() + RETRY_MAX);
        true
    }
}
