//! How this node leaves: whoever asks it to, who has something to say first, and how far it is.
//!
//! A drain is asked for once and never taken back: by SIGTERM, which also ends the process, or by an operator
//! over the admin listener. `server` does what there is to do; everybody else finds here that it is so.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

/// Where a drain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Phase {
    /// Nobody has asked for one.
    #[default]
    Serving,
    /// Members, routers and sessions are told.
    Announcing,
    /// What is hottest goes to other members, while clients finish.
    HandingOver,
    /// Clients finish what they have begun.
    Finishing,
    /// What waits for nvme is copied.
    Flushing,
    /// Nothing is left to do but to end.
    Drained,
}

/// Blocks that were handed to other members, or offered to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Handed {
    /// Blocks that were chosen to be handed over.
    pub chosen: u64,
    /// Blocks that others took.
    pub blocks: u64,
    /// Payload of these, in bytes.
    pub bytes: u64,
    /// Blocks that they had already.
    pub present: u64,
    /// Blocks that they did not take, or not in time.
    pub refused: u64,
}

/// How far a drain is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Where it is.
    pub phase: Phase,
    /// When what is left is ended; none before the drain begins.
    pub until: Option<Instant>,
    /// What others have got.
    pub handed: Handed,
}

/// The drain of one node; clones share it.
#[derive(Debug, Clone)]
pub struct Drain {
    asked: CancellationToken,
    /// Those who have something to say first.
    farewells: Arc<watch::Sender<usize>>,
    progress: Arc<watch::Sender<Progress>>,
}

/// Somebody has something to tell others before the node leaves; dropping it says that all is told.
#[derive(Debug)]
#[must_use = "dropping it says that all is told"]
pub struct Farewell {
    farewells: Arc<watch::Sender<usize>>,
}

impl Default for Drain {
    fn default() -> Self {
        Self {
            asked: CancellationToken::new(),
            farewells: Arc::new(watch::Sender::new(0)),
            progress: Arc::new(watch::Sender::new(Progress::default())),
        }
    }
}

impl Drain {
    /// Asks the node to leave; more than once is the same as once.
    pub fn ask(&self) {
        self.asked.cancel();
    }

    /// Cancelled when the node was asked to leave.
    #[must_use]
    pub fn asked(&self) -> &CancellationToken {
        &self.asked
    }

    /// Somebody has something to say when the node is asked to leave.
    pub fn farewell(&self) -> Farewell {
        self.farewells.send_modify(|count| *count += 1);
        Farewell { farewells: Arc::clone(&self.farewells) }
    }

    /// Waits until everybody has said what there was to say.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn all_told(&self) {
        // The sender lives in `self`, so the wait cannot fail.
        if self.farewells.subscribe().wait_for(|count| *count == 0).await.is_err() {
            tracing::debug!("farewells closed");
        }
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        *self.progress.borrow()
    }

    /// Told of every change.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Begins it: what is left after `grace` is ended.
    pub(crate) fn begin(&self, grace: Duration) -> Instant {
        self.ask();
        let until = Instant::now() + grace;
        self.progress.send_modify(|progress| {
            (progress.phase, progress.until) = (Phase::Announcing, Some(until));
        });
        until
    }

    /// It has come to another phase; there is no way back.
    pub(crate) fn comes_to(&self, phase: Phase) {
        self.progress.send_modify(|progress| progress.phase = progress.phase.max(phase));
    }

    /// More was handed over.
    pub(crate) fn hands(&self, change: impl FnOnce(&mut Handed)) {
        self.progress.send_modify(|progress| change(&mut progress.handed));
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        self.farewells.send_modify(|count| *count = count.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_waits_for_every_farewell_and_only_for_these() {
        let drain = Drain::default();
        drain.all_told().await;
        let (first, second) = (drain.farewell(), drain.farewell());
        let waiting =
            async { tokio::time::timeout(Duration::from_secs(1), drain.all_told()).await };
        drop(first);
        assert!(waiting.await.is_err(), "one is left");
        drop(second);
        drain.all_told().await;
    }

    #[tokio::test(start_paused = true)]
    async fn asking_twice_is_asking_once_and_there_is_no_way_back() {
        let drain = Drain::default();
        assert_eq!(drain.progress(), Progress::default());
        let mut followed = drain.follow();
        drain.ask();
        drain.clone().ask();
        assert!(drain.asked().is_cancelled());
        assert_eq!(drain.progress().phase, Phase::Serving, "asked for, but not begun");
        let until = drain.begin(Duration::from_secs(20));
        drain.comes_to(Phase::Flushing);
        drain.comes_to(Phase::Finishing);
        drain.hands(|handed| handed.blocks += 3);
        let progress = *followed.borrow_and_update();
        assert_eq!((progress.phase, progress.until), (Phase::Flushing, Some(until)));
        assert_eq!(progress.handed.blocks, 3);
    }
}
