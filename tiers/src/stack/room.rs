//! Making room: whose memory an incoming block gets.
//!
//! The coldest block of all makes way, but for those of tenants that would have less than is kept for them.
//! A tenant that has what it may have makes way for itself.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::{ContextId, Shared};
use crate::{
    account::{Account, Choice},
    dram::{BlockWriter, Candidate, NoRoom},
    limits::{CONTEXT_SHARE_DIVISOR, INDEX_FREE_DIVISOR, SHARDS},
    map::{Entry, Evicted, Leavers, Map, Shard},
    metrics::EvictReason,
    tier::Tier,
};

/// How often a put may lose a freed slot to another before it is refused.
const TRIES_MAX: usize = 64;
/// How many extents of other sizes may turn out to be pinned, or being written, before we give up.
const RECLAIM_TRIES: usize = 64;

/// When to look whether another size has colder blocks. Looking visits all extents, so it is done
/// once for an extent's worth of evictions; and again at once while it finds something, so that a
/// size that grows does not evict its own blocks meanwhile.
#[derive(Debug, Default)]
pub(crate) struct Cadence {
    evictions: AtomicU32,
    found: AtomicBool,
}

impl Cadence {
    // Relaxed throughout: hints that nothing depends on.
    fn is_due(&self, slots_per_extent: u64) -> bool {
        let evictions = u64::from(self.evictions.fetch_add(1, Ordering::Relaxed));
        self.found.load(Ordering::Relaxed) || evictions.is_multiple_of(slots_per_extent.max(1))
    }

    fn note(&self, found: bool) {
        self.found.store(found, Ordering::Relaxed);
    }
}

impl Shared {
    /// Gets memory for a block of a tenant, evicting others if need be and allowed.
    ///
    /// `None`: everything is pinned or kept for others, or `context` has taken its share from others, or
    /// the tenant has what it may have and all of that is in use.
    pub(crate) fn make_room(
        &self,
        account: &Account,
        (slot_bytes, lengths): (usize, &[u32]),
        context: ContextId,
    ) -> Option<Vec<BlockWriter>> {
        for _ in 0..TRIES_MAX {
            let made = match self.pool.allocate_for(account, slot_bytes, lengths) {
                Ok(writers) => return Some(writers),
                Err(NoRoom::Full) => self.evict_for(account, slot_bytes, context),
                Err(NoRoom::Quota) => self.evict_own(account, slot_bytes, context),
            };
            if !made {
                return None;
            }
        }
        None
    }

    /// Evicts the coldest blocks of a tenant until it may have one of `slot_bytes`. Counts the refusal if
    /// that cannot be.
    fn evict_own(&self, account: &Account, slot_bytes: usize, context: ContextId) -> bool {
        let bytes = u64::try_from(slot_bytes).unwrap_or(u64::MAX);
        let max = account.quota().dram_max;
        let may_take = || {
            let share = max / CONTEXT_SHARE_DIVISOR;
            self.contexts.may_take_of(context, bytes, share)
        };
        while bytes <= max && account.over(bytes) > 0 && may_take() {
            let choice = self.namespaces.accounts().choice(account, bytes).own_only();
            let leavers = Leavers { slot_bytes: None, choice: &choice };
            let coldest = self.map.coldest(leavers);
            if !coldest.is_some_and(|(_, shard)| self.evict_in(shard, leavers, context)) {
                break;
            }
        }
        let fits = bytes <= max && account.over(bytes) == 0;
        if !fits {
            account.refuse(Tier::Dram);
        }
        fits
    }

    /// Makes the map smaller by one block if it is full.
    ///
    /// False: everything is pinned or on a colder tier, which is asked to shed (a copy must not be lost
    /// with its entry); or `context` has taken its share, for which an entry counts as the part of
    /// dram that it stands for.
    pub(crate) fn make_index_room(&self, account: &Account, context: ContextId) -> bool {
        let len = self.map.len();
        if self.index_blocks_max.saturating_sub(len) <= self.index_blocks_max / INDEX_FREE_DIVISOR {
            self.shed(len);
        }
        if len < self.index_blocks_max {
            return true;
        }
        let entries = u64::try_from(self.index_blocks_max).unwrap_or(u64::MAX);
        let share = self.pool.capacity_bytes() / entries;
        if !self.contexts.may_take(context, share) {
            return false;
        }
        let now = self.map.ages(1);
        let choice = self.namespaces.accounts().choice(account, share);
        let leavers = Leavers { slot_bytes: None, choice: &choice };
        let evict = |shard: &mut Shard| shard.evict_entry(leavers, now);
        let evict = |shard| self.map.with_shard(shard, evict).flatten();
        let coldest = self.map.coldest(leavers).and_then(|(_, shard)| evict(shard));
        let Some(evicted) = coldest.or_else(|| (0..SHARDS).find_map(evict)) else {
            self.shed_largest();
            return false;
        };
        self.contexts.took(context, share.max(evicted.slot_bytes()));
        self.settle(&evicted, EvictReason::Index);
        true
    }

    /// Asks a colder tier to shed, if it is their blocks that fill the map. Blocks of dram would
    /// make way before they are copied, while the coldest of all stay.
    fn shed(&self, len: usize) {
        // Relaxed: an estimate.
        let in_dram = usize::try_from(self.dram_blocks.load(Ordering::Relaxed)).unwrap_or(len);
        if len.saturating_sub(in_dram) > self.index_blocks_max / INDEX_FREE_DIVISOR {
            self.shed_largest();
        }
    }

    /// Asks the colder tier with the most copies to shed. An entry leaves the map with its last copy:
    /// if two tiers have the same blocks, they shed in turns, the coldest first.
    fn shed_largest(&self) {
        let largest = self.cold.iter().max_by_key(|store| self.copies(store.tier()));
        if let Some(store) = largest {
            store.shed();
        }
    }

    /// Frees memory for a block of `slot_bytes`: its own size's coldest block, or another size's
    /// coldest extent if that is older.
    fn evict_for(&self, account: &Account, slot_bytes: usize, context: ContextId) -> bool {
        let bytes = u64::try_from(slot_bytes).unwrap_or(u64::MAX);
        if !self.contexts.may_take(context, bytes) {
            return false;
        }
        let choice = self.namespaces.accounts().choice(account, bytes);
        if self.evict_chosen(slot_bytes, &choice, context) {
            return true;
        }
        // Nobody has more than is kept for them, or what they have is in use.
        choice.leaves_own_out() && self.evict_chosen(slot_bytes, &choice.own_only(), context)
    }

    fn evict_chosen(&self, slot_bytes: usize, choice: &Choice<'_>, context: ContextId) -> bool {
        let leavers = Leavers { slot_bytes: Some(slot_bytes), choice };
        let own = self.map.coldest(leavers);
        let slots = self.pool.extent_bytes() / u64::try_from(slot_bytes).unwrap_or(u64::MAX);
        if own.is_none() || (self.pool.classes() > 1 && self.cadence.is_due(slots)) {
            let found =
                self.reclaim_elsewhere((slot_bytes, choice), own.map(|(age, _)| age), context);
            self.cadence.note(found);
            if found {
                return true;
            }
        }
        let Some((_, coldest)) = own else { return false };
        if self.evict_in(coldest, leavers, context) {
            return true;
        }
        // Others were faster, or pinned what was there: any other shard will do.
        (0..SHARDS).any(|shard| self.evict_in(shard, leavers, context))
    }

    fn evict_in(&self, shard: usize, leavers: Leavers<'_>, context: ContextId) -> bool {
        let now = self.map.ages(1);
        let evict = |shard: &mut Shard| shard.evict(leavers, now);
        let evicted = self.map.with_shard(shard, evict).flatten();
        let Some(evicted) = evicted else { return false };
        self.charge(context, &evicted);
        self.settle(&evicted, EvictReason::Capacity);
        true
    }

    /// Empties the coldest extent of the other sizes that can be emptied, if it is colder than
    /// `own_age`.
    fn reclaim_elsewhere(
        &self,
        (slot_bytes, choice): (usize, &Choice<'_>),
        own_age: Option<u64>,
        context: ContextId,
    ) -> bool {
        let mut passed_over = Vec::new();
        // Asking whose an extent is takes longer than not asking.
        let is_bound = choice.is_own_only() || self.namespaces.accounts().has_floors();
        let bound = is_bound.then_some(choice);
        while passed_over.len() < RECLAIM_TRIES {
            let candidate = self.pool.coldest_elsewhere(slot_bytes, &passed_over, bound);
            let Some(candidate) = candidate else { return false };
            if own_age.is_some_and(|age| age <= candidate.mean_age) {
                return false;
            }
            if self.may_empty(&candidate) {
                self.empty(&candidate, choice, context);
                if self.pool.has_idle(slot_bytes) {
                    return true;
                }
            }
            passed_over.push(candidate.extent);
        }
        false
    }

    /// Whether all blocks of an extent may leave. If one may not, the others would leave for nothing.
    fn may_empty(&self, candidate: &Candidate) -> bool {
        candidate.owners.len() >= candidate.slots_used
            && candidate.owners.iter().all(|owner| {
                let (shard, id) = Map::of_owner(*owner);
                let may = |shard: &mut Shard| shard.may_evict_from(id, candidate.extent);
                self.map.with_shard(shard, may).unwrap_or(false)
            })
    }

    fn empty(&self, candidate: &Candidate, choice: &Choice<'_>, context: ContextId) {
        for owner in &candidate.owners {
            let (shard, id) = Map::of_owner(*owner);
            let evict = |shard: &mut Shard| shard.evict_from(id, candidate.extent, choice);
            if let Some(evicted) = self.map.with_shard(shard, evict).flatten() {
                self.charge(context, &evicted);
                self.settle(&evicted, EvictReason::Reclaim);
            }
        }
    }

    /// Counts what `context` has evicted. Its own blocks count, too: leaving gives their memory back
    /// to the account, but it is the context that has it again.
    fn charge(&self, context: ContextId, evicted: &Evicted) {
        self.contexts.took(context, evicted.slot_bytes());
    }

    /// Brings all accounts in order after a block has left dram. Its memory goes back when the
    /// caller drops it.
    pub(crate) fn settle(&self, evicted: &Evicted, reason: EvictReason) {
        if evicted.gone {
            self.map.count(false);
        }
        self.read_or_gone(evicted.context, evicted.slot_bytes());
        let Some(payload) = &evicted.payload else { return };
        self.count_evicted(payload, reason);
        if evicted.gone {
            self.count_gone(evicted.key.namespace, evicted.len);
            match reason {
                EvictReason::Capacity | EvictReason::Reclaim | EvictReason::Index => {
                    self.metrics.evicted_only_copy.inc();
                }
                EvictReason::Removed | EvictReason::Corrupt => {}
            }
        }
    }

    /// A block of `context` was read, or it or what there was of it has left.
    pub(crate) fn read_or_gone(&self, context: ContextId, slot_bytes: u64) {
        if context != 0 {
            self.contexts.let_go(context, slot_bytes);
        }
    }

    /// An entry that was never readable has left the map.
    pub(crate) fn forget_unread(&self, entry: Option<Entry>) {
        if let Some(entry) = entry {
            self.map.count(false);
            self.read_or_gone(entry.context, entry.slot_bytes());
        }
    }
}
