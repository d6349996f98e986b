//! Messages of the router contract to what is asked, and answers to messages.

use std::time::Duration;

use kvstrata_proto::router::v1 as wire;
use kvstrata_tiers::{
    error::{Error, Result},
    tier::Tier,
};
use tokio::time::Instant;

use crate::{
    advice::{
        Advised, Among, Answer, Asked, Candidate, Contest, Found, Outcome, Piece, Prefix, Prompt,
        Question, Scored,
    },
    costs::{Locality, Report, TierCost, TierState},
    flow::{count, millis, period},
    id::ReservationId,
    limits::{
        LOOKUP_HASHES_MAX, RESERVATION_TTL_MAX, ROUTER_CANDIDATES_MAX, ROUTER_DEADLINE_DEFAULT,
        ROUTER_DEADLINE_MAX, ROUTER_LOADS_MAX, ROUTER_PROMPTS_MAX, ROUTER_TOKENS_MAX,
    },
    node::Node,
    schemes::Scheme,
    score::{Mode, Prefill, Settings, Weights},
};

use super::super::convert::label;

/// What a lookup asks.
///
/// # Errors
/// `Invalid` naming the field, the value and the range.
pub(super) fn question(request: wire::LookupRequest) -> Result<Question> {
    at_most("prompts", request.prompts.len(), 1, ROUTER_PROMPTS_MAX)?;
    let prompts: Vec<Prompt> = request.prompts.into_iter().map(prompt).collect::<Result<_>>()?;
    let hashes: usize = prompts.iter().map(|prompt| prompt.asked.len()).sum();
    at_most("prompts: hashes and tokens in all", hashes, 0, ROUTER_TOKENS_MAX)?;
    Ok(Question {
        prompts,
        candidates: candidates("instances", request.instances, 0)?,
        prefill: prefill("prefill", request.prefill)?,
        prefetch: request.prefetch,
        deadline: deadline(request.deadline_ms)?,
    })
}

/// What a score asks.
///
/// # Errors
/// `Invalid` naming the field, the value and the range.
pub(super) fn contest(request: wire::ScoreRequest) -> Result<Contest> {
    let settings = settings(&request)?;
    let temperature = number("temperature", request.temperature)?;
    let reserve = Duration::from_millis(u64::from(request.reserve_ms));
    if reserve > RESERVATION_TTL_MAX {
        return Err(Error::invalid(format!(
            "reserve_ms: {} given, 0 to {} allowed",
            request.reserve_ms,
            RESERVATION_TTL_MAX.as_millis()
        )));
    }
    let given = request.prompt.ok_or_else(|| Error::invalid("prompt: nothing given, required"))?;
    Ok(Contest {
        prompt: prompt(given)?,
        candidates: candidates("candidates", request.candidates, 1)?,
        prefill: prefill("prefill", request.prefill)?,
        settings,
        temperature,
        seed: request.seed,
        prefetch: request.prefetch,
        reserve,
        deadline: deadline(request.deadline_ms)?,
    })
}

fn settings(request: &wire::ScoreRequest) -> Result<Settings> {
    let default = Settings::default();
    let or = |field, given: Option<f64>, default| given.map_or(Ok(default), |it| number(field, it));
    let mode = match request.mode() {
        wire::ScoreMode::Unspecified | wire::ScoreMode::Timed => Mode::Timed,
        wire::ScoreMode::DeviceOnly => Mode::DeviceOnly,
        wire::ScoreMode::Constants => Mode::Constants(match &request.weights {
            None => Weights::DYNAMO,
            Some(given) => Weights {
                dram: number("weights.dram", given.dram)?,
                nvme: number("weights.nvme", given.nvme)?,
                object: number("weights.object", given.object)?,
            },
        }),
    };
    Ok(Settings {
        overlap_score_weight: or(
            "overlap_score_weight",
            request.overlap_score_weight,
            default.overlap_score_weight,
        )?,
        device_credit: or("device_credit", request.device_credit, default.device_credit)?,
        mode,
        parallel_loads: request.parallel_loads,
    })
}

/// A prompt.
///
/// # Errors
/// `Invalid` naming the field, the value and the range.
pub(super) fn prompt(given: wire::Prompt) -> Result<Prompt> {
    let scheme = given.hash_scheme();
    let among = match (given.namespace_id.is_empty(), given.model.is_empty()) {
        (false, _) => Among::Namespace(given.namespace_id),
        (true, false) => Among::Model(given.model),
        (true, true) => {
            return Err(Error::invalid("prompt.model: nothing given, or namespace_id required"));
        }
    };
    let kinds = [given.hashes.is_empty(), given.hashes64.is_empty(), given.token_ids.is_empty()];
    if kinds.iter().filter(|is_empty| !**is_empty).count() != 1 {
        return Err(Error::invalid(
            "prompt: exactly one of hashes, hashes64 and token_ids required",
        ));
    }
    let asked = if !given.token_ids.is_empty() {
        let (tokens, lora_name) = (given.token_ids, label("prompt.lora_name", given.lora_name)?);
        at_most("prompt.token_ids", tokens.len(), 1, ROUTER_TOKENS_MAX)?;
        Asked::Tokens {
            tokens,
            lora_name,
            cache_salt: label("prompt.cache_salt", given.cache_salt)?,
        }
    } else if !given.hashes64.is_empty() {
        at_most("prompt.hashes64", given.hashes64.len(), 1, LOOKUP_HASHES_MAX)?;
        let (scheme, chained) = scheme_of(scheme)?;
        Asked::Hashes64 { scheme, chained, hashes: given.hashes64 }
    } else {
        if !matches!(scheme, wire::HashScheme::Unspecified | wire::HashScheme::Native) {
            let name = scheme.as_str_name();
            let text = format!("prompt.hash_scheme: {name} given with hashes: give hashes64");
            return Err(Error::invalid(text));
        }
        let least = kvstrata_tiers::block::HASH_BYTES_MIN;
        let hash_bytes = usize::try_from(given.hash_bytes).unwrap_or(usize::MAX).max(least);
        at_most("prompt.hashes", given.hashes.len() / hash_bytes, 1, LOOKUP_HASHES_MAX)?;
        Asked::Hashes { packed: given.hashes, hash_bytes: given.hash_bytes }
    };
    let (block_tokens, total_blocks) = (given.block_tokens, given.total_blocks);
    Ok(Prompt { among, block_tokens, asked, total_blocks })
}

/// A scheme of hashes of 64 bits, and whether they are chained already where that makes a difference.
fn scheme_of(given: wire::HashScheme) -> Result<(Scheme, bool)> {
    match given {
        wire::HashScheme::VllmU64 => Ok((Scheme::VllmU64, true)),
        wire::HashScheme::SglangI64 => Ok((Scheme::SglangI64, true)),
        wire::HashScheme::DynamoLocal => Ok((Scheme::Dynamo, false)),
        wire::HashScheme::DynamoSequence => Ok((Scheme::Dynamo, true)),
        wire::HashScheme::LlmD => Ok((Scheme::LlmD, true)),
        wire::HashScheme::Unspecified | wire::HashScheme::Native => Err(Error::invalid(format!(
            "prompt.hash_scheme: {} given with hashes64, one of 64 bits required",
            given.as_str_name()
        ))),
    }
}

/// The scheme by which blocks are told to a watcher; none for the engine's own hashes.
pub(super) fn watch_scheme(given: wire::HashScheme) -> Result<Option<Scheme>> {
    match given {
        wire::HashScheme::Unspecified | wire::HashScheme::Native => Ok(None),
        other => scheme_of(other).map(|(scheme, _)| Some(scheme)),
    }
}

fn candidates(field: &str, given: Vec<wire::Candidate>, least: usize) -> Result<Vec<Candidate>> {
    at_most(field, given.len(), least, ROUTER_CANDIDATES_MAX)?;
    let of = |(at, given): (usize, wire::Candidate)| {
        let name = |what: &str| format!("{field}[{at}].{what}");
        if given.instance.is_empty() && given.node.is_empty() {
            let text = format!("{field}[{at}]: neither instance nor node given, one required");
            return Err(Error::invalid(text));
        }
        Ok(Candidate {
            instance: label(&name("instance"), given.instance)?,
            node: label(&name("node"), given.node)?,
            zone: label(&name("zone"), given.zone)?,
            device_blocks: given.device_blocks,
            decode_blocks: number(&name("decode_blocks"), given.decode_blocks)?,
            queue_ms: number(&name("queue_ms"), given.queue_ms)?,
            prefill: prefill(&name("prefill"), given.prefill)?,
        })
    };
    given.into_iter().enumerate().map(of).collect()
}

fn prefill(field: &str, given: Option<wire::Prefill>) -> Result<Option<Prefill>> {
    let Some(wire::Prefill { linear_ms, quadratic_ms }) = given else { return Ok(None) };
    Ok(Some(Prefill {
        linear_ms: number(&format!("{field}.linear_ms"), linear_ms)?,
        quadratic_ms: number(&format!("{field}.quadratic_ms"), quadratic_ms)?,
    }))
}

/// A number that is neither negative nor beyond all bounds.
fn number(field: &str, given: f64) -> Result<f64> {
    if given.is_finite() && given >= 0.0 {
        return Ok(given);
    }
    Err(Error::invalid(format!("{field}: {given} given, a finite number from 0 on required")))
}

pub(super) fn at_most(field: &str, given: usize, least: usize, most: usize) -> Result<()> {
    if (least..=most).contains(&given) {
        return Ok(());
    }
    Err(Error::invalid(format!("{field}: {given} given, {least} to {most} allowed")))
}

fn deadline(given_ms: u32) -> Result<Instant> {
    let (default, max) = (ROUTER_DEADLINE_DEFAULT, ROUTER_DEADLINE_MAX);
    Ok(Instant::now() + period("deadline_ms", given_ms, default, max)?)
}

/// Loads that are expected of this node: those of other holders are no concern of it.
///
/// # Errors
/// `Invalid` naming the field, the value and the range.
pub(super) fn held(node: &Node, given: &[wire::HeldBytes]) -> Result<Vec<(Tier, u64)>> {
    at_most("loads", given.len(), 1, ROUTER_LOADS_MAX)?;
    let load = |(at, load): (usize, &wire::HeldBytes)| {
        let tier = tier_of(&format!("loads[{at}].tier"), load.tier())?;
        let is_ours = load.holder.is_empty() || load.holder == node.name;
        Ok(is_ours.then_some((tier, load.bytes)))
    };
    given.iter().enumerate().map(load).filter_map(Result::transpose).collect()
}

/// How long loads took from this node.
///
/// # Errors
/// `Invalid` naming the field, the value and the range.
pub(super) fn reports(node: &Node, given: &[wire::LoadReport]) -> Result<Vec<Report>> {
    at_most("loads", given.len(), 1, ROUTER_LOADS_MAX)?;
    let report = |(at, load): (usize, &wire::LoadReport)| {
        let name = |what: &str| format!("loads[{at}].{what}");
        let time = |what: &str, given: f64| -> Result<Duration> {
            let ms = number(&name(what), given)?;
            Ok(Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX))
        };
        let id = &load.reservation_id;
        let reservation = (!id.is_empty())
            .then(|| ReservationId::read(&name("reservation_id"), id))
            .transpose()?;
        let report = Report {
            tier: tier_of(&name("tier"), load.tier())?,
            locality: locality_of(&name("locality"), load.locality())?,
            bytes: load.bytes,
            predicted: time("predicted_ms", load.predicted_ms)?,
            actual: time("actual_ms", load.actual_ms)?,
            reservation,
        };
        let is_ours = load.holder.is_empty() || load.holder == node.name;
        Ok(is_ours.then_some(report))
    };
    given.iter().enumerate().map(report).filter_map(Result::transpose).collect()
}

fn tier_of(field: &str, given: wire::Tier) -> Result<Tier> {
    match given {
        wire::Tier::Dram => Ok(Tier::Dram),
        wire::Tier::Nvme => Ok(Tier::Nvme),
        wire::Tier::Object => Ok(Tier::Object),
        wire::Tier::Unspecified => {
            Err(Error::invalid(format!("{field}: none given; dram, nvme or object required")))
        }
    }
}

fn locality_of(field: &str, given: wire::Locality) -> Result<Locality> {
    match given {
        wire::Locality::SharedMemory => Ok(Locality::SharedMemory),
        wire::Locality::SameNode => Ok(Locality::SameNode),
        wire::Locality::SameZone => Ok(Locality::SameZone),
        wire::Locality::Remote => Ok(Locality::Remote),
        wire::Locality::Unspecified => {
            Err(Error::invalid(format!("{field}: none given, that of the answer required")))
        }
    }
}

/// The answer to a lookup; who says it, when, and what tiers cost is added by the caller.
pub(super) fn lookup(node: &Node, answer: Answer) -> wire::LookupResponse {
    let answers = answer.prompts.into_iter();
    wire::LookupResponse {
        answers: answers.map(|(found, advised)| prompt_answer(node, &found, advised)).collect(),
        partial: answer.partial,
        ..wire::LookupResponse::default()
    }
}

fn prompt_answer(node: &Node, found: &Found, advised: Vec<Advised>) -> wire::PromptAnswer {
    // Namespaces that have nothing are left out; instances name those that are left.
    let mut places = Vec::with_capacity(found.prefixes.len());
    let mut prefixes = Vec::new();
    for known in &found.prefixes {
        places.push(count(prefixes.len()));
        if known.blocks() > 0 {
            prefixes.push(prefix(node, found, known));
        }
    }
    let instance = |advised: Advised| {
        let place = places.get(advised.offer.prefix).copied().unwrap_or_default();
        instance(node, found, advised, place)
    };
    wire::PromptAnswer {
        total_blocks: found.total_blocks,
        prefixes,
        instances: advised.into_iter().map(instance).collect(),
        unresolved_blocks: found.unresolved_blocks,
    }
}

/// What a member that has something of what was found is called.
fn holder(node: &Node, found: &Found, index: u32) -> String {
    found.others.name(index).unwrap_or(&node.name).to_owned()
}

fn prefix(node: &Node, found: &Found, prefix: &Prefix) -> wire::Prefix {
    let run = |(at, run): (usize, &kvstrata_tiers::tier::Run)| wire::Run {
        start: run.start,
        end: run.end,
        tier: tier(run.tier).into(),
        holder: holder(node, found, prefix.holder(at)),
        bytes: run.bytes,
    };
    wire::Prefix {
        namespace_id: prefix.namespace.id().as_bytes().to_vec().into(),
        blocks: prefix.blocks(),
        runs: prefix.runs.iter().enumerate().map(run).collect(),
        block_tokens: prefix.namespace.block_tokens(),
        block_bytes: prefix.namespace.layout().block_bytes(),
    }
}

fn instance(node: &Node, found: &Found, advised: Advised, prefix: u32) -> wire::InstanceAnswer {
    let break_even = advised.break_even.map(Option::unwrap_or_default);
    let offer = advised.offer;
    wire::InstanceAnswer {
        instance: advised.instance,
        prefix,
        blocks: Some(by_tier(offer.by_tier())),
        segments: offer.pieces.iter().map(|piece| segment(node, found, piece)).collect(),
        found_blocks: offer.blocks(),
        best_blocks: advised.best_blocks,
        load_ms: advised.load_ms,
        saved_ms: advised.saved_ms,
        credit_blocks: advised.credit_blocks,
        break_even: Some(by_tier(break_even)),
        node: offer.host,
    }
}

fn by_tier([dram, nvme, object]: [u32; 3]) -> wire::TierBlocks {
    wire::TierBlocks { dram, nvme, object }
}

fn segment(node: &Node, found: &Found, piece: &Piece) -> wire::Segment {
    wire::Segment {
        start: piece.start,
        end: piece.end,
        tier: tier(piece.tier).into(),
        holder: holder(node, found, piece.holder),
        locality: locality(piece.locality).into(),
        bytes: piece.bytes,
        est_load_ms: piece.cost.ms(piece.blocks()),
        queue_ms: piece.cost.queue_ms,
        setup_ms: piece.cost.setup_ms,
        block_ms: piece.cost.block_ms,
    }
}

/// The answer to a score; who says it and when is added by the caller.
pub(super) fn scores(candidates: &[Candidate], outcome: Outcome) -> wire::ScoreResponse {
    let named = candidates.iter().zip(outcome.scored);
    let taken = candidates.get(outcome.taken);
    let reserved = outcome.reserved;
    wire::ScoreResponse {
        instance: taken.map(|taken| taken.instance.clone()).unwrap_or_default(),
        taken: count(outcome.taken),
        scored: named.map(|(candidate, scored)| score(candidate, &scored)).collect(),
        reservation_id: reserved.map(|id| id.as_bytes().to_vec().into()).unwrap_or_default(),
        total_blocks: outcome.total_blocks,
        partial: outcome.partial,
        ..wire::ScoreResponse::default()
    }
}

fn score(candidate: &Candidate, scored: &Scored) -> wire::Scored {
    let assessed = scored.assessment;
    wire::Scored {
        instance: candidate.instance.clone(),
        found_blocks: assessed.found_blocks,
        best_blocks: assessed.best_blocks,
        load_ms: assessed.load_ms,
        saved_ms: assessed.saved_ms,
        credit_blocks: assessed.credit_blocks,
        cost: assessed.cost,
        ttft_ms: assessed.ttft_ms,
        score: assessed.score,
        probability: scored.probability,
    }
}

/// What a tier costs.
pub(super) fn tier_cost(node: &Node, cost: &TierCost) -> wire::TierCost {
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    wire::TierCost {
        node: node.name.clone(),
        tier: tier(cost.tier).into(),
        locality: locality(cost.locality).into(),
        bandwidth: cost.bandwidth,
        setup_ms: ms(cost.setup),
        queue_ms: ms(cost.queue),
        queued_bytes: cost.queued_bytes,
        in_flight: cost.in_flight,
        state: match cost.state {
            TierState::Ok => wire::TierState::Ok,
            TierState::Degraded => wire::TierState::Degraded,
            TierState::Down => wire::TierState::Down,
        }
        .into(),
        sample_age_ms: millis(cost.sample_age.unwrap_or_default()),
        assumed: cost.sample_age.is_none(),
    }
}

fn tier(tier: Tier) -> wire::Tier {
    match tier {
        Tier::Dram => wire::Tier::Dram,
        Tier::Nvme => wire::Tier::Nvme,
        Tier::Object => wire::Tier::Object,
    }
}

fn locality(locality: Locality) -> wire::Locality {
    match locality {
        Locality::SharedMemory => wire::Locality::SharedMemory,
        Locality::SameNode => wire::Locality::SameNode,
        Locality::SameZone => wire::Locality::SameZone,
        Locality::Remote => wire::Locality::Remote,
    }
}
