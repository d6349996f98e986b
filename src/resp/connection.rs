//! One connection: commands, one after the other.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    stack::Pin,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
    time::{Instant, sleep_until, timeout},
};
use tracing::debug;

use super::{
    Resp, get, handshake,
    input::{Input, Word},
    key::Key,
    reply::Replies,
    set,
    space::{Place, Spaces},
};
use crate::{
    auth::Bearer,
    limits::{HELLO_DEADLINE, RESP_KEY_BYTES_MAX},
    metrics::{Door, Op, RespCommand, RespDrop},
    session::{Event, Session, SessionGuard},
};

/// The longest name of a command.
const NAME_BYTES_MAX: usize = 32;
/// Time for the reason of an end to leave.
const LAST_WORD_DEADLINE: Duration = Duration::from_secs(1);

/// A connection that has been accepted.
pub(super) struct Connection<R, W> {
    pub(super) resp: Arc<Resp>,
    pub(super) input: Input<R>,
    pub(super) replies: Replies,
    pub(super) to: W,
    /// Who the client is, once that is known.
    pub(super) bearer: Option<Arc<Bearer>>,
    /// What it calls itself.
    pub(super) name: String,
    /// Its number.
    pub(super) number: u64,
    /// It has said something.
    heard: bool,
    /// What its puts belong to; none before the first one.
    session: Option<(SessionGuard<Vec<Pin>>, mpsc::Receiver<Event>)>,
}

/// Whether a connection goes on behind a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    GoOn,
    Close,
}

/// Serves a connection until it ends.
pub(super) async fn run<R, W>(resp: Arc<Resp>, from: R, to: W)
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let number = resp.connections.fetch_add(1, Ordering::Relaxed) + 1;
    let mut connection = Connection {
        bearer: if resp.gate.asks() { None } else { resp.gate.admit(Door::Resp, None).ok() },
        input: Input::new(from),
        replies: Replies::default(),
        to,
        name: String::new(),
        number,
        heard: false,
        session: None,
        resp,
    };
    let ended = connection.talk().await;
    let Err(error) = ended else { return };
    debug!(%error, "RESP connection ended");
    if error.kind() == ErrorKind::Invalid {
        connection.resp.node.metrics.resp.protocol_errors.inc();
        connection.replies.error(&format!("ERR {error}"));
        let last = async {
            connection.replies.flush(&mut connection.to).await?;
            connection.to.shutdown().await.map_err(|error| Error::invalid(error.to_string()))
        };
        // The peer is told if it listens.
        drop(timeout(LAST_WORD_DEADLINE, last).await);
    }
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Connection<R, W> {
    async fn talk(&mut self) -> Result<()> {
        loop {
            if !self.input.has_more() || self.replies.is_full() {
                self.replies.flush(&mut self.to).await?;
            }
            if !self.begins().await? {
                return Ok(());
            }
            let words = self.input.count().await?;
            if words > 0 && self.command(words).await? == Next::Close {
                return self.replies.flush(&mut self.to).await;
            }
        }
    }

    /// Waits for the next command; false when there will be none.
    async fn begins(&mut self) -> Result<bool> {
        let quiet_at = Instant::now() + HELLO_DEADLINE;
        let is_due = self.resp.prompt && (!self.heard || self.bearer.is_none());
        let Self { input, session, bearer, .. } = self;
        let revoked = async {
            match bearer {
                Some(bearer) => bearer.revoked().cancelled().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = revoked => Ok(false),
            () = leave(session.as_mut()) => Ok(false),
            begins = input.begin() => begins,
            () = sleep_until(quiet_at), if is_due => Ok(false),
        }
    }

    async fn command(&mut self, words: usize) -> Result<Next> {
        let name = self.input.word(NAME_BYTES_MAX).await?.into_bytes().to_ascii_uppercase();
        let arguments = words.saturating_sub(1);
        self.heard = true;
        if self.bearer.is_none() && !handshake::is_open(&name) {
            self.input.skip_words(arguments).await?;
            let refused = self.resp.gate.admit(Door::Resp, None).err();
            debug!(reason = refused.map(|error| error.to_string()), "RESP command refused");
            self.replies.error("NOAUTH Authentication required.");
            return Ok(Next::Close);
        }
        let kind = match name.as_slice() {
            b"SET" => RespCommand::Set,
            b"GET" | b"MGET" => RespCommand::Get,
            b"EXISTS" | b"STRLEN" | b"TTL" | b"PTTL" => RespCommand::Exists,
            b"DEL" | b"UNLINK" => RespCommand::Del,
            _ => RespCommand::Other,
        };
        self.resp.node.metrics.resp.record_command(kind);
        if !has_words(&name, kind, arguments) {
            self.input.skip_words(arguments).await?;
            let name = String::from_utf8_lossy(&name).to_lowercase();
            let text = format!("ERR wrong number of arguments for '{name}' command");
            self.replies.error(&text);
            return Ok(Next::Close);
        }
        if !self.may_ask(kind) {
            return self.put_off(kind, &name, arguments).await;
        }
        match kind {
            RespCommand::Set => set::run(self, arguments).await,
            RespCommand::Get => get::run(self, arguments, name == b"MGET").await,
            RespCommand::Exists => self.ask(arguments, &name).await,
            RespCommand::Del => self.remove(arguments).await,
            RespCommand::Other => self.converse(&name, arguments).await,
        }
    }

    /// Counts a command that is about values; false if the tenant has used up what it may do in a second.
    /// What deletes is never put off: the value would stay.
    fn may_ask(&self, kind: RespCommand) -> bool {
        let counts = match kind {
            RespCommand::Set | RespCommand::Get | RespCommand::Exists => true,
            RespCommand::Del | RespCommand::Other => false,
        };
        let rates = self.bearer.as_ref().map(|bearer| bearer.rates());
        !counts || rates.is_none_or(|rates| rates.request().is_ok())
    }

    /// Answers a command that its tenant may not ask now, as if there were nothing and no room for more.
    async fn put_off(&mut self, kind: RespCommand, name: &[u8], arguments: usize) -> Result<Next> {
        self.input.skip_words(arguments).await?;
        match (kind, name) {
            (RespCommand::Set, _) => {
                self.resp.node.metrics.resp.record_dropped(RespDrop::Rate);
                self.replies.simple("OK");
            }
            (RespCommand::Get, b"MGET") => {
                self.replies.array(arguments);
                (0..arguments).for_each(|_key| self.replies.nil());
            }
            (RespCommand::Get, _) => self.replies.nil(),
            (_, b"TTL" | b"PTTL") => self.replies.integer(-2),
            _ => self.replies.integer(0),
        }
        Ok(Next::GoOn)
    }

    /// EXISTS, STRLEN and TTL.
    async fn ask(&mut self, keys: usize, name: &[u8]) -> Result<Next> {
        let mut answer = 0_i64;
        for _ in 0..keys {
            let length = match self.place().await? {
                Some((place, key)) => self.ask_one(&place, &key),
                None => None,
            };
            match name {
                b"EXISTS" => answer += i64::from(length.is_some()),
                b"STRLEN" => answer = length.and_then(|len| i64::try_from(len).ok()).unwrap_or(0),
                // Whatever expiry was given: none is kept.
                _ => answer = if length.is_some() { -1 } else { -2 },
            }
        }
        self.replies.integer(answer);
        Ok(Next::GoOn)
    }

    /// The length of a value that can be read, as a lookup.
    fn ask_one(&self, place: &Place, key: &Key) -> Option<u64> {
        let length = place.ask(&self.resp.node)?;
        self.is_whole(place, key).then_some(length)
    }

    /// Whether nothing is missing of what a value belongs to.
    pub(super) fn is_whole(&self, place: &Place, key: &Key) -> bool {
        let Some(pair) = &key.pair else { return true };
        let node = &self.resp.node;
        let whole = place.of(pair.twin).len(node).is_some();
        if !whole && place.len(node).is_some() {
            node.metrics.resp.torn_reads.inc();
        }
        whole
    }

    /// DEL and UNLINK.
    async fn remove(&mut self, keys: usize) -> Result<Next> {
        let mut removed = 0;
        for _ in 0..keys {
            let Some((place, _key)) = self.place().await? else { continue };
            let call = self.resp.calls.begin(Op::Remove);
            let outcome = place.remove(&self.resp.node).await;
            call.finish(outcome.as_ref().err());
            removed += i64::from(outcome.unwrap_or(false));
        }
        self.replies.integer(removed);
        Ok(Next::GoOn)
    }

    /// Reads a key; returns where its value would be, if there is anything of its kind.
    pub(super) async fn place(&mut self) -> Result<Option<(Place, Key)>> {
        let Word::Short(key) = self.input.word(RESP_KEY_BYTES_MAX).await? else { return Ok(None) };
        let key = Key::read(&key);
        let place = Spaces::find(&self.resp.node, self.tenant(), &key);
        Ok(place.map(|place| (place, key)))
    }

    /// Whose values the client uses.
    pub(super) fn tenant(&self) -> &str {
        self.bearer.as_ref().map_or("", |bearer| bearer.tenant())
    }

    /// The session of the connection, which is opened if there is none yet.
    ///
    /// # Errors
    /// `Unavailable` while draining, `Exhausted` if there are too many.
    pub(super) fn session(&mut self) -> Result<(Arc<Bearer>, Arc<Session>)> {
        let nobody = || Error::new(ErrorKind::Unauthenticated, "no token was given");
        let bearer = Arc::clone(self.bearer.as_ref().ok_or_else(nobody)?);
        if self.session.is_none() {
            let name = if self.name.is_empty() { "resp".to_owned() } else { self.name.clone() };
            self.session = Some(self.resp.node.sessions.open(name, Arc::clone(&bearer))?);
        }
        let (guard, _events) = self.session.as_ref().ok_or_else(nobody)?;
        Ok((bearer, Arc::clone(guard.session())))
    }

    /// Takes another identity: what belonged to the former one ends.
    pub(super) fn become_bearer(&mut self, bearer: Arc<Bearer>) {
        self.session = None;
        self.bearer = Some(bearer);
    }
}

/// Whether a command that is about values has as many words as it needs.
fn has_words(name: &[u8], kind: RespCommand, arguments: usize) -> bool {
    match kind {
        RespCommand::Set => arguments >= 2,
        RespCommand::Del => arguments >= 1,
        RespCommand::Get | RespCommand::Exists => match name {
            b"MGET" | b"EXISTS" => arguments >= 1,
            _ => arguments == 1,
        },
        RespCommand::Other => true,
    }
}

/// Waits until the node leaves, or the session has been ended.
async fn leave(session: Option<&mut (SessionGuard<Vec<Pin>>, mpsc::Receiver<Event>)>) {
    match session {
        Some((guard, events)) => tokio::select! {
            () = guard.session().ended().cancelled() => {}
            _ = events.recv() => {}
        },
        None => std::future::pending().await,
    }
}
