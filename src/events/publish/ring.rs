//! The last batches, for those who missed some, and the numbers that all of them get.
//!
//! Numbers only grow, over restarts too: a router drops what has a number that it has seen. So they begin with
//! the time. Whoever asks from before the first one, as new routers do, asks for all there is.

use std::{collections::VecDeque, sync::Arc};

/// Batches that are kept, and their bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingLimits {
    pub(super) batches: usize,
    pub(super) bytes: usize,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Ring {
    limits: RingLimits,
    /// The number of the first batch of this process.
    first: u64,
    next: u64,
    kept: VecDeque<Arc<[u8]>>,
    bytes: usize,
}

/// What is sent again.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Replay {
    /// Batches with their numbers, without a gap.
    pub(super) batches: Vec<(u64, Arc<[u8]>)>,
    /// Some that were asked for are not kept any more.
    pub(super) incomplete: bool,
}

impl Ring {
    pub(super) fn new(first: u64, limits: RingLimits) -> Self {
        Self { limits, first, next: first, kept: VecDeque::new(), bytes: 0 }
    }

    /// Keeps a batch; returns its number.
    pub(super) fn push(&mut self, payload: Arc<[u8]>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.bytes += payload.len();
        self.kept.push_back(payload);
        while self.kept.len() > self.limits.batches
            || (self.bytes > self.limits.bytes && self.kept.len() > 1)
        {
            self.bytes -= self.kept.pop_front().map_or(0, |payload| payload.len());
        }
        number
    }

    /// All that is kept from this number on.
    pub(super) fn from(&self, number: u64) -> Replay {
        let kept = u64::try_from(self.kept.len()).unwrap_or(u64::MAX);
        let oldest = self.next.saturating_sub(kept);
        let asked = number.max(self.first);
        let skipped = usize::try_from(asked.saturating_sub(oldest)).unwrap_or(usize::MAX);
        let batches = (oldest..).zip(&self.kept).skip(skipped);
        Replay {
            batches: batches.map(|(number, payload)| (number, Arc::clone(payload))).collect(),
            incomplete: asked < oldest,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(ring: &Ring, from: u64) -> (Vec<u64>, bool) {
        let replay = ring.from(from);
        (replay.batches.into_iter().map(|(number, _)| number).collect(), replay.incomplete)
    }

    #[test]
    fn what_is_kept_is_sent_from_where_it_is_asked_for() {
        let mut ring = Ring::new(100, RingLimits { batches: 3, bytes: 100 });
        assert_eq!(numbers(&ring, 0), (vec![], false));
        for number in 100..103 {
            assert_eq!(ring.push(Arc::from([0; 10])), number);
        }
        assert_eq!(numbers(&ring, 0), (vec![100, 101, 102], false));
        assert_eq!(numbers(&ring, 102), (vec![102], false));
        assert_eq!(numbers(&ring, 103), (vec![], false));
        assert_eq!(numbers(&ring, u64::MAX), (vec![], false));
        ring.push(Arc::from([0; 10]));
        assert_eq!(numbers(&ring, 101), (vec![101, 102, 103], false));
        // What was asked for first is gone: not unnoticed.
        assert_eq!(numbers(&ring, 0), (vec![101, 102, 103], true));
        ring.push(Arc::from([0; 95]));
        assert_eq!(numbers(&ring, 0), (vec![104], true));
    }
}
