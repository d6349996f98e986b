//! What a router asks: where a prompt is, and what loading it costs whom.

use std::time::Duration;

use kvstrata_proto::router::v1::{self, router_client::RouterClient};
use kvstrata_tiers::{error::Result, tier::Tier};

use super::{Client, MESSAGE_BYTES_MAX};

/// A prompt by its tokens.
#[derive(Debug, Clone)]
pub(crate) struct TokenPrompt {
    /// The model that engines have opened their namespaces with.
    pub(crate) model: String,
    /// The LoRA adapter; empty for none.
    pub(crate) lora: String,
    /// The salt; empty for none.
    pub(crate) salt: String,
    /// All of it.
    pub(crate) tokens: Vec<u32>,
}

/// An engine that could take it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Loader {
    /// As it opens namespaces.
    pub(crate) instance: String,
    /// Where it runs; empty: as it said when it opened.
    pub(crate) node: String,
    /// Leading blocks that its device has.
    pub(crate) device_blocks: u32,
}

/// What tiers have of a prompt.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TierAnswer {
    /// Full blocks of the prompt.
    pub(crate) total_blocks: u32,
    /// What engines that are known could load.
    pub(crate) instances: Vec<(String, Vec<TierRun>)>,
    /// What namespaces have, whoever loads it.
    pub(crate) prefixes: Vec<Vec<TierRun>>,
    /// What loading costs now.
    pub(crate) costs: Vec<TierCost>,
}

/// Blocks `start..end` are on a tier of a holder.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TierRun {
    pub(crate) start: u32,
    pub(crate) end: u32,
    /// None: one that is not known here.
    pub(crate) tier: Option<Tier>,
    pub(crate) holder: String,
    /// How far that is, the greater the farther; 0 where it is not said.
    pub(crate) distance: i32,
    pub(crate) bytes: u64,
    /// Milliseconds to load all of it; 0 where it is not said.
    pub(crate) load_ms: f64,
}

/// What loading from a tier of a node costs, from so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct TierCost {
    pub(crate) node: String,
    pub(crate) tier: Option<Tier>,
    pub(crate) distance: i32,
    /// Bytes per second.
    pub(crate) bandwidth: f64,
    pub(crate) setup_ms: f64,
    pub(crate) queue_ms: f64,
    /// Nothing can be read from it now.
    pub(crate) down: bool,
}

impl Client {
    /// Finds what tiers have of a prompt, and what loading it costs each of `loaders`. What the server
    /// does not find out within `deadline` is left out.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe.
    pub(crate) async fn prompt_tiers(
        &self,
        prompt: TokenPrompt,
        loaders: Vec<Loader>,
        deadline: Duration,
    ) -> Result<TierAnswer> {
        let request = v1::LookupRequest {
            prompts: vec![prompt_of(prompt)],
            instances: loaders.into_iter().map(|loader| candidate_of(loader, None)).collect(),
            deadline_ms: super::lookup::millis(deadline),
            ..Default::default()
        };
        let mut wire = self.router_wire();
        let reply = self.call("router lookup", wire.lookup(self.request(request))).await?;
        Ok(answer_of(reply))
    }

    /// Has what `loader` will load of a prompt brought nearer, and counted in costs for `reserve`.
    ///
    /// # Errors
    /// Whatever keeps the call from being answered.
    ///
    /// # Cancel safety
    /// Safe: a reservation ends by itself.
    pub(crate) async fn expect_load(
        &self,
        prompt: TokenPrompt,
        loader: Loader,
        prefill_block_ms: f64,
        reserve: Duration,
    ) -> Result<()> {
        let prefill = v1::Prefill { linear_ms: prefill_block_ms, quadratic_ms: 0.0 };
        let request = v1::ScoreRequest {
            prompt: Some(prompt_of(prompt)),
            candidates: vec![candidate_of(loader, Some(prefill))],
            prefill: Some(prefill),
            prefetch: true,
            reserve_ms: super::lookup::millis(reserve),
            ..Default::default()
        };
        let mut wire = self.router_wire();
        self.call("router score", wire.score(self.request(request))).await.map(drop)
    }

    fn router_wire(&self) -> RouterClient<super::access::Carrier> {
        RouterClient::new(self.channel())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }
}

fn prompt_of(prompt: TokenPrompt) -> v1::Prompt {
    v1::Prompt {
        model: prompt.model,
        lora_name: prompt.lora,
        cache_salt: prompt.salt,
        token_ids: prompt.tokens,
        ..Default::default()
    }
}

fn candidate_of(loader: Loader, prefill: Option<v1::Prefill>) -> v1::Candidate {
    let Loader { instance, node, device_blocks } = loader;
    v1::Candidate { instance, node, device_blocks, prefill, ..Default::default() }
}

fn answer_of(reply: v1::LookupResponse) -> TierAnswer {
    let costs = reply.tiers.into_iter().map(cost_of).collect();
    let Some(answer) = reply.answers.into_iter().next() else {
        return TierAnswer { costs, ..TierAnswer::default() };
    };
    let instances = answer.instances.into_iter().map(|instance| {
        let segments = instance.segments.into_iter().map(run_of_segment).collect();
        (instance.instance, segments)
    });
    let prefixes = answer.prefixes.into_iter();
    let prefixes = prefixes.map(|prefix| prefix.runs.into_iter().map(run_of).collect());
    TierAnswer {
        total_blocks: answer.total_blocks,
        instances: instances.collect(),
        prefixes: prefixes.collect(),
        costs,
    }
}

fn run_of(run: v1::Run) -> TierRun {
    TierRun {
        tier: tier_of(run.tier()),
        start: run.start,
        end: run.end,
        holder: run.holder,
        bytes: run.bytes,
        ..TierRun::default()
    }
}

fn run_of_segment(segment: v1::Segment) -> TierRun {
    TierRun {
        tier: tier_of(segment.tier()),
        start: segment.start,
        end: segment.end,
        holder: segment.holder,
        distance: segment.locality,
        bytes: segment.bytes,
        load_ms: segment.est_load_ms,
    }
}

fn cost_of(cost: v1::TierCost) -> TierCost {
    TierCost {
        tier: tier_of(cost.tier()),
        down: cost.state() == v1::TierState::Down,
        node: cost.node,
        distance: cost.locality,
        bandwidth: cost.bandwidth,
        setup_ms: cost.setup_ms,
        queue_ms: cost.queue_ms,
    }
}

fn tier_of(tier: v1::Tier) -> Option<Tier> {
    match tier {
        v1::Tier::Dram => Some(Tier::Dram),
        v1::Tier::Nvme => Some(Tier::Nvme),
        v1::Tier::Object => Some(Tier::Object),
        v1::Tier::Unspecified => None,
    }
}
