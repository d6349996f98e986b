//! What the objects of one client share: its connection, the threads that drive it, and the way out.
//!
//! Every call lets go of the interpreter while it waits, wakes up now and then to see whether a signal
//! handler has something to raise, and ends at once when the client is closed. Nothing here is used in
//! a process that was forked off: its threads are not there.

use std::{
    future::Future,
    pin::pin,
    process,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use kvstrata::client::{Client, Session, SessionState};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::RwLock;
use pyo3::prelude::*;
use tokio::{
    runtime::{Builder, Runtime},
    sync::{Mutex, Semaphore, watch},
    time::timeout,
};

use crate::{errors, memory::Bin};

/// Threads of a client: one that waits for the network and one that copies beside the caller's own.
const THREADS: usize = 2;
/// How often a call looks for signals.
pub(crate) const SIGNALS_EVERY: Duration = Duration::from_millis(100);
/// How long closing waits for threads that are in the middle of something.
const CLOSE_DEADLINE: Duration = Duration::from_secs(5);
/// Asynchronous requests of one client that have not ended.
const REQUESTS_MAX: usize = 4096;
/// Asynchronous gets and puts that move at a time, the others wait: together as many as connections are
/// kept. Gets have most of them, and no put stands before a get: an engine waits for what it loads.
const GETTING_MAX: usize = 12;
const PUTTING_MAX: usize = 4;

/// A value that is left alone, and never dropped, in a process that was forked off the one that made it.
#[derive(Debug)]
pub(crate) struct Own<T: 'static> {
    value: Option<T>,
    process: u32,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: process::id() }
    }

    /// The value, in its own process.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<&T> {
        let value = self.value.as_ref().filter(|_| self.is_here());
        value.ok_or_else(|| {
            let text = "made before a fork: make a new client in this process";
            errors::make(py, "ForkedError", text)
        })
    }

    fn is_here(&self) -> bool {
        self.process == process::id()
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if !self.is_here() {
            // Its threads are gone, and whoever held its locks when the process forked, too.
            Box::leak(Box::new(self.value.take()));
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) client: Client,
    pub(crate) bin: Arc<Bin>,
    /// Requests that have not ended.
    requests: Arc<AtomicUsize>,
    pub(crate) getting: Arc<Semaphore>,
    pub(crate) putting: Arc<Semaphore>,
    pub(crate) session: Arc<DefaultSession>,
    closed: watch::Sender<bool>,
    /// Read by whoever runs something on it, written by the end.
    runtime: RwLock<Option<Runtime>>,
}

impl Core {
    /// Starts the threads and connects.
    pub(crate) fn connect(
        py: Python<'_>,
        connect: impl Future<Output = Result<Client>> + Send,
        name: String,
    ) -> PyResult<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("kvstrata")
            .enable_all()
            .build()?;
        let client = match dial(py, &runtime, connect) {
            Ok(client) => client,
            Err(raised) => {
                // Not dropped: that waits, for names that are still being looked up as well.
                runtime.shutdown_background();
                return Err(raised);
            }
        };
        let session = DefaultSession { client: client.clone(), name, open: Mutex::new(None) };
        Ok(Self {
            client,
            bin: Arc::default(),
            requests: Arc::default(),
            getting: Arc::new(Semaphore::new(GETTING_MAX)),
            putting: Arc::new(Semaphore::new(PUTTING_MAX)),
            session: Arc::new(session),
            closed: watch::Sender::new(false),
            runtime: RwLock::new(Some(runtime)),
        })
    }

    /// Runs a call to its end, for at most `deadline` if there is one, and gives back what it held.
    pub(crate) fn run<T: Send>(
        &self,
        py: Python<'_>,
        deadline: Option<Duration>,
        call: impl Future<Output = Result<T>> + Send,
    ) -> PyResult<T> {
        let done = self.drive(py, deadline, call);
        self.bin.empty(py);
        done
    }

    fn drive<T: Send>(
        &self,
        py: Python<'_>,
        deadline: Option<Duration>,
        call: impl Future<Output = Result<T>> + Send,
    ) -> PyResult<T> {
        let mut call = pin!(within(deadline, call));
        let mut closed = self.closed.subscribe();
        loop {
            let step = py.detach(|| {
                let runtime = self.runtime.read();
                let runtime = runtime.as_ref()?;
                runtime.block_on(async {
                    tokio::select! {
                        biased;
                        done = call.as_mut() => Some(Some(done)),
                        _ended = closed.wait_for(|closed| *closed) => None,
                        () = tokio::time::sleep(SIGNALS_EVERY) => Some(None),
                    }
                })
            });
            match step {
                Some(Some(done)) => return done.map_err(|error| errors::raised(py, &error)),
                Some(None) => py.check_signals()?,
                None => return Err(closed_error(py)),
            }
        }
    }

    /// Starts a task, which must end by itself when the client is closed.
    pub(crate) fn spawn(
        &self,
        py: Python<'_>,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> PyResult<()> {
        let is_open = py.detach(|| {
            let runtime = self.runtime.read();
            runtime.as_ref().map(|runtime| drop(runtime.spawn(task))).is_some()
        });
        self.bin.empty(py);
        if is_open { Ok(()) } else { Err(closed_error(py)) }
    }

    /// Counts one more asynchronous request.
    pub(crate) fn count(&self, py: Python<'_>) -> PyResult<Counted> {
        let before = self.requests.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(Arc::clone(&self.requests));
        if before >= REQUESTS_MAX {
            let text = format!("submit: {before} requests have not ended, {REQUESTS_MAX} allowed");
            return Err(errors::make(py, "ExhaustedError", &text));
        }
        Ok(counted)
    }

    /// Ends every call and task and joins the threads. Closing twice is the same as once.
    pub(crate) fn close(&self, py: Python<'_>) {
        self.closed.send_replace(true);
        py.detach(|| {
            if let Some(runtime) = self.runtime.write().take() {
                runtime.shutdown_timeout(CLOSE_DEADLINE);
            }
        });
        self.bin.empty(py);
    }
}

fn dial(
    py: Python<'_>,
    runtime: &Runtime,
    connect: impl Future<Output = Result<Client>> + Send,
) -> PyResult<Client> {
    let mut connect = pin!(connect);
    loop {
        let step = py
            .detach(|| runtime.block_on(async { timeout(SIGNALS_EVERY, connect.as_mut()).await }));
        match step {
            Ok(client) => return client.map_err(|error| errors::raised(py, &error)),
            Err(_elapsed) => py.check_signals()?,
        }
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        if self.runtime.get_mut().is_none() {
            return;
        }
        // Whoever drops the last object of a client holds the interpreter, so buffers go back here.
        let closed = Python::try_attach(|py| self.close(py));
        if let (None, Some(runtime)) = (closed, self.runtime.get_mut().take()) {
            runtime.shutdown_background();
        }
    }
}

/// One asynchronous request of the number that a client may have.
#[derive(Debug)]
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The session of calls that name none: opened when it is needed, and again when it has ended.
#[derive(Debug)]
pub(crate) struct DefaultSession {
    client: Client,
    name: String,
    open: Mutex<Option<Arc<Session>>>,
}

impl DefaultSession {
    /// The session that was given, or else this one.
    pub(crate) async fn or(&self, given: Option<Arc<Session>>) -> Result<Arc<Session>> {
        if let Some(given) = given {
            return Ok(given);
        }
        let mut open = self.open.lock().await;
        if let Some(session) = &*open
            && !matches!(session.state(), SessionState::Ended(_))
        {
            return Ok(Arc::clone(session));
        }
        let session = Arc::new(self.client.session(&self.name).await?);
        *open = Some(Arc::clone(&session));
        Ok(session)
    }
}

/// Awaits `call` for at most `deadline`.
pub(crate) async fn within<T>(
    deadline: Option<Duration>,
    call: impl Future<Output = Result<T>>,
) -> Result<T> {
    let Some(deadline) = deadline else {
        return call.await;
    };
    timeout(deadline, call).await.unwrap_or_else(|_elapsed| {
        let seconds = deadline.as_secs_f64();
        let text = format!("no answer within the timeout of {seconds} s; trying again is safe");
        Err(Error::new(ErrorKind::Timeout, text))
    })
}

/// A time that was given in seconds.
pub(crate) fn seconds(py: Python<'_>, name: &str, given: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(given).ok().filter(|time| *time < FOREVER).ok_or_else(|| {
        let text = format!("{name}: {given} s given, 0 to {} allowed", FOREVER.as_secs());
        errors::invalid(py, &text)
    })
}

/// The longest time that may be given: a timer cannot be set for much longer.
const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// The timeout of a call, if one was given in seconds.
pub(crate) fn timeout_of(py: Python<'_>, given: Option<f64>) -> PyResult<Option<Duration>> {
    given.map(|given| seconds(py, "timeout", given)).transpose()
}

fn closed_error(py: Python<'_>) -> PyErr {
    errors::make(py, "ClosedError", "the client is closed")
}
