//! What one get may take from others: the same share of dram as a put, for what it loads from colder
//! tiers. Past it blocks are delivered and not kept, so that one long context does not flush dram.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use super::{ContextId, Shared, context::Parent};
use crate::{dram::BlockWriter, limits::CONTEXT_SHARE_DIVISOR, namespace::Namespace};

/// The loads of one get, which share an allowance.
#[derive(Debug)]
pub struct Promotions {
    shared: Arc<Shared>,
    context: ContextId,
    spent: AtomicBool,
    /// What is loaded is not used yet.
    is_ahead: bool,
}

impl Promotions {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self::made(shared, false)
    }

    /// Loads ahead of the use of what they load.
    pub(super) fn ahead(shared: &Arc<Shared>) -> Self {
        Self::made(shared, true)
    }

    fn made(shared: &Arc<Shared>, is_ahead: bool) -> Self {
        let context = shared.contexts.join(Parent::None, None);
        let (shared, spent) = (Arc::clone(shared), AtomicBool::new(false));
        Self { shared, context, spent, is_ahead }
    }

    /// Whether what is loaded is not used yet.
    pub(super) fn is_ahead(&self) -> bool {
        self.is_ahead
    }

    /// Whether the allowance is used up: what is loaded from now on does not stay in dram.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        // Relaxed: a bound that may be exceeded by the loads under way.
        self.spent.load(Ordering::Relaxed)
    }
}

impl Drop for Promotions {
    fn drop(&mut self) {
        self.shared.contexts.let_go(self.context, 0);
    }
}

impl Shared {
    /// Memory to load a block into, and whether it may stay there. Past the allowance it may not, also
    /// where memory is free: that is what the blocks before it have taken and given back.
    pub(super) fn room_to_load(
        &self,
        namespace: &Namespace,
        (slot, len): (usize, u32),
        promotions: Option<&Promotions>,
    ) -> Option<(BlockWriter, bool)> {
        let account = namespace.account();
        let room = |context| self.make_room(account, (slot, &[len]), context);
        let Some(promotions) = promotions.filter(|promotions| !promotions.is_spent()) else {
            return Some((room(0)?.pop()?, promotions.is_none()));
        };
        if let Some(mut writers) = room(promotions.context) {
            return Some((writers.pop()?, true));
        }
        let bytes = u64::try_from(slot).unwrap_or(u64::MAX);
        let share = account.quota().dram_max / CONTEXT_SHARE_DIVISOR;
        if self.contexts.may_take_of(promotions.context, bytes, share) {
            // Everything is pinned, or the tenant has what it may have.
            return None;
        }
        promotions.spent.store(true, Ordering::Relaxed);
        Some((room(0)?.pop()?, false))
    }
}
