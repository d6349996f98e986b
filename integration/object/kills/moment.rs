//! Which request to the bucket a node is killed at, as the proxy before it sees requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kvstrata_tiers::object::{
    format::{Manifest, ManifestRecord},
    names::{EpochId, ManifestId, Owner, PackId},
};
use parking_lot::Mutex;

use crate::object::proxy::{Proxy, Request, Stop};

/// A kind of request that changes the bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Moment {
    /// A whole pack is uploaded,
    Pack,
    /// .. a part of a large one,
    Part,
    /// .. its parts become an object.
    Completion,
    /// The log names a pack,
    Naming,
    /// .. says that one is dropped,
    Dropping,
    /// .. that blocks are removed, which somebody waits for,
    Removal,
    /// .. all that counts, again: the end of a checkpoint.
    Base,
    /// A pack is deleted,
    PackDeletion,
    /// .. an object of the log that a base superseded.
    LogDeletion,
    /// The next epoch is opened,
    Opening,
    /// .. the log of an older one closed,
    Closing,
    /// .. its own begun.
    Beginning,
    /// A sign of life.
    Beat,
}

impl Moment {
    pub(super) const ALL: [Self; 13] = [
        Self::Pack,
        Self::Part,
        Self::Completion,
        Self::Naming,
        Self::Dropping,
        Self::Removal,
        Self::Base,
        Self::PackDeletion,
        Self::LogDeletion,
        Self::Opening,
        Self::Closing,
        Self::Beginning,
        Self::Beat,
    ];

    /// Whether it comes with a start, and only then.
    pub(super) fn is_of_starts(self) -> bool {
        matches!(self, Self::Opening | Self::Closing | Self::Beginning | Self::Beat)
    }

    /// Whether only large packs have it.
    pub(super) fn is_of_parts(self) -> bool {
        matches!(self, Self::Part | Self::Completion)
    }

    /// What a request is in the name of an ordinal: an object of the log may say several things.
    fn of(owner: &Owner, request: Request<'_>) -> BTreeSet<Self> {
        let below = request.path.find("/v1/").and_then(|at| request.path.get(at + 1..));
        let below = below.unwrap_or_default();
        let (name, query) = below.split_once('?').unwrap_or((below, ""));
        let is_own = |ordinal: u32| ordinal == owner.ordinal;
        let is_pack = PackId::parse(name).is_some_and(|(_, id)| is_own(id.ordinal));
        let is_log = ManifestId::parse(name).is_some_and(|(_, id)| is_own(id.ordinal));
        let is_epoch = EpochId::parse(name).is_some_and(|(_, id)| is_own(id.ordinal));
        let only = match request.method {
            "PUT" if is_log => return Self::of_log(request.body),
            "PUT" if is_pack && query.contains("partNumber=") => Self::Part,
            "PUT" if is_pack => Self::Pack,
            "POST" if is_pack && query.contains("uploadId=") => Self::Completion,
            "DELETE" if is_pack && query.is_empty() => Self::PackDeletion,
            "DELETE" if is_log => Self::LogDeletion,
            "PUT" if is_epoch => Self::Opening,
            "PUT" if name == owner.alive_name() => Self::Beat,
            _ => return BTreeSet::new(),
        };
        BTreeSet::from([only])
    }

    fn of_log(body: &[u8]) -> BTreeSet<Self> {
        let manifest = Manifest::decode(body).unwrap();
        let own = manifest.id.at.epoch;
        let says =
            manifest.records.iter().map(|record| match record {
                ManifestRecord::Base { .. } => Self::Base,
                ManifestRecord::Removed { keys, before } if keys.is_empty() => {
                    if before.epoch > own { Self::Closing } else { Self::Beginning }
                }
                ManifestRecord::Pack(_) => Self::Naming,
                ManifestRecord::Dropped(_) => Self::Dropping,
                ManifestRecord::Removed { .. } => Self::Removal,
            });
        let says: BTreeSet<Self> = says.collect();
        // A base says again what was said.
        if says.contains(&Self::Base) { BTreeSet::from([Self::Base]) } else { says }
    }
}

#[derive(Debug, Default)]
struct Watched {
    seen: BTreeMap<Moment, u64>,
    /// Where to stop, after so many more of them.
    target: Option<(Moment, u64, Stop)>,
}

impl Watched {
    fn see(&mut self, owner: &Owner, request: Request<'_>) -> Option<Stop> {
        let moments = Moment::of(owner, request);
        for moment in &moments {
            *self.seen.entry(*moment).or_default() += 1;
        }
        let (target, left, stop) = self.target.as_mut()?;
        if !moments.contains(target) {
            return None;
        }
        if *left > 0 {
            *left -= 1;
            return None;
        }
        let stop = *stop;
        self.target = None;
        Some(stop)
    }
}

/// Counts the requests of a proxy in the name of one ordinal by moment, and stops at one that is chosen.
#[derive(Debug, Default)]
pub(super) struct Watch(Arc<Mutex<Watched>>);

impl Watch {
    pub(super) fn on(proxy: &Proxy, owner: Owner) -> Self {
        let watch = Self::default();
        let watched = Arc::clone(&watch.0);
        proxy.watch(move |request| watched.lock().see(&owner, request));
        watch
    }

    /// Stops at the next request of a kind, after `left` more of them.
    pub(super) fn stop_at(&self, moment: Moment, left: u64, stop: Stop) {
        self.0.lock().target = Some((moment, left, stop));
    }

    /// Requests by their kind.
    pub(super) fn seen(&self) -> BTreeMap<Moment, u64> {
        self.0.lock().seen.clone()
    }
}
