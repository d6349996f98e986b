//! An HTTP proxy before a store that breaks requests: some of them or all, in one of many ways, until it
//! is healed. One request to a connection, so that a break is the break of one request. It also stops at
//! a request that is chosen by what it says, so that whoever sent it can be killed there.

use std::{
    fmt, io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kvstrata_tiers::testing::Draws;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Runtime,
    sync::Notify,
};

/// How long [`Fault::SlowClose`] waits.
const SLOW_CLOSE: Duration = Duration::from_secs(2);
/// How long [`Fault::Latency`] waits.
const LATENCY: Duration = Duration::from_secs(3);
/// The largest head of a request.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is refused with this status.
    Status(u16),
    /// The connection is reset.
    Reset,
    /// Nothing happens for 2 s, then the connection is closed.
    SlowClose,
    /// It is answered 3 s late.
    Latency,
    /// The body of the answer ends halfway.
    Cut,
    /// The body is half as long, and the header says that this is all of it.
    Shorter,
    /// The same with a status of 200, as if no range had been asked for.
    Whole,
    /// The body has other bytes.
    WrongBody,
    /// The body stops halfway, and the connection stays.
    Stalled,
}

#[derive(Debug)]
struct Plan {
    /// Each with how many of a thousand requests suffer it; together at most a thousand.
    faults: Vec<(Fault, u64)>,
    /// Requests that pass before the fault begins..
    skip: u64,
    /// ..and requests that it may hit.
    times: u64,
    draws: Draws,
}

/// A request, as it is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request<'a> {
    pub(super) method: &'a str,
    /// The path with its query.
    pub(super) path: &'a str,
    pub(super) body: &'a [u8],
}

/// Where a request stops. Its sender hears nothing more in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// The store never sees it.
    Before,
    /// The store has done it.
    After,
    /// The store sees it when it is [delivered](Proxy::deliver).
    Late,
}

/// Sees every request, and says at which to stop.
type Watcher = Box<dyn FnMut(Request<'_>) -> Option<Stop> + Send>;

struct State {
    upstream: SocketAddr,
    plan: Mutex<Plan>,
    requests: AtomicU64,
    watcher: Mutex<Option<Watcher>>,
    stopped: Notify,
    late: Mutex<Vec<Vec<u8>>>,
    under_way: AtomicU64,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("upstream", &self.upstream).finish_non_exhaustive()
    }
}

/// A running proxy.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    state: Arc<State>,
    /// Its own, so that dropping the proxy also ends its connections.
    runtime: Option<Runtime>,
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Proxy {
    /// A proxy before `upstream` that breaks nothing yet.
    pub(super) fn start(upstream: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let entered = runtime.enter();
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(listener).unwrap();
        drop(entered);
        let address = listener.local_addr().unwrap();
        let draws = Draws::new(1);
        let plan = Plan { faults: Vec::new(), skip: 0, times: u64::MAX, draws };
        let state = Arc::new(State {
            upstream,
            plan: Mutex::new(plan),
            requests: AtomicU64::new(0),
            watcher: Mutex::new(None),
            stopped: Notify::new(),
            late: Mutex::default(),
            under_way: AtomicU64::new(0),
        });
        let (shared, handle) = (Arc::clone(&state), runtime.handle().clone());
        let _detached = runtime.spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                let state = Arc::clone(&shared);
                let _detached = handle.spawn(async move {
                    // What breaks a connection is what tests are about.
                    state.serve(client).await.unwrap_or_default();
                });
            }
        });
        Self { address, state, runtime: Some(runtime) }
    }

    /// From now on so many of a thousand requests suffer this.
    pub(super) fn fail(&self, fault: Fault, per_mille: u64) {
        self.fail_mixed(&[(fault, per_mille)]);
    }

    /// The same with several faults, of which a request suffers one.
    pub(super) fn fail_mixed(&self, faults: &[(Fault, u64)]) {
        let mut plan = self.state.plan.lock();
        plan.faults = faults.to_vec();
        (plan.skip, plan.times) = (0, u64::MAX);
    }

    /// After `skip` more requests, `times` suffer this.
    pub(super) fn fail_some(&self, fault: Fault, skip: u64, times: u64) {
        self.fail(fault, 1000);
        let mut plan = self.state.plan.lock();
        (plan.skip, plan.times) = (skip, times);
    }

    /// From now on all is well.
    pub(super) fn heal(&self) {
        self.state.plan.lock().faults.clear();
    }

    /// From now on this sees every request, and says at which to stop.
    pub(super) fn watch(&self, watcher: impl FnMut(Request<'_>) -> Option<Stop> + Send + 'static) {
        *self.state.watcher.lock() = Some(Box::new(watcher));
    }

    /// Waits until a request has stopped, once for each.
    pub(super) async fn stopped(&self) {
        self.state.stopped.notified().await;
    }

    /// Sends the store what stopped as late.
    pub(super) async fn deliver(&self) {
        let late = std::mem::take(&mut *self.state.late.lock());
        for request in late {
            self.state.forward(&request).await.unwrap();
        }
    }

    /// Requests that the store was sent and has not answered.
    pub(super) fn under_way(&self) -> u64 {
        self.state.under_way.load(Ordering::Relaxed)
    }

    /// Requests that arrived.
    pub(super) fn requests(&self) -> u64 {
        self.state.requests.load(Ordering::Relaxed)
    }
}

impl Plan {
    fn draw(&mut self) -> Option<Fault> {
        if self.skip > 0 {
            self.skip -= 1;
            return None;
        }
        let drawn = self.draws.below(1000);
        let mut below = 0;
        let fault = self.faults.iter().find(|(_, per_mille)| {
            below += per_mille;
            drawn < below
        });
        let hit = fault.map(|(fault, _)| *fault).filter(|_| self.times > 0);
        self.times -= u64::from(hit.is_some());
        hit
    }
}

impl State {
    async fn serve(&self, mut client: TcpStream) -> io::Result<()> {
        let request = read_request(&mut client).await?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        let stop = self.watcher.lock().as_mut().and_then(|watcher| watcher(parsed(&request)?));
        if let Some(stop) = stop {
            return self.stop(stop, request, client).await;
        }
        let fault = self.plan.lock().draw();
        match fault {
            Some(Fault::Status(status)) => {
                let body = format!("<Error><Code>Proxy{status}</Code></Error>");
                let head = format!("HTTP/1.1 {status} Proxy\r\nConnection: close\r\n");
                let answer = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
                return client.write_all(answer.as_bytes()).await;
            }
            Some(Fault::Reset) => return client.set_zero_linger(),
            Some(Fault::SlowClose) => {
                tokio::time::sleep(SLOW_CLOSE).await;
                return Ok(());
            }
            Some(Fault::Latency) => tokio::time::sleep(LATENCY).await,
            _ => {}
        }
        let answer = self.forward(&request).await?;
        match fault {
            Some(fault) => Answer::new(&answer).broken(fault, &mut client).await,
            None => client.write_all(&answer).await,
        }
    }

    /// Lets the sender wait until it is gone.
    async fn stop(&self, stop: Stop, request: Vec<u8>, mut client: TcpStream) -> io::Result<()> {
        match stop {
            Stop::Before => {}
            Stop::After => drop(self.forward(&request).await?),
            Stop::Late => self.late.lock().push(request),
        }
        self.stopped.notify_one();
        client.read_u8().await.map(drop)
    }

    /// Asks the store; returns all that it sent.
    async fn forward(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        let answer = self.ask(request).await;
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        answer
    }

    async fn ask(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let mut upstream = TcpStream::connect(self.upstream).await?;
        upstream.write_all(request).await?;
        let mut answer = Vec::new();
        upstream.read_to_end(&mut answer).await?;
        Ok(answer)
    }
}

/// A whole request, which asks for the connection to be closed behind it.
async fn read_request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= HEAD_BYTES_MAX {
            return Err(io::Error::other("no end of the head"));
        }
        head.push(client.read_u8().await?);
    }
    let text = String::from_utf8(head).map_err(io::Error::other)?;
    let mut body = vec![0; header(&text, "content-length").unwrap_or(0)];
    client.read_exact(&mut body).await?;
    let mut request = text.trim_end_matches("\r\n").as_bytes().to_vec();
    request.extend_from_slice(b"\r\nConnection: close\r\n\r\n");
    request.extend_from_slice(&body);
    Ok(request)
}

/// What a whole request says.
fn parsed(request: &[u8]) -> Option<Request<'_>> {
    let end = request.windows(4).position(|four| four == b"\r\n\r\n")?;
    let line = std::str::from_utf8(&request[..end]).ok()?.lines().next()?;
    let (method, rest) = line.split_once(' ')?;
    let (path, _version) = rest.split_once(' ')?;
    Some(Request { method, path, body: &request[end + 4..] })
}

/// A header that is a number.
fn header(head: &str, name: &str) -> Option<usize> {
    let mut headers = head.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = headers.find(|(found, _)| found.eq_ignore_ascii_case(name))?;
    value.trim().parse().ok()
}

/// What the store sent.
struct Answer<'a> {
    head: &'a str,
    body: &'a [u8],
}

impl<'a> Answer<'a> {
    fn new(answer: &'a [u8]) -> Self {
        let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap();
        let head = std::str::from_utf8(&answer[..end]).unwrap();
        Self { head, body: &answer[end + 4..] }
    }

    /// Sends it with a fault in its body; one that has none is sent as it is.
    async fn broken(&self, fault: Fault, client: &mut TcpStream) -> io::Result<()> {
        let half = &self.body[..self.body.len() / 2];
        match fault {
            Fault::Cut => send(client, self.head, half).await,
            Fault::Shorter => send(client, &self.head_for(half.len(), false), half).await,
            Fault::Whole => send(client, &self.head_for(half.len(), true), half).await,
            Fault::WrongBody => {
                let wrong: Vec<u8> = self.body.iter().map(|byte| byte ^ 1).collect();
                send(client, self.head, &wrong).await
            }
            Fault::Stalled => {
                send(client, self.head, half).await?;
                std::future::pending().await
            }
            Fault::Status(_) | Fault::Reset | Fault::SlowClose | Fault::Latency => {
                send(client, self.head, self.body).await
            }
        }
    }

    /// The head of a body of so many bytes; `whole`: as if it were the whole object.
    fn head_for(&self, bytes: usize, whole: bool) -> String {
        let lines = self.head.lines().filter_map(|line| {
            let name = line.split(':').next().unwrap_or("");
            if name.eq_ignore_ascii_case("content-length") {
                return Some(format!("Content-Length: {bytes}"));
            }
            if whole && name.eq_ignore_ascii_case("content-range") {
                return None;
            }
            let partial = whole && line.starts_with("HTTP/1.1 206");
            Some(if partial { "HTTP/1.1 200 OK".to_owned() } else { line.to_owned() })
        });
        lines.collect::<Vec<_>>().join("\r\n")
    }
}

async fn send(client: &mut TcpStream, head: &str, body: &[u8]) -> io::Result<()> {
    client.write_all(head.as_bytes()).await?;
    client.write_all(b"\r\n\r\n").await?;
    client.write_all(body).await
}
