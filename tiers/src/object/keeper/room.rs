//! What of the bucket this node has taken, and may take.
//!
//! An object that nobody needs any more stays for the grace time, and is paid for: it counts. So
//! dropping a pack makes room only later, and packs are dropped ahead of need: as much is kept free as
//! was written within a grace time, which is what will have been dropped and not deleted when the next
//! as much is written. If that was not enough, nothing is packed until something is deleted.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::TEND_EVERY;
use crate::object::{ObjectConfig, names::PackId};

/// Packs that are kept free: one may be on its way, and one is for what is packed again, without which
/// nothing could leave but as a whole.
const FREE_PACKS: u64 = 2;
/// The most of the capacity that is kept free: 1 / this. Who writes more in a grace time than this waits.
const FREE_DIVISOR: u64 = 2;

/// See the [module](self). Bytes are those of objects of packs; the log is not counted.
#[derive(Debug)]
pub(super) struct Room {
    /// 0 for no limit.
    capacity_bytes: u64,
    pack_bytes: u64,
    /// How long it takes, at most, until what was dropped is deleted.
    linger_ms: u64,
    /// Objects of packs that were dropped and are not deleted yet.
    waiting: HashMap<PackId, u64>,
    /// What was packed lately: when, and how many bytes.
    packed: VecDeque<(u64, u64)>,
}

impl Room {
    pub(super) fn new(config: &ObjectConfig) -> Self {
        let linger = config.delete_grace + TEND_EVERY.min(config.delete_grace);
        Self {
            capacity_bytes: config.capacity_bytes,
            pack_bytes: config.pack_bytes,
            linger_ms: millis(linger),
            waiting: HashMap::new(),
            packed: VecDeque::new(),
        }
    }

    /// A start has found these objects of packs that nobody needs.
    pub(super) fn found(&mut self, waiting: impl IntoIterator<Item = (PackId, u64)>) {
        self.waiting = waiting.into_iter().collect();
    }

    pub(super) fn packed(&mut self, bytes: u64, now_unix_ms: u64) {
        self.packed.push_back((now_unix_ms, bytes));
    }

    pub(super) fn dropped(&mut self, pack: PackId, bytes: u64) {
        self.waiting.insert(pack, bytes);
    }

    pub(super) fn deleted(&mut self, packs: &[PackId]) {
        for pack in packs {
            self.waiting.remove(pack);
        }
    }

    /// Whether one more pack may be made, beside live ones of `live_bytes`. The last free place is for
    /// packing `again` what stays of others.
    pub(super) fn has_place(&self, live_bytes: u64, again: bool) -> bool {
        let packs = if again { 1 } else { FREE_PACKS };
        let waiting: u64 = self.waiting.values().sum();
        let needed = live_bytes.saturating_add(waiting).saturating_add(packs * self.pack_bytes);
        self.capacity_bytes == 0 || needed <= self.capacity_bytes
    }

    /// By how much live packs of `live_bytes` are too many.
    pub(super) fn excess(&mut self, live_bytes: u64, now_unix_ms: u64) -> u64 {
        let since = now_unix_ms.saturating_sub(self.linger_ms);
        while self.packed.front().is_some_and(|(at, _)| *at < since) {
            self.packed.pop_front();
        }
        if self.capacity_bytes == 0 {
            return 0;
        }
        let lately: u64 = self.packed.iter().map(|(_, bytes)| bytes).sum();
        let free = lately.saturating_add(FREE_PACKS * self.pack_bytes);
        let free = free.min(self.capacity_bytes / FREE_DIVISOR);
        live_bytes.saturating_sub(self.capacity_bytes - free)
    }
}

/// A time as the clock counts it.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
