//! One get or prefetch: what it is about to load, what it has loaded, and how long that took.

use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

use kvstrata_tiers::tier::Tier;

use super::{Costs, JUDGED_BYTES_MIN, Locality, Via, at};
use crate::{limits::SHM_PINNED_BYTES_MAX, metrics::Judge};

/// What all loads have yet to load.
#[derive(Debug, Default)]
pub(super) struct Planned {
    bytes: [AtomicU64; 3],
    loads: [AtomicU32; 3],
}

impl Planned {
    pub(super) fn bytes(&self, tier: Tier) -> u64 {
        at(self.bytes.each_ref(), tier).load(Ordering::Relaxed)
    }

    pub(super) fn loads(&self, tier: Tier) -> u32 {
        at(self.loads.each_ref(), tier).load(Ordering::Relaxed)
    }

    // Relaxed: an estimate.
    fn add(&self, tier: Tier, bytes: u64) {
        at(self.bytes.each_ref(), tier).fetch_add(bytes, Ordering::Relaxed);
        at(self.loads.each_ref(), tier).fetch_add(1, Ordering::Relaxed);
    }

    fn sub(&self, tier: Tier, bytes: u64, is_last: bool) {
        at(self.bytes.each_ref(), tier).fetch_sub(bytes, Ordering::Relaxed);
        if is_last {
            at(self.loads.each_ref(), tier).fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What one tier has of a load.
#[derive(Debug, Clone, Copy, Default)]
struct Share {
    bytes: u64,
    /// Of these, what is not there yet.
    left: u64,
    /// What was in front of it when it began.
    queued: u64,
    /// What it was thought to take.
    predicted: Duration,
}

/// A load under way; what it has not loaded stops counting when it is dropped.
#[derive(Debug)]
pub(crate) struct Load {
    costs: Costs,
    locality: Locality,
    shares: [Share; 3],
}

impl Costs {
    /// A load of so many bytes begins, which takes the place of what its tenant has reserved.
    pub(crate) fn begin(&self, tenant: &str, locality: Locality, bytes: [u64; 3]) -> Load {
        self.shared.reservations.lock().take(tenant, bytes);
        let share = |tier| {
            let bytes = at(bytes, tier);
            if bytes == 0 {
                return Share::default();
            }
            let queued = self.queued(tier);
            let predicted = self.estimate(tier, locality, bytes);
            self.shared.planned.add(tier, bytes);
            Share { bytes, left: bytes, queued, predicted }
        };
        let shares = Tier::ALL.map(share);
        self.tell();
        Load { costs: self.clone(), locality, shares }
    }

    /// Takes note of which way a load on this host goes.
    pub(crate) fn note_via(&self, via: Via) {
        match via {
            Via::SharedMemory => self.shared.is_seen.store(true, Ordering::Relaxed),
            Via::UnixSocket => self.shared.is_seen.store(false, Ordering::Relaxed),
            Via::Network => {}
        }
    }
}

impl Load {
    /// Bytes of a tier are there. If it was to have fewer, somebody else has brought them there meanwhile,
    /// from a colder one.
    pub(crate) fn came(&mut self, tier: Tier, mut bytes: u64) {
        for from in Tier::ALL.into_iter().filter(|from| *from >= tier) {
            let share = at(self.shares.each_mut(), from);
            let came = bytes.min(share.left);
            share.left -= came;
            bytes -= came;
            let is_last = came > 0 && share.left == 0;
            self.costs.shared.planned.sub(from, came, is_last);
        }
        self.costs.tell();
    }

    /// Dram has delivered so many bytes in a row, which says how fast the path is.
    pub(crate) fn crossed(&self, bytes: u64, elapsed: Duration) {
        // Of less memory that is shared, places are told without waiting for anybody to copy it.
        let least = match self.locality {
            Locality::SharedMemory => SHM_PINNED_BYTES_MAX as u64,
            Locality::SameNode | Locality::SameZone | Locality::Remote => JUDGED_BYTES_MIN,
        };
        if bytes >= least {
            self.costs.shared.paths.lock().take(self.locality, bytes, elapsed);
        }
    }

    /// So much has come from a tier within this time, without anything before it that took a while: if
    /// that is all that was to come, compares it with the estimate.
    pub(crate) fn took(&self, tier: Tier, came: u64, elapsed: Duration) {
        let Share { bytes, left, queued, predicted } = at(self.shares, tier);
        if bytes < JUDGED_BYTES_MIN || (came, left) != (bytes, 0) || elapsed.is_zero() {
            return;
        }
        let Costs { shared } = &self.costs;
        let actual = elapsed.as_secs_f64();
        shared.metrics.record(tier.into(), Judge::Node, predicted.as_secs_f64() / actual);
        // While a device changes, its bandwidth is what is wrong.
        if shared.stack.pace(tier).is_some_and(|device| device.is_settled) {
            let expected = self.costs.pair(tier, self.locality).secs(queued, bytes);
            let pair = (tier, self.locality);
            shared.biases.lock().take(pair, actual / expected, (bytes, elapsed));
        }
        self.costs.tell();
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        for tier in Tier::ALL {
            let left = at(self.shares, tier).left;
            if left > 0 {
                self.costs.shared.planned.sub(tier, left, true);
            }
        }
        self.costs.tell();
    }
}
