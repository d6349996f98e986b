//! Whom a lookup asks of what this node lacks, and what comes of the answers. Pure: [`fanout`](super::fanout) asks,
//! and the simulation of a fleet asks its own nodes in the same way.
//!
//! A lookup has a prefix, at first what this node has. At its end, the first block that this node lacks, members are
//! asked whose filters may have that block, those with the longest run of such blocks first. The longest of their
//! answers becomes part of the prefix, then what this node has behind it, and members are asked of the next block.
//!
//! Invariants
//! - The prefix has no gaps, and names no block that this node or the holder has not said to be there.
//! - What a member says is believed only as far as it is an answer to what it was asked.
//! - A lookup is partial if there may be more: a member that may have the next block has not said that it lacks it.
//!   One whose filter is not known, or too old, may have anything.

use std::{
    cmp::Reverse,
    collections::{HashMap, HashSet},
    time::Duration,
};

use kvstrata_tiers::tier::{Run, TierCounts};

use super::filter::Filter;
use crate::limits::{FANOUT_ASKED_MAX, FANOUT_BEYOND_BLOCKS, FANOUT_SURVEY_BLOCKS};

/// A run of the prefix, and who has it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Found {
    /// Where it is, on what tier.
    pub run: Run,
    /// Index of the member that has it.
    pub holder: u32,
    /// How long all of it takes to be loaded.
    pub est_load: Duration,
}

/// What is known of a member at the end of a prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sighting {
    /// Index of the member.
    pub member: u32,
    /// So many blocks from there on it may have, as far as was looked; none if it may have anything.
    pub blocks: Option<u32>,
    /// It can be asked now.
    pub can_answer: bool,
}

/// A question to one member: what it has of the positions `start..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Question {
    /// Index of the member.
    pub member: u32,
    /// The first position.
    pub start: u32,
    /// One past the last.
    pub end: u32,
}

/// How many of these blocks a node may have, from the first one on; at most [`FANOUT_SURVEY_BLOCKS`] are looked at.
#[must_use]
pub fn survey(filter: &Filter, digests: impl Iterator<Item = u64>) -> u32 {
    let looked = digests.take(FANOUT_SURVEY_BLOCKS);
    let had = looked.take_while(|digest| filter.may_have(*digest)).count();
    u32::try_from(had).unwrap_or(u32::MAX)
}

/// Which of the members that may have as much come first: near ones, and among those others for each block that is
/// looked for first, so that one of many holders is not asked by all. The lowest comes first.
#[must_use]
pub fn precedence(first: u64, member: u32, is_near: bool) -> (bool, u64) {
    let mixed = (first ^ u64::from(member)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (!is_near, mixed ^ (mixed >> 32))
}

/// A lookup's prefix as it grows.
#[derive(Debug)]
pub struct Prefix {
    asked: u32,
    runs: Vec<Found>,
    /// By member: the position that it has said to lack.
    lacks: HashMap<u32, u32>,
    /// Members that did not answer.
    silent: HashSet<u32>,
}

impl Prefix {
    /// What this node has of so many blocks, from the first one on.
    #[must_use]
    pub fn new(asked: u32, own: Vec<Found>) -> Self {
        let mut prefix =
            Self { asked, runs: Vec::new(), lacks: HashMap::new(), silent: HashSet::new() };
        prefix.extend(own);
        prefix
    }

    /// One past its last position: the first block that is not in it.
    #[must_use]
    pub fn end(&self) -> u32 {
        self.runs.last().map_or(0, |found| found.run.end)
    }

    /// Whether it has all that was asked for.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.end() >= self.asked
    }

    /// Adds what follows at its end, up to the first run that does not.
    pub fn extend(&mut self, runs: impl IntoIterator<Item = Found>) {
        for found in runs {
            let Run { start, end, .. } = found.run;
            if start != self.end() || start >= end || end > self.asked {
                return;
            }
            self.runs.push(found);
        }
    }

    /// Whom to ask now, given what is known of the others at its end; among equals the first ones.
    #[must_use]
    pub fn questions(&self, sightings: &[Sighting]) -> Vec<Question> {
        let start = self.end();
        let may = sightings.iter().filter(|sighting| sighting.can_answer && self.is_open(sighting));
        let mut may: Vec<_> =
            may.filter_map(|sighting| Some((sighting.member, sighting.blocks?))).collect();
        may.sort_by_key(|(_, blocks)| Reverse(*blocks));
        may.truncate(FANOUT_ASKED_MAX);
        let question = |(member, blocks): (u32, u32)| {
            let looked_all = blocks as usize >= FANOUT_SURVEY_BLOCKS;
            let beyond = start
                .saturating_add(blocks)
                .saturating_add(u32::try_from(FANOUT_BEYOND_BLOCKS).unwrap_or(u32::MAX));
            let end = if looked_all { self.asked } else { beyond.min(self.asked) };
            Question { member, start, end }
        };
        may.into_iter().map(question).collect()
    }

    /// Whether a member may have the block at the end, as far as is known.
    fn is_open(&self, sighting: &Sighting) -> bool {
        sighting.blocks != Some(0)
            && !self.silent.contains(&sighting.member)
            && self.lacks.get(&sighting.member) != Some(&self.end())
    }

    /// Takes the answers to a round of questions: the runs that a member has said to have of what it was asked, or
    /// none if it did not answer. Returns by how many blocks the prefix has grown.
    pub fn take(&mut self, answers: Vec<(Question, Option<Vec<Found>>)>) -> u32 {
        let before = self.end();
        let mut best: Option<(u32, Duration, Vec<Found>)> = None;
        for (question, answer) in answers {
            let Some(answer) = answer else {
                self.silent.insert(question.member);
                continue;
            };
            let runs = believed(question, answer);
            let end = runs.last().map_or(question.start, |found| found.run.end);
            if end < question.end {
                self.lacks.insert(question.member, end);
            }
            let load = runs.iter().map(|found| found.est_load).sum();
            let key = |end: u32, load: Duration| (Reverse(end), load);
            if end > question.start
                && best.as_ref().is_none_or(|(most, least, _)| key(end, load) < key(*most, *least))
            {
                best = Some((end, load, runs));
            }
        }
        self.extend(best.map(|(_, _, runs)| runs).unwrap_or_default());
        self.end().saturating_sub(before)
    }

    /// Whether there may be more, given what is known of the others at its end.
    #[must_use]
    pub fn is_partial(&self, sightings: &[Sighting]) -> bool {
        let open = |sighting: &Sighting| {
            sighting.blocks != Some(0) && self.lacks.get(&sighting.member) != Some(&self.end())
        };
        !self.is_whole() && sightings.iter().any(open)
    }

    /// Its runs, in order, without gaps.
    #[must_use]
    pub fn runs(&self) -> &[Found] {
        &self.runs
    }

    /// Leading blocks that are readable now.
    #[must_use]
    pub fn readable(&self) -> u32 {
        let readable = self.runs.iter().take_while(|found| !found.run.pending);
        readable.last().map_or(0, |found| found.run.end)
    }

    /// Its blocks by tier, whoever has them; the sum is what was asked.
    #[must_use]
    pub fn counts(&self) -> TierCounts {
        let runs: Vec<Run> = self.runs.iter().map(|found| found.run).collect();
        TierCounts::of_prefix(&runs, self.asked)
    }

    /// Blocks that others have.
    #[must_use]
    pub fn blocks_of_others(&self, own: u32) -> u32 {
        let others = self.runs.iter().filter(|found| found.holder != own);
        others.map(|found| found.run.end - found.run.start).sum()
    }
}

/// The readable runs of an answer, from the first position that was asked for on and without gaps.
fn believed(question: Question, answer: Vec<Found>) -> Vec<Found> {
    let mut next = question.start;
    let follows = |found: &Found| {
        let Run { start, end, pending, .. } = found.run;
        let is_next = start == next && start < end && end <= question.end && !pending;
        next = end;
        is_next
    };
    let named = |found: Found| Found { holder: question.member, ..found };
    answer.into_iter().take_while(follows).map(named).collect()
}

#[cfg(test)]
mod tests;
