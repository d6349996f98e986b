//! Requests that run by themselves: submitted, polled, waited for, cancelled.
//!
//! A request ends exactly once, however that comes: answered, failed, over its deadline, cancelled, or
//! with its client. What it needed is let go of before anybody can see that it has ended. A request whose
//! handle is dropped goes on.

use std::{future::Future, sync::Arc, time::Duration};

use kvstrata::client::{Lookup, PutReport, Session};
use kvstrata_tiers::error::{Error, ErrorKind, Result};
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use tokio::{
    sync::{Notify, Semaphore},
    time::Instant,
};

use crate::{
    core::{Core, Counted, Own, SIGNALS_EVERY, timeout_of, within},
    errors,
    queue::{CompletionQueue, Ended},
    sink,
    values::{LookupOf, PutResult},
};

/// How a request ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Get(sink::Ended),
    Put(Result<PutReport>),
    /// What was found, and the session that owns the lease, if one was asked for.
    Lookup(Result<(Lookup, Option<Arc<Session>>)>),
    /// How many blocks were in dram already, and how many loads have begun.
    Prefetch(Result<(u32, u32)>),
    /// How many blocks were present.
    Touch(Result<u32>),
    /// Its client was closed before it had begun or in the middle.
    Closed,
}

/// What the handle and the task share.
#[derive(Debug, Default)]
struct State {
    outcome: Mutex<Option<Arc<Outcome>>>,
    has_ended: Condvar,
    cancel: Notify,
}

/// Ends the request when it is dropped, whatever has become of its task.
struct Finisher {
    state: Arc<State>,
    queue: Option<(Arc<Ended>, u64)>,
    outcome: Outcome,
    counted: Option<Counted>,
}

impl Finisher {
    fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        drop(self.counted.take());
        let outcome = std::mem::replace(&mut self.outcome, Outcome::Closed);
        *self.state.outcome.lock() = Some(Arc::new(outcome));
        self.state.has_ended.notify_all();
        if let Some((ended, ticket)) = self.queue.take() {
            ended.push(ticket);
        }
    }
}

/// What a request that runs by itself does beside its work.
#[derive(Debug)]
pub(crate) struct Turn {
    state: Arc<State>,
}

impl Turn {
    /// Awaits its turn among those that are `moving` and then `call`, unless the request is cancelled or
    /// its deadline passes first.
    pub(crate) async fn run<T>(
        self,
        moving: &Semaphore,
        deadline: Option<Duration>,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let in_turn = async {
            // It fails only for a semaphore that is closed, which this one never is.
            let _turn = moving.acquire().await;
            call.await
        };
        self.at_once(deadline, in_turn).await
    }

    /// Awaits `call`, which moves no blocks and so waits for none that move, unless the request is
    /// cancelled or its deadline passes first.
    pub(crate) async fn at_once<T>(
        self,
        deadline: Option<Duration>,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::select! {
            biased;
            () = self.state.cancel.notified() => {
                Err(Error::new(ErrorKind::Cancelled, "the request was cancelled"))
            }
            done = within(deadline, call) => done,
        }
    }
}

/// The handle of a request.
#[pyclass(frozen, generic, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Request {
    core: Own<Arc<Core>>,
    state: Arc<State>,
    tag: Option<Py<PyAny>>,
}

/// Where the end of a request is told, and by what name.
#[derive(Debug, Default)]
pub(crate) struct Tell<'py> {
    pub(crate) queue: Option<Bound<'py, CompletionQueue>>,
    pub(crate) tag: Option<Py<PyAny>>,
}

impl Request {
    /// Starts `work` in the background; what it needs is given back if that fails.
    pub(crate) fn start<F>(
        py: Python<'_>,
        core: &Arc<Core>,
        tell: Tell<'_>,
        work: impl FnOnce(Turn) -> F,
    ) -> PyResult<Py<Self>>
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let started = Self::begin(py, core, tell, work);
        if started.is_err() {
            core.bin.empty(py);
        }
        started
    }

    fn begin<F>(
        py: Python<'_>,
        core: &Arc<Core>,
        tell: Tell<'_>,
        work: impl FnOnce(Turn) -> F,
    ) -> PyResult<Py<Self>>
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let counted = core.count(py)?;
        let state = Arc::new(State::default());
        let work = work(Turn { state: Arc::clone(&state) });
        let request = Self { core: Own::new(Arc::clone(core)), state, tag: tell.tag };
        let request = Py::new(py, request)?;
        let queue = tell.queue.as_ref().map(Bound::get);
        let place = queue.map(|queue| queue.ticket(py)).transpose()?;
        let ticket = place.as_ref().map(|(_, ticket)| *ticket);
        if let (Some(queue), Some(ticket)) = (queue, ticket) {
            queue.keep(ticket, request.clone_ref(py));
        }
        let state = Arc::clone(&request.get().state);
        let finisher =
            Finisher { state, queue: place, outcome: Outcome::Closed, counted: Some(counted) };
        let started = core.spawn(py, async move {
            finisher.end(work.await);
        });
        match (started, queue, ticket) {
            (Err(error), Some(queue), Some(ticket)) => {
                queue.forget(ticket);
                Err(error)
            }
            (started, ..) => started.map(|()| request),
        }
    }

    /// Gives back the buffers of requests that have ended.
    pub(crate) fn give_back(&self, py: Python<'_>) {
        if let Ok(core) = self.core.get(py) {
            core.bin.empty(py);
        }
    }

    /// The value that a request which ended so has, or what it raises.
    fn result(&self, py: Python<'_>, outcome: Option<&Outcome>) -> PyResult<Py<PyAny>> {
        match outcome {
            Some(Outcome::Get((result, Ok(())))) => Ok(Py::new(py, result.clone())?.into_any()),
            Some(Outcome::Get((result, Err(error)))) => {
                let raised = errors::raised(py, error);
                raised.value(py).setattr("partial", Py::new(py, result.clone())?)?;
                Err(raised)
            }
            Some(Outcome::Put(Ok(report))) => {
                Ok(Py::new(py, PutResult(report.clone()))?.into_any())
            }
            Some(Outcome::Lookup(Ok((found, session)))) => {
                let found = LookupOf::leased(py, self.core.get(py)?, found, session.clone())?;
                Ok(Py::new(py, found)?.into_any())
            }
            Some(Outcome::Prefetch(Ok(begun))) => Ok(begun.into_pyobject(py)?.into_any().unbind()),
            Some(Outcome::Touch(Ok(present))) => Ok(present.into_pyobject(py)?.into_any().unbind()),
            Some(
                Outcome::Put(Err(error))
                | Outcome::Lookup(Err(error))
                | Outcome::Prefetch(Err(error))
                | Outcome::Touch(Err(error)),
            ) => Err(errors::raised(py, error)),
            Some(Outcome::Closed) | None => {
                Err(errors::make(py, "CancelledError", "the client was closed"))
            }
        }
    }

    /// Waits until it has ended, until `deadline` if there is one; whether it has.
    fn join(&self, py: Python<'_>, deadline: Option<Instant>) -> PyResult<bool> {
        loop {
            let ended = py.detach(|| {
                let step = Instant::now() + SIGNALS_EVERY;
                let until = deadline.map_or(step, |deadline| deadline.min(step));
                let mut outcome = self.state.outcome.lock();
                let left = until.saturating_duration_since(Instant::now());
                self.state.has_ended.wait_while_for(
                    &mut outcome,
                    |outcome| outcome.is_none(),
                    left,
                );
                outcome.is_some()
            });
            self.give_back(py);
            if ended || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(ended);
            }
            py.check_signals()?;
        }
    }
}

#[pymethods]
impl Request {
    #[getter]
    fn tag(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.tag.as_ref().map(|tag| tag.clone_ref(py))
    }

    fn poll(&self, py: Python<'_>) -> PyResult<bool> {
        let core = self.core.get(py)?;
        let has_ended = self.state.outcome.lock().is_some();
        core.bin.empty(py);
        Ok(has_ended)
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Py<PyAny>> {
        self.core.get(py)?;
        let deadline = timeout_of(py, timeout)?;
        if !self.join(py, deadline.map(|timeout| Instant::now() + timeout))? {
            let text = "the request has not ended within the timeout of the wait and goes on";
            return Err(errors::make(py, "DeadlineError", text));
        }
        let outcome = self.state.outcome.lock().clone();
        self.result(py, outcome.as_deref())
    }

    fn cancel(&self, py: Python<'_>) -> PyResult<()> {
        self.core.get(py)?;
        self.state.cancel.notify_one();
        Ok(())
    }
}
