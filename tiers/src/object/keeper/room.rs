//! What of the bucket this node has taken, and may take.
//!
//! An object that nobody needs any more stays for the grace time, and is paid for: it counts. So
//! dropping a pack makes room only later, and packs are dropped ahead of need: as much is kept free as
//! will have been dropped and not deleted when as much has been written as within the last grace time.
//! If that was not enough, nothing is packed until something is deleted.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use super::tend_every;
use crate::object::{CAPACITY_PACKS_MIN, ObjectConfig, names::PackId};

/// Packs that are kept free: one may be on its way, and one is for what is packed again, without which
/// nothing could leave but as a whole.
const FREE_PACKS: u64 = 2;
/// What a footer adds to a pack, at most: 1 / this. That of blocks of 1 KiB adds half as much.
const FOOTER_DIVISOR: u64 = 8;
/// The most of the capacity that is kept free: 1 / this. Who writes more in a grace time than this waits.
const FREE_DIVISOR: u64 = 2;

const _: () = assert!(
    FREE_PACKS * (FOOTER_DIVISOR + 1) * FREE_DIVISOR <= CAPACITY_PACKS_MIN * FOOTER_DIVISOR,
    "in the least capacity there is a place for a pack when no more are dropped"
);

#[derive(Debug, Clone, Copy)]
struct Packed {
    at_unix_ms: u64,
    bytes: u64,
    again: bool,
}

/// See the [module](self). Bytes are those of objects of packs; the log is not counted.
#[derive(Debug)]
pub(super) struct Room {
    /// 0 for no limit.
    capacity_bytes: u64,
    /// Bytes of a full pack with its footer.
    pack_bytes: u64,
    /// How long it takes, at most, until what should be dropped is deleted.
    linger_ms: u64,
    /// Objects of packs that were dropped and are not deleted yet.
    waiting: HashMap<PackId, u64>,
    /// What was packed lately.
    packed: VecDeque<Packed>,
}

impl Room {
    pub(super) fn new(config: &ObjectConfig) -> Self {
        // It is looked now and then for what is too much, and for what can be deleted.
        let linger = config.delete_grace + 2 * tend_every(config.delete_grace);
        Self {
            capacity_bytes: config.capacity_bytes,
            pack_bytes: config.pack_bytes + config.pack_bytes / FOOTER_DIVISOR,
            linger_ms: millis(linger),
            waiting: HashMap::new(),
            packed: VecDeque::new(),
        }
    }

    /// A start has found these objects of packs that nobody needs.
    pub(super) fn found(&mut self, waiting: impl IntoIterator<Item = (PackId, u64)>) {
        self.waiting = waiting.into_iter().collect();
    }

    pub(super) fn packed(&mut self, bytes: u64, again: bool, now_unix_ms: u64) {
        self.packed.push_back(Packed { at_unix_ms: now_unix_ms, bytes, again });
    }

    pub(super) fn dropped(&mut self, pack: PackId, bytes: u64) {
        self.waiting.insert(pack, bytes);
    }

    pub(super) fn deleted(&mut self, packs: &[PackId]) {
        for pack in packs {
            self.waiting.remove(pack);
        }
    }

    /// Bytes of objects of packs that were dropped and are not deleted yet.
    pub(super) fn waiting_bytes(&self) -> u64 {
        self.waiting.values().sum()
    }

    /// Whether one more pack may be made, beside live ones of `live_bytes`. The last free place is for
    /// packing `again` what stays of others.
    pub(super) fn has_place(&self, live_bytes: u64, again: bool) -> bool {
        let packs = if again { 1 } else { FREE_PACKS };
        let taken = live_bytes.saturating_add(self.waiting_bytes());
        let needed = taken.saturating_add(packs * self.pack_bytes);
        self.capacity_bytes == 0 || needed <= self.capacity_bytes
    }

    /// By how much live packs of `live_bytes` are too many to pack anything again, whatever is deleted:
    /// only after the capacity was made smaller, or packs larger. 0 if they are not.
    pub(super) fn overfull(&self, live_bytes: u64) -> u64 {
        let over = |packs: u64| {
            let needed = live_bytes.saturating_add(packs * self.pack_bytes);
            needed.saturating_sub(self.capacity_bytes)
        };
        if self.capacity_bytes == 0 || over(1) == 0 { 0 } else { over(FREE_PACKS) }
    }

    /// By how much live packs of `live_bytes` are too many.
    pub(super) fn excess(&mut self, live_bytes: u64, now_unix_ms: u64) -> u64 {
        let since = now_unix_ms.saturating_sub(self.linger_ms);
        while self.packed.front().is_some_and(|packed| packed.at_unix_ms < since) {
            self.packed.pop_front();
        }
        if self.capacity_bytes == 0 {
            return 0;
        }
        let lately = |again: bool| {
            let packed = self.packed.iter().filter(|packed| packed.again == again);
            packed.map(|packed| packed.bytes).sum::<u64>()
        };
        // Each byte is packed again once at most, in the long run: more in a short time must not make
        // more be packed again.
        let dropped = lately(false).saturating_add(lately(true).min(lately(false)));
        let free = dropped.saturating_add(FREE_PACKS * self.pack_bytes);
        let free = free.min(self.capacity_bytes / FREE_DIVISOR);
        live_bytes.saturating_sub(self.capacity_bytes - free)
    }
}

/// A time as the clock counts it.
pub(super) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{
        ObjectAdmission,
        names::{ClusterName, Owner},
    };

    const MIB: u64 = 1 << 20;

    fn room(capacity_bytes: u64) -> (Owner, Room) {
        let owner = Owner { cluster: ClusterName::new("test").unwrap(), ordinal: 0 };
        let config = ObjectConfig {
            owner: owner.clone(),
            holder: "node".to_owned(),
            local: "/none".into(),
            capacity_bytes,
            ttl: None,
            delete_grace: Duration::from_secs(300),
            admission: ObjectAdmission::All,
            pack_bytes: MIB,
        };
        (owner, Room::new(&config))
    }

    #[test]
    fn what_waits_for_its_deletion_counts_and_the_last_place_is_for_packing_again() {
        let (owner, mut room) = room(10 * MIB);
        let pack = |seq| owner.pack(crate::object::names::Seq { epoch: 1, seq });
        // A pack of a MiB, and its footer.
        let place = MIB + MIB / 8;
        assert!(room.has_place(10 * MIB - 2 * place, false));
        assert!(!room.has_place(10 * MIB - 2 * place + 1, false));
        assert!(room.has_place(10 * MIB - place, true));
        assert!(!room.has_place(10 * MIB - place + 1, true));
        room.found([(pack(1), 2 * MIB)]);
        room.dropped(pack(2), MIB);
        assert!(room.has_place(4 * MIB, false) && !room.has_place(5 * MIB, false));
        room.deleted(&[pack(1), pack(2)]);
        assert!(room.has_place(7 * MIB, false));
    }

    #[test]
    fn as_much_is_kept_free_as_is_dropped_within_a_grace_time() {
        let (_, mut room) = room(100 * MIB);
        // Beside two free packs.
        let live = 98 * MIB - MIB / 4;
        let excess = |room: &mut Room, now_s: u64| room.excess(live, now_s * 1000) / MIB;
        assert_eq!(excess(&mut room, 0), 0);
        room.packed(5 * MIB, false, 0);
        room.packed(3 * MIB, true, 10_000);
        assert_eq!(excess(&mut room, 20), 8, "what is packed within the grace time");
        room.packed(30 * MIB, true, 20_000);
        assert_eq!(excess(&mut room, 30), 10, "packing again does not drive itself");
        room.packed(90 * MIB, false, 40_000);
        assert_eq!(excess(&mut room, 50), 47, "half of it at most");
        assert_eq!(excess(&mut room, 500), 0, "long ago");
    }

    #[test]
    fn without_a_capacity_there_is_always_room() {
        let (_, mut room) = room(0);
        room.packed(MIB, false, 0);
        assert!(room.has_place(u64::MAX, false));
        assert_eq!(room.excess(u64::MAX, 0), 0);
    }
}
