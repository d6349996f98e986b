//! Whether the tier takes writes: the state after failures, and the daily budget.
//!
//! ```text
//! ready --no space--> full ------------after a while--> tries again
//! ready --I/O error-> failing ---------after a while, longer each time--> tries again
//! ready --sync error> read-only, until the process ends
//! ```
//! Reads go on in every state. A failed sync is final: the kernel may have dropped what it could not
//! write and report success the next time, so nothing after it can be trusted.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::metrics::{NvmeMetrics, StateLabel};
use crate::{
    error::{Error, ErrorKind, Result},
    store::Ailment,
};

/// How long writes stop when the disk is full: somebody has to make room.
const FULL_PAUSE: Duration = Duration::from_secs(2);
/// How long writes stop after a failed write; doubled with each further one.
const FAILING_PAUSE: Duration = Duration::from_secs(1);
/// The longest pause after failed writes.
const FAILING_PAUSE_MAX: Duration = Duration::from_secs(60);
/// A day, over which the write budget is spread.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Ready,
    Full { until: Instant },
    Failing { until: Instant, failures: u32 },
    ReadOnly,
}

fn refuse(what: &'static str) -> Result<()> {
    Err(Error::new(ErrorKind::Unavailable, what))
}

/// Whether writes are taken.
#[derive(Debug)]
pub(super) struct WriteState {
    mode: Mutex<Mode>,
    metrics: NvmeMetrics,
}

impl WriteState {
    pub(super) fn new(metrics: NvmeMetrics) -> Self {
        metrics.show_state(StateLabel::Ready);
        Self { mode: Mutex::new(Mode::Ready), metrics }
    }

    /// Whether a write may be tried now.
    pub(super) fn check(&self) -> Result<()> {
        let now = Instant::now();
        match *self.mode.lock() {
            Mode::Ready => Ok(()),
            Mode::Full { until } | Mode::Failing { until, .. } if until <= now => Ok(()),
            Mode::Full { .. } => refuse("write to nvme: it is full"),
            Mode::Failing { .. } => refuse("write to nvme: writing failed a moment ago"),
            Mode::ReadOnly => {
                refuse("write to nvme: read-only since a sync failed; check the disk")
            }
        }
    }

    /// What keeps writes from being taken; what was tried again and has not worked yet counts.
    pub(super) fn ailment(&self) -> Option<Ailment> {
        match *self.mode.lock() {
            Mode::Ready => None,
            Mode::Full { .. } => Some(Ailment::Full),
            Mode::Failing { .. } => Some(Ailment::Failing),
            Mode::ReadOnly => Some(Ailment::ReadOnly),
        }
    }

    /// A write succeeded.
    pub(super) fn well(&self) {
        let mut mode = self.mode.lock();
        if *mode != Mode::ReadOnly && *mode != Mode::Ready {
            tracing::info!("nvme takes writes again");
            *mode = Mode::Ready;
            self.metrics.show_state(StateLabel::Ready);
        }
    }

    /// There was no room.
    pub(super) fn full(&self) {
        let mut mode = self.mode.lock();
        match *mode {
            Mode::ReadOnly => return,
            Mode::Full { .. } => {}
            Mode::Ready | Mode::Failing { .. } => {
                tracing::warn!("nvme is full and nothing could be reclaimed: writes stop for now");
            }
        }
        *mode = Mode::Full { until: Instant::now() + FULL_PAUSE };
        self.metrics.show_state(StateLabel::Full);
    }

    /// A write failed.
    pub(super) fn failed(&self, error: &dyn std::error::Error) {
        let mut mode = self.mode.lock();
        let failures = match *mode {
            Mode::ReadOnly => return,
            Mode::Failing { failures, .. } => failures.saturating_add(1),
            Mode::Ready | Mode::Full { .. } => 1,
        };
        let pause =
            FAILING_PAUSE.saturating_mul(1 << (failures - 1).min(10)).min(FAILING_PAUSE_MAX);
        tracing::warn!(%error, failures, pause_ms = pause.as_millis(), "nvme write failed");
        *mode = Mode::Failing { until: Instant::now() + pause, failures };
        self.metrics.show_state(StateLabel::Failing);
    }

    /// A sync failed.
    pub(super) fn poison(&self, error: &dyn std::error::Error) {
        tracing::error!(%error, "nvme sync failed: read-only until the restart");
        *self.mode.lock() = Mode::ReadOnly;
        self.metrics.show_state(StateLabel::ReadOnly);
    }
}

/// How much may be written: so many bytes a day, and that of one burst at once.
#[derive(Debug)]
pub(super) struct WriteBudget {
    /// 0: no limit.
    daily_bytes: u64,
    burst_bytes: u64,
    left: f64,
    filled: Instant,
}

impl WriteBudget {
    /// A full budget.
    pub(super) fn new(daily_bytes: u64, burst_bytes: u64) -> Self {
        Self { daily_bytes, burst_bytes, left: as_f64(burst_bytes), filled: Instant::now() }
    }

    fn fill(&mut self) {
        let now = Instant::now();
        let share = (now - self.filled).as_secs_f64() / DAY.as_secs_f64();
        self.left = (self.left + share * as_f64(self.daily_bytes)).min(as_f64(self.burst_bytes));
        self.filled = now;
    }

    /// Whether `bytes` may be written, keeping `reserve` (a share of the burst, 0 to 1) for others.
    pub(super) fn allows(&mut self, bytes: u64, reserve: f64) -> bool {
        if self.daily_bytes == 0 {
            return true;
        }
        self.fill();
        self.left - as_f64(bytes) >= reserve * as_f64(self.burst_bytes)
    }

    /// `bytes` were written.
    pub(super) fn spend(&mut self, bytes: u64) {
        if self.daily_bytes > 0 {
            // What must be written is, also without a budget: then others wait for longer.
            self.left = (self.left - as_f64(bytes)).max(-as_f64(self.burst_bytes));
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "a budget need not be exact to the byte")]
fn as_f64(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> WriteState {
        WriteState::new(
            NvmeMetrics::register(&mut prometheus_client::registry::Registry::default()),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_disk_is_tried_again_and_a_failing_one_ever_later() {
        let state = state();
        assert_eq!(state.ailment(), None);
        state.full();
        assert_eq!(state.ailment(), Some(Ailment::Full));
        assert_eq!(state.check().unwrap_err().kind(), ErrorKind::Unavailable);
        tokio::time::advance(FULL_PAUSE).await;
        assert!(state.check().is_ok());
        state.well();
        let error = std::io::Error::other("a test");
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            state.failed(&error);
            let pause = Duration::from_secs(seconds);
            tokio::time::advance(pause - Duration::from_millis(1)).await;
            assert!(state.check().is_err());
            tokio::time::advance(Duration::from_millis(1)).await;
            assert!(state.check().is_ok());
        }
        state.well();
        state.failed(&error);
        tokio::time::advance(FAILING_PAUSE).await;
        assert!(state.check().is_ok(), "what went well resets the pause");
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_ends_read_only() {
        let state = state();
        let error = std::io::Error::other("a test");
        state.poison(&error);
        state.well();
        state.full();
        state.failed(&error);
        tokio::time::advance(DAY).await;
        assert_eq!(state.check().unwrap_err().kind(), ErrorKind::Unavailable);
    }

    #[tokio::test(start_paused = true)]
    async fn the_budget_refills_over_the_day() {
        let mut budget = WriteBudget::new(2400, 1000);
        assert!(budget.allows(1000, 0.0) && !budget.allows(1001, 0.0));
        assert!(budget.allows(500, 0.5) && !budget.allows(501, 0.5));
        budget.spend(1000);
        assert!(!budget.allows(1, 0.0));
        tokio::time::advance(DAY / 24).await;
        assert!(budget.allows(99, 0.0) && !budget.allows(101, 0.0));
        tokio::time::advance(DAY).await;
        assert!(!budget.allows(1001, 0.0), "no more than a burst");
        let mut free = WriteBudget::new(0, 1);
        free.spend(u64::MAX);
        assert!(free.allows(u64::MAX, 1.0));
    }
}
