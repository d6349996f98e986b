//! What is known of a request when its engine is chosen, and the choice.
//!
//! Gathering takes time (an engine may have to tokenise, kvstrata is asked); choosing takes none, and one
//! choice at a time is made, so that each sees the load of those before it.

use std::{sync::Arc, time::Duration};

use axum::body::Bytes;
use tokio::time::timeout;
use tracing::debug;

use super::{
    Mode, Router,
    chain::{Identity, chain},
    decide::{self, Choice, Offer},
    engine::Meant,
    metrics::TiersSaid,
    request::{self, Asked, Prompt},
    slots::{Slot, as_blocks},
    tiers::{Found, Question, Taken},
};
use crate::score::Segment;

/// Tokens in a block, as long as no engine has said it: what most have.
const BLOCK_TOKENS_DEFAULT: usize = 16;
/// Bytes of a body for one token, where nothing else is known of the prompt.
const BODY_BYTES_PER_TOKEN: usize = 4;
/// How long a load that was decided is counted at least, and at most.
const RESERVE_LEAST: Duration = Duration::from_millis(50);
const RESERVE_MOST: Duration = Duration::from_secs(10);
/// How much longer than an answer telling may take: nobody waits for it.
const TELL_PATIENCE: u32 = 10;

/// A request, and what each engine could do for it.
#[derive(Debug)]
pub(super) struct Plan {
    /// How the engine is chosen: by less than was asked for if too little is known.
    pub(super) mode: Mode,
    /// What the tiers had.
    pub(super) tiers: TiersSaid,
    /// Full blocks of the prompt; an estimate if it is not known.
    pub(super) blocks: u32,
    /// Whether tokens are sent as they come.
    pub(super) stream: bool,
    /// Tokens in a block.
    unit: usize,
    chain: Arc<[u64]>,
    tokens: Option<Arc<[u32]>>,
    meant: Meant,
    salt: String,
    options: Vec<Possible>,
}

/// What one engine could do.
#[derive(Debug)]
struct Possible {
    engine: usize,
    device: u32,
    segments: Vec<Segment>,
    found: Found,
}

impl Router {
    /// Finds out what is to be known for a request.
    pub(super) async fn plan(&self, body: &Bytes) -> Plan {
        // What cannot be read is the engine's to refuse.
        let asked = request::read(body).unwrap_or_default();
        let engines = self.candidates(&asked.model);
        let meant = engines.iter().find_map(|at| self.engines.get(*at)?.meaning(&asked.model));
        let meant =
            meant.unwrap_or_else(|| Meant { model: asked.model.clone(), lora: String::new() });
        let unit = self.unit();
        let tokens = match self.mode.wants_prompt() {
            true => self.tokens_of(&asked, body, &engines).await,
            false => None,
        };
        let salt = asked.cache_salt.unwrap_or_default();
        let identity = Identity { lora: meant.lora.clone(), salt: salt.clone() };
        let links = tokens.as_deref().map(|tokens| chain(tokens, unit, &identity));
        let links: Arc<[u64]> = links.unwrap_or_default().into();
        let mut plan = Plan {
            mode: self.mode,
            tiers: TiersSaid::Off,
            blocks: u32::try_from(links.len()).unwrap_or(u32::MAX),
            stream: asked.stream.unwrap_or(false),
            unit,
            chain: links,
            tokens,
            meant,
            salt,
            options: Vec::new(),
        };
        plan.options = self.devices_of(&plan, &identity, engines);
        if plan.tokens.is_none() {
            let estimate = body.len() / BODY_BYTES_PER_TOKEN / unit;
            plan.blocks = u32::try_from(estimate).unwrap_or(u32::MAX);
            if self.mode.wants_prompt() {
                self.metrics.blind.inc();
                plan.mode = Mode::LeastLoaded;
            }
        } else if self.mode.wants_tiers() && plan.blocks > 0 {
            self.ask_tiers(&mut plan).await;
        }
        self.metrics.record_tiers(plan.tiers);
        plan
    }

    /// Engines that may take a request for this model: those that serve it, or do not say.
    fn candidates(&self, model: &str) -> Vec<usize> {
        let up: Vec<_> = self.engines.iter().enumerate().filter(|(_, one)| one.is_up()).collect();
        let serving = up.iter().filter(|(_, one)| one.serves(model) != Some(false));
        let serving: Vec<_> = serving.map(|(at, _)| *at).collect();
        // If none does, any of them says so best.
        if serving.is_empty() { up.into_iter().map(|(at, _)| at).collect() } else { serving }
    }

    fn unit(&self) -> usize {
        let told = self.devices.block_tokens().into_iter().filter(|tokens| *tokens > 0);
        told.min().unwrap_or(BLOCK_TOKENS_DEFAULT)
    }

    async fn tokens_of(
        &self,
        asked: &Asked,
        body: &Bytes,
        engines: &[usize],
    ) -> Option<Arc<[u32]>> {
        let body = match &asked.prompt {
            Some(Prompt::Tokens(tokens)) => return Some(tokens.as_slice().into()),
            Some(Prompt::FirstText(text)) => {
                let alone = serde_json::json!({ "model": asked.model, "prompt": text });
                Bytes::from(alone.to_string())
            }
            Some(Prompt::Text) | None => body.clone(),
        };
        let idlest = engines.iter().filter_map(|at| self.engines.get(*at));
        let engine = idlest.min_by_key(|engine| engine.slots.load(&[]).requests)?;
        match self.tokens.of(&engine.spec.authority, &body).await {
            Ok(tokens) => Some(tokens),
            Err(why) => {
                debug!(engine = engine.spec.name, %why, "prompt not tokenised");
                None
            }
        }
    }

    /// What the devices have of the prompt, in blocks of the unit.
    fn devices_of(&self, plan: &Plan, identity: &Identity, engines: Vec<usize>) -> Vec<Possible> {
        let sizes = self.devices.block_tokens();
        let size_of = |engine: usize| sizes.get(engine).copied().filter(|size| *size > 0);
        let mut prefixes: Vec<(usize, Vec<u32>)> = Vec::new();
        let mut device = |engine: usize| {
            let size = size_of(engine)?;
            if !prefixes.iter().any(|(known, _)| *known == size) {
                let links = match &plan.tokens {
                    Some(tokens) if size != plan.unit => chain(tokens, size, identity).into(),
                    _ => Arc::clone(&plan.chain),
                };
                prefixes.push((size, self.devices.prefixes(&links, self.engines.len())));
            }
            let (_, of_size) = prefixes.iter().find(|(known, _)| *known == size)?;
            let blocks = usize::try_from(*of_size.get(engine)?).ok()?;
            u32::try_from(blocks.saturating_mul(size) / plan.unit).ok()
        };
        let possible = |engine| Possible {
            engine,
            device: device(engine).unwrap_or(0).min(plan.blocks),
            segments: Vec::new(),
            found: Found::default(),
        };
        engines.into_iter().map(possible).collect()
    }

    /// Asks what the tiers have, within the deadline.
    async fn ask_tiers(&self, plan: &mut Plan) {
        let (Some(tiers), Some(tokens)) = (&self.tiers, &plan.tokens) else { return };
        let engines: Vec<_> = plan.options.iter().map(|one| self.name_of(one.engine)).collect();
        let question = Question {
            model: &plan.meant.model,
            lora: &plan.meant.lora,
            salt: &plan.salt,
            tokens,
            engines: &engines,
        };
        let found = match timeout(self.tiers_deadline, tiers.lookup(question)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => {
                debug!(%error, "tiers not asked");
                plan.tiers = TiersSaid::Failed;
                return;
            }
            Err(_elapsed) => {
                plan.tiers = TiersSaid::Late;
                return;
            }
        };
        let any = found.iter().any(|found| !found.pieces.is_empty());
        plan.tiers = if any { TiersSaid::Found } else { TiersSaid::Nothing };
        for (possible, found) in plan.options.iter_mut().zip(found) {
            possible.segments = found.behind(possible.device, plan.unit);
            possible.found = found;
        }
    }

    /// What an engine is called where it opens namespaces, and where it runs.
    fn name_of(&self, engine: usize) -> (&str, &str) {
        let spec = self.engines.get(engine).map(|engine| &engine.spec);
        spec.map_or(("", ""), |spec| (&spec.instance, &spec.node))
    }

    /// What each engine comes to now, those left out that were tried already.
    pub(super) fn weigh(&self, plan: &Plan, tried: &[usize]) -> Vec<Choice> {
        let held = self.devices.blocks();
        let left = plan.options.iter().filter(|one| !tried.contains(&one.engine));
        let offers: Vec<Offer> = left
            .filter_map(|possible| {
                let engine = self.engines.get(possible.engine)?;
                // Only those that look ahead count what the prompt adds.
                let chain = if plan.mode.wants_prompt() { &*plan.chain } else { &[] };
                Some(Offer {
                    engine: possible.engine,
                    device: possible.device,
                    load: engine.slots.load(chain),
                    segments: possible.segments.clone(),
                    prefill: engine.learned().prefill(plan.unit),
                    held: held.get(possible.engine).copied().unwrap_or(0),
                    turn: engine.turn(),
                })
            })
            .collect();
        decide::weigh(plan.mode, plan.blocks, &offers)
    }

    /// Chooses an engine, which has the request from now on.
    pub(super) fn choose(&self, plan: &Plan, tried: &[usize]) -> Option<(Choice, Slot)> {
        let mut turn = self.turn.lock();
        let choice = decide::take(&self.weigh(plan, tried))?;
        let engine = self.engines.get(choice.engine)?;
        *turn += 1;
        engine.take_turn(*turn);
        let computed = f64::from(choice.computed);
        let slot = engine.slots.enter(Arc::clone(&plan.chain), computed, choice.prefill_ms);
        self.metrics.record_choice(&engine.spec.name, &choice);
        Some((choice, slot))
    }

    /// Tells the tiers who will load, if somebody will; nobody waits for it.
    pub(super) fn tell_tiers(&self, plan: &Plan, choice: &Choice) {
        let possible = plan.options.iter().find(|one| one.engine == choice.engine);
        let (Some(possible), Some(tiers), Some(tokens)) = (possible, &self.tiers, &plan.tokens)
        else {
            return;
        };
        let Some(engine) = self.engines.get(choice.engine) else { return };
        let factor = possible.found.block_tokens / plan.unit;
        if choice.loaded == [0; 3] || factor == 0 {
            return;
        }
        let taken = Taken {
            model: plan.meant.model.clone(),
            lora: plan.meant.lora.clone(),
            salt: plan.salt.clone(),
            tokens: Arc::clone(tokens),
            instance: engine.spec.instance.clone(),
            node: engine.spec.node.clone(),
            device_blocks: possible.device / u32::try_from(factor).unwrap_or(u32::MAX),
            prefill_block_ms: engine.learned().prefill(possible.found.block_tokens).linear_ms,
            reserve: reserve(choice),
        };
        let (tiers, deadline) = (Arc::clone(tiers), self.tiers_deadline);
        self.tasks.spawn("tell tiers", async move {
            match timeout(deadline.saturating_mul(TELL_PATIENCE), tiers.taken(taken)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%error, "tiers not told"),
                Err(_elapsed) => debug!("tiers not told in time"),
            }
        });
    }

    /// The first token of a request that streams has come.
    pub(super) fn learn(&self, choice: &Choice, unit: usize, ms: f64) {
        self.metrics.ttft_seconds.observe(ms / 1e3);
        if ms > 0.0 {
            self.metrics.ttft_ratio.observe(choice.ttft_ms / ms);
        }
        let Some(engine) = self.engines.get(choice.engine) else { return };
        // What was loaded, or waited for, says nothing of how long computing takes.
        let alone = choice.loaded == [0; 3] && choice.ttft_ms <= choice.prefill_ms;
        if alone {
            engine.learn(f64::from(choice.computed) * as_blocks(unit), ms);
        }
    }
}

/// How long what an engine will load is counted: until its first token, unless that is late.
fn reserve(choice: &Choice) -> Duration {
    let expected = Duration::try_from_secs_f64(choice.ttft_ms / 1e3).unwrap_or_default();
    expected.clamp(RESERVE_LEAST, RESERVE_MOST)
}

impl Plan {
    /// Tokens in a block.
    pub(super) fn unit(&self) -> usize {
        self.unit
    }
}
