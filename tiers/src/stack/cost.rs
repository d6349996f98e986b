//! What the devices of the colder tiers do: how fast they deliver, how long until the first bytes, how
//! much is being loaded, and whether they answer at all.
//!
//! A device is measured while it is busy, whoever the bytes are for: from when the first load begins until
//! none is under way, in periods of a quarter of a second. So loads that run at the same time count
//! together, and a reader that stalls is not the time of a device. A period that began on an idle device
//! has the time to the first bytes in it: small ones tell that time, large ones the bandwidth.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::{rate::Rate, tier::Tier};

/// A longer period counts as several, so that what is known follows while it goes on.
const PERIOD: Duration = Duration::from_millis(250);
/// Periods of fewer bytes say nothing of bandwidth.
const PERIOD_BYTES_MIN: u64 = 1 << 20;
/// How much of what a period says of the time to the first bytes is believed.
const SETUP_WEIGHT: f64 = 0.3;
/// Seconds: that time is never believed to be less or more than these.
const SETUP_SECS: (f64, f64) = (20e-6, 2.0);
/// Failures in a row after which a device is down: one may be a bad sector.
const FAILURES_MAX: u32 = 3;
/// Then it is worth a try again after this.
const DOWN_INTERVAL: Duration = Duration::from_secs(5);
/// Nothing has come for so long although something is under way: degraded, and down.
const SILENCE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// So many times slower than usual is degraded, and it is no longer below the second.
const DEGRADED: (f64, f64) = (4.0, 2.0);
/// Seconds of loading after which what is usual has gone half of the way to what is.
const USUAL_SECS: f64 = 60.0;

/// What is assumed before anything was measured: seconds to the first bytes, and bytes per second. Round
/// numbers of the right order: one flash drive, one stream of an object store.
const ASSUMED_NVME: (f64, f64) = (500e-6, 5e8);
/// See [`ASSUMED_NVME`].
const ASSUMED_OBJECT: (f64, f64) = (40e-3, 8e7);

/// How the device of a tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceState {
    /// As usual.
    Ok,
    /// Far slower than usual, silent for a second, or back after failures.
    Degraded,
    /// It fails, or is silent for long.
    Down,
}

/// What the device of a colder tier does now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DevicePace {
    /// Seconds for each byte, by all loads together.
    pub byte_secs: f64,
    /// Seconds to the first bytes.
    pub setup_secs: f64,
    /// Bytes that are being loaded.
    pub loading_bytes: u64,
    /// Blocks that are being loaded.
    pub loads: u32,
    /// How long nothing has come beyond what is expected for what is being loaded.
    pub silence: Duration,
    /// How it is.
    pub state: DeviceState,
    /// Since something was measured; none before.
    pub age: Option<Duration>,
    /// Whether the last measurement was as expected.
    pub is_settled: bool,
}

/// What is known of one device.
#[derive(Debug)]
struct Device {
    rate: Rate,
    assumed: f64,
    setup: f64,
    loading_bytes: u64,
    loads: u32,
    /// The period that is being measured: its begin, and whether the device was idle before.
    since: Instant,
    was_idle: bool,
    bytes: u64,
    /// When something came the last time in it.
    latest: Instant,
    /// The one before, in bytes and seconds, if the device was not idle since: what follows may be no more
    /// than its rest, which says something only together with it.
    held: Option<(u64, f64)>,
    failures: u32,
    failed: Option<Instant>,
    /// Seconds for each byte, usually.
    usual: Option<f64>,
    is_slow: bool,
}

/// The devices of nvme and object.
#[derive(Debug)]
pub(crate) struct Costs([Mutex<Device>; 2]);

/// Bytes that are being loaded while this exists. What is dropped has been given up.
#[derive(Debug)]
pub(crate) struct Loading<'a> {
    device: Option<&'a Mutex<Device>>,
    bytes: u64,
    since: Instant,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    GivenUp,
    Came,
    Failed,
}

impl Default for Costs {
    fn default() -> Self {
        Self([ASSUMED_NVME, ASSUMED_OBJECT].map(|assumed| Mutex::new(Device::new(assumed))))
    }
}

impl Costs {
    fn of(&self, tier: Tier) -> Option<&Mutex<Device>> {
        let [nvme, object] = &self.0;
        match tier {
            Tier::Dram => None,
            Tier::Nvme => Some(nvme),
            Tier::Object => Some(object),
        }
    }

    /// Begins to load.
    pub(crate) fn begin(&self, tier: Tier, bytes: u64) -> Loading<'_> {
        let device = self.of(tier);
        if let Some(device) = device {
            device.lock().begin(bytes);
        }
        Loading { device, bytes, since: Instant::now(), end: End::GivenUp }
    }

    /// What is known of a tier; none of dram, which has no device.
    pub(crate) fn pace(&self, tier: Tier) -> Option<DevicePace> {
        Some(self.of(tier)?.lock().pace())
    }
}

impl Loading<'_> {
    /// The bytes are there.
    pub(crate) fn came(mut self) {
        self.end = End::Came;
    }

    /// The device did not deliver them.
    pub(crate) fn failed(mut self) {
        self.end = End::Failed;
    }

    /// They did not come in time, which is the device's failure if there was time.
    pub(crate) fn timed_out(mut self) {
        if self.since.elapsed() >= SILENCE.0 {
            self.end = End::Failed;
        }
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        if let Some(device) = self.device {
            device.lock().end(self.bytes, self.end);
        }
    }
}

impl Device {
    fn new((setup, per_second): (f64, f64)) -> Self {
        let now = Instant::now();
        Self {
            rate: Rate::default(),
            assumed: 1.0 / per_second,
            setup,
            loading_bytes: 0,
            loads: 0,
            since: now,
            was_idle: true,
            bytes: 0,
            latest: now,
            held: None,
            failures: 0,
            failed: None,
            usual: None,
            is_slow: false,
        }
    }

    fn cost(&self) -> f64 {
        self.rate.cost().unwrap_or(self.assumed)
    }

    fn begin(&mut self, bytes: u64) {
        if self.loads == 0 {
            self.start(Instant::now(), true);
        }
        self.loads = self.loads.saturating_add(1);
        self.loading_bytes = self.loading_bytes.saturating_add(bytes);
    }

    fn start(&mut self, at: Instant, was_idle: bool) {
        (self.since, self.latest, self.was_idle, self.bytes) = (at, at, was_idle, 0);
    }

    fn end(&mut self, bytes: u64, end: End) {
        self.loads = self.loads.saturating_sub(1);
        self.loading_bytes = self.loading_bytes.saturating_sub(bytes);
        let now = Instant::now();
        match end {
            End::Came => {
                (self.failures, self.latest) = (0, now);
                self.bytes = self.bytes.saturating_add(bytes);
            }
            End::Failed => {
                self.failures = self.failures.saturating_add(1);
                self.failed = Some(now);
            }
            End::GivenUp => {}
        }
        let is_long = self.bytes >= PERIOD_BYTES_MIN && now - self.since >= PERIOD;
        if self.loads == 0 || is_long {
            self.measure();
            self.start(self.latest, false);
        }
    }

    /// Learns from the period that ends with what came last.
    fn measure(&mut self) {
        let elapsed = (self.latest - self.since).as_secs_f64();
        let is_over = self.loads == 0;
        if self.bytes == 0 || elapsed <= 0.0 {
            if let Some((bytes, secs)) = self.held.take_if(|_| is_over) {
                self.learn(bytes, secs);
            }
            return;
        }
        let mut moving = elapsed;
        if self.was_idle {
            if self.rate.cost().is_some() {
                self.learn_setup(elapsed);
            }
            moving = (elapsed - self.setup).max(elapsed / 2.0);
        }
        match self.held.take() {
            Some((bytes, secs)) if is_over => {
                self.learn(bytes.saturating_add(self.bytes), secs + moving);
            }
            None if is_over => self.learn(self.bytes, moving),
            held => {
                if let Some((bytes, secs)) = held {
                    self.learn(bytes, secs);
                }
                self.held = Some((self.bytes, moving));
            }
        }
    }

    fn learn(&mut self, bytes: u64, secs: f64) {
        if bytes >= PERIOD_BYTES_MIN {
            self.rate.take(bytes, Duration::try_from_secs_f64(secs).unwrap_or_default());
            self.compare(secs);
        }
    }

    /// What a period took more or less than expected is that of its first bytes as far as those were
    /// expected to take most of it.
    fn learn_setup(&mut self, elapsed: f64) {
        let expected = self.setup + self.bytes as f64 * self.cost();
        let wrong = (elapsed - expected).min(expected);
        let (least, most) = SETUP_SECS;
        let setup = self.setup + SETUP_WEIGHT * wrong * self.setup / expected;
        self.setup = setup.clamp(least, most);
    }

    /// Compares with what is usual.
    fn compare(&mut self, secs: f64) {
        let cost = self.cost();
        let usual = self.usual.get_or_insert(cost);
        *usual += (cost - *usual) * (1.0 - (-secs / USUAL_SECS).exp2());
        let (slow, well) = DEGRADED;
        self.is_slow = cost > *usual * if self.is_slow { well } else { slow };
    }

    fn pace(&self) -> DevicePace {
        let silence = self.silence();
        DevicePace {
            byte_secs: self.cost(),
            setup_secs: self.setup,
            loading_bytes: self.loading_bytes,
            loads: self.loads,
            silence,
            state: self.state(silence),
            age: self.rate.age(),
            is_settled: self.rate.is_settled(),
        }
    }

    fn silence(&self) -> Duration {
        if self.loads == 0 {
            return Duration::ZERO;
        }
        let expected = self.setup + self.loading_bytes as f64 * self.cost();
        let expected = Duration::try_from_secs_f64(expected).unwrap_or(Duration::MAX);
        self.latest.elapsed().saturating_sub(expected)
    }

    fn state(&self, silence: Duration) -> DeviceState {
        let fails = self.failures >= FAILURES_MAX;
        let is_fresh = self.failed.is_some_and(|at| at.elapsed() < DOWN_INTERVAL);
        let (degraded, down) = SILENCE;
        if (fails && is_fresh) || silence >= down {
            return DeviceState::Down;
        }
        if fails || self.is_slow || silence >= degraded {
            return DeviceState::Degraded;
        }
        DeviceState::Ok
    }
}

#[cfg(test)]
mod tests;
