//! Whether this node should be sent work: ready when every latch is gone and nobody drains.
//!
//! A component that has to finish something first holds a [`Latch`] and drops it when done. There is
//! no way to forget to report readiness twice, or to report it for somebody else. Liveness is
//! another matter: it never depends on anything here.

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;
use tokio::sync::watch;

/// A handle to the readiness of one server; clones share it.
#[derive(Debug, Clone)]
pub struct Readiness {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    ready: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    waiting: BTreeMap<u64, &'static str>,
    draining: bool,
}

/// Keeps the server unready until it is dropped.
#[derive(Debug)]
#[must_use = "dropping it says that the component is ready"]
pub struct Latch {
    shared: Arc<Shared>,
    number: u64,
}

/// The answer for a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Status {
    /// Send work.
    Ready,
    /// These components have not finished starting.
    Starting(Vec<&'static str>),
    /// The node is leaving.
    Draining,
}

impl Default for Readiness {
    fn default() -> Self {
        let shared = Shared { state: Mutex::default(), ready: watch::Sender::new(true) };
        Self { shared: Arc::new(shared) }
    }
}

impl Readiness {
    /// Ready until somebody takes a latch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the server unready until the latch is dropped.
    pub fn latch(&self, component: &'static str) -> Latch {
        let mut state = self.shared.state.lock();
        let number = state.next;
        state.next += 1;
        state.waiting.insert(number, component);
        self.shared.publish(&state);
        Latch { shared: Arc::clone(&self.shared), number }
    }

    /// Makes the server unready for good.
    pub fn drain(&self) {
        let mut state = self.shared.state.lock();
        state.draining = true;
        self.shared.publish(&state);
    }

    /// Whether the server is leaving.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.shared.state.lock().draining
    }

    /// What a probe should be told.
    #[must_use]
    pub fn status(&self) -> Status {
        let state = self.shared.state.lock();
        if state.draining {
            Status::Draining
        } else if state.waiting.is_empty() {
            Status::Ready
        } else {
            Status::Starting(state.waiting.values().copied().collect())
        }
    }

    /// Follows the change between ready and not.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<bool> {
        self.shared.ready.subscribe()
    }
}

impl Shared {
    fn publish(&self, state: &State) {
        self.ready.send_replace(!state.draining && state.waiting.is_empty());
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.waiting.remove(&self.number);
        self.shared.publish(&state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_when_every_latch_is_gone_and_never_again_after_a_drain() {
        let readiness = Readiness::new();
        let (index, ports) = (readiness.latch("index"), readiness.latch("ports"));
        assert_eq!(readiness.status(), Status::Starting(vec!["index", "ports"]));
        drop(index);
        assert_eq!(readiness.status(), Status::Starting(vec!["ports"]));
        drop(ports);
        assert_eq!(readiness.status(), Status::Ready);
        assert!(*readiness.watch().borrow());
        readiness.drain();
        assert_eq!(readiness.status(), Status::Draining);
        assert!(!*readiness.watch().borrow());
    }
}
