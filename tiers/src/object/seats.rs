//! The ordinals whose packs this node keeps: its own, and those of its *wards*, nodes that are gone.
//!
//! Each has a keeper; a seat is how that one is reached. Catalog, map and counters are shared: a block
//! is read in the same way whosever pack it lies in.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, watch};

use super::{
    keeper::{self, Keep},
    names::Owner,
};
use crate::{
    error::{Error, ErrorKind, Result},
    key::IndexKey,
};

/// Whether a keeper may write, and in which epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holding {
    /// Not now: it starts, or somebody else has the ordinal.
    No,
    /// In this epoch.
    Epoch,
    /// Never again.
    Ended,
}

/// Tells whether a keeper may write.
#[derive(Debug)]
pub(super) struct EpochGate(watch::Sender<Holding>);

impl EpochGate {
    pub(super) fn hold(&self) {
        self.0.send_replace(Holding::Epoch);
    }

    pub(super) fn lose(&self) {
        self.0.send_replace(Holding::No);
    }

    pub(super) fn end(&self) {
        self.0.send_replace(Holding::Ended);
    }

    pub(super) fn is_held(&self) -> bool {
        *self.0.borrow() == Holding::Epoch
    }

    /// Waits until it may; false if it never will.
    pub(super) async fn wait(&self) -> bool {
        let mut holding = self.0.subscribe();
        let held = holding.wait_for(|holding| *holding != Holding::No).await;
        held.is_ok_and(|holding| *holding == Holding::Epoch)
    }

    /// Waits until it may not.
    pub(super) async fn lost(&self) {
        let mut holding = self.0.subscribe();
        // The sender lives as long as this.
        drop(holding.wait_for(|holding| *holding != Holding::Epoch).await);
    }
}

/// How the keeper of one ordinal is reached.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) owner: Owner,
    pub(super) epoch: EpochGate,
    /// Blocks that were removed before those in the bucket were found; none from then on.
    pub(super) unfound: Mutex<Option<HashSet<IndexKey>>>,
    /// The map is full: the coldest pack should go.
    pub(super) shed: Notify,
    /// None once closed.
    keeper: Mutex<Option<mpsc::Sender<Keep>>>,
}

impl Seat {
    /// A seat, and what its keeper is asked.
    pub(super) fn new(owner: Owner) -> (Arc<Self>, mpsc::Receiver<Keep>) {
        let (keep, queue) = mpsc::channel(keeper::QUEUE_MAX);
        let seat = Self {
            owner,
            epoch: EpochGate(watch::Sender::new(Holding::No)),
            unfound: Mutex::new(Some(HashSet::new())),
            shed: Notify::new(),
            keeper: Mutex::new(Some(keep)),
        };
        (Arc::new(seat), queue)
    }

    /// Whether the keeper has been handed its last operation.
    pub(super) fn is_closed(&self) -> bool {
        self.keeper.lock().is_none()
    }

    fn keeper(&self) -> Result<mpsc::Sender<Keep>> {
        let closed = || Error::new(ErrorKind::Unavailable, "use the closed object tier");
        self.keeper.lock().clone().ok_or_else(closed)
    }

    /// Hands something to the keeper.
    pub(super) async fn keep(&self, op: Keep) -> Result<()> {
        let ended = |_op| Error::new(ErrorKind::Unavailable, "the object tier has ended");
        self.keeper()?.send(op).await.map_err(ended)
    }

    /// Hands something to the keeper, if it has room for it.
    pub(super) fn try_keep(&self, op: Keep) -> Result<()> {
        let busy = |_op| Error::new(ErrorKind::Unavailable, "the object tier is busy or has ended");
        self.keeper()?.try_send(op).map_err(busy)
    }

    /// Hands the last operation to the keeper; later ones are refused.
    pub(super) async fn keep_last(&self, op: Keep) -> Result<()> {
        let keeper = self.keeper.lock().take();
        let ended = || Error::new(ErrorKind::Unavailable, "the object tier has ended");
        keeper.ok_or_else(ended)?.send(op).await.map_err(|_op| ended())
    }
}

/// All of a node's.
#[derive(Debug)]
pub(super) struct Seats {
    own: Arc<Seat>,
    /// By ordinal; none once closed.
    wards: Mutex<Option<BTreeMap<u32, Arc<Seat>>>>,
}

impl Seats {
    pub(super) fn new(own: Arc<Seat>) -> Self {
        Self { own, wards: Mutex::new(Some(BTreeMap::new())) }
    }

    /// That of the node's own ordinal, the only one for which it makes packs.
    pub(super) fn own(&self) -> &Seat {
        &self.own
    }

    /// The own one, then those of wards.
    pub(super) fn all(&self) -> Vec<Arc<Seat>> {
        let wards = self.wards.lock();
        let wards = wards.iter().flat_map(BTreeMap::values);
        [&self.own].into_iter().chain(wards).map(Arc::clone).collect()
    }

    /// That of an ordinal, if this node has it.
    pub(super) fn of(&self, ordinal: u32) -> Option<Arc<Seat>> {
        self.all().into_iter().find(|seat| seat.owner.ordinal == ordinal)
    }

    /// Makes room for a ward; `None` once closed, and for an ordinal that has a seat.
    pub(super) fn admit(&self, owner: Owner) -> Option<(Arc<Seat>, mpsc::Receiver<Keep>)> {
        let mut wards = self.wards.lock();
        let wards = wards.as_mut()?;
        if owner.ordinal == self.own.owner.ordinal || wards.contains_key(&owner.ordinal) {
            return None;
        }
        let (seat, queue) = Seat::new(owner);
        wards.insert(seat.owner.ordinal, Arc::clone(&seat));
        Some((seat, queue))
    }

    /// A ward is let go.
    pub(super) fn dismiss(&self, ordinal: u32) {
        if let Some(wards) = self.wards.lock().as_mut() {
            wards.remove(&ordinal);
        }
    }

    /// No more wards are admitted. Returns all that there were, to be closed.
    pub(super) fn close(&self) -> Vec<Arc<Seat>> {
        let all = self.all();
        self.wards.lock().take();
        all
    }
}
