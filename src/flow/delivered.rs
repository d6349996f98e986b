//! What gets have delivered, run by run, and how long it took: calibrates the estimates of lookups.
//!
//! A run is consecutive blocks of one tier; it lasts from the end of the run before it to its own end.
//! Reading dram costs next to nothing, so the load time of a dram block is that of its way to the
//! client. A colder tier does not wait for the reader: what a client takes to read a message counts
//! for it only as far as a network would take.

use std::time::Duration;

use kvstrata_tiers::{stack::Stack, tier::Tier};
use tokio::time::Instant;

/// Runs of fewer bytes say nothing of bandwidth.
const CALIBRATION_BYTES_MIN: u64 = 1 << 20;
/// A longer run counts as several, so that estimates follow while it goes on.
const CALIBRATION_INTERVAL: Duration = Duration::from_millis(250);
/// Time for a message of one mebibyte to leave; a reader that takes longer stalls.
const STALL_MIN: Duration = Duration::from_millis(10);
/// A block of dram that took longer was loaded for somebody else meanwhile.
const WAITED_MIN: Duration = Duration::from_millis(20);

/// Consecutive blocks of one tier.
struct Run {
    tier: Tier,
    bytes: u64,
    /// When its latest block came, and how long the reader had stalled by then.
    latest: Instant,
    stalled: Duration,
}

/// Runs as they are delivered.
pub(crate) struct Delivered {
    stack: Stack,
    run: Option<Run>,
    /// The end of the run before.
    since: Instant,
    /// How long the reader has stalled since then.
    stalled: Duration,
    /// When the reader was handed a message.
    handed: Option<Instant>,
}

impl Delivered {
    /// Begins now.
    pub(crate) fn new(stack: Stack) -> Self {
        let since = Instant::now();
        Self { stack, run: None, since, stalled: Duration::ZERO, handed: None }
    }

    /// The reader has been handed a message.
    pub(crate) fn hand(&mut self) {
        self.handed = Some(Instant::now());
    }

    /// The reader asks for the next one.
    pub(crate) fn resume(&mut self) {
        if let Some(handed) = self.handed.take() {
            self.stalled += handed.elapsed().saturating_sub(STALL_MIN);
        }
    }

    /// A block has come, which took so long.
    pub(crate) fn block(&mut self, tier: Tier, bytes: u64, took: Duration) {
        if tier == Tier::Dram && took >= WAITED_MIN {
            return self.gap();
        }
        if self.run.as_ref().is_some_and(|run| run.tier != tier) {
            self.end();
        }
        let now = Instant::now();
        let before = self.run.take().map_or(0, |run| run.bytes);
        let bytes = before.saturating_add(bytes);
        self.run = Some(Run { tier, bytes, latest: now, stalled: self.stalled });
        let long = now.duration_since(self.since) >= CALIBRATION_INTERVAL;
        if long && bytes >= CALIBRATION_BYTES_MIN {
            self.end();
        }
    }

    /// Something came that is not part of any run: what follows has not begun before it.
    pub(crate) fn gap(&mut self) {
        self.end();
        self.since = Instant::now();
        self.stalled = Duration::ZERO;
    }

    /// All has been handed out.
    pub(crate) fn finish(&mut self) {
        if let Some(run) = &mut self.run
            && run.tier == Tier::Dram
        {
            run.latest = Instant::now();
        }
        self.end();
    }

    /// Records the run that ends with its latest block.
    fn end(&mut self) {
        let Some(Run { tier, bytes, latest, stalled }) = self.run.take() else { return };
        let elapsed = latest.duration_since(self.since);
        self.since = latest;
        self.stalled = self.stalled.saturating_sub(stalled);
        let elapsed = match tier {
            Tier::Dram => elapsed,
            Tier::Nvme | Tier::Object => elapsed.saturating_sub(stalled),
        };
        if bytes >= CALIBRATION_BYTES_MIN {
            self.stack.record_load(tier, bytes, elapsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use kvstrata_tiers::testing::Fixture;
    use tokio::time::sleep;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn delivered() -> (Stack, Delivered) {
        let stack = Fixture::new(MIB, Vec::new()).unwrap().stack;
        (stack.clone(), Delivered::new(stack))
    }

    /// Milliseconds to load 100 MiB, without the setup.
    fn estimate(stack: &Stack, tier: Tier) -> u128 {
        (stack.estimate_load(tier, 100 * MIB) - stack.estimate_load(tier, 0)).as_millis()
    }

    /// Blocks of 1 MiB, each of which takes so long.
    async fn blocks(delivered: &mut Delivered, tier: Tier, count: u64, each: Duration) {
        for _ in 0..count {
            sleep(each).await;
            delivered.block(tier, MIB, Duration::ZERO);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn runs_of_two_tiers_are_told_apart() {
        let (stack, mut delivered) = delivered();
        blocks(&mut delivered, Tier::Dram, 10, millis(1)).await;
        blocks(&mut delivered, Tier::Nvme, 10, millis(5)).await;
        blocks(&mut delivered, Tier::Dram, 10, millis(1)).await;
        delivered.finish();
        assert_eq!((estimate(&stack, Tier::Dram), estimate(&stack, Tier::Nvme)), (100, 500));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_that_stalls_is_not_the_time_of_a_cold_tier() {
        let (stack, mut delivered) = delivered();
        for _ in 0..10 {
            blocks(&mut delivered, Tier::Nvme, 1, millis(5)).await;
            delivered.hand();
            sleep(Duration::from_secs(30)).await;
            delivered.resume();
        }
        delivered.finish();
        let estimate = estimate(&stack, Tier::Nvme);
        assert!((500..=1500).contains(&estimate), "{estimate}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_run_counts_while_it_goes_on() {
        let (stack, mut delivered) = delivered();
        blocks(&mut delivered, Tier::Nvme, 300, millis(1)).await;
        assert_eq!(estimate(&stack, Tier::Nvme), 100);
        blocks(&mut delivered, Tier::Nvme, 100, millis(10)).await;
        assert_eq!(estimate(&stack, Tier::Nvme), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn small_runs_gaps_and_loads_of_others_say_nothing() {
        let (stack, mut delivered) = delivered();
        let before = Tier::ALL.map(|tier| estimate(&stack, tier));
        sleep(millis(100)).await;
        delivered.block(Tier::Nvme, MIB - 1, Duration::ZERO);
        sleep(millis(100)).await;
        delivered.block(Tier::Dram, 50 * MIB, millis(100));
        sleep(millis(100)).await;
        delivered.gap();
        delivered.finish();
        assert_eq!(Tier::ALL.map(|tier| estimate(&stack, tier)), before);
        blocks(&mut delivered, Tier::Nvme, 10, millis(2)).await;
        delivered.finish();
        assert_eq!(estimate(&stack, Tier::Nvme), 200);
    }
}
