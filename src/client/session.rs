//! Sessions: the stream that owns a client's leases and unfinished puts.
//!
//! One background task reads the stream, keeps the member list fresh and notices the end. Dropping
//! the [`Session`] stops the task, which closes the stream, and the server frees what it owned.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use kvstrata_proto::v1::{self, session_event::Event};
use kvstrata_tiers::error::Result;
use tokio::{sync::watch, task::JoinSet};
use tonic::{Request, Streaming};

use super::{Client, connect::within, server::Server, status::broken_contract};

const DOING: &str = "open session";

/// Where a session stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionState {
    /// Leases and puts are owned.
    Open,
    /// The node will go away: finish within the time given and do not return.
    Draining(Duration),
    /// The stream has ended, and what it owned is free; the text says why.
    Ended(String),
}

/// An open session. It ends when this is dropped.
#[derive(Debug)]
pub struct Session {
    id: Bytes,
    state: watch::Receiver<SessionState>,
    /// Dropping the set stops the reader.
    _reader: JoinSet<()>,
}

impl Client {
    /// Opens a session; `name` is for the server's logs and stats, such as `vllm/pod-3`.
    ///
    /// # Errors
    /// Whatever keeps the server from answering in time.
    ///
    /// # Cancel safety
    /// Safe: the server frees a session whose stream is gone.
    pub async fn session(&self, name: &str) -> Result<Session> {
        // What a session owns is there: its client does not move any more.
        *self.settled().lock().await = true;
        let server = self.server();
        server.breaker.admit(DOING)?;
        server.breaker.note(self.open_session(&server, name).await)
    }

    async fn open_session(&self, server: &Arc<Server>, name: &str) -> Result<Session> {
        let deadline = self.options().call_deadline;
        // No gRPC timeout here: it would end the stream.
        let request = Request::new(v1::SessionRequest { client: name.to_owned() });
        let mut wire = server.wire();
        let reply = within(DOING, deadline, wire.session(request)).await?;
        let mut events = reply.into_inner();
        let first = within(DOING, deadline, events.message()).await?;
        let Some(Event::Opened(opened)) = first.and_then(|message| message.event) else {
            return Err(broken_contract(DOING, "the first event is not the session's id"));
        };
        server.learn_members(opened.members);
        let (sender, state) = watch::channel(SessionState::Open);
        let mut reader = JoinSet::new();
        reader.spawn(read_events(Arc::clone(server), events, sender));
        Ok(Session { id: opened.session_id, state, _reader: reader })
    }
}

impl Session {
    /// The id that calls carry.
    #[must_use]
    pub fn id(&self) -> Bytes {
        self.id.clone()
    }

    /// Where the session stands now.
    #[must_use]
    pub fn state(&self) -> SessionState {
        self.state.borrow().clone()
    }

    /// Waits for the next change and returns the new state; an ended session answers at once.
    ///
    /// # Cancel safety
    /// Safe: a change that was not returned is returned by the next call.
    pub async fn changed(&mut self) -> SessionState {
        match self.state.changed().await {
            Ok(()) => self.state.borrow_and_update().clone(),
            Err(_reader_gone) => self.state(),
        }
    }
}

async fn read_events(
    server: Arc<Server>,
    mut events: Streaming<v1::SessionEvent>,
    state: watch::Sender<SessionState>,
) {
    loop {
        let event = match events.message().await {
            Ok(Some(message)) => message.event,
            Ok(None) => break end(&state, "the server closed it"),
            Err(status) => break end(&state, status.message()),
        };
        match event {
            Some(Event::Members(list)) => server.learn_members(Some(list)),
            Some(Event::Draining(draining)) => {
                server.note_drain();
                let grace = Duration::from_millis(draining.grace_ms.into());
                state.send_replace(SessionState::Draining(grace));
            }
            Some(Event::Opened(_)) | None => {}
        }
    }
}

fn end(state: &watch::Sender<SessionState>, why: &str) {
    state.send_replace(SessionState::Ended(why.to_owned()));
}
