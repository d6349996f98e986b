//! Sessions: what a client owns lives exactly as long as its session stream.
//!
//! A session owns leases, puts in flight and its event queue. It is ended by dropping the guard that
//! the stream holds, and a stream is dropped however it ends: closed, reset, connection lost, client
//! killed, server draining. The end cancels the session's token, which ends its puts, and ends its
//! leases. There is no other way out, so there is no way to forget one.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::{
    auth::Bearer,
    id::SessionId,
    lease::{LeaseTable, session_ended},
    limits::{PUTS_PER_SESSION_MAX, RETRY_AFTER_COUNT, SESSION_EVENTS_MAX, SESSIONS_MAX},
    metrics::ServerMetrics,
};

/// What a session's client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The node will go away within this time: finish and do not return.
    Draining(Duration),
}

/// One client's session.
#[derive(Debug)]
pub struct Session {
    id: SessionId,
    client: String,
    bearer: Arc<Bearer>,
    opened: Instant,
    ended: CancellationToken,
    events: mpsc::Sender<Event>,
    puts_open: AtomicUsize,
    counters: SessionCounters,
}

/// What a session has done, for its log line.
#[derive(Debug, Default)]
pub struct SessionCounters {
    /// Puts begun.
    pub puts: AtomicU64,
    /// Payload received.
    pub put_bytes: AtomicU64,
    /// Leases granted.
    pub leases: AtomicU64,
}

/// The sessions of one server; clones share them.
pub struct SessionTable<P> {
    shared: Arc<Shared<P>>,
}

struct Shared<P> {
    leases: LeaseTable<P>,
    metrics: ServerMetrics,
    state: Mutex<State>,
    count: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    sessions: HashMap<SessionId, Arc<Session>>,
    draining: bool,
}

/// Keeps a session open; dropping it ends the session and frees everything it owns.
pub struct SessionGuard<P: Send + 'static> {
    shared: Arc<Shared<P>>,
    session: Arc<Session>,
}

/// Counts a put as open.
#[derive(Debug)]
pub struct PutGuard {
    session: Arc<Session>,
}

impl Session {
    /// Its id.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.id
    }

    /// Who opened it.
    #[must_use]
    pub fn bearer(&self) -> &Bearer {
        &self.bearer
    }

    /// Cancelled when the session has ended.
    #[must_use]
    pub fn ended(&self) -> &CancellationToken {
        &self.ended
    }

    /// What it has done.
    #[must_use]
    pub fn counters(&self) -> &SessionCounters {
        &self.counters
    }

    /// Begins a put.
    ///
    /// # Errors
    /// `Exhausted` if too many are open.
    pub fn begin_put(self: &Arc<Self>) -> Result<PutGuard> {
        let open = self.puts_open.fetch_add(1, Ordering::Relaxed);
        let guard = PutGuard { session: Arc::clone(self) };
        if open >= PUTS_PER_SESSION_MAX {
            return Err(Error::new(
                ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT },
                format!("puts: {open} open in this session, {PUTS_PER_SESSION_MAX} allowed"),
            ));
        }
        self.counters.puts.fetch_add(1, Ordering::Relaxed);
        Ok(guard)
    }
}

impl Drop for PutGuard {
    fn drop(&mut self) {
        self.session.puts_open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<P: Send + 'static> SessionTable<P> {
    /// No sessions yet; `leases` are owned by them.
    #[must_use]
    pub fn new(leases: LeaseTable<P>, metrics: ServerMetrics) -> Self {
        let shared =
            Shared { leases, metrics, state: Mutex::default(), count: watch::Sender::new(0) };
        Self { shared: Arc::new(shared) }
    }

    /// Opens a session for `client`, which only its tenant can find, and returns what keeps it open,
    /// with its events.
    ///
    /// # Errors
    /// `Unavailable` while draining, `Exhausted` if there are too many sessions.
    pub fn open(
        &self,
        client: String,
        bearer: Arc<Bearer>,
    ) -> Result<(SessionGuard<P>, mpsc::Receiver<Event>)> {
        let (events, receiver) = mpsc::channel(SESSION_EVENTS_MAX);
        let session = Arc::new(Session {
            id: SessionId::random()?,
            client,
            bearer,
            opened: Instant::now(),
            ended: CancellationToken::new(),
            events,
            puts_open: AtomicUsize::new(0),
            counters: SessionCounters::default(),
        });
        {
            let mut state = self.shared.state.lock();
            if state.draining {
                return Err(draining());
            }
            if state.sessions.len() >= SESSIONS_MAX {
                return Err(Error::new(
                    ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT },
                    format!("sessions: {} open, {SESSIONS_MAX} allowed", state.sessions.len()),
                ));
            }
            state.sessions.insert(session.id, Arc::clone(&session));
            self.shared.leases.begin_session(session.id);
            self.shared.publish(&state);
        }
        self.shared.metrics.sessions_opened.inc();
        let tenant = session.bearer.tenant();
        info!(session = ?session.id, client = session.client, tenant, "session opened");
        Ok((SessionGuard { shared: Arc::clone(&self.shared), session }, receiver))
    }

    /// The open session of this tenant with this id.
    ///
    /// # Errors
    /// `LeaseExpired` if there is none; that of another tenant is none.
    pub fn find(&self, tenant: &str, id: SessionId) -> Result<Arc<Session>> {
        let found = self.shared.state.lock().sessions.get(&id).cloned();
        found.filter(|session| session.bearer.tenant() == tenant).ok_or_else(session_ended)
    }

    /// Number of open sessions of a tenant.
    #[must_use]
    pub fn count_of(&self, tenant: &str) -> usize {
        let state = self.shared.state.lock();
        state.sessions.values().filter(|session| session.bearer.tenant() == tenant).count()
    }

    /// Number of open sessions.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared.state.lock().sessions.len()
    }

    /// Whether [`drain`](Self::drain) was called.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.state.lock().draining
    }

    /// Opens no more sessions and tells the open ones that the node leaves within `grace`.
    pub fn drain(&self, grace: Duration) {
        let mut state = self.shared.state.lock();
        state.draining = true;
        for session in state.sessions.values() {
            if session.events.try_send(Event::Draining(grace)).is_err() {
                info!(session = ?session.id, "client does not read its session, drain not told");
            }
        }
    }

    /// Ends all sessions.
    pub fn end_all(&self) {
        for session in self.shared.state.lock().sessions.values() {
            session.ended.cancel();
        }
    }

    /// Waits until no session is open.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn wait_none(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        if self.shared.count.subscribe().wait_for(|count| *count == 0).await.is_err() {
            tracing::debug!("session count closed");
        }
    }
}

impl<P> Shared<P> {
    fn publish(&self, state: &State) {
        let count = state.sessions.len();
        self.count.send_replace(count);
        self.metrics.sessions.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
}

impl<P: Send + 'static> SessionGuard<P> {
    /// The session.
    #[must_use]
    pub fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl<P: Send + 'static> Drop for SessionGuard<P> {
    fn drop(&mut self) {
        let session = &self.session;
        {
            let mut state = self.shared.state.lock();
            state.sessions.remove(&session.id);
            self.shared.publish(&state);
        }
        session.ended.cancel();
        self.shared.leases.end_session(session.id);
        info!(
            session = ?session.id,
            client = session.client,
            open_ms = session.opened.elapsed().as_millis(),
            puts = session.counters.puts.load(Ordering::Relaxed),
            put_bytes = session.counters.put_bytes.load(Ordering::Relaxed),
            leases = session.counters.leases.load(Ordering::Relaxed),
            "session ended"
        );
    }
}

/// The error of everything that is not begun while the node leaves.
pub(crate) fn draining() -> Error {
    Error::new(ErrorKind::Unavailable, "this node is draining; use another one")
}

impl<P> Clone for SessionTable<P> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<P> fmt::Debug for SessionTable<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.shared.state.lock();
        f.debug_struct("SessionTable")
            .field("sessions", &state.sessions.len())
            .field("draining", &state.draining)
            .finish_non_exhaustive()
    }
}

impl<P: Send + 'static> fmt::Debug for SessionGuard<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionGuard").field("session", &self.session.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
