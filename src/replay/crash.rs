//! When a replay kills its server, and which blocks it removes on purpose.
//!
//! Everything here follows from a seed and from positions in the trace, so that a run can be
//! repeated: the same seed kills after the same requests and removes the same blocks. At which
//! instant within a request the kill lands depends on the machine.

use std::{ops::RangeInclusive, str::FromStr, time::Duration};

use kvstrata_tiers::error::{Error, Result};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// The most requests between two kills that can be asked for.
const EVERY_MAX: u64 = 1_000_000_000;
/// The kill comes within this many times the mean time between two requests, after the last of
/// those it waits for: requests are under way then, at any stage.
const SPREAD: f64 = 2.0;
/// The share of the starts after a kill that are killed too: what a server does then must be as safe
/// as everything else it does.
const INTERRUPT_SHARE: f64 = 0.2;
/// No start takes less than this, so that a first one is interrupted at a sensible moment.
const START_MIN: Duration = Duration::from_millis(5);
/// No kill waits longer than this for its moment.
const SPREAD_MAX: Duration = Duration::from_millis(500);

/// How many requests lie between two kills: a number, or a range to choose from each time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Every(RangeInclusive<u64>);

impl FromStr for Every {
    type Err = Error;

    /// `200`, or `50..400` with both ends included.
    fn from_str(text: &str) -> Result<Self> {
        let (first, last) = text.split_once("..").unwrap_or((text, text));
        match (first.parse(), last.parse()) {
            (Ok(first), Ok(last)) if 1 <= first && first <= last && last <= EVERY_MAX => {
                Ok(Self(first..=last))
            }
            _ => Err(Error::invalid(format!(
                "{text:?} given, a number such as 200 or a range such as 50..400 allowed, 1 to \
                 {EVERY_MAX}"
            ))),
        }
    }
}

/// How to disturb a server.
#[derive(Debug, Clone)]
pub struct CrashOptions {
    /// Requests between two kills.
    pub every: Every,
    /// What all choices follow from.
    pub seed: u64,
    /// Share of the requests after which one of their blocks is removed, 0 to 1.
    pub remove_share: f64,
}

/// One kill to come.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Kill {
    /// Requests to wait for.
    pub(super) after_requests: u64,
    /// When in the time after that, 0 to 1.
    moment: f64,
    /// When in the time that a start takes the next start is killed too, 0 to 1; if it is.
    interrupt: Option<f64>,
}

impl Kill {
    /// How long to wait after the last request, if one is done every `mean`.
    pub(super) fn delay(&self, mean: Duration) -> Duration {
        mean.mul_f64(SPREAD).min(SPREAD_MAX).mul_f64(self.moment)
    }

    /// After what time the next start is killed too, if it is and starts take `usual`.
    pub(super) fn interrupt(&self, usual: Duration) -> Option<Duration> {
        self.interrupt.map(|moment| usual.max(START_MIN).mul_f64(moment))
    }
}

/// All choices that have an order.
#[derive(Debug)]
pub(super) struct Schedule {
    every: RangeInclusive<u64>,
    random: ChaCha8Rng,
}

impl Schedule {
    pub(super) fn new(options: &CrashOptions) -> Self {
        let random = ChaCha8Rng::seed_from_u64(options.seed);
        Self { every: options.every.0.clone(), random }
    }

    /// The next kill.
    pub(super) fn next(&mut self) -> Kill {
        let after_requests = self.random.random_range(self.every.clone());
        let moment = self.random.random();
        let interrupts = self.random.random::<f64>() < INTERRUPT_SHARE;
        let interrupt = interrupts.then(|| self.random.random());
        Kill { after_requests, moment, interrupt }
    }

    /// At most `count` of `blocks`, chosen evenly.
    pub(super) fn sample(&mut self, mut blocks: Vec<u32>, count: usize) -> Vec<u32> {
        let mut chosen = Vec::with_capacity(count.min(blocks.len()));
        while chosen.len() < count && !blocks.is_empty() {
            chosen.push(blocks.swap_remove(self.random.random_range(0..blocks.len())));
        }
        chosen
    }
}

/// Which blocks are removed on purpose. Not part of the [`Schedule`], because requests of several
/// clients have no order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Removals {
    seed: u64,
    share: f64,
}

impl Removals {
    pub(super) fn new(options: &CrashOptions) -> Self {
        Self { seed: options.seed, share: options.remove_share }
    }

    /// Which of its `blocks` the request at `position` removes, if any.
    pub(super) fn after(&self, position: usize, blocks: usize) -> Option<usize> {
        let mut random = ChaCha8Rng::seed_from_u64(xxh3_64_with_seed(
            &(position as u64).to_le_bytes(),
            self.seed,
        ));
        let removes = random.random::<f64>() < self.share && blocks > 0;
        removes.then(|| random.random_range(0..blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(every: &str, seed: u64, remove_share: f64) -> CrashOptions {
        CrashOptions { every: every.parse().unwrap(), seed, remove_share }
    }

    #[test]
    fn numbers_and_ranges_are_read_and_nothing_else() {
        assert_eq!("200".parse::<Every>().unwrap(), Every(200..=200));
        assert_eq!("50..400".parse::<Every>().unwrap(), Every(50..=400));
        for text in ["0", "", "5..4", "0..4", "..", "1..", "-1", "1...2", "soon", "2000000000"] {
            let refused = text.parse::<Every>().unwrap_err().to_string();
            assert!(refused.contains("50..400"), "{refused}");
        }
    }

    #[test]
    fn a_seed_gives_the_same_kills_and_another_one_others() {
        let kills = |seed| {
            let mut schedule = Schedule::new(&options("50..400", seed, 0.0));
            (0..100).map(|_| schedule.next()).collect::<Vec<_>>()
        };
        assert_eq!(kills(1), kills(1));
        assert_ne!(kills(1), kills(2));
        assert!(kills(3).iter().all(|kill| (50..=400).contains(&kill.after_requests)));
        let early = kills(4).iter().filter(|kill| kill.moment < 0.5).count();
        assert!((30..70).contains(&early), "{early} of 100 in the first half");
        let interrupts = kills(5).iter().filter_map(|kill| kill.interrupt(Duration::ZERO)).count();
        assert!((8..35).contains(&interrupts), "{interrupts} of 100 starts interrupted");
        let mut fixed = Schedule::new(&options("7", 1, 0.0));
        assert!((0..10).all(|_| fixed.next().after_requests == 7));
    }

    #[test]
    fn a_kill_lands_within_two_requests() {
        let delay = |moment, mean| Kill { after_requests: 1, moment, interrupt: None }.delay(mean);
        assert_eq!(delay(0.5, Duration::from_millis(10)), Duration::from_millis(10));
        assert_eq!(delay(0.0, Duration::from_millis(10)), Duration::ZERO);
        assert_eq!(delay(1.0, Duration::from_secs(10)), SPREAD_MAX);
    }

    #[test]
    fn removals_are_as_frequent_as_asked_and_do_not_depend_on_order() {
        let removals = Removals::new(&options("1", 6, 0.1));
        let removed: Vec<_> = (0..10_000).filter_map(|at| removals.after(at, 8)).collect();
        assert!((900..1100).contains(&removed.len()), "{} of 10,000", removed.len());
        assert!((0..8).all(|block| removed.contains(&block)));
        assert_eq!(removals.after(17, 8), removals.after(17, 8));
        assert!((0..1000).all(|at| removals.after(at, 0).is_none()));
        let none = Removals::new(&options("1", 5, 0.0));
        assert!((0..1000).all(|at| none.after(at, 8).is_none()));
    }

    #[test]
    fn a_sample_has_each_block_once() {
        let mut schedule = Schedule::new(&options("1", 1, 0.0));
        let mut sample = schedule.sample((0..100).collect(), 10);
        sample.sort_unstable();
        sample.dedup();
        assert_eq!(sample.len(), 10);
        assert_eq!(schedule.sample(vec![7], 10), [7]);
    }
}
