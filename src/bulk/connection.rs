//! One connection: hello, then a reader and a writer side by side until one of them ends.

use std::{sync::Arc, time::Duration};

use kvstrata_tiers::{
    error::{Error, ErrorKind, Result},
    stack::PartBytes,
};
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    time::{Instant, sleep_until, timeout, timeout_at},
};
use tracing::debug;

use super::{
    Bulk,
    body::{Get, Offer, Place, read_credit},
    frame::{Broken, Header, Kind, bare},
    get::{self, Sending, cancelled},
    hello::{Greeted, greet},
    input::{Input, lost},
    lane::Lane,
    output::Output,
    put::{self, OpenPut, next_durable},
    refused,
    shared::Sharing,
    shared_body::{BY_PLACE, DAMAGED, HAS_REGIONS, Staged, read_number},
    writer::Writer,
};
use crate::{
    auth::Bearer,
    costs::Via,
    flow::GivenUp,
    limits::{BULK_BODY_SMALL_BYTES, BULK_IDLE_MAX, BULK_REQUESTS_MAX, RETRY_AFTER_COUNT},
    metrics::Op,
    session::Session,
    shm::socket::Files,
};

/// Short answers that wait to be written; then the reader waits, too.
const NOTES_MAX: usize = 64;
/// Time for the reason of an end to leave.
const LAST_WORD_DEADLINE: Duration = Duration::from_secs(1);

/// Serves a connection until it ends.
pub(super) async fn run<R, W>(
    bulk: Arc<Bulk>,
    from: R,
    mut to: W,
    (via, files): (Via, Option<Arc<Files>>),
) where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut out = Output::default();
    let ended = talk(&bulk, (from, via, files), &mut to, &mut out).await;
    let Err(error) = ended else { return };
    debug!(%error, "bulk connection ended");
    // Within a frame there is no place for a reason.
    if out.is_empty() {
        let mut frame = Vec::new();
        refused(&error).push(&mut frame, 0);
        let last = async {
            to.write_all(&frame).await?;
            to.shutdown().await
        };
        // The peer is told if it listens.
        drop(timeout(LAST_WORD_DEADLINE, last).await);
    }
}

async fn talk<R, W>(
    bulk: &Arc<Bulk>,
    (from, via, files): (R, Via, Option<Arc<Files>>),
    to: &mut W,
    out: &mut Output<PartBytes>,
) -> Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let mut input = Input::new(from);
    let greeted = greet(bulk, &mut input, to).await?;
    // In memory of its own, which whoever never says hello has not.
    Box::pin(converse(bulk, greeted, (input, via, files), to, out)).await
}

/// Answers a peer that has said hello.
async fn converse<R, W>(
    bulk: &Arc<Bulk>,
    Greeted { bearer, session, credit }: Greeted,
    (input, via, files): (Input<R>, Via, Option<Arc<Files>>),
    to: &mut W,
    out: &mut Output<PartBytes>,
) -> Result<()>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin,
{
    let lane = Arc::new(Lane::new(credit));
    let (gets_in, gets) = mpsc::channel(BULK_REQUESTS_MAX);
    let (notes_in, notes) = mpsc::channel(NOTES_MAX);
    let reader = Reader {
        bulk: Arc::clone(bulk),
        bearer,
        session,
        input,
        lane: Arc::clone(&lane),
        gets: gets_in,
        notes: notes_in,
        puts: Vec::new(),
        via,
        sharing: Sharing::new(files),
        heard: Instant::now(),
    };
    let mut writing = std::pin::pin!(Writer { lane, gets, notes }.run(out, to));
    tokio::select! {
        biased;
        read = reader.run() => read?,
        written = &mut writing => return written,
    }
    // A peer that asks no more may still read.
    writing.await
}

/// The reading half of a connection.
struct Reader<R> {
    bulk: Arc<Bulk>,
    bearer: Arc<Bearer>,
    session: Option<Arc<Session>>,
    input: Input<R>,
    lane: Arc<Lane>,
    gets: mpsc::Sender<Sending>,
    notes: mpsc::Sender<Vec<u8>>,
    puts: Vec<OpenPut>,
    via: Via,
    sharing: Sharing,
    /// When the latest frame came.
    heard: Instant,
}

/// What a reader goes on with.
enum Event {
    Frame(Header),
    /// Nvme has given results to the put at this place.
    Durable(usize),
    /// Nothing was heard for long.
    Quiet,
    /// The peer asks no more.
    Closed,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Takes requests until the peer asks no more.
    async fn run(mut self) -> Result<()> {
        loop {
            match self.event().await? {
                Event::Frame(header) => {
                    self.take(&header).await?;
                    self.heard = Instant::now();
                }
                Event::Durable(at) => self.answer(at).await?,
                Event::Quiet => self.quiet().await?,
                Event::Closed => return Ok(()),
            }
        }
    }

    async fn event(&mut self) -> Result<Event> {
        let reads = !self.puts.iter().any(OpenPut::is_full);
        let silent_at = self.puts.iter().filter_map(|put| put.silent_at(reads)).min();
        let quiet_at = silent_at.unwrap_or(self.heard + BULK_IDLE_MAX);
        let Self { input, puts, session, bearer, .. } = self;
        tokio::select! {
            biased;
            () = ended(session.as_deref()) => Err(GivenUp::SessionEnded.error()),
            () = bearer.revoked().cancelled() => Err(revoked()),
            at = next_durable(puts) => Ok(Event::Durable(at)),
            header = input.header(), if reads => Ok(header?.map_or(Event::Closed, Event::Frame)),
            () = sleep_until(quiet_at) => Ok(Event::Quiet),
        }
    }

    /// Gives up the puts that were not heard of, or a connection that nobody uses.
    async fn quiet(&mut self) -> Result<()> {
        let now = Instant::now();
        let silent = |put: &OpenPut| put.silent_at(true).is_some_and(|at| at <= now);
        let silent = self.puts.iter().position(silent);
        let complete = silent.and_then(|at| self.puts.get(at)).is_some_and(OpenPut::is_complete);
        match silent {
            // Nothing waits for a put that is complete; a client may be slow to finish it.
            Some(at) if complete => return self.finish(at).await,
            Some(at) => return self.refuse_put(at, &GivenUp::Silence.error()).await,
            None => {}
        }
        if self.lane.is_idle() && now >= self.heard + BULK_IDLE_MAX {
            let text = format!("no request within {} s", BULK_IDLE_MAX.as_secs());
            return Err(Error::new(ErrorKind::Timeout, text));
        }
        self.heard = now;
        Ok(())
    }

    async fn take(&mut self, header: &Header) -> Result<()> {
        match header.kind {
            Kind::Data => self.data(header).await,
            Kind::Staged => self.staged(header).await,
            Kind::Map => self.map(header).await,
            Kind::Release => {
                let through = self.input.fixed(header).await?;
                let release = (read_number(through), header.flags & DAMAGED != 0);
                self.sharing.release(&self.bulk.node.stack, release)
            }
            Kind::Credit => {
                let body = self.input.body(header).await?;
                self.lane.add_credit(read_credit(body)?);
                Ok(())
            }
            Kind::Get => self.get(header).await,
            Kind::Offer => self.offer(header).await,
            Kind::Finish => {
                self.input.body(header).await?;
                match self.put_of(header.request) {
                    Some(at) => self.finish(at).await,
                    // It was refused meanwhile.
                    None => Ok(()),
                }
            }
            Kind::Cancel => {
                self.input.body(header).await?;
                self.lane.cancel(header.request);
                match self.put_of(header.request) {
                    Some(at) => self.refuse_put(at, &cancelled()).await,
                    None => Ok(()),
                }
            }
            Kind::Hello
            | Kind::Welcome
            | Kind::Block
            | Kind::Miss
            | Kind::End
            | Kind::Want
            | Kind::Results
            | Kind::Refused
            | Kind::Arena
            | Kind::Pinned
            | Kind::Taken => Err(Broken::Unexpected(header.kind).into()),
        }
    }

    async fn get(&mut self, header: &Header) -> Result<()> {
        let room = self.room(header).await?;
        let get = Get::read(self.input.body(header).await?)?;
        let Some(token) = self.lane.begin(header.request)? else {
            return self.note_refused(header.request, &too_many()).await;
        };
        let call = self.bulk.calls.begin(Op::Get);
        let session = self.session.as_ref().map(|session| session.id());
        let pins = self.sharing.pins().filter(|_| header.flags & BY_PLACE != 0);
        let via = if pins.is_some() { Via::SharedMemory } else { self.via };
        let begin = || get::begin(&self.bulk.node, &self.bearer, (session, via), header, get);
        match self.bearer.rates().request().and_then(|()| begin()) {
            Ok(flow) => {
                let sending = Sending::new((header.request, token), call, flow, room, pins);
                self.gets.send(sending).await.map_err(|_closed| gone())
            }
            Err(error) => {
                self.lane.end(header.request);
                call.finish(Some(&error));
                self.note_refused(header.request, &error).await
            }
        }
    }

    async fn offer(&mut self, header: &Header) -> Result<()> {
        let room = self.room(header).await?;
        let offer = Offer::read(self.input.body(header).await?)?;
        if self.lane.begin(header.request)?.is_none() {
            return self.note_refused(header.request, &too_many()).await;
        }
        let call = self.bulk.calls.begin(Op::Put);
        let session = self.session.as_ref().map(|session| session.id());
        let open = || put::open(&self.bulk.node, &self.bearer, session, header, &offer);
        match self.bearer.rates().request().and_then(|()| open()) {
            Ok(opened) => {
                let (put, answers) = OpenPut::new(header.request, opened, call, room);
                self.puts.push(put);
                self.note(answers).await
            }
            Err(error) => {
                self.lane.end(header.request);
                call.finish(Some(&error));
                self.note_refused(header.request, &error).await
            }
        }
    }

    async fn data(&mut self, header: &Header) -> Result<()> {
        let place = Place::read(&self.input.fixed(header).await?);
        let at = self.put_of(header.request);
        let (left, stored) = match at.and_then(|at| self.puts.get_mut(at)) {
            Some(put) => put.take(place, header.payload_bytes, &mut self.input).await?,
            // It was refused meanwhile.
            None => (header.payload_bytes, Ok(())),
        };
        self.input.skip(usize::try_from(left).unwrap_or(usize::MAX)).await?;
        match (at, stored) {
            (Some(at), Ok(())) => self.answer(at).await,
            (Some(at), Err(error)) => self.refuse_put(at, &error).await,
            (None, _) => Ok(()),
        }
    }

    async fn map(&mut self, header: &Header) -> Result<()> {
        let staging_bytes = read_number(self.input.fixed(header).await?);
        let has_regions = header.flags & HAS_REGIONS != 0;
        match self.sharing.begin(&self.bulk, staging_bytes, has_regions) {
            Ok(regions) => {
                let mut frame = Vec::new();
                regions.push(&mut frame, header.request);
                self.note(frame).await
            }
            Err(error) => self.note_refused(header.request, &error).await,
        }
    }

    async fn staged(&mut self, header: &Header) -> Result<()> {
        let staged = Staged::read(&self.input.fixed(header).await?);
        let at = self.put_of(header.request);
        let stored = match at.and_then(|at| self.puts.get_mut(at)) {
            Some(put) => self.sharing.store(put, staged),
            // It was refused meanwhile.
            None => Ok(()),
        };
        self.note(bare(Kind::Taken, header.request)).await?;
        match (at, stored) {
            (Some(at), Ok(())) => self.answer(at).await,
            (Some(at), Err(error)) => self.refuse_put(at, &error).await,
            (None, _) => Ok(()),
        }
    }

    async fn finish(&mut self, at: usize) -> Result<()> {
        match self.puts.get_mut(at).map(OpenPut::finish) {
            Some(Ok(())) => self.answer(at).await,
            Some(Err(error)) => self.refuse_put(at, &error).await,
            None => Ok(()),
        }
    }

    /// Tells what is due of a put, and ends it if that is all.
    async fn answer(&mut self, at: usize) -> Result<()> {
        let Some(put) = self.puts.get_mut(at) else { return Ok(()) };
        let (answers, over) = put.answers();
        if !answers.is_empty() {
            self.note(answers).await?;
        }
        if over {
            self.end_put(at, None);
        }
        Ok(())
    }

    async fn refuse_put(&mut self, at: usize, error: &Error) -> Result<()> {
        let Some(request) = self.puts.get(at).map(|put| put.request) else { return Ok(()) };
        // Whoever is told of a failed put may offer again at once.
        self.end_put(at, Some(error));
        self.note_refused(request, error).await
    }

    fn end_put(&mut self, at: usize, failure: Option<&Error>) {
        let put = self.puts.swap_remove(at);
        self.lane.end(put.request);
        put.end(failure);
    }

    fn put_of(&self, request: u32) -> Option<usize> {
        self.puts.iter().position(|put| put.request == request)
    }

    async fn note_refused(&mut self, request: u32, error: &Error) -> Result<()> {
        let mut frame = Vec::new();
        refused(error).push(&mut frame, request);
        self.note(frame).await
    }

    async fn note(&mut self, frames: Vec<u8>) -> Result<()> {
        self.notes.send(frames).await.map_err(|_closed| gone())
    }

    /// Takes room for a large body, so that all connections together ask for a bounded number of bytes.
    async fn room(&mut self, header: &Header) -> Result<Option<OwnedSemaphorePermit>> {
        if header.body_bytes <= BULK_BODY_SMALL_BYTES {
            return Ok(None);
        }
        let kibibytes = u32::try_from(header.body_bytes.div_ceil(1024)).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.bulk.room);
        let taken =
            timeout_at(self.input.deadline(), Semaphore::acquire_many_owned(room, kibibytes));
        match taken.await {
            Ok(Ok(room)) => Ok(Some(room)),
            Ok(Err(_)) | Err(_) => {
                let kind = ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT };
                Err(Error::new(kind, "no room for a request of that size now"))
            }
        }
    }
}

/// Waits for the end of the session, if there is one.
async fn ended(session: Option<&Session>) {
    match session {
        Some(session) => session.ended().cancelled().await,
        None => std::future::pending().await,
    }
}

fn revoked() -> Error {
    Error::new(ErrorKind::Unauthenticated, "token: the one given is valid no longer")
}

fn too_many() -> Error {
    Error::new(
        ErrorKind::Exhausted { retry_after: RETRY_AFTER_COUNT },
        format!("requests: {BULK_REQUESTS_MAX} under way on this connection, no more allowed"),
    )
}

/// The writer has ended, which ends the connection.
fn gone() -> Error {
    lost(std::io::ErrorKind::BrokenPipe.into())
}
