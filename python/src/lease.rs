//! Sessions, which own leases and puts, and leases.

use std::{sync::Arc, time::Duration};

use kvstrata::client::{self, SessionState};
use parking_lot::Mutex;
use pyo3::prelude::*;
use tokio::time::Instant;

use crate::{
    core::{Core, Own, seconds, timeout_of},
    errors,
};

/// Owns leases and puts; its end frees them.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Session {
    core: Own<Arc<Core>>,
    open: Own<Mutex<Option<Arc<client::Session>>>>,
}

impl Session {
    pub(crate) fn new(core: Arc<Core>, session: client::Session) -> Self {
        Self { core: Own::new(core), open: Own::new(Mutex::new(Some(Arc::new(session)))) }
    }

    /// The session, for a call.
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Arc<client::Session>> {
        let open = self.open.get(py)?.lock().clone();
        open.ok_or_else(|| errors::make(py, "ClosedError", "the session is closed"))
    }
}

#[pymethods]
impl Session {
    #[getter]
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        Ok(match self.open.get(py)?.lock().as_ref().map(|session| session.state()) {
            Some(SessionState::Open) => "open",
            Some(SessionState::Draining(_)) => "draining",
            Some(SessionState::Ended(_)) | None => "ended",
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        drop(self.open.get(py)?.lock().take());
        self.core.get(py)?.bin.empty(py);
        Ok(())
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }
}

/// Keeps what a lookup found until it ends.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct Lease {
    core: Own<Arc<Core>>,
    lease: Mutex<client::Lease>,
    /// Keeps the session open: its end would be the end of the lease.
    _session: Own<Arc<client::Session>>,
}

impl Lease {
    pub(crate) fn new(
        core: Arc<Core>,
        session: Arc<client::Session>,
        lease: client::Lease,
    ) -> Self {
        Self { core: Own::new(core), lease: Mutex::new(lease), _session: Own::new(session) }
    }

    /// The client that was given it.
    pub(crate) fn core(&self, py: Python<'_>) -> PyResult<&Arc<Core>> {
        self.core.get(py)
    }

    /// The lease, for a call.
    pub(crate) fn get(&self) -> client::Lease {
        self.lease.lock().clone()
    }
}

#[pymethods]
impl Lease {
    #[getter]
    fn blocks(&self) -> u32 {
        self.lease.lock().blocks
    }

    #[getter]
    fn bytes(&self) -> u64 {
        self.lease.lock().bytes
    }

    #[getter]
    fn expires_in(&self) -> f64 {
        let deadline = self.lease.lock().deadline;
        deadline.saturating_duration_since(Instant::now()).as_secs_f64()
    }

    #[pyo3(signature = (*, timeout = None))]
    fn release(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<()> {
        let (core, timeout) = (self.core.get(py)?, timeout_of(py, timeout)?);
        core.run(py, timeout, core.client.release(self.get()))?;
        self.lease.lock().deadline = Instant::now();
        Ok(())
    }

    fn submit_release(&self, py: Python<'_>) -> PyResult<()> {
        let core = self.core.get(py)?;
        let (client, lease) = (core.client.clone(), self.get());
        self.lease.lock().deadline = Instant::now();
        core.spawn(py, async move {
            // What cannot be told ends by its deadline.
            let _released = client.release(lease).await;
        })
    }

    #[pyo3(signature = (ttl = 0.0, *, timeout = None))]
    fn renew(&self, py: Python<'_>, ttl: f64, timeout: Option<f64>) -> PyResult<()> {
        let (core, timeout) = (self.core.get(py)?, timeout_of(py, timeout)?);
        let ttl: Duration = seconds(py, "ttl", ttl)?;
        let lease = self.get();
        let renewed = core.run(py, timeout, core.client.renew(&lease, ttl))?;
        *self.lease.lock() = renewed;
        Ok(())
    }

    fn __enter__(this: Bound<'_, Self>) -> Bound<'_, Self> {
        this
    }

    /// An ended lease needs no release, and a server that is away has none.
    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, py: Python<'_>, _raised: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py, None)
    }
}
