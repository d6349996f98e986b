//! What happened in the last hour, in columns of ten seconds: lookups by answer, bytes by tier, and what
//! went wrong. Counters come in, differences are kept.

use std::{collections::VecDeque, time::Duration};

use kvstrata_tiers::tier::Tier;
use serde::Serialize;
use tokio::time::Instant;

use crate::{
    limits::CONSOLE_SAMPLES_MAX,
    metrics::{Answer, Door, Missed, PutLabel, ServerMetrics, Unproven},
};

/// Counters of a node, since its start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Totals {
    /// Blocks asked in lookups: dram, nvme, object, pending, miss.
    pub answers: [u64; 5],
    /// Bytes delivered: dram, nvme, object.
    pub bytes: [u64; 3],
    /// Blocks of puts that were refused.
    pub refused: u64,
    /// Blocks of gets that did not come in time.
    pub late: u64,
    /// Requests without a valid token.
    pub unproven: u64,
}

/// What happened within one column.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Sample {
    /// When it ended, in milliseconds before now.
    ago_ms: u64,
    /// How long it was, in milliseconds.
    span_ms: u64,
    /// As [`Totals::answers`].
    answers: [u64; 5],
    /// As [`Totals::bytes`].
    bytes: [u64; 3],
}

/// Columns, oldest first; the last one is still open.
#[derive(Debug)]
pub(super) struct History {
    closed: VecDeque<Column>,
    totals: Totals,
    since: Instant,
}

#[derive(Debug)]
struct Column {
    begun: Instant,
    ended: Instant,
    gained: Totals,
}

impl Totals {
    /// What a node has counted.
    pub(super) fn of(metrics: &ServerMetrics) -> Self {
        let unproven = Door::ALL.iter().flat_map(|door| {
            Unproven::ALL.iter().map(|reason| metrics.trust.unauthenticated(*door, *reason))
        });
        let [pending, miss] = [Answer::Pending, Answer::Miss].map(|of| metrics.lookup_blocks(of));
        let [dram, nvme, object] =
            [Answer::Dram, Answer::Nvme, Answer::Object].map(|of| metrics.lookup_blocks(of));
        Self {
            answers: [dram, nvme, object, pending, miss],
            bytes: Tier::ALL.map(|tier| metrics.delivered(tier.into()).1),
            refused: metrics.put_blocks(PutLabel::Refused),
            late: metrics.missed(Missed::Timeout) + metrics.missed(Missed::Busy),
            unproven: unproven.sum(),
        }
    }

    fn since(self, before: Self) -> Self {
        Self {
            answers: each(self.answers, before.answers, u64::saturating_sub),
            bytes: each(self.bytes, before.bytes, u64::saturating_sub),
            refused: self.refused.saturating_sub(before.refused),
            late: self.late.saturating_sub(before.late),
            unproven: self.unproven.saturating_sub(before.unproven),
        }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            answers: each(self.answers, other.answers, u64::saturating_add),
            bytes: each(self.bytes, other.bytes, u64::saturating_add),
            refused: self.refused.saturating_add(other.refused),
            late: self.late.saturating_add(other.late),
            unproven: self.unproven.saturating_add(other.unproven),
        }
    }
}

fn each<const N: usize>(a: [u64; N], b: [u64; N], with: fn(u64, u64) -> u64) -> [u64; N] {
    let mut b = b.into_iter();
    a.map(|a| with(a, b.next().unwrap_or_default()))
}

impl History {
    /// Begins with what was counted until now.
    pub(super) fn new(totals: Totals, now: Instant) -> Self {
        Self { closed: VecDeque::new(), totals, since: now }
    }

    /// Closes a column.
    pub(super) fn sample(&mut self, totals: Totals, now: Instant) {
        if self.closed.len() >= CONSOLE_SAMPLES_MAX {
            self.closed.pop_front();
        }
        self.closed.push_back(self.open(totals, now));
        self.totals = totals;
        self.since = now;
    }

    /// All columns, with that which is open.
    pub(super) fn samples(&self, totals: Totals, now: Instant) -> Vec<Sample> {
        let open = self.open(totals, now);
        let columns = self.closed.iter().chain([&open]);
        columns.map(|column| column.sample(now)).collect()
    }

    /// What was gained within `window`, to a column.
    pub(super) fn recent(&self, totals: Totals, now: Instant, window: Duration) -> Totals {
        let open = self.open(totals, now);
        let is_recent = |column: &&Column| now.duration_since(column.ended) < window;
        let columns = self.closed.iter().filter(is_recent).chain([&open]);
        columns.fold(Totals::default(), |sum, column| sum.plus(column.gained))
    }

    fn open(&self, totals: Totals, now: Instant) -> Column {
        Column { begun: self.since, ended: now, gained: totals.since(self.totals) }
    }
}

impl Column {
    fn sample(&self, now: Instant) -> Sample {
        let millis = |period: Duration| u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        Sample {
            ago_ms: millis(now.duration_since(self.ended)),
            span_ms: millis(self.ended.duration_since(self.begun)),
            answers: self.gained.answers,
            bytes: self.gained.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::CONSOLE_SAMPLE_INTERVAL;

    fn totals(number: u64) -> Totals {
        Totals {
            answers: [number, 0, 0, 0, 2 * number],
            bytes: [0, 10 * number, 0],
            refused: number,
            late: 0,
            unproven: 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn columns_have_what_was_gained_and_the_open_one_what_has_been_so_far() {
        let mut history = History::new(totals(100), Instant::now());
        tokio::time::advance(CONSOLE_SAMPLE_INTERVAL).await;
        history.sample(totals(103), Instant::now());
        tokio::time::advance(Duration::from_secs(4)).await;
        let samples = history.samples(totals(104), Instant::now());
        let [closed, open] = samples.as_slice() else { panic!("{samples:?}") };
        assert_eq!((closed.answers, closed.bytes), ([3, 0, 0, 0, 6], [0, 30, 0]));
        assert_eq!((closed.ago_ms, closed.span_ms), (4000, 10_000));
        assert_eq!((open.answers, open.ago_ms, open.span_ms), ([1, 0, 0, 0, 2], 0, 4000));
    }

    #[tokio::test(start_paused = true)]
    async fn an_hour_is_kept_and_what_is_recent_is_told_apart() {
        let mut history = History::new(Totals::default(), Instant::now());
        for number in 1..=CONSOLE_SAMPLES_MAX as u64 + 50 {
            tokio::time::advance(CONSOLE_SAMPLE_INTERVAL).await;
            history.sample(totals(number), Instant::now());
        }
        let now = Instant::now();
        let last = totals(CONSOLE_SAMPLES_MAX as u64 + 50);
        assert_eq!(history.samples(last, now).len(), CONSOLE_SAMPLES_MAX + 1);
        assert_eq!(history.recent(last, now, Duration::from_secs(60)).refused, 6);
        let more = Totals { refused: last.refused + 7, ..last };
        assert_eq!(history.recent(more, now, Duration::from_secs(60)).refused, 13);
    }
}
