//! The completion queue: which requests have ended, and a descriptor that is readable while there are
//! some, so that a scheduler can wait for it beside its own.

use std::{
    collections::{HashMap, VecDeque},
    os::fd::{AsRawFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use crate::{core::Own, request::Request};

/// The side of the queue that needs no interpreter.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Tickets, in the order of their ends. The event is set exactly while there are some.
    tickets: Mutex<VecDeque<u64>>,
    event: OwnedFd,
}

impl Ended {
    /// The request of this ticket has ended.
    pub(crate) fn push(&self, ticket: u64) {
        let mut tickets = self.tickets.lock();
        tickets.push_back(ticket);
        // It fails only if 2^64 - 2 have ended: it is readable then, too.
        let _written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    fn pop(&self) -> Option<u64> {
        let mut tickets = self.tickets.lock();
        let ticket = tickets.pop_front();
        if tickets.is_empty() {
            // It fails only if it was not set.
            let _read = rustix::io::read(&self.event, &mut [0; 8]);
        }
        ticket
    }
}

/// See the module.
#[pyclass(frozen, module = "kvstrata")]
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    ended: Own<Arc<Ended>>,
    /// Requests that were not popped, by their tickets.
    requests: Mutex<HashMap<u64, Py<Request>>>,
    next: AtomicU64,
}

impl CompletionQueue {
    /// The next ticket, and where it goes when its request has ended.
    pub(crate) fn ticket(&self, py: Python<'_>) -> PyResult<(Arc<Ended>, u64)> {
        let ended = Arc::clone(self.ended.get(py)?);
        Ok((ended, self.next.fetch_add(1, Ordering::Relaxed)))
    }

    /// Keeps a request until it has ended and is popped.
    pub(crate) fn keep(&self, ticket: u64, request: Py<Request>) {
        drop(self.requests.lock().insert(ticket, request));
    }

    /// A request that was not started after all.
    pub(crate) fn forget(&self, ticket: u64) {
        let request = self.requests.lock().remove(&ticket);
        drop(request);
    }
}

#[pymethods]
impl CompletionQueue {
    #[new]
    fn new() -> PyResult<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(std::io::Error::from)?;
        let ended = Arc::new(Ended { tickets: Mutex::default(), event });
        Ok(Self { ended: Own::new(ended), requests: Mutex::default(), next: AtomicU64::new(0) })
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        Ok(self.ended.get(py)?.event.as_raw_fd())
    }

    fn pop(&self, py: Python<'_>) -> PyResult<Option<Py<Request>>> {
        let ended = self.ended.get(py)?;
        while let Some(ticket) = ended.pop() {
            let request = self.requests.lock().remove(&ticket);
            if let Some(request) = request {
                request.get().give_back(py);
                return Ok(Some(request));
            }
        }
        Ok(None)
    }

    fn drain(&self, py: Python<'_>) -> PyResult<Vec<Py<Request>>> {
        std::iter::from_fn(|| self.pop(py).transpose()).collect()
    }

    fn __len__(&self) -> usize {
        self.requests.lock().len()
    }
}
