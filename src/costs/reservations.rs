//! What is about to be loaded: bytes by tier, until it is loaded, given back, or late.
//!
//! Nothing sweeps: whoever asks first drops what is late.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use tokio::time::Instant;

use crate::{
    id::ReservationId,
    limits::{
        RESERVATION_TTL_DEFAULT, RESERVATION_TTL_MAX, RESERVATIONS_MAX,
        RESERVATIONS_PER_TENANT_MAX, RESERVED_BYTES_MAX, RETRY_AFTER_COUNT,
    },
};

#[derive(Debug)]
struct Reserved {
    tenant: Arc<str>,
    number: u64,
    end: Instant,
    /// Dram, nvme, object.
    left: [u64; 3],
}

#[derive(Debug, Default)]
struct Held {
    /// By the order in which they were made.
    ids: BTreeSet<(u64, ReservationId)>,
    bytes: u64,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Reservations {
    all: HashMap<ReservationId, Reserved>,
    ends: BTreeSet<(Instant, ReservationId)>,
    tenants: HashMap<Arc<str>, Held>,
    total: [u64; 3],
    next: u64,
}

impl Reservations {
    pub(super) fn reserve(
        &mut self,
        tenant: &str,
        bytes: [u64; 3],
        ttl: Duration,
    ) -> Result<(ReservationId, Duration)> {
        let ttl = if ttl.is_zero() { RESERVATION_TTL_DEFAULT } else { ttl };
        if ttl > RESERVATION_TTL_MAX {
            return Err(Error::invalid(format!(
                "ttl_ms: {} given, 1 to {} allowed, 0 takes {}",
                ttl.as_millis(),
                RESERVATION_TTL_MAX.as_millis(),
                RESERVATION_TTL_DEFAULT.as_millis(),
            )));
        }
        self.expire();
        let wanted = sum(bytes);
        let (tenant, held) = match self.tenants.get_key_value(tenant) {
            Some((tenant, held)) => (Arc::clone(tenant), (held.ids.len(), held.bytes)),
            None => (tenant.into(), (0, 0)),
        };
        let (count, held_bytes) = held;
        let is_full = self.all.len() >= RESERVATIONS_MAX || count >= RESERVATIONS_PER_TENANT_MAX;
        if is_full || held_bytes.saturating_add(wanted) > RESERVED_BYTES_MAX {
            return Err(Error::new(
                ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT },
                format!(
                    "reservations: {count} of {held_bytes} bytes stand, {wanted} more are wanted, \
                     {RESERVATIONS_PER_TENANT_MAX} of {RESERVED_BYTES_MAX} allowed"
                ),
            ));
        }
        let (id, end) = (ReservationId::random()?, Instant::now() + ttl);
        let number = self.next;
        self.next += 1;
        let held = self.tenants.entry(Arc::clone(&tenant)).or_default();
        held.ids.insert((number, id));
        held.bytes += wanted;
        self.ends.insert((end, id));
        self.all.insert(id, Reserved { tenant, number, end, left: bytes });
        self.total = combine(self.total, bytes, u64::saturating_add);
        Ok((id, ttl))
    }

    pub(super) fn release(&mut self, tenant: &str, id: ReservationId) {
        if self.all.get(&id).is_some_and(|reserved| *reserved.tenant == *tenant) {
            self.end(id);
        }
    }

    /// A load of a tenant has begun: it takes the place of what was reserved, oldest first.
    pub(super) fn take(&mut self, tenant: &str, mut bytes: [u64; 3]) {
        self.expire();
        let Some(held) = self.tenants.get_mut(tenant) else { return };
        let mut spent = Vec::new();
        for (_, id) in &held.ids {
            if sum(bytes) == 0 {
                break;
            }
            let Some(reserved) = self.all.get_mut(id) else { continue };
            let taken = combine(reserved.left, bytes, u64::min);
            reserved.left = combine(reserved.left, taken, u64::saturating_sub);
            bytes = combine(bytes, taken, u64::saturating_sub);
            self.total = combine(self.total, taken, u64::saturating_sub);
            held.bytes = held.bytes.saturating_sub(sum(taken));
            if sum(reserved.left) == 0 {
                spent.push(*id);
            }
        }
        spent.into_iter().for_each(|id| self.end(id));
    }

    /// How many stand, and their bytes.
    pub(super) fn left(&mut self) -> (usize, [u64; 3]) {
        self.expire();
        (self.all.len(), self.total)
    }

    fn expire(&mut self) {
        while let Some((end, id)) = self.ends.first().copied() {
            if end > Instant::now() {
                return;
            }
            self.end(id);
        }
    }

    fn end(&mut self, id: ReservationId) {
        let Some(Reserved { tenant, number, end, left }) = self.all.remove(&id) else { return };
        self.ends.remove(&(end, id));
        self.total = combine(self.total, left, u64::saturating_sub);
        if let Some(held) = self.tenants.get_mut(&tenant) {
            held.ids.remove(&(number, id));
            held.bytes = held.bytes.saturating_sub(sum(left));
            if held.ids.is_empty() {
                self.tenants.remove(&tenant);
            }
        }
    }
}

fn sum([dram, nvme, object]: [u64; 3]) -> u64 {
    dram.saturating_add(nvme).saturating_add(object)
}

fn combine(a: [u64; 3], b: [u64; 3], with: fn(u64, u64) -> u64) -> [u64; 3] {
    let ([a0, a1, a2], [b0, b1, b2]) = (a, b);
    [with(a0, b0), with(a1, b1), with(a2, b2)]
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn they_end_by_themselves_by_release_and_by_loads_of_their_tenant_only() {
        let mut all = Reservations::default();
        let (first, ttl) = all.reserve("a", [0, 100, 10], Duration::ZERO).unwrap();
        assert_eq!(ttl, RESERVATION_TTL_DEFAULT);
        let (second, _) = all.reserve("a", [5, 50, 0], 30 * SECOND).unwrap();
        all.reserve("b", [0, 1000, 0], 30 * SECOND).unwrap();
        assert_eq!(all.left(), (3, [5, 1150, 10]));
        all.release("b", first);
        assert_eq!(all.left(), (3, [5, 1150, 10]), "it is not its own");
        all.take("a", [0, 120, 0]);
        assert_eq!(all.left(), (3, [5, 1030, 10]), "oldest first");
        all.take("a", [5, 30, 0]);
        assert_eq!(all.left(), (2, [0, 1000, 10]), "the second one is spent");
        all.take("c", [0, 500, 0]);
        all.release("a", second);
        assert_eq!(all.left(), (2, [0, 1000, 10]));
        advance(RESERVATION_TTL_DEFAULT).await;
        assert_eq!(all.left(), (1, [0, 1000, 0]));
        all.take("a", [0, 500, 0]);
        advance(30 * SECOND).await;
        assert_eq!(all.left(), (0, [0; 3]));
        assert!(all.tenants.is_empty() && all.ends.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn they_are_bounded_for_each_tenant() {
        let mut all = Reservations::default();
        let long = all.reserve("a", [0; 3], RESERVATION_TTL_MAX + SECOND).unwrap_err();
        assert!(long.to_string().contains("ttl_ms"), "{long}");
        all.reserve("a", [0, RESERVED_BYTES_MAX, 0], SECOND).unwrap();
        let refused = all.reserve("a", [0, 0, 1], SECOND).unwrap_err();
        assert!(refused.retry_after().is_some(), "{refused}");
        all.reserve("b", [0, 0, 1], SECOND).unwrap();
        advance(SECOND).await;
        for _ in 0..RESERVATIONS_PER_TENANT_MAX {
            all.reserve("a", [1, 0, 0], SECOND).unwrap();
        }
        assert!(all.reserve("a", [1, 0, 0], SECOND).unwrap_err().retry_after().is_some());
        all.reserve("b", [1, 0, 0], SECOND).unwrap();
    }
}
