//! What clients were told of blocks, and whether it still holds after a kill.

use std::collections::BTreeSet;

use kvstrata_proto::v1::{PutOutcome, RemoveRequest};
use kvstrata_tiers::{
    object::{
        bucket::Bucket,
        names::{ClusterName, Owner},
        rebuild::{Rebuilt, rebuild},
    },
    testing::Draws,
};
use tokio::time::Instant;

use crate::{
    harness::SERVER_WAIT,
    nvme::count_right,
    object::soon,
    wire::{Wire, hashes, payload_of},
};

/// Blocks of one put: 1 MiB.
const BATCH: u64 = 16;
/// Blocks that are removed together now and then: some packs of 1 MiB die of it.
const TOGETHER: u64 = 64;
/// Blocks that were stored last, from which single ones are removed.
const RECENT: u64 = 256;
/// Blocks that were stored last and are on nvme for sure, if the disk is kept.
const KEPT: usize = 64;

/// Whose packs the nodes of these tests make.
pub(super) fn owner() -> Owner {
    Owner { cluster: ClusterName::new("kvstrata").unwrap(), ordinal: 0 }
}

/// What the bucket itself says.
pub(super) async fn named(bucket: &Bucket) -> Rebuilt {
    rebuild(bucket, &owner(), soon()).await.unwrap()
}

/// The blocks in the packs of a log, without those that were removed.
pub(super) fn numbers_of(rebuilt: &Rebuilt) -> BTreeSet<u64> {
    let entries = rebuilt.packs.iter().flat_map(|pack| &pack.footer.entries);
    let number = |hash: &[u8]| u64::from_be_bytes(hash[..8].try_into().unwrap());
    entries.map(|entry| number(entry.key.hash.as_bytes())).collect()
}

/// What was asked for after kills.
#[derive(Debug, Default)]
pub(super) struct Checked {
    /// Blocks that the log named, all of them served unless they were evicted since.
    pub(super) named: usize,
    /// Of them, evicted by the next start.
    pub(super) evicted: usize,
    /// Blocks that were put last, all served.
    pub(super) kept: usize,
    /// Removed blocks, none served.
    pub(super) removed: usize,
}

/// The blocks of a run, by number.
#[derive(Debug)]
pub(super) struct Ledger {
    draws: Draws,
    turns: u64,
    next: u64,
    /// The first that was put since the disk was lost.
    on_disk: u64,
    /// Acknowledged as durable, and not removed.
    stored: BTreeSet<u64>,
    /// Acknowledged as removed.
    removed: BTreeSet<u64>,
    /// Their removal was asked for and not acknowledged.
    unsure: BTreeSet<u64>,
    pub(super) checked: Checked,
}

impl Ledger {
    pub(super) fn new(seed: u64) -> Self {
        let (stored, removed, unsure) = Default::default();
        let (draws, checked) = (Draws::new(seed), Checked::default());
        Self { draws, turns: 0, next: 0, on_disk: 0, stored, removed, unsure, checked }
    }

    /// Nothing that was put until now is on the disk any more.
    pub(super) fn lose_disk(&mut self) {
        self.on_disk = self.next;
    }

    /// Puts, gets and removes, for as long as it is polled.
    pub(super) async fn traffic(&mut self, wire: &mut Wire) -> ! {
        loop {
            self.turns += 1;
            self.put(wire).await;
            for _ in 0..2 {
                let from = self.next.saturating_sub(1 + self.draws.below(RECENT));
                self.remove(wire, from, 1).await;
            }
            if self.turns.is_multiple_of(8) {
                let from = self.draws.below(self.next);
                self.remove(wire, from, TOGETHER).await;
            }
            // What is read from the bucket is copied to nvme again: not too much of it.
            if self.turns.is_multiple_of(4) {
                let from = self.draws.below(self.next);
                count_right(wire, from..from + BATCH).await;
            }
        }
    }

    async fn put(&mut self, wire: &mut Wire) {
        let numbers: Vec<u64> = (self.next..self.next + BATCH).collect();
        self.next += BATCH;
        let outcomes = wire.put_durable(&numbers).await.unwrap();
        let outcomes = numbers.into_iter().zip(outcomes);
        let stored = outcomes.filter(|(_, outcome)| *outcome == PutOutcome::Stored);
        self.stored.extend(stored.map(|(number, _)| number));
    }

    async fn remove(&mut self, wire: &mut Wire, from: u64, count: u64) {
        let numbers: Vec<u64> = self.stored.range(from..from + count).copied().collect();
        if numbers.is_empty() {
            return;
        }
        for number in &numbers {
            self.stored.remove(number);
            self.unsure.insert(*number);
        }
        let (namespace_id, hashes) = (wire.namespace_id.clone(), hashes(numbers.clone()));
        let request = RemoveRequest { namespace_id, hashes };
        // It is refused while the packs are not found yet; then they may come back.
        if wire.client.remove(request).await.is_ok() {
            for number in &numbers {
                self.unsure.remove(number);
                self.removed.insert(*number);
            }
        }
    }

    /// Asks a node that has started for what was `named` while nobody ran.
    pub(super) async fn check(&mut self, wire: &mut Wire, bucket: &Bucket, named: &Rebuilt) {
        let numbers = numbers_of(named);
        let back: Vec<_> = numbers.intersection(&self.removed).collect();
        assert!(back.is_empty(), "removed, and the log names them: {back:?}");
        let right = count_right(wire, self.removed.iter().copied()).await;
        assert_eq!(right, 0, "{:?} were removed", self.wrongly_there(wire).await);
        self.checked.removed += self.removed.len();
        self.check_named(wire, bucket, numbers).await;
        let kept = self.stored.range(self.on_disk..).rev().take(KEPT).copied();
        let kept: Vec<u64> = kept.collect();
        let lost = missing(wire, kept.iter().copied()).await;
        assert!(lost.is_empty(), "acknowledged as durable, and lost: {lost:?}");
        self.checked.kept += kept.len();
    }

    async fn check_named(&mut self, wire: &mut Wire, bucket: &Bucket, numbers: BTreeSet<u64>) {
        let expected = numbers.iter().copied().filter(|number| !self.unsure.contains(number));
        let expected: Vec<u64> = expected.collect();
        let missing = missing(wire, expected.iter().copied()).await;
        let now = numbers_of(&self::named(bucket).await);
        let lost: Vec<_> = missing.iter().filter(|number| now.contains(number)).collect();
        assert!(lost.is_empty(), "the log names them, and they are not served: {lost:?}");
        let evicted = expected.iter().filter(|number| !now.contains(number)).count();
        let bytes = bucket_bytes(bucket).await;
        // Up to half is kept free for what is written meanwhile, and packs leave as a whole.
        assert!(
            evicted == 0 || bytes > super::CAPACITY_BYTES / 4,
            "{evicted} blocks were evicted, of a bucket with {bytes} bytes"
        );
        self.checked.named += expected.len();
        self.checked.evicted += evicted;
    }

    async fn wrongly_there(&self, wire: &mut Wire) -> Vec<u64> {
        let mut there = Vec::new();
        for number in &self.removed {
            if wire.get(&[*number]).await[0].is_some() {
                there.push(*number);
            }
        }
        there
    }
}

/// Bytes of all packs that are in the bucket.
async fn bucket_bytes(bucket: &Bucket) -> u64 {
    let listed = bucket.list(&owner().cluster.packs_prefix(), soon()).await.unwrap();
    listed.iter().map(|object| object.bytes).sum()
}

/// The blocks that cannot be had, however often they are asked for.
async fn missing(wire: &mut Wire, numbers: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let deadline = Instant::now() + SERVER_WAIT / 6;
    let mut missing: Vec<u64> = numbers.into_iter().collect();
    loop {
        let mut still = Vec::new();
        for batch in missing.chunks(64) {
            for (number, block) in batch.iter().zip(wire.get(batch).await) {
                match block {
                    Some(block) => {
                        assert!(block == payload_of(*number, wire.block_bytes), "wrong {number}");
                    }
                    None => still.push(*number),
                }
            }
        }
        if still.is_empty() || Instant::now() > deadline {
            return still;
        }
        missing = still;
    }
}
