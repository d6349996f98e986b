//! Lookup: where prefixes are, and what each instance would load of them.

use std::sync::Arc;

use kvstrata_tiers::{error::Result, tier::Tier};
use tokio::{task::yield_now, time::Instant};

use super::{Candidate, Found, Offer, Prefix, Prompt, offer::Known};
use crate::{
    auth::Bearer,
    node::Node,
    score::{Prefill, Settings, break_even_blocks},
};

/// What is asked of some prompts.
#[derive(Debug)]
pub(crate) struct Question {
    /// The prompts.
    pub(crate) prompts: Vec<Prompt>,
    /// Who could take them; empty: all who have opened their namespaces.
    pub(crate) candidates: Vec<Candidate>,
    /// How long candidates take to prefill that do not say.
    pub(crate) prefill: Option<Prefill>,
    /// Begin to bring what is found at this node towards dram.
    pub(crate) prefetch: bool,
    /// What is not known by then is left out.
    pub(crate) deadline: Instant,
}

/// What is answered.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    /// Of each prompt, in their order; of fewer if there was no time.
    pub(crate) prompts: Vec<(Found, Vec<Advised>)>,
    /// Something was left out.
    pub(crate) partial: bool,
}

/// What one instance would load.
#[derive(Debug)]
pub(crate) struct Advised {
    /// As it was asked for, or as it calls itself.
    pub(crate) instance: String,
    pub(crate) offer: Offer,
    /// So many blocks are worth loading.
    pub(crate) best_blocks: u32,
    /// Milliseconds that it takes to load these.
    pub(crate) load_ms: f64,
    /// Milliseconds that it saves; 0 if nobody said how long prefilling takes.
    pub(crate) saved_ms: f64,
    /// In blocks of prefill.
    pub(crate) credit_blocks: f64,
    /// The fewest blocks of each tier that are worth loading, hot to cold; none if no number is.
    pub(crate) break_even: [Option<u32>; 3],
}

impl Node {
    /// Says where the prefixes of prompts are, and what loading them costs each candidate.
    ///
    /// # Errors
    /// `UnknownNamespace` for one that was named; `Invalid` for what does not fit the namespaces.
    ///
    /// # Cancel safety
    /// Safe: loads that were started go on.
    pub(crate) async fn advise(
        self: &Arc<Self>,
        bearer: &Bearer,
        question: &Question,
    ) -> Result<Answer> {
        let mut answer = Answer::default();
        for prompt in &question.prompts {
            if Instant::now() >= question.deadline {
                answer.partial = true;
                break;
            }
            let found = self.find_prefixes(bearer, prompt)?;
            answer.prompts.push((found, Vec::new()));
            // A long list of prompts leaves others their turn.
            if question.prompts.len() > 1 {
                yield_now().await;
            }
        }
        if self.roster.has_others() {
            let found = answer.prompts.iter_mut().map(|(found, _)| found);
            answer.partial |= self.widen(found, &question.candidates, question.deadline).await;
        }
        for (found, advised) in &mut answer.prompts {
            answer.partial |= self.advise_of(found, question, advised);
            if question.prefetch {
                self.fetch_ahead(found)?;
            }
            yield_now().await;
        }
        Ok(answer)
    }

    /// Says what each candidate would load of what was found. Returns whether there was no time for all.
    fn advise_of(&self, found: &Found, question: &Question, advised: &mut Vec<Advised>) -> bool {
        let known = self.known(found);
        let listed = question.candidates.is_empty().then(|| known.candidates());
        let candidates = listed.as_ref().unwrap_or(&question.candidates);
        advised.reserve(candidates.len());
        for candidate in candidates {
            if Instant::now() >= question.deadline {
                return true;
            }
            let prefill = candidate.prefill.or(question.prefill);
            advised.extend(self.advised(found, &known, candidate, prefill));
        }
        false
    }

    pub(super) fn advised(
        &self,
        found: &Found,
        known: &Known,
        candidate: &Candidate,
        prefill: Option<Prefill>,
    ) -> Option<Advised> {
        let offer = self.offer(found, known, candidate, prefill)?;
        let instance = candidate.instance.clone();
        let Some(prefill) = prefill else {
            let load_ms = offer.load_ms();
            let best_blocks = offer.blocks();
            let (saved_ms, credit_blocks, break_even) = (0.0, 0.0, [None; 3]);
            return Some(Advised {
                instance,
                offer,
                best_blocks,
                load_ms,
                saved_ms,
                credit_blocks,
                break_even,
            });
        };
        let total = found.total_blocks;
        let assessed = offer.assess(total, candidate, prefill, &Settings::default());
        let block_ms = prefill.mean_ms(candidate.device_blocks, total);
        let namespace = found.prefixes.get(offer.prefix).map(|prefix| &prefix.namespace);
        let block_bytes = namespace.map_or(0, |namespace| namespace.layout().block_bytes());
        let break_even = Tier::ALL.map(|tier| {
            let own = || self.costs.load_cost(tier, offer.locality, block_bytes);
            let own = self.can_load(tier).then(own);
            let costs = own.into_iter().chain(offer.costs_of_others(tier));
            costs.filter_map(|cost| break_even_blocks(block_ms, cost)).min()
        });
        Some(Advised {
            instance,
            offer,
            best_blocks: assessed.best_blocks,
            load_ms: assessed.load_ms,
            saved_ms: assessed.saved_ms,
            credit_blocks: assessed.credit_blocks,
            break_even,
        })
    }

    /// Begins to bring all that was found at this node towards dram.
    fn fetch_ahead(self: &Arc<Self>, found: &Found) -> Result<()> {
        for prefix in &found.prefixes {
            self.fetch_own(prefix, 0, prefix.blocks())?;
        }
        Ok(())
    }

    /// Begins to bring what this node has of the blocks `start..end` towards dram. What others have stays where it is:
    /// they would have to be asked to load it, and nobody is waited for once an answer is made.
    pub(super) fn fetch_own(self: &Arc<Self>, prefix: &Prefix, start: u32, end: u32) -> Result<()> {
        for range in prefix.own(start, end) {
            let hashes = prefix.hashes(range.start, range.end)?;
            self.prefetch(&prefix.namespace, hashes);
        }
        Ok(())
    }
}
