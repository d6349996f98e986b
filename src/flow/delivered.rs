//! What a get has delivered, run by run, and how long it took: says how fast its path is, and how right the
//! estimates of its loads were.
//!
//! A run is consecutive blocks of one tier; it lasts from the end of the run before it to its own end.
//! Reading dram costs next to nothing, so the load time of a dram block is that of its way to the
//! client. A colder tier does not wait for the reader: what a client takes to read a message counts
//! for it only as far as a network would take. How fast its device is, is measured there.

use std::time::Duration;

use kvstrata_tiers::tier::Tier;
use tokio::time::Instant;

use crate::costs::Load;

/// A longer run of dram counts as several, so that estimates follow while it goes on.
const RUN_INTERVAL: Duration = Duration::from_millis(250);
/// Unless it has fewer bytes.
const RUN_BYTES_MIN: u64 = 1 << 20;
/// Time for a message of one mebibyte to leave; a reader that takes longer stalls.
const STALL_MIN: Duration = Duration::from_millis(10);
/// A block of dram that took longer was loaded for somebody else meanwhile.
const WAITED_MIN: Duration = Duration::from_millis(20);
/// What a tier has loaded was not loading while others delivered, unless these delivered less than 1 / this.
const BEFORE_DIVISOR: u64 = 8;

/// Consecutive blocks of one tier.
struct Run {
    tier: Tier,
    bytes: u64,
    /// When its latest block came, and how long the reader had stalled by then.
    latest: Instant,
    stalled: Duration,
}

/// What one tier has delivered.
#[derive(Debug, Clone, Copy, Default)]
struct Total {
    bytes: u64,
    elapsed: Duration,
    /// What others had delivered before its first block.
    before: u64,
}

/// Runs as they are delivered.
pub(crate) struct Delivered {
    load: Load,
    run: Option<Run>,
    /// The end of the run before.
    since: Instant,
    /// How long the reader has stalled since then.
    stalled: Duration,
    /// When the reader was handed a message.
    handed: Option<Instant>,
    /// Bytes of all runs that have ended.
    bytes: u64,
    /// Hot to cold.
    totals: [Total; 3],
    /// Something came that was no part of any run.
    has_gap: bool,
}

impl Delivered {
    /// Begins now.
    pub(crate) fn new(load: Load) -> Self {
        Self {
            load,
            run: None,
            since: Instant::now(),
            stalled: Duration::ZERO,
            handed: None,
            bytes: 0,
            totals: [Total::default(); 3],
            has_gap: false,
        }
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

    /// A block has come, which took so long: so many bytes of it are delivered, and so many loaded.
    pub(crate) fn block(&mut self, tier: Tier, (bytes, whole): (u64, u64), took: Duration) {
        self.load.came(tier, whole);
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
        if now.duration_since(self.since) >= RUN_INTERVAL && bytes >= RUN_BYTES_MIN {
            self.end();
        }
    }

    /// Something came that is not part of any run: what follows has not begun before it.
    pub(crate) fn gap(&mut self) {
        self.end();
        self.since = Instant::now();
        self.stalled = Duration::ZERO;
        self.has_gap = true;
    }

    /// All has been handed out.
    pub(crate) fn finish(&mut self) {
        if let Some(run) = &mut self.run
            && run.tier == Tier::Dram
        {
            run.latest = Instant::now();
        }
        self.end();
        for (tier, total) in Tier::ALL.into_iter().zip(self.totals).skip(1) {
            if !self.has_gap && total.before <= total.bytes / BEFORE_DIVISOR {
                self.load.took(tier, total.bytes, total.elapsed);
            }
        }
    }

    /// What each tier has delivered since the last call, in bytes, and how long that took without stalls of
    /// the reader; of those that have delivered anything.
    pub(crate) fn take_spent(&mut self) -> impl Iterator<Item = (Tier, u64, Duration)> + use<> {
        let totals = std::mem::take(&mut self.totals);
        let spent = Tier::ALL.into_iter().zip(totals);
        spent
            .filter(|(_, total)| total.bytes > 0)
            .map(|(tier, total)| (tier, total.bytes, total.elapsed))
    }

    /// Counts the run that ends with its latest block.
    fn end(&mut self) {
        let Some(Run { tier, bytes, latest, stalled }) = self.run.take() else { return };
        let elapsed = latest.duration_since(self.since);
        self.since = latest;
        self.stalled = self.stalled.saturating_sub(stalled);
        let before = self.bytes;
        self.bytes = before.saturating_add(bytes);
        if tier == Tier::Dram {
            self.load.crossed(bytes, elapsed);
        }
        let [dram, nvme, object] = &mut self.totals;
        let total = match tier {
            Tier::Dram => dram,
            Tier::Nvme => nvme,
            Tier::Object => object,
        };
        if total.bytes == 0 {
            total.before = before;
        }
        total.bytes = total.bytes.saturating_add(bytes);
        total.elapsed += elapsed.saturating_sub(stalled);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvstrata_tiers::{
        store::BlockStore,
        testing::{Fixture, MemoryStore},
    };
    use prometheus_client::registry::Registry;
    use tokio::time::sleep;

    use super::*;
    use crate::{
        costs::{Costs, Locality, Place},
        metrics::{CostMetrics, Judge, TierLabel},
    };

    const MIB: u64 = 1 << 20;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Costs of tiers that nobody reads, and a load of so many mebibytes of each.
    fn delivered(mebibytes: [u64; 3]) -> (Costs, CostMetrics, Delivered) {
        let tier = |tier| Arc::new(MemoryStore::new(tier)) as Arc<dyn BlockStore>;
        let stack = Fixture::new(MIB, vec![tier(Tier::Nvme), tier(Tier::Object)]).unwrap().stack;
        let metrics = CostMetrics::register(&mut Registry::default());
        let costs = Costs::new(stack, Place::default(), metrics.clone());
        let load = costs.begin("t", Locality::SameNode, mebibytes.map(|mebibytes| mebibytes * MIB));
        (costs, metrics, Delivered::new(load))
    }

    /// Milliseconds to load 100 MiB, without the setup.
    fn estimate(costs: &Costs, tier: Tier) -> u128 {
        let of = |bytes| costs.estimate(tier, Locality::SameNode, bytes);
        (of(100 * MIB) - of(0)).as_millis()
    }

    fn judged(metrics: &CostMetrics) -> [u64; 3] {
        [TierLabel::Dram, TierLabel::Nvme, TierLabel::Object]
            .map(|tier| metrics.count(tier, Judge::Node))
    }

    /// Blocks of 1 MiB, each of which takes so long.
    async fn blocks(delivered: &mut Delivered, tier: Tier, count: u64, each: Duration) {
        for _ in 0..count {
            sleep(each).await;
            delivered.block(tier, (MIB, MIB), Duration::ZERO);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn runs_of_two_tiers_are_told_apart() {
        let (costs, metrics, mut delivered) = delivered([20, 10, 0]);
        blocks(&mut delivered, Tier::Dram, 10, millis(1)).await;
        blocks(&mut delivered, Tier::Nvme, 10, millis(50)).await;
        blocks(&mut delivered, Tier::Dram, 10, millis(1)).await;
        delivered.finish();
        assert_eq!(estimate(&costs, Tier::Dram), 100);
        assert_eq!(judged(&metrics), [0, 0, 0], "dram was delivered while nvme loaded ahead");
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_a_tier_is_that_from_the_begin_without_stalls_of_the_reader() {
        let (_costs, metrics, mut delivered) = delivered([1, 10, 3]);
        blocks(&mut delivered, Tier::Dram, 1, millis(1)).await;
        for _ in 0..10 {
            blocks(&mut delivered, Tier::Nvme, 1, millis(5)).await;
            delivered.hand();
            sleep(Duration::from_secs(30)).await;
            delivered.resume();
        }
        blocks(&mut delivered, Tier::Object, 3, millis(5)).await;
        assert_eq!(judged(&metrics), [0; 3]);
        let [_dram, nvme, _object] = delivered.totals;
        assert!((millis(50)..=millis(150)).contains(&nvme.elapsed), "{nvme:?}");
        assert_eq!((nvme.bytes, nvme.before), (10 * MIB, MIB));
        delivered.finish();
        assert_eq!(judged(&metrics), [0, 1, 0]);
        let spent: Vec<_> = delivered.take_spent().collect();
        assert_eq!(spent.iter().map(|(_, bytes, _)| bytes / MIB).collect::<Vec<_>>(), [1, 10, 3]);
        assert!(spent.iter().all(|(_, _, took)| (millis(1)..=millis(150)).contains(took)));
        assert_eq!(delivered.take_spent().count(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_run_counts_while_it_goes_on() {
        let (costs, _metrics, mut delivered) = delivered([400, 0, 0]);
        blocks(&mut delivered, Tier::Dram, 300, millis(1)).await;
        assert_eq!(estimate(&costs, Tier::Dram), 100);
        blocks(&mut delivered, Tier::Dram, 100, millis(10)).await;
        assert_eq!(estimate(&costs, Tier::Dram), 1000);
    }

    #[tokio::test(start_paused = true)]
    async fn small_runs_gaps_and_loads_of_others_say_nothing() {
        let (costs, metrics, mut delivered) = delivered([100, 100, 0]);
        let before = Tier::ALL.map(|tier| estimate(&costs, tier));
        sleep(millis(100)).await;
        delivered.block(Tier::Dram, (MIB - 1, MIB), Duration::ZERO);
        sleep(millis(100)).await;
        delivered.block(Tier::Dram, (50 * MIB, 50 * MIB), millis(100));
        sleep(millis(100)).await;
        delivered.gap();
        blocks(&mut delivered, Tier::Nvme, 100, millis(10)).await;
        delivered.finish();
        assert_eq!(Tier::ALL.map(|tier| estimate(&costs, tier)), before);
        assert_eq!(judged(&metrics), [0; 3]);
        blocks(&mut delivered, Tier::Dram, 10, millis(2)).await;
        delivered.finish();
        assert_eq!(estimate(&costs, Tier::Dram), 200);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_planned_waits_until_it_came_or_is_given_up() {
        let (costs, _metrics, mut delivered) = delivered([5, 10, 2]);
        let waiting = |costs: &Costs| {
            let nvme = costs.snapshot().into_iter().find(|cost| cost.tier == Tier::Nvme).unwrap();
            (nvme.queued_bytes / MIB, nvme.in_flight)
        };
        assert_eq!(waiting(&costs), (10, 1));
        blocks(&mut delivered, Tier::Nvme, 4, millis(1)).await;
        assert_eq!(waiting(&costs), (6, 1));
        blocks(&mut delivered, Tier::Nvme, 9, millis(1)).await;
        assert_eq!(waiting(&costs), (0, 0));
        drop(delivered);
        assert_eq!(waiting(&costs), (0, 0));
        let mut load = costs.begin("t", Locality::SameNode, [MIB, 5 * MIB, MIB]);
        load.came(Tier::Dram, 3 * MIB);
        assert_eq!(waiting(&costs), (3, 1), "others have brought it to dram meanwhile");
        load.came(Tier::Dram, 5 * MIB);
        assert_eq!(waiting(&costs), (0, 0));
        drop(load);
        let load = costs.begin("t", Locality::Remote, [0, MIB, 0]);
        assert_eq!(waiting(&costs), (1, 1));
        drop(load);
        assert_eq!(waiting(&costs), (0, 0));
    }
}
