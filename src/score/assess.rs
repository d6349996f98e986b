//! Credit and cost of one candidate.

use kvstrata_tiers::tier::Tier;

use super::load::{Prefill, Segment};

/// What a block of a tier is worth to a router that knows tiers by constants: blocks of credit, 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// A block in dram.
    pub dram: f64,
    /// A block on nvme.
    pub nvme: f64,
    /// A block in the object store.
    pub object: f64,
}

impl Weights {
    /// What Dynamo ships with: 0.75 for host memory, 0.25 for disks and what is external.
    pub const DYNAMO: Self = Self { dram: 0.75, nvme: 0.25, object: 0.25 };

    /// The weight of `tier`.
    #[must_use]
    pub fn of(self, tier: Tier) -> f64 {
        match tier {
            Tier::Dram => self.dram,
            Tier::Nvme => self.nvme,
            Tier::Object => self.object,
        }
    }
}

/// How tiers count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mode {
    /// Not at all.
    DeviceOnly,
    /// By constants.
    Constants(Weights),
    /// By the time that they save now.
    Timed,
}

/// How candidates are compared.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// What a block to prefill weighs against a block to decode.
    pub overlap_score_weight: f64,
    /// Blocks of credit for a block on the device, 0 to 1.
    pub device_credit: f64,
    /// How tiers count.
    pub mode: Mode,
    /// Whether the engine loads from several sources at once; otherwise one after another.
    pub parallel_loads: bool,
}

impl Default for Settings {
    /// One for one, by time, one source after another.
    fn default() -> Self {
        Self {
            overlap_score_weight: 1.0,
            device_credit: 1.0,
            mode: Mode::Timed,
            parallel_loads: false,
        }
    }
}

/// An engine that could take a prompt.
#[derive(Debug, Clone, Copy)]
pub struct Candidate<'a> {
    /// Leading blocks of the prompt on its device.
    pub device_blocks: u32,
    /// Blocks of the requests that it decodes.
    pub decode_blocks: f64,
    /// Milliseconds until it would begin.
    pub queue_ms: f64,
    /// How long it takes to prefill.
    pub prefill: Prefill,
    /// What it could load, in order, from the end of the device's prefix on, without gaps.
    pub segments: &'a [Segment],
}

/// What a candidate would be like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Assessment {
    /// Blocks behind the device's prefix that some tier has.
    pub found_blocks: u32,
    /// How many of them to load: those that save most time.
    pub best_blocks: u32,
    /// Milliseconds to load these.
    pub load_ms: f64,
    /// Milliseconds that they save against prefilling; never below 0.
    pub saved_ms: f64,
    /// Blocks of prefill that the tiers take off the cost, at most `found_blocks`.
    pub credit_blocks: f64,
    /// The lower, the better: see the [module](super).
    pub cost: f64,
    /// Milliseconds to the first token: queue, load, and prefill of the rest.
    pub ttft_ms: f64,
    /// The share of the prompt that needs no prefill, credit counted, 0 to 1; knows no load.
    pub score: f64,
}

/// Assesses a candidate for a prompt of `prompt_blocks` blocks. Blocks beyond the prompt do not count.
#[must_use]
pub fn assess(prompt_blocks: u32, candidate: &Candidate<'_>, settings: &Settings) -> Assessment {
    let device = candidate.device_blocks.min(prompt_blocks);
    let missing = prompt_blocks - device;
    let found = candidate.segments.iter().fold(0_u32, |sum, s| sum.saturating_add(s.blocks));
    let found = found.min(missing);
    let best = match settings.mode {
        Mode::DeviceOnly => Best::default(),
        Mode::Timed => best(device, found, candidate, settings.parallel_loads, Stop::AtBest),
        // It would load all that it counts.
        Mode::Constants(_) => best(device, found, candidate, settings.parallel_loads, Stop::AtEnd),
    };
    let credit = match settings.mode {
        Mode::DeviceOnly => 0.0,
        Mode::Constants(weights) => constant_credit(found, candidate.segments, weights),
        Mode::Timed => {
            let block_ms = candidate.prefill.mean_ms(device, prompt_blocks);
            let credit = if block_ms > 0.0 { best.saved_ms / block_ms } else { 0.0 };
            credit.clamp(0.0, f64::from(best.blocks))
        }
    };
    let total = f64::from(prompt_blocks);
    let raw = total - settings.device_credit * f64::from(device) - credit;
    let ready = f64::from(device) + credit;
    Assessment {
        found_blocks: found,
        best_blocks: best.blocks,
        load_ms: best.load_ms,
        saved_ms: best.saved_ms.max(0.0),
        credit_blocks: credit,
        cost: settings.overlap_score_weight * raw.max(0.0) + candidate.decode_blocks,
        ttft_ms: candidate.queue_ms
            + best.load_ms
            + candidate.prefill.ms(device.saturating_add(best.blocks), prompt_blocks),
        score: if total > 0.0 { (ready / total).clamp(0.0, 1.0) } else { 0.0 },
    }
}

fn constant_credit(found: u32, segments: &[Segment], weights: Weights) -> f64 {
    let mut left = found;
    let mut credit = 0.0;
    for segment in segments {
        let blocks = segment.blocks.min(left);
        left -= blocks;
        credit += weights.of(segment.tier) * f64::from(blocks);
    }
    credit
}

/// How many blocks to load, and what that takes.
#[derive(Debug, Clone, Copy, Default)]
struct Best {
    blocks: u32,
    load_ms: f64,
    saved_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// Where most time is saved.
    AtBest,
    /// Where there is no more.
    AtEnd,
}

/// Goes over the ends of the segments: within one, what is saved is a convex function of the number of
/// blocks (prefill times are convex, loads are lines), so that it is greatest at an end. If loads run at
/// the same time, it may also be where this source begins to take longer than the others.
fn best(device: u32, found: u32, candidate: &Candidate<'_>, parallel: bool, stop: Stop) -> Best {
    let mut loads: Vec<(u32, f64)> = Vec::new();
    let mut best = Best::default();
    let mut end = 0_u32;
    for segment in candidate.segments {
        let blocks = segment.blocks.min(found - end);
        if blocks == 0 {
            continue;
        }
        let turn = if parallel { turn(&loads, segment, blocks) } else { 1 };
        for step in [1, turn, turn.saturating_add(1).min(blocks), blocks] {
            let load_ms = total(&loads, segment, step, parallel);
            let to = device.saturating_add(end + step);
            let saved_ms = candidate.prefill.ms(device, to) - load_ms;
            if saved_ms > best.saved_ms || stop == Stop::AtEnd {
                best = Best { blocks: end + step, load_ms, saved_ms };
            }
        }
        add(&mut loads, segment, blocks);
        end += blocks;
    }
    best
}

/// How many blocks of `segment` take at most as long as the longest load of the others, 1 to `blocks`.
fn turn(loads: &[(u32, f64)], segment: &Segment, blocks: u32) -> u32 {
    let others = total(loads, segment, 0, true);
    let (mut least, mut most) = (1, blocks);
    // Loads grow with the blocks: halving finds the last one that is in time.
    while least < most {
        let middle = most - (most - least) / 2;
        if own(loads, segment, middle) <= others {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    least
}

/// Milliseconds of what is loaded from the source of `segment`, with `blocks` more.
fn own(loads: &[(u32, f64)], segment: &Segment, blocks: u32) -> f64 {
    match loads.iter().find(|(source, _)| *source == segment.source) {
        Some((_, ms)) => ms + f64::from(blocks) * segment.cost.block_ms,
        None => segment.cost.ms(blocks),
    }
}

/// Milliseconds of all loads, with `blocks` more of `segment`.
fn total(loads: &[(u32, f64)], segment: &Segment, blocks: u32, parallel: bool) -> f64 {
    let others = loads.iter().filter(|(source, _)| *source != segment.source);
    let own = if blocks == 0 { 0.0 } else { own(loads, segment, blocks) };
    let all = others.map(|(_, ms)| *ms).chain([own]);
    if parallel { all.fold(0.0, f64::max) } else { all.sum() }
}

fn add(loads: &mut Vec<(u32, f64)>, segment: &Segment, blocks: u32) {
    let ms = own(loads, segment, blocks);
    match loads.iter_mut().find(|(source, _)| *source == segment.source) {
        Some((_, known)) => *known = ms,
        None => loads.push((segment.source, ms)),
    }
}
