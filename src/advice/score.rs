//! Score: which of some candidates to take.

use std::{iter, sync::Arc, time::Duration};

use kvstrata_tiers::error::{Error, Result};
use tokio::{task::coop::consume_budget, time::Instant};

use super::{Candidate, Found, Offer, Prompt, offer::assess_with};
use crate::{
    auth::Bearer,
    id::{self, ReservationId},
    node::Node,
    score::{Assessment, Mode, Prefill, Settings, pick, probabilities},
};

/// A prompt and those who could take it.
#[derive(Debug)]
pub(crate) struct Contest {
    /// The prompt.
    pub(crate) prompt: Prompt,
    /// Who could take it.
    pub(crate) candidates: Vec<Candidate>,
    /// How long those take to prefill that do not say.
    pub(crate) prefill: Option<Prefill>,
    /// How they are compared.
    pub(crate) settings: Settings,
    /// See [`pick`].
    pub(crate) temperature: f64,
    /// Of the draw; none: nobody can predict it.
    pub(crate) seed: Option<u64>,
    /// Bring what the one that is taken would load from this node towards dram.
    pub(crate) prefetch: bool,
    /// Reserve what it would load from there for so long; zero: not.
    pub(crate) reserve: Duration,
    /// Candidates that are not assessed by then count as having nothing to load.
    pub(crate) deadline: Instant,
}

/// Who is to take the prompt.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Index of the one to take.
    pub(crate) taken: usize,
    /// In the order of the candidates.
    pub(crate) scored: Vec<Scored>,
    /// What was reserved, if anything was.
    pub(crate) reserved: Option<ReservationId>,
    /// Blocks of the whole prompt.
    pub(crate) total_blocks: u32,
    /// Some were not assessed, or a member that may have more has not said so.
    pub(crate) partial: bool,
}

/// What one candidate would be like.
#[derive(Debug)]
pub(crate) struct Scored {
    pub(crate) assessment: Assessment,
    /// How likely it is taken.
    pub(crate) probability: f64,
}

impl Node {
    /// Says which candidate to take.
    ///
    /// # Errors
    /// `UnknownNamespace` for one that was named; `Invalid` for what does not fit the namespaces, or if it
    /// is not known how long a candidate takes to prefill although that decides.
    ///
    /// # Cancel safety
    /// Safe: loads that were started go on.
    pub(crate) async fn judge(
        self: &Arc<Self>,
        bearer: &Bearer,
        contest: &Contest,
    ) -> Result<Outcome> {
        let mut found = self.find_prefixes(bearer, &contest.prompt)?;
        let mut partial = false;
        if self.roster.has_others() {
            let found = iter::once(&mut found);
            partial = self.widen(found, &contest.candidates, contest.deadline).await;
        }
        let known = self.known(&found);
        let mut offers = Vec::with_capacity(contest.candidates.len());
        let mut assessed = Vec::with_capacity(contest.candidates.len());
        let mut is_late = false;
        for (at, candidate) in contest.candidates.iter().enumerate() {
            let prefill = contest.prefill_of(at, candidate)?;
            is_late = is_late || Instant::now() >= contest.deadline;
            let offer = match is_late {
                true => None,
                false => self.offer(&found, &known, candidate, Some(prefill)),
            };
            let segments = offer.as_ref().map_or(&[][..], Offer::segments);
            let (total, settings) = (found.total_blocks, &contest.settings);
            assessed.push(assess_with(segments, total, candidate, prefill, settings));
            offers.push(offer);
            consume_budget().await;
        }
        let (taken, probabilities) = contest.draw(&assessed)?;
        let reserved = match (offers.get(taken), assessed.get(taken)) {
            (Some(Some(offer)), Some(won)) if won.best_blocks > 0 => {
                self.expect(bearer, contest, (&found, offer, won.best_blocks))?
            }
            _ => None,
        };
        let scored = assessed.into_iter().zip(probabilities);
        let scored = scored.map(|(assessment, probability)| Scored { assessment, probability });
        let (scored, total_blocks) = (scored.collect(), found.total_blocks);
        partial |= is_late;
        Ok(Outcome { taken, scored, reserved, total_blocks, partial })
    }

    /// Prepares for so many blocks that the one that is taken will load: reserves what they take of this node, and
    /// brings them, which takes the place of that. Where nothing more can be reserved, nothing is.
    fn expect(
        self: &Arc<Self>,
        bearer: &Bearer,
        contest: &Contest,
        (found, offer, blocks): (&Found, &Offer, u32),
    ) -> Result<Option<ReservationId>> {
        let loads = if contest.reserve.is_zero() { Vec::new() } else { offer.loads(blocks) };
        let reserve = || self.costs.reserve(bearer.tenant(), &loads, contest.reserve);
        let reserved = match (!loads.is_empty()).then(reserve).transpose() {
            Ok(reserved) => reserved.map(|(id, _ttl)| id),
            Err(error) if error.kind().is_retryable() => None,
            Err(error) => return Err(error),
        };
        if let Some(prefix) = found.prefixes.get(offer.prefix).filter(|_| contest.prefetch) {
            let start = offer.pieces.first().map_or(0, |piece| piece.start);
            self.fetch_own(prefix, start, start.saturating_add(blocks))?;
        }
        Ok(reserved)
    }
}

impl Contest {
    fn prefill_of(&self, at: usize, candidate: &Candidate) -> Result<Prefill> {
        match candidate.prefill.or(self.prefill) {
            Some(prefill) => Ok(prefill),
            None if self.settings.mode == Mode::Timed => Err(Error::invalid(format!(
                "candidates[{at}].prefill: nothing given, and no prefill for all: required where \
                 time decides"
            ))),
            None => Ok(Prefill::linear(0.0)),
        }
    }

    /// Draws by cost; of equals the first by name. Returns how likely each one was, too.
    fn draw(&self, assessed: &[Assessment]) -> Result<(usize, Vec<f64>)> {
        let mut order: Vec<usize> = (0..assessed.len()).collect();
        order.sort_by_key(|at| {
            self.candidates.get(*at).map(|each| (each.instance.as_str(), each.node.as_str()))
        });
        let cost = |at: &usize| assessed.get(*at).map_or(f64::INFINITY, |each| each.cost);
        let costs: Vec<f64> = order.iter().map(cost).collect();
        let seed = match (self.temperature > 0.0, self.seed) {
            (true, None) => id::random_seed()?,
            (_, seed) => mixed(seed.unwrap_or_default()),
        };
        let picked = pick(&costs, self.temperature, uniform(seed));
        let picked = picked.and_then(|at| order.get(at).copied());
        let Some(picked) = picked else {
            return Err(Error::invalid("candidates: none given, at least 1 required"));
        };
        let mut shares = vec![0.0; assessed.len()];
        for (at, share) in order.iter().zip(probabilities(&costs, self.temperature)) {
            if let Some(place) = shares.get_mut(*at) {
                *place = share;
            }
        }
        Ok((picked, shares))
    }
}

/// Seeds that lie close together draw as others do.
fn mixed(seed: u64) -> u64 {
    let bytes = *blake3::hash(&seed.to_le_bytes()).as_bytes();
    let [a, b, c, d, e, f, g, h, ..] = bytes;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// A number of `[0, 1)`.
#[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
fn uniform(random: u64) -> f64 {
    (random >> 11) as f64 / (1_u64 << 53) as f64
}
