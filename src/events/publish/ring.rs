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
    /// Messages, without a gap.
    pub(super) messages: Vec<Arc<[u8]>>,
    /// Some that were asked for are not kept any more. Not so of whoever asks from 0: that one is new, and is
    /// told everything anyway.
    pub(super) incomplete: bool,
}

impl Ring {
    pub(super) fn new(first: u64, limits: RingLimits) -> Self {
        Self { limits, first, next: first, kept: VecDeque::new(), bytes: 0 }
    }

    /// Keeps the message that `make` makes for the next number; returns it.
    pub(super) fn push(&mut self, make: impl FnOnce(u64) -> Vec<u8>) -> Arc<[u8]> {
        let message: Arc<[u8]> = make(self.next).into();
        self.next += 1;
        self.bytes += message.len();
        self.kept.push_back(Arc::clone(&message));
        while self.kept.len() > self.limits.batches
            || (self.bytes > self.limits.bytes && self.kept.len() > 1)
        {
            self.bytes -= self.kept.pop_front().map_or(0, |message| message.len());
        }
        message
    }

    /// All that is kept from this number on.
    pub(super) fn from(&self, number: u64) -> Replay {
        let kept = u64::try_from(self.kept.len()).unwrap_or(u64::MAX);
        let oldest = self.next.saturating_sub(kept);
        let skipped = usize::try_from(number.saturating_sub(oldest)).unwrap_or(usize::MAX);
        Replay {
            messages: self.kept.iter().skip(skipped).cloned().collect(),
            incomplete: number > 0 && number < oldest && oldest > self.first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(ring: &Ring, from: u64) -> (Vec<u8>, bool) {
        let replay = ring.from(from);
        (replay.messages.iter().map(|message| message[0]).collect(), replay.incomplete)
    }

    fn push(ring: &mut Ring, bytes: usize) {
        ring.push(|number| vec![u8::try_from(number).unwrap(); bytes]);
    }

    #[test]
    fn what_is_kept_is_sent_from_where_it_is_asked_for() {
        let mut ring = Ring::new(100, RingLimits { batches: 3, bytes: 100 });
        assert_eq!(numbers(&ring, 0), (vec![], false));
        (0..3).for_each(|_| push(&mut ring, 10));
        assert_eq!(numbers(&ring, 0), (vec![100, 101, 102], false));
        assert_eq!(numbers(&ring, 102), (vec![102], false));
        assert_eq!(numbers(&ring, 103), (vec![], false));
        assert_eq!(numbers(&ring, u64::MAX), (vec![], false));
        push(&mut ring, 10);
        assert_eq!(numbers(&ring, 101), (vec![101, 102, 103], false));
        // What was asked for first is gone: not unnoticed.
        assert_eq!(numbers(&ring, 100), (vec![101, 102, 103], true));
        assert_eq!(numbers(&ring, 99), (vec![101, 102, 103], true));
        assert_eq!(numbers(&ring, 0), (vec![101, 102, 103], false));
        push(&mut ring, 95);
        assert_eq!(numbers(&ring, 103), (vec![104], true));
    }
}
