//! From arguments to a simulated cluster, and where the defaults come from.

use std::{fmt::Display, str::FromStr, time::Duration};

use bytesize::ByteSize;
use kvstrata_tiers::{
    error::{Error, Result},
    tier::Tier,
};
use serde::Serialize;

use super::{Args, block_bytes, refuse};
use crate::{
    score::{Prefill, Weights},
    sim::cluster::{Loading, Rate, Setup, TierSetup},
    trace::Trace,
};

/// The model whose prefill is known.
pub(super) const MODEL: &str = "qwen3-32b";
/// Tokens that two H100 prefill of it in a second: 15,926, the peak that llm-d's router measured for its
/// decision to pull KV from a peer (llm-d-router, issue 2443), 51 % of what the two can compute in bf16.
const PREFILL_RATE: f64 = 15_926.0;
/// Where attention takes as long as all the rest: parameters / (layers x width of attention), 32.8e9 / (64 x
/// 8192) tokens, for a prompt of `n` tokens costs `2 N n + 2 L d n^2` operations (Kaplan et al. 2020, 2.1).
const PREFILL_DOUBLES_AT: f64 = 62_500.0;

/// What a node has, and the network between nodes.
const PLACES: [&str; 4] = ["dram", "nvme", "object", "network"];
/// Bytes a second: dram as one PCIe 5.0 slot of 16 lanes, which the engines of a node share, nvme of one fast drive,
/// object and network of 100 Gbit/s, of which many requests to a store get a third.
const BANDWIDTH: [f64; 4] = [50e9, 6e9, 4e9, 11e9];
/// Milliseconds to the first byte.
const SETUP_MS: [f64; 4] = [1.0, 2.0, 50.0, 1.0];

/// `NAME=VALUE`, for a tier or the network.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Named<T> {
    /// Index in [`PLACES`].
    place: usize,
    value: T,
}

impl<T: FromStr<Err = Error>> FromStr for Named<T> {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let place = |name: &str| PLACES.iter().position(|place| *place == name);
        let (place, value) = text
            .split_once('=')
            .and_then(|(name, value)| Some((place(name)?, value)))
            .ok_or_else(|| {
                let allowed = format!("NAME=VALUE allowed, of {}", PLACES.join(", "));
                refuse("place", text, &allowed)
            })?;
        Ok(Self { place, value: value.parse()? })
    }
}

/// Bytes a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bandwidth(f64);

impl FromStr for Bandwidth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let allowed = "a size for each second allowed, such as 6GB";
        let size: ByteSize =
            text.parse().map_err(|why: String| refuse("bandwidth", text, allowed).because(why))?;
        #[expect(clippy::cast_precision_loss, reason = "a rate")]
        let bytes = size.as_u64() as f64;
        if bytes > 0.0 { Ok(Self(bytes)) } else { Err(refuse("bandwidth", text, allowed)) }
    }
}

/// Milliseconds to the first byte.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SetupTime(f64);

impl FromStr for SetupTime {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let time = humantime::parse_duration(text).map_err(|source| {
            refuse("setup", text, "a time allowed, such as 2ms").because(source)
        })?;
        Ok(Self(ms(time)))
    }
}

/// What a block of a tier counts, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight(f64);

impl FromStr for Weight {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let weight = text.parse().ok().filter(|weight| (0.0..=1.0).contains(weight));
        weight.map(Self).ok_or_else(|| refuse("weights", text, "0 to 1 allowed"))
    }
}

/// `defaults`, with what was `given` instead.
fn places<T: Copy>(defaults: [f64; 4], given: &[Named<T>], value: fn(T) -> f64) -> [f64; 4] {
    let mut places = defaults;
    for named in given {
        if let Some(place) = places.get_mut(named.place) {
            *place = value(named.value);
        }
    }
    places
}

/// Milliseconds.
pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// The arguments in numbers, for reports.
#[derive(Debug, Serialize)]
pub(super) struct Facts {
    pub(super) model: &'static str,
    pub(super) workers: u32,
    pub(super) workers_per_node: u32,
    pub(super) prefill_tokens_per_s: f64,
    /// 0: never.
    pub(super) prefill_doubles_at_tokens: f64,
    pub(super) decode_tokens_per_s: f64,
    pub(super) slots: u32,
    pub(super) device_bytes: u64,
    /// Empty if there are no tiers.
    pub(super) tiers: Vec<String>,
    /// dram, nvme, object, network.
    pub(super) bandwidth_bytes_per_s: [f64; 4],
    pub(super) setup_ms: [f64; 4],
    pub(super) decode_weight: f64,
    pub(super) weights: [f64; 3],
    pub(super) load_all: bool,
    pub(super) report_ms: f64,
    pub(super) seed: u64,
}

/// What the arguments say, whatever the trace.
///
/// # Errors
/// `Invalid`, naming field, value and what is allowed.
pub(super) fn facts(args: &Args) -> Result<Facts> {
    let known = args.model.name() == MODEL;
    let default = known.then_some((PREFILL_RATE, PREFILL_DOUBLES_AT));
    let given = args.prefill_rate.map(|rate| (rate, args.prefill_doubles_at.unwrap_or(0.0)));
    let (prefill_tokens_per_s, prefill_doubles_at_tokens) = given.or(default).ok_or_else(|| {
        let needed = "--prefill-rate and --prefill-doubles-at needed: prefill is known of \
                      qwen3-32b only";
        refuse("model", args.model, needed)
    })?;
    positive("prefill rate", prefill_tokens_per_s)?;
    positive("decode rate", args.decode_rate)?;
    if !(prefill_doubles_at_tokens.is_finite() && prefill_doubles_at_tokens >= 0.0) {
        return Err(refuse("prefill doubles at", prefill_doubles_at_tokens, "0 or more allowed"));
    }
    let tiers = args.tiers.iter().filter(|_| !args.no_tiers);
    let Weights { dram, nvme, object } = Weights::DYNAMO;
    let [dram, nvme, object, _] =
        places([dram, nvme, object, 0.0], &args.weights, |Weight(weight)| weight);
    Ok(Facts {
        model: args.model.name(),
        workers: args.workers,
        workers_per_node: args.workers_per_node,
        prefill_tokens_per_s,
        prefill_doubles_at_tokens,
        decode_tokens_per_s: args.decode_rate,
        slots: args.slots,
        device_bytes: args.device.as_u64(),
        tiers: tiers.map(|tier| format!("{} {}", tier.name, tier.capacity)).collect(),
        bandwidth_bytes_per_s: places(BANDWIDTH, &args.bandwidth, |Bandwidth(bytes)| bytes),
        setup_ms: places(SETUP_MS, &args.setup, |SetupTime(ms)| ms),
        decode_weight: args.decode_weight,
        weights: [dram, nvme, object],
        load_all: args.load_all,
        report_ms: ms(args.report.into()),
        seed: args.seed,
    })
}

fn positive(field: &str, value: impl Into<f64> + Display + Copy) -> Result<()> {
    let number: f64 = value.into();
    let allowed = number.is_finite() && number > 0.0;
    if allowed { Ok(()) } else { Err(refuse(field, value, "above 0 allowed")) }
}

/// The cluster for `trace`.
///
/// # Errors
/// As [`facts`].
pub(super) fn of(args: &Args, trace: &Trace, speedup: f64) -> Result<Setup> {
    let facts = facts(args)?;
    let bytes = block_bytes(args, trace);
    let linear_ms = 1000.0 * f64::from(trace.block_tokens()) / facts.prefill_tokens_per_s;
    let doubles_at = facts.prefill_doubles_at_tokens / f64::from(trace.block_tokens());
    let quadratic_ms = if doubles_at > 0.0 { linear_ms / doubles_at } else { 0.0 };
    let mut tiers = [TierSetup::NONE; 3];
    for (setup, tier) in tiers.iter_mut().zip(Tier::ALL) {
        if let Some(asked) = args.tiers.iter().find(|asked| asked.name == tier.name())
            && !args.no_tiers
        {
            let capacity_blocks = asked.capacity.blocks(trace, Some(bytes))?;
            *setup = TierSetup { capacity_blocks, ..rates(&facts, tier, bytes) };
        }
    }
    let setup = Setup {
        workers: args.workers,
        workers_per_node: args.workers_per_node,
        prefill: Prefill { linear_ms, quadratic_ms },
        device_blocks: u32::try_from(facts.device_bytes / bytes.max(1)).unwrap_or(u32::MAX),
        slots: args.slots,
        decode_token_ms: 1000.0 / args.decode_rate,
        tiers,
        loading: if args.load_all { Loading::All } else { Loading::Paying },
        report_ms: facts.report_ms,
        decode_weight: args.decode_weight,
        weights: {
            let [dram, nvme, object] = facts.weights;
            Weights { dram, nvme, object }
        },
        speedup,
        seed: args.seed,
    };
    setup.validate()?;
    Ok(setup)
}

/// How fast a block of `tier` is read.
fn rates(facts: &Facts, tier: Tier, block_bytes: u64) -> TierSetup {
    let [.., network_bytes] = facts.bandwidth_bytes_per_s;
    let [.., network_ms] = facts.setup_ms;
    let number = Tier::ALL.iter().position(|known| *known == tier).unwrap_or_default();
    let of = |places: [f64; 4]| places.get(number).copied().unwrap_or(1.0);
    let (bytes_per_s, setup_ms) = (of(facts.bandwidth_bytes_per_s), of(facts.setup_ms));
    #[expect(clippy::cast_precision_loss, reason = "bytes of a block")]
    let block_ms = |bytes_per_s: f64| 1000.0 * block_bytes as f64 / bytes_per_s;
    TierSetup {
        capacity_blocks: 0,
        local: Rate { setup_ms, block_ms: block_ms(bytes_per_s) },
        remote: Rate {
            setup_ms: setup_ms + network_ms,
            block_ms: block_ms(bytes_per_s.min(network_bytes)),
        },
    }
}
