//! Leases: promises to clients that blocks stay readable until a deadline.
//!
//! A lease owns the pins of its blocks and belongs to one session. It ends when the client releases
//! it, when its deadline passes, or when its session ends, whichever comes first; each of them is
//! idempotent. The end of a lease ends a promise only: whoever is reading the bytes keeps them alive.
//!
//! Bytes are bounded per session and in total. They are reserved before the lookup pins anything, so
//! two lookups at once cannot pass the bound together. A lease is granted only while its session is
//! known here, so that a lookup that overlaps the end of its session leaves nothing.
//!
//! No I/O, no clock but tokio's. `P` stands for the pins, so that all of this is tested without a
//! store. One lock; what leaves the table is given back outside it.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::{sync::Notify, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::{
    config::Period,
    id::{LeaseId, SessionId},
    limits::{LEASES_MAX, LEASES_PER_SESSION_MAX, RETRY_AFTER_COUNT},
    metrics::{LeaseEnd, ServerMetrics},
};

/// What clients may be promised.
#[derive(Debug, Clone, Copy)]
pub struct LeaseLimits {
    /// How long a lease lasts when the client does not say.
    pub ttl_default: Duration,
    /// The longest that it may last without renewal.
    pub ttl_max: Duration,
    /// Bytes under lease in one session.
    pub session_bytes_max: u64,
    /// Bytes under lease in all sessions.
    pub total_bytes_max: u64,
}

/// The leases of one server; clones share them.
pub struct LeaseTable<P> {
    shared: Arc<Shared<P>>,
}

struct Shared<P> {
    limits: LeaseLimits,
    give_back: Box<dyn Fn(P) + Send + Sync>,
    metrics: ServerMetrics,
    /// Told when a deadline became the earliest.
    earlier: Notify,
    state: Mutex<State<P>>,
}

struct State<P> {
    leases: HashMap<LeaseId, Lease<P>>,
    /// The same leases by deadline.
    deadlines: BTreeSet<(Instant, LeaseId)>,
    sessions: HashMap<SessionId, Held>,
    /// Leased bytes of all sessions.
    leased: u64,
    /// Reserved bytes of all sessions.
    reserved: u64,
}

struct Lease<P> {
    session: SessionId,
    deadline: Instant,
    blocks: u32,
    bytes: u64,
    pins: P,
}

#[derive(Default)]
struct Held {
    /// Leased and reserved bytes.
    bytes: u64,
    leases: BTreeSet<LeaseId>,
}

/// A lease as the client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Granted {
    /// Its id.
    pub id: LeaseId,
    /// The first blocks of the lookup that are covered.
    pub blocks: u32,
    /// Their bytes.
    pub bytes: u64,
    /// From now until the promise ends.
    pub ttl: Duration,
}

/// Bytes set aside for a lease that is about to be granted; dropping it gives them back.
pub struct Reservation<P> {
    shared: Arc<Shared<P>>,
    session: SessionId,
    bytes: u64,
}

impl<P: Send + 'static> LeaseTable<P> {
    /// An empty table; `give_back` takes the pins of every lease that ends.
    pub fn new(
        limits: LeaseLimits,
        metrics: ServerMetrics,
        give_back: impl Fn(P) + Send + Sync + 'static,
    ) -> Self {
        let state = State {
            leases: HashMap::new(),
            deadlines: BTreeSet::new(),
            sessions: HashMap::new(),
            leased: 0,
            reserved: 0,
        };
        let shared = Shared {
            limits,
            give_back: Box::new(give_back),
            metrics,
            earlier: Notify::new(),
            state: Mutex::new(state),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The limits.
    #[must_use]
    pub fn limits(&self) -> LeaseLimits {
        self.shared.limits
    }

    /// Number of leases, and bytes leased.
    #[must_use]
    pub fn usage(&self) -> (usize, u64) {
        let state = self.shared.state.lock();
        (state.leases.len(), state.leased)
    }

    /// Checks a requested time to live; 0 takes the default.
    ///
    /// # Errors
    /// `Invalid` if it is over the limit.
    pub fn ttl(&self, field: &str, asked: Duration) -> Result<Duration> {
        let limits = &self.shared.limits;
        if asked.is_zero() {
            return Ok(limits.ttl_default);
        }
        if asked > limits.ttl_max {
            return Err(Error::invalid(format!(
                "{field}: {} given, 1 to {} allowed, 0 takes the default ({})",
                asked.as_millis(),
                limits.ttl_max.as_millis(),
                Period(limits.ttl_default),
            )));
        }
        Ok(asked)
    }

    /// Makes a session known, so that leases can be granted to it.
    pub fn begin_session(&self, session: SessionId) {
        self.shared.state.lock().sessions.entry(session).or_default();
    }

    /// Forgets a session and ends its leases.
    pub fn end_session(&self, session: SessionId) {
        let ended = {
            let mut state = self.shared.state.lock();
            let held = state.sessions.remove(&session).unwrap_or_default();
            held.leases.iter().filter_map(|id| state.take(*id)).collect()
        };
        self.shared.give_back(ended, LeaseEnd::Session);
    }

    /// Sets aside up to `bytes_wanted` for a lease, as much as the bounds leave, perhaps nothing.
    ///
    /// # Errors
    /// `LeaseExpired` if the session has ended, `Exhausted` if there are too many leases.
    pub fn reserve(&self, session: SessionId, bytes_wanted: u64) -> Result<Reservation<P>> {
        let limits = &self.shared.limits;
        let mut state = self.shared.state.lock();
        let total_free = limits.total_bytes_max.saturating_sub(state.leased + state.reserved);
        let leases_count = state.leases.len();
        let Some(held) = state.sessions.get_mut(&session) else { return Err(session_ended()) };
        if leases_count >= LEASES_MAX || held.leases.len() >= LEASES_PER_SESSION_MAX {
            return Err(Error::new(
                ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT },
                format!(
                    "leases: {} held by the session and {leases_count} in all, {LEASES_PER_SESSION_MAX} and {LEASES_MAX} allowed",
                    held.leases.len()
                ),
            ));
        }
        let session_free = limits.session_bytes_max.saturating_sub(held.bytes);
        let bytes = bytes_wanted.min(session_free).min(total_free);
        held.bytes += bytes;
        state.reserved += bytes;
        Ok(Reservation { shared: Arc::clone(&self.shared), session, bytes })
    }

    /// Moves a lease's deadline to `ttl` from now.
    ///
    /// # Errors
    /// `LeaseExpired` if the lease has ended or is another session's.
    pub fn renew(&self, session: SessionId, id: LeaseId, ttl: Duration) -> Result<Granted> {
        let now = Instant::now();
        let deadline = now + ttl;
        let mut state = self.shared.state.lock();
        let State { leases, deadlines, .. } = &mut *state;
        let lease = live(leases.get_mut(&id), session, now)?;
        deadlines.remove(&(lease.deadline, id));
        deadlines.insert((deadline, id));
        lease.deadline = deadline;
        let granted = Granted { id, blocks: lease.blocks, bytes: lease.bytes, ttl };
        self.shared.wake_if_earliest(&state, id);
        Ok(granted)
    }

    /// Succeeds if the lease is alive and the session's.
    ///
    /// # Errors
    /// `LeaseExpired` if the lease has ended or is another session's.
    pub fn check(&self, session: SessionId, id: LeaseId) -> Result<()> {
        let mut state = self.shared.state.lock();
        live(state.leases.get_mut(&id), session, Instant::now()).map(|_| ())
    }

    /// Ends a lease; an unknown or ended one, or another session's, is left as it is.
    pub fn release(&self, session: SessionId, id: LeaseId) {
        let ended = {
            let mut state = self.shared.state.lock();
            match state.leases.get(&id) {
                Some(lease) if lease.session == session => state.take(id),
                _ => None,
            }
        };
        self.shared.give_back(ended.into_iter().collect(), LeaseEnd::Released);
    }

    /// Ends all leases whose deadline has passed; returns how many.
    #[must_use]
    pub fn expire(&self, now: Instant) -> usize {
        let ended: Vec<_> = {
            let mut state = self.shared.state.lock();
            let mut ended = Vec::new();
            while let Some(&(deadline, id)) = state.deadlines.first()
                && deadline <= now
            {
                ended.extend(state.take(id));
            }
            ended
        };
        let count = ended.len();
        self.shared.give_back(ended, LeaseEnd::Expired);
        count
    }

    /// Ends leases when their deadlines pass, until `stop`.
    ///
    /// # Cancel safety
    /// Safe: leases that are due are ended by the next run.
    pub async fn sweep(&self, stop: CancellationToken) {
        loop {
            let next = self.shared.state.lock().deadlines.first().map(|(deadline, _)| *deadline);
            let due = async {
                match next {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.shared.earlier.notified() => {}
                () = due => {
                    let count = self.expire(Instant::now());
                    tracing::debug!(count, "leases expired");
                }
            }
        }
    }
}

impl<P> Reservation<P> {
    /// Bytes set aside.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Turns the reservation into a lease over `pins`, which cover `blocks` of `bytes` together; what
    /// was reserved beyond that is given back.
    ///
    /// # Errors
    /// `LeaseExpired` if the session ended meanwhile; the pins are given back.
    pub fn grant(mut self, pins: P, blocks: u32, bytes: u64, ttl: Duration) -> Result<Granted> {
        debug_assert!(bytes <= self.bytes, "the lookup pins at most what was reserved");
        let id = LeaseId::random()?;
        let deadline = Instant::now() + ttl;
        let shared = Arc::clone(&self.shared);
        let mut state = shared.state.lock();
        let State { sessions, leases, deadlines, leased, reserved } = &mut *state;
        let Some(held) = sessions.get_mut(&self.session) else {
            drop(state);
            (shared.give_back)(pins);
            return Err(session_ended());
        };
        held.leases.insert(id);
        let unused = self.bytes.saturating_sub(bytes);
        held.bytes = held.bytes.saturating_sub(unused);
        *reserved = reserved.saturating_sub(self.bytes);
        *leased = leased.saturating_add(bytes);
        self.bytes = 0;
        let session = self.session;
        leases.insert(id, Lease { session, deadline, blocks, bytes, pins });
        deadlines.insert((deadline, id));
        shared.wake_if_earliest(&state, id);
        shared.publish(&state);
        shared.metrics.leases_granted.inc();
        Ok(Granted { id, blocks, bytes, ttl })
    }
}

impl<P> Drop for Reservation<P> {
    fn drop(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let mut state = self.shared.state.lock();
        state.reserved = state.reserved.saturating_sub(self.bytes);
        if let Some(held) = state.sessions.get_mut(&self.session) {
            held.bytes = held.bytes.saturating_sub(self.bytes);
        }
    }
}

impl<P> Shared<P> {
    /// Counts and gives back what left the table. Never under the lock.
    fn give_back(&self, ended: Vec<Lease<P>>, reason: LeaseEnd) {
        if ended.is_empty() {
            return;
        }
        self.metrics.record_leases_ended(reason, u64::try_from(ended.len()).unwrap_or(u64::MAX));
        for lease in ended {
            (self.give_back)(lease.pins);
        }
        self.publish(&self.state.lock());
    }

    fn publish(&self, state: &State<P>) {
        self.metrics.leases.set(i64::try_from(state.leases.len()).unwrap_or(i64::MAX));
        self.metrics.leased_bytes.set(i64::try_from(state.leased).unwrap_or(i64::MAX));
    }

    fn wake_if_earliest(&self, state: &State<P>, id: LeaseId) {
        if state.deadlines.first().is_some_and(|(_, first)| *first == id) {
            self.earlier.notify_one();
        }
    }
}

impl<P> State<P> {
    /// Takes a lease out of every list.
    fn take(&mut self, id: LeaseId) -> Option<Lease<P>> {
        let lease = self.leases.remove(&id)?;
        self.deadlines.remove(&(lease.deadline, id));
        self.leased = self.leased.saturating_sub(lease.bytes);
        if let Some(held) = self.sessions.get_mut(&lease.session) {
            held.leases.remove(&id);
            held.bytes = held.bytes.saturating_sub(lease.bytes);
        }
        Some(lease)
    }
}

/// The lease, if it is the session's and its deadline has not passed.
fn live<P>(
    lease: Option<&mut Lease<P>>,
    session: SessionId,
    now: Instant,
) -> Result<&mut Lease<P>> {
    match lease {
        Some(lease) if lease.session == session && lease.deadline > now => Ok(lease),
        _ => Err(Error::new(
            ErrorKind::LeaseExpired,
            "lease_id: this lease has ended or never was; do the lookup again",
        )),
    }
}

/// The error of every call that names a session that is not there.
pub(crate) fn session_ended() -> Error {
    Error::new(
        ErrorKind::LeaseExpired,
        "session_id: this session has ended or never was; open a new one",
    )
}

impl<P> Clone for LeaseTable<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P> fmt::Debug for LeaseTable<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("LeaseTable")
            .field("leases", &state.leases.len())
            .field("sessions", &state.sessions.len())
            .field("leased_bytes", &state.leased)
            .field("reserved_bytes", &state.reserved)
            .finish_non_exhaustive()
    }
}

impl<P> fmt::Debug for Reservation<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("session", &self.session)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
