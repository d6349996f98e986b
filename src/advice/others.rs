//! What other members have of prompts, so that a router is told of the whole cluster by any of its nodes.
//!
//! A prefix goes on where this node's ends as an engine's lookup does: by the same filters and the same questions
//! ([`fanout`](crate::cluster::fanout)). All prefixes of a question are asked about together, for
//! [`FANOUT_DEADLINE`] at most and half of the time that the router gives, so that the other half is left to answer in.
//! A member that is gone, slow or cannot read a tier costs what it has, and the answer is partial.
//!
//! What loading from another costs is what that member tells of the distance between it and the engine
//! ([`Told`](crate::cluster::told::Told)): what it would say itself a second ago. One that has told nothing has only said
//! how long all of a run takes; that is spread over its blocks, whatever the engine.
//!
//! One holder is known of each block. Where members have the same, it is one that is near the first candidate that says
//! where it is, else near whoever opened the namespace last; and this node, if it has it, before all others.

use std::{ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use kvstrata_tiers::{
    block::Hashes,
    error::Result,
    namespace::{Namespace, NamespaceId},
    tier::Run,
};
use tokio::time::Instant;

use super::{Candidate, Found, Prefix};
use crate::{
    cluster::{fanout::Ask, peers::Peer, plan},
    flow::count,
    limits::{FANOUT_DEADLINE, LOOKUP_HASHES_MAX, ROUTER_FANOUTS_MAX},
    members::Roster,
    node::Node,
    openers::Opener,
};

/// The other members as they were when they were asked; nobody, if they were not.
#[derive(Debug, Clone, Default)]
pub(crate) struct Others(Option<Arc<[Arc<Peer>]>>);

/// Who has a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Held {
    /// Index of the member.
    pub(super) holder: u32,
    /// Its word on how long all of the run takes.
    pub(super) est_load: Duration,
}

impl Others {
    /// The member with this index.
    pub(super) fn member(&self, index: u32) -> Option<&Peer> {
        self.list().iter().map(Arc::as_ref).find(|peer| peer.index() == index)
    }

    /// What the member with this index is called; none for this node.
    pub(crate) fn name(&self, index: u32) -> Option<&str> {
        self.member(index).map(Peer::name)
    }

    /// Who has opened a namespace: here, by `own`, and at others.
    pub(super) fn openers(&self, namespace: &NamespaceId, own: Vec<Opener>) -> Vec<Opener> {
        if self.list().is_empty() {
            return own;
        }
        let mut all = Vec::new();
        for peer in self.list() {
            let told = peer.told();
            all.extend(told.openers.get(namespace).into_iter().flatten().cloned());
        }
        // The last one counts, and this node knows best.
        all.extend(own);
        all
    }

    fn list(&self) -> &[Arc<Peer>] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl Node {
    /// Lets what was found of prompts grow by what other members have. Returns whether there may be more.
    ///
    /// # Cancel safety
    /// Safe: members are asked nothing that changes them.
    pub(super) async fn widen<'a>(
        &self,
        found: impl Iterator<Item = &'a mut Found>,
        candidates: &[Candidate],
        deadline: Instant,
    ) -> bool {
        let now = Instant::now();
        let until = now + FANOUT_DEADLINE.min(deadline.saturating_duration_since(now) / 2);
        let others = Others(Some(self.peers.list()));
        let mut short: Vec<&mut Prefix> = Vec::new();
        for found in found {
            found.others = others.clone();
            short.extend(found.prefixes.iter_mut().filter(|prefix| !prefix.is_whole()));
        }
        let mut is_partial = false;
        for some in short.chunks_mut(ROUTER_FANOUTS_MAX) {
            let asking =
                some.iter_mut().map(|prefix| self.lengthen(prefix, &others, candidates, until));
            is_partial |= join_all(asking).await.contains(&true);
        }
        is_partial
    }

    /// Lets a prefix grow by what others have, until then. Returns whether there may be more.
    async fn lengthen(
        &self,
        prefix: &mut Prefix,
        others: &Others,
        candidates: &[Candidate],
        until: Instant,
    ) -> bool {
        let namespace = Arc::clone(&prefix.namespace);
        // More are asked of nobody at once.
        let most = LOOKUP_HASHES_MAX.saturating_mul(namespace.hash_bytes());
        let packed = prefix.hashes.slice(..prefix.hashes.len().min(most));
        let Ok(hashes) = Hashes::new(&packed, namespace.hash_bytes()) else { return false };
        let own =
            |run: &Run| plan::Found { run: *run, holder: Roster::OWN, est_load: Duration::ZERO };
        let mut grown =
            plan::Prefix::new(count(hashes.len()), prefix.runs.iter().map(own).collect());
        let reader = self.reader_among(&namespace, candidates);
        let ask = Ask {
            namespace: &namespace,
            hashes,
            packed: packed.clone(),
            reader: (&reader.0, &reader.1),
            peers: others.list(),
            deadline: until,
        };
        let behind = |end| {
            let runs = self.runs_behind(&namespace, &packed, end).unwrap_or_default();
            runs.iter().map(own).collect()
        };
        let is_partial = self.peers.complete(&ask, &mut grown, behind).await;
        prefix.take(&grown, others);
        is_partial
    }

    /// Host and zone of an engine that is to be near to holders, if there is a choice.
    fn reader_among(&self, namespace: &Namespace, candidates: &[Candidate]) -> (String, String) {
        let says = |each: &&Candidate| !each.node.is_empty() || !each.zone.is_empty();
        match candidates.iter().find(says) {
            Some(candidate) => (candidate.node.clone(), candidate.zone.clone()),
            None => self
                .openers
                .with_latest(namespace.index(), |host, zone| (host.to_owned(), zone.to_owned())),
        }
    }

    /// What this node has from the position `end` on and can load.
    fn runs_behind(&self, namespace: &Namespace, packed: &Bytes, end: u32) -> Result<Vec<Run>> {
        let at = usize::try_from(end).unwrap_or(usize::MAX).saturating_mul(namespace.hash_bytes());
        let mut runs = self.runs_of(namespace, packed.get(at..).unwrap_or_default())?;
        for run in &mut runs {
            (run.start, run.end) = (run.start.saturating_add(end), run.end.saturating_add(end));
        }
        Ok(runs)
    }
}

impl Prefix {
    /// Whether there are all blocks whose hashes are known.
    fn is_whole(&self) -> bool {
        count(self.hashes.len() / self.namespace.hash_bytes().max(1)) <= self.blocks()
    }

    /// Takes what it has grown to, up to what its holder cannot load.
    pub(super) fn take(&mut self, grown: &plan::Prefix, others: &Others) {
        if grown.blocks_of_others(Roster::OWN) == 0 && grown.end() <= self.blocks() {
            return;
        }
        let can_load = |found: &&plan::Found| {
            let run = found.run;
            let is_held = found.holder == Roster::OWN
                || others.member(found.holder).is_some_and(|peer| peer.told().can_load(run.tier));
            is_held && !run.pending
        };
        let readable = || grown.runs().iter().take_while(can_load);
        self.runs = readable().map(|found| found.run).collect();
        let held = |found: &plan::Found| Held { holder: found.holder, est_load: found.est_load };
        self.held = readable().map(held).collect();
    }

    /// Who has a run; none if it is this node.
    pub(super) fn held(&self, run: usize) -> Option<Held> {
        self.held.get(run).copied().filter(|held| held.holder != Roster::OWN)
    }

    /// Index of the member that has a run.
    pub(crate) fn holder(&self, run: usize) -> u32 {
        self.held(run).map_or(Roster::OWN, |held| held.holder)
    }

    /// What this node has of the positions `start..end`, in as few ranges as it takes.
    pub(super) fn own(&self, start: u32, end: u32) -> Vec<Range<u32>> {
        let mut ranges: Vec<Range<u32>> = Vec::new();
        for (at, run) in self.runs.iter().enumerate() {
            let range = run.start.max(start)..run.end.min(end);
            if self.held(at).is_some() || range.is_empty() {
                continue;
            }
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        ranges
    }
}

#[cfg(test)]
impl Others {
    /// These, as tests want them.
    pub(super) fn of(list: Vec<Arc<Peer>>) -> Self {
        Self(Some(list.into()))
    }
}
