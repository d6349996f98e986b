//! Asks other members for what this node lacks of a lookup, or of a router's prompt, as [`plan`](super::plan) says, in
//! a few rounds and within a deadline.
//!
//! A member that does not answer in time, or with an error, costs its blocks and nothing else: the lookup goes on with
//! what the others and this node have, and says that it is partial. That member is asked no more until it has answered
//! a question about its filter ([`peers`](super::peers)), so that of many lookups the first waits for it.
//!
//! Each round but the last may take half of the time that is left: one that is slow leaves time to ask others.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use kvstrata_tiers::{
    block::Hashes,
    error::{ErrorKind, Result},
    namespace::Namespace,
    tier::Run,
};
use tokio::time::{Instant, timeout_at};
use tracing::debug;

use super::{
    filter::Digester,
    peers::{Peer, Peers},
    plan::{Found, Prefix, Question, Sighting, precedence, survey},
};
use crate::{
    client::{self, PeerLookup},
    limits::{FANOUT_DEADLINE, FANOUT_DEADLINE_OF_HASH, FANOUT_PATIENCE_MIN, FANOUT_ROUNDS_MAX},
    members::Roster,
    metrics::{FanoutMetrics, PeerAnswer},
};

/// A lookup that others are asked about.
#[derive(Debug, Clone)]
pub struct Ask<'a> {
    /// Whose blocks; members know it by its id, and its tenant by name.
    pub namespace: &'a Namespace,
    /// All of its hashes.
    pub hashes: Hashes<'a>,
    /// The same, packed.
    pub packed: Bytes,
    /// Host and zone of where the blocks would be loaded.
    pub reader: (&'a str, &'a str),
    /// The others that may be asked.
    pub peers: &'a [Arc<Peer>],
    /// What is not answered by then is not waited for.
    pub deadline: Instant,
}

/// How long a lookup of so many hashes waits for others.
#[must_use]
pub fn patience(hashes: usize) -> Duration {
    FANOUT_DEADLINE + FANOUT_DEADLINE_OF_HASH * u32::try_from(hashes).unwrap_or(u32::MAX)
}

impl Peers {
    /// Lets a prefix grow by what others have, and by what `own` says that this node has behind it. Returns whether
    /// there may be more.
    ///
    /// # Cancel safety
    /// Safe: members are asked nothing that changes them.
    pub async fn complete(
        &self,
        ask: &Ask<'_>,
        prefix: &mut Prefix,
        own: impl Fn(u32) -> Vec<Found>,
    ) -> bool {
        let started = Instant::now();
        let (peers, deadline) = (ask.peers, ask.deadline);
        let mut sightings = ask.sightings(prefix.end());
        let mut asked = 0;
        for round in 1..=FANOUT_ROUNDS_MAX {
            let questions = prefix.questions(&sightings);
            if questions.is_empty() {
                break;
            }
            asked += questions.len();
            let left = deadline.saturating_duration_since(Instant::now());
            let until = if round < FANOUT_ROUNDS_MAX { deadline - left / 2 } else { deadline };
            let answers = questions.into_iter().map(|question| {
                let peer = peers.iter().find(|peer| peer.index() == question.member);
                async move {
                    let Some(peer) = peer else { return (question, None) };
                    (question, ask.ask(peer, question, until, self.metrics()).await)
                }
            });
            prefix.take(join_all(answers).await);
            prefix.extend(own(prefix.end()));
            sightings = ask.sightings(prefix.end());
        }
        if asked > 0 {
            let added = prefix.blocks_of_others(Roster::OWN);
            self.metrics().record(asked, added, started.elapsed());
        }
        let is_partial = prefix.is_partial(&sightings);
        if is_partial {
            self.metrics().record_partial();
        }
        is_partial
    }
}

impl Ask<'_> {
    /// What is known of the members at a position, in the order in which equals are asked.
    fn sightings(&self, position: u32) -> Vec<Sighting> {
        let digester = Digester::new(self.namespace.id());
        let rest = self.hashes.skip(usize::try_from(position).unwrap_or(usize::MAX));
        let Some(first) = rest.iter().next() else { return Vec::new() };
        let first = digester.digest(&first);
        let place = |peer: &Arc<Peer>| precedence(first, peer.index(), peer.is_near(self.reader));
        let mut near: Vec<_> = self.peers.iter().map(|peer| (place(peer), peer)).collect();
        near.sort_unstable_by_key(|(place, _)| *place);
        let sighting = |peer: &Peer| Sighting {
            member: peer.index(),
            blocks: peer.with_filter(|filter| {
                survey(filter, rest.iter().map(|hash| digester.digest(&hash)))
            }),
            can_answer: peer.can_answer(),
        };
        near.into_iter().map(|(_, peer)| sighting(peer)).collect()
    }

    /// What a member says that it has; none if it does not answer.
    async fn ask(
        &self,
        peer: &Peer,
        question: Question,
        until: Instant,
        metrics: &FanoutMetrics,
    ) -> Option<Vec<Found>> {
        let client = peer.client()?;
        let (start, end) = (question.start as usize, question.end as usize);
        let hash_bytes = self.namespace.hash_bytes();
        let range = start.saturating_mul(hash_bytes)..end.saturating_mul(hash_bytes);
        let lookup = PeerLookup {
            tenant: self.namespace.tenant(),
            namespace: self.namespace.id(),
            hashes: self.packed.slice(range),
            asked: end.saturating_sub(start),
            reader: self.reader,
        };
        let given = until.saturating_duration_since(Instant::now());
        let answered = timeout_at(until, client.lookup_for(lookup)).await;
        let (answer, found) = judge(answered.ok());
        metrics.record_answer(answer);
        if found.is_none() {
            debug!(
                member = peer.name(),
                answer = answer.name(),
                "a member did not answer a lookup"
            );
            if answer != PeerAnswer::Late || given >= FANOUT_PATIENCE_MIN {
                peer.went_away();
            }
        }
        let found = found?.into_iter().map(|run| Found {
            run: Run {
                start: run.start.saturating_add(question.start),
                end: run.end.saturating_add(question.start),
                tier: run.tier,
                pending: run.pending,
                bytes: self.bytes(run.start, run.end),
            },
            holder: question.member,
            est_load: run.est_load,
        });
        Some(found.collect())
    }

    /// Bytes of blocks, where they are all of the same length; else 0, for unknown.
    fn bytes(&self, start: u32, end: u32) -> u64 {
        let blocks = u64::from(end.saturating_sub(start));
        self.namespace.layout().block_bytes().saturating_mul(blocks)
    }
}

/// What became of a question, and what was found; none if the member cannot be asked for now.
fn judge(answered: Option<Result<Vec<client::Run>>>) -> (PeerAnswer, Option<Vec<client::Run>>) {
    match answered {
        None => (PeerAnswer::Late, None),
        Some(Ok(runs)) if runs.iter().any(|run| !run.pending) => (PeerAnswer::Found, Some(runs)),
        Some(Ok(_)) => (PeerAnswer::Nothing, Some(Vec::new())),
        Some(Err(error)) => match error.kind() {
            // It has nothing of a namespace that nobody has opened there.
            ErrorKind::UnknownNamespace => (PeerAnswer::Nothing, Some(Vec::new())),
            ErrorKind::Timeout => (PeerAnswer::Late, None),
            ErrorKind::Unauthenticated | ErrorKind::Invalid => (PeerAnswer::Refused, None),
            _ => (PeerAnswer::Failed, None),
        },
    }
}
