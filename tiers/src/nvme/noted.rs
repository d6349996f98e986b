//! What readers and describers note for the writer, which is the only one that changes the index.

use parking_lot::Mutex;
use tokio::sync::Notify;

/// A bounded list of things to be done.
#[derive(Debug)]
pub(super) struct Noted<T> {
    things: Mutex<Vec<T>>,
    most: usize,
    some: Notify,
}

impl<T> Noted<T> {
    /// One that holds `most`.
    pub(super) fn new(most: usize) -> Self {
        Self { things: Mutex::default(), most, some: Notify::new() }
    }

    /// Notes one; false if there is no room.
    pub(super) fn note(&self, thing: T) -> bool {
        let mut things = self.things.lock();
        let fits = things.len() < self.most;
        if fits {
            things.push(thing);
            self.some.notify_one();
        }
        fits
    }

    pub(super) fn take(&self) -> Vec<T> {
        std::mem::take(&mut self.things.lock())
    }

    /// The first ones, as many as `most`. If there are more, [`notified`](Self::notified) says so again.
    pub(super) fn take_first(&self, most: usize) -> Vec<T> {
        let mut things = self.things.lock();
        let at = most.min(things.len());
        let rest = things.split_off(at);
        if !rest.is_empty() {
            self.some.notify_one();
        }
        std::mem::replace(&mut *things, rest)
    }

    /// Waits until there are some.
    pub(super) async fn notified(&self) {
        self.some.notified().await;
    }
}
