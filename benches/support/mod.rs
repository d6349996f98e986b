//! What the benches share: samples with percentiles, and this process's memory.
#![allow(dead_code, reason = "each bench uses its own part of it")]

use std::{fmt, fs, time::Duration};

use tokio::time::Instant;

/// Durations of one thing, sorted.
#[derive(Debug)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    /// Runs `act` `rounds` times, after a tenth as many to warm up.
    pub(crate) fn of(rounds: usize, mut act: impl FnMut(usize)) -> Self {
        for round in 0..rounds.div_ceil(10) {
            act(round);
        }
        let mut micros: Vec<f64> = (0..rounds)
            .map(|round| {
                let started = Instant::now();
                act(round);
                started.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        micros.sort_by(f64::total_cmp);
        Self(micros)
    }

    /// Samples that were taken elsewhere.
    pub(crate) fn from_durations(durations: &[Duration]) -> Self {
        let mut micros: Vec<f64> = durations.iter().map(|d| d.as_secs_f64() * 1e6).collect();
        micros.sort_by(f64::total_cmp);
        Self(micros)
    }

    /// The value below which `share` (0 to 1) of the samples lie, in microseconds.
    pub(crate) fn at(&self, share: f64) -> f64 {
        let last = self.0.len().saturating_sub(1);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let index = (last as f64 * share).round() as usize;
        self.0.get(index).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Samples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p50 {:.0} us, p99 {:.0} us", self.at(0.5), self.at(0.99))
    }
}

/// Resident memory of this process, in bytes.
pub(crate) fn rss_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap_or_default();
    let kib = line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// CPU seconds that a process has used; 0 for one that does not exist.
pub(crate) fn cpu_seconds(process: &str) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after_name.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    // USER_HZ is 100 on every Linux that this runs on.
    ticks / 100.0
}

/// The middle one.
pub(crate) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
