//! What loading costs now, by tier and by how far away the engine is.
//!
//! ```text
//! load = setup + queue + bytes / bandwidth,  all of it times a bias
//! setup      of the device (measured) and of the path (assumed)
//! queue      bytes that gets and prefetches have yet to load, and that are reserved, by the device's bandwidth
//! bandwidth  of the device or of the path, whichever is slower: a get loads ahead of what it sends
//! bias       how long loads took that were estimated: of this node's own gets, and of reports
//! ```
//! The device is measured where it is read (`stack/cost.rs`), so that a throttled disk is known for every
//! engine as soon as it is for one. The path is measured by what dram delivers over it, because that takes
//! next to no time otherwise. What was not measured is assumed, and said to be; a path is taken to be no
//! faster than a nearer one that was measured, and no slower than one that is farther away.
//!
//! A load takes the place of what its tenant has reserved, oldest first, so that it does not count twice.
//! Knows no wire and no clock but tokio's. What tenants can do to each other here: reserve up to a bound,
//! and report within bounds; whose reservations they are is never told.

mod bias;
mod load;
mod path;
mod reservations;

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use kvstrata_tiers::{
    error::Result,
    stack::{DevicePace, DeviceState, Stack},
    tier::Tier,
};
use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};

pub(crate) use self::load::Load;
use self::{bias::Biases, load::Planned, path::Paths, reservations::Reservations};
use crate::{
    id::ReservationId,
    limits::{COSTS_INTERVAL, COSTS_SILENCE},
    metrics::{CostMetrics, Judge, TierStateLabel},
    score::LoadCost,
};

/// Loads of fewer bytes say nothing of bandwidth.
const JUDGED_BYTES_MIN: u64 = 1 << 20;
/// The longest load that is believed.
const JUDGED_MAX: Duration = Duration::from_secs(3600);

/// Where a holder is, seen from an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Locality {
    /// The same host, by memory that both see.
    SharedMemory,
    /// The same host, by a socket.
    SameNode,
    /// Another host of the zone.
    SameZone,
    /// Another zone, or nothing is known.
    Remote,
}

impl Locality {
    /// All of them, near to far.
    pub const ALL: [Self; 4] = [Self::SharedMemory, Self::SameNode, Self::SameZone, Self::Remote];

    /// What an array says of it, near to far.
    fn of<T>(self, [shared, node, zone, remote]: [T; 4]) -> T {
        match self {
            Self::SharedMemory => shared,
            Self::SameNode => node,
            Self::SameZone => zone,
            Self::Remote => remote,
        }
    }
}

/// What the bytes of a get travel by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Via {
    SharedMemory,
    UnixSocket,
    Network,
}

/// Where a node is.
#[derive(Debug, Clone, Default)]
pub struct Place {
    /// Its name, as engines on its host say it.
    pub node: String,
    /// Its zone; empty when unknown.
    pub zone: String,
    /// Whether engines on its host can see its memory.
    pub shared_memory: bool,
}

/// How the device of a tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TierState {
    /// As usual.
    Ok,
    /// Far slower than it was.
    Degraded,
    /// Nothing can be read.
    Down,
}

/// What loading from one tier costs an engine that is so far away.
#[derive(Debug, Clone, PartialEq)]
pub struct TierCost {
    /// Name of the node.
    pub node: String,
    /// The tier.
    pub tier: Tier,
    /// How far away the engine is.
    pub locality: Locality,
    /// Bytes per second that loads achieve.
    pub bandwidth: f64,
    /// Time to the first byte.
    pub setup: Duration,
    /// Time until what waits or is reserved has been loaded.
    pub queue: Duration,
    /// That, in bytes.
    pub queued_bytes: u64,
    /// Gets and prefetches that are loading from the tier.
    pub in_flight: u32,
    /// How its device is.
    pub state: TierState,
    /// Since it was measured the last time; none: it is assumed.
    pub sample_age: Option<Duration>,
}

/// How long a load took that was estimated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Report {
    /// What it came from.
    pub tier: Tier,
    /// How far away that was.
    pub locality: Locality,
    /// What it brought.
    pub bytes: u64,
    /// What it was said to take.
    pub predicted: Duration,
    /// What it took.
    pub actual: Duration,
    /// What was reserved for it, which ends with it.
    pub reservation: Option<ReservationId>,
}

/// The costs of one node; clones share them.
#[derive(Clone)]
pub struct Costs {
    shared: Arc<Shared>,
}

struct Shared {
    stack: Stack,
    place: Place,
    metrics: CostMetrics,
    paths: Mutex<Paths>,
    /// Whether the last load of an engine on this host went by shared memory.
    is_seen: AtomicBool,
    biases: Mutex<Biases>,
    planned: Planned,
    reservations: Mutex<Reservations>,
    changed: watch::Sender<()>,
}

/// Says when costs have changed.
#[derive(Debug)]
pub struct CostChanges {
    changed: watch::Receiver<()>,
    /// Not before this.
    next: Instant,
}

/// What an estimate is made of, in seconds.
#[derive(Debug, Clone, Copy)]
struct Pair {
    setup: f64,
    /// For each byte that waits.
    queued_byte: f64,
    /// For each byte.
    byte: f64,
    /// How long nothing has come that should have.
    silence: f64,
    /// All of it is to be taken times this.
    bias: f64,
}

impl Pair {
    fn queue(self, queued: u64) -> f64 {
        self.bias * (self.silence + queued as f64 * self.queued_byte)
    }

    fn secs(self, queued: u64, bytes: u64) -> f64 {
        self.queue(queued) + self.bias * (self.setup + bytes as f64 * self.byte)
    }
}

impl Costs {
    /// What loading from the tiers of `stack` costs, of which nothing is known yet.
    #[must_use]
    pub fn new(stack: Stack, place: Place, metrics: CostMetrics) -> Self {
        let shared = Shared {
            stack,
            is_seen: AtomicBool::new(place.shared_memory),
            place,
            metrics,
            paths: Mutex::default(),
            biases: Mutex::default(),
            planned: Planned::default(),
            reservations: Mutex::default(),
            changed: watch::Sender::new(()),
        };
        Self { shared: Arc::new(shared) }
    }

    /// How far this node is from an engine that says where it is; both empty if it does not.
    ///
    /// On this host it is the way that the last load there took, shared memory or a socket.
    #[must_use]
    pub fn locality(&self, node: &str, zone: &str) -> Locality {
        match self.network_locality(node, zone) {
            Locality::SameNode if self.is_shared() => Locality::SharedMemory,
            locality => locality,
        }
    }

    /// Whether engines on this host load by shared memory, as the last one did that has loaded.
    #[must_use]
    pub(crate) fn is_shared(&self) -> bool {
        // Relaxed: an estimate.
        self.shared.is_seen.load(Ordering::Relaxed)
    }

    /// The same for what goes over the network.
    fn network_locality(&self, node: &str, zone: &str) -> Locality {
        let place = &self.shared.place;
        if node == place.node {
            return Locality::SameNode;
        }
        if !zone.is_empty() && zone == place.zone {
            return Locality::SameZone;
        }
        Locality::Remote
    }

    /// How far a get travels of an engine that says where it is.
    pub(crate) fn locality_of(&self, via: Via, node: &str, zone: &str) -> Locality {
        match via {
            Via::SharedMemory => Locality::SharedMemory,
            Via::UnixSocket => Locality::SameNode,
            Via::Network => self.network_locality(node, zone),
        }
    }

    /// What loading costs from every tier there is, at every distance, tier by tier, near to far.
    #[must_use]
    pub fn snapshot(&self) -> Vec<TierCost> {
        let tiers = Tier::ALL.into_iter().filter(|tier| self.has_tier(*tier));
        tiers
            .flat_map(|tier| Locality::ALL.map(|locality| self.tier_cost(tier, locality)))
            .collect()
    }

    fn tier_cost(&self, tier: Tier, locality: Locality) -> TierCost {
        let pair = self.pair(tier, locality);
        let queued_bytes = self.queued(tier);
        let device = self.shared.stack.pace(tier);
        let age = match tier {
            Tier::Dram => self.shared.paths.lock().age(locality),
            Tier::Nvme | Tier::Object => device.and_then(|device| device.age),
        };
        TierCost {
            node: self.shared.place.node.clone(),
            tier,
            locality,
            bandwidth: 1.0 / (pair.byte * pair.bias),
            setup: duration(pair.setup * pair.bias),
            queue: duration(pair.queue(queued_bytes)),
            queued_bytes,
            in_flight: self.shared.planned.loads(tier),
            state: self.state(tier),
            sample_age: age,
        }
    }

    /// What loading blocks of so many bytes costs now, for the score.
    #[must_use]
    pub fn load_cost(&self, tier: Tier, locality: Locality, block_bytes: u64) -> LoadCost {
        let pair = self.pair(tier, locality);
        LoadCost {
            queue_ms: 1e3 * pair.queue(self.queued(tier)),
            setup_ms: 1e3 * pair.bias * pair.setup,
            block_ms: 1e3 * pair.bias * block_bytes as f64 * pair.byte,
        }
    }

    /// How long a load would take that begins now.
    #[must_use]
    pub fn estimate(&self, tier: Tier, locality: Locality, bytes: u64) -> Duration {
        duration(self.pair(tier, locality).secs(self.queued(tier), bytes))
    }

    /// Shows in the metrics how the tiers are.
    pub fn show(&self) {
        let all = self.snapshot().into_iter().filter(|cost| cost.locality == Locality::SameNode);
        for TierCost { tier, queued_bytes, bandwidth, state, .. } in all {
            let state = match state {
                TierState::Ok => TierStateLabel::Ok,
                TierState::Degraded => TierStateLabel::Degraded,
                TierState::Down => TierStateLabel::Down,
            };
            self.shared.metrics.show(tier.into(), queued_bytes, bandwidth, state);
        }
    }

    /// How the device of a tier is.
    #[must_use]
    pub fn state(&self, tier: Tier) -> TierState {
        match self.shared.stack.pace(tier).map(|device| device.state) {
            None | Some(DeviceState::Ok) => TierState::Ok,
            Some(DeviceState::Degraded) => TierState::Degraded,
            Some(DeviceState::Down) => TierState::Down,
        }
    }

    /// Says when any of this has changed, at most ten times a second.
    #[must_use]
    pub fn changes(&self) -> CostChanges {
        CostChanges { changed: self.shared.changed.subscribe(), next: Instant::now() }
    }

    /// Counts bytes that will be loaded soon as if they were waiting already: until a load of the tenant
    /// takes their place, until it is [released](Self::release) or [reported](Self::report), or for `ttl`
    /// (zero takes the default), which is returned. Tiers that are not there do not count.
    ///
    /// # Errors
    /// `Invalid` for a `ttl` that is too long, `Exhausted` for too many or too large ones.
    pub fn reserve(
        &self,
        tenant: &str,
        loads: &[(Tier, u64)],
        ttl: Duration,
    ) -> Result<(ReservationId, Duration)> {
        let bytes = Tier::ALL.map(|tier| {
            let of_tier = loads.iter().filter(|(other, _)| *other == tier && self.has_tier(tier));
            of_tier.fold(0_u64, |sum, (_, bytes)| sum.saturating_add(*bytes))
        });
        let reserved = self.shared.reservations.lock().reserve(tenant, bytes, ttl)?;
        self.tell();
        Ok(reserved)
    }

    /// Takes a reservation back. One that is unknown, or another tenant's, is as good as taken back.
    pub fn release(&self, tenant: &str, id: ReservationId) {
        self.shared.reservations.lock().release(tenant, id);
        self.tell();
    }

    /// Takes note of a load that was estimated; false if it says nothing.
    pub fn report(&self, tenant: &str, report: &Report) -> bool {
        if let Some(id) = report.reservation {
            self.release(tenant, id);
        }
        let Report { tier, locality, bytes, predicted, actual, .. } = *report;
        let times = Duration::from_nanos(1)..JUDGED_MAX;
        if !times.contains(&predicted) || !times.contains(&actual) || !self.has_tier(tier) {
            return false;
        }
        let ratio = predicted.as_secs_f64() / actual.as_secs_f64();
        self.shared.metrics.record(tier.into(), Judge::Report, ratio);
        if bytes >= JUDGED_BYTES_MIN {
            self.shared.biases.lock().report((tier, locality), 1.0 / ratio);
            self.tell();
        }
        true
    }

    /// Reservations that stand, and their bytes, dram, nvme, object.
    #[must_use]
    pub fn reserved(&self) -> (usize, [u64; 3]) {
        self.shared.reservations.lock().left()
    }

    fn has_tier(&self, tier: Tier) -> bool {
        self.shared.stack.has_tier(tier)
    }

    /// Bytes that a new load from a tier comes behind.
    fn queued(&self, tier: Tier) -> u64 {
        let (_, reserved) = self.reserved();
        let reserved = at(reserved, tier);
        match self.shared.stack.pace(tier) {
            // Dram makes nobody wait; what its loads share is the path, whose rate has that in it.
            None => reserved,
            Some(DevicePace { loading_bytes, .. }) => {
                reserved.saturating_add(self.shared.planned.bytes(tier).max(loading_bytes))
            }
        }
    }

    fn pair(&self, tier: Tier, locality: Locality) -> Pair {
        let path = self.shared.paths.lock().cost(locality);
        let bias = self.shared.biases.lock().of((tier, locality));
        match self.shared.stack.pace(tier) {
            None => Pair {
                setup: path.setup,
                queued_byte: path.byte,
                byte: path.byte,
                silence: 0.0,
                bias,
            },
            Some(device) => Pair {
                setup: path.setup + device.setup_secs,
                queued_byte: device.byte_secs,
                byte: path.byte.max(device.byte_secs),
                silence: device.silence.as_secs_f64(),
                bias,
            },
        }
    }

    fn tell(&self) {
        if self.shared.changed.receiver_count() > 0 {
            self.shared.changed.send_replace(());
        }
    }
}

impl CostChanges {
    /// Waits until something has changed since the last call, or for a second: some things change with
    /// time alone.
    ///
    /// # Cancel safety
    /// Safe: what has changed is told by the next call.
    pub async fn next(&mut self) {
        sleep_until(self.next).await;
        // The end of the costs is the end of all changes.
        drop(timeout(COSTS_SILENCE, self.changed.changed()).await);
        self.next = Instant::now() + COSTS_INTERVAL;
    }
}

/// What an array says of a tier, hot to cold.
fn at<T>([dram, nvme, object]: [T; 3], tier: Tier) -> T {
    match tier {
        Tier::Dram => dram,
        Tier::Nvme => nvme,
        Tier::Object => object,
    }
}

fn duration(secs: f64) -> Duration {
    Duration::try_from_secs_f64(secs).unwrap_or(Duration::MAX)
}

impl fmt::Debug for Costs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Costs").field("place", &self.shared.place).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
