//! A fleet of nodes that ask each other: what lookups over many nodes cost, and what they find.
//!
//! The requests of a trace come from engines, each of which has a home. What a request names is looked up at the home
//! of its engine, by the code that a node runs: whom to ask is [planned](crate::cluster::plan) from
//! [filters](crate::cluster::filter), and the home is [chosen](crate::cluster::home) as clients choose it. Then the home
//! has all blocks of the request: what was computed or read from others is put there.
//!
//! Nodes are one LRU cache each, tail first as the tiers are. Others know a node's filter as it was at the last second.
//! A node that is lost has lost all; until it is noticed, who asks it gets no answer.
//!
//! Left out: how long anything takes, and how many of the calls fail.

mod node;
mod outcome;

use std::collections::HashMap;

use kvstrata_tiers::{
    error::{Error, Result},
    tier::{Run, Tier},
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub use self::outcome::{Outcome, Spread};
use self::{node::Node, outcome::Lookup};
use crate::{
    cluster::{
        home::{Asked, Engine, home},
        plan::{Found, Prefix, Question, Sighting, precedence, survey},
    },
    limits::FANOUT_ROUNDS_MAX,
    members::Member,
    trace::{Request, Trace},
};

/// Until the others know that a node is lost: about what a failure detector takes with a heartbeat each second.
const NOTICED_AFTER_MS: u64 = 5000;
/// How often the others learn what is new in a filter.
const FILTER_INTERVAL_MS: u64 = 1000;

/// What is simulated.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// How many nodes, 1 to 1024.
    pub nodes: u32,
    /// How many engines, at least one.
    pub engines: u32,
    /// Zones that nodes and engines are in, in turn.
    pub zones: u32,
    /// Blocks that a node has room for.
    pub node_blocks: u32,
    /// How likely the next request of a session goes to another engine, 0 to 1; requests without a session
    /// always go to any.
    pub moves: f64,
    /// A node is lost at this time of the trace.
    pub lost_at_ms: Option<u64>,
    /// Decides which engine takes what.
    pub seed: u64,
}

impl Setup {
    fn check(&self) -> Result<()> {
        let refuse = |field: &str, given: String, allowed: &str| {
            Err(Error::invalid(format!("{field}: {given} given, {allowed} allowed")))
        };
        if !(1..=1024).contains(&self.nodes) {
            return refuse("nodes", self.nodes.to_string(), "1 to 1024");
        }
        if !(1..=65_536).contains(&self.engines) || self.zones == 0 {
            return refuse("engines", self.engines.to_string(), "1 to 65536, in 1 zone or more,");
        }
        if self.node_blocks == 0 {
            return refuse("room of a node", "less than a block".to_owned(), "one block or more");
        }
        if !(0.0..=1.0).contains(&self.moves) {
            return refuse("moves", self.moves.to_string(), "0 to 1");
        }
        Ok(())
    }
}

/// Lets a trace come to a fleet; `progress` is told of requests that are done.
///
/// # Errors
/// `Invalid` for a setup that cannot be.
pub fn simulate(trace: &Trace, setup: &Setup, progress: &dyn Fn(u64)) -> Result<Outcome> {
    setup.check()?;
    let mut fleet = Fleet::new(setup);
    for request in trace.requests() {
        fleet.serve(&request);
        progress(1);
    }
    Ok(fleet.finish())
}

struct Fleet<'a> {
    setup: &'a Setup,
    nodes: Vec<Node>,
    /// By engine: its home.
    homes: Vec<usize>,
    /// By session: the engine that had its last request.
    sessions: HashMap<u32, usize>,
    random: ChaCha8Rng,
    outcome: Outcome,
    /// The next time that filters are told.
    told_at_ms: u64,
    lost: Option<usize>,
    blocks: Vec<u32>,
}

impl<'a> Fleet<'a> {
    fn new(setup: &'a Setup) -> Self {
        let nodes = (0..setup.nodes).map(|_| Node::new(setup.node_blocks)).collect();
        let mut fleet = Self {
            setup,
            nodes,
            homes: Vec::new(),
            sessions: HashMap::new(),
            random: ChaCha8Rng::seed_from_u64(setup.seed),
            outcome: Outcome::default(),
            told_at_ms: 0,
            lost: None,
            blocks: Vec::new(),
        };
        fleet.settle();
        fleet
    }

    /// Gives each engine a home among the nodes there are: those that have one keep it.
    fn settle(&mut self) {
        let mut members: Vec<Member> = (0..self.setup.nodes)
            .map(|index| Member {
                index,
                name: format!("kvstrata-{index}"),
                zone: self.zone_of(index),
                draining: self.lost == Some(index as usize),
                ..Member::default()
            })
            .collect();
        for home in self.homes.iter().filter(|home| self.lost != Some(**home)) {
            if let Some(member) = members.get_mut(*home) {
                member.engines += 1;
            }
        }
        let known = std::mem::take(&mut self.homes);
        for engine in 0..self.setup.engines {
            let before = known.get(engine as usize).filter(|home| self.lost != Some(**home));
            let instance = format!("engine-{engine}:8000");
            let zone = self.zone_of(engine);
            let engine = Engine { instance: &instance, node: "", zone: &zone };
            let at = before.copied().or_else(|| {
                let at = home(&engine, &members, Asked::Nobody)? as usize;
                members.get_mut(at)?.engines += 1;
                Some(at)
            });
            self.homes.push(at.unwrap_or(0));
        }
    }

    fn zone_of(&self, number: u32) -> String {
        format!("zone-{}", number % self.setup.zones)
    }

    fn serve(&mut self, request: &Request<'_>) {
        self.pass(request.timestamp_ms);
        let engine = self.engine_of(request);
        let at = self.homes.get(engine).copied().unwrap_or(0);
        let mut blocks = std::mem::take(&mut self.blocks);
        blocks.clear();
        blocks.extend(request.blocks());
        let prefix = self.look_up(at, engine, &blocks, request.timestamp_ms);
        for found in prefix.runs().iter().filter(|found| found.holder as usize != at) {
            let read = blocks.get(found.run.start as usize..found.run.end as usize);
            if let Some(holder) = self.nodes.get_mut(found.holder as usize) {
                read.unwrap_or_default().iter().rev().for_each(|block| holder.touch(*block));
            }
        }
        if let Some(home) = self.nodes.get_mut(at) {
            blocks.iter().rev().for_each(|block| home.put(*block));
            home.requests += 1;
        }
        self.blocks = blocks;
    }

    /// What has happened until this time: filters were told, a node was lost.
    fn pass(&mut self, now_ms: u64) {
        self.outcome.begin(now_ms);
        if now_ms >= self.told_at_ms {
            self.told_at_ms = now_ms - now_ms % FILTER_INTERVAL_MS + FILTER_INTERVAL_MS;
            self.nodes.iter_mut().for_each(Node::tell);
        }
        if self.lost.is_none() && self.setup.lost_at_ms.is_some_and(|at| now_ms >= at) {
            let lost = self.random.random_range(0..self.nodes.len());
            if let Some(node) = self.nodes.get_mut(lost) {
                node.lose();
            }
            self.lost = Some(lost);
            self.outcome.engines_moved = self.homes.iter().filter(|home| **home == lost).count();
            self.settle();
        }
    }

    fn engine_of(&mut self, request: &Request<'_>) -> usize {
        let any = self.random.random_range(0..self.homes.len());
        let moves = self.random.random_bool(self.setup.moves);
        let Some(session) = request.session else { return any };
        let engine = self.sessions.entry(session).or_insert(any);
        if moves {
            *engine = any;
        }
        *engine
    }

    /// Looks up at `home` as a node does.
    fn look_up(&mut self, home: usize, engine: usize, blocks: &[u32], now_ms: u64) -> Prefix {
        let asked = u32::try_from(blocks.len()).unwrap_or(u32::MAX);
        let mut prefix = Prefix::new(asked, self.has(home, blocks, 0, asked));
        let own = prefix.end();
        let (mut members, mut nothing, mut silent, mut rounds) = (0, 0, 0, 0);
        let mut sightings = self.sightings(home, engine, blocks, &prefix, now_ms);
        while rounds < FANOUT_ROUNDS_MAX {
            let questions = prefix.questions(&sightings);
            if questions.is_empty() {
                break;
            }
            rounds += 1;
            members += questions.len();
            let answers = questions.into_iter().map(|question| self.answer(question, blocks));
            let answers: Vec<_> = answers.collect();
            for (_, answer) in &answers {
                nothing += usize::from(answer.as_ref().is_some_and(Vec::is_empty));
                silent += usize::from(answer.is_none());
            }
            prefix.take(answers);
            prefix.extend(self.has(home, blocks, prefix.end(), asked));
            sightings = self.sightings(home, engine, blocks, &prefix, now_ms);
        }
        let is_partial = prefix.is_partial(&sightings);
        let blocks = [asked, own, prefix.end()];
        self.outcome.count(&Lookup { blocks, members, nothing, silent, rounds, is_partial });
        prefix
    }

    fn sightings(
        &self,
        home: usize,
        engine: usize,
        blocks: &[u32],
        prefix: &Prefix,
        now_ms: u64,
    ) -> Vec<Sighting> {
        let rest = blocks.get(prefix.end() as usize..).unwrap_or_default();
        let Some(first) = rest.first().map(|block| node::digest(*block)) else { return Vec::new() };
        let noticed_at = self.setup.lost_at_ms.map(|at| at + NOTICED_AFTER_MS);
        let is_gone = |at: usize| {
            self.lost == Some(at) && noticed_at.is_some_and(|noticed| now_ms >= noticed)
        };
        let zones = self.setup.zones as usize;
        let others = (0..self.nodes.len()).filter(|at| *at != home && !is_gone(*at));
        let mut others: Vec<_> = others
            .map(|at| {
                let member = u32::try_from(at).unwrap_or(u32::MAX);
                (precedence(first, member, at % zones == engine % zones), member)
            })
            .collect();
        others.sort_unstable();
        let sighting = |member: u32| {
            let filter = self.nodes.get(member as usize)?.filter();
            let digests = rest.iter().map(|block| node::digest(*block));
            let blocks = Some(survey(filter, digests));
            Some(Sighting { member, blocks, can_answer: true })
        };
        others.into_iter().filter_map(|(_, member)| sighting(member)).collect()
    }

    /// What a node has of the positions from `start` on, without gaps.
    fn has(&self, at: usize, blocks: &[u32], start: u32, end: u32) -> Vec<Found> {
        let Some(node) = self.nodes.get(at) else { return Vec::new() };
        let asked = blocks.get(start as usize..end as usize).unwrap_or_default();
        let had = asked.iter().take_while(|block| node.has(**block)).count();
        let had = u32::try_from(had).unwrap_or(u32::MAX);
        if had == 0 {
            return Vec::new();
        }
        let run = Run { start, end: start + had, tier: Tier::Dram, pending: false, bytes: 0 };
        let holder = u32::try_from(at).unwrap_or(u32::MAX);
        vec![Found { run, holder, est_load: std::time::Duration::ZERO }]
    }

    fn answer(&self, question: Question, blocks: &[u32]) -> (Question, Option<Vec<Found>>) {
        let at = question.member as usize;
        let answers = self.lost != Some(at);
        (question, answers.then(|| self.has(at, blocks, question.start, question.end)))
    }

    fn finish(mut self) -> Outcome {
        let mut engines = vec![0_u64; self.nodes.len()];
        for home in &self.homes {
            if let Some(count) = engines.get_mut(*home) {
                *count += 1;
            }
        }
        self.outcome.engines = Spread::of(&engines);
        let requests: Vec<_> = self.nodes.iter().map(|node| node.requests).collect();
        self.outcome.requests_of_nodes = Spread::of(&requests);
        for node in &self.nodes {
            self.outcome.filter_bytes += node.filter().bytes() as u64;
            self.outcome.additions += node.additions;
            self.outcome.generations += node.generations;
            self.outcome.generation_bytes += node.generation_bytes;
            self.outcome.resident_blocks += node.blocks();
        }
        self.outcome.nodes = self.nodes.len() as u64;
        self.outcome
    }
}

#[cfg(test)]
mod tests;
