//! The console: what a person is shown of a node, on a page and, in part, by `kvstrata doctor`.
//!
//! ```text
//! counters of the node -> history (an hour, by one task)      \
//! gets that ended      -> slow (the slowest, by tenant)        > state (JSON, by who asks) -> page
//! what is known now    -> facts -> problems (words, pure)     /
//! ```
//! Invariants
//! - Nothing is kept of a block but its tier, bytes and time: no hash, no token of a prompt.
//! - A tenant is shown its own; what concerns the node is for operators.
//! - All that is kept is bounded, and losing it costs a chart.
//!
//! [`page`](crate::http) serves it; names that clients gave themselves are text there, never markup.

mod facts;
mod history;
pub(crate) mod problems;
mod slow;
mod state;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::history::{History, Totals};
pub(crate) use self::{
    facts::{known, problems_of},
    slow::SlowLoads,
    state::{Phase, State},
};
use crate::{
    limits::{CONSOLE_LEFT_MAX, CONSOLE_SAMPLE_INTERVAL, SLOW_LOAD_AGE_MAX},
    members::Members,
    metrics::ServerMetrics,
    node::Node,
};

/// What a node keeps for its console.
#[derive(Debug)]
pub(crate) struct Console {
    /// The slowest loads of late.
    pub(crate) slow: SlowLoads,
    history: Mutex<History>,
    members: Mutex<Seen>,
}

/// The members that were there, and those that have left since.
#[derive(Debug, Default)]
struct Seen {
    names: BTreeSet<String>,
    left: Vec<(String, Instant)>,
}

impl Console {
    /// Nothing has happened yet.
    pub(crate) fn new(metrics: &ServerMetrics) -> Self {
        Self {
            slow: SlowLoads::default(),
            history: Mutex::new(History::new(Totals::of(metrics), Instant::now())),
            members: Mutex::default(),
        }
    }

    /// Members that left within the last hour and have not come back, and how long ago.
    fn left(&self) -> Vec<(String, Duration)> {
        let seen = self.members.lock();
        let left = seen.left.iter().map(|(name, at)| (name.clone(), at.elapsed()));
        left.filter(|(_, ago)| *ago <= SLOW_LOAD_AGE_MAX).collect()
    }
}

impl Seen {
    fn note(&mut self, members: &Members, now: Instant) {
        let names: BTreeSet<_> = members.list.iter().map(|member| member.name.clone()).collect();
        self.left.retain(|(name, at)| {
            !names.contains(name) && now.duration_since(*at) <= SLOW_LOAD_AGE_MAX
        });
        let gone = self.names.difference(&names).map(|name| (name.clone(), now));
        self.left.extend(gone);
        let surplus = self.left.len().saturating_sub(CONSOLE_LEFT_MAX);
        self.left.drain(..surplus);
        self.names = names;
    }
}

/// Takes a sample every [`CONSOLE_SAMPLE_INTERVAL`], and notes who comes and goes, until the tasks stop.
pub(crate) fn start(node: &Arc<Node>) {
    let (followed, stop) = (Arc::clone(node), node.tasks.stop_token());
    node.tasks.spawn("console", async move {
        // Ends with the server; there is nothing to clean up.
        stop.run_until_cancelled(keep(&followed)).await;
    });
}

async fn keep(node: &Node) {
    let mut ticks = interval(CONSOLE_SAMPLE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut roster = node.roster.follow();
    // The first comes at once, and the history has begun already.
    ticks.tick().await;
    loop {
        node.console.members.lock().note(&node.roster.now(), Instant::now());
        tokio::select! {
            _ = ticks.tick() => {
                let totals = Totals::of(&node.metrics);
                node.console.history.lock().sample(totals, Instant::now());
            }
            changed = roster.changed() => if changed.is_err() { return },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::members::Member;

    fn members(names: &[&str]) -> Members {
        let member = |name: &&str| Member { name: (*name).to_owned(), ..Member::default() };
        Members { list: names.iter().map(member).collect(), ..Members::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn who_left_is_remembered_until_it_is_back_or_an_hour_is_over() {
        let mut seen = Seen::default();
        seen.note(&members(&["a", "b", "c"]), Instant::now());
        seen.note(&members(&["a"]), Instant::now());
        let left = |seen: &Seen| seen.left.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(left(&seen), ["b", "c"]);
        seen.note(&members(&["a", "c"]), Instant::now());
        assert_eq!(left(&seen), ["b"]);
        tokio::time::advance(SLOW_LOAD_AGE_MAX + Duration::from_secs(1)).await;
        seen.note(&members(&["a", "c"]), Instant::now());
        assert!(left(&seen).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_left_are_bounded() {
        let mut seen = Seen::default();
        let names: Vec<_> = (0..2 * CONSOLE_LEFT_MAX).map(|at| at.to_string()).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        seen.note(&members(&names), Instant::now());
        seen.note(&members(&[]), Instant::now());
        assert_eq!(seen.left.len(), CONSOLE_LEFT_MAX);
    }
}
